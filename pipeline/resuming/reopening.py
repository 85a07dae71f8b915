"""Which run goes on, from where, and what has changed since."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from loguru import logger

from pipeline.checkpoint import location, names
from pipeline.config.load import Config
from pipeline.errors import ConfigError
from pipeline.resuming.before import Before
from pipeline.resuming.changes import changes, command
from pipeline.resuming.rewinding import rewind
from pipeline.resuming.standing import is_done
from pipeline.run_directory import MADE_BY, RunDirectory
from pipeline.run_record import RunRecord

NEVER, AUTO = "never", "auto"


class Earlier(NamedTuple):
    """A run that is to go on.

    Attributes:
        directory: its directory.
        checkpoint: the one to go on from; None: the newest that is valid.
    """

    directory: RunDirectory
    checkpoint: Path | None = None


def reopened(output_dir: Path, config: Config, resume: str | Path) -> Earlier | None:
    """The run that is to go on; None for a new one.

    Args:
        output_dir: where run directories are.
        config: what is to be run.
        resume: ``never``, ``auto``, the path of a run directory, or of a checkpoint in one.

    Raises:
        ConfigError: the path is that of neither.
    """
    if resume == NEVER:
        return None
    if resume != AUTO:
        run_dir, checkpoint = parts(Path(resume))
        directory = RunDirectory.at(run_dir)
        if checkpoint and not checkpoint.is_dir():
            there = ", ".join(path.name for path in names.committed(checkpoint.parent)) or "none"
            raise ConfigError(f"{checkpoint}: there is no such checkpoint; there are: {there}")
        return Earlier(directory, checkpoint)
    newest = RunDirectory.newest(output_dir, config.name, lambda run_dir: _is_run_of(config, run_dir))
    if newest is None:
        _tell_why_none(output_dir, config)
    return Earlier(newest) if newest else None


def as_begun(config: Config, earlier: Earlier) -> Config:
    """The config, its links leading where they led when the run was begun; the log says which lead elsewhere now."""
    try:
        before = json.loads(command(earlier.directory.path).get("links", "{}"))
    except (ValueError, RecursionError):
        before = {}
    known = {path: led for path, led in before.items() if isinstance(led, str)} if isinstance(before, dict) else {}
    for path, leads in config.followed().items():
        if leads != known.get(path, leads):
            logger.info(f"{path} leads to {leads} now; the run goes on with {known[path]}, to which it led")
    return config.leading(known)


def _is_run_of(config: Config, run_dir: Path) -> bool:
    """Whether a user has made a run with this very config file, or with a config of the same ``name``."""
    said, name = command(run_dir), config.settings.name
    of_file = config.path is not None and said.get("config") == str(config.path.resolve())
    return (of_file or (name is not None and said.get("name") == name)) and not (run_dir / MADE_BY).exists()


def _tell_why_none(output_dir: Path, config: Config) -> None:
    """Say why a new run is begun: there is none of this config, or its file was elsewhere then."""
    if config.path is None and config.settings.name is None:
        logger.warning("a config from Python is known by its `name:` alone, and this one has none; beginning a new run")
        return
    other = RunDirectory.newest(output_dir, config.name, _has_lost_its_config)
    other = other or RunDirectory.newest(output_dir, config.name)
    if other is None:
        logger.info(f"{output_dir / config.name}: there is no run to go on with; beginning one")
        return
    remedy = f"to go on with it, name it in the place of {AUTO}: {other.path}"
    logger.warning(f"{other.path}: {_whose(other.path)}, so it is none of this config; beginning a new run; {remedy}")


def _has_lost_its_config(run_dir: Path) -> bool:
    """Whether the config file of a run is not where it was: its folder may have been moved."""
    path = command(run_dir).get("config", "None")
    return path != "None" and not os.path.exists(path)


def _whose(run_dir: Path) -> str:
    """What a run is one of, in words."""
    if (run_dir / MADE_BY).exists():
        return f"was made by {(run_dir / MADE_BY).read_text(encoding='utf-8').strip()}"
    path = command(run_dir).get("config", "a config that its command.txt does not name")
    lost = ", which is not there any more" if _has_lost_its_config(run_dir) else ""
    return f"is a run of {'a config from Python' if path == 'None' else path}{lost}"


def parts(path: Path) -> tuple[Path, Path | None]:
    """What ``--resume`` names: a run directory, or the one that a checkpoint is in, and the checkpoint."""
    path = Path(os.path.abspath(path))
    if names.step_of(path) is None or path.suffix == names.NEW or path.parent.name != "checkpoints":
        return path, None
    # What the run directory is called may be a link, and so may the folder of its checkpoints; that leads elsewhere.
    run_dir = path.parents[2].resolve()
    return run_dir, run_dir.joinpath(*path.parts[-3:])


def _refuse_copy(earlier: Earlier, runners: Sequence[str]) -> None:
    """See that the run would not write among the checkpoints of another one, of whose directory this is a copy.

    Raises:
        StorageError: it would.
    """
    path = earlier.directory.path
    original = Path(command(path).get("run_dir", path))
    for runner in runners:
        if earlier.checkpoint or not is_done(earlier.directory, runner):
            location.refuse_copy(path, original, runner)


def bring_up_to_date(earlier: Earlier, record: RunRecord, runners: Sequence[str]) -> None:
    """Say what has changed, keep what is replaced by it, and go back to the checkpoint that was chosen.

    Args:
        earlier: the run, whose directory is locked.
        record: what the directory is to keep from now on.
        runners: those of the run, in order.

    Raises:
        ConfigError, NoCheckpointError: the checkpoint cannot be gone on from; nothing has changed.
        StorageError: the storage refuses, or the directory is the copy of one whose checkpoints it would write among.
    """
    directory, checkpoint = earlier
    _refuse_copy(earlier, runners)
    logger.info(f"going on in {directory.path}")
    before = Before(directory)
    if checkpoint:
        rewind(directory, checkpoint, runners, before)
    found = changes(directory, record)
    for message in found.told:
        logger.warning(message)
    if not found.told:
        logger.info("config, plugins, code and versions are as they were")
    if all(is_done(directory, runner) for runner in runners):
        # It stays as it was run.
        return
    for name in sorted(found.files):
        before.move(name) if name in record.sources or name.parts[0] == "workspace" else before.copy(name)
    if found.told and before.folder:
        logger.info(f"what is replaced is kept in {before.folder}")
    record.keep(directory, found.files)
