"""Several processes of one command: torch's elastic launcher starts them, here or as ``torchrun``, and again after a failure."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Sequence
from itertools import count, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import uuid4

import torch
from loguru import logger
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from pipeline.config.load import Config
from pipeline.distributed.device import resolve_device
from pipeline.distributed.exit import RUN
from pipeline.distributed.world import World, launched_size
from pipeline.errors import ConfigError, ExitCode

# Options of the command line that are the launcher's, each with a value; the processes don't get them.
OPTIONS = {"--nproc", "--max-restarts"}

# The launcher passes them on to all processes.
_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGUSR1"

# How many runs this process has begun: each attempt begins the same ones in the same order.
_runs = count()


def is_launched() -> bool:
    """Whether a launcher has started this process, beside others or alone.

    Raises:
        ConfigError: the environment says only half of what it has to.
    """
    return launched_size() > 1 or RUN in os.environ


def count_processes(config: Config, nproc: str | None, max_restarts: int) -> int:
    """How many processes this one is to start; 0: none, it runs the config itself.

    Args:
        config: what is to be run.
        nproc: what ``--nproc`` says: a number, or ``auto``; None: the largest ``worker_num`` of the config.
        max_restarts: what ``--max-restarts`` says.

    Raises:
        ConfigError: nothing is to be started; or so many processes cannot run the config on this host.
    """
    workers = max(runner.worker_num or 0 for runner in config.runners)
    if max_restarts and not (nproc or workers):
        raise ConfigError(f"--max-restarts {max_restarts}: is for processes that are started; add --nproc N")
    processes = torch.cuda.device_count() or 1 if nproc == "auto" else int(nproc or workers)
    if processes > 1:
        find_devices(config, World(processes - 1, processes - 1, processes, processes))
    return processes


def find_devices(config: Config, world: World) -> dict[str, torch.device]:
    """Runner -> where it computes.

    Raises:
        ConfigError: a runner cannot run in these processes: the machine has no such device, or its keys say otherwise.
    """
    devices, faults = dict[str, torch.device](), dict[str, str]()
    for runner in config.runners:
        address = f"runner.{runner.name}"
        try:
            devices[runner.name] = resolve_device(runner.device, world)
        except ConfigError as error:
            faults[f"{address}.device"] = str(error)
        if runner.sync_batchnorm and devices.get(runner.name) == torch.device("cpu"):
            faults[f"{address}.sync_batchnorm"] = "is true, and the device is the CPU; use GPUs, or remove it"
        if any((runner.worker_num, runner.fleet_mode)) and world.size == 1 and not is_launched():
            how = "start it by `torchrun … -m pipeline run CONFIG` or `pipeline run CONFIG --nproc N`, or write class: train"
            faults[f"{address}.fleet_mode"] = f"is '{runner.fleet_mode}', and this is one process; {how}"
    for dataset in config.settings.dataset:
        if (size := dataset.global_batch_size or world.size) < world.size:
            what = f"is {size}, and there are {world.size} processes; start fewer, or write a larger one"
            faults[f"dataset.{dataset.name}.global_batch_size"] = what
    if faults:
        raise ConfigError([config.origin(address).fault(address, what) for address, what in faults.items()])
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
    from torch.distributed.elastic import multiprocessing as elastic  # noqa: PLC0415
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch  # noqa: PLC0415

    # torchrun would give each process one thread.
    os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads() // processes or 1))
    # What torch's launcher has to say of a failure is said below.
    logging.disable()
    own = [word for before, word in pairwise(["", *words]) if OPTIONS.isdisjoint({before, word.partition("=")[0]})]
    # It would fill in what looks like a variable of its own.
    command = ["-m", "pipeline", *(word.replace("$", "$$") for word in own)]
    with TemporaryDirectory(prefix="pipeline-launch-") as folder:
        settings = LaunchConfig(
            1, 1, processes, elastic.DefaultLogsSpecs(folder), uuid4().hex, rdzv_backend="c10d", local_addr="localhost",
            rdzv_endpoint="localhost:0", max_restarts=max_restarts, signals_to_handle=_SIGNALS,
        )  # fmt: skip
        try:
            elastic_launch(settings, sys.executable)(*command)
        except elastic.errors.ChildFailedError as error:
            rank, failure = error.get_first_failure()
            code = failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
            why = failure.message["message"] if isinstance(failure.message, dict) else failure.message
            # What the run was asked for is no error, and rank 0 has said it.
            if code not in {ExitCode.STOPPED, ExitCode.INTERRUPTED}:
                logger.error(f"rank {rank} was the first to leave, with exit code {code}: {why}")
            return code
        except elastic.SignalException as error:
            # The last of all attempts; without one, a signal was too early or came twice.
            files = sorted(Path(folder).rglob("error.json"), key=os.path.getmtime)
            return json.loads(files[-1].read_bytes())["message"]["errorCode"] if files else 128 + error.sigval
    return ExitCode.DONE


def attempt_store() -> Store | None:
    """What torch's launcher keeps of this run for the next attempt; None: it starts nothing again."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    return PrefixStore(f"pipeline/{os.environ[RUN]}/{next(_runs)}", next(rendezvous("env://"))[0])
