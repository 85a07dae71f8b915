"""A training that a limit ends, and that is resumed with a higher one: ``python tests/faults/run_limits.py [PROGRAM…]``.

A training up to a limit L, resumed up to M, has to end bit for bit like one that runs up to M at once: weights, optimizers,
random generators, counters, schedules, ``metrics.jsonl``, and whatever else the checkpoint of M holds. L is each place within
two epochs, for each kind of limit (``max_steps``, ``optimizer_step_limit``, ``max_time``), and M lies within the third epoch.
``PROGRAMS`` says what trains. The clock of ``max_time`` is ours: each batch takes ten seconds.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from loguru import logger
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset
from whole_runs import differences

from pipeline import Brain, Checkpointer, Context, ExperimentBase, GeneralTrainer, RunnerBase, hookimpl
from pipeline.brain.brain import Stage
from pipeline.checkpoint import reader


class Clock:
    """The clock that ``max_time`` reads; the plugin lets each batch take ten seconds."""

    now = 0.0

    @hookimpl
    def before_batch(self) -> None:
        Clock.now += 10


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Samples with noise from the global generator."""

    def __init__(self, length: int = 26) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.randn(3) + index / 10, torch.tensor([index / 10.0])


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """A stream that says how long it is; with ``factor``, a multiple of the truth."""

    def __init__(self, length: int = 26, factor: int = 1) -> None:
        self.length = length
        self.factor = factor

    def __len__(self) -> int:
        return self.length * self.factor

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for index in range(self.length):
            yield torch.full((3,), index / 10), torch.tensor([index / 10.0])


