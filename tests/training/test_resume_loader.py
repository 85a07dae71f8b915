"""Runs with loaders that are not ours, which a network stage has made: resumed ones against unbroken ones, bit for bit."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler

from pipeline import Context, GeneralTrainer, hookimpl, stages
from pipeline.checkpoint.comparison import differences
from pipeline.data.loader import EpochSampler, make_loader, random_sampler_of
from pipeline.signals import StoppedError
from tests.training.conftest import mse, table

EPOCH, AT = 5, 7


class KilledError(BaseException):
    """Stands for the end of the process."""


class Kill:
    """A plugin that ends the run before a batch, or has a signal end it."""

    at = AT
    by: signal.Signals | None = None

    @hookimpl
    def before_batch(self, context: Context) -> None:
        if context["train_state"]["iteration"] == self.at:
            if self.by is None:
                raise KilledError
            os.kill(os.getpid(), self.by)


class Own(stages.Network):
    """Makes its loaders as a test says."""

    make: Callable[[], Any]

    def build_dataset(self, settings: Any, runner: Any, context: Context) -> Any:
        return type(self).make()


class Resuming:
    """A loader that draws its order, and knows its place."""

    def __init__(self) -> None:
        self.order: list[int] = []

    def __iter__(self) -> Iterator[Any]:
        self.order = self.order or torch.randperm(20).tolist()
        while self.order:
            chosen, self.order = self.order[:4], self.order[4:]
            yield table(20)[chosen]

    def __len__(self) -> int:
        return EPOCH

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order = state["order"]


def with_generator() -> Any:
    return DataLoader(table(20), 4, shuffle=True, generator=torch.Generator().manual_seed(3))


def weighted() -> Any:
    return make_loader(table(20), seed=0, batch_size=4, sampler=WeightedRandomSampler(torch.ones(20), 20))


DRAWN: dict[str, Callable[[], Any]] = {
    "shuffled": lambda: DataLoader(table(20), 4, shuffle=True),
    "shuffled, with a worker": lambda: DataLoader(table(20), 4, shuffle=True, num_workers=1),
    "shuffled, with a generator": with_generator,
    "weighted": lambda: DataLoader(table(20), 4, sampler=WeightedRandomSampler(torch.ones(20), 20)),
}


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Context, Context]]:
    """Runs twice with a loader: to the end, and ended on the way and resumed."""

    def run(make: Callable[[], Any], by: signal.Signals | None = None, **runner: Any) -> tuple[Context, Context]:
        chosen = {
            "name": "config",
            "plugins": [{"progress_bar": False}, Kill],
            "hyper_parameters": {"optimizer": {"class": "Adam", "lr": 0.1}},
            "dataset": [{"name": "d", "class_path": lambda: table(20)}],
            "runner": [
                {"name": "t", "class": "train", "device": "cpu", "epochs": 3, "save_interval": 1}
                | {"network_class_path": Own, **runner}
            ],
            "phase": [{"name": "p", "model": lambda: nn.Linear(3, 1), "loss": mse, "dataset_name": "d"}],
        }
        monkeypatch.setattr(Own, "make", staticmethod(make), raising=False)
        monkeypatch.setattr(Kill, "at", -1)
        unbroken = GeneralTrainer(chosen).run()
        monkeypatch.setattr(Kill, "at", AT)
        monkeypatch.setattr(Kill, "by", by)
        with pytest.raises(StoppedError if by else KilledError):
            GeneralTrainer(chosen).run()
        monkeypatch.setattr(Kill, "at", -1)
        torch.manual_seed(99)
        return unbroken, GeneralTrainer(chosen, resume="auto").run()

    return run


def unlike(contexts: tuple[Context, Context]) -> list[str]:
    ends = [
        {
            "weights": each["model"]["p"]["model"].state_dict(),
            "lines": (each["run_dir"] / "t" / "metrics.jsonl").read_text(encoding="utf-8"),
            "checkpoints": [path.name for path in each["checkpointer"].all()],
        }
        for each in contexts
    ]
    return [str(each) for each in differences(*ends)]


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", DRAWN)
def test_an_order_that_is_drawn_is_resumed_in_the_middle_of_an_epoch(
    name: str, both: Callable[..., tuple[Context, Context]], log_lines: list[str]
) -> None:
    """The random generators are restored to the start of the epoch, and its first batches are read again."""
    contexts = both(DRAWN[name])
    assert unlike(contexts) == []
    assert [int(path.name[-2:]) for path in contexts[1]["checkpointer"].all()] == [13, 14, 15]
    assert any("going on after iteration 7," in line for line in log_lines)
    assert any("INFO reading 2 batches of the epoch again" in line for line in log_lines)


@pytest.mark.slow
def test_workers_that_stay_have_the_same_order_after_a_resume(both: Callable[..., tuple[Context, Context]]) -> None:
    """torch draws a number when workers start. They start once more, and the number is not drawn again."""
    kept = {"shuffle": True, "num_workers": 1, "persistent_workers": True}

    contexts = both(lambda: DataLoader(table(20), 4, **kept))  # type: ignore[arg-type]

    assert unlike(contexts) == []


@pytest.mark.parametrize("name", ["shuffled", "shuffled, with a worker"])
@pytest.mark.slow
def test_a_signal_ends_an_epoch_whose_order_is_drawn_after_its_batch(
    name: str, both: Callable[..., tuple[Context, Context]], log_lines: list[str]
) -> None:
    assert unlike(both(DRAWN[name], by=signal.SIGTERM, save_interval="9 epoch")) == ["checkpoints: 1 items and 2 items"]
    assert any("going on after iteration 8," in line for line in log_lines)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("make", [Resuming, weighted])
def test_a_loader_that_knows_its_place_is_resumed_there(
    make: Callable[[], Any], both: Callable[..., tuple[Context, Context]], log_lines: list[str]
) -> None:
    assert unlike(both(make)) == []
    assert any("going on after iteration 7," in line for line in log_lines)
    assert not any("batches of the epoch again" in line for line in log_lines)


def test_an_order_is_known_where_dataset_or_epoch_alone_decide_it() -> None:
    orders = [
        SequentialSampler(range(4)),
        EpochSampler(range(4), True, 0),
        RandomSampler(range(4)),
        SubsetRandomSampler([1, 2]),
    ]
    loaders = [DataLoader(table(4), sampler=each) for each in orders]
    loaders += [DataLoader(table(4), batch_sampler=[[0, 1], [3, 2]]), make_loader(table(4), seed=0, shuffle=True)]
    assert list(map(random_sampler_of, loaders)) == ["", "", "RandomSampler", "SubsetRandomSampler", "", ""]
