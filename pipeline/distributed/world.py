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
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch
from loguru import logger
from torch import distributed
from torch.distributed.distributed_c10d import PrefixStore, Store, _set_pg_timeout
from torch.distributed.rendezvous import rendezvous

from pipeline.distributed.exit import end_with_launcher, leave, write_error_file
from pipeline.errors import ConfigError, ExitCode, PipelineError
from pipeline.signals import SHUTDOWN, StoppedError

_T = TypeVar("_T")

# Seconds between two looks whether another process has failed.
PATIENCE = 0.5

# Seconds in which those that can answer do, when the connection to one of them breaks.
ANSWER = 2.0

# Seconds that a process has to end once another has failed.
GRACE = 8.0


class Failure(NamedTuple):
    """The first failure in a world: of which rank, the code that it leaves with, and what has failed."""

    rank: int
    exit_code: ExitCode
    headline: str

    def __str__(self) -> str:
        rank = f"rank {self.rank}"
        verb = "ended" if self.exit_code in {ExitCode.STOPPED, ExitCode.INTERRUPTED} else "failed"
        return self.headline if self.headline.startswith(rank) else f"{rank} {verb}: {self.headline}"


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
    codes = {StoppedError: ExitCode.STOPPED, KeyboardInterrupt: ExitCode.INTERRUPTED}
    return error.exit_code if isinstance(error, PipelineError) else codes.get(type(error), ExitCode.FAILED)


def describe(error: BaseException) -> str:
    """An error in one line or more: its message, and its type where it is none of ours."""
    return str(error) if isinstance(error, PipelineError) else f"{type(error).__name__}: {error}"


