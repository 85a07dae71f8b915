"""An experiment, by hand and as the runner stage, against loops written by hand."""

from __future__ import annotations

import json
import os
import random
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy
import pytest
import torch
from loguru import logger
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from pipeline import Context, ExperimentBase, GeneralTrainer, hookimpl
from pipeline.checkpoint.initial_weights import TrainRunner
from pipeline.config.schema import BestSettings
from pipeline.data.loader import EpochSampler, make_loader
from pipeline.errors import CheckpointError, ConfigError, DataError, StageError

Made = Callable[..., Any]
mse = nn.functional.mse_loss


def table() -> TensorDataset:
    """10 inputs [3], and a target [1] of each."""
    x = torch.randn(10, 3, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sum(1, keepdim=True).sin())


class Line(ExperimentBase):
    """A linear model on batches of 4 samples, 3 to an epoch; ``read`` are the batches, ``validated`` when it was."""

    def setup_dataloader(self) -> None:
        self.train_loader = make_loader(table(), seed=0, shuffle=True, batch_size=4)
        self.read: list[Tensor] = []
        self.validated: list[int] = []

    def setup_model(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)

    def train_batch(self) -> None:
        x, y = self.read_batch()
        self.read.append(x)
        loss = mse(self.model(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.visualizer.add_scalar("loss", loss, self.iteration)

    def valid(self) -> None:
        self.validated.append(self.iteration)
        self.visualizer.add_scalar("valid_loss", self.model.weight.norm(), self.iteration)


@pytest.fixture
def made() -> Iterator[Made]:
    """Sets up an experiment by hand, for 7 iterations or as keywords say of ``config.training``; closes it."""
    experiments: list[Any] = []

    def make(cls: type[Line] = Line, *, output: str = "out", start: str | None = None, **training: Any) -> Any:
        experiments.append(set_up(cls, output, start, **training))
        return experiments[-1]

    yield make
    for each in experiments:
        each.close()


def set_up(cls: type[Line], output: str, start: str | None = None, **training: Any) -> Any:
    """Return an experiment by hand that is set up, for 7 iterations or as keywords say of ``config.training``."""
    asked = {"max_iteration": 7, "valid_interval": None, "save_interval": None, **training}
    args = SimpleNamespace(device="cpu", nprocs=1, output=output, checkpoint_path=start)
    experiment = cls({"training": asked}, args)
    experiment.setup()
    return experiment


def config(cls: type[ExperimentBase] = Line, **runner: Any) -> dict[str, Any]:
    """A runner named ``train`` whose runner stage is an experiment, without plugins."""
    named = {"name": "train", "class": "train", "device": "cpu", "runner_class_path": cls, **runner}
    return {"plugins": [{"progress_bar": False}, {"metric_log": False}], "runner": [named]}


def loop(steps: int) -> Mapping[str, Tensor]:
    """The weights that the loop of a torch tutorial ends with."""
    torch.manual_seed(0)
    model, (x, y) = nn.Linear(3, 1), table().tensors
    optimizer, order = torch.optim.SGD(model.parameters(), 0.1), EpochSampler(range(10), shuffle=True, seed=0)
    for step in range(steps):
        order.set_epoch(step // 3)
        indices = torch.tensor(list(order)).split(4)[step % 3]
        optimizer.zero_grad()
        mse(model(x[indices]), y[indices]).backward()
        optimizer.step()
    return model.state_dict()


def equal(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> bool:
    """Bit for bit."""
    return list(ours) == list(theirs) and all(torch.equal(ours[name], theirs[name]) for name in ours)


def steps(folder: Path) -> list[int]:
    """The iterations of the checkpoints in a folder."""
    return sorted(int(path.name.removeprefix("step-")) for path in folder.iterdir())


# The weights.


def test_by_hand_the_weights_are_those_of_a_loop_bit_for_bit(made: Made) -> None:
    experiment = made(valid_interval=2, save_interval=3)
    experiment.run()
    assert equal(experiment.model.state_dict(), loop(7))


def test_as_a_stage_the_weights_are_those_of_a_loop_bit_for_bit() -> None:
    context = GeneralTrainer(config(max_steps=7)).run()
    assert equal(context["model"]["experiment"]["model"].state_dict(), loop(7))


@pytest.mark.parametrize(
    ("budget", "iterations"),
    [
        ({"epochs": 2}, 6),
        ({"max_steps": 5}, 5),
        ({"epochs": 2, "max_steps": 5}, 5),
        ({"epochs": 2, "max_steps": 50}, 6),
    ],
)
def test_as_a_stage_it_trains_for_epochs_or_max_steps_whichever_comes_first(
    budget: dict[str, int], iterations: int
) -> None:
    state = GeneralTrainer(config(**budget)).run()["train_state"]
    epochs = {6: 2, 5: 1}[iterations]
    assert state == {"iteration": iterations, "update": iterations, "epoch": epochs, "samples": state["samples"],
                     "phase_index": 0}  # fmt: skip
    assert state["samples"] == {6: 20, 5: 18}[iterations]


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("cls", "runner", "iterations", "epochs"),
    [
        ("Line", {"debug": True, "max_steps": 50}, 4, 2),
        ("Line", {"debug": True, "epochs": 1}, 2, 1),
        ("Line", {"debug": True, "max_steps": 3, "debug_epochs": 5}, 3, 1),
        ("Streaming", {"debug": True, "max_steps": 50}, 4, 2),
        ("Line", {"limit_batches": 1, "epochs": 3}, 3, 3),
    ],
)
def test_as_a_stage_it_ends_at_the_limits_of_a_debug_run_and_its_epochs_after_limit_batches(
    cls: str, runner: dict[str, Any], iterations: int, epochs: int
) -> None:
    state = GeneralTrainer(config(globals()[cls], **runner)).run()["train_state"]
    assert (state["iteration"], state["epoch"]) == (iterations, epochs)


class OwnTrain(Line):
    """Has the loop of PaddleSpeech's ExperimentBase."""

    planned = 0
    ended = 0

    def setup_model(self) -> None:
        type(self).planned = self.config.training.max_iteration
        super().setup_model()

    def train(self) -> None:
        self.new_epoch()
        while self.iteration < self.config.training.max_iteration:
            self.iteration += 1
            self.train_batch()
        type(self).ended = self.iteration


def test_train_of_a_subclass_ends_with_a_debug_run() -> None:
    """A schedule that setup_model makes is that of the whole training."""
    GeneralTrainer(config(OwnTrain, debug=True, max_steps=50)).run()
    assert (OwnTrain.planned, OwnTrain.ended) == (50, 4)


# The loop.


@pytest.mark.parametrize(
    ("interval", "expected"),
    [
        (2, [2, 4, 6, 7]),
        (7, [7]),
        ("1 epoch", [3, 6, 7]),
        ("2 epoch", [6, 7]),
        (["1 epoch", 5], [3, 5, 6, 7]),
        (8, [7]),
    ],
)
def test_it_validates_and_saves_at_intervals_and_at_the_end(made: Made, interval: Any, expected: list[int]) -> None:
    experiment = made(valid_interval=interval, save_interval=interval)
    experiment.run()
    assert experiment.validated == steps(Path("out/checkpoints")) == expected


def test_without_intervals_it_never_validates_and_saves_at_the_end(made: Made) -> None:
    experiment = made()
    experiment.run()
    assert (experiment.validated, steps(Path("out/checkpoints"))) == ([], [7])


def test_valid_runs_without_gradients_in_evaluation_mode_and_leaves_the_modes_as_they_were(made: Made) -> None:
    seen = []

    class Modes(Line):
        def setup_model(self) -> None:
            super().setup_model()
            self.model = nn.Sequential(self.model, nn.Dropout(0.0), nn.Dropout(0.0))
            self.model[2].eval()

        def valid(self) -> None:
            seen.append((torch.is_grad_enabled(), [each.training for each in self.model.modules()]))

    experiment = made(Modes, valid_interval=7)
    experiment.run()
    assert seen == [(False, [False] * 4)]
    assert torch.is_grad_enabled()
    assert [each.training for each in experiment.model.modules()] == [True, True, True, False]


def test_a_batch_that_fails_to_validate_leaves_the_modes_as_they_were(made: Made) -> None:
    class Failing(Line):
        def valid(self) -> None:
            raise OverflowError

    experiment = made(Failing, valid_interval=1)
    with pytest.raises(OverflowError):
        experiment.run()
    assert experiment.model.training


def test_by_hand_it_may_be_validated_before_the_first_step_which_changes_nothing(made: Made) -> None:
    experiment = made(valid_interval=["start", 3])
    experiment.run()
    assert experiment.validated == [0, 3, 6, 7]
    assert equal(experiment.model.state_dict(), loop(7))


def test_as_a_stage_it_may_be_validated_before_the_first_step() -> None:
    chosen = config(max_steps=4, valid_interval="start")
    del chosen["plugins"]
    context = GeneralTrainer(chosen).run()
    lines = map(json.loads, (context["run_dir"] / "train" / "metrics.jsonl").read_text().splitlines())
    assert [line["iteration"] for line in lines if line["event"] == "validate"] == [0, 4]


def test_an_epoch_is_judged_though_one_step_reads_several_batches(made: Made) -> None:
    class Twice(Line):
        def train_batch(self) -> None:
            self.read_batch()
            super().train_batch()

    experiment = made(Twice, max_iteration=5, valid_interval="1 epoch")
    experiment.run()
    # Of 10 batches read, the 3rd and the 9th end an epoch within a step, the 6th at its end.
    assert experiment.validated == [2, 3, 5]


@pytest.mark.parametrize("when", [0, 2])
def test_by_hand_a_config_of_ones_own_class_may_be_changed_before_the_training_and_while_it_goes_on(when: int) -> None:
    class Changing(Line):
        def train_batch(self) -> None:
            super().train_batch()
            self.change(self.iteration)

        def change(self, iteration: int) -> None:
            if iteration == when:
                self.config.training.max_iteration, self.config.training.valid_interval = 5, 3

    asked = SimpleNamespace(max_iteration=7, valid_interval=None, save_interval=None)
    args = SimpleNamespace(device="cpu", nprocs=1, output="out", checkpoint_path=None)
    experiment = Changing(SimpleNamespace(training=asked), args)
    experiment.setup()
    experiment.change(0)
    experiment.run()
    assert (experiment.iteration, experiment.validated) == (5, [3, 5])


def test_without_read_batch_an_interval_in_epochs_is_refused(made: Made) -> None:
    class Own(Line):
        def train_batch(self) -> None:
            pass

    message = r"Own.train_batch: did not call self.read_batch\(\), so no epoch ends; call it, or give valid_interval and save_interval in iterations"
    with pytest.raises(StageError, match=message):
        made(Own, valid_interval="1 epoch", save_interval="2 epoch").run()


def test_without_read_batch_intervals_in_iterations_work(made: Made) -> None:
    class Own(Line):
        def train_batch(self) -> None:
            pass

    experiment = made(Own, valid_interval=3)
    experiment.run()
    assert experiment.validated == [3, 6, 7]


def test_batches_come_in_the_order_of_each_epoch(made: Made) -> None:
    experiment = made()
    read = [experiment.read_batch()[0] for _ in range(6)]
    assert (experiment.epoch, experiment.state_dict()["epoch"]) == (2, 2)
    for epoch in range(2):
        experiment.train_loader.set_epoch(epoch)
        expected = [x for x, _ in experiment.train_loader]
        assert all(map(torch.equal, read[3 * epoch : 3 * epoch + 3], expected))


def test_an_empty_loader_is_told(made: Made) -> None:
    class Empty(Line):
        def setup_dataloader(self) -> None:
            self.train_loader = DataLoader(table(), batch_size=11, drop_last=True)

    message = "train_loader: gave no batch in epoch 1; check the dataset, or drop_last with few samples"
    with pytest.raises(DataError, match=message):
        made(Empty).run()


def test_ctrl_c_closes_the_files_and_is_raised_again(made: Made) -> None:
    class Stopped(Line):
        def train_batch(self) -> None:
            super().train_batch()
            raise KeyboardInterrupt

    experiment = made(Stopped)
    with pytest.raises(KeyboardInterrupt):
        experiment.run()
    logger.info("after it")
    assert "after it" not in Path("out/worker_0.log").read_text()
    assert experiment.visualizer.file is None


def test_run_before_setup_says_so() -> None:
    experiment = Line({"training": {}}, {"device": "cpu"})
    with pytest.raises(StageError, match=r"Line.run: nothing is set up; call setup\(\) first"):
        experiment.run()


# Going on.


class Stream(IterableDataset[Any]):
    """The rows of the table."""

    def __iter__(self) -> Iterator[Any]:
        return iter(table())


class Streaming(Line):
    """The same in the order of the table, from a loader that does not know its length."""

    def setup_dataloader(self) -> None:
        super().setup_dataloader()
        self.train_loader = DataLoader(Stream(), batch_size=4)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("cls", [Line, Streaming])
@pytest.mark.parametrize("at", [2, 3, 4, *(pytest.param(at, marks=pytest.mark.slow) for at in (1, 6))])
def test_a_resumed_training_ends_with_the_weights_of_an_unbroken_one(made: Made, cls: type[Line], at: int) -> None:
    made(cls, output="first", max_iteration=at).run()
    path = f"first/checkpoints/step-{at:012d}"
    resumed, unbroken = made(cls, start=path), made(cls, output="unbroken")
    resumed.run()
    unbroken.run()
    assert equal(resumed.model.state_dict(), unbroken.model.state_dict())
    assert all(map(torch.equal, resumed.read, unbroken.read[at:]))
    assert resumed.train_state == unbroken.train_state


@pytest.mark.parametrize("cls", [Line, Streaming])
@pytest.mark.parametrize("taken", range(8))
def test_a_position_leads_to_the_batch_that_would_have_come(made: Made, cls: type[Line], taken: int) -> None:
    first, second = made(cls), made(cls, output="second")
    for _ in range(taken):
        first.read_batch()
    second.set_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()
    assert torch.equal(second.read_batch()[0], first.read_batch()[0])
    assert second.epoch == first.epoch


def test_a_position_right_after_new_epoch_is_the_beginning_of_it(made: Made) -> None:
    experiment = made()
    list(islice(iter(experiment.read_batch, None), 3))
    experiment.new_epoch()
    assert experiment.state_dict() == {"iteration": 0, "epoch": 1, "batches": 0}


def test_a_resumed_training_keeps_its_intervals(made: Made) -> None:
    made(output="first", max_iteration=5).run()
    resumed = made(start="first/checkpoints/step-000000000005", valid_interval=[3, "1 epoch"])
    resumed.run()
    assert resumed.validated == [6, 7]


class KilledError(BaseException):
    """Stands for the end of the process."""


class Noisy(Line):
    """Dropout, accumulation, a part that is trained from step 3 on, and attributes with a state of their own.

    ``at`` is the step before which the process ends.
    """

    at = 0

    def setup_model(self) -> None:
        super().setup_model()
        # Checkpoints have the states of these generators too.
        random.seed(0)
        numpy.random.seed(0)
        self.model = nn.Sequential(self.model, nn.Dropout(0.5), nn.Linear(1, 1))
        self.model[2].requires_grad_(False)
        self.optimizer = torch.optim.Adam(self.model.parameters(), 0.1)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.head = nn.Linear(1, 1)
        self.others = {"head": torch.optim.SGD(self.head.parameters(), 0.1, momentum=0.9)}
        self.count = Count()
        self.checkpointer.add_recoverable("count", self.count)

    def train_batch(self) -> None:
        if self.iteration == self.at:
            raise KilledError
        if self.iteration == 3:
            self.model[2].requires_grad_(True)
        self.count.number += 1
        x, y = self.read_batch()
        loss = mse(self.head(self.model(x)), y)
        loss.backward()
        if self.iteration % 2 == 0:
            for optimizer in (self.optimizer, self.others["head"]):
                optimizer.step()
                optimizer.zero_grad()
            self.schedule.step()
        self.visualizer.add_scalar("loss", loss, self.iteration)

    def valid(self) -> None:
        self.visualizer.add_scalar("valid_loss", self.model[0].weight.norm() + torch.rand(()), self.iteration)


class Count:
    number = 0

    def state_dict(self) -> int:
        return self.number

    def load_state_dict(self, state: int) -> None:
        self.number = state


def written(output: str) -> dict[Path, bytes]:
    """The content of all files in a folder, but for the log."""
    files = [path for path in Path(output).rglob("*") if path.is_file() and path.suffix != ".log"]
    return {path.relative_to(output): path.read_bytes() for path in files}


def end(experiment: Any, output: str) -> list[Any]:
    """The experiment that is through, and what it has written."""
    parts = [experiment.model, experiment.optimizer, experiment.head, experiment.others["head"], experiment.schedule]
    state = [*(each.state_dict() for each in parts), torch.get_rng_state()]
    return [repr(state), experiment.count.number, experiment.train_state, written(output)]


NOISY = {"max_iteration": 8, "valid_interval": 5, "save_interval": [2, "1 epoch"]}
"""Saved after 2, 3, 4, 6 and 8 steps, 3 of them to an epoch."""


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The end of a training that nothing interrupts."""
    folder = str(tmp_path_factory.mktemp("unbroken"))
    experiment = set_up(Noisy, folder, **NOISY)
    experiment.run()
    experiment.close()
    return end(experiment, folder)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "ats",
    [
        # Before the first checkpoint, right after a validation, and three times.
        [1],
        [6],
        [4, 5, 8],
        *(pytest.param([at], marks=pytest.mark.slow) for at in (3, 4, 5, 8)),
    ],
)
def test_without_a_path_it_goes_on_with_the_newest_in_the_output_folder_bit_for_bit(
    made: Made, unbroken: list[Any], ats: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for at in ats:
        monkeypatch.setattr(Noisy, "at", at)
        with pytest.raises(KilledError):
            made(Noisy, **NOISY).run()
    monkeypatch.setattr(Noisy, "at", 0)
    experiment = made(Noisy, **NOISY)
    experiment.run()
    assert end(experiment, "out") == unbroken


def interpreted(script: Path, output: str, at: str) -> int:
    """Run a script in a new interpreter, and return its exit code."""
    return subprocess.run([sys.executable, str(script), output, at], check=False).returncode


def forked(script: Path, output: str, at: str) -> int:
    """Run a script in a process that is forked from this one, and return its exit code.

    Where there is a GPU, torch refuses a backward pass in a process that is forked after one.
    """
    if torch.cuda.is_available():
        return interpreted(script, output, at)
    pid = os.fork()
    if not pid:
        code = 1
        try:
            torch.set_num_threads(1)
            sys.argv = [str(script), output, at]
            runpy.run_path(str(script), run_name="__main__")
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("start", "loads"),
    [
        (forked, True),
        (forked, False),
        pytest.param(interpreted, True, marks=pytest.mark.release),
        pytest.param(interpreted, False, marks=pytest.mark.slow),
    ],
)
def test_in_another_process_it_goes_on_likewise(
    tmp_path: Path, one_thread: None, start: Callable[[Path, str, str], int], loads: bool
) -> None:
    """Twice the same script, killed in the middle and then not, and one that is not killed."""
    script = tmp_path / "script.py"
    before = "experiment.resume_or_load()\n" if loads else ""
    script.write_text(SCRIPT.replace("experiment.run()", f"{before}experiment.run()"))
    killed, *rest = (start(script, "out", "6"), start(script, "out", "0"), forked(script, "unbroken", "0"))
    assert (killed, rest) == (-signal.SIGKILL, [0, 0])
    assert written("out") == written("unbroken")


SCRIPT = """
import os, random, signal, sys
from types import SimpleNamespace
import numpy
import torch
from torch import nn
from pipeline import ExperimentBase
from pipeline.data.loader import make_loader

class Mine(ExperimentBase):
    def setup_dataloader(self):
        self.train_loader = make_loader(torch.arange(10.0).reshape(10, 1), seed=0, shuffle=True, batch_size=4)

    def setup_model(self):
        self.model = nn.Sequential(nn.Linear(1, 3), nn.Dropout(0.5), nn.Linear(3, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), 0.1)

    def train_batch(self):
        if self.iteration == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)
        loss = self.model(self.read_batch()).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.visualizer.add_scalar("loss", loss, self.iteration)

    def valid(self):
        self.visualizer.add_scalar("noise", torch.rand(()), self.iteration)

torch.manual_seed(1)
random.seed(1)
numpy.random.seed(1)
training = SimpleNamespace(max_iteration=8, valid_interval=3, save_interval=2)
args = SimpleNamespace(device="cpu", nprocs=1, output=sys.argv[1], checkpoint_path=None)
experiment = Mine(SimpleNamespace(training=training), args)
experiment.setup()
experiment.run()
"""


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("at", [3, 5, 7])
def test_a_path_of_another_folder_gives_the_whole_state_too(made: Made, unbroken: list[Any], at: int) -> None:
    torch.manual_seed(0)
    made(Noisy, output="first", **NOISY | {"max_iteration": at}).run()
    experiment = made(Noisy, start=f"first/checkpoints/step-{at:012d}", **NOISY)
    experiment.run()
    assert end(experiment, "out")[:3] == unbroken[:3]


def test_a_higher_limit_trains_on_as_if_it_had_been_that_from_the_beginning(made: Made, unbroken: list[Any]) -> None:
    torch.manual_seed(0)
    made(Noisy, **NOISY | {"max_iteration": 4}).run()
    experiment = made(Noisy, **NOISY)
    experiment.run()
    assert end(experiment, "out")[:3] == unbroken[:3]


class Step:
    """Steps parameters by the mean of their gradients. It is no optimizer of torch's, but keeps its state."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.parameters = list(parameters)
        self.means = [torch.zeros_like(parameter) for parameter in self.parameters]

    @torch.no_grad()
    def __call__(self) -> None:
        for parameter, mean in zip(self.parameters, self.means, strict=True):
            mean.mul_(0.9).add_(parameter.grad)
            parameter.sub_(0.1 * mean)
            parameter.grad = None

    def state_dict(self) -> list[Tensor]:
        return self.means

    def load_state_dict(self, state: list[Tensor]) -> None:
        self.means = list(state)


class Stepping(Line):
    """Steps by objects of its own: in an attribute, and in a dict. ``at`` is the step before which the process ends."""

    at = 0

    def setup_model(self) -> None:
        super().setup_model()
        self.step = Step([self.model.weight])
        self.steps = {"bias": Step([self.model.bias])}

    def train_batch(self) -> None:
        if self.iteration == self.at:
            raise KilledError
        x, y = self.read_batch()
        mse(self.model(x), y).backward()
        self.step()
        self.steps["bias"]()


def unbroken_and_resumed(made: Made, kind: type[Line], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """An experiment that nothing interrupts, and one that is killed before its step 5 and resumed."""
    unbroken = made(kind, output="unbroken")
    unbroken.run()
    monkeypatch.setattr(kind, "at", 5)
    with pytest.raises(KilledError):
        made(kind, save_interval=2).run()
    monkeypatch.setattr(kind, "at", 0)
    resumed = made(kind, save_interval=2)
    resumed.run()
    return unbroken, resumed


def test_objects_of_the_users_own_are_resumed(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    unbroken, resumed = unbroken_and_resumed(made, Stepping, monkeypatch)

    assert equal(resumed.model.state_dict(), unbroken.model.state_dict())
    assert torch.equal(resumed.step.means[0], unbroken.step.means[0])
    assert not torch.equal(resumed.step.means[0], torch.zeros(1, 3))


class Rescheduling(Line):
    """Makes its schedule anew when it loads its state."""

    at = 0

    def setup_model(self) -> None:
        super().setup_model()
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)

    def load_training_state(self, training_state: Mapping[str, Any]) -> None:
        super().load_training_state(training_state)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)

    def train_batch(self) -> None:
        if self.iteration == self.at:
            raise KilledError
        super().train_batch()
        self.schedule.step()


def test_parts_are_restored_after_the_training_state(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    unbroken, resumed = unbroken_and_resumed(made, Rescheduling, monkeypatch)

    assert resumed.schedule.state_dict() == unbroken.schedule.state_dict()
    assert equal(resumed.model.state_dict(), unbroken.model.state_dict())


class Slowed(Line):
    """Lowers the learning rate of its optimizer, which has no other state, when it loads its state."""

    def load_training_state(self, training_state: Mapping[str, Any]) -> None:
        super().load_training_state(training_state)
        self.optimizer.param_groups[0]["lr"] = 0.0


def test_optimizer_stays_as_load_training_state_leaves_it(made: Made) -> None:
    made(Slowed, max_iteration=4).run()
    resumed = made(Slowed)
    resumed.run()

    assert resumed.iteration == 7
    assert resumed.optimizer.param_groups[0]["lr"] == 0
    assert equal(resumed.model.state_dict(), loop(4))


class Hiding(Line):
    """Holds an optimizer in an object that does not save it."""

    def setup_model(self) -> None:
        super().setup_model()
        self.kit = SimpleNamespace(steps=[torch.optim.SGD(self.model.parameters(), 0.1)])


def test_deeper_optimizer_is_named_once(made: Made, log_lines: list[str]) -> None:
    made(Hiding, save_interval=1).run()

    warnings = [line for line in log_lines if line.startswith("WARNING")]
    assert len(warnings) == 1
    assert "self.kit.steps.0 (SGD)" in warnings[0]


class Late(Line):
    """Makes an object with a state while it trains."""

    def train_batch(self) -> None:
        super().train_batch()
        self.step = Step([self.model.weight])


def test_object_that_is_made_late_is_refused(made: Made) -> None:
    with pytest.raises(CheckpointError, match=r"self\.step was made after the training had begun"):
        made(Late).run()


def test_a_second_run_continues_where_the_first_has_ended_also_if_that_was_resumed(made: Made) -> None:
    first = made()
    first.run()
    second = made(max_iteration=9)
    second.run()
    second.config.training._values["max_iteration"] = 14
    second.run()
    assert second.iteration == 14
    assert equal(second.model.state_dict(), loop(14))


def test_one_that_is_through_says_so_and_writes_nothing(made: Made, log_lines: list[str]) -> None:
    made(Noisy, **NOISY).run()
    before = {path: path.stat().st_mtime_ns for path in Path("out/checkpoints").rglob("*")}
    made(Noisy, **NOISY).run()
    assert any("nothing is left to train: config.training.max_iteration is 8" in line for line in log_lines)
    assert {path: path.stat().st_mtime_ns for path in Path("out/checkpoints").rglob("*")} == before


@pytest.mark.parametrize("name", ["step-000000000003", "step-000000000003/experiment.safetensors"])
def test_checkpoints_of_another_run_are_not_overwritten(made: Made, name: str) -> None:
    made(save_interval=3).run()
    before = {path: path.stat().st_mtime_ns for path in Path("out/checkpoints").rglob("*")}
    message = r"out/checkpoints/step-000000000007: is of another run, and this one is at iteration \d, and would"
    with pytest.raises(ConfigError, match=f"{message} overwrite it; choose another args.output, or go on from it"):
        made(start=f"out/checkpoints/{name}", save_interval=3).run()
    with pytest.raises(ConfigError, match=message):
        made().save()
    assert {path: path.stat().st_mtime_ns for path in Path("out/checkpoints").rglob("*")} == before


def test_the_newest_may_be_named_too(made: Made) -> None:
    made(max_iteration=5).run()
    experiment = made(start=Path("out/checkpoints/step-000000000005").resolve())
    experiment.run()
    assert equal(experiment.model.state_dict(), loop(7))


def test_what_is_changed_after_resume_or_load_stays(made: Made) -> None:
    made(max_iteration=5).run()
    experiment = made(max_iteration=6)
    experiment.resume_or_load()
    experiment.optimizer.param_groups[0]["lr"] = 0.0
    experiment.run()
    assert equal(experiment.model.state_dict(), loop(5))


class Noise(IterableDataset[tuple[Tensor, Tensor]]):
    """Ten samples with noise of the dataset's own generator. Only reading tells how many there are."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for x, y in table():
            yield x + torch.randn(3, generator=self.generator), y


class SavesInside(Line):
    """Saves in iteration 2, after its batch, and may fail right after that."""

    fails = False

    def setup_dataloader(self) -> None:
        super().setup_dataloader()
        self.train_loader = DataLoader(Noise(), batch_size=4)

    def train_batch(self) -> None:
        super().train_batch()
        if self.iteration == 2:
            self.save()
            if self.fails:
                raise ZeroDivisionError


def test_save_within_an_iteration_keeps_the_generator_of_the_data(made: Made) -> None:
    """The counters of a checkpoint tell whether the epoch is over, for which the next batch is read."""
    whole = made(SavesInside, output="whole")
    whole.run()
    failing = made(SavesInside)
    failing.fails = True
    with pytest.raises(ZeroDivisionError):
        failing.run()
    resumed = made(SavesInside)
    resumed.run()
    assert [*map(torch.Tensor.tolist, resumed.read)] == [*map(torch.Tensor.tolist, whole.read[2:])]


def test_a_checkpoint_of_something_else_is_refused(made: Made) -> None:
    chosen = {**config(), "dataset": [{"name": "data", "class_path": table, "batch_size": 4}]}
    chosen["phase"] = [{"name": "line", "model": lambda: nn.Linear(3, 1), "loss": mse, "dataset_name": "data"}]
    chosen["hyper_parameters"] = {"optimizer": {"class": "SGD", "lr": 0.1}}
    chosen["runner"] = [{"name": "train", "class": "train", "device": "cpu", "epochs": 1}]
    path = GeneralTrainer(chosen).run()["checkpointer"].newest()
    with pytest.raises(
        CheckpointError, match=r"is not of an experiment, which could go on from it; name a .safetensors"
    ):
        made(start=path).run()


def test_a_file_of_weights_gives_the_weights_alone(made: Made) -> None:
    made(output="first", max_iteration=5).run()
    path = "first/checkpoints/step-000000000005/experiment.safetensors"
    experiment = made(start=path)
    experiment.resume_or_load()
    assert equal(experiment.model.state_dict(), loop(5))
    assert experiment.state_dict() == {"iteration": 0, "epoch": 0, "batches": 0}


def test_as_a_stage_init_model_path_gives_the_first_weights_and_counts_from_0(made: Made) -> None:
    made(output="first", max_iteration=3).run()
    path = Path("first/checkpoints/step-000000000003").resolve()
    expected = made(start=path / "experiment.safetensors", max_iteration=4)
    expected.run()
    context = GeneralTrainer(config(max_steps=4, init_model_path=str(path))).run()
    assert context["train_state"]["iteration"] == 4
    assert equal(context["model"]["experiment"]["model"].state_dict(), expected.model.state_dict())


def test_a_checkpoint_holds_weights_counters_and_position(made: Made) -> None:
    made(max_iteration=5).run()
    state = json.loads(Path("out/checkpoints/step-000000000005/state.json").read_text())
    assert state["train_state"] == {
        "iteration": 5, "update": 5, "epoch": 1, "samples": 18, "phase_index": 0, "batches": 2,
    }  # fmt: skip


# As a stage.


class Recorder:
    """A plugin; ``events`` are (hook, iteration, value) in the order of the calls."""

    events: list[tuple[str, int, Any]] = []  # noqa: RUF012 - plugins are named by their class

    def note(self, hook: str, context: Context, value: Any = None) -> None:
        self.events.append((hook, context["train_state"]["iteration"], value))

    @hookimpl
    def on_resume(self, context: Context) -> None:
        self.note("on_resume", context, context["current_epoch"])

    @hookimpl
    def before_epoch(self, context: Context) -> None:
        self.note("before_epoch", context, context["current_epoch"])

    @hookimpl
    def on_print_interval(self, context: Context, phase: str, metrics: dict[str, float]) -> None:
        self.note("on_print_interval", context, (phase, metrics["loss"]))

    @hookimpl
    def before_validation(self, context: Context, phase: str) -> None:
        self.note("before_validation", context, phase)

    @hookimpl
    def after_validation(self, context: Context, phase: str, metrics: dict[str, float]) -> None:
        self.note("after_validation", context, metrics)

    @hookimpl
    def after_epoch(self, context: Context) -> None:
        self.note("after_epoch", context, context["metrics"])

    @hookimpl
    def after_checkpoint_saved(self, context: Context, path: Any) -> None:
        self.note("after_checkpoint_saved", context, path.name)


@pytest.fixture
def events() -> Callable[..., list[tuple[str, int, Any]]]:
    """What a plugin is told in a run of the experiment with these runner keys."""

    def run(**runner: Any) -> list[tuple[str, int, Any]]:
        Recorder.events = []
        chosen = config(**runner)
        chosen["plugins"].append(Recorder)
        GeneralTrainer(chosen).run()
        return Recorder.events

    return run


def test_as_a_stage_the_plugins_are_told_in_the_order_of_the_default_loop(events: Callable[..., Any]) -> None:
    told = events(max_steps=5, print_interval=2, valid_interval="1 epoch", save_interval=3)
    assert [each[:2] for each in told if each[0] != "after_checkpoint_saved"] == [
        ("before_epoch", 0), ("on_print_interval", 2), ("before_validation", 3), ("after_validation", 3),
        ("after_epoch", 3), ("before_epoch", 3), ("on_print_interval", 4), ("before_validation", 5),
        ("after_validation", 5),
    ]  # fmt: skip
    assert [value for hook, _, value in told if hook == "after_checkpoint_saved"] == [
        "step-000000000003", "step-000000000005",
    ]  # fmt: skip
    assert [value for hook, _, value in told if hook == "before_epoch"] == [0, 1]


class Exits(Line):
    """It ends the run at iteration ``at``, unless there is a checkpoint."""

    at = 0

    def train_batch(self) -> None:
        super().train_batch()
        self.context["is_exit"] = self.iteration == self.at and not self.checkpointer.all()


@pytest.mark.parametrize(
    ("at", "told"),
    [(4, [("on_resume", 4, 1), ("before_epoch", 6, 2)]), (3, [("on_resume", 3, 0), ("before_epoch", 3, 1)])],
)
def test_as_a_stage_an_epoch_that_is_resumed_in_its_middle_does_not_begin_again(
    at: int, told: list[tuple[str, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Exits, "at", at)
    chosen = config(Exits, epochs=3, save_interval=None)
    chosen["plugins"].append(Recorder)
    GeneralTrainer({**chosen, "name": "exits"}).run()
    Recorder.events = []
    GeneralTrainer({**chosen, "name": "exits"}, resume="auto").run()
    assert [event for event in Recorder.events if event[0] in {"on_resume", "before_epoch"}][:2] == told


def test_epoch_that_was_open_at_the_limit_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Exits, "at", 4)
    chosen = {**config(Exits, epochs=3, save_interval=None), "name": "limited"}
    chosen["plugins"].append(Recorder)
    GeneralTrainer(chosen).run()
    Recorder.events = []
    chosen["runner"][0]["max_steps"] = 4
    GeneralTrainer(chosen, resume="auto").run()
    told = [event for event in Recorder.events if event[0] in {"on_resume", "before_epoch"}]
    assert told == [("on_resume", 4, 1)]
    assert [event for event in Recorder.events if event[0] == "after_epoch"] == []


def test_as_a_stage_numbers_are_means_of_the_interval_and_of_the_epoch(made: Made, events: Callable[..., Any]) -> None:
    experiment = made(max_iteration=3)
    experiment.run()
    lines = Path("out/metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["value"] for line in lines]
    told = {hook: value for hook, _, value in events(epochs=1, print_interval=2)}
    assert told["on_print_interval"] == ("experiment", pytest.approx(sum(losses[:2]) / 2))
    norm = experiment.model.weight.norm().item()
    assert told["after_validation"] == {"valid_loss": pytest.approx(norm)}
    assert told["after_epoch"] == {
        "experiment": {"loss": pytest.approx(sum(losses) / 3), "valid_loss": pytest.approx(norm)}
    }


def test_as_a_stage_status_results_and_metrics_of_the_run_have_its_numbers() -> None:
    chosen = config(epochs=2)
    del chosen["plugins"]
    run_dir = GeneralTrainer(chosen).run()["run_dir"]
    status = json.loads((run_dir / "status.json").read_text())
    assert (status["state"], status["iteration"], status["epoch"]) == ("done", 6, 2)
    results = json.loads((run_dir / "train" / "results.json").read_text())
    assert results["checkpoint"] == "train/checkpoints/step-000000000006"
    assert set(results["metrics"]["experiment"]) == {"loss", "valid_loss"}
    lines = [json.loads(line) for line in (run_dir / "train" / "metrics.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines if line["event"] == "epoch"] == [3, 6]


def test_the_best_checkpoint_of_an_experiment_is_one_that_was_validated() -> None:
    class Judged(Line):
        def valid(self) -> None:
            self.visualizer.add_scalar("valid_score", {2: 1.0, 4: 3.0, 6: 2.0, 7: 2.5}[self.iteration], self.iteration)

    context = GeneralTrainer(config(Judged, max_steps=7, valid_interval=2, save_interval=3)).run()
    folder = context["run_dir"] / "train" / "checkpoints"
    best = TrainRunner("train", folder, BestSettings(metric="valid_score", mode="min")).best()
    assert (steps(folder), best.path.name) == ([3, 6, 7], "step-000000000006")


def test_as_a_stage_a_failing_batch_ends_the_run_with_its_own_error() -> None:
    class Failing(Line):
        def train_batch(self) -> None:
            super().train_batch()
            if self.iteration == 2:
                raise OverflowError("too much")

    trainer = GeneralTrainer(config(Failing, epochs=1))
    with pytest.raises(OverflowError, match="too much"):
        trainer.run()
    (status,) = Path("runs").glob("*/latest/status.json")
    assert json.loads(status.read_text())["iteration"] == 1


class Deadly(TensorDataset):
    """A worker dies at its last sample."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        if index == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def test_as_a_stage_a_worker_that_dies_during_a_step_is_an_error_that_names_its_sample() -> None:
    class Waiting(Line):
        def setup_dataloader(self) -> None:
            self.train_loader = make_loader(Deadly(*table().tensors), seed=0, batch_size=5, num_workers=1)

        def train_batch(self) -> None:
            self.read_batch()
            time.sleep(60)

    with pytest.raises(DataError, match=r"worker 0 was killed by SIGKILL at sample 9"):
        GeneralTrainer(config(Waiting, epochs=1)).run()


def test_as_a_stage_max_iteration_is_known_to_setup_model() -> None:
    seen = []

    class Asking(Line):
        def setup_model(self) -> None:
            super().setup_model()
            seen.append(self.config.training.max_iteration)

    GeneralTrainer(config(Asking, epochs=2)).run()
    assert seen == [6]


def test_as_a_stage_epochs_of_a_loader_without_a_length_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"runner.train.epochs: is 2, and nobody knows .*; give max_steps instead"):
        GeneralTrainer(config(Streaming, epochs=2)).run()


def test_as_a_stage_a_loader_without_a_length_ends_its_epochs_where_it_ends() -> None:
    context = GeneralTrainer(config(Streaming, max_steps=7)).run()
    assert steps(context["run_dir"] / "train" / "checkpoints") == [3, 6, 7]


def test_epoch_that_a_limit_cut_short_does_not_begin_again() -> None:
    chosen = {**config(max_steps=4), "name": "extended"}
    chosen["plugins"].append(Recorder)
    path = GeneralTrainer(chosen).run()["checkpointer"].newest()
    Recorder.events = []
    chosen["runner"][0]["max_steps"] = 6
    GeneralTrainer(chosen, resume=path).run()
    told = [event[:2] for event in Recorder.events if "epoch" in event[0]]
    assert told == [("after_epoch", 6)]


@pytest.mark.parametrize(
    ("call", "instead"),
    [
        (
            lambda context: context.batches("experiment"),
            r"context.batches was called in an experiment; call read_batch",
        ),
        (lambda context: context.epochs(), r"context.epochs was called in an experiment; call read_batch, which"),
        (lambda context: context.validate(), r"context.validate was .*; call context.request\('validation'\)"),
    ],
)
def test_calls_of_a_loop_are_refused_in_an_experiment(call: Callable[[Context], Any], instead: str) -> None:
    class Calling(Line):
        def train_batch(self) -> None:
            call(self.context)

    with pytest.raises(StageError, match=instead):
        GeneralTrainer({**config(Calling, max_steps=2), "name": "calling"}).run()


def test_a_save_within_an_iteration_waits_for_its_end() -> None:
    class Saving(Line):
        def train_batch(self) -> None:
            if self.iteration == 2:
                self.context.save()
            super().train_batch()

    context = GeneralTrainer({**config(Saving, max_steps=4, save_interval=None), "name": "saving"}).run()
    assert [path.name for path in context["checkpointer"].all()] == ["step-000000000002", "step-000000000004"]
    assert equal(context["model"]["experiment"]["model"].state_dict(), loop(4))


class Epochs:
    """Notes where epochs start and end."""

    events: ClassVar[list[tuple[str, int, int]]] = []

    @hookimpl
    def before_epoch(self, context: Context) -> None:
        Epochs.events.append(("before", context["current_epoch"], context["train_state"]["iteration"]))
        assert "experiment" in context["metrics"]

    @hookimpl
    def after_epoch(self, context: Context) -> None:
        Epochs.events.append(("after", context["train_state"]["epoch"], context["train_state"]["iteration"]))


class Pairs(Line):
    """Trains on two batches in an iteration; an epoch has three."""

    def train_batch(self) -> None:
        super().train_batch()
        super().train_batch()


def test_an_iteration_that_reads_beyond_an_epoch_leaves_the_next_one_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Epochs, "events", [])
    chosen = config(Pairs, save_interval="1 epoch", valid_interval="1 epoch")
    chosen["plugins"].append(Epochs)
    chosen["runner"][0]["max_steps"] = 4
    GeneralTrainer({**chosen, "name": "pairs"}).run()
    # The second iteration reads the last batch of an epoch and the first of the next, the third the other two.
    assert Epochs.events == [("before", 0, 0), ("after", 1, 1), ("before", 1, 1), ("after", 2, 3), ("before", 2, 3)]


def test_a_limit_that_comes_after_such_an_iteration_leaves_it_open_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Epochs, "events", [])
    chosen = config(Pairs)
    chosen["plugins"].append(Epochs)
    chosen["runner"][0]["max_steps"] = 2
    GeneralTrainer({**chosen, "name": "pairs"}).run()
    chosen["runner"][0]["max_steps"] = 3
    GeneralTrainer({**chosen, "name": "pairs"}, resume="auto").run()
    starts = [event for event in Epochs.events if event[0] == "before"]
    assert starts == [("before", 0, 0), ("before", 1, 1)]


