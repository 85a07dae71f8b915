"""The trained parameters of a model, and their division into groups with different options."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor, nn

from pipeline.checkpoint.weights import match_names, suggest_names, unmatched_pattern
from pipeline.errors import ConfigError, one_of

# The options of a parameter group, with its parameters as ``params``.
Group: TypeAlias = dict[str, Any]
Groups: TypeAlias = Sequence[Mapping[str, Any]]

# The prefix that torch.compile adds to the names in a module that it wraps.
COMPILED = "_orig_mod."


def trainable_parameters(model: nn.Module, updated_modules: str | Iterable[str] | None) -> dict[str, nn.Parameter]:
    """Return the trainable parameters of a model, or of some parts of it, by name; each one once.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
        >>> list(trainable_parameters(model, "1"))
        ['1.weight', '1.bias']

    Args:
        model: the whole model.
        updated_modules: the dotted name of a part, or multiple names; None is the whole model.

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
    """Return a submodule by its dotted name, also within a compiled module."""
    part = model
    for child in name.split("."):
        part = getattr(part, "_orig_mod", part)
        children = {key: module for key, module in part._modules.items() if module is not None}
        if child not in children:
            raise ConfigError(f"updated_modules: {type(model).__name__} has no part '{name}'{one_of(child, children)}")
        part = children[child]
    return part


def without_decay(parameters: Iterable[Tensor], options: Mapping[str, Any] | None = None) -> list[Group]:
    """Return two parameter groups: vectors (biases, norms) without weight decay, then all others.

    Example:
        >>> groups = without_decay(nn.Linear(2, 1).parameters(), {"weight_decay": 0.1})
        >>> [group["weight_decay"] for group in groups]
        [0.0, 0.1]

    Args:
        parameters: the parameters of both groups.
        options: the options of both groups, except for the weight decay of the vectors.
    """
    parameters = list(parameters)
    options = options or {}
    vectors = [parameter for parameter in parameters if parameter.ndim <= 1]
    others = [parameter for parameter in parameters if parameter.ndim > 1]
    return [{**options, "params": vectors, "weight_decay": 0.0}, {**options, "params": others}]


def parameter_groups(names: Mapping[str, Tensor], groups: Groups, root: str, *, spare_vectors: bool) -> list[Group]:
    """Divide parameters into groups by patterns of their names.

    Parameters that no pattern matches are the last group.

    Example:
        >>> names = dict(nn.Linear(2, 1).named_parameters())
        >>> made = parameter_groups(names, [{"params": "bias", "lr": 0.2}], "", spare_vectors=False)
        >>> [group.get("lr") for group in made]
        [0.2, None]

    Args:
        names: name -> parameter.
        groups: ``{params: pattern or patterns, option: value, …}``. A parameter is in the first
            group that matches it.
        root: a prefix of the names that a pattern may leave out.
        spare_vectors: whether the vectors of a group become a separate group without weight decay,
            unless the group sets the weight decay.

    Returns:
        Groups as torch's optimizers take them; no group is empty.

    Raises:
        ConfigError: a pattern matches nothing, or only parameters of earlier groups.
    """
    remaining = dict(names)
    short_names = [name.removeprefix(root) for name in names]
    made: list[Group] = []
    for index, group in enumerate(groups):
        options = {"lr" if key == "learning_rate" else key: value for key, value in group.items()}
        patterns = [options["params"]] if isinstance(options["params"], str) else options["params"]
        if wrong := unmatched_pattern(patterns, [*names, *short_names]):
            what = f"groups.{index}.params: '{wrong}' matches no parameter that is trained"
            raise ConfigError(f"{what}{suggest_names(wrong, short_names)}")
        matched = [name for name in remaining if match_names(patterns, [name, name.removeprefix(root)])]
        if not matched:
            what = f"groups.{index}.params: {', '.join(patterns)} matches only what groups before it have"
            raise ConfigError(f"{what}; of two that match, the first has the parameter: put the narrower one first")
        made.append({**options, "params": [remaining.pop(name) for name in matched]})
    made.append({"params": list(remaining.values())})
    if spare_vectors:
        halves = [[group] if "weight_decay" in group else without_decay(group["params"], group) for group in made]
        made = [group for half in halves for group in half]
    return [group for group in made if group["params"]]
