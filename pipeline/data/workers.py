"""The worker processes of a pass over a loader: which one failed, at which sample, and why."""

from __future__ import annotations

import atexit
import multiprocessing.util
import os
import re
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from typing import Any
from weakref import WeakSet

from pipeline.data.fetch import BatchRequests, Progress, WorkerFailure
from pipeline.errors import DataError, ExitCode
from pipeline.signals import SHUTDOWN, SIGNALS, StoppedError, WaitInterrupted

# Those of all passes: torch tells of a dead one wherever the process that trains happens to be.
RUNNING: WeakSet[Workers] = WeakSet()

_DIED = re.compile(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\)")
# What torch makes of an exception that a worker has raised and that cannot be sent as it is.
_RAISED = re.compile(r"Caught \w+ in DataLoader worker process \d+\.")
_REMEDIES = {
    "SIGKILL": "most often the memory was full: use fewer num_workers or smaller batches",
    "SIGBUS": "most often the shared memory was full: enlarge /dev/shm, or use fewer num_workers or smaller batches",
}


class Workers:
    """The workers of one pass.

    Args:
        iterator: torch's, that hands out their batches.
        where: what messages begin with.
        progress: of the workers.
        requests: what they are asked for; None for a stream.
    """

    def __init__(self, iterator: Any, where: str, progress: Progress, requests: BatchRequests | None) -> None:
        self.iterator, self.where, self.progress, self.requests = iterator, where, progress, requests
        self._processes: list[Any] = iterator._workers
        RUNNING.add(self)

    def batches(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The batches of the iterator.

        Raises:
            DataError: a worker died, did not answer within the loader's ``timeout``, or found fault with the data.
            Exception: what user code raised in a worker, with its traceback there as the cause, and a note that names
                the samples.
        """
        try:
            for batch in batches:
                if type(batch) is WorkerFailure:
                    break
                yield batch
            else:
                return
        except (WaitInterrupted, KeyboardInterrupt):
            self.kill()
            raise
        except (GeneratorExit, Exception) as error:
            data_error = self.explain(error)
            self.shut_down()
            if data_error is None:
                raise
            raise data_error from error
        self.shut_down()
        raise batch.exception()

    def explain(self, error: BaseException) -> DataError | None:
        """What to raise in place of an error of torch's; None: the error itself."""
        if not isinstance(error, RuntimeError | OSError | EOFError):
            return None
        # The worker that raised it lives, so waiting for one to die would only take time.
        if _RAISED.match(str(error)):
            return None
        # Meanwhile torch may report deaths, once for each worker: after the last report nothing interrupts.
        for _ in range(len(self._processes) + 1):
            with suppress(RuntimeError), without_death_reports():
                text = str(error)
                message = self._explain_timeout(text) or self.explain_death(text) or self._death(self._dead())
                return DataError(message) if message else None
        return None

    def explain_death(self, text: str) -> str | None:
        """The error for torch's report of a dead worker; None if it is no such report, or of another pass."""
        match = _DIED.search(text)
        pids = match[1].split(", ") if match else ()
        return self._death([number for number, process in enumerate(self._processes) if str(process.pid) in pids])

    def _dead(self) -> list[int]:
        """The workers that are dead. One that dies while it hands over a batch is reported as a lost connection."""
        sentinels = {process.sentinel: number for number, process in enumerate(self._processes)}
        return [sentinels[ready] for ready in wait(list(sentinels), timeout=5) if isinstance(ready, int)]

    def _death(self, numbers: list[int]) -> str | None:
        if not numbers:
            return None
        number = numbers[0]
        process = self._processes[number]
        process.join(1)
        what, remedy = _describe_exit(process.exitcode)
        self.kill()
        return f"{self.where}: worker {number} {what}{self._last_sample(number)}; {remedy}"

    def _explain_timeout(self, text: str) -> str | None:
        """The error for torch's report of a worker that did not answer in time; None if it is no such report."""
        if not text.startswith("DataLoader timed out"):
            return None
        task = self.iterator._task_info.get(self.iterator._rcvd_idx)
        which = f"worker {task[0]} hangs{self._last_sample(task[0])}: it has" if task else "the workers have"
        self.kill()
        what = f"{which} not answered within the timeout of {self.iterator._timeout:g} seconds"
        return f"{self.where}: {what}; see what the dataset waits for there, or raise timeout"

    def shut_down(self) -> None:
        """Let them finish their batch, and end.

        Whoever keeps the exception that ends a pass keeps torch's iterator with it; once that is garbage, its workers no
        longer hear that they are to end.
        """
        if not self.iterator._persistent_workers:
            self.iterator._shutdown_workers()

    def kill(self) -> None:
        """End them at once: torch would wait for each."""
        with without_death_reports():
            for process in self._processes:
                process.kill()
            for process in self._processes:
                process.join()

    def _last_sample(self, worker: int) -> str:
        """`` at sample 3, …``: the last one of a worker."""
        batch, sample = self.progress.last(worker)
        if batch < 0:
            return " before it came to any sample"
        if self.requests is None:
            return f" at sample {sample} of its batch {batch}, both counted from 0"
        request = next((request for request in self.requests.last if request.position == batch), None)
        if request is None:
            return f" at the batch from place {batch} of the epoch on"
        many = isinstance(request.indices, list | tuple) and len(request.indices) > 1
        return f" at sample {request.indices[sample]}, fetching {request}" if many else f" at {request}"


@contextmanager
def supervise_workers(batches: object = None) -> Iterator[None]:
    """In the block, torch's report of a dead worker becomes a DataError; a run that ends kills all workers.

    Args:
        batches: closed after the block, if it can be, so that workers which are left end.

    Raises:
        DataError: a worker of some pass died.
    """
    try:
        yield
    except RuntimeError as error:
        for workers in list(RUNNING):
            if message := workers.explain_death(str(error)):
                raise DataError(message) from error
        raise
    except (StoppedError, KeyboardInterrupt):
        # Otherwise torch would wait for each of them, some seconds long.
        for workers in list(RUNNING) if SHUTDOWN.requested is not None else ():
            workers.kill()
        raise
    finally:
        if hasattr(batches, "close"):
            batches.close()


def _describe_exit(code: int | None) -> tuple[str, str]:
    """How a process ended, and what to do about it."""
    rerun = "set num_workers: 0 to see where"
    if code is None:
        return "died", rerun
    if code >= 0:
        return f"left with exit code {code}", f"something in the dataset ends the process; {rerun}"
    name = next((known.name for known in signal.Signals if known == -code), f"signal {-code}")
    return f"was killed by {name}", _REMEDIES.get(name, f"it crashed; {rerun}")


@contextmanager
def without_death_reports() -> Iterator[None]:
    """Until the block ends, torch does not raise in the middle of anything when a worker dies; who waits for it finds out."""
    if threading.current_thread() is not threading.main_thread():
        # It is reported to the main thread.
        yield
        return
    previous = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        # Unless torch has set its own for the first time.
        if signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL:
            signal.signal(signal.SIGCHLD, previous)


@contextmanager
def signals_blocked() -> Iterator[None]:
    """In the block signals wait, and processes started in it receive none until they unblock them."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def _kill_daemons() -> None:
    """Python ends daemonic processes by SIGTERM, and waits for them: workers that ignore it would never end."""
    # Otherwise torch reports the death of each.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for process in multiprocessing.active_children():
        if process.daemon:
            process.kill()


def _end_with_run() -> None:
    """In a worker: end it when the process that has started it is gone."""
    run = multiprocessing.parent_process()
    assert run
    run.join()
    os._exit(ExitCode.FAILED)


class IgnoreSignals:
    """The ``worker_init_fn`` of a loader: its workers ignore these signals, which are the run's to handle.

    Args:
        worker_init_fn: that of the user, called after it.
    """

    def __init__(self, worker_init_fn: Callable[[int], Any] | None = None) -> None:
        self.worker_init_fn = worker_init_fn
        # Once, however many loaders; registered after multiprocessing's own, and so called before it.
        atexit.unregister(_kill_daemons)
        atexit.register(_kill_daemons)

    def __call__(self, worker: int) -> None:
        """Called in the worker when it starts."""
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        # torch checks every 5 s that the run is not gone, but takes for the run what it finds when it begins to check.
        threading.Thread(target=_end_with_run, name="end-with-run", daemon=True).start()
        # It started with signals blocked, see ``signals_blocked``; processes that it starts must not inherit that.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        if self.worker_init_fn is not None:
            self.worker_init_fn(worker)
