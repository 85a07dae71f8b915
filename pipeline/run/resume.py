"""A run that goes on: which it is, from which checkpoint, and what has changed since."""

from __future__ import annotations

import difflib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from loguru import logger

from pipeline.checkpoint import layout, storage, store
from pipeline.checkpoint.storage import storing
from pipeline.checkpoint.store import after, set_aside, verify
from pipeline.config import yaml_tree
from pipeline.config.load import Config
from pipeline.config.yaml_tree import MAX_BYTES, Origin, brief
from pipeline.errors import CheckpointError, ConfigError, StorageError, one_of
from pipeline.run.directory import DONE, MADE_BY, RunDirectory, is_done, new_folder
from pipeline.run.provenance import Provenance, parsed_command


class Backup:
    """The folder for what one resumption replaces; it is made with the first thing that goes there.

    Args:
        directory: the run directory, which is locked.
    """

    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory
        self.folder: Path | None = None

    def copy(self, name: Path) -> None:
        """Keep a copy of a file that is about to be replaced; one that is not there is none.

        Raises:
            StorageError: the storage refuses.
        """
        source = self.directory.path / name
        if source.is_file() and not source.is_symlink():
            with storing(source):
                shutil.copyfile(source, self._place(name))

    def move(self, name: Path) -> None:
        """Take a file or folder away, whatever it is, if it is there; the disk has it when this returns.

        Raises:
            StorageError: the storage refuses.
        """
        source = self.directory.path / name
        if not os.path.lexists(source):
            return
        with storing(source):
            target = self._place(name)
            storage.DISK.rename(source, target)
            # First where it went: between the two it may be in both places, but never in none.
            storage.DISK.fsync_folder(target.parent)
            storage.DISK.fsync_folder(source.parent)

    def _place(self, name: Path) -> Path:
        if self.folder is None:
            self.folder = new_folder(self.directory.path, "before-")
        target = self.folder / name
        storage.make_folder(target.parent)
        return target


MOST_LINES = 20

"""So many lines are told of a file, or of the config."""

_COMPARED = ("host", "platform", "python", "packages", "hardware", "git")

_UNREADABLE = (CheckpointError, StorageError, ConfigError, ValueError, RecursionError)


@dataclass
class Changes:
    """What has changed.

    Attributes:
        told: a message each, of several lines.
        files: those of the run directory that are not right any more, relative to it; some may not be there.
    """

    told: list[str] = field(default_factory=list)
    files: set[Path] = field(default_factory=set)

    def add(self, file: Path, what: str, lines: list[str]) -> None:
        """Tell of lines that differ, if any do."""
        if lines:
            more = [f"… and {len(lines) - MOST_LINES} more lines"] if len(lines) > MOST_LINES else []
            self.told.append("\n  ".join([what, *map(_printable, lines[:MOST_LINES]), *more]))
            self.files.add(file)

    def unreadable(self, file: Path, error: Exception) -> None:
        """Tell that a file cannot be compared."""
        self.told.append(_printable(f"{file} of the run directory cannot be compared: {error}"))
        self.files.add(file)


def changes(directory: RunDirectory, now: Provenance) -> Changes:
    """Compare what a run directory keeps with what would be kept now."""
    found = Changes()
    _compare_config(directory, now, found)
    _compare_environment(directory, now, found)
    _compare_sources(directory, now, found)
    # Told already, or of no weight: the command line itself may be another each time.
    if {**command(directory.path), "command": ""} != {**now.command, "command": ""}:
        found.files.add(Path("command.txt"))
    if _text(directory.path / "swaps.txt") != now.swaps:
        found.files.add(Path("swaps.txt"))
    return found


def differences(before: Any, now: Any, address: str = "") -> Iterator[str]:
    """``runner.t.epochs: 2 -> 3`` for each value that differs; items of lists with names count by their names."""
    before, now = _by_name(before), _by_name(now)
    if not (isinstance(before, dict) and isinstance(now, dict)):
        if yaml_tree.one_line(before) != yaml_tree.one_line(now):
            yield f"{address}: {brief(before)} -> {brief(now)}"
        return
    for key in [*before, *(key for key in now if key not in before)]:
        below = f"{address}.{key}" if address else str(key)
        if key not in now:
            yield f"{below}: gone, it was {brief(before[key])}"
        elif key not in before:
            yield f"{below}: new, {brief(now[key])}"
        else:
            yield from differences(before[key], now[key], below)
    orders = [[key for key in one if key in other] for one, other in ((before, now), (now, before))]
    if address in {"runner", "phase", "plugins"} and orders[0] != orders[1]:
        yield f"{address}: the order was {', '.join(map(str, orders[0]))} -> {', '.join(map(str, orders[1]))}"


