"""What a checkpoint costs: how long a save stops training, its work beside torch.save, and loading beside the library's.

    python tests/benchmarks/checkpoint_save.py [MEGABYTES] [--peers] [--rounds 15]

The state is a model with AdamW: a third weights, two thirds of its training state. All ways take turns in one run, in
each round in another order; of each, the median is printed, and between what half of the rounds lie. Ratios are those of
the same round; how far the same work is from itself tells what the machine does besides. Last come the function calls
that a step makes which saves nothing. ``--peers`` measures torch.distributed.checkpoint, and Lightning where it is
installed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from side_by_side import Way, calls_per_step, ratio, undisturbed
from small_job import by_run, in_memory
from torch import nn

from pipeline.brain.checkpointer import Checkpointer

LAYERS = 32
STALL, TOTAL, SAVED, LOADED = (
    "asynchronous save: training stops",
    "asynchronous save",
    "torch.save + fsync",
    "verified load",
)
DCP_STALL, DCP_TOTAL = "DCP async_save: training stops", "DCP async_save"
PLAIN_LOAD = "SHA-256 + safetensors load"
Part = tuple[str, Callable[[], object]]
"""What is measured, and by its name the work; that of several parts follows one after the other."""
Times = dict[str, list[float]]


def state(megabytes: int) -> tuple[nn.Module, dict[str, Any]]:
    """A model and the state of its optimizer."""
    torch.manual_seed(0)
    width = int((megabytes * 1e6 / 12 / LAYERS) ** 0.5)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.rand_like(parameter)
    optimizer.step()
    return model, {"optimizer": optimizer.state_dict(), "random": torch.get_rng_state()}


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Milliseconds by the clock, and of CPU time in all threads."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return (time.perf_counter() - wall) * 1e3, (time.process_time() - cpu) * 1e3


def torch_saved(model: nn.Module, training: dict[str, Any], path: Path) -> None:
    """What one writes by hand."""
    with open(path, "wb") as file:
        torch.save({"model": model.state_dict(), **training}, file)
        file.flush()
        os.fsync(file.fileno())


def hashed_and_loaded(files: list[Path]) -> None:
    """SHA-256 of the same bytes, and the library's own load, whose mapped pages are touched as a use of them does."""
    for file in files:
        with open(file, "rb") as opened:
            hashlib.file_digest(opened, "sha256")
        for tensor in safetensors.torch.load_file(file).values():
            tensor.clone()


class Savers:
    """Every way to save and to load, in a folder.

    Args:
        folder: an empty one.
        megabytes: of the state.
        peers: whether those of others are measured too.
    """

    def __init__(self, folder: Path, megabytes: int, peers: bool) -> None:
        self.folder, self.peers = folder, peers
        self.model, self.training = state(megabytes)
        self.synchronous = Checkpointer(folder / "synchronous")
        self.beside = Checkpointer(folder / "beside", asynchronous=True)
        self.lightning = import_module("peers.lightning_save") if peers and find_spec("lightning") else None
        self.by_lightning = self.lightning.saver(self.model) if self.lightning else None

    def saves(self, step: int) -> list[list[Part]]:
        """What is measured of saving in a round."""
        save = ({"main": {"model": self.model}}, {"iteration": step}, {}, self.training)
        found: list[list[Part]] = [
            [(STALL, partial(self.beside.save, *save)), (TOTAL, self.beside._wait)],
            [("synchronous save", partial(self.synchronous.save, *save))],
            [(SAVED, partial(torch_saved, self.model, self.training, self.folder / "torch.pt"))],
            [(f"{SAVED}, again", partial(torch_saved, self.model, self.training, self.folder / "again.pt"))],
        ]
        if self.peers:
            found.append([(DCP_STALL, self.begin_dcp), (DCP_TOTAL, self.end_dcp)])
        if self.lightning and self.by_lightning:
            found.append([(self.lightning.NAME, partial(self.by_lightning, self.folder / "lightning.ckpt"))])
        return found

    def loads(self, step: int) -> list[list[Part]]:
        """What is measured of loading, once it has saved."""
        files = sorted(self.synchronous.all()[-1].glob("*.safetensors"))
        plain = partial(hashed_and_loaded, files)
        return [[(LOADED, self.synchronous._newest_valid)], [(PLAIN_LOAD, plain)], [(f"{PLAIN_LOAD}, again", plain)]]

    def begin_dcp(self) -> None:
        """torch's own asynchronous save, of the same state."""
        with warnings.catch_warnings(action="ignore"):
            whole = {"model": self.model.state_dict(), **self.training}
            self.future: Any = dcp.async_save(whole, checkpoint_id=self.folder / "dcp")

    def end_dcp(self) -> None:
        """Until it is on disk."""
        self.future.result()

    def clear(self) -> None:
        """Remove what the round has saved, but the newest of ours: what that costs is the same for all, and no part of this."""
        for path in self.folder.iterdir():
            if path.is_file():
                path.unlink()
        shutil.rmtree(self.folder / "dcp", ignore_errors=True)
        for each in (self.synchronous, self.beside):
            for path in each.all()[:-1]:
                shutil.rmtree(path)

    def size(self) -> float:
        """Megabytes of a checkpoint."""
        return sum(path.stat().st_size for path in self.synchronous.all()[-1].iterdir()) / 1e6