class Own(SimpleNamespace):
    """A config whose training may change."""


def changeable(cls: type[Line], output: str, **training: Any) -> tuple[Any, Own]:
    """An experiment by hand that is set up, and its config."""
    asked = Own(training=Own(**{"max_iteration": 7, "valid_interval": None, "save_interval": None, **training}))
    experiment = cls(asked, SimpleNamespace(device="cpu", nprocs=1, output=output, checkpoint_path=None))
    experiment.setup()
    return experiment, asked


def test_a_train_of_ones_own_may_train_in_parts() -> None:
    class Parts(Line):
        def train(self) -> None:
            for limit in (4, 8):
                self.config.training.max_iteration = limit
                super().train()

    experiment, _ = changeable(Parts, "out", save_interval=2)
    experiment.run()
    assert steps(Path("out/checkpoints")) == [2, 4, 6, 8]
    assert equal(experiment.model.state_dict(), loop(8))


def test_a_run_that_was_interrupted_may_be_run_again() -> None:
    class Interrupted(Line):
        at = 5

        def train_batch(self) -> None:
            if self.iteration == self.at:
                raise KeyboardInterrupt
            super().train_batch()

    experiment, _ = changeable(Interrupted, "out", save_interval=3, valid_interval=3)
    with pytest.raises(KeyboardInterrupt):
        experiment.run()
    experiment.at = 0
    # The iteration that was interrupted has read no batch.
    experiment.run()
    assert steps(Path("out/checkpoints")) == [3, 6, 7]
    assert experiment.validated == [3, 6, 7]
    assert equal(experiment.model.state_dict(), loop(7))


