"""Graceful shutdown: SIGTERM, SIGUSR1, SIGHUP and SIGINT end a run after its step, with a deadline."""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn, TypeVar

from loguru import logger

from pipeline.context import Context
from pipeline.errors import ExitCode

_T = TypeVar("_T")


SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)

# Those that end the process at once when they come second: a closed terminal may send SIGHUP twice by itself.
_INSISTING = frozenset(SIGNALS) - {signal.SIGHUP}

# Seconds that a run has to end after the first signal.
GRACE = 25.0

# Seconds in which the same signal again is still the first: timeout(1) sends each to the process and to its group.
_SAME = 0.1

# The same under a launcher, and for any signal: a scheduler sends it to every process and to the launcher, which forwards it,
# and then sends another.
_SAME_LAUNCHED = 2.0

# Seconds after which the log says that a run which was asked to end has yet to come to an end of its step.
_NOTICE = 1.0

# Process, user and group of whoever has written to a socket.
_CREDENTIALS = struct.Struct("3i")


class StoppedError(BaseException):
    """A signal other than SIGINT has asked the run to end. Like KeyboardInterrupt, it is no Exception."""


class ExitError(BaseException):
    """``context["is_exit"]`` has ended a training loop between two steps; a checkpoint was saved."""


class WaitInterrupted(BaseException):
    """A signal has asked the run to end while it waits for the workers of a loader."""


