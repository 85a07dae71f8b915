"""Several processes of one command: torch's elastic launcher starts them, here or as ``torchrun``, and once more after a failure."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple
from uuid import uuid4

import torch
from loguru import logger
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from pipeline.config.load import Config
from pipeline.config.schema import SYNC_ON_CPU
from pipeline.distributed.device import resolve_device
from pipeline.distributed.exit import LATER, RUN
from pipeline.distributed.world import World, launched_size
from pipeline.errors import ConfigError, ExitCode

# Options of the command line that are the launcher's, each with a value; the processes don't get them.
OPTIONS = ("--nproc", "--max-restarts")

# The launcher passes them on to all processes.
_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGUSR1"

_THREADS = "OMP_NUM_THREADS"


def is_launched() -> bool:
    """Whether a launcher has started this process, beside others or alone.

    Raises:
        ConfigError: the environment says only half of what it has to.
    """
    return launched_size() > 1 or RUN in os.environ


def refuse_options(nproc: int | str | None, max_restarts: int) -> None:
    """Raise where a process that a launcher has started is told to be one.

    Raises:
        ConfigError: it is.
    """
    if nproc or max_restarts:
        option = f"--nproc {nproc}" if nproc else f"--max-restarts {max_restarts}"
        raise ConfigError(f"{option}: a launcher has started this process; give it to that, or leave one of them out")


def count_processes(config: Config, nproc: int | str | None, max_restarts: int) -> int:
    """How many processes this one is to start; 0: none, it runs the config itself.

    Args:
        config: what is to be run.
        nproc: what ``--nproc`` says: a number, or ``auto``; None: the largest ``worker_num`` of the config.
        max_restarts: what ``--max-restarts`` says.

    Raises:
        ConfigError: nothing is to be started; or so many processes cannot run the config on this host.
    """
    workers = max((runner.worker_num or 0 for runner in config.runners), default=0)
    if max_restarts and not (nproc or workers):
        raise ConfigError(f"--max-restarts {max_restarts}: is for processes that are started; add --nproc N")
    processes = int(nproc or workers) if isinstance(nproc, int | None) else torch.cuda.device_count() or 1
    if processes == 1 and not (max_restarts or workers):
        return 0
    last = max(processes - 1, 0)
    if processes:
        find_devices(config, World(last, last, processes, processes))
    return processes


def find_devices(config: Config, world: World) -> dict[str, torch.device]:
    """Runner -> where it computes.

    Raises:
        ConfigError: a runner cannot run in these processes: the machine has no such device, or its keys say otherwise.
    """
    devices, faults = {}, []

    def refuse(address: str, what: str) -> None:
        faults.append(config.origin(address).fault(address, what))

    for runner in config.runners:
        address = f"runner.{runner.name}"
        try:
            device = devices[runner.name] = resolve_device(runner.device, world)
        except ConfigError as error:
            refuse(f"{address}.device", str(error))
            continue
        if runner.sync_batchnorm and device.type == "cpu":
            refuse(f"{address}.sync_batchnorm", SYNC_ON_CPU)
        if runner.fleet_mode and not is_launched() and world.size == 1:
            what = f"is '{runner.fleet_mode}', and this is one process"
            remedy = "start it by `torchrun … -m pipeline run CONFIG` or `pipeline run CONFIG --nproc N`, or write class: train"
            refuse(f"{address}.fleet_mode", f"{what}; {remedy}")
    for dataset in config.settings.dataset:
        if (size := dataset.global_batch_size) and size < world.size:
            what = f"is {size}, and there are {world.size} processes; start fewer, or write a larger one"
            refuse(f"dataset.{dataset.name}.global_batch_size", what)
    if faults:
        raise ConfigError(faults)
    return devices


def launch(words: Sequence[str], processes: int, max_restarts: int = 0) -> int:
    """Start processes on this host with torch's elastic launcher, and wait for them.

    Args:
        words: the command line, which each process gets without ``OPTIONS``.
        processes: how many.
        max_restarts: how often all are started again after one of them has failed or was killed.

    Returns:
        The exit code of the one that failed first; that of a process killed by a signal is 128 and its number.
    """
    # They take 0.1 s, and only this needs them.
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException  # noqa: PLC0415
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError  # noqa: PLC0415
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch  # noqa: PLC0415

    os.environ.setdefault(_THREADS, str(_cores() // processes or 1))
    for name in ("elastic", "launcher"):
        # What it has to say of a failure is said below.
        torch_logger = logging.getLogger(f"torch.distributed.{name}")
        torch_logger.addHandler(logging.NullHandler())
        torch_logger.propagate = False
    with TemporaryDirectory(prefix="pipeline-launch-") as folder:
        settings = LaunchConfig(
            1, 1, processes, DefaultLogsSpecs(log_dir=folder), uuid4().hex, rdzv_backend="c10d",
            rdzv_endpoint="localhost:0", local_addr="localhost", max_restarts=max_restarts, signals_to_handle=_SIGNALS,
        )  # fmt: skip
        try:
            elastic_launch(settings, sys.executable)("-m", "pipeline", *_own_words(words))
        except ChildFailedError as error:
            ends = _ends(Path(folder))
            for rank, failure in error.failures.items():
                # The launcher ends the others after the first.
                at = failure.timestamp + LATER * (failure.exitcode == -signal.SIGTERM)
                code = failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
                ends.setdefault(rank, _End(at, rank, code, str(failure.message)))
            first = min(end for end in ends.values() if end.exit_code)
            logger.error(f"rank {first.rank} was the first to leave, with exit code {first.exit_code}: {first.why}")
            return first.exit_code
        except SignalException as error:
            # They had the signal before they could tell of it, or a second one.
            ends = _ends(Path(folder)) or {0: _End(0.0, 0, 128 + error.sigval, "")}
            return min((end for end in ends.values() if end.exit_code), default=_End()).exit_code
    return ExitCode.DONE


def _own_words(words: Sequence[str]) -> Iterator[str]:
    """The words of a process: without the launcher's options, and safe from its own variables."""
    rest = iter(words)
    for word in rest:
        if word in OPTIONS:
            next(rest, None)
        elif not word.startswith(tuple(f"{option}=" for option in OPTIONS)):
            yield word.replace("$", "$$")


