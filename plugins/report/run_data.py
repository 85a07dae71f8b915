"""What a run directory says, as data for a page. Nothing in it is imported or run, and what is damaged is told of."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard, TypeVar

from pydantic import BaseModel

from pipeline.checkpoint import storage
from pipeline.checkpoint.layout import FOLDER
from pipeline.config import yaml_tree
from pipeline.config.keys import fields
from pipeline.config.schema import SECTIONS, ConfigSchema
from pipeline.config.yaml_tree import MAX_BYTES, Origin
from pipeline.context import STAGES
from pipeline.errors import PipelineError
from pipeline.run.directory import parse_command
from pipeline.run.runs import RunRecord

from ..shared.checkpoint_listing import Checkpoint, list_checkpoints

_T = TypeVar("_T")
Mapping = dict[str, Any]

# Bytes of a line of JSON; what is longer is none of ours.
_LONGEST = 2**20
# Bytes of a file that is read at once.
_MOST = 2**24

# What the numbers of an event of ``metrics.jsonl`` are called.
TRAINING, EPOCH, VALIDATION, EVALUATION = "training", "mean of the epoch", "validation", "evaluation"
_EVENTS = {"train": TRAINING, "epoch": EPOCH, "validate": VALIDATION, "evaluate": EVALUATION}
_ABOUT = ("event", "epoch", "iteration", "phase")
# Those of which each optimizer has one, as ``learning_rate.generator``.
OF_OPTIMIZERS = ("learning_rate", "gradient_norm")
# A larger number is no iteration, and JavaScript has none that is exact.
_MOST_ITERATIONS = 2**53
# The parts of a step that the plugin ``report`` measures.
PARTS = ("data", "forward", "backward", "update", "hooks", "other")
_DEFAULT_STAGES = "pipeline.stages."


@dataclass
class Curve:
    """Numbers of one name over the iterations.

    Attributes:
        phase, metric: in whose chart it is.
        name: what it is called there: ``validation``.
        x, y: iterations, and the numbers; None for one that is not finite.
    """

    phase: str
    metric: str
    name: str
    x: list[int] = field(default_factory=list)
    y: list[float | None] = field(default_factory=list)


@dataclass
class Stage:
    """One of the five stages of a runner.

    Attributes:
        class_path: its class; ``""`` where nothing says it.
        custom: whether that is not the default one.
        seconds: how long it took, in each part of a run that was resumed; empty where nothing says it.
        memory, gpu_memory: the most bytes that the process had used when it ended.
        completed: whether it has come to its end, as far as is known.
        gives: the context keys that it has written and a later stage has read.
    """

    name: str
    class_path: str = ""
    custom: bool = False
    seconds: list[float] = field(default_factory=list)
    memory: int | None = None
    gpu_memory: int | None = None
    completed: bool = True
    gives: list[str] = field(default_factory=list)


@dataclass
class Runner:
    """What a runner has left.

    Attributes:
        curves: the numbers of ``metrics.jsonl``.
        speed: those of ``timing.jsonl``, by iteration.
        steps: the measured steps: part -> milliseconds.
        gaps: how many numbers are not finite.
    """

    name: str
    curves: list[Curve] = field(default_factory=list)
    speed: list[Curve] = field(default_factory=list)
    steps: list[Curve] = field(default_factory=list)
    stages: list[Stage] = field(default_factory=list)
    checkpoints: list[Checkpoint] = field(default_factory=list)
    gaps: int = 0


class Setting(NamedTuple):
    """A key of the config: its value, and whether that is another than the default."""

    key: str
    value: str
    differs: bool


@dataclass
class RunData:
    """A run, as its page shows it.

    Attributes:
        record: what ``pipeline runs`` says of it.
        status: the rest of ``status.json``.
        runners: in the order of the config.
        config: group, such as ``runner.train_runner`` -> its keys.
        command, environment: how it was made; name -> value.
        packages: distribution -> version.
        problems: what cannot be read.
    """

    record: RunRecord
    status: dict[str, Any] = field(default_factory=dict)
    runners: list[Runner] = field(default_factory=list)
    config: dict[str, list[Setting]] = field(default_factory=dict)
    command: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    packages: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def read_run(record: RunRecord) -> RunData:
    """All that the directory of a run says."""
    return _Reader(record).data


class _Reader:
    """Reads the files of a run directory, which may be damaged, or anything."""

    def __init__(self, record: RunRecord) -> None:
        self.path = record.path
        self.data = data = RunData(record, problems=list(record.problems))
        data.status = self.attempt("status.json", lambda: self.mapping("status.json"), {})
        data.command = self.attempt("command.txt", lambda: parse_command(self.text("command.txt")), {})
        environment = self.attempt("environment.json", lambda: self.mapping("environment.json"), Mapping())
        packages = environment.pop("packages", {})
        data.packages = self.attempt("environment.json", lambda: dict(_leaves(dict(packages))), {})
        data.environment = dict(_leaves(environment))
        config = self.attempt("config.yaml", self.config, Mapping())
        data.config = self.attempt("config.yaml", lambda: dict(_groups(config)), {})
        keys = self.attempt("context.json", lambda: self.mapping("context.json"), Mapping())
        runners = self.attempt("config.yaml", lambda: self.runners(config), dict[str, Mapping]()) or self.runners({})
        data.runners = [self.runner(name, own, keys.get(name)) for name, own in runners.items()]

    def attempt(self, name: str, read: Callable[[], _T], default: _T) -> _T:
        """What is read of a file; the default where it is not there, or cannot be read."""
        if not os.path.lexists(self.path / name):
            return default
        try:
            return read()
        except Exception as error:  # what is there may be anything
            what = f"{name} cannot be read ({error})"
            if not any(problem.startswith(f"{name} cannot be read") for problem in self.data.problems):
                self.data.problems.append(what)
            return default

    def text(self, name: str, most: int = _MOST) -> str:
        return storage.read_small(self.path / name, most).decode("utf-8", "replace")

    def mapping(self, name: str) -> Mapping:
        value = json.loads(self.text(name))
        if not isinstance(value, dict):
            raise TypeError(f"it holds a {type(value).__name__}")
        return value

    def config(self) -> dict[str, Any]:
        tree = yaml_tree.parse(self.text("config.yaml", MAX_BYTES), Origin("config.yaml"))
        plain = tree.plain(expanded=False)
        return dict(plain)

    def runners(self, config: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """Name -> settings of the runners that have a folder, in the order of the config, or what has numbers without one."""
        items = {str(item["name"]): dict(item) for item in config.get("runner") or ()}
        names = [*map(str, config.get("mode") or items)]
        if not names:
            names = sorted(file.parent.name for file in self.path.glob("*/metrics.jsonl"))
        folders = [name for name in names if Path(name).name == name and (self.path / name).is_dir()]
        return {name: items.get(name, {}) for name in folders if not (self.path / name).is_symlink()}

    def runner(self, name: str, settings: dict[str, Any], accesses: Any) -> Runner:
        runner, metrics, speed, steps = Runner(name), Numbers(), Numbers(), Numbers()
        for line in self.lines(f"{name}/metrics.jsonl"):
            metrics.take(line)
        runner.stages = [Stage(stage, *_class_of(settings, stage)) for stage in STAGES]
        for line in self.lines(f"{name}/timing.jsonl"):
            if line.get("event") == "stage":
                speed.unusable += not _take_stage(runner.stages, line)
            elif line.get("event") == "step":
                steps.take_step(line)
            else:
                # The seconds are of the epoch, and of no phase.
                speed.take(
                    {
                        "phase": "",
                        **{"seconds of the epoch" if name == "seconds" else name: line[name] for name in line},
                    }
                )
        self.tell(f"{name}/metrics.jsonl", metrics.unusable)
        self.tell(f"{name}/timing.jsonl", speed.unusable + steps.unusable)
        runner.curves, runner.speed, runner.steps = ([*one.curves.values()] for one in (metrics, speed, steps))
        runner.gaps = metrics.gaps
        self.attempt("context.json", lambda: _take_keys(runner.stages, accesses or ()), None)
        runner.checkpoints = self.attempt(f"{name}/{FOLDER}", lambda: list_checkpoints(self.path / name / FOLDER), [])
        return runner

    def lines(self, name: str) -> Iterator[dict[str, Any]]:
        """The lines of a file that are JSON objects; the others are told of."""
        return self._objects(name) if os.path.lexists(self.path / name) else iter(())

    def _objects(self, name: str) -> Iterator[dict[str, Any]]:
        bad = 0
        try:
            with storage.open_regular(self.path / name) as raw, BufferedReader(raw) as file:
                while text := file.readline(_LONGEST):
                    try:
                        line = json.loads(text)
                    except (ValueError, RecursionError):
                        line = None
                    if isinstance(line, dict):
                        yield line
                    else:
                        # The last may be in the middle of being written.
                        bad += text.endswith(b"\n") or len(text) == _LONGEST
        except (PipelineError, OSError) as error:
            self.data.problems.append(f"{name} cannot be read ({error})")
        self.tell(name, bad)

    def tell(self, name: str, lines: int) -> None:
        """Tell of lines that cannot be used."""
        if lines:
            self.data.problems.append(f"{name}: {lines} of its lines make no sense, and are left out")


class Numbers:
    """Makes curves of lines.

    Attributes:
        curves: (event, phase, name) -> curve.
        gaps: how many numbers are not finite.
        unusable: how many lines make no sense.
    """

    def __init__(self) -> None:
        self.curves: dict[tuple[str, str, str], Curve] = {}
        self.gaps = self.unusable = 0
        # Phase and name, as the line of an epoch has it -> the newest number of its validation.
        self.validated: dict[tuple[str, str], Any] = {}

    def take(self, line: dict[str, Any]) -> None:
        """Take the numbers of a line of ``metrics.jsonl``, or one like it."""
        event, phase, iteration = str(line.get("event")), line.get("phase"), line.get("iteration")
        if event not in _EVENTS or not isinstance(phase, str) or not _is_iteration(iteration):
            self.unusable += 1
            return
        good = True
        for name in (name for name in line if name not in _ABOUT):
            value = line[name]
            if event == "epoch" and self.validated.get((phase, name), self) == value:
                # Those of the validation are repeated there.
                continue
            if event == "validate":
                self.validated[phase, name if "/" in name else f"valid_{name}"] = value
            good &= self.add((event, phase, name), *_place(event, name), iteration, value)
        self.unusable += not good

    def take_step(self, line: dict[str, Any]) -> None:
        """Take the parts of a measured step, as milliseconds."""
        phase, iteration = line.get("phase"), line.get("iteration")
        values = [line.get(part) for part in PARTS]
        if not isinstance(phase, str) or not _is_iteration(iteration) or not all(map(_is_number, values)):
            self.unusable += 1
            return
        for part in PARTS:
            self.add(("step", phase, part), "milliseconds of a step", part, iteration, line[part] * 1000)

    def add(self, key: tuple[str, str, str], metric: str, name: str, iteration: int, value: Any) -> bool:
        """Add a point to a curve; False: it is no number."""
        if value is not None and not _is_number(value):
            return False
        number = None if value is None or not abs(value) <= sys.float_info.max else float(value)
        self.gaps += number is None
        if (curve := self.curves.get(key)) is None:
            curve = self.curves[key] = Curve(key[1], metric, name)
        curve.x.append(iteration)
        curve.y.append(number)
        return True


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float)


def _is_iteration(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < _MOST_ITERATIONS


def _place(event: str, name: str) -> tuple[str, str]:
    """The metric, and the name of its curve there."""
    dataset, _, metric = name.rpartition("/")
    kind = _EVENTS[event]
    if event == "epoch" and metric.startswith("valid_"):
        kind, metric = f"{VALIDATION}, as the epoch has it", metric.removeprefix("valid_")
    if metric == "seconds of the epoch":
        kind = TRAINING
    head, _, optimizer = metric.partition(".")
    if head in OF_OPTIMIZERS:
        metric, kind = head, optimizer or kind
    return metric, f"{kind} on {dataset}" if dataset else kind


def _class_of(settings: dict[str, Any], stage: str) -> tuple[str, bool]:
    path = settings.get(f"{stage}_class_path")
    return ("", False) if not isinstance(path, str) else (path, not path.startswith(_DEFAULT_STAGES))


def _take_stage(stages: list[Stage], line: dict[str, Any]) -> bool:
    """Take what ``timing.jsonl`` says of a stage; False: it makes no sense."""
    stage = next((stage for stage in stages if stage.name == line.get("stage")), None)
    values = [line.get(name) for name in ("seconds", "peak_memory", "peak_gpu_memory")]
    if stage is None or not all(value is None or (_is_number(value) and 0 <= value < math.inf) for value in values):
        return False
    seconds, memory, gpu_memory = values
    stage.seconds += [] if seconds is None else [float(seconds)]
    stage.memory, stage.gpu_memory = (None if value is None else int(value) for value in (memory, gpu_memory))
    stage.completed = line.get("completed") is not False
    return True


def _take_keys(stages: list[Stage], accesses: Any) -> None:
    """Take from ``context.json`` which keys a stage has written and a later one has read."""
    uses = {(use["stage"], use["key"], use["action"]): None for use in accesses}
    for index, stage in enumerate(stages):
        later = {other.name for other in stages[index + 1 :]}
        read = {key for name, key, action in uses if name in later and action == "read"}
        stage.gives = [key for name, key, action in uses if (name, action) == (stage.name, "write") and key in read]


def _groups(config: dict[str, Any]) -> Iterator[tuple[str, list[Setting]]]:
    """The keys of the config by group, each with whether its value differs from the default."""
    own = {name: value for name, value in config.items() if name not in (*SECTIONS, "hyper_parameters")}
    yield "", _settings(own, ConfigSchema)
    yield "hyper_parameters", _settings(dict(config.get("hyper_parameters") or {}), None)
    for section, model in SECTIONS.items():
        for item in config.get(section) or ():
            yield f"{section}.{item.get('name')}", _settings({key: item[key] for key in item if key != "name"}, model)


def _settings(values: dict[str, Any], model: type[BaseModel] | None) -> list[Setting]:
    known = fields(model) if model else {}
    settings = []
    for name, value in values.items():
        info = known.get(name)
        is_default = info and not info.is_required() and info.get_default(call_default_factory=True) == value
        settings.append(Setting(str(name), yaml_tree.one_line(value), not is_default))
    return settings


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """``hardware.cpus`` -> text, for all that is in a value."""
    if isinstance(value, dict | list) and value:
        for part, child in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(child, f"{name}.{part}" if name else str(part))
    else:
        yield name, "" if value in (None, [], {}) else str(value)
