"""``pipeline sweep``."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import chdir, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.check.checker import check, check_or_raise
from pipeline.cli.options import config_options, split
from pipeline.config.load import Config
from pipeline.errors import ConfigError, ExitCode, Fault

from .folder import SweepFolder, SweepState, Trial
from .results import print_results, progress, short, write_page
from .trials import Trials
from .values import Values, grid, parse

if TYPE_CHECKING:
    from .search import Search

# What a sweep goes on with is in its folder, but for these.
_ANEW = ("resume", "jobs", "as_json", "retry")


@click.command("sweep")
@partial(config_options, words="[CONFIG] KEY=VALUE,VALUE…")
@click.option(
    "--search", type=click.Choice(["random", "tpe"]), help="Draw trials, in the place of a grid of all values."
)
@click.option("--trials", "count", type=click.IntRange(min=1), metavar="N", help="How many trials a search draws.")
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Seed of a search; default: 0.")
@click.option(
    "--metric", metavar="NAME", help="What ranks trials; default: that of keep_best, else valid_loss, or loss."
)
@click.option("--mode", type=click.Choice(["min", "max"]), help="Whether the smallest or the largest is the best.")
@click.option("--prune", is_flag=True, help="End trials of a search that are worse than the median of those before.")
@click.option("--jobs", type=click.IntRange(min=1), default=1, metavar="N", help="How many trials run at once.")
@click.option("--resume", type=click.Path(path_type=Path), metavar="DIR", help="Go on with the sweep in this folder.")
@click.option("--retry-failed", "retry", is_flag=True, help="With --resume: go on with trials that have failed, too.")
@click.option("--json", "as_json", is_flag=True, help="Print the table as JSON.")
def command(
    config: str | None,
    words: Sequence[str],
    options: Sequence[str],
    jobs: int,
    resume: Path | None,
    retry: bool,
    as_json: bool,
    **settings: Any,
) -> None:
    """Run a config with each of several values, and rank the runs.

    KEY=0.1,0.01 names values; KEY=1e-4..1e-1 is a range for --search, and KEY=1e-4..1e-1:log one whose logarithms are
    drawn evenly. -o KEY=VALUE sets what all trials have alike. The metric of a trial is the best of all its validations.
    """
    if resume:
        _refuse_settings()
    elif retry:
        raise click.UsageError("--retry-failed goes with --resume DIR")
    with SweepFolder.at(resume) if resume else _new(config, words, options, settings) as folder:
        for trial in folder.state.trials if retry else ():
            if trial.state == "failed":
                trial.state, trial.reason = "waiting", ""
        if resume:
            _check_again(folder.state)
        sys.exit(_run(folder, jobs, as_json=as_json))


def _refuse_settings() -> None:
    """Refuse what ``--resume`` would ignore."""
    context = click.get_current_context()
    commandline = click.core.ParameterSource.COMMANDLINE
    for own in context.command.params:
        name = own.opts[-1] if isinstance(own, click.Option) else "the config and all words"
        if own.name not in _ANEW and context.get_parameter_source(own.name or "") == commandline:
            raise click.UsageError(f"--resume goes on with what the sweep was begun with; leave out {name}")


@contextmanager
def _new(
    config: str | None, words: Sequence[str], options: Sequence[str], settings: dict[str, Any]
) -> Iterator[SweepFolder]:
    """The folder of a new sweep, all of whose values are checked.

    Raises:
        click.UsageError: the command line makes no sense.
        ConfigError: a value is wrong.
    """
    swept = [word for word in words if "=" in word]
    stages = {name: settings.pop(name) for name in [*settings] if name not in SweepState.model_fields}
    path, fixed = split(config, [word for word in words if "=" not in word], options, stages)
    values, search = parse(swept, fixed), settings["search"]
    for name in ("count", "prune"):
        if bool(settings[name]) != bool(search) and (name == "count" or settings[name]):
            raise click.UsageError("--trials N goes with --search" if name == "count" else "--prune goes with --search")
    if search:
        _search_class(search)
    trials = [] if search else grid(values)
    checked = trials or _probes(values)
    _check_all(path, fixed, checked)
    resolved = check_or_raise(path, [*fixed, *checked[0]])
    metric, mode = _metric(resolved, settings["metric"], settings["mode"])
    state = SweepState(
        **{**settings, "metric": metric, "mode": mode, "count": settings["count"] or len(trials)},
        folder=os.getcwd(),
        config=path,
        fixed=fixed,
        values=swept,
        trials=[Trial(words=own) for own in trials],
    )
    with SweepFolder.new(resolved.settings.output_dir, resolved.name, state) as folder:
        yield folder


def _probes(values: Sequence[Values]) -> list[list[str]]:
    """Combinations in which each value is once, and each end of a range."""
    count = max(len(own.texts) for own in values)
    return [[(own.words() * count)[place] for own in values] for place in range(count)]


def _check_all(path: str, fixed: Sequence[str], trials: Sequence[Sequence[str]]) -> None:
    """Check the config with the words of each trial, before any runs.

    Raises:
        ConfigError: all faults, each once, with the words of the first trial that has it.
    """
    found: dict[Fault, list[Sequence[str]]] = defaultdict(list)
    for words in trials:
        for fault in check(path, [*fixed, *words]):
            found[fault].append(words)
    if found:
        raise ConfigError([_of_trials(fault, own, len(trials)) for fault, own in found.items()])


def _check_again(state: SweepState) -> None:
    """Check what is left of a sweep: the config may have changed.

    Raises:
        ConfigError: it has faults now.
    """
    words = [trial.words for trial in state.trials if trial.state == "waiting"]
    if state.search and len(state.trials) < state.count:
        words += _probes(parse(state.values))
    with chdir(state.folder):
        _check_all(state.config, state.fixed, words)


def _of_trials(fault: Fault, trials: Sequence[Sequence[str]], count: int) -> Fault:
    """A fault that says in which trials it is, unless it is in all of them."""
    if len(trials) == count:
        return fault
    others = f", and {len(trials) - 1} more" if len(trials) > 1 else ""
    return replace(fault, message=f"{fault.message} (in the trial {shlex.join(trials[0])}{others})")


def _metric(config: Config, metric: str | None, mode: str | None) -> tuple[str, str]:
    """By what trials are ranked: what was said, else as the last runner that trains keeps its best, else its loss.

    Raises:
        click.UsageError: whether a small or a large one is good is not known.
    """
    [*_, runner] = [own for own in config.runners if own.kind == "train"] or config.runners
    best, phases = runner.keep_best, config.phases(runner)
    if metric is None and best:
        metric = best.metric
    if metric is None:
        validated = phases[-1].valid_datasets if phases else []
        loss = f"{validated[0]}/loss" if len(validated) > 1 else "valid_loss" if validated else "loss"
        of_one = [runner.name] if len(config.runners) > 1 else []
        metric = ".".join([*of_one, *([phases[-1].name] if len(phases) > 1 else []), loss])
    if mode is None and best and best.metric == metric:
        mode = best.mode
    if mode is None and not metric.endswith("loss"):
        raise click.UsageError(
            f"--metric {metric}: is the smallest the best, or the largest? add --mode min, or --mode max"
        )
    return metric, mode or "min"


def _run(folder: SweepFolder, jobs: int, *, as_json: bool) -> ExitCode:
    """Run what is left of a sweep, and print what came of it; the exit code."""
    state, again = folder.state, f"to go on: pipeline sweep --resume {shlex.quote(short(folder.path))}"
    search = _search_class(state.search)(folder, parse(state.values), jobs) if state.search else None
    kind = f"drawn by {state.search}" if state.search else "a grid"
    click.echo(f"sweep {short(folder.path)}: {state.count} trials, {kind}, by {state.metric} ({state.mode})", err=True)
    with progress(folder) as say:
        if before := folder.ended:
            say(f"{before} of them have ended already")
        trials = Trials(folder, jobs, search, say)
        trials.run()
    left = state.count - folder.ended
    if left:
        click.echo(f"{folder.ended} of {state.count} trials have ended; {again}", err=True)
    if trials.signal and left:
        return ExitCode.INTERRUPTED if trials.signal is signal.SIGINT else ExitCode.STOPPED
    is_done = any(trial.state == "done" for trial in state.trials)
    print_results(folder, as_json=as_json)
    write_page(folder)
    if not is_done:
        click.echo("no trial is done; the table says why", err=True)
    return ExitCode.DONE if is_done else ExitCode.FAILED


def _search_class(name: str) -> type[Search]:
    """The class that draws trials.

    Raises:
        ConfigError: Optuna is missing, or broken.
    """
    try:
        from .search import Search  # noqa: PLC0415 - imports Optuna, an extra
    except ImportError as error:
        remedy = "pip install 'five-stage-pipeline[sweep]'"
        raise ConfigError(f"--search {name}: Optuna cannot be imported ({error}); {remedy}") from error
    return Search
