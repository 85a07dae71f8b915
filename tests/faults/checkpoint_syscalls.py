"""Every system call of a save and a removal failing, and the process killed at every one, by ``strace -e inject``.

    python tests/faults/checkpoint_syscalls.py

Needs strace. Prints how many runs there were, how each ended, and what was lost, wrong or left. The process that saves
is forked from this one, so that torch is imported once, and is traced from the moment before the save.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import suppress
from pathlib import Path

from checkpoint_disks import Recorder
from checkpoint_power import models, number_of
from loguru import logger

from pipeline.brain.checkpointer import Checkpointer
from pipeline.errors import StorageError

CALLS = (
    "mkdir",
    "openat",
    "write",
    "fsync",
    "rename",
    "unlink",
    "unlinkat",
    "rmdir",
    "close",
    "getdents64",
    "newfstatat",
)
"""What a save and a removal call; close is only killed at, since Linux has closed whatever it says."""
ERRORS = ("EIO", "ENOSPC", "EROFS")
RUN = Path("run")
SAVED, REFUSED = 0, 74


def save(folder: Path, step: int, number: int) -> None:
    Checkpointer(folder, keep_last=2).save(
        models(number), {"iteration": step}, {"main": {"number": number}}, {"number": number}
    )


def child(folder: Path, step: int) -> None:
    """Wait until we are traced, then save number 9."""
    os.kill(os.getpid(), signal.SIGSTOP)
    try:
        save(folder, step, 9)
    except StorageError:
        os._exit(REFUSED)
    os._exit(SAVED)


def run(folder: Path, step: int, inject: str, log: Path) -> int:
    """Save under strace; how the process ended, negative for a signal, 1 for an error that is not ours."""
    process = os.fork()
    if process == 0:
        try:
            child(folder, step)
        finally:
            os._exit(1)
    os.waitpid(process, os.WUNTRACED)
    command = ["strace", "-f", "-o", str(log), "-p", str(process), "-e", f"trace={','.join(CALLS)}"]
    tracer = subprocess.Popen([*command, *(["-e", f"inject={inject}"] if inject else [])], stderr=subprocess.PIPE)
    assert tracer.stderr
    tracer.stderr.readline()
    os.kill(process, signal.SIGCONT)
    status = os.waitpid(process, 0)[1]
    tracer.wait()
    tracer.stderr.close()
    return os.waitstatus_to_exitcode(status)


def calls(log: Path) -> Counter[str]:
    """How often each call was made."""
    return Counter(re.findall(r"^\d+ +(\w+)\(", log.read_text(), re.MULTILINE))


def prepared(scratch: Path) -> Path:
    """Three checkpoints, so that the next save removes one."""
    folder = scratch / RUN
    shutil.rmtree(folder, ignore_errors=True)
    for step in range(1, 4):
        numbers = {"main": {"number": step}}
        Checkpointer(folder, disk=Recorder()).save(models(step), {"iteration": step}, numbers, {"number": step})
    return folder


def injections(counted: Counter[str]) -> list[str]:
    """One injection for each call, and each fault."""
    found = []
    for call, times in counted.items():
        for at in range(1, times + 1):
            found.append(f"{call}:signal=KILL:when={at}")
            if call not in {"close", "getdents64", "newfstatat"}:
                found += [f"{call}:error={error}:when={at}" for error in ERRORS]
                found.append(f"{call}:error=ENOSPC:when={at}+")
    return found


def experiment(scratch: Path, most: int = 10**6) -> Counter[str]:
    log = scratch / "strace.log"
    counts: Counter[str] = Counter()
    for step in (4, 3):
        run(prepared(scratch), step, "", log)
        every = injections(calls(log))
        for inject in every[:: max(1, len(every) * 2 // most)]:
            folder = prepared(scratch)
            code = run(folder, step, inject, log)
            counts["runs"] += 1
            counts[f"ended with {code}"] += 1
            found = number_of(Checkpointer(folder, disk=Recorder()))
            counts["wrong"] += found not in {3, 9}
            counts["lost"] += code == SAVED and found != 9
            counts["left"] += sum(not path.name.startswith("step-") for path in folder.iterdir())
            counts["traceback"] += code == 1
            if code == 1 or found not in {3, 9}:
                print(step, inject, code, found)
    return counts


if __name__ == "__main__":
    logger.remove()
    if not shutil.which("strace"):
        sys.exit("strace is not installed")
    with tempfile.TemporaryDirectory(dir=".") as name, suppress(KeyboardInterrupt):
        result = experiment(Path(name).absolute())
        print(dict(result))
    sys.exit(any(result[what] for what in ("wrong", "lost", "left", "traceback")))
