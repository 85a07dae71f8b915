"""What the value of each run option may be. Names are SpeechBrain's."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from pipeline.errors import ConfigError, one_of

DEPRECATED = {"auto_mix_prec": "fp16", "bfloat16_mix_prec": "bf16"}
"""Option -> the precision that it means."""

_PRECISIONS = {"32": "fp32", "16-mixed": "fp16", "bf16-mixed": "bf16"}
_SEVERAL = "several processes are not yet possible; leave it out"
_PROFILING = "profiling is not yet possible; leave it out"
_BAR = "the progress bar chooses its own; leave it out"
NOT_TAKEN = {
    "data_parallel_backend": _SEVERAL,
    "data_parallel_count": _SEVERAL,
    "distributed_launch": _SEVERAL,
    "profile_training": _PROFILING,
    "profile_warmup": _PROFILING,
    "profile_steps": _PROFILING,
    "tqdm_colored_bar": _BAR,
    "tqdm_barcolor": _BAR,
    "log_config": "log lines go through loguru; add a place for them with loguru.logger.add",
}
"""SpeechBrain's other options: why they are refused, and what to do."""


class Rule(NamedTuple):
    """What a value may be.

    Attributes:
        accepts: whether a value is right.
        remedy: what to do where it is not.
        kind: how it is written on a command line: alone if it is True (bool), as one value, or as several (list).
    """

    accepts: Callable[[Any], bool]
    remedy: str
    kind: type = str


def _whole(value: Any) -> bool:
    return type(value) is int


def _number(value: Any) -> bool:
    return type(value) in {int, float} and value == value  # noqa: PLR0124 - nan is no number


def _names(value: Any) -> bool:
    return isinstance(value, tuple) and bool(value) and all(isinstance(each, str) and each for each in value)


def _among(*choices: str) -> Rule:
    return Rule(lambda value: value in choices, f"write {', '.join(choices[:-1])} or {choices[-1]}")


_FLAG = Rule(lambda value: isinstance(value, bool), "write true or false", bool)
_COUNT = Rule(lambda value: _whole(value) and value > 0, "write a whole number above 0")
_WHOLE = Rule(_whole, "write a whole number")
_NAMES = Rule(lambda value: value is None or _names(value), "write a list of names of modules, or null", list)
_PRECISION = _among("fp32", "bf16", "fp16")

RULES: dict[str, Rule] = {
    "test_only": _FLAG,
    "debug": _FLAG,
    "debug_batches": _COUNT,
    "debug_epochs": _WHOLE,
    "debug_persistently": _FLAG,
    "device": Rule(
        lambda value: value is None or re.fullmatch(r"auto|cpu|gpu|cuda(:\d+)?", str(value)) is not None,
        "write auto, cpu, gpu, cuda or cuda:N",
    ),
    "distributed_backend": Rule(lambda value: value == "nccl", _SEVERAL),
    "find_unused_parameters": Rule(lambda value: value is False, _SEVERAL, bool),
    "jit": _FLAG,
    "jit_module_keys": _NAMES,
    "compile": _FLAG,
    "compile_module_keys": _NAMES,
    "compile_mode": _among("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
    "compile_using_fullgraph": _FLAG,
    "compile_using_dynamic_shape_tracing": Rule(
        lambda value: value is None or isinstance(value, bool), "write true or false, or null to leave it to torch", bool
    ),
    "precision": _PRECISION,
    "eval_precision": _PRECISION,
    "auto_mix_prec": _FLAG,
    "bfloat16_mix_prec": _FLAG,
    "max_grad_norm": Rule(
        lambda value: value is None or (_number(value) and value > 0), "write a number above 0, or null not to clip"
    ),
    "skip_nonfinite_grads": _FLAG,
    "nonfinite_patience": Rule(
        lambda value: value is None or (_whole(value) and value >= 0),
        "write a whole number, 0 or more, or null to look at no loss",
    ),
    "noprogressbar": _FLAG,
    "ckpt_interval_minutes": Rule(
        lambda value: _number(value) and (value <= 0 or 1 / 60 <= value < math.inf),
        "write a number of minutes, a second at least; 0 for never",
    ),
    "ckpt_interval_steps": _WHOLE,
    "grad_accumulation_factor": _COUNT,
    "optimizer_step_limit": Rule(
        lambda value: value is None or (_whole(value) and value > 0), "write a whole number above 0, or null for no limit"
    ),
    "remove_vector_weight_decay": _FLAG,
}  # fmt: skip


def checked(options: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The options in their canonical form: precisions by our names, nothing deprecated, flags that agree with their keys.

    Args:
        options: name -> value.
        where: what gave them, for messages.

    Raises:
        ConfigError: there is no such option, a value is not what it may be, or two contradict each other.
    """
    found = {name: checked_value(name, options[name], where) for name in options}
    return _with_flags(_with_one_precision(found, where), where)


def checked_value(name: str, value: Any, where: str) -> Any:
    """One option's value in its canonical form; the errors are those of ``checked``."""
    refuse_unknown(name, where)
    if name in {"precision", "eval_precision"}:
        value = _PRECISIONS.get(str(value), value)
    elif RULES[name].kind is list:
        value = tuple(value) if isinstance(value, list | tuple | set | frozenset) else value
    elif isinstance(value, torch.device):
        value = str(value)
    if not RULES[name].accepts(value):
        raise ConfigError(f"{where}: {name} is {value!r}; {RULES[name].remedy}")
    return value


def refuse_unknown(name: str, where: str) -> None:
    """Say of a name that is no option why not.

    Raises:
        ConfigError: it is none.
    """
    if name in NOT_TAKEN:
        raise ConfigError(f"{where}: {name} is an option that is not taken: {NOT_TAKEN[name]}")
    if name not in RULES:
        raise ConfigError(f"{where}: there is no option '{name}'{one_of(name, RULES)}")


def _with_one_precision(options: dict[str, Any], where: str) -> dict[str, Any]:
    """The same with ``precision`` in the place of what is deprecated; one that is False says nothing beside another."""
    spelled = [name for name in DEPRECATED if name in options]
    wanted = {DEPRECATED[name] for name in spelled if options[name]}
    wanted |= {options["precision"]} if "precision" in options else set()
    if len(wanted) > 1:
        names = ", ".join(name for name in ("precision", *DEPRECATED) if options.get(name))
        raise ConfigError(f"{where}: {names} say {' and '.join(sorted(wanted))}; keep precision alone")
    kept = {name: value for name, value in options.items() if name not in spelled}
    return {**kept, "precision": min(wanted, default="fp32")} if spelled else kept


def _with_flags(options: dict[str, Any], where: str) -> dict[str, Any]:
    """The same with what keys and their flag say of each other: keys alone turn it on, and off leaves no keys."""
    for flag in ("jit", "compile"):
        keys = f"{flag}_module_keys"
        if options.get(keys) and options.get(flag, True) is False:
            names = ", ".join(options[keys])
            raise ConfigError(f"{where}: {keys} names {names}, and {flag} is False; leave one of them out")
        if options.get(keys):
            options[flag] = True
        elif options.get(flag) is False:
            options[keys] = None
    return options
