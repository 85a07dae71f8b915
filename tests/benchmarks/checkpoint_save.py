"""What a checkpoint costs: how long a save stops training, its work beside torch.save, and loading beside the library's.

    python tests/benchmarks/checkpoint_save.py [MEGABYTES]

The state is a model with AdamW: a third weights, two thirds of its training state. All variants take turns in one run;
the median of each is printed, with the fastest and the slowest.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

from pipeline.checkpoint.checkpointer import Checkpointer

ROUNDS = 9
LAYERS = 32


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


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1e3


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


def main(megabytes: int) -> None:
    model, training = state(megabytes)
    models = {"main": {"model": model}}
    times: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(dir=".") as name:
        folder = Path(name)
        ours = Checkpointer(folder / "ours")
        beside = Checkpointer(folder / "beside", asynchronous=True)

        def note(what: str, work: Callable[[], object]) -> None:
            times.setdefault(what, []).append(timed(work))

        for step in range(ROUNDS):
            state_now = {"iteration": step}
            note("asynchronous save: training stops", partial(beside.save, models, state_now, {}, training))
            note("asynchronous save: until committed", beside.wait)
            note("synchronous save", partial(ours.save, models, state_now, {}, training))
            note("torch.save + fsync", partial(torch_saved, model, training, folder / "torch.pt"))
            files = sorted(ours.all()[-1].glob("*.safetensors"))
            note("verified load", ours.newest_valid)
            note("SHA-256 + safetensors load", partial(hashed_and_loaded, files))
            # What removing costs is the same for all, and no part of this.
            (folder / "torch.pt").unlink()
            for each in (ours, beside) if step else ():
                shutil.rmtree(each.all()[0])
        size = sum(file.stat().st_size for file in files) / 1e6
    print(
        f"{size:.0f} MB, {len(list(model.parameters())) * 3} tensors, {torch.get_num_threads()} threads, {ROUNDS} rounds"
    )
    for what, each in times.items():
        # The first round takes memory that the later ones use again.
        kept = each[1:]
        middle = statistics.median(kept)
        print(
            f"{what:36} {middle:8.1f} ms ({min(kept):.1f} to {max(kept):.1f}), {middle / size * 100:6.1f} ms per 100 MB"
        )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 300)