class Net(nn.Sequential):
    """Has a state that training changes, and draws numbers."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 1))


class Loop(RunnerBase):
    """Trains two phases by hand, and validates one of them in the middle of an epoch."""

    def run(self, context: Context) -> None:
        for epoch in context.epochs():
            for batch in context.batches("a"):
                context["model"]["a"].brain.fit_batch(batch)
            if epoch % 2 == 0:
                context.validate("a")
            for batch in context.batches("b", count=2):
                context["model"]["b"].brain.fit_batch(batch)


class Rounds(RunnerBase):
    """Trains without epochs: one pass that repeats, in whose batches another begins now and then."""

    def run(self, context: Context) -> None:
        batches = context.batches("a", repeat=True)
        for batch in batches:
            context["model"]["a"].brain.fit_batch(batch)
            if batches.done % 3 == 2:
                for other in context.batches("b", count=2):
                    context["model"]["b"].brain.fit_batch(other)


class Experiment(ExperimentBase):
    """Has an accumulation of its own, over two batches, and a schedule that each validation changes."""

    def setup_dataloader(self) -> None:
        torch.manual_seed(3)
        self.train_loader = torch.utils.data.DataLoader(Noisy(), batch_size=4, shuffle=True)
        self.valid_loader = [torch.ones(2, 3)]

    def setup_model(self) -> None:
        self.model = Net()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, patience=0)

    def train_batch(self) -> None:
        x, y = self.read_batch()
        loss = nn.functional.mse_loss(self.model(x), y)
        loss.backward()
        self.visualizer.add_scalar("loss", loss.detach(), self.iteration)
        if self.iteration % 2 == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def valid(self) -> None:
        number = self.model(self.valid_loader[0]).mean().item() + torch.rand(()).item()
        self.visualizer.add_scalar("valid_loss", number, self.iteration)
        self.plateau.step(number)


class Line(Brain):
    """A Brain whose validation draws numbers, as those of SpeechBrain may."""

    def compute_forward(self, batch: Any, stage: Stage) -> Tensor:
        return self.modules.net(batch[0])

    def compute_objectives(self, predictions: Tensor, batch: Any, stage: Stage) -> Tensor:
        noise = torch.rand(()) if stage is Stage.VALID else torch.zeros(())
        return nn.functional.mse_loss(predictions, batch[1]) + noise


EPOCH = 10
STEPS = 24
PROGRAMS: dict[str, dict[str, Any]] = {
    "phases": {},
    "loop": {"runner_class_path": Loop},
    "rounds": {"runner_class_path": Rounds, "epochs": None},
    "stream": {"data": Stream, "args": {}},
    "wrong_length": {"data": Stream, "args": {"factor": 2}},
    "experiment": {"runner_class_path": Experiment},
}


def config(folder: Path, data: Any = Noisy, args: Any = None, **runner: Any) -> dict[str, Any]:
    """Two phases of 7 and 3 batches, with windows of 3 and 2 batches, a schedule by validations and one by steps."""
    schedule = {"optim_type": "AdamW", "optim_conf": {"lr": 0.01}}
    plateau = {"class": "plateau", "args": {**schedule, "patience": 0, "accum_grad": 3}}
    noam = {"class": "noam", "args": {**schedule, "warmup_steps": 3, "accum_grad": 2, "grad_clip": 1.0}}
    phase = {"model": Net, "loss": nn.functional.mse_loss}
    first = {**phase, "name": "a", "dataset_name": "seven", "valid_dataset_name": "valid"}
    second = {**phase, "name": "b", "dataset_name": "three"}
    settings = {"epochs": 3, "valid_interval": [4, "1 epoch"], "print_interval": 2, "save_interval": "1 epoch"}
    best = {"metric": "valid_loss", "mode": "min"}
    seven = {"name": "seven", "class_path": data, "args": args or {}, "batch_size": 4, "shuffle": data is Noisy}
    made = {
        "name": "config",
        "output_dir": str(folder),
        "plugins": [{"progress_bar": False}, Clock, {"early_stopping": {"patience": 50}}],
        "dataset": [
            seven,
            {"name": "three", "class_path": Noisy, "args": {"length": 11}, "batch_size": 4, "shuffle": True},
            {"name": "valid", "class_path": Noisy, "args": {"length": 7}, "batch_size": 3},
        ],
        "runner": [
            {"name": "t", "class": "train", "device": "cpu", "seed": 5, **settings, "keep_best": best, **runner}
        ],
        "phase": [
            {**first, "optim_schedulers": {"main": plateau}},
            {**second, "optim_schedulers": {"main": noam}},
        ],
    }
    if runner.get("runner_class_path") is Experiment:
        made |= {"phase": [], "dataset": []}
        made["runner"][0].pop("keep_best")
    return made


def limits(program: str) -> Iterator[tuple[dict[str, Any], int | None]]:
    """Each limit within two epochs, with the iteration at which it ends the training, where that is clear.

    A pass in the body of another's batch is part of that step, which ends before the training does.
    """
    for step in range(1, 2 * EPOCH + 1):
        iteration = None if program == "rounds" else step
        yield {"max_steps": step}, iteration
        yield {"max_time": f"{10 * step} second"}, iteration
    if program != "experiment":
        for update in range(1, EPOCH + 1):
            yield {"optimizer_step_limit": update}, None


def train(chosen: dict[str, Any], resume: str | Path = "never") -> dict[str, Any]:
    """Run a config; return everything that two equal runs have in common, and where the run is."""
    Clock.now = 0.0
    context = GeneralTrainer(chosen, resume=resume).run()
    checkpoint = reader.read_checkpoint(context["checkpointer"].newest())
    training = dict(checkpoint.training)
    training.pop("seconds")
    training["recoverables"] = {
        name: state for name, state in training["recoverables"].items() if name != "plugin:metric_log"
    }
    return {
        "run_dir": context["run_dir"],
        "iteration": context["train_state"]["iteration"],
        "state": {
            "weights": checkpoint.weights,
            "training": training,
            "counters": checkpoint.train_state,
            "final weights": {name: entry["model"].state_dict() for name, entry in context["model"].items()},
            "torch": torch.get_rng_state(),
            "lines": (context["run_dir"] / "t" / "metrics.jsonl").read_bytes(),
        },
    }


def unbroken(folder: Path, program: str) -> dict[str, Any]:
    """The state of a program that runs up to the last step at once."""
    state: dict[str, Any] = train(config(folder, **PROGRAMS[program], max_steps=STEPS))["state"]
    return state


def resumed(folder: Path, program: str, limit: dict[str, Any], iteration: int | None) -> dict[str, Any]:
    """The state of a program that ends at a limit, and is resumed with the other one."""
    first = train(config(folder, **PROGRAMS[program], **limit))
    assert iteration in (None, first["iteration"]), f"ended at iteration {first['iteration']}"
    state: dict[str, Any] = train(config(folder, **PROGRAMS[program], max_steps=STEPS), first["run_dir"])["state"]
    return state


def fit(folder: Path, *limits: int) -> dict[str, Any]:
    """The state of a ``Brain.fit`` with each of these limits in turn."""
    for limit in limits:
        torch.manual_seed(7)
        options = {"grad_accumulation_factor": 3, "optimizer_step_limit": limit}
        optimizer = lambda parameters: torch.optim.AdamW(parameters, 0.01)  # noqa: E731
        brain = Line({"net": Net()}, optimizer, {"seed": 1}, options, Checkpointer(folder, keep_last=2))
        data = brain.make_dataloader(Noisy(), Stage.TRAIN, batch_size=4, shuffle=True)
        brain.fit(range(3), data, brain.make_dataloader(Noisy(7), Stage.VALID, batch_size=3))
    assert brain.checkpointer
    checkpoint = reader.read_checkpoint(brain.checkpointer.newest())
    final = brain.modules.state_dict()
    return {"weights": checkpoint.weights, "training": checkpoint.training, "final": final}


def fit_differences(folder: Path, last: int = 8) -> dict[str, list[str]]:
    """``Brain.fit`` with each limit of updates within two epochs."""
    expected = fit(folder / "unbroken", last)
    return {str(limit): differences(fit(folder / str(limit), limit, last), expected) for limit in range(1, 7)}


def experiment(folder: Path, program: str) -> dict[str, list[str]]:
    """What differs after each limit."""
    with mock.patch("pipeline.engine.triggers.time", SimpleNamespace(monotonic=lambda: Clock.now)):
        expected = unbroken(folder / "unbroken", program)
        found = {}
        for number, (limit, iteration) in enumerate(limits(program)):
            state = resumed(folder / str(number), program, limit, iteration)
            found[str(limit)] = differences(state, expected)
    return found


if __name__ == "__main__":
    logger.remove()
    torch.set_num_threads(1)
    began = time.monotonic()
    programs: dict[str, Callable[[Path], dict[str, list[str]]]] = {
        program: lambda folder, own=program: experiment(folder, own) for program in PROGRAMS
    }
    programs["fit"] = fit_differences
    counts, faults = dict.fromkeys(("limits", "unlike"), 0), []
    for name in sys.argv[1:] or programs:
        with tempfile.TemporaryDirectory() as scratch:
            results = programs[name](Path(scratch))
        counts["limits"] += len(results)
        for limit, places in results.items():
            counts["unlike"] += bool(places)
            faults += [f"{name}, {limit}: {place}" for place in places]
    print(*faults, sep="\n", end="\n" if faults else "")
    print(json.dumps({**counts, "seconds": round(time.monotonic() - began)}))
    sys.exit(bool(faults))
