"""Modules and parameters in plain Python containers, which torch does not find: they are neither trained nor saved."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.loss import _Loss

from pipeline.errors import ConfigError

# Containers within containers that are looked into, and the items of each.
_LEVELS = 4
_MOST = 1000

# The attributes of torch's own, and a list of RNNs that has their registered parameters.
_OF_TORCH = {*vars(nn.Module()), "_flat_weights"}

# Layers without parameters that compute something else in evaluation mode.
_WITH_MODES = (_DropoutNd, _NormBase, nn.RReLU)


def require_registered(
    roots: Iterable[nn.Module], where: str = "", owner: object = None, elsewhere: Iterable[nn.Module] = ()
) -> None:
    """Raise for layers that a model keeps in a plain list, tuple, set or dict, and that it has nowhere else.

    What such a layer loses is: training, if it has a parameter that requires a gradient; saving, if it is in training
    mode and has a buffer that is saved; evaluation mode, if it is a Dropout or the like. Others are harmless.

    Args:
        roots: the modules that are trained and saved.
        where: what messages begin with, such as ``"phase.line: "``.
        owner: the Brain that has these modules. What its own containers hold is saved, but not trained.
        elsewhere: other modules that are trained and saved, and may have the layer.

    Raises:
        ConfigError: there is such a layer; it names all of the containers.
    """
    if faults := _faults(list(roots), owner, list(elsewhere)):
        raise ConfigError("\n".join(f"{where}{fault}" for fault in faults))


def attributes_with_trainable(holder: object, modules: nn.Module) -> list[str]:
    """Return the attributes of an object in which something would be trained.

    Attributes of its submodules count too, and so does what is in plain containers.

    Args:
        holder: a module or any other object.
        modules: what is trained; its parameters do not count.
    """
    registered = {id(parameter) for parameter in modules.parameters()}
    parts = holder.modules() if isinstance(holder, nn.Module) else [holder]
    names = []
    for part in parts:
        for name, value in _attributes(part):
            parameters = [own for item in _items([value], _LEVELS) for own in _parameters(item)]
            if any(own.requires_grad and id(own) not in registered for own in parameters):
                names.append(name)
    return list(dict.fromkeys(names))


def _attributes(holder: object) -> Iterator[tuple[str, Any]]:
    """The attributes of an object, with the parameters and submodules of a module."""
    attributes = dict(getattr(holder, "__dict__", {}))
    if isinstance(holder, nn.Module):
        for registry in ("_parameters", "_modules"):
            attributes.update(attributes.pop(registry, {}))
    yield from attributes.items()


def _parameters(item: nn.Module | nn.Parameter) -> list[nn.Parameter]:
    return [item] if isinstance(item, nn.Parameter) else list(item.parameters())


def _faults(roots: list[nn.Module], owner: object, elsewhere: list[nn.Module]) -> list[str]:
    modules = [part for root in roots for part in root.modules()]
    others = [part for root in elsewhere for part in root.modules()]
    registered = {id(part) for part in (*modules, *others)}
    for part in (*modules, *others):
        registered.update(map(id, part._parameters.values()))
        registered.update(map(id, part._buffers.values()))
    faults: dict[str, None] = {}
    waiting: deque[Any] = deque([] if owner is None else [owner])
    waiting.extend(modules)
    while waiting:
        holder = waiting.popleft()
        for name, value in _containers(holder):
            found = [item for item in _items(value, _LEVELS) if id(item) not in registered]
            if any(_is_lost(item, registered, saved=holder is owner) for item in found):
                faults[_describe(holder, name, value, is_owner=holder is owner)] = None
                continue
            # They are harmless themselves, but may have containers too.
            inner = [part for item in found if isinstance(item, nn.Module) for part in item.modules()]
            waiting.extend(part for part in inner if id(part) not in registered)
            registered.update(map(id, inner))
    return [*faults]


def _containers(holder: object) -> Iterator[tuple[str, Any]]:
    """The attributes of an object that are containers; those of its class too. Properties are not called."""
    kind = type(holder)
    if kind.__module__.partition(".")[0] == "torch":
        return
    of_classes: dict[str, Any] = {}
    for cls in reversed(kind.__mro__):
        if cls.__module__.partition(".")[0] not in {"torch", "builtins"}:
            of_classes.update(vars(cls))
    attributes = {**of_classes, **getattr(holder, "__dict__", {})}
    for name, value in attributes.items():
        if name not in _OF_TORCH and isinstance(value, dict | list | tuple | set | frozenset | deque):
            yield name, value


def _items(container: Any, levels: int) -> Iterator[Any]:
    """The modules and parameters in a container, and in containers within it."""
    values = container.values() if isinstance(container, dict) else container
    for value in islice(values, _MOST):
        if isinstance(value, nn.Module | nn.Parameter):
            yield value
        elif levels > 1 and isinstance(value, dict | list | tuple | set | frozenset | deque):
            yield from _items(value, levels - 1)


def _is_lost(item: nn.Module | nn.Parameter, registered: set[int], *, saved: bool) -> bool:
    """Whether training, saving or evaluation does without something that it needs."""
    if isinstance(item, nn.Parameter):
        return item.requires_grad
    for part in item.modules():
        if id(part) in registered:
            continue
        for parameter in part._parameters.values():
            if parameter is not None and parameter.requires_grad and id(parameter) not in registered:
                return True
        if part.training and (
            isinstance(part, _WITH_MODES) or not (saved or _buffers_are_registered(part, registered))
        ):
            return True
    return False


def _buffers_are_registered(part: nn.Module, registered: set[int]) -> bool:
    """Whether each buffer that is saved belongs to a registered module too. Those of a loss never change."""
    if isinstance(part, _Loss):
        return True
    buffers = part._buffers.items()
    own = [value for name, value in buffers if name not in part._non_persistent_buffers_set]
    return all(value is None or id(value) in registered for value in own)


def _describe(holder: object, name: str, container: Any, *, is_owner: bool) -> str:
    """``TinyCNN.stem is a list of 1 module; use nn.ModuleList``."""
    items = list(_items(container, _LEVELS))
    modules = [item for item in items if isinstance(item, nn.Module)]
    noun, count = ("module", len(modules)) if modules else ("parameter", len(items))
    kind = "Dict" if isinstance(container, dict) else "List"
    use = f"nn.{noun.capitalize()}{kind}"
    class_name = type(container).__name__
    article = "an" if class_name[0] in "AEIOUaeiou" else "a"
    what = f"{type(holder).__name__}.{name} is {article} {class_name} of {count} {noun}{'s' * (count != 1)}"
    plain = f"a plain {class_name}"
    if is_owner:
        remedy = f"pass it to super().__init__({{'{name}': {use}(…)}})"
        return f"{what}; {remedy}: {plain} of a Brain is not trained"
    return f"{what}; use {use}: {plain} is neither trained nor saved"
