"""The trained parameters of a model, and their division into groups with different options."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor, nn

from pipeline.checkpoint.weights import match_names, suggest_names, unmatched_pattern
from pipeline.errors import ConfigError, one_of

# Options of a parameter group, and its parameters as ``params``.
Group: TypeAlias = dict[str, Any]
Groups: TypeAlias = Sequence[Mapping[str, Any]]


# What torch.compile puts before the names in a module that it wraps.
COMPILED = "_orig_mod."


def trainable_parameters(model: nn.Module, updated_modules: str | Iterable[str] | None) -> dict[str, nn.Parameter]:
    """The trainable parameters of the whole model, or of some parts of it, by name; each once.

    Raises:
        ConfigError: the model has no such part, or nothing in it is trained.
    """
    names = [updated_modules] if isinstance(updated_modules, str) else updated_modules
    parts = {"": model} if names is None else {name: _part(model, name) for name in names}
    if not parts:
        raise ConfigError("updated_modules: is empty; name parts of the model, or leave it out for all of it")
    name_of: dict[nn.Parameter, str] = {}
    for prefix, part in parts.items():
        for name, parameter in part.named_parameters(prefix):
            if parameter.requires_grad:
                name_of.setdefault(parameter, name.replace(COMPILED, ""))
    if not name_of:
        where = "".join([type(model).__name__, *(f" ({name})" for name in parts if name)])
        raise ConfigError(f"{where} has no parameter that is trained; set requires_grad on some, or do not train it")
    return {name: parameter for parameter, name in name_of.items()}


def _part(model: nn.Module, name: str) -> nn.Module:
    """A submodule by its name, also within a compiled module."""
    part = model
    for child in name.split("."):
        part = getattr(part, "_orig_mod", part)
        below = {key: module for key, module in part._modules.items() if module is not None}
        if child not in below:
            raise ConfigError(f"updated_modules: {type(model).__name__} has no part '{name}'{one_of(child, below)}")
        part = below[child]
    return part


def without_decay(parameters: Iterable[Tensor], options: Mapping[str, Any] | None = None) -> list[Group]:
    """Two parameter groups: vectors (biases, norms) without weight decay first, then all others, both with the options."""
    parameters, options = list(parameters), options or {}
    vectors = [parameter for parameter in parameters if parameter.ndim <= 1]
    others = [parameter for parameter in parameters if parameter.ndim > 1]
    return [{**options, "params": vectors, "weight_decay": 0.0}, {**options, "params": others}]


def parameter_groups(names: Mapping[str, Tensor], groups: Groups, root: str, *, spare_vectors: bool) -> list[Group]:
    """Divide parameters by the patterns of ``groups``; those that none matches are the last group.

    Args:
        names: name -> parameter.
        groups: ``{params: pattern or patterns, option: value, …}``; of two that match a parameter, the first has it.
        root: what a pattern may leave out at the beginning of a name.
        spare_vectors: whether vectors become groups of their own without weight decay, where the group does not set it.

    Returns:
        What torch's optimizers take; no group is empty.

    Raises:
        ConfigError: a pattern matches nothing, or nothing that is left.
    """
    remaining, made, short = dict(names), list[Group](), [name.removeprefix(root) for name in names]
    for index, group in enumerate(groups):
        options = {"lr" if key == "learning_rate" else key: value for key, value in group.items()}
        patterns = [options["params"]] if isinstance(options["params"], str) else options["params"]
        if wrong := unmatched_pattern(patterns, [*names, *short]):
            what = f"groups.{index}.params: '{wrong}' matches no parameter that is trained"
            raise ConfigError(f"{what}{suggest_names(wrong, short)}")
        own = [name for name in remaining if match_names(patterns, [name, name.removeprefix(root)])]
        if not own:
            what = f"groups.{index}.params: {', '.join(patterns)} matches only what groups before it have"
            raise ConfigError(f"{what}; of two that match, the first has the parameter: put the narrower one first")
        made.append({**options, "params": [remaining.pop(name) for name in own]})
    made.append({"params": list(remaining.values())})
    if spare_vectors:
        halves = [[group] if "weight_decay" in group else without_decay(group["params"], group) for group in made]
        made = [group for half in halves for group in half]
    return [group for group in made if group["params"]]
