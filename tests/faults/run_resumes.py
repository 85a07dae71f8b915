"""A run resumed at every step, in every way: ``python tests/faults/run_resumes.py [STEP…]``.

At each of the steps 1 to 39 of 40, in four epochs, with no workers, one and two, the run is ended

- inside an accumulation window, with a checkpoint of every step,
- with checkpoints at the ends of epochs alone, so that the steps after the last one come again,
- inside the validation that follows the step, which has to begin again and not go on,
- by its ``max_steps``: then it is finished, and to resume it changes nothing and leaves with 0,
- and once more in the same epoch after it was resumed,

and has to end bit for bit like one that was not. Everything is in one process; what ends a run is a BaseException.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path
from typing import Any

import torch
from loguru import logger
from torch import Tensor, nn
from torch.utils.data import Dataset
from whole_runs import differences

from pipeline import Context, GeneralTrainer, hookimpl

STEPS, EPOCH = 40, 10
WORKERS = (0, 1, 2)


class EndedError(BaseException):
    """Stands for the end of the process."""


class End:
    """A plugin that ends a run: before the batch after step ``at``, or in the validation there."""

    at, in_validation = 0, False
    validated = 0
    """Batches of validations, in all runs."""

    @hookimpl
    def before_batch(self, context: Context) -> None:
        if self.at and context["train_state"]["iteration"] == self.at and not self.in_validation:
            raise EndedError

    @hookimpl
    def before_validation(self, context: Context) -> None:
        Net.left = 1 if self.in_validation and context["train_state"]["iteration"] == self.at else None


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.tensor([index, 1.0, random.random()]) + torch.randn(3) * 0.1, torch.tensor([index / 10.0])


class Net(nn.Module):
    """With ``left``, it ends the run after so many batches of a validation."""

    left: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Any:
        if not self.training:
            if Net.left == 0:
                raise EndedError
            Net.left = None if Net.left is None else Net.left - 1
            End.validated += 1
        return self.layers(x)


def config(folder: Path, workers: int, **runner: Any) -> dict[str, Any]:
    """Four epochs of ten batches: AdamW, Noam, clipping, accumulation over three batches."""
    schedule = {"optim_type": "AdamW", "optim_conf": {"lr": 0.01}, "warmup_steps": 3, "accum_grad": 3, "grad_clip": 1.0}
    settings = {"epochs": 4, "save_interval": 1, "valid_interval": [4, "1 epoch"], "keep_last": 2, **runner}
    phase = {"name": "p", "model": Net, "loss": nn.functional.mse_loss, "dataset_name": "train"}
    return {
        "name": "config",
        "output_dir": str(folder),
        "plugins": [{"progress_bar": False}, End],
        "dataset": [
            {
                "name": "train",
                "class_path": Noisy,
                "args": {"length": 29},
                "batch_size": 3,
                "shuffle": True,
                "num_workers": workers,
            },
            {"name": "valid", "class_path": Noisy, "args": {"length": 7}, "batch_size": 3},
        ],
        "runner": [{"name": "t", "class": "train", "device": "cpu", "print_interval": 7, **settings}],
        "phase": [
            {**phase, "valid_dataset_name": "valid", "optim_schedulers": {"main": {"class": "noam", "args": schedule}}}
        ],
    }


def run(chosen: dict[str, Any], at: int = 0, in_validation: bool = False, resume: str = "auto") -> Context | None:
    """A run, up to its end or to that which it is given; None then."""
    End.at, End.in_validation = at, in_validation
    # What the process has drawn before must not matter.
    torch.manual_seed(at + 100)
    random.seed(at + 100)
    try:
        return GeneralTrainer(chosen, resume=resume).run()
    except EndedError:
        return None


def end(context: Context | None) -> dict[str, Any]:
    """Everything that could differ."""
    assert context, "the run was to go on to its end"
    entry, run_dir = context["model"]["p"], context["run_dir"]
    return {
        "weights": entry["model"].state_dict(),
        "optimizer": entry["optim_schedulers"]["main"].state_dict(),
        "metrics": context["metrics"],
        "counters": dict(context["train_state"]),
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "lines": (run_dir / "t" / "metrics.jsonl").read_bytes(),
        "checkpoints": sorted(path.name for path in (run_dir / "t" / "checkpoints").iterdir()),
    }


def resumed(folder: Path, workers: int, steps: list[int], in_validation: bool = False, **runner: Any) -> dict[str, Any]:
    """What a run comes to that is ended at these steps, one after the other."""
    chosen = config(folder, workers, **runner)
    for step in steps:
        assert run(chosen, step, in_validation) is None, "the run was to be ended"
    return end(run(chosen))


def accumulation(folder: Path, step: int, workers: int, unbroken: dict[str, Any]) -> list[str]:
    """Ended with a checkpoint of this step, in whatever place of a window that is."""
    return differences(resumed(folder, workers, [step]), unbroken["every step"])


def epoch_end(folder: Path, step: int, workers: int, unbroken: dict[str, Any]) -> list[str]:
    """Ended with none since the end of an epoch."""
    return differences(resumed(folder, workers, [step], save_interval="1 epoch"), unbroken["every epoch"])


def mid_validation(folder: Path, step: int, workers: int, unbroken: dict[str, Any]) -> list[str]:
    """Ended in the validation of this step, which begins again."""
    End.validated = 0
    found = resumed(folder, workers, [step], in_validation=True, valid_interval=1)
    # One batch was evaluated of the three before the end; the step itself comes again too.
    batches = 3 * STEPS + 1
    again = [] if End.validated == batches else [f"{End.validated} batches were evaluated instead of {batches}"]
    return again + differences(found, unbroken["every validation"])


def finished(folder: Path, step: int, workers: int, _: dict[str, Any]) -> list[str]:
    """Resumed when it is finished."""
    chosen = config(folder, workers, max_steps=step)
    context = run(chosen)
    assert context
    files = [path for path in context["run_dir"].rglob("*") if path.is_file() and path.name not in {"log.txt", "lock"}]
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}
    trainer = GeneralTrainer(chosen, resume="auto")
    again = trainer.run()
    found = [f"it left with {trainer.outcome}"] if trainer.outcome else []
    found += ["it ran"] if again else []
    found += ["it ended elsewhere"] if context["train_state"]["iteration"] != step else []
    return found + [str(path) for path in files if before[path] != (path.read_bytes(), path.stat().st_mtime_ns)]


def twice(folder: Path, step: int, workers: int, unbroken: dict[str, Any]) -> list[str]:
    """Ended, and resumed, and ended once more in the same epoch."""
    last = (step // EPOCH + 1) * EPOCH - 1
    return differences(
        resumed(folder, workers, [step, random.Random(step).randint(step, last)]), unbroken["every step"]
    )


WAYS: tuple[Callable[[Path, int, int, dict[str, Any]], list[str]], ...] = (
    accumulation,
    epoch_end,
    mid_validation,
    finished,
    twice,
)


def experiment(folder: Path, places: Iterable[tuple[int, int]]) -> tuple[Counter[str], list[str]]:
    """Each of the steps, with its number of workers, in every way; what was counted, and the faults."""
    configs = {"every step": {}, "every epoch": {"save_interval": "1 epoch"}, "every validation": {"valid_interval": 1}}
    unbroken = {name: end(run(config(folder / name, 0, **each), resume="never")) for name, each in configs.items()}
    counts, faults = Counter(combinations=0, unlike=0), list[str]()
    for (step, workers), way in product(places, WAYS):
        name = f"{way.__name__}, step {step}, {workers} workers"
        found = way(folder / name, step, workers, unbroken)
        counts.update(["combinations", way.__name__])
        counts["unlike"] += bool(found)
        faults += [f"{name}: {each}" for each in found]
    return counts, faults


if __name__ == "__main__":
    logger.remove()
    torch.set_num_threads(1)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        chosen_steps = [int(each) for each in sys.argv[1:]] or range(1, STEPS)
        result, told = experiment(Path(scratch), product(chosen_steps, WORKERS))
    print(*told, sep="\n", end="\n" if told else "")
    print(json.dumps({**result, "seconds": round(time.monotonic() - began)}))
    sys.exit(bool(told))
