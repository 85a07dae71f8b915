"""``pipeline run``."""

from __future__ import annotations

import gc
import sys
import traceback
from collections.abc import Sequence

import click

from pipeline.check.runner import runners_of_mode
from pipeline.cli import COMMANDS
from pipeline.cli.options import config_and_overrides, log_level
from pipeline.config.load import ConfigBuilder
from pipeline.errors import ConfigError, ExitCode, PipelineError
from pipeline.run import log
from pipeline.run.resume import NEVER
from pipeline.signals import StoppedError
from pipeline.trainer import GeneralTrainer


@click.command("run", help=COMMANDS["run"])
@config_and_overrides
@click.option("--nproc", type=click.IntRange(min=1), default=1, help="Processes to start; only 1 is possible yet.")
@click.option("--debug", is_flag=True, help="Set debug: true for every runner: a few batches and epochs, nothing kept.")
@click.option(
    "--resume",
    default=NEVER,
    metavar="auto|never|PATH",
    help="Go on with the newest run of this config file or its `name:`, or with a run directory or a checkpoint in one; "
    "by default a new one is begun.",
)
@log_level
def command(path: str, overrides: Sequence[str], nproc: int, debug: bool, resume: str, level: str | None) -> None:
    """Exit codes: see the README."""
    log.to_stderr(level or "INFO")
    if nproc > 1:
        raise ConfigError(f"--nproc {nproc}: several processes are not yet possible; leave it out")
    overrides = [*overrides, *_debug(path, overrides)] if debug else overrides
    sys.exit(run_trainer(GeneralTrainer(path, overrides, resume)))


def _debug(path: str, overrides: Sequence[str]) -> list[str]:
    """The overrides that make a debug run of every runner of ``mode``."""
    tree = ConfigBuilder(path, overrides).tree
    return [f"runner.{name}.debug=true" for name in runners_of_mode(tree)] if tree else []


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
