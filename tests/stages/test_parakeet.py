"""The experiments of Parakeet's users: its examples beside its own ExperimentBase, and what of it may be overridden.

``parakeet.json`` has the figures of Parakeet's ``experiment.py`` of 2021-11-19 (commit 8705a2a), whose loop ran the classes of
``parakeet_shapes.py`` on torch's CPU: paddle's ``set_device``, ``no_grad`` and ``get_rank`` and VisualDL's ``LogWriter`` were
stood in for by a few lines that do the same, ``valid`` was decorated with ``no_grad`` as in its examples. Under torch 2.13 ours
had the same numbers and weights, bit for bit. ``weights`` are the sums of the absolute values of each parameter.
"""

from __future__ import annotations

import json
import random
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from pipeline import ExperimentBase, GeneralTrainer
from tests.stages.parakeet_shapes import shapes

FIGURES = json.loads(Path(__file__).with_name("parakeet.json").read_text(encoding="utf-8"))
TRAINING = {"max_iteration": 6, "valid_interval": 2, "save_interval": 3, "lr": 0.01}


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
    experiment = begun(shapes(ExperimentBase)[name])
    experiment.resume_or_load()
    experiment.run()
    expected = FIGURES[name]["numbers"]
    figures = {tag.removeprefix("figure "): expected.pop(tag) for tag in list(expected) if tag.startswith("figure ")}
    assert numbers(Path("out")) == {tag: pytest.approx(values, rel=1e-4) for tag, values in expected.items()}
    for tag, values in figures.items():
        paths = sorted(Path("out/visuals").glob(f"{tag}-*.png"))
        assert [float(path.read_text().split()[1]) for path in paths] == pytest.approx(values, rel=1e-4)
    weights = [weight.abs().sum().item() for weight in experiment.model.parameters()]
    assert weights == pytest.approx(FIGURES[name]["weights"], rel=1e-4)
    assert experiment.epoch == FIGURES[name]["epoch"]


@pytest.mark.parametrize("name", FIGURES)
def test_it_has_them_in_a_config_too(name: str) -> None:
    class Seeded(shapes(ExperimentBase)[name]):  # type: ignore[misc]  # a class that a function has made
        def setup_dataloader(self) -> None:
            torch.manual_seed(0)
            random.seed(0)
            super().setup_dataloader()

    runner = {"name": "train", "class": "train", "device": "cpu", "runner_class_path": Seeded, "max_steps": 6}
    runner |= {"valid_interval": 2, "print_interval": 1}
    config = {"hyper_parameters": {"training": {"lr": 0.01}}, "runner": [runner]}
    context = GeneralTrainer(config).run()
    weights = [weight.abs().sum().item() for weight in context["model"]["experiment"]["model"].parameters()]
    assert weights == pytest.approx(FIGURES[name]["weights"], rel=1e-4)
    text = (context["run_dir"] / "train" / "metrics.jsonl").read_text(encoding="utf-8")
    lines = list(map(json.loads, text.splitlines()))
    for tag, values in FIGURES[name]["numbers"].items():
        event = "validate" if tag.startswith("valid/") else "train"
        found = [line[tag] for line in lines if line["event"] == event and tag in line]
        assert found == ([] if tag.startswith("figure ") else pytest.approx(values, rel=1e-4))


def test_the_test_of_an_example_evaluates_the_checkpoint_in_its_folder() -> None:
    cls = shapes(ExperimentBase)["tacotron2_aishell3"]
    begun(cls).run()
    experiment = begun(cls)
    experiment.resume_or_load()
    experiment.eval()
    experiment.close()
    found = [float(Path(f"out/eval_6/sentence_{number}.txt").read_text()) for number in range(5)]
    assert found == pytest.approx(FIGURES["tacotron2_aishell3"]["eval"], rel=1e-4)


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
        if step % 2 == 0:
            torch.rand(())
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


OWN = [Line, OwnEpoch, OwnRead, OwnBoth, Generated, OwnTrain, Workers, Streaming]


# Torch says so of a schedule that steps before this process has made a step.
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("cls", OWN)
@pytest.mark.parametrize("ats", [[2], [3], [4], [5], [3, 4, 5, 8]], ids=str)
def test_what_it_overrides_goes_on_bit_for_bit(cls: Any, ats: list[int]) -> None:
    killed, unbroken = killed_and_unbroken(cls, ats, max_iteration=8)
    assert killed == unbroken


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
