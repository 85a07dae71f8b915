"""What a runner has saved, for the log at its end; and of a run, how to go on with it or look at it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from loguru import logger

from pipeline.checkpoint import layout, store
from pipeline.checkpoint.storage import short
from pipeline.config.schema import RunnerSchema
from pipeline.errors import NoCheckpointError, StorageError
from pipeline.run.directory import RunDirectory
from pipeline.run.session import Run, RunnerSession
from pipeline.user_code.imports import DISTRIBUTION, REPORT_NEEDS, extra_of

# So many files are named.
_MOST = 3


def log_ending(
    run: Run,
    runner: RunnerSession | None = None,
    error: BaseException | None = None,
    *,
    has_failed: bool = False,
) -> None:
    """Log it, on rank 0: at the end of a runner, and of a run.

    Args:
        run: the run; its checkpoints are on disk.
        runner: the one that is at its end; None: the run is, after or between its runners.
        error: what has ended it; None: it is done, or ``is_exit`` has ended it.
        has_failed: whether the error is a failure, and not a signal.
    """
    if not run.world.is_main:
        return
    if runner and not error:
        how = "stopped" if runner.exited else "done"
        items = ", ".join(_saved(runner.settings, run.directory.path)) if run.resume_command else ""
        folder = run.directory.path / runner.settings.name
        logger.info(
            f"{runner.settings.name} {how}; {f'saved in {short(folder)}: {items}' if items else 'nothing is kept'}"
        )
    elif run.resume_command and not error and not run.unfinished():
        logger.info(f"to look at the run: {_how_to_look(run.directory.path)}")
    elif run.resume_command:
        if not isinstance(error, NoCheckpointError) and _is_resumable(run.directory):
            logger.log("WARNING" if error else "INFO", _how_to_go_on(run, runner, has_failed))
        elif not has_failed:
            logger.warning("nothing was saved yet with which the run could go on; begin it again")


def _how_to_look(run_dir: Path) -> str:
    """Return the command that shows a run: the page, if what draws it is installed, else a table."""
    path = shlex.quote(short(run_dir))
    missing = next((name for name in REPORT_NEEDS if find_spec(name) is None), None)
    if missing is None:
        return f"pipeline report {path}"
    extra = extra_of(missing)
    return f"pipeline runs {path} (a page with its curves needs pip install '{DISTRIBUTION}[{extra}]')"


def _is_resumable(directory: RunDirectory) -> bool:
    # In the place of one that was removed there may be another.
    with suppress(StorageError):
        return directory.may_write() and directory.is_resumable()
    return False


def _how_to_go_on(run: Run, runner: RunnerSession | None, failed: bool) -> str:
    """What the run has saved, and the command that goes on with it, on a line of its own."""
    path = run.directory.path
    names = [name for name in run.trainers if (path / name).is_dir()]
    items = [f"{name}/{item}" for name in names for item in _saved(run.config.runner(name), path)]
    lost = _iterations_since_saved(runner) if runner and runner.settings.kind == "train" else 0
    again = f"; the {lost} iterations after it come again" if lost > 1 else "; the last iteration comes again" * lost
    how = "once that is mended, this goes on" if failed else "to go on"
    return f"saved in {short(path)}: {', '.join(items)}{again}; {how}:\n  {run.resume_command}"


def _iterations_since_saved(runner: RunnerSession) -> int:
    checkpoints = layout.committed_checkpoints(runner.store.folder)
    newest = layout.step_of(checkpoints[-1]) if checkpoints else 0
    return max(0, runner.counters["iteration"] - (newest or 0))


def _saved(settings: RunnerSchema, run_dir: Path) -> Iterator[str]:
    """What a runner has left in its folder, and its predictions."""
    folder = run_dir / settings.name
    yield from _newest(layout.committed_checkpoints(folder / "checkpoints"), folder)
    weights = store.own_folder(settings.save_inference_path, run_dir, settings) or folder / "inference"
    yield from _newest(sorted(weights.glob("*.safetensors")), folder)
    if (folder / "results.json").is_file():
        yield "results.json"
    if settings.predictions:
        own = Path(settings.predictions.path or folder / f"*_predictions.{settings.predictions.format}")
        # Those of each of several checkpoints are in a folder of its own.
        files = [
            *sorted(own.parent.glob(own.name)),
            *sorted(own.parent.glob(f"{layout.checkpoint_name(0)[:5]}*/{own.name}")),
        ]
        yield from (_relative(file, folder) for file in files[:_MOST])
        if len(files) > _MOST:
            yield f"{len(files) - _MOST} more files of predictions"


def _newest(paths: Sequence[Path], folder: Path) -> Iterator[str]:
    """The newest, and how many there are beside it."""
    if paths:
        yield f"{_relative(paths[-1], folder)}{f' and {len(paths) - 1} older' if len(paths) > 1 else ''}"


def _relative(path: Path, folder: Path) -> str:
    return str(path.relative_to(folder)) if path.is_relative_to(folder) else short(path)
