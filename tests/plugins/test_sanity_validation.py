"""``sanity_validation``: errors of a validation come before the first step, and the run is the same, bit for bit."""

from __future__ import annotations

import operator
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from pipeline_plugins.sanity_validation import SanityValidation
from pipeline_plugins.shared.brain_copy import copy_of
from pipeline_plugins.shared.differences import checkpoint_differences
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from pipeline import Brain, Context, GeneralTrainer, RunnerBase, Stage, hookimpl, make_loader, observe, stages
from pipeline.checkpoint.reader import read_checkpoint
from pipeline.errors import ConfigError, DataError

mse = nn.functional.mse_loss


def config(*plugins: Any, **changes: Any) -> dict[str, Any]:
    """Two epochs of a phase ``p``: 12 samples in batches of 4 for both, with dropout and running statistics."""
    data = TensorDataset(torch.linspace(-1, 1, 36).view(12, 3), torch.linspace(0, 1, 12).view(12, 1))
    runner = {"name": "t", "class": "train", "device": "cpu", "epochs": 2, "print_interval": 1, "save_interval": 2}
    phase = {"name": "p", "model": network, "loss": mse, "dataset_name": "data", "valid_dataset_name": "data"}
    return {
        "hyper_parameters": {"optimizer": {"class": "Adam", "lr": 0.01}},
        "plugins": [{"progress_bar": False}, *plugins],
        "dataset": [{"name": "data", "class_path": lambda: data, "batch_size": 4, "shuffle": True}],
        "runner": [{**runner, **changes.pop("runner", {})}],
        "phase": [{**phase, **changes.pop("phase", {})}],
        **changes,
    }


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))


def differences(one: Context, other: Context) -> list[str]:
    """Where two runs differ in what they have measured and saved: weights, buffers, counters, random states."""
    folders = [context["run_dir"] / "t" for context in (one, other)]
    lines = [(folder / "metrics.jsonl").read_text(encoding="utf-8") for folder in folders]
    saved = [sorted(folder.glob("checkpoints/step-*")) for folder in folders]
    assert saved[0]
    places = [] if lines[0] == lines[1] else ["metrics.jsonl"]
    for pair in zip(*saved, strict=True):
        places += [found.place for found in checkpoint_differences(*map(read_checkpoint, pair))]
    # The length of timing.jsonl depends on the clock.
    return [place for place in places if not place.endswith("metric_log.timing")]


class Count:
    """A number that changes in place."""

    def __init__(self, index: int) -> None:
        self.index, self.number, self.history = index, 0, [0]

    def add(self) -> None:
        self.number += 1
        self.history.append(self.number)


class Counting(Brain):
    """Counts and draws in its validation, and what it counts is in its training loss."""

    def __init__(self) -> None:
        super().__init__({"net": network()})
        self.validations, self.seen = 0, [0]
        self.generator, self.lock = torch.Generator(), threading.Lock()
        # Many, since copies of one must not come to be those of another.
        vars(self).update({f"count_{index}": Count(index) for index in range(100)})

    def on_stage_start(self, stage: Stage, epoch: int | None = None) -> None:
        self.validations += stage is Stage.VALID

    def compute_forward(self, batch: Any, stage: Stage) -> Tensor:
        if stage is Stage.VALID:
            self.seen[0] += 1
            for index, count in enumerate(self.counts()):
                assert count.index == index
                count.add()
            self.log("drawn", torch.rand(()) + random.random())
        noise = torch.rand((), generator=self.generator)
        predictions: Tensor = self.modules.net(batch[0]) + noise
        return predictions

    def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> Tensor:
        counted = self.validations + self.seen[0] + sum(count.number + len(count.history) for count in self.counts())
        return mse(predictions, batch[1]) * counted

    def counts(self) -> list[Count]:
        return [value for value in vars(self).values() if isinstance(value, Count)]


class Noisy(Dataset[Any]):
    """Draws from the generators in each sample."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return torch.rand(3) + random.random(), torch.rand(1)


class Endless(IterableDataset[Any]):
    """A stream that keeps its place, with a state."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[Any]:
        while self.place < 12:
            self.place += 1
            yield torch.full((3,), self.place / 12), torch.rand(1)

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


