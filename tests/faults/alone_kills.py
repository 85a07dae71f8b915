"""A Brain's ``fit`` and an experiment, both without a run, killed at random moments and begun again until they are done.

    python tests/faults/alone_kills.py [KILLS [SEED]]

kills each of the two so often, by SIGKILL: at a random batch or validation, or at a random write of a save. A training
passes if all that it has come to is bit for bit what an unbroken one comes to: the weights, the state of the optimizer,
the counters, the random generators, the numbers, which checkpoints are left, and the files beside them.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from loguru import logger
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from pipeline import Brain, Checkpointer, ExperimentBase, Stage
from pipeline.checkpoint import reader, storage
from pipeline.checkpoint.comparison import differences
from pipeline.checkpoint.pytree import load_state, save_state
from pipeline.compute.trainable import trainable_of
from pipeline.data.loader import make_loader

Tell = Callable[[str], None]

SEED = 3
LAST = 28
"""Iterations: 4 epochs of 7 batches."""


def table() -> TensorDataset:
    """26 inputs, and a target of each."""
    x = torch.randn(26, 3, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sum(1, keepdim=True).sin())


def dropping() -> nn.Module:
    """A model whose weights depend on the random generator at every step, and the seeds of a script."""
    torch.manual_seed(SEED)
    random.seed(SEED)
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))


class Dropping(Brain):
    """Trains it by itself, with Adam, and windows of two batches, and reports a number of its own."""

    def __init__(self, folder: Path, tell: Tell) -> None:
        options = {"ckpt_interval_steps": 3, "grad_accumulation_factor": 2}
        checkpointer = Checkpointer(folder / "checkpoints", keep_last=3)
        super().__init__({"net": dropping()}, lambda each: torch.optim.Adam(each, 0.05), None, options, checkpointer)
        self.tell = tell

    def compute_forward(self, batch: Any, stage: Stage) -> Tensor:
        self.tell(stage.name)
        predictions: Tensor = self.modules.net(batch[0])
        return predictions

    def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> Tensor:
        self.log("size", predictions.abs().mean())
        return nn.functional.mse_loss(predictions, batch[1])


def fit(folder: Path, tell: Tell) -> dict[str, Any]:
    """The state of a Brain at the end of its fit."""
    brain = Dropping(folder, tell)
    keywords = {"batch_size": 4, "shuffle": True}
    brain.fit(range(4), table(), table(), train_loader_kwargs=keywords, valid_loader_kwargs={"batch_size": 13})
    return {
        "weights": dict(brain.modules.state_dict()),
        "optimizer": brain.optimizer.state_dict(),
        **trainable_of(brain).counters,
    }


class Experiment(ExperimentBase):
    """Trains the same model by hand."""

    tell: Tell

    def setup_dataloader(self) -> None:
        self.train_loader = make_loader(table(), seed=SEED, shuffle=True, batch_size=4)
        self.valid_loader = make_loader(table(), seed=SEED, batch_size=13)

    def setup_model(self) -> None:
        self.model = dropping()
        self.optimizer = torch.optim.Adam(self.model.parameters(), 0.05)
        self.decay = torch.optim.lr_scheduler.StepLR(self.optimizer, 5)

    def train_batch(self) -> None:
        x, y = self.read_batch()
        self.tell("TRAIN")
        loss = nn.functional.mse_loss(self.model(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.decay.step()
        self.visualizer.add_scalar("loss", loss, self.iteration)

    def valid(self) -> None:
        for x, y in self.valid_loader:
            self.tell("VALID")
            loss = nn.functional.mse_loss(self.model(x), y)
            self.visualizer.add_scalar("valid_loss", loss, self.iteration)
        # It may draw numbers too.
        torch.rand(1)


def experiment(folder: Path, tell: Tell) -> dict[str, Any]:
    """The state of an experiment at the end of its training."""
    training = {"max_iteration": LAST, "valid_interval": [5, "1 epoch"], "save_interval": [3, "1 epoch"]}
    args = SimpleNamespace(device="cpu", nprocs=1, output=str(folder), checkpoint_path=None)
    own = Experiment({"training": training}, args)
    own.tell = tell
    own.setup()
    own.run()
    return {"weights": dict(own.model.state_dict()), "optimizer": own.optimizer.state_dict(), **own.train_state}


PROGRAMS = {"fit": fit, "experiment": experiment}


def slow_disk(seconds: float, tell: Tell) -> None:
    """From now on each write takes a while, and is told of."""

    def slowly(operation: Callable[..., Any]) -> Callable[..., Any]:
        def operate(self: Any, *arguments: Any) -> Any:
            tell("save")
            time.sleep(seconds)
            return operation(self, *arguments)

        return operate

    for name in ("mkdir", "write", "fsync", "rename", "fsync_folder", "remove"):
        setattr(storage.Disk, name, slowly(getattr(storage.Disk, name)))


class Process:
    """A program that is forked from this process, which has imported everything.

    Args:
        program: its name.
        folder: where it saves, and at its end writes what it has come to.
        seconds: what each write takes.
    """

    def __init__(self, program: str, folder: Path, seconds: float) -> None:
        self._reading, writing = os.pipe()
        self.code: int | None = None
        self.pid = os.fork()
        if self.pid:
            os.close(writing)
            return
        code = 1
        try:
            tell = lambda moment: os.write(writing, moment[0].encode()) and None  # noqa: E731
            slow_disk(seconds, tell)
            state = PROGRAMS[program](folder, tell)
            random_state = {"torch": torch.get_rng_state(), "python": random.random()}
            save_state(folder / "end", {**state, **random_state})
            code = 0
        except BaseException as error:
            (folder / "error").write_text(repr(error), encoding="utf-8")
        finally:
            os._exit(code)

    def kill_after(self, moment: str, count: int, seconds: float) -> None:
        """Kill it so many seconds after the moment has come so often; not if it ends before that."""
        while count and (told := os.read(self._reading, 1)):
            count -= told == moment.encode()
        time.sleep(seconds)
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """What it left with, or the negative signal that ended it."""
        while os.read(self._reading, 4096):
            pass
        os.close(self._reading)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def end(folder: Path) -> dict[str, Any]:
    """All that a training has come to."""
    checkpoints = sorted((folder / "checkpoints").iterdir())
    last = reader.read_checkpoint(checkpoints[-1])
    numbers = folder / "metrics.jsonl"
    return {
        "state": load_state(folder / "end"),
        "weights": last.weights,
        "training": last.training,
        "counters": last.train_state,
        "metrics": [reader.read_checkpoint(path).metrics for path in checkpoints],
        "checkpoints": [path.name for path in checkpoints],
        "names": sorted(path.name for path in folder.iterdir()),
        "lines": numbers.read_text(encoding="utf-8") if numbers.exists() else "",
    }


def left_by_saves(folder: Path) -> set[str]:
    """What saves that were not finished have left."""
    names = {path.name for path in (folder / "checkpoints").glob("*")}
    return {name for name in names if name.startswith((".tmp-", ".del-")) or name.endswith(".new")}


class Killed(NamedTuple):
    """A training that is over.

    Attributes:
        kills: how often it was killed.
        inside: how often inside a save.
        faults: what is otherwise than in the unbroken one.
    """

    kills: int
    inside: int
    faults: list[str]


def killed(program: str, folder: Path, expected: dict[str, Any], kills: int, chance: random.Random) -> Killed:
    """One training, killed so often, or less often where it is quicker, and begun again until it is done."""
    done, inside, code = 0, 0, -signal.SIGKILL
    while code == -signal.SIGKILL:
        before = left_by_saves(folder) if done else set()
        process = Process(program, folder, chance.choice((0.0, 0.001, 0.002)))
        if done < kills:
            moment, most = chance.choice((("T", LAST), ("V", 8), ("s", 150), ("s", 150), ("s", 150)))
            process.kill_after(moment, chance.randint(0, most // kills), chance.uniform(0, 0.002))
        code = process.wait()
        done += code == -signal.SIGKILL
        inside += bool(left_by_saves(folder) - before)
    if code:
        return Killed(done, inside, [f"{program}: left with {code}: {(folder / 'error').read_text(encoding='utf-8')}"])
    places = differences(end(folder), expected)
    return Killed(done, inside, [f"{program}, {done} kills: {place}" for place in places])


def kill(program: str, folder: Path, kills: int, chance: random.Random) -> tuple[Counter[str], list[str]]:
    """Kill so many times, one to four times in each training; what was counted, and the faults."""
    torch.set_num_threads(1)
    # What each process would import by itself: the first optimizer imports torch's compiler.
    torch.optim.Adam([torch.zeros(1)])
    import_module("pipeline.brain.fit")
    unbroken = Path(tempfile.mkdtemp(dir=folder))
    assert Process(program, unbroken, 0).wait() == 0, (unbroken / "error").read_text(encoding="utf-8")
    expected = end(unbroken)
    counts, faults = Counter({"kills": 0, "inside a save": 0, "trainings": 0, "unlike": 0}), []
    while left := kills - counts["kills"]:
        own = Path(tempfile.mkdtemp(dir=folder))
        over = killed(program, own, expected, min(left, chance.randint(1, 4)), chance)
        unlike = int(bool(over.faults))
        counts.update({"kills": over.kills, "inside a save": over.inside, "trainings": 1, "unlike": unlike})
        faults += over.faults
    return counts, faults


def main(kills: int = 100, seed: int = 0) -> int:
    """Print what was counted of each program; 1 where one came to another end."""
    logger.remove()
    began, found = time.monotonic(), {}
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        for program in PROGRAMS:
            found[program], faults = kill(program, Path(scratch), kills, random.Random(f"{program} {seed}"))
            wrong += faults
    print(*wrong, sep="\n", end="\n" if wrong else "")
    print(json.dumps({**found, "seconds": round(time.monotonic() - began)}))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
