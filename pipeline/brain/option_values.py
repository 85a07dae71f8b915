"""The values of a Brain's run options: their names, types and ranges."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, ValidationError

from pipeline.config.aliases import PRECISIONS
from pipeline.config.schema import CompileMode, Count, Device, Names, Norm, Patience, Precision
from pipeline.config.validation import message
from pipeline.errors import ConfigError, one_of

# Deprecated option -> the precision that it means.
DEPRECATED = {"auto_mix_prec": "fp16", "bfloat16_mix_prec": "bf16"}

_TORCHRUN = "each GPU has a process of its own; leave it out, and start the script with torchrun"

# Other options of SpeechBrain -> why they are an error, and what to do instead.
NOT_TAKEN = {
    **dict.fromkeys(("data_parallel_backend", "data_parallel_count"), _TORCHRUN),
    **dict.fromkeys(
        ("tqdm_colored_bar", "tqdm_barcolor"), "the bar is rich's and chooses its colours; noprogressbar hides it"
    ),
    "log_config": "log lines go through loguru; add a place for them with loguru.logger.add",
}


def _list(value: Any) -> Any:
    """Return other collections of names as a list."""
    return list(value) if isinstance(value, tuple | set | frozenset) else value


def _device_name(value: Any) -> Any:
    """Return a ``torch.device`` as its name."""
    return str(value) if isinstance(value, torch.device) else value


def _minutes(value: float) -> float:
    """Return a number of minutes unless it is nan, infinite, or a positive number below a second."""
    if (value > 0 and not 1 / 60 <= value < math.inf) or math.isnan(value):
        raise ValueError(f"is {value!r}; write a number of minutes, a second at least; 0 for never")
    return value


_Precision = Annotated[Precision, BeforeValidator(lambda value: PRECISIONS.get(str(value), value))]

_ModuleKeys = Annotated[Names | None, BeforeValidator(_list)]


class OptionValues(BaseModel):
    """The types, ranges and defaults of the run options. Many have the type of a runner's key.

    What the options mean is in ``RunOptions``.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    test_only: bool = False
    debug: bool = False
    debug_batches: Count = 2
    debug_epochs: int = 2
    debug_persistently: bool = False
    device: Annotated[Device | None, BeforeValidator(_device_name)] = None
    distributed_backend: Literal["nccl", "gloo"] = "nccl"
    distributed_launch: bool = False
    find_unused_parameters: bool = False
    jit: bool = False
    jit_module_keys: _ModuleKeys = None
    compile: bool = False
    compile_module_keys: _ModuleKeys = None
    compile_mode: CompileMode = "default"
    compile_using_fullgraph: bool = False
    compile_using_dynamic_shape_tracing: bool | None = False
    precision: _Precision = "fp32"
    eval_precision: _Precision = "fp32"
    auto_mix_prec: bool = False
    bfloat16_mix_prec: bool = False
    max_grad_norm: Norm | None = 5.0
    skip_nonfinite_grads: bool = False
    nonfinite_patience: Patience | None = 3
    noprogressbar: bool = False
    ckpt_interval_minutes: Annotated[float, AfterValidator(_minutes)] = 0
    ckpt_interval_steps: int = 0
    grad_accumulation_factor: Count = 1
    optimizer_step_limit: Count | None = None
    remove_vector_weight_decay: bool = False
    profile_training: bool = False
    profile_warmup: Count = 5
    profile_steps: Count = 5


NAMES = list(OptionValues.model_fields)


def kind_of(name: str) -> type:
    """Return how an option is written on a command line.

    Returns:
        ``bool`` if its name alone sets it, ``list`` if it takes multiple values, ``str`` if it takes one.
    """
    if name.endswith("_module_keys"):
        return list
    return bool if isinstance(OptionValues.model_fields[name].default, bool) else str


def values_of(options: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the options, each in its canonical form.

    Args:
        options: name -> value.
        where: where they come from, for messages.

    Raises:
        ConfigError: there is no such option, or a value is of the wrong type or out of range. The
            message has a line for each such value.
    """
    for name in options:
        refuse_unknown(name, where)
    try:
        values = OptionValues(**options)
    except ValidationError as error:
        faults: dict[int | str, str] = {}
        for detail in error.errors():
            option = detail["loc"][0]
            faults[option] = message(detail, options[str(option)])
        raise ConfigError("\n".join(f"{where}: {name} {fault}" for name, fault in faults.items())) from error
    return {name: getattr(values, name) for name in options}


def refuse_unknown(name: str, where: str) -> None:
    """Raise if a name is not an option.

    Raises:
        ConfigError: the name is not an option. The message says why.
    """
    if name in NOT_TAKEN:
        raise ConfigError(f"{where}: {name} is an option that is not taken: {NOT_TAKEN[name]}")
    if name not in NAMES:
        raise ConfigError(f"{where}: there is no option '{name}'{one_of(name, NAMES)}")


def check_options(options: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the options in their canonical form, checked together.

    Deprecated options are replaced by ``precision``. The flags ``jit`` and ``compile`` agree with
    their keys.

    Args:
        options: name -> value.
        where: where they come from, for messages.

    Raises:
        ConfigError: as in ``values_of``, or two options contradict each other.
    """
    values = values_of(options, where)
    # A deprecated option that is False says nothing about the precision.
    deprecated = {name: values.pop(name) for name in DEPRECATED if name in values}
    precisions = {DEPRECATED[name] for name, is_on in deprecated.items() if is_on}
    precisions |= {values["precision"]} if "precision" in values else set()
    if len(precisions) > 1:
        names = ", ".join(name for name in ("precision", *DEPRECATED) if options.get(name))
        raise ConfigError(f"{where}: {names} say {' and '.join(sorted(precisions))}; keep precision alone")
    if deprecated:
        values["precision"] = min(precisions, default="fp32")
    # Keys set their flag. Without the flag there are no keys.
    for flag in ("jit", "compile"):
        keys = f"{flag}_module_keys"
        named = values.get(keys)
        if named:
            if values.setdefault(flag, True) is False:
                what = f"{keys} names {', '.join(named)}, and {flag} is False"
                raise ConfigError(f"{where}: {what}; leave one of them out")
        elif values.get(flag) is False:
            values[keys] = None
    return values
