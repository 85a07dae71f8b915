"""What is not as a run directory keeps it: config, plugins, code, versions. What is kept there is compared, never imported."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.checkpoint import regular
from pipeline.config import yaml_text
from pipeline.config.tree import Origin
from pipeline.config.yaml_text import MAX_BYTES, brief
from pipeline.errors import CheckpointError, ConfigError, StorageError
from pipeline.run_directory import RunDirectory
from pipeline.run_record import RunRecord, parsed_command

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


def changes(directory: RunDirectory, now: RunRecord) -> Changes:
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
        if yaml_text.one_line(before) != yaml_text.one_line(now):
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


def _compare_config(directory: RunDirectory, now: RunRecord, found: Changes) -> None:
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


def _compare_environment(directory: RunDirectory, now: RunRecord, found: Changes) -> None:
    file = Path("environment.json")
    try:
        before = json.loads(_read(directory.path / file))
        kept, present = ({name: each.get(name) for name in _COMPARED} for each in (before, _plain(now.environment)))
        found.add(file, "the environment is not as it was:", list(differences(kept, present)))
    except (*_UNREADABLE, AttributeError) as error:
        found.unreadable(file, error)


def _compare_sources(directory: RunDirectory, now: RunRecord, found: Changes) -> None:
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
        before, present = (regular.content_of(each, MAX_BYTES) for each in (directory.path / name, file.resolve()))
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
    return regular.content_of(path, MAX_BYTES).decode("utf-8", "surrogateescape")


def _parsed(text: str) -> Any:
    return yaml_text.parse(text, Origin("config.yaml", None)).plain(expanded=False)


def _plain(values: Mapping[str, Any]) -> Any:
    """As it comes back from JSON."""
    return json.loads(json.dumps(values, default=str))


def _printable(line: str) -> str:
    """A line that changes nothing on a terminal but by its text."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "?", line)