class Drawn(stages.Network):
    """A loader of torch's own, whose order is drawn from a generator of its own."""

    def build_dataset(self, settings: Any, runner: Any, context: Context) -> Any:
        data = TensorDataset(torch.linspace(-1, 1, 36).view(12, 3), torch.linspace(0, 1, 12).view(12, 1))
        return DataLoader(data, 4, shuffle=True, generator=torch.Generator().manual_seed(3))


class Unlimited(RunnerBase):
    """A loop of one's own without epochs."""

    def run(self, context: Context) -> None:
        for batch in context.batches("p", count=5, repeat=True):
            context["model"]["p"].brain.fit_batch(batch)
        context.validate()


def dataset(class_path: Any, **settings: Any) -> dict[str, Any]:
    return {"dataset": [{"name": "data", "class_path": class_path, "batch_size": 4, **settings}]}


CASES: dict[str, dict[str, Any]] = {
    "dropout, running statistics and shuffle": {},
    "metrics": {"phase": {"metrics": {"error": {"class": "MAE"}}}},
    "a Brain that counts": {"phase": {"model": Counting, "loss": None}},
    "samples that are drawn": dataset(Noisy),
    "samples that nobody seeds": {**dataset(Noisy, shuffle=True), "runner": {"seed": None, "epochs": 1}},
    "a stream with a state": dataset(Endless),
    "an order that is drawn": {"runner": {"network_class_path": Drawn, "save_interval": "1 epoch"}},
    "lazy modules": {"phase": {"model": lambda: nn.Sequential(nn.Dropout(0.5), nn.LazyLinear(1))}},
    "the same batches in each epoch": {"runner": {"overfit_batches": 2}},
    "a loop of one's own": {"runner": {"runner_class_path": Unlimited}},
}


def straight(monkeypatch: pytest.MonkeyPatch, *plugins: Any, **changes: Any) -> Context:
    """A run, from one random state."""
    torch.manual_seed(5)
    random.seed(5)
    return GeneralTrainer(config(*plugins, **changes)).run()


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_it_changes_no_bit_of_a_run(case: str, monkeypatch: pytest.MonkeyPatch, log_lines: list[str]) -> None:
    without = straight(monkeypatch, **CASES[case])
    assert not any("sanity_validation: p" in line for line in log_lines)
    checked = straight(monkeypatch, {"sanity_validation": {}}, **CASES[case])
    assert sum("sanity_validation: p" in line for line in log_lines) == 1
    assert differences(checked, without) == []


def test_a_copy_of_a_brain_shares_its_weights_and_what_cannot_be_copied() -> None:
    # A run shows this only by chance: it depends on where objects lie in memory.
    brain = Counting()
    own: Any = copy_of(brain)
    assert not any(map(operator.is_, own.counts(), brain.counts()))
    assert [count.index for count in own.counts()] == list(range(100))
    assert all(map(operator.is_, own.modules.parameters(), brain.modules.parameters()))
    assert own.lock is brain.lock


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
def test_it_changes_no_bit_of_a_run_with_workers(persistent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Workers(stages.Network):
        def build_dataset(self, settings: Any, runner: Any, context: Context) -> Any:
            own = {"shuffle": True, "batch_size": 4, "num_workers": 2, "persistent_workers": persistent}
            return make_loader(Noisy(), seed=runner.seed, **own)

    changes = {"runner": {"network_class_path": Workers}}
    checked = straight(monkeypatch, {"sanity_validation": {}}, **changes)
    assert differences(checked, straight(monkeypatch, **changes)) == []


class Calls(Brain):
    """Notes what is called."""

    calls: list[Any] = []  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__({"net": nn.Linear(3, 1)})

    def on_stage_start(self, stage: Stage, epoch: int | None = None) -> None:
        self.calls.append(("start", stage.name, epoch))

    def evaluate_batch(self, batch: Any, stage: Stage) -> Tensor:
        assert not torch.is_grad_enabled()
        assert not self.modules.net.training
        self.calls.append(("batch", stage.name, len(batch[0])))
        return super().evaluate_batch(batch, stage)

    def on_stage_end(self, stage: Stage, stage_loss: float, epoch: int | None = None) -> None:
        self.calls.append(("end", stage.name, epoch))

    def compute_forward(self, batch: Any, stage: Stage) -> Any:
        return observe("predictions", self.modules.net(batch[0]))

    def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> Tensor:
        return mse(predictions, batch[1])


class Hooks:
    """Notes its hooks among the calls."""

    @hookimpl
    def before_validation(self) -> None:
        Calls.calls.append("before_validation")

    @hookimpl
    def on_observe(self) -> None:
        Calls.calls.append("on_observe")


@pytest.fixture(autouse=True)
def _no_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Calls, "calls", [])


