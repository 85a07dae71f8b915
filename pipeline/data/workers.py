"""The worker processes of a pass over a loader, watched: which one failed, at what, and why."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from typing import Any
from weakref import WeakSet

from pipeline.data.fetch import BatchRequests, Progress, WorkerFailure
from pipeline.errors import DataError
from pipeline.signals import SHUTDOWN, StoppedError, WaitInterrupted

RUNNING: WeakSet[Workers] = WeakSet()
"""Those of all passes: torch tells of a dead one wherever the process that trains happens to be."""

_DIED = re.compile(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\)")
_REMEDIES = {
    "SIGKILL": "most often the memory was full: use fewer num_workers or smaller batches",
    "SIGBUS": "most often the shared memory was full: enlarge /dev/shm, or use fewer num_workers or smaller batches",
}


class Workers:
    """The workers of one pass.

    Args:
        iterator: torch's, that hands out what they give. What is asked of it is private to torch, and so only asked
            when it has failed.
        where: what messages begin with.
        progress: how far each is.
        fetches: what they are asked for; None for a stream.
    """

    def __init__(self, iterator: Any, where: str, progress: Progress, fetches: BatchRequests | None) -> None:
        self.iterator, self.where, self.progress, self.fetches = iterator, where, progress, fetches
        RUNNING.add(self)

    def watched(self) -> Iterator[Any]:
        """The batches.

        Raises:
            DataError: a worker died, did not answer within the loader's ``timeout``, or found fault with the data.
            Exception: what user code raised in a worker, with its traceback there as the cause, and a note that names
                the samples.
        """
        raised = None
        try:
            for batch in self.iterator:
                if type(batch) is WorkerFailure:
                    raised = batch
                    break
                yield batch
        except (WaitInterrupted, KeyboardInterrupt):
            self.end()
            raise
        except GeneratorExit:
            self.leave()
            raise
        except Exception as error:
            told = self.told(error)
            self.leave()
            if told is None:
                raise
            raise told from error
        if raised:
            self.leave()
            raise raised.again()

    def told(self, error: Exception) -> DataError | None:
        """What to raise in the place of an error of torch's; None: the error itself."""
        if not isinstance(error, RuntimeError | OSError | EOFError):
            return None
        for _ in self._processes:
            # Meanwhile torch may report a death, once for each.
            with suppress(RuntimeError), unreported():
                message = self.hanging(str(error)) or self.death(str(error)) or self._death_of(self._dead())
                return DataError(message) if message else None
        return None

    def death(self, text: str) -> str | None:
        """What torch's report of a dead worker means; None: it is none, or one of another pass."""
        found = _DIED.search(text)
        pids = {int(each) for each in re.findall(r"\d+", found[1])} if found else set()
        return self._death_of([number for number, process in enumerate(self._processes) if process.pid in pids])

    def _dead(self) -> list[int]:
        """The workers that are dead. One that dies in the midst of handing over a batch is reported as a lost connection."""
        sentinels = {process.sentinel: number for number, process in enumerate(self._processes)}
        return [sentinels[each] for each in wait(list(sentinels), timeout=1) if isinstance(each, int)]

    def _death_of(self, numbers: list[int]) -> str | None:
        if not numbers:
            return None
        number = numbers[0]
        process = self._processes[number]
        process.join(1)
        how, remedy = _ending(process.exitcode)
        self.end()
        return f"{self.where}: worker {number} {how}{self._at(number)}; {remedy}"

    def hanging(self, text: str) -> str | None:
        """What torch's report of a worker that has not answered in time means; None: it is none."""
        if not text.startswith("DataLoader timed out"):
            return None
        due = getattr(self.iterator, "_task_info", {}).get(getattr(self.iterator, "_rcvd_idx", None))
        which = f"worker {due[0]} hangs{self._at(due[0])}: it has" if due else "the workers have"
        self.end()
        seconds = getattr(self.iterator, "_timeout", 0)
        remedy = "see what the dataset waits for there, or raise timeout"
        return f"{self.where}: {which} not answered within the timeout of {seconds:g} seconds; {remedy}"

    def leave(self) -> None:
        """Let them finish what they are at, and end.

        Whoever keeps the exception that ends a pass keeps torch's iterator with it; once that is garbage, its workers no
        longer hear that they are to end.
        """
        shut_down = getattr(self.iterator, "_shutdown_workers", None)
        if shut_down and not getattr(self.iterator, "_persistent_workers", False):
            shut_down()

    def end(self) -> None:
        """End them at once: nothing more is wanted of them, and torch would wait for each."""
        with unreported():
            for process in self._processes:
                process.kill()
            for process in self._processes:
                process.join()

    @property
    def _processes(self) -> list[Any]:
        return list(getattr(self.iterator, "_workers", ()))

    def _at(self, worker: int) -> str:
        """What a worker was at last."""
        batch, sample = self.progress.of(worker)
        if batch < 0:
            return " before it came to any sample"
        if self.fetches is None:
            return f" at sample {sample} of its batch {batch}, both counted from 0"
        fetch = next((each for each in self.fetches.given if each.position == batch), None)
        if fetch is None:
            return f" at the batch from place {batch} of the epoch on"
        return f" at sample {fetch.indices[sample]}, fetching {fetch}" if fetch.many else f" at {fetch}"


@contextmanager
def supervised(batches: object = None) -> Iterator[None]:
    """In the block, torch's report of a dead worker becomes a DataError, wherever it is raised; a run that ends ends all.

    Args:
        batches: closed after the block, if it can be, so that workers which are left end.

    Raises:
        DataError: a worker of some pass died.
    """
    try:
        yield
    except RuntimeError as error:
        for workers in list(RUNNING):
            if told := workers.death(str(error)):
                raise DataError(told) from error
        raise
    except (StoppedError, KeyboardInterrupt):
        # Otherwise torch would wait for each of them, some seconds long.
        for workers in list(RUNNING) if SHUTDOWN.requested is not None else ():
            workers.end()
        raise
    finally:
        close = getattr(batches, "close", None)
        if close:
            close()


def _ending(code: int | None) -> tuple[str, str]:
    """How a process ended, and what to do about it."""
    rerun = "set num_workers: 0 to see where"
    if code is None:
        return "died", rerun
    if code >= 0:
        return f"left with exit code {code}", f"something in the dataset ends the process; {rerun}"
    name = next((each.name for each in signal.Signals if each == -code), f"signal {-code}")
    return f"was killed by {name}", _REMEDIES.get(name, f"it crashed; {rerun}")


@contextmanager
def unreported() -> Iterator[None]:
    """In the block, torch does not report that workers die, in the midst of anything; whoever waits for one finds out."""
    if threading.current_thread() is not threading.main_thread():
        # It is reported to the main thread.
        yield
        return
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        # Unless torch has set its own for the first time.
        if signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL:
            signal.signal(signal.SIGCHLD, before)
