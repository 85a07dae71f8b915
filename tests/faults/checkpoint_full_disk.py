"""A small disk that is full, at every size, synchronous and asynchronous: the save fails, and what was saved stays.

    python tests/faults/checkpoint_full_disk.py

A tmpfs of a few MB where this may mount one, else a limit on the size of files. Prints how often it was tried and
refused, what was lost or left, and whether saving went on when there was space again.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from checkpoint_power import number_of
from loguru import logger
from torch import nn

from pipeline.brain.checkpointer import Checkpointer
from pipeline.errors import StorageError

SIZE = 6 * 2**20
"""Bytes of the disk: two checkpoints of 2 MB, and not a third."""
MOUNTED = "CHECKPOINT_DISK"


def save(checkpointer: Checkpointer, number: int) -> None:
    model = nn.Linear(500, 500)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(number)
    training = {"number": number, "moments": torch.full((250_000,), float(number))}
    checkpointer.save({"main": {"model": model}}, {"iteration": number}, {"main": {"number": number}}, training)
    checkpointer.store.wait()


def on_full_disk(folder: Path, asynchronous: bool, take: int) -> dict[str, int]:
    """Save with all but ``take`` bytes of the disk's rest taken, then with space."""
    checkpointer = Checkpointer(folder / "checkpoints", keep_last=2, asynchronous=asynchronous)
    save(checkpointer, 1)
    free = os.statvfs(folder)
    (folder / "ballast").write_bytes(bytes(max(0, free.f_bavail * free.f_frsize - take)))
    counts = {"tried": 1, "refused": 0, "lost": 0, "left": 0}
    try:
        save(checkpointer, 2)
    except StorageError:
        counts["refused"] = 1
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    counts["left"] += names != ["step-000000000001"]
    counts["lost"] += number_of(Checkpointer(folder / "checkpoints")) != 1
    (folder / "ballast").unlink()
    save(checkpointer, 3)
    counts["lost"] += number_of(Checkpointer(folder / "checkpoints")) != 3
    return counts


def on_small_files(folder: Path, asynchronous: bool, size: int) -> dict[str, int]:
    """The same with files that may not grow beyond ``size`` bytes."""
    checkpointer = Checkpointer(folder / "checkpoints", keep_last=2, asynchronous=asynchronous)
    save(checkpointer, 1)
    counts = {"tried": 1, "refused": 0, "lost": 0, "left": 0}
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        save(checkpointer, 2)
    except StorageError:
        counts["refused"] = 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    counts["left"] += sorted(path.name for path in (folder / "checkpoints").iterdir()) != ["step-000000000001"]
    counts["lost"] += number_of(Checkpointer(folder / "checkpoints")) != 1
    save(checkpointer, 3)
    counts["lost"] += number_of(Checkpointer(folder / "checkpoints")) != 3
    return counts


def main(mounted: Path | None) -> int:
    total = {"tried": 0, "refused": 0, "lost": 0, "left": 0}
    for take in (0, 4096, 20_000, 100_000, 1_000_000, 1_100_000, 1_900_000):
        for asynchronous in (False, True):
            with tempfile.TemporaryDirectory(dir=mounted) as folder:
                experiment = on_full_disk if mounted else on_small_files
                for what, count in experiment(Path(folder), asynchronous, take).items():
                    total[what] += count
    print(json.dumps({"disk": "tmpfs" if mounted else "RLIMIT_FSIZE", **total}))
    return int(total["refused"] != total["tried"] or bool(total["lost"] + total["left"]))


def may_mount() -> bool:
    command = ["unshare", "-m", "mount", "-t", "tmpfs", "none", "/mnt"]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


if __name__ == "__main__":
    logger.remove()
    if MOUNTED in os.environ:
        sys.exit(main(Path(os.environ[MOUNTED])))
    if may_mount():
        with tempfile.TemporaryDirectory() as disk:
            script = f"mount -t tmpfs -o size={SIZE} none {disk} && exec {sys.executable} -W ignore {__file__}"
            sys.exit(
                subprocess.run(
                    ["unshare", "-m", "sh", "-c", script], env={**os.environ, MOUNTED: disk}, check=False
                ).returncode
            )
    code = main(None)
    sys.exit(code)