@pytest.mark.parametrize("runner", [stages.Runner, Unlimited])
def test_it_begins_a_validation_computes_two_batches_and_does_not_end_it(runner: type) -> None:
    own = {"phase": {"model": Calls, "loss": None}, "runner": {"runner_class_path": runner}}
    GeneralTrainer(config({"sanity_validation": {}}, Hooks, **own)).run()
    assert Calls.calls[:4] == [
        ("start", "VALID", 0),
        ("batch", "VALID", 4),
        ("batch", "VALID", 4),
        ("start", "TRAIN", 0),
    ]


def test_it_takes_as_many_batches_as_there_are() -> None:
    own = {"phase": {"model": Calls, "loss": None}}
    GeneralTrainer(config({"sanity_validation": {"batches": 9}}, **own)).run()
    assert [call[0] for call in Calls.calls[:5]] == ["start", "batch", "batch", "batch", "start"]


def test_a_phase_without_validation_data_is_left_out(log_lines: list[str]) -> None:
    GeneralTrainer(config({"sanity_validation": {}}, phase={"valid_dataset_name": None})).run()
    assert not any("sanity_validation: p" in line for line in log_lines)


class Wrong(Calls):
    """Its validation fails."""

    def evaluate_batch(self, batch: Any, stage: Stage) -> Tensor:
        raise ValueError("no such column")


def test_an_error_comes_before_the_first_step_and_names_the_phase(log_lines: list[str]) -> None:
    wrong = config({"sanity_validation": {}}, phase={"model": Wrong, "loss": None})
    good = {**config()["phase"][0], "name": "good"}
    with pytest.raises(ValueError, match="no such column"):
        GeneralTrainer({**wrong, "phase": [good, *wrong["phase"]]}).run()
    assert any("failed: ValueError: no such column (phase.p)" in line for line in log_lines)
    assert Calls.calls == [("start", "VALID", 0)]


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"auc": {"class": "Accuracy"}}, "phase.p: Accuracy "),
        ({}, "phase.p: 'short' gave no batch; check the dataset, or drop_last"),
    ],
)
def test_a_metric_or_data_that_do_not_fit_are_found(metrics: dict[str, Any], message: str) -> None:
    own = {"metrics": metrics} if metrics else {"valid_dataset_name": "short"}
    wrong = config({"sanity_validation": {}}, phase=own)
    wrong["dataset"].append({**wrong["dataset"][0], "name": "short", "batch_size": 99, "drop_last": True})
    with pytest.raises(DataError, match=message):
        GeneralTrainer(wrong).run()


class KilledError(BaseException):
    """Stands for the end of the process."""


class Kill:
    """Ends the process once, in iteration 4."""

    done = False

    @hookimpl
    def before_batch(self, context: Context) -> None:
        if context["train_state"]["iteration"] == 4 and not Kill.done:
            Kill.done = True
            raise KilledError


def test_a_run_that_is_resumed_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Kill, "done", False)
    own = config({"sanity_validation": {}}, Kill, phase={"model": Calls, "loss": None}, name="config")
    with pytest.raises(KilledError):
        GeneralTrainer(own).run()
    Calls.calls.clear()
    GeneralTrainer(own, resume="auto").run()
    assert Calls.calls[0] == ("start", "TRAIN", 1)


def test_no_batch_is_refused() -> None:
    with pytest.raises(ConfigError, match="sanity_validation: batches is 0; write 1 or more"):
        SanityValidation(batches=0)
