"""How one of several processes leaves: it tells its launcher why, and ends at once; also where the launcher is gone."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import Thread
from typing import NoReturn

from loguru import logger

from pipeline.errors import ExitCode

# Set for each process by torch's launcher: of which launch it is one, and where to say why it has left.
RUN, ERROR_FILE = "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"

# Seconds by which the end of a process that follows another's counts as later.
LATER = 60

# Seconds between two looks at whether the launcher is there.
_LOOK = 0.25


def write_error_file(exit_code: int, why: str, *, follows: bool = False) -> None:
    """Write the file in which torch's launcher looks for the reason why this process has left; the first one counts.

    Args:
        exit_code: what it will leave with.
        why: one line or more.
        follows: whether it leaves because another has failed, which is the cause then.
    """
    path = Path(os.environ.get(ERROR_FILE, ""))
    if ERROR_FILE not in os.environ or path.exists():
        return
    # The earliest is torchrun's root cause too.
    at = time.time() + LATER * follows
    about = {"message": why, "errorCode": exit_code, "extraInfo": {"py_callstack": why, "timestamp": int(at), "at": at}}
    with suppress(OSError):
        path.write_text(json.dumps({"message": about}))


def leave(exit_code: int) -> NoReturn:
    """End this process, one of several, at once: what torch keeps for them may hang at the end of Python."""
    write_error_file(exit_code, f"it has left with {exit_code}")
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(exit_code)


@cache
def watch_launcher() -> None:
    """From now on, end this process a moment after torch's launcher, where that has started it."""
    if RUN in os.environ:
        Thread(target=_watch, args=[os.getppid()], name="launcher", daemon=True).start()


def _watch(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(_LOOK)
    logger.error("the launcher of this process is gone, so it ends as well")
    leave(ExitCode.TERMINATED)