class GracefulShutdown:
    """Receives the signals that ask a run to end.

    Attributes:
        requested: the signal that has asked, where several processes train, once they have agreed; None: none has.
        agreed: whether several processes have.
        arrived: the same, also while the main thread is in code that is not Python's.
        grace: seconds that the run has left then.
    """

    def __init__(self, grace: float = GRACE) -> None:
        self.requested: signal.Signals | None = None
        self.arrived: signal.Signals | None = None
        self.grace = grace
        self._wake_loops: list[Callable[[], None]] = []
        self._waiting = self._postponed = self.agreed = False
        self._heard: signal.Signals | None = None
        self._since = 0.0
        self._ask: Callable[[str, int], object] | None = None
        self._last_words, self._leaving = b"", threading.RLock()

    def say_at_once(self, words: str, clear: bool) -> None:
        """What is written to stderr where the process is ended at once; ``clear``: a bar of a terminal, which has hidden the cursor."""
        cleared = "\r\x1b[2K\x1b[?25h" if clear else ""
        self._last_words = f"{cleared}ended at once{words and '; '}{words}\n".encode(errors="surrogateescape")

    def _leave(self, code: ExitCode) -> NoReturn:
        """End the process at once."""
        # The main thread and that of the deadline may come here together.
        with self._leaving:
            words, self._last_words = self._last_words, b""
            # Never waiting for whoever reads it.
            with suppress(OSError):
                if select.select([], [2], [], 0)[1]:
                    os.write(2, words)
            os._exit(code)

    @contextmanager
    def handling(self) -> Iterator[None]:
        """Handle the signals in the block; only in the main thread, where Python receives them."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        previous = {number: signal.signal(number, self._receive) for number in numbers}
        try:
            with self._deadline():
                yield
        finally:
            self.requested = self.arrived = self._heard = None
            self.agreed, self._last_words = False, b""
            for number, handler in previous.items():
                signal.signal(number, handler)

    @contextmanager
    def _deadline(self) -> Iterator[None]:
        """In the block, a thread ends the process at the deadline: the main thread may be in code that is not Python's."""
        reading, writing = socket.socketpair()
        if hasattr(socket, "SO_PASSCRED"):
            reading.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        writing.setblocking(False)
        previous = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
        thread = threading.Thread(target=self._count_down, args=[reading], name="grace", daemon=True)
        thread.start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(previous)
            writing.send(b"\0")
            thread.join()
            writing.close()
            reading.close()

    def _count_down(self, reading: socket.socket) -> None:
        """End the process at the second signal, and when ``grace`` is over; return when a 0 is read."""
        first: signal.Signals | None = None
        end, noticed = 0.0, False
        while True:
            remaining = None if first is None else max(0.0, end - time.monotonic())
            wait = min(remaining, _NOTICE) if remaining and not noticed else remaining
            if not select.select([reading], [], [], wait)[0]:
                assert first
                if wait != remaining:
                    noticed = True
                    again = "; a second one ends it at once" if first in _INSISTING else ""
                    what = f"{first.name}: the run ends after this step, or in {self.grace:.0f} s{again}"
                    # A log that does not get rid of its lines must not hold up the deadline.
                    threading.Thread(target=logger.info, args=[what], daemon=True).start()
                    continue
                self._leave(_exit_code(first, ExitCode.STOPPED))
            [number], control, *_ = reading.recvmsg(1, socket.CMSG_SPACE(_CREDENTIALS.size))
            if number == 0:
                return
            # A process that was just forked shares the socket for a moment. Only Linux says who has written.
            if any(_CREDENTIALS.unpack(data)[0] != os.getpid() for *_, data in control):
                continue
            if number in SIGNALS and first is None:
                first, end = signal.Signals(number), time.monotonic() + self.grace
                self.arrived = first
            elif self._insists(number, first, end - self.grace):
                self._leave(_exit_code(number, ExitCode.TERMINATED))

    def ask_by(self, ask: Callable[[str, int], object] | None) -> None:
        """From now on, a signal calls ``ask("signal", number)`` alone, and counts with ``heed``; None: it counts at once."""
        self._ask = ask
        if ask is None:
            self.requested = self.requested or self._heard

    def heed(self, number: int) -> None:
        """All processes end for a signal, whichever has heard it; from now on this one too has ``grace`` seconds."""
        if self._heard is None and signal.getsignal(number) == self._receive:
            signal.raise_signal(number)
        if self.requested is None:
            self.requested, self.agreed = signal.Signals(number), True
            for wake in self._wake_loops:
                wake()

    @contextmanager
    def defer(self, wake: Callable[[], None]) -> Iterator[None]:
        """In the block, a signal calls ``wake`` alone; the loop in it checks ``requested`` after its step."""
        self._wake_loops.append(wake)
        try:
            yield
        finally:
            self._wake_loops.pop()

    def interruptible(self, batches: Iterable[_T], save: Callable[[], object] | None = None) -> Iterator[_T]:
        """The batches of data workers; a signal ends the wait for a batch, and the run.

        Args:
            batches: what the consumer does with one of them is not interrupted.
            save: called first, between two batches; it may end the run itself.

        Raises:
            StoppedError, KeyboardInterrupt: a signal has asked for it.
        """
        # One call for each batch: this is part of the training loop.
        waits = not self._postponed
        try:
            # Only in this block is it set: a signal that comes when the block is left, however slowly, must not raise.
            self._waiting = waits
            for batch in batches:
                self._waiting = False
                yield batch
                self._waiting = waits
                if waits and self.requested is not None:
                    break
            self._waiting = False
        except WaitInterrupted:
            pass
        finally:
            self._waiting = False
        if waits and self.requested is not None:
            if save:
                save()
            self.raise_if_requested()

    @contextmanager
    def postponed(self) -> Iterator[None]:
        """In the block, nothing is interrupted: there is no place in it from which a run could go on."""
        postponed, self._postponed = self._postponed, True
        try:
            yield
        finally:
            self._postponed = postponed

    def raise_if_requested(self) -> None:
        """Raise if a signal has asked the run to end.

        Raises:
            StoppedError: a signal other than SIGINT has asked.
            KeyboardInterrupt: SIGINT has.
        """
        if self._postponed or self.requested is None:
            return
        if self.requested is signal.SIGINT:
            raise KeyboardInterrupt
        raise StoppedError(f"asked to end by {self.requested.name}")

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._heard is not None:
            if self._insists(number, self._heard, self._since):
                self._leave(_exit_code(number, ExitCode.TERMINATED))
            return
        self._heard, self._since = signal.Signals(number), time.monotonic()
        if self._ask:
            self._ask("signal", number)
            return
        self.requested = self._heard
        if not self._wake_loops:
            self.raise_if_requested()
        for wake in self._wake_loops:
            wake()
        if self._waiting:
            raise WaitInterrupted

    def _insists(self, number: int, first: int | None, since: float) -> bool:
        """Whether a signal after the first one, which came at a time, ends the process at once."""
        elapsed = time.monotonic() - since
        if os.environ.get("WORLD_SIZE", "1") != "1" or "TORCHELASTIC_RUN_ID" in os.environ:
            # A launcher whose first process has left sends SIGTERM to the others, which are about to.
            return number in _INSISTING and elapsed > _SAME_LAUNCHED and not self.agreed
        return number in _INSISTING and (number != first or elapsed > _SAME)


# One for the process, as signals are.
SHUTDOWN = GracefulShutdown()


def exit_requested(context: Context | None) -> bool:
    """Whether a signal, or ``is_exit`` of a run's context, asks a training loop to end."""
    exits = context is not None and (context.exits if context.ask else context.peek("is_exit"))
    return SHUTDOWN.requested is not None or bool(exits)


def _exit_code(number: int, otherwise: ExitCode) -> ExitCode:
    return ExitCode.INTERRUPTED if number == signal.SIGINT else otherwise


def _reset_handlers() -> None:
    """In a forked process, which is not the run, signals do what they do to any other process."""
    for number in SIGNALS:
        if getattr(signal.getsignal(number), "__self__", None) is SHUTDOWN:
            signal.set_wakeup_fd(-1)
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


os.register_at_fork(after_in_child=_reset_handlers)
