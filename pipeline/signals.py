"""Graceful shutdown: SIGTERM, SIGUSR1, SIGHUP and SIGINT end a run after its step, with a deadline."""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.util
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from types import FrameType
from typing import Any, TypeVar

from pipeline.errors import ExitCode

_T = TypeVar("_T")


SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)

_INSISTING = frozenset(SIGNALS) - {signal.SIGHUP}

"""Those that end the process at once when they come second: a terminal that is closed may send SIGHUP twice by itself."""

GRACE = 25.0

"""Seconds that a run has to end after the first signal."""


_APART = 0.5

"""Seconds after the first signal in which another may be that of a process just forked, which shares our pipe for a moment."""


class StoppedError(BaseException):
    """A signal other than SIGINT has asked the run to end. Like KeyboardInterrupt, it is no Exception."""


class ExitError(BaseException):
    """``context["is_exit"]`` has ended a loop that trains, between two steps; what it has come to is saved."""


class WaitInterrupted(BaseException):
    """A signal has asked the run to end while it waits for the workers of a loader."""


class GracefulShutdown:
    """Whether the run is asked to end.

    Attributes:
        asked: the signal that has asked; None: none has.
        grace: seconds that are left to it then.
    """

    def __init__(self, grace: float = GRACE) -> None:
        self.asked: signal.Signals | None = None
        self.grace = grace
        self._loops: list[Callable[[], None]] = []
        self._waiting = False

    @contextmanager
    def heeded(self) -> Iterator[None]:
        """In the block, signals ask; only in the main thread, where Python receives them."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        heard = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, self._receive) for number in heard}
        try:
            with self._watched():
                yield
        finally:
            self.asked = None
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """In the block, a thread sees to it that the process ends in time: the main one may be in code that is not Python's."""
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        other = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        thread = threading.Thread(target=self._count_down, args=[reading], name="grace", daemon=True)
        thread.start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(other)
            os.write(writing, b"\0")
            thread.join()
            os.close(writing)
            os.close(reading)

    def _count_down(self, reading: int) -> None:
        """End the process at the second signal, and when ``grace`` is over; until there is told of a signal 0."""
        first, end = None, 0.0
        while True:
            left = None if first is None else max(0.0, end - time.monotonic())
            if not select.select([reading], [], [], left)[0]:
                assert first
                os._exit(_code(first))
            number = os.read(reading, 1)[0]
            if number == 0:
                return
            if number in SIGNALS and first is None:
                first, end = signal.Signals(number), time.monotonic() + self.grace
            elif number in _INSISTING and end - time.monotonic() < self.grace - _APART:
                os._exit(_at_once(number))

    @contextmanager
    def deferred(self, hurry: Callable[[], None]) -> Iterator[None]:
        """In the block, a loop looks itself whether it is asked to end; ``hurry`` makes it do so after this step."""
        self._loops.append(hurry)
        try:
            yield
        finally:
            self._loops.pop()

    def waited_for(self, batches: Iterable[_T], save: Callable[[], object] | None = None) -> Iterator[_T]:
        """The batches that workers make; a signal ends the wait for one of them, and with it the run.

        Args:
            batches: whoever goes over them does nothing else between two of them that a signal must not interrupt.
            save: called first, with the last batch done and the next not begun; it may end the run itself.

        Raises:
            StoppedError, KeyboardInterrupt: a signal has asked for it.
        """
        # A batch costs one call: this stands in the training loop.
        self._waiting = True
        try:
            with suppress(WaitInterrupted):
                for batch in batches:
                    self._waiting = False
                    yield batch
                    self._waiting = True
                    if self.asked is not None:
                        break
        finally:
            self._waiting = False
        if self.asked is not None:
            if save:
                save()
            self.end()

    def end(self) -> None:
        """End the run, if it is asked to.

        Raises:
            StoppedError: a signal other than SIGINT has asked.
            KeyboardInterrupt: SIGINT has.
        """
        if self.asked is signal.SIGINT:
            raise KeyboardInterrupt
        if self.asked is not None:
            raise StoppedError(f"asked to end by {self.asked.name}")

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.asked is not None:
            if number in _INSISTING:
                os._exit(_at_once(number))
            return
        self.asked = signal.Signals(number)
        if not self._loops:
            self.end()
        for hurry in self._loops:
            hurry()
        if self._waiting:
            raise WaitInterrupted


SHUTDOWN = GracefulShutdown()

"""Signals go to a process, and so does this."""


def is_asked_to_end(context: dict[str, Any]) -> bool:
    """Whether a signal or ``is_exit`` asks a loop that trains to end; that is no use of the key by a stage."""
    if SHUTDOWN.asked is not None:
        return True
    is_exit: bool = dict.get(context, "is_exit", False)
    return is_exit


def _at_once(number: int) -> ExitCode:
    return ExitCode.INTERRUPTED if number == signal.SIGINT else ExitCode.TERMINATED


def _code(asked: signal.Signals) -> ExitCode:
    return ExitCode.INTERRUPTED if asked is signal.SIGINT else ExitCode.STOPPED


def _forget_in_child() -> None:
    """A process that was forked is not the run: signals do to it what they do to any other."""
    held = [number for number in SIGNALS if getattr(signal.getsignal(number), "__self__", None) is SHUTDOWN]
    if held:
        signal.set_wakeup_fd(-1)
    for number in SIGNALS:
        if getattr(signal.getsignal(number), "__self__", None) is SHUTDOWN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


os.register_at_fork(after_in_child=_forget_in_child)


@contextmanager
def signals_blocked() -> Iterator[None]:
    """In the block signals wait, and processes that begin in it hear none until they say so."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@cache
def _end_workers_at_exit() -> None:
    """Python ends what it calls daemons by SIGTERM, and waits for them: workers that hear none would never end."""
    # Registered after multiprocessing's own, and so called before it.
    atexit.register(_end_daemons)


def _end_daemons() -> None:
    # Otherwise torch reports the death of each.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for each in multiprocessing.active_children():
        if each.daemon:
            each.kill()


class IgnoreSignals:
    """What a worker of a loader begins with: it hears none of these signals, which are for the run to heed.

    Args:
        first: what else it begins with.
    """

    def __init__(self, first: Callable[[int], Any] | None = None) -> None:
        self.first = first
        _end_workers_at_exit()

    def __call__(self, worker: int) -> None:
        """Begin."""
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        parent = multiprocessing.parent_process()
        if parent is not None and not parent.is_alive():
            # The run was killed before torch began to look whether it lives: nobody would ever end this process.
            os._exit(ExitCode.FAILED)
        # It began without hearing any, see ``unheard``; what it starts itself is not to inherit that.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        if self.first is not None:
            self.first(worker)
