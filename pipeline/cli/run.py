"""``pipeline run``."""

from __future__ import annotations

import gc
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import click

from pipeline.check.runner import runners_of_mode
from pipeline.cli import refuse
from pipeline.cli.options import config_and_overrides, log_level, processes
from pipeline.config.load import ConfigBuilder
from pipeline.distributed.exit import leave
from pipeline.distributed.launch import count_processes, is_launched, launch
from pipeline.distributed.world import PeerError, joined
from pipeline.errors import ConfigError, ExitCode, PipelineError
from pipeline.run import log
from pipeline.run.resume import NEVER
from pipeline.signals import StoppedError
from pipeline.trainer import GeneralTrainer
from pipeline.user_code.plugins import configured_plugins, plugin_faults


@click.command("run")
@config_and_overrides
@processes
@click.option("--debug", is_flag=True, help="Set debug: true for every runner: a few batches and epochs, nothing kept.")
@click.option(
    "--resume",
    default=NEVER,
    metavar="auto|never|PATH",
    help="Go on with the newest run of this config file or its `name:`, or with a run directory or a checkpoint in one; "
    "by default a new one is begun, and in the place of a run directory that is an empty folder.",
)
@log_level
def command(path: str, overrides: Sequence[str], debug: bool, resume: str, level: str | None, **launching: Any) -> None:
    """Run a config.

    Exit codes: see the README.
    """
    log.to_stderr(level or "INFO")
    overrides = [*overrides, *_debug(path, overrides)] if debug else overrides
    run_and_leave(lambda: GeneralTrainer(path, overrides, resume), sys.argv[1:], **launching)


def _debug(path: str, overrides: Sequence[str]) -> list[str]:
    """The overrides that make a debug run of every runner of ``mode``."""
    tree = ConfigBuilder(path, overrides).tree
    return [f"runner.{name}.debug=true" for name in runners_of_mode(tree)] if tree else []


def run_and_leave(
    build: Callable[[], GeneralTrainer], words: Sequence[str], nproc: str | None, max_restarts: int
) -> NoReturn:
    """Run what a trainer is to run, here or in processes of its own, and leave with the exit code.

    Args:
        build: makes the trainer.
        words: the command line, for the processes.
        nproc: what ``--nproc`` says.
        max_restarts: what ``--max-restarts`` says.

    Raises:
        PipelineError: nothing was run.
    """
    if not is_launched():
        trainer = build()
        config, processes = trainer.config, count_processes(trainer.config, nproc, max_restarts)
        plugins, _ = configured_plugins(config.tree, config.workspace) if processes > 1 else ((), ())
        if faults := [fault for plugin in plugins for fault in plugin_faults(plugin, several=True)]:
            raise ConfigError(faults)
        sys.exit(launch(words, processes, max_restarts) if processes else run_trainer(trainer))
    try:
        if nproc or max_restarts:
            raise ConfigError("--nproc, --max-restarts: a launcher has started this process; use its own")
        with joined() as world:
            code = run_trainer(world.attempt(build))
    except PipelineError as error:
        # What has failed elsewhere is told there, and by rank 0.
        code = error.exit_code if isinstance(error, PeerError) and os.environ["RANK"] != "0" else refuse(error)
    leave(code)


def run_trainer(trainer: GeneralTrainer) -> ExitCode:
    """Have a trainer run its config, and return what the command leaves with.

    Raises:
        PipelineError: nothing was run.
    """
    # What has been imported stays to the end: the collector need not look at it again, now and in every round of it.
    gc.freeze()
    gc.enable()
    try:
        trainer.run()
    except KeyboardInterrupt:
        # Nothing more may be interrupted: the run is closed and has said so.
        return ExitCode.INTERRUPTED
    except StoppedError as error:
        if trainer.outcome in {ExitCode.USAGE, ExitCode.BUG}:
            click.echo(f"{error}; no runner was under way, and what was saved is there still", err=True)
        return ExitCode.STOPPED
    except BaseException as error:
        # What came before the first stage nobody has logged.
        if trainer.outcome in {ExitCode.USAGE, ExitCode.BUG}:
            if isinstance(error, PipelineError):
                raise
            traceback.print_exc()
            click.echo("this is a bug of ours: please report it with the lines above", err=True)
            return ExitCode.BUG
    return trainer.outcome
