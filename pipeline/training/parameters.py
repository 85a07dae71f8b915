"""Which parameters of a model are trained, by their names."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from pipeline.errors import ConfigError, one_of

COMPILED = "_orig_mod."
"""What torch.compile puts before the names in a module that it wraps."""


def trained(model: nn.Module, updated_modules: str | Iterable[str] | None) -> dict[str, nn.Parameter]:
    """The trainable parameters of the whole model, or of some parts of it, by name; each once.

    Raises:
        ConfigError: the model has no such part, or nothing in it is trained.
    """
    names = [updated_modules] if isinstance(updated_modules, str) else updated_modules
    names = None if names is None else list(names)
    if names == []:
        raise ConfigError("updated_modules: is empty; name parts of the model, or leave it out for all of it")
    parts = {"": model} if names is None else {f"{name}.": _part(model, name) for name in names}
    found: dict[str, nn.Parameter] = {}
    seen: set[nn.Parameter] = set()
    for prefix, part in parts.items():
        for name, each in part.named_parameters(prefix.rstrip(".")):
            if each.requires_grad and each not in seen:
                seen.add(each)
                found[name.replace(COMPILED, "")] = each
    if not found:
        named = [f" ({name.rstrip('.')})" for name in parts if name]
        where = f"{type(model).__name__}{''.join(named)}"
        raise ConfigError(f"{where} has no parameter that is trained; set requires_grad on some, or do not train it")
    return found


def _part(model: nn.Module, name: str) -> nn.Module:
    """A submodule; a compiled module in the way is looked through."""
    part = model
    for each in name.split("."):
        part = getattr(part, "_orig_mod", part)
        below = {child: module for child, module in part._modules.items() if module is not None}
        if each not in below:
            raise ConfigError(f"updated_modules: {type(model).__name__} has no part '{name}'{one_of(each, below)}")
        part = below[each]
    return part


def without_decay(module: nn.Module) -> list[dict[str, object]]:
    """Parameter groups in which vectors (biases, norms) are spared the weight decay, and come first."""
    parameters = [each for each in module.parameters() if each.requires_grad]
    vectors = [each for each in parameters if each.ndim <= 1]
    return [
        {"params": vectors, "weight_decay": 0.0},
        {"params": [each for each in parameters if each.ndim > 1]},
    ]
