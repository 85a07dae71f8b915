"""The experiments of Parakeet's users: its examples beside its own ExperimentBase, and what of it may be overridden.

``parakeet.json`` has the figures of Parakeet's ``experiment.py`` of 2021-11-19 (commit 8705a2a), whose loop ran the classes of
``parakeet_shapes.py`` on torch's CPU: paddle's ``set_device``, ``no_grad`` and ``get_rank`` and VisualDL's ``LogWriter`` were
stood in for by a few lines that do the same, ``valid`` was decorated with ``no_grad`` as in its examples. Under torch 2.13 ours
had the same numbers and weights, bit for bit, as long as its validations used random numbers. ``weights`` are the sums of the absolute values of each parameter.
"""

from __future__ import annotations

import json
import random
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from pipeline import ExperimentBase, GeneralTrainer
from pipeline.errors import StageError
from tests.stages.parakeet_shapes import shapes

FIGURES = json.loads(Path(__file__).with_name("parakeet.json").read_text(encoding="utf-8"))
# Processors round differently, and six steps of training make the differences larger.
near = partial(pytest.approx, rel=1e-3)
TRAINING = {"max_iteration": 6, "valid_interval": 2, "save_interval": 3, "lr": 0.01}


def shape(name: str) -> Any:
    """A class of ``parakeet_shapes.py`` whose training continues with the random numbers that follow a validation.

    Parakeet's validations use random numbers of the training, as its figures show. Ours put the generators back.
    """

    class Shape(shapes(ExperimentBase)[name]):  # type: ignore[misc]  # a class that a function has made
        drawn: tuple[Any, Tensor] | None = None

        def valid(self) -> None:
            super().valid()
            self.drawn = random.getstate(), torch.get_rng_state()

        def train_batch(self) -> None:
            if self.drawn:
                random.setstate(self.drawn[0])
                torch.set_rng_state(self.drawn[1])
            self.drawn = None
            super().train_batch()

    return Shape


def begun(cls: Any, output: str = "out", **training: Any) -> Any:
    """An experiment by hand that is set up, its generators seeded before."""
    torch.manual_seed(0)
    random.seed(0)
    args = Namespace(device="cpu", nprocs=1, output=output, checkpoint_path=None)
    experiment = cls({"training": {**TRAINING, **training}}, args)
    experiment.setup()
    return experiment


def numbers(folder: Path) -> dict[str, list[float]]:
    """Tag -> the values that an experiment by hand has reported."""
    reported: dict[str, list[float]] = {}
    for line in map(json.loads, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()):
        reported.setdefault(line["name"], []).append(line["value"])
    return reported


