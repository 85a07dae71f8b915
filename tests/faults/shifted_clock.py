"""``pipeline`` by a clock that is wrong: ``python tests/faults/shifted_clock.py ARGUMENTS``.

It is as many seconds off as the variable CLOCK_OFF says; ``jump`` sets it again while the run goes on. The system's clock
stays as it is: what the clock would have been for files is written into them, see ``age``.
"""

from __future__ import annotations

import datetime
import os
import time
from pathlib import Path

OFF = [float(os.environ.get("CLOCK_OFF", "0"))]
_time, _time_ns, _gmtime, _localtime = time.time, time.time_ns, time.gmtime, time.localtime


class Datetime(datetime.datetime):
    """The class of the standard library, by this clock."""

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> Datetime:
        """What it shows."""
        return cls.fromtimestamp(time.time(), tz)

    @classmethod
    def utcnow(cls) -> Datetime:
        """What it shows in UTC, without saying so."""
        return cls.now(datetime.UTC).replace(tzinfo=None)


def install() -> None:
    """Let whatever is imported from now on see this clock."""
    time.time = lambda: _time() + OFF[0]
    time.time_ns = lambda: _time_ns() + int(OFF[0] * 10**9)
    time.gmtime = lambda seconds=None: _gmtime(time.time() if seconds is None else seconds)
    time.localtime = lambda seconds=None: _localtime(time.time() if seconds is None else seconds)
    datetime.datetime = Datetime  # type: ignore[misc]


def jump(seconds: float, folder: Path) -> None:
    """Set the clock, which was right until now for the files in a folder."""
    OFF[0] += seconds
    age(folder, seconds)


def age(folder: Path, seconds: float) -> None:
    """Make what is in a folder as much older as the clock has gone forward since it was written."""
    for path in [folder, *folder.rglob("*")]:
        if not path.is_symlink():
            before = path.stat()
            os.utime(path, (before.st_atime - seconds, before.st_mtime - seconds))


if __name__ == "__main__":
    install()
    # Only now: they are to see it.
    from pipeline.cli import main

    main()
