"""The table of runs: what run directories say of themselves. It is read without torch, and nothing in them is run."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.checkpoint import storage
from pipeline.config.schema import ABOUT
from pipeline.errors import ConfigError
from pipeline.run.directory import DONE, STAMP, SWEEPS, has_ended, is_run_directory, parse_command

# Levels of folders in which runs are looked for.
_DEPTH = 3
# Bytes of a file, and so many of the end of a ``metrics.jsonl``.
_MOST, _TAIL = 2**20, 2**16
# Phase -> name -> number.
Numbers = dict[str, dict[str, Any]]


@dataclass
class RunRecord:
    """A run, as its directory describes it.

    Attributes:
        path: the run directory.
        when: ``20261123-050710``, in UTC; ``""`` where nothing says it.
        state: ``running``, ``done``, ``failed``, ``stopped`` or ``interrupted``, as in ``status.json``; ``killed`` where its
            process has ended without a word; ``unknown`` where nothing says it.
        steps: the iterations that were trained.
        best: with ``keep_best``, {metric, mode, value, iteration}, once the runner is done.
        reason: why it has ended so.
        overrides: those it was begun with, without the three that follow.
        label, tags, note: what is said about it.
        metrics: the newest numbers by name: ``valid_loss``; of several runners or phases ``runner.phase.valid_loss``.
        problems: what in the directory cannot be read.
    """

    path: Path
    when: str = ""
    state: str = "unknown"
    steps: int = 0
    best: dict[str, Any] | None = None
    reason: str = ""
    overrides: list[str] = field(default_factory=list)
    label: str | None = None
    tags: list[str] = field(default_factory=list)
    note: str | None = None
    metrics: dict[str, float | None] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def as_row(self) -> dict[str, Any]:
        """All of it by name, the metrics too: a row of a table, such as a DataFrame of pandas."""
        own = {name: value for name, value in vars(self).items() if name != "metrics"}
        return {**own, **self.metrics, **own}


def list_runs(folder: str | os.PathLike[str] = "runs") -> list[RunRecord]:
    """The runs in a folder, the newest first. What is damaged is in their ``problems``.

    Args:
        folder: an ``output_dir``, a folder in it, or a run directory.

    Raises:
        ConfigError: there is no such folder.
    """
    if not os.path.isdir(folder):
        raise ConfigError(f"{folder}: is no folder; name one with runs in it, or a run directory")
    records = [_Reader(path).record for path in _run_directories(Path(folder), _DEPTH)]
    return sorted(records, key=lambda record: (record.when, record.path.name), reverse=True)


def _run_directories(folder: Path, depth: int) -> Iterator[Path]:
    # That of a sweep has a stamp too, and a run directory for each trial.
    in_sweeps = SWEEPS in folder.absolute().parts[-2:]
    if is_run_directory(folder) or (STAMP.fullmatch(folder.name) and not in_sweeps):
        yield folder
    elif depth > 0 or in_sweeps:
        for child in _folders(folder):
            yield from _run_directories(child, depth - 1)


def _folders(folder: Path) -> list[Path]:
    """The folders in one; none where it cannot be listed, as that of somebody else."""
    with suppress(PermissionError):
        return sorted(child for child in folder.iterdir() if child.is_dir() and not child.is_symlink())
    return []


class _Reader:
    """Reads the files of a run directory, which may be damaged, or anything.

    Attributes:
        record: what they say.
    """

    def __init__(self, path: Path) -> None:
        self.record = RunRecord(path)
        command = self.read("command.txt", lambda file: parse_command(_text(file)), {})
        stamps = [Path(run_dir).name for run_dir in (command.get("run_dir", ""), path)]
        self.record.when = next((stamp[:15] for stamp in stamps if STAMP.fullmatch(stamp)), "")
        if not self.record.when:
            # A trial of a sweep has a number as its name.
            time = self.read("environment.json", lambda file: str(_mapping(file)["time"]), "")
            self.record.when = re.sub("[-:]", "", time)[:15].replace("T", "-")
        words = self.read("command.txt", lambda _: [*map(str, json.loads(command.get("overrides", "[]")))], [])
        self.record.overrides = [word for word in words if word.partition("=")[0] not in ABOUT]
        self.read("status.json", lambda file: self._take_status(_mapping(file)), None)
        if not os.path.lexists(path / "status.json"):
            self._take_status({"state": "running"})
        runners = [child.name for child in _folders(path) if not re.match(r"(workspace|ranks)$|before-", child.name)]
        for runner in runners:
            for phase, numbers in (by_phase := self._numbers(runner)).items():
                parts = [runner] * (len(runners) > 1) + [phase] * (len(by_phase) > 1)
                self.record.metrics |= {".".join([*parts, name]): value for name, value in numbers.items()}

    def read(self, name: str, parse: Callable[[Path], Any], default: Any) -> Any:
        """What a file says; the default where it is not there, or cannot be read."""
        try:
            return parse(self.record.path / name) if os.path.lexists(self.record.path / name) else default
        except Exception as error:  # what is there may be anything
            self.record.problems.append(f"{name} cannot be read ({error})")
            return default

    def _take_status(self, status: dict[str, Any]) -> None:
        record, state = self.record, str(status["state"])
        if state == "running":
            holder = self.read("lock", _text, "").strip()
            state = "running" if holder and not has_ended(holder) else "killed"
        record.state, record.reason = state, str(status.get("reason", ""))
        record.steps = int(status.get("iteration", 0))
        record.label, record.note = (status.get(name) and str(status[name]) for name in ("label", "note"))
        record.tags = [str(tag) for tag in status.get("tags") or ()]

    def _numbers(self, runner: str) -> Numbers:
        """The newest numbers of a runner."""
        is_done = os.path.lexists(self.record.path / runner / DONE)
        best, numbers = self.read(f"{runner}/results.json", _results, (None, {})) if is_done else (None, {})
        self.record.best = best or self.record.best
        if not numbers:
            steps, numbers = self.read(f"{runner}/metrics.jsonl", _newest_numbers, (0, {}))
            self.record.steps = max(self.record.steps, steps)
        return dict(numbers)


def _text(file: Path) -> str:
    return storage.read_small(file, _MOST).decode("utf-8", "replace")


def _mapping(file: Path) -> dict[str, Any]:
    return dict(json.loads(_text(file)))


def _results(file: Path) -> tuple[dict[str, Any], Numbers]:
    """The best, if there is one, and the numbers."""
    results = _mapping(file)
    return dict(results.get("best") or {}), {phase: dict(values) for phase, values in results["metrics"].items()}


def _newest_numbers(file: Path) -> tuple[int, Numbers]:
    """The newest iteration, and the newest numbers, by the names that ``results.json`` has."""
    with storage.open_regular(file) as lines:
        cut = lines.seek(0, os.SEEK_END) > _TAIL
        lines.seek(-_TAIL if cut else 0, os.SEEK_END if cut else os.SEEK_SET)
        # The first may be the end of one; the last is just being written, or empty.
        texts = (lines.read() or b"").split(b"\n")[int(cut) : -1]
    steps, numbers = 0, Numbers()
    for _, iteration, phase, named in map(parse_numbers, texts):
        numbers.setdefault(phase, {}).update(named)
        steps = iteration
    return steps, numbers


def parse_numbers(text: bytes) -> tuple[str, int, str, dict[str, Any]]:
    """A line of a ``metrics.jsonl``: event, iteration, phase, and the numbers, by the names that ``results.json`` has."""
    line = json.loads(text)
    event, _, steps, phase = (line.pop(name) for name in ("event", "epoch", "iteration", "phase"))
    # Of several datasets they are named after these.
    named = {f"valid_{name}" if event == "validate" and "/" not in name else name: line[name] for name in line}
    return str(event), int(steps), str(phase), named