@dataclass(eq=False)
class World:
    """The processes of a run; ``context["world"]``, there with one process too.

    Every process has to make the same calls of ``broadcast``, ``all_gather``, ``attempt`` and ``once_per_host`` in the same
    order. They are for stages; within a step nothing of this is called.

    Attributes:
        rank: number of this process among all, from 0.
        local_rank: its number on its host, from 0.
        size: how many there are.
        local_size: how many there are on its host.
        store: torch's key-value store that all of them reach, for the main thread; None: there is just one process.
        timeout: seconds that a process waits for the others.
    """

    rank: int = 0
    local_rank: int = 0
    size: int = 1
    local_size: int = 1
    # torch's stubs leave out what a store has.
    store: Any = None
    timeout: float = 600.0
    _failure: Failure | None = field(default=None, init=False)
    _may_stay: threading.Event = field(default_factory=threading.Event, init=False)
    # What is called where this process does not come to an end.
    _last_words: list[Callable[[Failure], object]] = field(default_factory=list, init=False)
    # Connections to the store that no thread uses at present.
    _idle_stores: list[Any] = field(default_factory=list, init=False)

    @property
    def is_main(self) -> bool:
        """Whether this is the process of rank 0."""
        return self.rank == 0

    def broadcast(self, value: _T) -> _T:
        """The value of rank 0; what the others give is not looked at. It has to be one that pickle takes."""
        if self.size == 1:
            return value
        values = [value]
        with self.collective():
            distributed.broadcast_object_list(values, 0, device=torch.device("cpu"))
        return values[0]

    def all_gather(self, value: _T) -> list[_T]:
        """The values of all processes, by rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with self.collective():
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
        for rank, fault in enumerate(self.all_gather(error and (exit_code(error), describe(error)))):
            if fault and error and rank == self.rank:
                raise error
            if fault:
                raise PeerError(Failure(rank, *fault)) from error
        return result  # type: ignore[return-value] # it has returned

    @contextmanager
    def alone(self) -> Iterator[None]:
        """In the block, this process is one of its own, for code of ours and of others that asks who else there is."""
        group = distributed.GroupMember.WORLD
        distributed.GroupMember.WORLD = None if self.size > 1 else group
        _worlds.append(SINGLE)
        try:
            yield
        finally:
            _worlds.pop()
            distributed.GroupMember.WORLD = group

    def once_per_host(self, function: Callable[[], _T]) -> _T:
        """What a function returns that one process of each host calls, such as a download; the others wait for it.

        They wait no longer than the runner's ``collective_timeout``.

        Raises:
            PeerError: the function has raised on another process.
        """
        results = self.all_gather(self.attempt(lambda: function() if self.local_rank == 0 else None))
        return results[self.rank - self.local_rank]  # type: ignore[return-value] # it has called it

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
    def collective(self) -> Iterator[None]:
        """In the block, an error to which this process has come because another has failed becomes a PeerError.

        Raises:
            PeerError: another process has failed, or has not come within ``timeout``.
        """
        try:
            yield
        except BaseException as error:
            if self.size == 1 or isinstance(error, PeerError):
                raise
            # A launcher ends the others when one has failed, and may do so now.
            with SHUTDOWN.defer(lambda: None):
                failure = self._who_broke(error) if _is_broken_connection(error) else self.first_failure()
            stopped = isinstance(error, StoppedError | KeyboardInterrupt)
            if failure and (_is_broken_connection(error) or (stopped and failure.exit_code != exit_code(error))):
                raise PeerError(failure) from error
            raise

    def _who_broke(self, error: BaseException) -> Failure:
        """Who has failed, so that a connection broke: whoever says so, else who does not say anything."""
        silent, end, seen = {*range(self.size)} - {self.rank}, time.monotonic() + ANSWER, ""
        with suppress(RuntimeError):
            self.store.set(f"broken/{self.rank}", "")
            while silent and time.monotonic() < end:
                if failure := self.first_failure():
                    return failure
                silent -= {rank for rank in silent if self.store.check([f"broken/{rank}"])}
                time.sleep(0.02)
            if silent and self.store.check([key := f"seen/{min(silent)}"]):
                seen = f", last seen at iteration {self.store.get(key).decode()}"
        if not silent:
            return self._report(Failure(self.rank, ExitCode.FAILED, f"the connection broke: {error}"))
        what = "was killed, or has left without a word: the connection broke off"
        if "imed out" in str(error):
            what = f"hangs: it has not come to the next exchange within {self.timeout:g} seconds"
        return self._report(Failure(min(silent), ExitCode.FAILED, f"rank {min(silent)} {what}{seen}; see its log"))

    def in_thread(self) -> World:
        """Return this world for another thread, which needs its own connection to the store and makes no collectives.

        A connection that another thread has returned with ``reuse`` is used again. Opening one can take seconds:
        torch looks up the name of each host that connects.
        """
        return replace(self, store=self._idle_stores.pop() if self._idle_stores else self.store.clone())

    def reuse(self, in_thread: World) -> None:
        """Keep the connection of a thread that has finished, for the next call of ``in_thread``."""
        self._idle_stores.append(in_thread.store)

    # The store: without a collective, and so also where the processes are not at the same place.

    def put(self, key: str, value: Any) -> None:
        """Put a plain value into the store."""
        self.store.set(key, json.dumps(value))

    def get(self, key: str, grace: float = 0.0) -> Any:
        """The value that somebody puts into the store, once it is there.

        Args:
            key: of the value.
            grace: seconds for which to wait on after another process has failed.

        Raises:
            PeerError: another process has failed meanwhile, or ``timeout`` is over.
        """
        end, pause = time.monotonic() + self.timeout, 0.0001
        failure = Failure(self.rank, ExitCode.FAILED, f"nobody has answered with {key} for {self.timeout:g} seconds")
        try:
            # The wait of the store itself prints warnings when its time is over.
            while not self.store.check([key]):
                if self.first_failure():
                    end = min(end, time.monotonic() + grace)
                if time.monotonic() >= end:
                    break
                time.sleep(pause)
                pause = min(2 * pause, 0.005)
            else:
                return json.loads(self.store.get(key))
        except RuntimeError as error:
            what = f"rank 0 was killed, or its launcher: the connection to the store broke off ({error}); see its log"
            failure = Failure(0, ExitCode.FAILED, what)
        raise PeerError(self.first_failure() or failure)

    def report_failure(self, error: BaseException, code: ExitCode, headline: str) -> Failure:
        """Say that this process fails, or for a PeerError the other one, unless a failure was said before.

        Args:
            error: what it has come to.
            code: what it leaves with.
            headline: what has failed.

        Returns:
            The first failure.
        """
        failure = error.failure if isinstance(error, PeerError) else Failure(self.rank, code, headline)
        first = self._report(failure._replace(exit_code=code))
        if first.rank == self.rank:
            self._may_stay.set()
        return first

    def _report(self, failure: Failure) -> Failure:
        if self.size == 1:
            return failure
        # Where all end for a signal, none has failed.
        if not SHUTDOWN.agreed or failure.exit_code not in {ExitCode.STOPPED, ExitCode.INTERRUPTED}:
            with suppress(RuntimeError):
                self.store.compare_set("failure", "", json.dumps(failure))
            failure = self._failure = self.first_failure() or failure
        write_error_file(failure.exit_code, str(failure), follows=failure.rank != self.rank)
        return failure

    def call_if_stuck(self, function: Callable[[Failure], object]) -> None:
        """Call a function where another process has failed and this one does not come to an end.

        Args:
            function: gets the failure, in a thread; then the process is ended.
        """
        self._last_words.append(function)

    def first_failure(self) -> Failure | None:
        """What the first process has said that failed; None: none has, or the store is gone."""
        with suppress(RuntimeError):
            if self._failure is None and self.size > 1 and self.store.check(["failure"]):
                rank, number, headline = json.loads(self.store.get("failure"))
                self._failure = Failure(rank, next(code for code in ExitCode if code == number), headline)
        return self._failure

    def _watch(self, peer: World) -> None:
        """In a thread, for which ``peer`` is: hear of the first failure, and end this process if it does not end then."""
        while not (self._failure or self._may_stay.wait(PATIENCE)):
            if failure := peer.first_failure():
                self._failure = failure
        if self._failure and not self._may_stay.wait(GRACE):
            logger.error(f"{self._failure}; rank {self.rank} has not ended within {GRACE:g} seconds, and is ended")
            for function in self._last_words:
                with suppress(PipelineError):
                    function(self._failure)
            leave(self._failure.exit_code)

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """In the block, an error ends all processes, and that of another one this process, whatever it does."""
        thread = threading.Thread(target=self._watch, args=[self.in_thread()], name="watch", daemon=True)
        thread.start()
        try:
            yield
        except BaseException as error:
            self.report_failure(error, exit_code(error), describe(error))
            if self.is_main and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
                # The store is in this process, and the others have to hear of it.
                time.sleep(ANSWER)
            raise
        finally:
            self._may_stay.set()
            thread.join(PATIENCE)


def _is_broken_connection(error: BaseException | None) -> bool:
    """Whether torch says that it does not reach another process; user code may have wrapped it."""
    while error and not isinstance(error, distributed.DistError | PeerError):
        if isinstance(error, RuntimeError) and "gloo/" in str(error):
            break
        error = error.__cause__ or error.__context__
    return error is not None


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
    if size == 1 or len(_worlds) > 1:
        world = current_world()
        if world.size > 1 and timeout:
            world.timeout = timeout
            _set_pg_timeout(timedelta(seconds=timeout))
        registered = len(world._last_words)
        try:
            yield world
        finally:
            # This world outlives the block. What a run has registered refers to its model and data.
            del world._last_words[registered:]
        return
    timeout = timeout or 600.0
    rank, local = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    store = PrefixStore(str(next(_numbers)), _shared_store(rank, size, timeout))
    # A script may have made it.
    has_group = distributed.is_initialized()
    if not has_group:
        backend, wait = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timedelta(seconds=timeout)
        distributed.init_process_group(backend, None, wait, size, rank, PrefixStore("group", store))
    world = World(rank, local, size, int(os.environ.get("LOCAL_WORLD_SIZE", size)), store, timeout)
    _worlds.append(world)
    try:
        with world._watching(), world.collective():
            yield world
            # Nobody leaves before the others are done; after a failure, they may be gone.
            if world._failure is None:
                world.all_gather(None)
        if not has_group and world._failure is None:
            _let_threads_finish()
            distributed.destroy_process_group()
    finally:
        _worlds.pop()


def _let_threads_finish() -> None:
    """Give the threads of gloo time to release the tensors of the last collective operations.

    To release a tensor, a thread needs Python's global lock. If it asks for the lock while Python is shutting down, the process
    aborts (pytorch/pytorch#179291). Destroying the group waits for its threads only if nothing else refers to the group, and a
    DDP module of a script does.
    """
    time.sleep(0.1)


def launched_size() -> int:
    """How many processes the environment says there are.

    Raises:
        ConfigError: it says only half of what it has to.
    """
    size, environment = os.environ.get("WORLD_SIZE", "1"), os.environ
    # A batch script is one process, however many tasks it asks for.
    tasks = environment.get("SLURM_NTASKS", "1") if environment.get("SLURM_PROCID", "0") != "0" else "1"
    if "WORLD_SIZE" not in environment and (tasks := environment.get("SLURM_STEP_NUM_TASKS", tasks)) != "1":
        what = "srun has started them, and no torchrun; write srun --ntasks-per-node 1 torchrun … -m pipeline run …"
        raise ConfigError(f"environment SLURM_NTASKS={tasks}: {what}")
    if size == "1":
        return 1
    if missing := [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]:
        what = f"{missing[0]} is not set; start the processes with torchrun, or set it for each of them"
        raise ConfigError(f"environment WORLD_SIZE={size}: {what}")
    if not size.isdecimal() or environment["RANK"] not in map(str, range(int(size))):
        what = f"RANK={environment['RANK']} is none of {size} processes; start them with torchrun"
        raise ConfigError(f"environment WORLD_SIZE={size}: {what}")
    return int(size)


@cache
def _shared_store(rank: int, size: int, timeout: float) -> Store:
    """The store of the processes of this attempt, under a word that they share, and none of an earlier one has.

    A process that was started again would read the addresses of the one before it (torch's issue 135712): what an attempt
    before has left in the store may be there still. So each process says a word of its own, to which rank 0 answers, until
    all have acknowledged an answer. The store stays for as long as this process does: that of rank 0 may be in it.
    """
    store, *_ = next(rendezvous("env://", timeout=timedelta(seconds=timeout)))
    token, end = secrets.token_hex(8), time.monotonic() + timeout
    awaited = {0: f"token/{token}"} if rank else {other: f"ready/{token}/{other}" for other in range(1, size)}
    store.set(f"hello/{rank}", token)
    while missing := [other for other, key in awaited.items() if not store.check([key])]:
        if time.monotonic() > end:
            what = f"has not come within {timeout:g} seconds; see its log"
            raise PeerError(Failure(missing[0], ExitCode.FAILED, what))
        for other in missing if rank == 0 else ():
            if store.check([f"hello/{other}"]):
                store.set(f"token/{store.get(f'hello/{other}').decode()}", token)
        time.sleep(0.01)
    if rank:
        token = store.get(awaited[0]).decode()
        store.set(f"ready/{token}/{rank}", "")
    return PrefixStore(f"pipeline/{token}", store)