def measured(savers: Savers, rounds: int) -> tuple[Times, Times]:
    """Milliseconds of each way, round by round, by the clock and of CPU time; the first round, which takes memory that
    the others use again, is left out.
    """
    times: Times = {}
    work: Times = {}
    draw = random.Random(0)
    for step in range(rounds + 1):
        for give in (savers.saves, savers.loads):
            ways = give(step)
            draw.shuffle(ways)
            for parts in ways:
                wall = cpu = 0.0
                for what, part in parts:
                    # Of several parts, each is counted from the beginning of the first.
                    more = timed(part)
                    wall, cpu = wall + more[0], cpu + more[1]
                    times.setdefault(what, []).append(wall)
                    work.setdefault(what, []).append(cpu)
        savers.clear()
    later, of_cpu = ({what: each[1:] for what, each in kind.items()} for kind in (times, work))
    return later, of_cpu


def table(times: Times, work: Times, size: float) -> Iterator[str]:
    """A line for each way."""
    for what, each in times.items():
        least, median, most = statistics.quantiles(each, n=4)
        per = f"{median / size * 100:6.1f} ms per 100 MB"
        yield f"{what:45} {median:7.1f} ms ({least:.1f} to {most:.1f}), {per}; CPU {statistics.median(work[what]):.0f} ms"


def budgets(times: Times, size: float) -> Iterator[str]:
    """A line for each promise, and one for how far the machine's own noise goes."""
    stall = statistics.median(times[STALL]) / size * 100
    yield f"training stops for {stall:.1f} ms per 100 MB; at most 20"
    yield f"all the work of an asynchronous save, as multiples of {SAVED}: {ratio(times[TOTAL], times[SAVED])}; at most 1"
    yield f"{SAVED}, as multiples of itself: {ratio(times[f'{SAVED}, again'], times[SAVED])}"
    yield f"verified load, as multiples of {PLAIN_LOAD}: {ratio(times[LOADED], times[PLAIN_LOAD])}; at most 1.3"
    yield f"{PLAIN_LOAD}, as multiples of itself: {ratio(times[f'{PLAIN_LOAD}, again'], times[PLAIN_LOAD])}"


def calls() -> Iterator[str]:
    """Function calls a step of a run that saves nothing in it, with saving off and with saves that are far away."""
    intervals: dict[str, Any] = {
        "save_interval: null": None,
        "in 10^9 iterations": 10**9,
        "in 1000 minutes": "1000 minute",
    }
    with undisturbed():
        counts = {
            name: sum(calls_per_step(Way(partial(by_run, in_memory, {"save_interval": each}, []))).values())
            for name, each in intervals.items()
        }
    told = ", ".join(f"{name} {count:.1f}" for name, count in counts.items())
    yield f"calls a step that saves nothing: {told}"


def main() -> None:
    """Print all lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("megabytes", nargs="?", type=int, default=300, help="of the state")
    parser.add_argument("--peers", action="store_true", help="measure what others have too")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=".") as folder:
        savers = Savers(Path(folder), arguments.megabytes, arguments.peers)
        times, work = measured(savers, arguments.rounds)
        size, tensors = savers.size(), 3 * len(list(savers.model.parameters()))
    print(f"{size:.0f} MB, {tensors} tensors, {torch.get_num_threads()} threads, {arguments.rounds} rounds")
    for lines in (table(times, work, size), budgets(times, size), calls()):
        for line in lines:
            print(line, flush=True)


if __name__ == "__main__":
    main()
