"""What happens when a stage fails: it is logged, the plugins and terminal's ``abort`` are told, everything is closed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from loguru import logger

from pipeline.data.fetch import WorkerTracebackError
from pipeline.errors import ClassPathError, ExitCode, NoCheckpointError, PipelineError, StorageError
from pipeline.run.directory import RunDirectory, is_resumable, read_status
from pipeline.run.session import Run, RunnerSession
from pipeline.signals import SHUTDOWN, StoppedError
from pipeline.user_code.plugins import culprit
from pipeline.user_code.tracebacks import user_traceback


def exit_code(error: BaseException) -> ExitCode:
    """What a run that an error ended leaves with; once it runs, nothing counts as a wrong command line any more."""
    if isinstance(error, PipelineError):
        return ExitCode.FAILED if error.exit_code is ExitCode.USAGE else error.exit_code
    if isinstance(error, StoppedError):
        return ExitCode.STOPPED
    return ExitCode.INTERRUPTED if isinstance(error, KeyboardInterrupt) else ExitCode.FAILED


@contextmanager
def reporting(run: Run) -> Iterator[None]:
    """Have log and ``status.json`` tell of a signal that ends the run in the block, also where no runner can: between two."""
    try:
        yield
    except (StoppedError, KeyboardInterrupt) as error:
        if not run.ended:
            _tell(error, run)
        raise


def _tell(error: BaseException, run: Run) -> None:
    headline = f"between two runners: {error or type(error).__name__}"
    log_error(error, headline)
    before = read_status(run.directory)
    _also("status.json", lambda: _write_status(error, headline, run.directory, before))


def handle_failure(error: BaseException, runner: RunnerSession, resources: ExitStack, run: Run) -> None:
    """Say what failed, give ``abort`` its turn, and close the resources; an error on the way is logged beside the first."""
    run.ended = True
    with SHUTDOWN.defer(_later):
        _handle(error, runner, resources, run)


def _later() -> None:
    """Let a signal wait: the run is ending anyway, and nothing of that is left out."""


def _handle(error: BaseException, runner: RunnerSession, resources: ExitStack, run: Run) -> None:
    context, stage = runner.context, runner.context.stage
    runner.take_back()
    headline = describe(error, stage, runner)
    log_error(error, headline)
    # For whoever calls from Python; after the log, which has the headline as its first line.
    error.add_note(headline)
    context.enter("trainer")
    context["error"] = error
    if stage != "trainer":
        _also("on_stage_error", lambda: runner.hooks.on_stage_error(name=stage, context=context, error=error))
    if stage != "terminal" and not runner.over:
        _also("abort", lambda: _abort(runner, error))
    if not runner.over:
        _also("after_pipeline", lambda: runner.hooks.after_pipeline(context=context))
    _also("closing the resources", resources.close)
    # Storage that has refused what the error tells of refuses this as well, which is said once.
    level = "DEBUG" if isinstance(error, StorageError) else "ERROR"
    _also("context.json", lambda: run.keep_record(context), level)
    counters = dict.__getitem__(context, "train_state")
    _also("status.json", lambda: _write_status(error, headline, run.directory, counters), level)


def _write_status(error: BaseException, headline: str, directory: RunDirectory, counters: Mapping[str, int]) -> None:
    code = exit_code(error)
    states = {ExitCode.INTERRUPTED: "interrupted", ExitCode.STOPPED: "stopped"}
    directory.write_status(
        states.get(code, "failed"),
        exit_code=code,
        reason=headline,
        resumable=not isinstance(error, NoCheckpointError) and is_resumable(directory),
        train_state=counters,
        error=f"{type(error).__name__}: {error}",
    )


def describe(error: BaseException, stage: str, runner: RunnerSession) -> str:
    """The first line: which stage, which class, which line of the config, or which plugin."""
    name = f"runner '{runner.settings.name}'"
    plugin = culprit(runner.plugins, error)
    says_where = stage == "trainer" or str(error).startswith(runner.place(stage))
    if says_where and not plugin and isinstance(error, PipelineError):
        return f"{name}: {error}"
    where = [plugin] if plugin else []
    where += [runner.place(stage)] if stage != "trainer" else []
    place = ", in ".join(where) or "between two stages"
    if isinstance(error, KeyboardInterrupt):
        return f"{name}: interrupted in {place}"
    if isinstance(error, StoppedError):
        return f"{name}: {error}, in {place}"
    # Such as the sample for which a dataset raised it.
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    return f"{name}: {place} failed: {type(error).__name__}: {error}{notes}"


def log_error(error: BaseException, headline: str) -> None:
    """The headline; under it, for what user code raised, its own traceback without frames of ours before it."""
    shown = error.user_error if isinstance(error, ClassPathError) else error
    if shown is None or isinstance(shown, PipelineError | KeyboardInterrupt | StoppedError):
        logger.error(headline)
    else:
        whole = shown.__traceback__
        elsewhere = isinstance(shown.__cause__, WorkerTracebackError)
        trace = user_traceback(whole, only=elsewhere) or (None if elsewhere else whole)
        logger.opt(exception=shown.with_traceback(trace)).error(headline)
        shown.with_traceback(whole)


def _abort(runner: RunnerSession, error: BaseException) -> None:
    if hasattr(runner.classes["terminal"], "abort"):
        terminal: Any = runner.build("terminal")
        terminal.abort(runner.context, error)


def _also(what: str, act: Callable[[], object], level: str = "ERROR") -> None:
    try:
        act()
    except PipelineError as second:
        logger.log(level, f"{what} failed as well: {second}")
    except BaseException as second:  # the first error is the one that counts, also before a second Ctrl-C
        logger.opt(exception=second).error(f"{what} failed as well: {type(second).__name__}: {second}")