class Random(Line):
    """Each step depends on a random number."""

    def train_batch(self) -> None:
        x, y = self.read_batch()
        loss = mse(self.model(x), y) * torch.rand(())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


class ResumesInTrain(Random):
    def train(self) -> None:
        self.resume_or_load()
        super().train()


class ResumesInRun(Random):
    """As Parakeet's own ``run``."""

    def run(self, context: Context | None = None) -> None:
        self.resume_or_load()
        self.train()
        self.save()


class ByHand(Random):
    def run(self, context: Context | None = None) -> None:
        self.resume_or_load()
        while self.iteration < self.config.training.max_iteration:
            self.iteration += 1
            self.train_batch()
        self.save()


@pytest.mark.parametrize("cls", [ResumesInTrain, ResumesInRun, ByHand])
def test_resume_or_load_restores_the_random_generators_wherever_it_is_called(cls: type[Line]) -> None:
    def trained(output: str, limit: int, seed: int) -> Mapping[str, Tensor]:
        experiment, _ = changeable(cls, output, max_iteration=limit, save_interval=4)
        torch.manual_seed(seed)
        experiment.run()
        experiment.close()
        return dict(experiment.model.state_dict())

    whole = trained("whole", 8, 5)
    trained("parts", 4, 5)
    assert equal(trained("parts", 8, 6), whole)


def test_code_after_the_run_of_the_base_is_reached_also_if_the_run_exits() -> None:
    reached = []

    class Exiting(Line):
        def train_batch(self) -> None:
            super().train_batch()
            self.context["is_exit"] = self.iteration == 2

        def run(self, context: Context | None = None) -> None:
            super().run(context)
            reached.append(self.iteration)

    GeneralTrainer({**config(Exiting, max_steps=4), "name": "exiting"}).run()
    assert reached == [2]


def test_valid_is_in_evaluation_mode_and_without_gradients_wherever_it_is_called() -> None:
    class Validating(Line):
        def train(self) -> None:
            self.valid()

        def valid(self) -> None:
            self.modes = self.model.training, torch.is_grad_enabled()

    experiment, _ = changeable(Validating, "out")
    experiment.run()
    assert experiment.modes == (False, False)
    assert experiment.model.training