class _End(NamedTuple):
    """When, with what and why a process has left; that of another's failure counts as later."""

    at: float = 0.0
    rank: int = 0
    exit_code: int = ExitCode.DONE
    why: str = ""


def _ends(folder: Path) -> dict[int, _End]:
    """Rank -> what the error file of the last attempt says."""
    attempts = sorted(folder.glob("*/attempt_*"), key=lambda path: int(path.name.removeprefix("attempt_")))
    ends = {}
    for file in attempts[-1].glob("*/error.json") if attempts else ():
        # One that was being written as its process was killed says nothing.
        with suppress(ValueError, LookupError, TypeError):
            about, rank = json.loads(file.read_bytes())["message"], int(file.parent.name)
            ends[rank] = _End(about["extraInfo"]["at"], rank, about["errorCode"], about["message"])
    return ends


def own_threads(world: World) -> int | None:
    """How many threads this process takes of its host's cores; None: those that torch or the user has chosen."""
    chosen = _THREADS in os.environ
    if chosen and RUN in os.environ:
        # torchrun chooses 1 where its user has not.
        with suppress(OSError):
            chosen = f"{_THREADS}=".encode() in Path(f"/proc/{os.getppid()}/environ").read_bytes()
    return None if chosen or world.local_size == 1 else _cores() // world.local_size or 1


def _cores() -> int:
    return len(os.sched_getaffinity(0))


# How many runs this process has begun: an attempt begins the same ones in the same order.
_runs = count()


class Note:
    """What an attempt of a run leaves to the next, which torch's launcher starts after a process has failed.

    Args:
        world: the processes.
    """

    def __init__(self, world: World) -> None:
        self._key, self._store = f"pipeline/{os.environ.get(RUN)}/{next(_runs)}", _launcher_store(world)

    def read(self) -> str:
        """What the attempt before has left; ``""``: there was none, or it has left nothing."""
        return self._store.get(self._key).decode() if self._store and self._store.check([self._key]) else ""

    def write(self, text: str) -> None:
        """Leave a text to the next attempt."""
        if self._store:
            self._store.set(self._key, text)


def _launcher_store(world: World) -> Store | None:
    """The store of torch's launcher, which is there for all attempts; None: nothing starts this process again."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    store: Store = world.store if world.size > 1 else next(rendezvous("env://"))[0]
    # Below what is of this attempt alone.
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store
