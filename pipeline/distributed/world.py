"""The processes that train together, and what they tell each other; a single process is a world of its own."""

from __future__ import annotations

import itertools
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch
from loguru import logger
from torch import distributed
from torch.distributed.distributed_c10d import PrefixStore, Store, _set_pg_timeout
from torch.distributed.rendezvous import rendezvous

from pipeline.distributed.exit import end_with_launcher, leave, write_error_file
from pipeline.errors import ConfigError, ExitCode, Fault, PipelineError
from pipeline.signals import SHUTDOWN, StoppedError

_T = TypeVar("_T")

# What a launcher tells each process by its environment.
LAUNCHER = ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT")

# Seconds after which a wait in the store looks whether another process has failed.
PATIENCE = 0.5

# Seconds in which those that can answer do, when the connection to one of them breaks.
ANSWER = 2.0

# Seconds that a process has to end once another has failed.
GRACE = 8.0

_FOREVER = timedelta(days=365)


class Failure(NamedTuple):
    """The first failure in a world: of which rank, the code that it leaves with, and what has failed."""

    rank: int
    exit_code: ExitCode
    headline: str

    def __str__(self) -> str:
        rank = f"rank {self.rank}"
        verb = "ended" if self.exit_code in {ExitCode.STOPPED, ExitCode.INTERRUPTED} else "failed"
        return self.headline if self.headline.startswith(rank) else f"{rank} {verb}: {self.headline}"


def _failure(text: str | bytes) -> Failure:
    """That which is in the store."""
    rank, number, headline = json.loads(text)
    return Failure(rank, next(code for code in ExitCode if code == number), headline)


