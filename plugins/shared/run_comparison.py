"""In what two runs differ: config, code and environment. It is read from their directories, and nothing in them is run."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pipeline.checkpoint import storage
from pipeline.config import yaml_tree
from pipeline.config.schema import ABOUT
from pipeline.config.yaml_tree import MAX_BYTES, Origin
from pipeline.errors import ConfigError, PipelineError

_T = TypeVar("_T")

# How many differences the sentence names.
_NAMED = 8


@dataclass
class Comparison:
    """In what a run differs from the first.

    Attributes:
        run: its directory.
        config, environment: ``runner.train_runner.epochs: 2 -> 3``.
        code: file -> the lines that differ.
        problems: what cannot be compared.
    """

    run: str
    config: list[str] = field(default_factory=list)
    code: dict[str, list[str]] = field(default_factory=dict)
    environment: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def sentence(self) -> str:
        """``the only differences are …``."""
        differences = [*self.config, *self.code, *self.environment]
        if self.problems:
            return f"what could be compared differs in: {'; '.join(differences[:_NAMED]) or 'nothing'}"
        if not differences:
            return "config, code and environment are equal"
        more = f"; and {len(differences) - _NAMED} more" if len(differences) > _NAMED else ""
        verb = "differences are" if len(differences) > 1 else "difference is"
        return f"the only {verb} {'; '.join(differences[:_NAMED])}{more}"


def compare_runs(first: Path, other: Path) -> Comparison:
    """In what a run differs from the first; what cannot be read is among its ``problems``."""
    comparison = Comparison(str(other))

    def attempt(act: Callable[[], _T], default: _T) -> _T:
        try:
            return act()
        except (PipelineError, OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
            comparison.problems.append(str(error))
            return default

    comparison.config = attempt(lambda: list(yaml_tree.differences(_config(first), _config(other))), [])
    comparison.environment = attempt(lambda: list(_environments(first, other)), [])
    comparison.code = attempt(lambda: dict(_code(_sources(first), _sources(other))), {})
    return comparison


def _read(path: Path) -> bytes:
    return storage.read_small(path, MAX_BYTES)


def _config(run_dir: Path) -> dict[str, Any]:
    """The config without what is about the run, and without the place of the workspace in its paths."""
    file = run_dir / "config.yaml"
    text = _read(file).decode("utf-8", "surrogateescape")
    config = yaml_tree.parse(text, Origin(str(file))).plain(expanded=False)
    own = {name: value for name, value in config.items() if name not in (*ABOUT, "workspace")}
    return {"workspace": config.get("workspace"), **_relative(own, f"{config.get('workspace')}/")}


def _relative(value: Any, workspace: str) -> Any:
    if isinstance(value, dict):
        return {_relative(name, workspace): _relative(child, workspace) for name, child in value.items()}
    if isinstance(value, list):
        return [_relative(child, workspace) for child in value]
    return value.replace(workspace, "{workspace}/") if isinstance(value, str) else value


def _environment(run_dir: Path) -> dict[str, Any]:
    file = run_dir / "environment.json"
    values = json.loads(_read(file))
    if not isinstance(values, dict) or not isinstance(values.get("packages"), dict):
        raise ConfigError(f"{file}: makes no sense; it cannot be compared")
    values.pop("time", None)
    # As the time, another in each start of several processes.
    for place in (values.get("variables"), *values.get("ranks", ())):
        for name in ("MASTER_PORT", "pid") if place else ():
            place.pop(name, None)
    return values


def _environments(first: Path, other: Path) -> Iterator[str]:
    before, now = _environment(first), _environment(other)
    # What one of them has not imported says nothing of its version.
    both = before["packages"].keys() & now["packages"].keys()
    for values in (before, now):
        values["packages"] = {name: version for name, version in values["packages"].items() if name in both}
    yield from yaml_tree.differences(before, now, "environment")


def _sources(run_dir: Path) -> dict[str, bytes]:
    """The copies of user code: name -> content."""
    files = (Path(folder, name) for folder, _, names in os.walk(run_dir / "workspace") for name in names)
    return {str(file.relative_to(run_dir)): _read(file) for file in sorted(files) if not file.name.startswith(".")}


def _code(first: dict[str, bytes], other: dict[str, bytes]) -> Iterator[tuple[str, list[str]]]:
    for name in sorted(first | other):
        if first.get(name) != other.get(name):
            old, new = (files.get(name, b"").decode("utf-8", "replace").splitlines() for files in (first, other))
            lines = (
                [f"is only in the {'first' if name in first else 'other'}"]
                if (name in first) != (name in other)
                else []
            )
            yield name, lines or list(difflib.unified_diff(old, new, "first", "other", lineterm="", n=1))
