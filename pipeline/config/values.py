"""The kinds of value that a key of the config may have; each says what it is in a JSON Schema too."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

_UNITS = ("iteration", "epoch", "second", "minute")


class Interval(NamedTuple):
    """Every ``length`` iterations, epochs, seconds or minutes."""

    length: int
    unit: str

    @classmethod
    def parse(cls, value: Any, unit: str = "iteration") -> Interval:
        """``100`` (of the ``unit``), ``"2 epoch"``.

        Raises:
            ValueError: it has neither form, or is not positive.
        """
        found = (
            re.fullmatch(r"(\d+)(?: (\w+?)s?)?", str(value))
            if isinstance(value, int | str) and not isinstance(value, bool)
            else None
        )
        if not found or int(found[1]) < 1 or (found[2] or "iteration") not in _UNITS:
            raise ValueError(
                f"is {value!r}; write a positive number of iterations, or '2 epoch', '30 second', '10 minute'; null for never"
            )
        return cls(int(found[1]), found[2] or unit)


def parsed(intervals: int | str | list[int | str] | None, unit: str = "iteration") -> list[Interval]:
    """The intervals that a value of kind :data:`Intervals` names, a bare number in ``unit``; null names none."""
    values = intervals if isinstance(intervals, list) else [intervals]
    return [Interval.parse(value, unit) for value in values if value is not None]


def _intervals(value: Any) -> Any:
    for each in value if isinstance(value, list) else [value]:
        if each is not None:
            Interval.parse(each)
    return value


def _names(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _class_path(value: Any) -> Any:
    if callable(value) or (isinstance(value, str) and value):
        return value
    raise ValueError(f"is {value!r}; write a class path such as '{{workspace}}/file.py:Name' or 'package.module:Name'")


def _device(value: Any) -> Any:
    if isinstance(value, str) and re.fullmatch(r"auto|cpu|gpu|cuda(:\d+)?", value):
        return value
    raise ValueError(f"is {value!r}; write auto, cpu, gpu, cuda or cuda:N")


def _runner_class(value: Any) -> Any:
    return value.lower().removeprefix("single_") if isinstance(value, str) else value


_LONGEST = 200
"""Characters of a name that a file or folder is called after; file systems take 255 bytes, and more is added to it."""


def _not_too_long(value: Any) -> Any:
    if isinstance(value, str) and len(value) > _LONGEST:
        raise ValueError(f"has {len(value)} characters, and files are called so; write {_LONGEST} at the most")
    return value


def _folder_name(value: Any) -> Any:
    if value in ("lock", "workspace"):
        raise ValueError(f"is {value!r}, which the run directory uses itself; choose another name")
    return value


def _file_name(value: Any) -> Any:
    if value == "training":
        raise ValueError("is 'training', which a checkpoint uses itself beside the weights; choose another name")
    return value


def _no_repeat(value: Any) -> Any:
    names = value if isinstance(value, list) else [value]
    if not names:
        raise ValueError("is empty; name at least one, or leave it out for all")
    repeated = sorted({str(name) for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"names {', '.join(repeated)} twice; name each once")
    return value


_STRING = {"type": "string"}
_INTERVAL = {"anyOf": [
    {"type": "integer", "exclusiveMinimum": 0},
    {"type": "string", "pattern": rf"^[0-9]+( ({'|'.join(_UNITS)})s?)?$"},
]}  # fmt: skip
_DEVICE = {"anyOf": [{"enum": ["auto", "cpu", "gpu", "cuda"]}, {"type": "string", "pattern": "^cuda:[0-9]+$"}]}
_PRECISION = {"title": "fp32, fp16 or bf16", "enum": ["fp32", "fp16", "bf16", "32", "16-mixed", "bf16-mixed", 32]}
_CLASS = {
    "type": "object",
    "properties": {"class": _STRING, "args": {"type": "object"}},
    "required": ["class"],
    "additionalProperties": False,
}
_UPDATER = {
    "type": "object",
    "properties": {
        "class_path": {**_STRING, "description": "a subclass of UpdaterBase"},
        "args": {
            "type": "object",
            "description": "beside model, brain, optim_schedulers and loader, which it is given",
        },
    },
    "required": ["class_path"],
    "additionalProperties": False,
}
_BEST = {
    "type": "object",
    "properties": {
        "metric": {**_STRING, "description": "`valid_loss`, or `valid_` and the name of one of the phase's metrics"},
        "mode": {"enum": ["min", "max"], "description": "whether the smallest or the largest is the best"},
        "count": {"type": "integer", "exclusiveMinimum": 0, "description": "how many are kept; 1 by default"},
    },
    "required": ["metric", "mode"],
    "additionalProperties": False,
}
_OPTIMIZER = {
    "type": "object",
    "description": "the optimizer's class, and its arguments",
    "properties": {
        "class": {**_STRING, "description": "a class of torch.optim, or a class path"},
        "learning_rate": {"type": "number"},
        "lr": {"type": "number", "description": "the same as learning_rate"},
    },
}

ClassPathValue = Annotated[
    Any, BeforeValidator(_class_path), WithJsonSchema({"title": "class path", "type": "string", "minLength": 1})
]
Names = Annotated[
    list[str],
    BeforeValidator(_no_repeat),
    BeforeValidator(_names),
    WithJsonSchema(
        {"title": "name or list of names", "anyOf": [_STRING, {"type": "array", "items": _STRING, "minItems": 1}]}
    ),
]
Intervals = Annotated[
    int | str | list[int | str] | None,
    BeforeValidator(_intervals),
    WithJsonSchema(
        {"title": "interval, list of intervals or null",
         "anyOf": [_INTERVAL, {"type": "array", "items": _INTERVAL}, {"type": "null"}]}
    ),
]  # fmt: skip
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$"), BeforeValidator(_not_too_long)]
RunnerName = Annotated[Name, BeforeValidator(_folder_name)]
PhaseName = Annotated[Name, BeforeValidator(_file_name)]
Device = Annotated[
    str, BeforeValidator(_device), WithJsonSchema({"title": "auto, cpu, gpu, cuda or cuda:N", **_DEVICE})
]
RunnerKind = Annotated[
    Literal["train", "infer"],
    BeforeValidator(_runner_class),
    WithJsonSchema({"enum": ["train", "infer", "single_train", "single_infer"]}),
]
Precision = Annotated[Literal["fp32", "fp16", "bf16"], WithJsonSchema(_PRECISION)]
CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
Arguments = dict[str, Any]
NamedClasses = Annotated[dict[str, dict[str, Any]], WithJsonSchema({"type": "object", "additionalProperties": _CLASS})]
"""Name -> ``{class, args}``."""
HyperParameters = Annotated[dict[str, Any], WithJsonSchema({"type": "object", "properties": {"optimizer": _OPTIMIZER}})]
PluginValue = Annotated[
    str | type | dict[str, Any], WithJsonSchema({"title": "plugin", "anyOf": [_STRING, {"type": "object"}]})
]


class BestSettings(BaseModel):
    """Which checkpoint is the best: the one whose ``metric`` is the smallest or the largest."""

    # What is not known here is told by the check, which knows where each key was written.
    model_config = ConfigDict(extra="allow", strict=True)
    metric: str
    mode: Literal["min", "max"]
    count: int = Field(1, gt=0)


class UpdaterSettings(BaseModel):
    """The class of an updater, and its arguments beside those that it is given."""

    model_config = ConfigDict(extra="allow", strict=True)
    class_path: ClassPathValue
    args: Arguments = Field(default_factory=dict)


Best = Annotated[BestSettings, WithJsonSchema(_BEST)]
UpdaterValue = Annotated[UpdaterSettings, WithJsonSchema(_UPDATER)]
