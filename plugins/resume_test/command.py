"""``pipeline resume-test``."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import click

from pipeline.check.checker import check_or_raise
from pipeline.cli.options import config_and_overrides
from pipeline.errors import ConfigError, ExitCode
from pipeline.run import log

from .compare import BEFORE, compare, compare_directories
from .files import NOTHING, Finding
from .runs import FinishedRun, Runs, iterations

_NOT_REPEATABLE = """\
The run does not repeat itself, even where nothing has interrupted it. Usual causes: `seed: null`, randomness from
outside of the generators of python, numpy and torch, operations without a fixed order (`deterministic: true` finds
them), the time."""
_STATE_LOST = """\
Usual causes: state that no checkpoint holds (an attribute of the model that is no buffer, a counter of a dataset;
keep it with context["checkpointer"].add_recoverable), randomness from outside of the generators of python, numpy
and torch, the time."""


@click.command("resume-test")
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
def command(path: str, overrides: Sequence[str], kills: Sequence[int], keep: Path | None) -> None:
    """Kill a run, resume it, and compare it with one that nothing interrupts.

    Exit 0 if the resumed run is bit for bit the straight one, 1 if not.
    """
    log.to_stderr("WARNING")
    try:
        with _folder(keep) as folder:
            same = _report(Runs(check_or_raise(path, overrides), folder), sorted(set(kills)))
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


def _report(runs: Runs, kills: Sequence[int]) -> bool:
    """Run, compare, and print on stdout what came of it; whether all is the same."""
    straight = runs.straight()
    interrupted = runs.interrupted(_kills(runs, straight, kills))
    findings: list[Finding] = []
    for runner in runs.runners:
        click.echo(runner)
        own = [f"{kill}" for kill in interrupted.kills if kill.runner == runner]
        for line in own or ["not killed: it does not come so far"]:
            click.echo(f"  {line}")
        findings += _print(compare(straight, interrupted, runner))
    click.echo("run directory")
    findings += _print(compare_directories(straight, interrupted, runs.runners))
    return _conclude(findings)


def _print(findings: Sequence[Finding]) -> Sequence[Finding]:
    for part, text, differs in findings:
        click.echo(f"  {part:<18}  {'DIFFERS  ' if differs else ''}{text}")
    return findings


def _kills(runs: Runs, straight: FinishedRun, kills: Sequence[int]) -> list[tuple[str, int]]:
    """Every runner is killed at each of the iterations that it comes to.

    Raises:
        ConfigError: none comes so far.
    """
    ends = {runner: iterations(straight.directory, runner) for runner in runs.runners}
    if not any(ends.values()):
        nothing = "makes no iteration, as one that only evaluates, so there is none after which it could be killed"
        raise ConfigError(f"{', '.join(ends)}: {nothing}; send it a signal in a validation instead")
    for kill in kills:
        if kill > max(ends.values()):
            lengths = ", ".join(f"{runner} ends after {end} iterations" for runner, end in ends.items())
            raise ConfigError(f"--at {kill}: {lengths}; choose one before that")
    return [(runner, kill) for runner, end in ends.items() for kill in kills if kill <= end]


def _conclude(findings: Sequence[Finding]) -> bool:
    differing = [finding for finding in findings if finding.differs]
    if not differing:
        missing = [finding.part for finding in findings if finding.text.startswith(NOTHING)]
        but = f", but for what was {NOTHING}: {', '.join(dict.fromkeys(missing))}" if missing else ""
        click.echo(f"equal, bit for bit{but}")
        return True
    part, text, _ = differing[0]
    click.echo(f"NOT equal; first, in {part}: {text}")
    click.echo(_NOT_REPEATABLE if part == BEFORE else _STATE_LOST)
    return False