def _by_name(value: Any) -> Any:
    """A list of items with names as a mapping; anything else as it is."""
    if isinstance(value, list) and value and all(isinstance(item, dict) and "name" in item for item in value):
        return {str(item["name"]): item for item in value}
    return value


def _by_plugin(config: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A config without its plugins, and these: what names each -> its arguments."""
    if not isinstance(config, dict):
        raise ConfigError("is no mapping")
    plugins: dict[str, Any] = {}
    for item in config.get("plugins") or []:
        plugins |= item if isinstance(item, dict) else {str(item): {}}
    return {key: value for key, value in config.items() if key != "plugins"}, plugins


def _compare_config(directory: RunDirectory, now: Provenance, found: Changes) -> None:
    file = Path("config.yaml")
    try:
        before, plugins = _by_plugin(_parsed(_read(directory.path / file)))
    except _UNREADABLE as error:
        found.unreadable(file, error)
        return
    config, plugins_now = _by_plugin(_parsed(now.config))
    # Which code runs comes first, so that it is never left out.
    lines = sorted(differences(before, config), key=lambda line: not re.match(r"runner\.[^.:]+\.\w+_class", line))
    found.add(file, "the config is not as it was:", lines)
    found.add(
        file, "the plugins are not as they were:", list(differences({"plugins": plugins}, {"plugins": plugins_now}))
    )


def _compare_environment(directory: RunDirectory, now: Provenance, found: Changes) -> None:
    file = Path("environment.json")
    try:
        before = json.loads(_read(directory.path / file))
        kept, present = ({name: each.get(name) for name in _COMPARED} for each in (before, _plain(now.environment)))
        found.add(file, "the environment is not as it was:", list(differences(kept, present)))
    except (*_UNREADABLE, AttributeError) as error:
        found.unreadable(file, error)


def _compare_sources(directory: RunDirectory, now: Provenance, found: Changes) -> None:
    kept = _kept_sources(directory)
    for name in sorted(kept | now.sources.keys()):
        if name not in now.sources:
            found.add(name, f"{name}: is no part of the run any more", [f"it was {directory.path / name}"])
        elif name not in kept:
            found.add(name, f"{name}: is new", [f"it is {now.sources[name]}"])
        else:
            _compare_source(directory, name, now.sources[name], found)


def _compare_source(directory: RunDirectory, name: Path, file: Path, found: Changes) -> None:
    try:
        before, present = (storage.content_of(each, MAX_BYTES) for each in (directory.path / name, file.resolve()))
    except _UNREADABLE as error:
        found.unreadable(name, error)
        return
    if before != present:
        # Decoded for the eye alone; where it shows no difference, that is in what is no text.
        was, is_now = (each.decode("utf-8", "replace").splitlines() for each in (before, present))
        lines = list(difflib.unified_diff(was, is_now, "as it was", "as it is", lineterm="", n=1))
        found.add(name, f"{name}: is not as it was:", lines or [f"{len(before)} bytes -> {len(present)} bytes"])


def _kept_sources(directory: RunDirectory) -> set[Path]:
    found = (directory.path / "workspace").rglob("*")
    # A copy that was being made when the process ended is none.
    kept = [path for path in found if not (path.name.startswith(".") and path.name.endswith(".tmp"))]
    return {path.relative_to(directory.path) for path in kept if path.is_symlink() or not path.is_dir()}


def command(run_dir: Path) -> dict[str, str]:
    """What a run directory's ``command.txt`` says; nothing where it cannot be read."""
    return parsed_command(_text(run_dir / "command.txt"))


def _text(path: Path) -> str:
    try:
        return _read(path)
    except _UNREADABLE:
        return ""


def _read(path: Path) -> str:
    """A small file of a run directory: no link is followed, and no pipe waited for."""
    return storage.content_of(path, MAX_BYTES).decode("utf-8", "surrogateescape")


def _parsed(text: str) -> Any:
    return yaml_tree.parse(text, Origin("config.yaml", None)).plain(expanded=False)


def _plain(values: Mapping[str, Any]) -> Any:
    """As it comes back from JSON."""
    return json.loads(json.dumps(values, default=str))


def _printable(line: str) -> str:
    """A line that changes nothing on a terminal but by its text."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "?", line)


_NUMBERS = ("metrics.jsonl", "timing.jsonl")


def rewind(directory: RunDirectory, checkpoint: Path, runners: Sequence[str], before: Backup) -> None:
    """Make a checkpoint the newest of the run, as if the run had been interrupted there.

    The runners after that of the checkpoint begin again. If the process ends on the way, what is left is the run as it
    was interrupted at a later moment.

    Args:
        directory: the run directory, which is locked.
        checkpoint: ``<run directory>/<runner>/checkpoints/step-…``.
        runners: those of the run, in order.
        before: takes what came after it, but for checkpoints, which may be on another disk.

    Raises:
        ConfigError: the run has no such runner.
        NoCheckpointError: the checkpoint is damaged; nothing has changed.
        StorageError: the storage refuses.
    """
    runner = checkpoint.parent.parent.name
    if runner not in runners:
        raise ConfigError(f"{checkpoint}: the run has no runner '{runner}'{one_of(runner, runners)}")
    verify(checkpoint)
    # From the end on: what is left at any moment goes together.
    for later in reversed(runners[runners.index(runner) + 1 :]):
        _begin_again(directory, later, before)
    newer = after(checkpoint)
    if newer or (directory.path / runner / DONE).exists():
        for name in _NUMBERS:
            before.copy(Path(runner, name))
    for name in (DONE, "results.json"):
        before.move(Path(runner, name))
    _set_aside(newer)
    if before.folder:
        logger.warning(f"going back to {checkpoint}: numbers and results of what came after it are in {before.folder}")


def _begin_again(directory: RunDirectory, runner: str, before: Backup) -> None:
    """Take away what a runner has made: first that it is done, so that it is never left out without it."""
    folder = directory.path / runner
    with storing(folder):
        made = [each for each in folder.iterdir() if each.name != "checkpoints"] if folder.is_dir() else []
    for each in sorted(made, key=lambda path: path.name != DONE):
        before.move(each.relative_to(directory.path))
    _set_aside(layout.committed_checkpoints(folder / "checkpoints"))


def _set_aside(checkpoints: Sequence[Path]) -> None:
    """The newest first, so that those that are left have no gap."""
    for path in reversed(checkpoints):
        logger.warning(f"{path}: comes after what the run goes on from; it is now {set_aside(path).name}")


NEVER, AUTO = "never", "auto"


class PreviousRun(NamedTuple):
    """A run that is to go on.

    Attributes:
        directory: its directory.
        checkpoint: the one to go on from; None: the newest that is valid.
    """

    directory: RunDirectory
    checkpoint: Path | None = None


def find_previous(output_dir: Path, config: Config, resume: str | Path) -> PreviousRun | None:
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
            there = ", ".join(path.name for path in layout.committed_checkpoints(checkpoint.parent)) or "none"
            raise ConfigError(f"{checkpoint}: there is no such checkpoint; there are: {there}")
        return PreviousRun(directory, checkpoint)
    newest = RunDirectory.newest(output_dir, config.name, lambda run_dir: _is_run_of(config, run_dir))
    if newest is None:
        _tell_why_none(output_dir, config)
    return PreviousRun(newest) if newest else None


def as_begun(config: Config, earlier: PreviousRun) -> Config:
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
    if layout.step_of(path) is None or path.suffix == layout.NEW or path.parent.name != "checkpoints":
        return path, None
    # What the run directory is called may be a link, and so may the folder of its checkpoints; that leads elsewhere.
    run_dir = path.parents[2].resolve()
    return run_dir, run_dir.joinpath(*path.parts[-3:])


def _refuse_copy(earlier: PreviousRun, runners: Sequence[str]) -> None:
    """See that the run would not write among the checkpoints of another one, of whose directory this is a copy.

    Raises:
        StorageError: it would.
    """
    path = earlier.directory.path
    original = Path(command(path).get("run_dir", path))
    for runner in runners:
        if earlier.checkpoint or not is_done(earlier.directory, runner):
            store.refuse_copy(path, original, runner)


def reconcile(earlier: PreviousRun, record: Provenance, runners: Sequence[str]) -> None:
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
    before = Backup(directory)
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