def files(folder: Path) -> dict[Path, bytes]:
    """The content of everything that was written, but for the log."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".log"]
    return {path.relative_to(folder): path.read_bytes() for path in paths}


@pytest.mark.parametrize("name", FIGURES)
def test_an_example_has_the_numbers_figures_and_weights_that_parakeet_has(name: str) -> None:
    experiment = begun(shape(name))
    experiment.resume_or_load()
    experiment.run()
    expected = FIGURES[name]["numbers"]
    figures = {tag.removeprefix("figure "): expected.pop(tag) for tag in list(expected) if tag.startswith("figure ")}
    assert numbers(Path("out")) == {tag: near(values) for tag, values in expected.items()}
    for tag, values in figures.items():
        paths = sorted(Path("out/visuals").glob(f"{tag}-*.png"))
        assert [float(path.read_text().split()[1]) for path in paths] == near(values)
    weights = [weight.abs().sum().item() for weight in experiment.model.parameters()]
    assert weights == near(FIGURES[name]["weights"])
    assert experiment.epoch == FIGURES[name]["epoch"]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", FIGURES)
def test_it_has_them_in_a_config_too(name: str) -> None:
    class Seeded(shape(name)):  # type: ignore[misc]  # a class that a function has made
        def setup_dataloader(self) -> None:
            torch.manual_seed(0)
            random.seed(0)
            super().setup_dataloader()

    runner = {"name": "train", "class": "train", "device": "cpu", "runner_class_path": Seeded, "max_steps": 6}
    runner |= {"valid_interval": 2, "print_interval": 1}
    config = {"hyper_parameters": {"training": {"lr": 0.01}}, "runner": [runner]}
    context = GeneralTrainer(config).run()
    weights = [weight.abs().sum().item() for weight in context["model"]["experiment"]["model"].parameters()]
    assert weights == near(FIGURES[name]["weights"])
    text = (context["run_dir"] / "train" / "metrics.jsonl").read_text(encoding="utf-8")
    lines = list(map(json.loads, text.splitlines()))
    for tag, values in FIGURES[name]["numbers"].items():
        event = "validate" if tag.startswith("valid/") else "train"
        found = [line[tag] for line in lines if line["event"] == event and tag in line]
        assert found == ([] if tag.startswith("figure ") else near(values))


def test_the_test_of_an_example_evaluates_the_checkpoint_in_its_folder() -> None:
    cls = shape("tacotron2_aishell3")
    begun(cls).run()
    experiment = begun(cls)
    experiment.resume_or_load()
    experiment.eval()
    experiment.close()
    found = [float(Path(f"out/eval_6/sentence_{number}.txt").read_text()) for number in range(5)]
    assert found == near(FIGURES["tacotron2_aishell3"]["eval"])


class KilledError(BaseException):
    """Stands for the end of the process."""


def killed_and_unbroken(cls: Any, ats: list[int], **training: Any) -> tuple[list[Any], list[Any]]:
    """What a training leaves that was killed at these iterations, and started again with other generators, and one that was not."""

    class Killed(cls):  # type: ignore[misc]
        at = 0

        def train_batch(self) -> None:
            super().train_batch()
            if self.iteration == self.at:
                raise KilledError

    ends: list[list[Any]] = []
    for output, kills in (("killed", ats), ("unbroken", [])):
        for at in (*kills, 0):
            experiment = begun(Killed, output, save_interval=1, **training)
            experiment.at = at
            if at:
                with pytest.raises(KilledError):
                    experiment.run()
            else:
                experiment.run()
        state = {name: weight.tolist() for name, weight in experiment.model.state_dict().items()}
        drawn = (random.random(), torch.rand(()).item())
        ends.append([state, experiment.iteration, experiment.epoch, drawn, files(Path(output))])
    return ends[0], ends[1]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", FIGURES)
def test_an_example_that_was_killed_goes_on_bit_for_bit(name: str) -> None:
    killed, unbroken = killed_and_unbroken(shapes(ExperimentBase)[name], [2, 3, 5, 6])
    assert killed == unbroken


# What may be overridden.


class Noise:
    """Samples that are drawn when they are read, from the same generator as dropout."""

    def __getitem__(self, index: int) -> Tensor:
        return torch.rand(2) + index

    def __len__(self) -> int:
        return 7


class Line(ExperimentBase):
    """Plain torch in all of it, 3 batches to an epoch; the rate falls with each."""

    def setup_dataloader(self) -> None:
        self.train_loader = DataLoader(Noise(), batch_size=2, shuffle=True, drop_last=True)

    def setup_model(self) -> None:
        self.model = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), 0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)

    def train_batch(self) -> None:
        loss = self.model(self.read_batch()).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.visualizer.add_scalar("loss", loss.item(), self.iteration)

    def valid(self) -> None:
        self.visualizer.add_scalar("drawn", torch.rand(()), self.iteration)


class OwnEpoch(Line):
    """As Parakeet's, with something of its own."""

    def new_epoch(self) -> None:
        self.epoch += 1
        self.iterator = iter(self.train_loader)
        if self.epoch > 1:
            self.scheduler.step()


class OwnRead(Line):
    """As Parakeet's."""

    def read_batch(self) -> Any:
        try:
            batch = next(self.iterator)
        except StopIteration:
            self.new_epoch()
            batch = next(self.iterator)
        return batch


class OwnBoth(OwnRead, OwnEpoch):
    pass


class Counting(OwnEpoch):
    """Counts batches itself, and reads in the middle of a step."""

    def read_batch(self) -> Any:
        if self.iteration > 1 and self.iteration % 3 == 1:
            self.new_epoch()
        return next(self.iterator)


