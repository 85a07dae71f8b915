"""One training at a time in a process: what would disturb it, or be disturbed by it, is refused."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from pipeline import workspaces
from pipeline.errors import ConcurrentRunError

# Packages whose frames do not say where user code has started something.
_HIDDEN = {"click", "concurrent", "contextlib", "pipeline", "pipeline_plugins", "runpy", "threading"}
# The package under which the modules of workspaces are imported.
_WORKSPACES = f"{workspaces.__name__}."


@dataclass(eq=False)
class Activity:
    """Something that uses the random generators of the process.

    Attributes:
        name: what it is, for messages: ``the run of config.yaml``.
        trains: whether it trains; otherwise it only loads or evaluates a model.
        thread: the thread that it runs in.
        thread_name: the name of that thread.
        place: the line of user code that has started it; ``""`` if there is none.
    """

    name: str
    trains: bool
    thread: int
    thread_name: str
    place: str

    def mention_folder(self, folder: str) -> None:
        """Add to the name the folder that it writes to."""
        self.name = f"{self.name} in {folder}"

    def __str__(self) -> str:
        """Return what it is, in which thread it runs, and where it was started."""
        started = f", started at {self.place}" if self.place else ""
        return f"{self.name} (thread {self.thread_name}{started})"


_activities: list[Activity] = []
_lock = threading.Lock()


@contextmanager
def exclusive(name: str, *, trains: bool = True, may_nest: bool = False) -> Iterator[Activity]:
    """In the block, refuse whatever would use the random generators of the process at the same time.

    Two trainings at once would draw from the same generators of Python, torch and numpy. Both would
    end with other weights than alone, and no other error would say so.

    Args:
        name: what the block does, for messages.
        trains: whether it trains. Blocks that do not train do not disturb each other.
        may_nest: whether the block may stand inside another one in the same thread, as a call of
            ``Brain.fit`` in a stage may: the order of the two is then the same each time.

    Yields:
        The activity; a folder can be added to its name when it is known.

    Raises:
        ConcurrentRunError: something else is running that excludes it.
    """
    thread = threading.current_thread()
    activity = Activity(name, trains, threading.get_ident(), thread.name, _place_of_caller())
    try:
        with _lock:
            for other in _activities:
                if _excludes(other, activity, may_nest=may_nest):
                    raise ConcurrentRunError(_message(activity, other))
            _activities.append(activity)
        yield activity
    finally:
        # A forked process has forgotten it.
        if activity in _activities:
            _activities.remove(activity)


def _excludes(running: Activity, starting: Activity, *, may_nest: bool) -> bool:
    """Return whether an activity may not start because another one is running."""
    if running.thread == starting.thread:
        return not may_nest
    return running.trains or starting.trains


def _message(starting: Activity, running: Activity) -> str:
    """Return the error message for an activity that may not start."""
    if starting.trains and running.thread == starting.thread:
        remedy = "start it after that has ended, or in a process of its own"
    else:
        remedy = "wait until that has ended, or use a process of its own"
    return (
        f"{starting.name} cannot start while {running} is running in this process: both use the "
        "random generators of the process, so the training would end with other weights than "
        f"alone; {remedy}, such as `pipeline run`, `pipeline sweep` or subprocess"
    )


def _place_of_caller() -> str:
    """Return the file and line of the innermost frame of user code; ``""`` if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        is_hidden = module.partition(".")[0] in _HIDDEN
        if not is_hidden or module.startswith(_WORKSPACES):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _forget() -> None:
    """Forget the activities of the parent: a forked process has generators of its own."""
    global _lock  # noqa: PLW0603 - another thread of the parent may hold the old one
    _lock = threading.Lock()
    _activities.clear()


os.register_at_fork(after_in_child=_forget)
