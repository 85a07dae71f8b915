"""What happens when a stage fails: it is logged, the plugins and terminal's ``abort`` are called, everything is closed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from loguru import logger

from pipeline.data.fetch import WorkerTracebackError
from pipeline.distributed import world
from pipeline.distributed.world import Failure, PeerError
from pipeline.errors import ClassPathError, ExitCode, NoCheckpointError, PipelineError, StorageError
from pipeline.run.run_ending import log_ending
from pipeline.run.session import Run, RunnerSession
from pipeline.signals import SHUTDOWN, StoppedError
from pipeline.user_code.plugin_calls import failing_plugin
from pipeline.user_code.tracebacks import failing_method, user_traceback, with_traceback

# Those with which a run ends that was asked to; any other has failed.
_STATES = {ExitCode.INTERRUPTED: "interrupted", ExitCode.STOPPED: "stopped"}


def exit_code(error: BaseException, run: Run | None = None) -> ExitCode:
    """The exit code for an error, or for the first failure of a run.

    Once the run has started, no error counts as a wrong command line.
    """
    code = run.failure.exit_code if run and run.failure else world.exit_code(error)
    return ExitCode.FAILED if code is ExitCode.USAGE else code


@contextmanager
def reporting(run: Run) -> Iterator[None]:
    """Report a signal that ends the run in the block between two runners, where no runner can."""

    def end(failure: Failure) -> None:
        _write_status(PeerError(failure), str(failure), run, run.directory.read_status(), failure)

    run.world.call_if_stuck(end)
    try:
        yield
    except (StoppedError, KeyboardInterrupt) as error:
        if not run.failure:
            headline = f"between two runners: {error or type(error).__name__}"
            log_error(error, headline)
            best_effort("status.json", _write_status, error, headline, run, run.directory.read_status())
            best_effort("the last lines", _log_ending, error, run)
            run.call_after_run()
        raise


def handle_failure(
    error: BaseException, runner: RunnerSession, describe_batch: Callable[[Exception, RunnerSession], list[str]]
) -> None:
    """Report the error, call ``abort``, and close the resources. An error in doing so is logged in addition to the first.

    Args:
        error: the error.
        runner: the one that has failed.
        describe_batch: returns lines about the batch in which it has failed. Without a batch, it returns no lines.
    """
    run = runner.run
    # A signal has to wait: the run is ending anyway, and nothing of that is left out.
    with SHUTDOWN.defer(lambda: None):
        context, stage, hooks = runner.context, runner.context.stage, runner.hooks
        runner.restore_protected()
        best_effort("the description of the batch", _add_batch, error, runner, describe_batch)
        headline = describe(error, stage, runner)
        # First of all: the others are waiting for this process.
        failure = run.report_failure(error, exit_code(error), headline)
        is_first = failure.rank == run.world.rank
        is_asked = failure.exit_code in _STATES
        log_error(error, headline, "ERROR" if run.world.is_main or (is_first and not is_asked) else "INFO")
        # For whoever calls from Python; after the log, which has the headline as its first line.
        error.add_note(headline)
        context.enter("trainer")
        context["error"] = error
        if isinstance(error, StoppedError | KeyboardInterrupt) and (number := SHUTDOWN.requested):
            best_effort("on_signal", lambda: hooks.on_signal(context=context, signal=number))
        if stage != "trainer":
            best_effort("on_stage_error", lambda: hooks.on_stage_error(name=stage, context=context, error=error))
        if stage != "terminal" and not runner.completed and hasattr(runner.classes["terminal"], "abort"):
            best_effort("abort", lambda: runner.build("terminal").abort(context, error))
        if not runner.completed:
            best_effort("after_pipeline", lambda: hooks.after_pipeline(context=context))
        best_effort("closing the resources", runner.resources.close)
        # Storage that has refused before refuses this as well, which is said once.
        level = "DEBUG" if isinstance(error, StorageError) else "ERROR"
        best_effort("context.json", run.write_accesses, level=level)
        reason = headline if is_first else str(failure)
        best_effort("status.json", _write_status, error, reason, run, runner.counters, level=level)
        best_effort("the last lines", _log_ending, error, run, runner)
        run.call_after_run()


def _log_ending(error: BaseException, run: Run, runner: RunnerSession | None = None) -> None:
    log_ending(run, runner, error, has_failed=exit_code(error, run) not in _STATES)


def _write_status(
    error: BaseException, reason: str, run: Run, counters: Mapping[str, int], failure: Failure | None = None
) -> None:
    """Write how the run has ended; ``failure``: the first one, if the run does not know it."""
    code, directory = exit_code(error, run), run.directory
    failure = failure or run.failure
    if failure and run.world.size > 1 and code not in _STATES:
        directory.about["failed_rank"] = failure.rank
    state, resumable = _STATES.get(code, "failed"), not isinstance(error, NoCheckpointError)
    what = f"{type(error).__name__}: {error}"
    directory.write_status(state, exit_code=code, reason=reason, resumable=resumable, train_state=counters, error=what)


# What a recipe for SpeechBrain calls of its ``self.checkpointer``.
CHECKPOINTER_CALLS = {
    "add_recoverable",
    "add_recoverables",
    "delete_checkpoints",
    "find_checkpoint",
    "find_checkpoints",
    "list_checkpoints",
    "load_checkpoint",
    "recover_if_possible",
    "save_and_keep_only",
    "save_checkpoint",
}


def describe(error: BaseException, stage: str, runner: RunnerSession) -> str:
    """The headline: which stage, class and line of the config, and which of its methods; or which plugin."""
    name = f"runner '{runner.settings.name}'"
    plugin = failing_plugin(runner.manager, error)
    says_where = stage == "trainer" or str(error).startswith(runner.describe(stage))
    if isinstance(error, PeerError):
        return str(error)
    if says_where and not plugin and isinstance(error, PipelineError):
        return f"{name}: {error}"
    where = [plugin] if plugin else []
    where += [runner.describe(stage)] if stage != "trainer" else []
    place = ", in ".join(where) or "between two stages"
    if isinstance(error, KeyboardInterrupt):
        return f"{name}: interrupted in {place}"
    if isinstance(error, StoppedError):
        return f"{name}: {error}, in {place}"
    method = "" if plugin or stage not in runner.classes else failing_method(runner.classes[stage], error)
    failed = f"{place} failed in {method}" if method else f"{place} failed"
    # Such as the sample for which a dataset raised it.
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()) if "\n" not in note)
    if isinstance(error, AttributeError) and error.obj is None and error.name in CHECKPOINTER_CALLS:
        notes += " (if this is self.checkpointer: a Brain in a config has none, since the run saves; set save_interval and keep_best)"
    return f"{name}: {failed}: {type(error).__name__}: {error}{notes}"


def _add_batch(
    error: BaseException, runner: RunnerSession, describe_batch: Callable[[Exception, RunnerSession], list[str]]
) -> None:
    """Add to an error of a batch what the batch was, and where the config names what has met it."""
    if isinstance(error, Exception) and (lines := describe_batch(error, runner)):
        # Of several lines, so that the headline leaves it out.
        error.add_note("\n".join(lines))


def _batch_notes(error: BaseException) -> list[str]:
    return [note for note in getattr(error, "__notes__", ()) if "\n" in note]


def log_error(error: BaseException, headline: str, level: str = "ERROR") -> None:
    """Log the headline, and for an error of user code its traceback without frames of ours."""
    user_error = error.user_error if isinstance(error, ClassPathError) else error
    if user_error is None or isinstance(user_error, PipelineError | KeyboardInterrupt | StoppedError):
        # What the user or the system has asked for is no error.
        level = "WARNING" if level == "ERROR" and exit_code(error) in _STATES else level
        logger.log(level, "\n".join([headline, *_batch_notes(error)]))
        return
    whole = user_error.__traceback__
    in_worker = isinstance(user_error.__cause__, WorkerTracebackError)
    trace = user_traceback(whole, only=in_worker) or (None if in_worker else whole)
    logger.log(level, with_traceback(headline, user_error.with_traceback(trace)))
    user_error.with_traceback(whole)


def best_effort(what: str, act: Callable[..., object], *arguments: Any, level: str = "ERROR") -> None:
    """Do something after a failure. If that fails too, log it, since the first error is the one that counts.

    Args:
        what: what messages call it.
        act: does it.
        arguments: its arguments.
        level: of the log line of an error that is expected.
    """
    try:
        act(*arguments)
    except PipelineError as second:
        # What another process has come to is told as the first error.
        level = "INFO" if isinstance(second, PeerError) else level
        logger.log(level, f"{what} failed as well: {second}")
    except BaseException as second:  # the first error is the one that counts, also before a second Ctrl-C
        logger.error(with_traceback(f"{what} failed as well: {type(second).__name__}: {second}", second))