class Generated(OwnRead):
    """An iterator around another, whose length nobody knows."""

    def new_epoch(self) -> None:
        super().new_epoch()
        self.iterator = (2 * batch for batch in self.iterator)


class OwnTrain(OwnEpoch):
    """Its own loop, as Parakeet's is."""

    def train(self) -> None:
        self.new_epoch()
        while self.iteration < self.config.training.max_iteration:
            self.iteration += 1
            self.train_batch()
            if self.iteration % self.config.training.valid_interval == 0:
                self.valid()
            if self.iteration % self.config.training.save_interval == 0:
                self.save()


class Workers(OwnEpoch):
    def setup_dataloader(self) -> None:
        self.train_loader = DataLoader(Noise(), batch_size=2, shuffle=True, drop_last=True, num_workers=1)


class Rows(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return (torch.rand(2) + index for index in range(6))


class Streaming(Line):
    def setup_dataloader(self) -> None:
        self.train_loader = DataLoader(Rows(), batch_size=2)


class OwnGenerator(OwnRead):
    """Its order is drawn from a generator of the loader alone."""

    def setup_dataloader(self) -> None:
        generator = torch.Generator().manual_seed(7)
        self.train_loader = DataLoader(Noise(), batch_size=2, shuffle=True, drop_last=True, generator=generator)


class OwnGenerators(Line):
    """Generators of each kind in attributes, from which the order of an epoch, its batches and the training draw."""

    def setup_dataloader(self) -> None:
        self.train_loader = [torch.full((2,), float(index)) for index in range(4)]
        self.python, self.torch = random.Random(1), torch.Generator().manual_seed(2)
        self.numpy, self.old = numpy.random.default_rng(3), numpy.random.RandomState(4)
        self.twister = numpy.random.Generator(numpy.random.MT19937(5))

    def new_epoch(self) -> None:
        self.epoch += 1
        batches = [self.train_loader[index] for index in self.numpy.permutation(4)]
        self.python.shuffle(batches)
        self.iterator = (batch + self.old.standard_normal() + self.twister.random() for batch in batches)

    def train_batch(self) -> None:
        super().train_batch()
        for parameter in self.model.parameters():
            parameter.data += 0.01 * torch.rand((), generator=self.torch) + 0.01 * self.python.random()


def by_hand(steps: int, *, falls: bool) -> tuple[list[list[float]], list[float]]:
    """The weights and losses of the loop that all of these write in another way."""
    torch.manual_seed(0)
    loader = DataLoader(Noise(), batch_size=2, shuffle=True, drop_last=True)
    model = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    optimizer, iterator, losses = torch.optim.Adam(model.parameters(), 0.1), iter(loader), []
    for step in range(1, steps + 1):
        if step > 1 and step % 3 == 1:
            iterator = iter(loader)
            optimizer.param_groups[0]["lr"] /= 2 if falls else 1
        loss = model(next(iterator)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [weight.tolist() for weight in model.parameters()], losses


@pytest.mark.parametrize(
    ("cls", "falls"),
    [(Line, False), (OwnRead, False), (OwnEpoch, True), (OwnBoth, True), (Counting, True), (OwnTrain, True)],
)
def test_what_it_overrides_trains_as_the_loop_by_hand(cls: Any, falls: bool) -> None:
    experiment = begun(cls, max_iteration=8)
    experiment.run()
    weights, losses = by_hand(8, falls=falls)
    assert [weight.tolist() for weight in experiment.model.parameters()] == weights
    assert numbers(Path("out"))["loss"] == losses
    assert (experiment.iteration, experiment.epoch) == (8, 3)


# Each of these differs from the others in where its batches and its epochs come from.
OWN = [Line, OwnBoth, Generated, OwnTrain, Workers, Streaming, OwnGenerator, OwnGenerators]
KILLS = [
    # It goes on in the middle of an epoch, at its end, and after the first batch of the last.
    *(([3, 4, 8], cls, ()) for cls in OWN),
    *(([3, 4, 5, 8], cls, pytest.mark.slow) for cls in (OwnEpoch, OwnRead)),
    *(([at], cls, pytest.mark.release) for at in (2, 3, 4, 5) for cls in (*OWN, OwnEpoch, OwnRead)),
]


# Torch says so of a schedule that steps before this process has made a step.
@pytest.mark.quick_cases(1)
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize(
    ("cls", "ats"),
    [pytest.param(cls, ats, id=f"{cls.__name__}-{ats}", marks=marks) for ats, cls, marks in KILLS],
)
def test_what_it_overrides_goes_on_bit_for_bit(cls: Any, ats: list[int]) -> None:
    killed, unbroken = killed_and_unbroken(cls, ats, max_iteration=8)
    assert killed == unbroken


@pytest.mark.quick_cases(1)
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("at", [2, 3, 4])
def test_in_a_config_it_goes_on_bit_for_bit_too(at: int) -> None:
    class Stopping(OwnBoth):
        def train_batch(self) -> None:
            super().train_batch()
            self.context["is_exit"] = stops and self.iteration == at

    runner = {"name": "train", "class": "train", "device": "cpu", "runner_class_path": Stopping, "max_steps": 8}
    runner |= {"valid_interval": 2, "print_interval": 1, "save_interval": None}
    ends = []
    for name, resumes in (("stopped", [True, False]), ("unbroken", [False])):
        for stops in resumes:
            context = GeneralTrainer({"name": name, "runner": [runner]}, resume="never" if stops else "auto").run()
        lines = (context["run_dir"] / "train" / "metrics.jsonl").read_text(encoding="utf-8")
        weights = context["model"]["experiment"]["model"].state_dict()
        ends.append([{key: weight.tolist() for key, weight in weights.items()}, lines, context["train_state"]])
    assert ends[0] == ends[1]
    assert ends[0][2]["iteration"] == 8


def test_a_loader_with_a_generator_of_its_own_has_another_order_in_each_epoch_of_a_resumed_run() -> None:
    class Read(OwnGenerator):
        read: ClassVar[list[float]] = []

        def read_batch(self) -> Any:
            batch = super().read_batch()
            self.read.append(batch.floor().sum().item())
            return batch

    generator = torch.Generator().manual_seed(7)
    loader = DataLoader(Noise(), batch_size=2, shuffle=True, drop_last=True, generator=generator)
    for steps in (3, 9):
        begun(Read, max_iteration=steps, save_interval=1).run()
    assert Read.read == [batch.floor().sum().item() for _ in range(3) for batch in loader]


class Wrapped:
    """An iterator of the user's own, whose length is that of something else."""

    def __init__(self, loader: Any, length: int) -> None:
        self.iterator, self.length = iter(loader), length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Tensor]:
        return self.iterator

    def __next__(self) -> Tensor:
        return next(self.iterator)


@pytest.mark.parametrize("length", [1, 3, 7])
def test_the_end_of_an_iterator_of_ones_own_is_that_of_the_epoch_whatever_its_length(length: int) -> None:
    class Wrapping(OwnEpoch):
        def new_epoch(self) -> None:
            super().new_epoch()
            self.iterator = Wrapped(self.train_loader, length)

    experiment = begun(Wrapping, max_iteration=8)
    experiment.run()
    assert (experiment.iteration, experiment.epoch) == (8, 3)


def test_batches_that_are_taken_before_an_iterator_is_assigned_are_none_of_the_epoch() -> None:
    class Later(OwnEpoch):
        def new_epoch(self) -> None:
            iterator = iter(self.train_loader)
            next(iterator)
            self.epoch, self.iterator = self.epoch + 1, iterator

    experiment = begun(Later, max_iteration=8)
    experiment.run()
    assert (experiment.iteration, experiment.epoch) == (8, 4)


@pytest.mark.parametrize("cls", [OwnEpoch, OwnRead])
def test_a_new_epoch_that_assigns_no_iterator_is_told(cls: Any) -> None:
    class Forgetful(cls):  # type: ignore[misc]
        def new_epoch(self) -> None:
            self.epoch += 1

    with pytest.raises(StageError, match=r"Forgetful\.new_epoch: did not assign self\.iterator"):
        begun(Forgetful).run()


def test_what_the_class_gives_stays() -> None:
    class Given(Line):
        valid_loader = [1, 2]  # noqa: RUF012 - as a user writes it

    experiment = begun(Given)
    experiment.run()
    assert experiment.valid_loader == [1, 2]
