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

# Of the further lines of a finding.
_INDENT = " " * 22
_NOT_REPEATABLE = """\
The run does not repeat itself, even where nothing has interrupted it. Usual causes: `seed: null`, randomness from
outside of the generators of python, numpy and torch, operations without a fixed order (`deterministic: true` finds
them), the time."""
_STATE_LOST = """\
Usual causes: state that no checkpoint holds (an attribute of the model that is no buffer, a counter of a dataset;
keep it with context["checkpointer"].add_recoverable), randomness from outside of the generators of python, numpy
and torch, the time."""
_VOLATILE = """\
If two equal runs need not have this file alike, name it in the class of the plugin or stage that writes it:
volatile = ({!r},)"""


@click.command("resume-test")
@config_and_overrides
@click.option(
    "--at",
    "kills",
    type=click.IntRange(min=1),
    multiple=True,
    metavar="N",
    help="Kill the run after iteration N and resume it; may be given several times. By default after two thirds.",
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
    for finding in findings:
        text = finding.text.replace("\n", f"\n{_INDENT}")
        click.echo(f"  {finding.part:<18}  {'DIFFERS  ' if finding.differs else ''}{text}")
    return findings


def _kills(runs: Runs, straight: FinishedRun, kills: Sequence[int]) -> list[tuple[str, int]]:
    """Every runner is killed at each of the iterations that it comes to; without any, after two thirds of its own.

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
    if not kills:
        return [(runner, max(1, end * 2 // 3)) for runner, end in ends.items() if end]
    return [(runner, kill) for runner, end in ends.items() for kill in kills if kill <= end]


def _conclude(findings: Sequence[Finding]) -> bool:
    differing = [finding for finding in findings if finding.differs]
    if not differing:
        missing = [finding.part for finding in findings if finding.text.startswith(NOTHING)]
        but = f", but for what was {NOTHING}: {', '.join(dict.fromkeys(missing))}" if missing else ""
        click.echo(f"equal, bit for bit{but}")
        return True
    first = differing[0]
    line, *_ = first.text.splitlines()
    click.echo(f"NOT equal; first, in {first.part}: {line}")
    click.echo(_NOT_REPEATABLE if first.part == BEFORE else _STATE_LOST)
    if first.pattern:
        click.echo(_VOLATILE.format(first.pattern))
    return False