class PeerError(PipelineError):
    """Another process has failed, or was killed, so that this one cannot go on.

    Attributes:
        failure: that of the process which failed first.
        exit_code: its exit code.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure, self.exit_code = failure, failure.exit_code


def exit_code(error: BaseException) -> ExitCode:
    """The exit code for an error before the run has started."""
    if isinstance(error, PipelineError):
        return error.exit_code
    if isinstance(error, StoppedError):
        return ExitCode.STOPPED
    return ExitCode.INTERRUPTED if isinstance(error, KeyboardInterrupt) else ExitCode.FAILED


def describe(error: BaseException) -> str:
    """An error in one line or more: its message, and its type where it is none of ours."""
    return str(error) if isinstance(error, PipelineError) else f"{type(error).__name__}: {error}"


class World:
    """The processes of a run; ``context["world"]``, there with one process too.

    Every process has to make the same calls of ``broadcast``, ``all_gather``, ``attempt`` and ``once_per_host`` in the same
    order. They are for stages; within a step nothing of this is called.

    Args:
        rank: number of this process among all, from 0.
        local_rank: its number on its host, from 0.
        size: how many there are.
        local_size: how many there are on its host.
        store: torch's key-value store that all of them reach; None: there is just one process.
        timeout: seconds that a process waits for the others.

    Attributes:
        last_words: called in a thread with the failure of another process where this one does not come to an end.
    """

    def __init__(
        self,
        rank: int = 0,
        local_rank: int = 0,
        size: int = 1,
        local_size: int = 1,
        store: Store | None = None,
        timeout: float = 600.0,
    ) -> None:
        self.rank, self.local_rank, self.size, self.local_size = rank, local_rank, size, local_size
        self.timeout = timeout
        self._store = store
        self._failure: Failure | None = None
        self._may_stay = threading.Event()
        self.last_words: Callable[[Failure], object] = str

    @property
    def is_main(self) -> bool:
        """Whether this is the process of rank 0."""
        return self.rank == 0

    @property
    def store(self) -> Store:
        """The store of the main thread; a thread of one's own uses a ``clone()`` of it."""
        assert self._store is not None, "a single process has no store"
        return self._store

    def broadcast(self, value: _T) -> _T:
        """The value of rank 0; what the others give is not looked at. It has to be one that pickle takes."""
        if self.size == 1:
            return value
        values = [value]
        with self.collective("broadcast"):
            distributed.broadcast_object_list(values, 0, device=torch.device("cpu"))
        return values[0]

    def all_gather(self, value: _T) -> list[_T]:
        """The values of all processes, by rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with self.collective("all_gather"):
            distributed.all_gather_object(values, value)
        return values

    def attempt(self, function: Callable[[], _T]) -> _T:
        """What a function returns that each process calls; where it raises on one of them, none goes on.

        Raises:
            PeerError: it has raised on another process, and there first.
        """
        if self.size == 1:
            return function()
        error, result = None, None
        try:
            result = function()
        except Exception as raised:
            error = raised
        faults = self.all_gather(error and (exit_code(error), describe(error)))
        first = next((Failure(rank, *fault) for rank, fault in enumerate(faults) if fault), None)
        if first and first.rank != self.rank:
            raise PeerError(first) from error
        if error:
            raise error
        return result  # type: ignore[return-value] # it has returned

    @contextmanager
    def alone(self) -> Iterator[None]:
        """In the block, code that would call the other processes where torch.distributed is initialised, finds that it is not."""
        group = distributed.GroupMember.WORLD
        distributed.GroupMember.WORLD = None
        try:
            yield
        finally:
            distributed.GroupMember.WORLD = group

    def once_per_host(self, function: Callable[[], _T]) -> _T:
        """What a function returns that one process of each host calls, such as a download; the others wait for it.

        They wait no longer than the runner's ``collective_timeout``.

        Raises:
            PeerError: the function has raised on another process.
        """
        result = self.attempt(lambda: function() if self.local_rank == 0 else None)
        leader, results = self.rank - self.local_rank, self.all_gather(result)
        return results[leader]  # type: ignore[return-value] # the leader has called it

    def require_equal(self, values: Mapping[str, Any], remedy: str) -> None:
        """Raise where a process has other values than rank 0.

        Args:
            values: what it is -> a plain value, such as a hash.
            remedy: what to do about a difference.

        Raises:
            ConfigError: this process has other values; the message has its rank, its host, and what it is.
            PeerError: another process has.
        """
        host = socket.gethostname()
        leader, expected = self.broadcast((host, dict(values)))

        def compare() -> None:
            for name in sorted(expected.keys() | values.keys()):
                if (own := values.get(name)) != (first := expected.get(name)):
                    what = f"rank {self.rank} on {host}: {name} is {own}, and {first} on rank 0 on {leader}"
                    raise ConfigError(f"{what}; {remedy}")

        self.attempt(compare)

    @contextmanager
    def collective(self, name: str = "the next exchange") -> Iterator[None]:
        """In the block, an error to which this process has come because another has failed becomes a PeerError.

        Args:
            name: of what the processes do together.

        Raises:
            PeerError: another process has failed, or has not come within ``timeout``.
        """
        try:
            yield
        except BaseException as error:
            failure = None
            if self.size > 1 and not isinstance(error, PeerError):
                # A launcher ends the others when one has failed, and may do so now.
                with SHUTDOWN.defer(lambda: None):
                    failure = self._cause_of(error, name)
            if failure is None:
                raise
            raise PeerError(failure) from error

    def _cause_of(self, error: BaseException, name: str) -> Failure | None:
        """The failure of another process, because of which this one has come to an error; None: it is its own."""
        if _is_broken_connection(error):
            return self._who_broke(error, name)
        if not isinstance(error, StoppedError | KeyboardInterrupt):
            return None
        failure = self.first_failure()
        return failure if failure and failure.exit_code != exit_code(error) else None

    def _who_broke(self, error: BaseException, name: str) -> Failure:
        """Who has failed, so that a connection broke: whoever says so, else who does not say anything."""
        silent, end = {*range(self.size)} - {self.rank}, time.monotonic() + ANSWER
        with suppress(RuntimeError):
            self.store.set(f"broken/{self.rank}", "")
            while silent and time.monotonic() < end:
                if failure := self.first_failure():
                    return failure
                silent -= {rank for rank in silent if self.store.check([f"broken/{rank}"])}
                time.sleep(0.02)
        if self._failure or not silent:
            return self._report(Failure(self.rank, ExitCode.FAILED, f"the connection broke in {name}: {error}"))
        rank = min(silent)
        with suppress(RuntimeError):
            seen = self.store.check([f"seen/{rank}"]) and json.loads(self.store.get(f"seen/{rank}"))
        where = f", last seen at iteration {seen}" if seen is not False else ""
        what = f"hangs: it has not come to {name} within {self.timeout:g} seconds"
        what = what if "imed out" in str(error) else f"was killed, or has left without a word: {name} broke off"
        return self._report(Failure(rank, ExitCode.FAILED, f"rank {rank} {what}{where}; see its log"))

    def in_thread(self) -> World:
        """The same world for a thread, which may not share the connection to the store; collectives are not for it."""
        store = self.store.clone()  # type: ignore[attr-defined] # torch's stubs lack it
        return World(self.rank, self.local_rank, self.size, self.local_size, store, self.timeout)

    # The store: without a collective, and so also where the processes are not at the same place.

    def put(self, key: str, value: Any) -> None:
        """Put a plain value into the store."""
        self.store.set(key, json.dumps(value))

    def get(self, key: str, store: Store | None = None) -> Any:
        """The value that somebody puts into the store, once it is there.

        Args:
            key: its name.
            store: that of the thread; None: that of the main thread.

        Raises:
            PeerError: another process has failed meanwhile, or ``timeout`` is over.
        """
        store, end, pause = store or self.store, time.monotonic() + self.timeout, 0.0001
        what = f"nobody has answered with {key} for {self.timeout:g} seconds"
        try:
            # The wait of the store itself prints warnings when its time is over.
            while not store.check([key]):
                if (failure := self.first_failure(store)) or time.monotonic() > end:
                    raise PeerError(failure or Failure(self.rank, ExitCode.FAILED, what))
                time.sleep(pause)
                pause = min(2 * pause, 0.005)
            return json.loads(store.get(key))
        except RuntimeError as error:
            failure = self.first_failure(store) or Failure(self.rank, ExitCode.FAILED, f"{what} ({error})")
            raise PeerError(failure) from error

    def report_failure(self, error: BaseException, code: ExitCode, headline: str) -> Failure:
        """Say that this process fails, or for a PeerError the other one, unless a failure was said before.

        Args:
            error: what it has come to.
            code: what it leaves with.
            headline: what has failed.

        Returns:
            The first failure.
        """
        if isinstance(error, PeerError):
            return self._report(error.failure._replace(exit_code=code))
        first = self._report(Failure(self.rank, code, headline))
        if first.rank == self.rank:
            self._may_stay.set()
        return first

    def _report(self, failure: Failure) -> Failure:
        # Where all end for a signal, none has failed.
        alike = SHUTDOWN.agreed and failure.exit_code in {ExitCode.STOPPED, ExitCode.INTERRUPTED}
        with suppress(RuntimeError):
            if self.size > 1 and not alike:
                failure = _failure(self.store.compare_set("failure", "", json.dumps(failure)))
                for other in range(self.size):
                    self.store.set(f"wake/{other}", "")
        if self.size > 1:
            self._failure = None if alike else failure
            write_error_file(failure.exit_code, str(failure), follows=failure.rank != self.rank)
        return failure

    def first_failure(self, store: Store | None = None) -> Failure | None:
        """What the first process has said that failed; None: none has, or the store is gone."""
        with suppress(RuntimeError):
            store = store or self._store
            if self._failure is None and store and store.check(["failure"]):
                self._failure = _failure(store.get("failure"))
        return self._failure

    def _watch(self, store: Store) -> None:
        """In a thread: hear of the first failure, which the store may not outlive, and end this process if it does not."""
        with suppress(RuntimeError):
            store.wait([f"wake/{self.rank}"], _FOREVER)
            self.first_failure(store)
            store.set(f"heard/{self.rank}", "")
        if self._failure and not self._may_stay.wait(GRACE):
            logger.error(f"{self._failure}; rank {self.rank} has not ended within {GRACE:g} seconds, and is ended")
            with suppress(PipelineError):
                self.last_words(self._failure)
            leave(self._failure.exit_code)

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """In the block, an error is a failure of this process."""
        try:
            yield
        except BaseException as error:
            self.report_failure(error, exit_code(error), describe(error))
            raise

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """In the block, a failure of another process ends this one too, whatever it does."""
        # torch's stubs leave it out.
        store: Any = self.store
        thread = threading.Thread(target=self._watch, args=[store.clone()], name="watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._may_stay.set()
            with suppress(RuntimeError):
                self.store.set(f"wake/{self.rank}", "")
            thread.join(PATIENCE)
            if self.is_main and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
                # The store is in this process, and the others may have to hear of a failure.
                with suppress(RuntimeError):
                    self.store.wait([f"heard/{rank}" for rank in range(self.size)], timedelta(seconds=ANSWER))


def _is_broken_connection(error: BaseException | None) -> bool:
    """Whether torch says that it does not reach another process; user code may have wrapped it."""
    while error:
        if isinstance(error, distributed.DistError | PeerError) or (
            isinstance(error, RuntimeError) and "gloo/" in str(error)
        ):
            return True
        error = error.__cause__ or error.__context__
    return False


# That of a process which nobody has launched beside others.
SINGLE = World()

_worlds = [SINGLE]
# Each world of this process has keys of its own in the store.
_numbers = itertools.count()


def current_world() -> World:
    """The world of this process."""
    return _worlds[-1]


@contextmanager
def joined(timeout: float | None = None) -> Iterator[World]:
    """In the block, this process is one of those that a launcher has started; without a launcher it is alone.

    Where it has joined already, it is the same world. A process may join again afterwards, as all others do.

    Args:
        timeout: seconds that a process waits for the others; None: 600, or as it is.

    Raises:
        ConfigError: the environment says only half of what it has to.
        PeerError: another process has failed, also where this one raises an error because of it.
    """
    size = launched_size()
    end_with_launcher()
    if size > 1 and len(_worlds) == 1:
        with _joined(size, timeout or 600.0) as world:
            yield world
        return
    if size > 1 and timeout:
        current_world().timeout = timeout
        _set_pg_timeout(timedelta(seconds=timeout))
    yield current_world()


@contextmanager
def _joined(size: int, timeout: float) -> Iterator[World]:
    rank, local = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    store = PrefixStore(str(next(_numbers)), _shared_store(rank, size, timeout))
    # A script may have made it.
    has_group = distributed.is_initialized()
    if not has_group:
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        about: dict[str, Any] = {"rank": rank, "world_size": size, "timeout": timedelta(seconds=timeout)}
        distributed.init_process_group(backend, store=PrefixStore("group", store), **about)
    world = World(rank, local, size, int(os.environ.get("LOCAL_WORLD_SIZE", size)), store, timeout)
    _worlds.append(world)
    try:
        with world._watching(), world._reporting(), world.collective():
            yield world
            # Nobody leaves before the others are done; after a failure, they may be gone.
            if world._failure is None:
                world.all_gather(None)
        if not has_group and world._failure is None:
            distributed.destroy_process_group()
    finally:
        _worlds.pop()


def launched_size() -> int:
    """How many processes the environment says there are.

    Raises:
        ConfigError: it says only half of what it has to.
    """
    size = os.environ.get("WORLD_SIZE", "1")
    # A batch script is one process, however many tasks it asks for.
    tasks = os.environ.get("SLURM_NTASKS", "1") if os.environ.get("SLURM_PROCID", "0") != "0" else "1"
    if "WORLD_SIZE" not in os.environ and (tasks := os.environ.get("SLURM_STEP_NUM_TASKS", tasks)) != "1":
        what = "srun has started them, and no torchrun; write srun --ntasks-per-node 1 torchrun … -m pipeline run …"
        raise ConfigError([Fault(f"environment SLURM_NTASKS={tasks}", 0, 0, "", what)])
    if size == "1":
        return 1
    for name in LAUNCHER:
        if not os.environ.get(name):
            what = "is not set; start the processes with torchrun, or set it for each of them"
            raise ConfigError([Fault(f"environment WORLD_SIZE={size}", 0, 0, "", f"{name} {what}")])
    if not size.isdecimal() or not os.environ["RANK"].isdecimal() or int(os.environ["RANK"]) >= int(size):
        what = f"RANK={os.environ['RANK']} is none of {size} processes; start them with torchrun"
        raise ConfigError([Fault(f"environment WORLD_SIZE={size}", 0, 0, "", what)])
    return int(size)


@cache
def _shared_store(rank: int, size: int, timeout: float) -> Store:
    """The store of the processes of this attempt.

    It stays for as long as this process does: the one of rank 0 may be that in which it is.
    """
    store, *_ = next(rendezvous("env://", timeout=timedelta(seconds=timeout)))
    # A process that was started again would read the addresses of the one before it (torch's issue 135712).
    return PrefixStore(f"pipeline/{_agree_on_token(store, rank, size, timeout)}", store)


def _agree_on_token(store: Store, rank: int, size: int, timeout: float) -> str:
    """A word that the processes of this attempt share, and none of an earlier one has.

    What an attempt before has left in the store may be there still. So each process says a word of its own, to which rank 0
    answers, until all have acknowledged an answer.
    """
    token, end = secrets.token_hex(8), time.monotonic() + timeout
    answer, missing = f"token/{token}", {*range(1, size)} if rank == 0 else {0}
    if rank:
        store.set(f"hello/{rank}", token)
    while missing:
        if rank and store.check([answer]):
            token, missing = store.get(answer).decode(), set()
            store.set(f"ready/{token}/{rank}", "1")
        elif rank == 0:
            for other in [rank for rank in missing if store.check([f"hello/{rank}"])]:
                store.set(f"token/{store.get(f'hello/{other}').decode()}", token)
            missing = {rank for rank in missing if not store.check([f"ready/{token}/{rank}"])}
        if missing and time.monotonic() > end:
            what = f"has not come within {timeout:g} seconds; see its log"
            raise PeerError(Failure(min(missing), ExitCode.FAILED, what))
        time.sleep(0.01)
    return token
