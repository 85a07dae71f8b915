"""The processes that train together, and what they tell each other; a single process is a world of its own."""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
from torch import distributed
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from pipeline.errors import ConfigError, Fault, PipelineError

_T = TypeVar("_T")

# What a launcher tells each process by its environment.
LAUNCHER = ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT")

# Seconds after which a wait in the store looks whether another process has failed.
PATIENCE = 0.5


class Failure(NamedTuple):
    """The first failure in a world."""

    rank: int
    exit_code: int
    headline: str


class PeerError(PipelineError):
    """Another process has failed, or was killed, so that this one cannot go on.

    Attributes:
        exit_code: that of the process which failed first.
    """

    def __init__(self, message: str, exit_code: Any = PipelineError.exit_code) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class World:
    """The processes of a run; ``context["world"]``, there with one process too.

    Every process has to make the same calls of ``broadcast``, ``all_gather`` and ``once_per_host`` in the same order. They
    are for stages; within a step nothing of this is called.

    Args:
        rank: number of this process among all, from 0.
        local_rank: its number on its host, from 0.
        size: how many there are.
        local_size: how many there are on its host.
        store: torch's key-value store that all of them reach; None: there is just one process.
        timeout: seconds that a process waits for the others.
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

    def once_per_host(self, function: Callable[[], _T]) -> _T:
        """What a function returns that one process of each host calls, such as a download; the others wait for it."""
        result = function() if self.local_rank == 0 else None
        leader, results = self.rank - self.local_rank, self.all_gather(result)
        return results[leader]  # type: ignore[return-value] # the leader has called it

    def require_equal(self, values: Mapping[str, Any], remedy: str) -> None:
        """Raise where a process has other values than rank 0.

        Args:
            values: what it is -> a plain value, such as a hash.
            remedy: what to do about a difference.

        Raises:
            ConfigError: a value differs; the message has the rank, its host, and what it is.
        """
        hosts = self.all_gather((socket.gethostname(), dict(values)))
        (first, expected), *others = hosts
        for rank, (host, own) in enumerate(others, 1):
            for name in expected.keys() | own.keys():
                if (ours := own.get(name)) != (theirs := expected.get(name)):
                    what = f"rank {rank} on {host}: {name} is {ours}, and {theirs} on rank 0 on {first}"
                    raise ConfigError(f"{what}; {remedy}")

    @contextmanager
    def collective(self, name: str) -> Iterator[None]:
        """In the block, what torch raises where another process has failed becomes a PeerError that says which.

        Raises:
            PeerError: another process has failed, or has not come within ``timeout``.
        """
        try:
            yield
        except RuntimeError as error:
            end = time.monotonic() + 4 * PATIENCE
            while (failure := self.first_failure()) is None and time.monotonic() < end:
                time.sleep(0.02)
            if failure is None:
                raise PeerError(f"{name}: another process has left without a word ({error}); see the logs") from error
            raise PeerError(f"rank {failure.rank} failed: {failure.headline}", failure.exit_code) from error

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
        store, end = store or self.store, time.monotonic() + self.timeout
        while True:
            try:
                store.wait([key], timedelta(seconds=PATIENCE))
                return json.loads(store.get(key))
            except RuntimeError as error:
                if failure := self.first_failure(store):
                    raise PeerError(f"rank {failure.rank} failed: {failure.headline}", failure.exit_code) from error
                if time.monotonic() > end or not isinstance(error, distributed.DistStoreError):
                    raise PeerError(f"nobody has answered with {key} for {self.timeout:g} seconds ({error})") from error

    def report_failure(self, exit_code: int, headline: str) -> None:
        """Say that this process fails, unless another has said so before."""
        if self.size > 1:
            failure = json.dumps([self.rank, exit_code, headline])
            with suppress(RuntimeError):
                self.store.compare_set("failure", "", failure)

    def first_failure(self, store: Store | None = None) -> Failure | None:
        """What the first process has said that failed; None: none has, or the store is gone."""
        with suppress(RuntimeError):
            store = store or self.store
            if self.size > 1 and store.check(["failure"]):
                return Failure(*json.loads(store.get("failure")))
        return None


# That of a process which nobody has launched beside others.
SINGLE = World()

_worlds = [SINGLE]


def current_world() -> World:
    """The world of this process."""
    return _worlds[-1]


@contextmanager
def joined(timeout: float = 600.0) -> Iterator[World]:
    """In the block, this process is one of those that a launcher has started; without a launcher it is alone.

    Raises:
        ConfigError: the environment says only half of what it has to.
    """
    size = _launched_size()
    if size == 1 or len(_worlds) > 1:
        yield current_world()
        return
    rank, local = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    limit = timedelta(seconds=timeout)
    store, *_ = next(rendezvous("env://", timeout=limit))
    token = _agree_on_token(store, rank, size, timeout)
    # A process that was started again would read the addresses of the one before it (torch's issue 135712).
    store = PrefixStore(f"pipeline/{token}", store)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    group = PrefixStore("group", store)
    distributed.init_process_group(backend, store=group, rank=rank, world_size=size, timeout=limit)
    _worlds.append(World(rank, local, size, local_size, store, timeout))
    try:
        yield current_world()
    finally:
        _worlds.pop()
        distributed.destroy_process_group()


def _launched_size() -> int:
    """How many processes the environment says there are.

    Raises:
        ConfigError: it says only half of what it has to.
    """
    size = os.environ.get("WORLD_SIZE", "1")
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


def _agree_on_token(store: Store, rank: int, size: int, timeout: float) -> str:
    """A word that the processes of this attempt share, and none of an earlier one has.

    What an attempt before has left in the store may be there still. So each process says a word of its own, to which rank 0
    answers, until all have acknowledged an answer.
    """
    end, own = time.monotonic() + timeout, secrets.token_hex(8)
    if rank:
        store.set(f"hello/{rank}", own)
        store.wait([f"token/{own}"], timedelta(seconds=timeout))
        token: str = store.get(f"token/{own}").decode()
        store.set(f"ready/{token}/{rank}", "1")
        return token
    missing = set(range(1, size))
    while missing:
        for other in [rank for rank in missing if store.check([f"hello/{rank}"])]:
            store.set(f"token/{store.get(f'hello/{other}').decode()}", own)
        missing = {rank for rank in missing if not store.check([f"ready/{own}/{rank}"])}
        if time.monotonic() > end:
            raise PeerError(f"rank {min(missing)} has not come within {timeout:g} seconds; see its log")
        time.sleep(0.01)
    return own
