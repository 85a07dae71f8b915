"""A run on a stream with a state that is interrupted and resumed, against one that is not: equal bit for bit."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from pipeline import Context, GeneralTrainer, hookimpl
from pipeline.checkpoint.reader import read_checkpoint
from pipeline.errors import DataError

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    # where there are fewer processors than workers
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]


class KilledError(BaseException):
    """Stands for the end of the process."""


class Kill:
    """A plugin that ends the run before a batch."""

    at = 0

    @hookimpl
    def before_batch(self, context: Context) -> None:
        if self.at and context["train_state"]["iteration"] == self.at:
            raise KilledError


class Lines(IterableDataset[tuple[Tensor, Tensor]]):
    """Noisy samples, and how many of them were given."""

    def __init__(self) -> None:
        self.given = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while self.given < 13:
            self.given += 1
            yield torch.randn(3) + random.random(), torch.tensor([self.given / 10.0])

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state["given"]


class Buffered(Lines):
    """Shuffles a buffer, with a state that knows nothing of it, as a stream of Hugging Face does; each epoch otherwise."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        drawn, buffer = random.Random(self.epoch), []
        for sample in super().__iter__():
            buffer.append(sample)
            if len(buffer) > 3:
                yield buffer.pop(drawn.randrange(4))
        yield from buffer


class Unplain(Lines):
    def state_dict(self) -> dict[str, Any]:
        return {"given": {self.given}}


def config(workers: int, dataset: type[Any] = Lines, **runner: Any) -> dict[str, Any]:
    return {
        "name": "config",
        "plugins": [{"progress_bar": False}, Kill],
        "hyper_parameters": {"optimizer": {"class": "Adam", "lr": 0.01}},
        "dataset": [{"name": "train", "class_path": dataset, "batch_size": 2, "num_workers": workers}],
        "runner": [{"name": "t", "class": "train", "device": "cpu", "epochs": 2, "save_interval": 1, **runner}],
        "phase": [
            {
                "name": "p",
                "model": lambda: nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1)),
                "loss": nn.functional.mse_loss,
                "dataset_name": "train",
            }
        ],
    }


def end(context: Context) -> list[Any]:
    """Weights, optimizer, numbers and generators, as text: of floats it is exact."""
    entry = context["model"]["p"]
    lines = [json.loads(line) for line in (context["run_dir"] / "t" / "metrics.jsonl").read_text().splitlines()]
    weights = {name: each.tolist() for name, each in entry["model"].state_dict().items()}
    return [
        weights,
        str(entry["optim_schedulers"]["main"].state_dict()),
        lines,
        torch.get_rng_state().tolist(),
        random.getstate(),
    ]


def killed(monkeypatch: pytest.MonkeyPatch, at: int, chosen: dict[str, Any], resume: str = "never") -> None:
    """A run that ends before this batch; others draw from the generators before the next."""
    monkeypatch.setattr(Kill, "at", at)
    with pytest.raises(KilledError):
        GeneralTrainer(chosen, resume=resume).run()
    monkeypatch.setattr(Kill, "at", 0)
    torch.manual_seed(at + 100)
    random.seed(at + 100)


@pytest.mark.parametrize(("workers", "limit"), [(0, None), (1, None), (2, None), (3, None), (2, 5)])
@pytest.mark.slow
def test_a_stream_with_a_state_is_resumed_from_it_bit_for_bit(
    workers: int, limit: int | None, monkeypatch: pytest.MonkeyPatch, log_lines: list[str]
) -> None:
    chosen = config(workers, limit_batches=limit)
    expected = end(GeneralTrainer(chosen).run())
    killed(monkeypatch, 2, chosen)
    killed(monkeypatch, 4, chosen, resume="auto")
    killed(monkeypatch, 8, chosen, resume="auto")
    assert end(GeneralTrainer(chosen, resume="auto").run()) == expected
    assert not any("again" in line for line in log_lines)


def test_a_window_that_the_end_of_a_stream_closes_is_that_of_its_batches_after_a_resume(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The checkpoint is of the last batch, of whose window nothing comes after the resume."""
    chosen = config(0)
    chosen["hyper_parameters"]["optimizer"] = {"class": "SGD", "lr": 0.1}
    # Batches of 5, 5 and 3 samples.
    chosen["dataset"][0]["batch_size"], chosen["runner"][0]["accum_grad"] = 5, 2
    expected = end(GeneralTrainer(chosen).run())
    killed(monkeypatch, 3, chosen)
    assert end(GeneralTrainer(chosen, resume="auto").run()) == expected


@pytest.mark.quick_cases(0)
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_stream_that_is_to_be_read_again_is_resumed_bit_for_bit(
    workers: int, monkeypatch: pytest.MonkeyPatch, log_lines: list[str]
) -> None:
    chosen = config(workers, Buffered)
    chosen["dataset"][0]["resume"] = "reread"
    expected = end(GeneralTrainer(chosen).run())
    killed(monkeypatch, 10, chosen)
    assert end(GeneralTrainer(chosen, resume="auto").run()) == expected
    assert [line.split()[0] for line in log_lines if "again" in line] == ["INFO", "INFO"]


@pytest.mark.slow
def test_another_number_of_workers_cannot_go_on_in_the_middle_of_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    killed(monkeypatch, 3, config(2))
    message = r"^phase.p: dataset.train.num_workers: 2 -> 3: has changed in the middle of an epoch"
    with pytest.raises(DataError, match=message):
        GeneralTrainer(config(3), resume="auto").run()


def test_between_two_epochs_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    killed(monkeypatch, 8, config(2, save_interval="1 epoch"))
    assert GeneralTrainer(config(0), resume="auto").run()["train_state"]["epoch"] == 2


@pytest.mark.parametrize("workers", [0, 1])
def test_a_state_that_cannot_be_saved_is_told_before_anything_is_lost(workers: int) -> None:
    message = r"dataset.train: Unplain.state_dict\(\)\['given'\]: is a set, which cannot be saved; keep the state in"
    with pytest.raises(DataError, match=message):
        GeneralTrainer(config(workers, Unplain)).run()


def test_a_checkpoint_in_an_epoch_holds_the_state_of_each_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    killed(monkeypatch, 3, config(2))
    [path] = Path("runs").glob("*/2*/t/checkpoints/step-000000000003")
    state: Any = read_checkpoint(path).state
    data = state.engine.inner[0].state.cursor.place
    assert [state["dataset"] for state in data["states"]] == [{"given": 7}, {"given": 4}]
    assert (data["last"], data["taken"], data["shares"]) == (0, 3, 2)
