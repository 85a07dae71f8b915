"""How one of several processes leaves: it tells its launcher why, and ends at once; and it ends where the launcher does."""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

# Set for each process by torch's launcher: of which launch it is one, and where to say why it has left.
RUN, _ERROR_FILE = "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"

# Seconds by which the end of a process that follows another's counts as later.
_LATER = 60

# Of Linux, in <sys/prctl.h>.
_PR_SET_PDEATHSIG = 1


def write_error_file(exit_code: int, why: str, *, follows: bool = False) -> None:
    """Write the file in which torch's launcher looks for the reason why this process has left; the first one counts.

    Args:
        exit_code: what it will leave with.
        why: one line or more.
        follows: whether it leaves because another has failed, which is the cause then.
    """
    path = Path(os.environ.get(_ERROR_FILE, ""))
    # The earliest is torchrun's root cause too.
    about = {"py_callstack": why, "timestamp": int(time.time()) + _LATER * follows}
    if _ERROR_FILE in os.environ and not path.exists():
        with suppress(OSError):
            path.write_text(json.dumps({"message": {"message": why, "errorCode": exit_code, "extraInfo": about}}))


def leave(exit_code: int) -> NoReturn:
    """End this process, one of several, at once: what torch keeps for them may hang at the end of Python."""
    write_error_file(exit_code, f"it has left with {exit_code}")
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):
            stream.flush()
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(exit_code)


def end_with_launcher() -> None:
    """Have the system kill this process when torch's launcher, where that has started it, is gone: it would train on."""
    if RUN in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
