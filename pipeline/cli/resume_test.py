"""``pipeline resume-test``."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import click

from pipeline import log
from pipeline.check import checked
from pipeline.cli import COMMANDS
from pipeline.cli.arguments import config_and_overrides, refuse, split
from pipeline.errors import ConfigError, ExitCode, PipelineError
from pipeline.resume_trial.trial import Ended, Kill, Trial, iterations
from pipeline.resume_trial.verdict import BEFORE, Finding, findings

_CHANCE = """\
The run does not repeat itself, even where nothing has interrupted it. Usual causes: `seed: null`, randomness from
outside of the generators of python, numpy and torch, operations without a fixed order (`deterministic: true` finds
them), the time."""
_LOST = """\
Usual causes: state that no checkpoint holds (an attribute of the model that is no buffer, a counter of a dataset;
keep it with context["checkpointer"].add_recoverable), randomness from outside of the generators of python, numpy
and torch, the time."""


@click.command("resume-test", help=COMMANDS["resume-test"])
@config_and_overrides
@click.option(
    "--at",
    "kills",
    type=click.IntRange(min=1),
    multiple=True,
    required=True,
    metavar="N",
    help="Kill the run after iteration N and resume it; may be given several times.",
)
@click.option("--keep", type=click.Path(path_type=Path), metavar="DIR", help="Keep both runs in a new folder.")
def command(
    config: str | None, words: Sequence[str], options: Sequence[str], kills: Sequence[int], keep: Path | None
) -> None:
    """Exit 0 if the resumed run is bit for bit the straight one, 1 if not."""
    path, overrides = split(config, words, options)
    log.to_stderr("WARNING")
    try:
        with _folder(keep) as folder:
            trial = Trial(checked(path, overrides), folder)
            same = _report(trial, sorted(set(kills)))
    except ConfigError as error:
        sys.exit(refuse(error))
    except PipelineError as error:
        click.echo(str(error), err=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(ExitCode.INTERRUPTED)
    sys.exit(ExitCode.DONE if same else ExitCode.FAILED)


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    """Where the runs go; removed at the end, unless it is to be kept."""
    if keep is None:
        with TemporaryDirectory(prefix="pipeline-resume-test-") as folder:
            yield Path(folder)
        return
    try:
        keep.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"--keep {keep}: cannot be made: {error.strerror}; name a new folder") from error
    yield keep.resolve()
    click.echo(f"both runs are kept in {keep}", err=True)


def _report(trial: Trial, kills: Sequence[int]) -> bool:
    """Run, compare, and say on stdout what came of it; whether all is the same."""
    straight = trial.straight()
    interrupted = trial.interrupted(_moments(trial, straight, kills))
    every = []
    for runner in trial.runners:
        found = findings(straight, interrupted, runner)
        every += found
        click.echo(runner)
        for kill in interrupted.kills:
            if kill.runner == runner:
                click.echo(f"  {_history(kill)}")
        for each in found:
            click.echo(f"  {each.part:<18}  {'DIFFERS  ' if each.differs else ''}{each.what}")
    return _conclude([each for each in every if each.differs])


def _moments(trial: Trial, straight: Ended, kills: Sequence[int]) -> list[tuple[str, int]]:
    """Every runner is killed at each of the iterations that it comes to.

    Raises:
        ConfigError: none comes so far.
    """
    ends = {runner: iterations(straight.directory, runner) for runner in trial.runners}
    for at in kills:
        if at > max(ends.values()):
            lengths = ", ".join(f"{runner} ends after {end} iterations" for runner, end in ends.items())
            raise ConfigError(f"--at {at}: {lengths}; choose one before that")
    return [(runner, at) for runner, end in ends.items() for at in kills if at <= end]


def _history(kill: Kill) -> str:
    """Where the run was killed, and where it went on."""
    if kill.left is not None:
        return f"killed after iteration {kill.at}, resumed after iteration {kill.left}"
    anew = "no checkpoint was saved before, so it began anew; with a shorter save_interval it goes on"
    return f"killed after iteration {kill.at}; {anew}"


def _conclude(differing: Sequence[Finding]) -> bool:
    if not differing:
        click.echo("equal, bit for bit")
        return True
    first = differing[0]
    click.echo(f"NOT equal; first, in {first.part}: {first.what}")
    click.echo(_CHANCE if first.part == BEFORE else _LOST)
    return False
