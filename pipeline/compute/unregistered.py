"""Finds modules and parameters in plain Python containers.

torch does not find them there, so they are neither trained nor saved.
"""

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

# How deep containers within containers are searched, and how many items of each.
_MAX_LEVELS = 4
_MAX_ITEMS = 1000

# The attributes of nn.Module itself, and a list in which RNNs have their registered parameters.
_OF_TORCH = {*vars(nn.Module()), "_flat_weights"}

# Layers without parameters that compute something else in evaluation mode.
_WITH_MODES = (_DropoutNd, _NormBase, nn.RReLU)


def require_registered(
    roots: Iterable[nn.Module], where: str = "", owner: object = None, elsewhere: Iterable[nn.Module] = ()
) -> None:
    """Raise for layers that a model has only in a plain list, tuple, set or dict.

    Such a layer

    - is not trained, which matters if it has a parameter that requires a gradient,
    - is not saved, which matters if it is in training mode and has a buffer that is saved,
    - is not put into evaluation mode, which matters for a Dropout and the like.

    A layer for which none of these matters is harmless, and no error.

    Args:
        roots: the modules that are trained and saved.
        where: the start of messages, such as ``"phase.line: "``.
        owner: the Brain that has these modules. The layers in the containers of the Brain itself
            are saved, but not trained.
        elsewhere: other modules that are trained and saved, and may have the layer.

    Raises:
        ConfigError: there is such a layer. The message names all of the containers.
    """
    faults = _faults(list(roots), owner, list(elsewhere))
    if faults:
        raise ConfigError("\n".join(f"{where}{fault}" for fault in faults))


def attributes_with_trainable(holder: object, modules: nn.Module) -> list[str]:
    """Return the names of the attributes of an object that have parameters to train.

    The attributes of its submodules are included, and so are parameters in plain containers.

    Args:
        holder: a module or any other object.
        modules: what is trained already; its parameters do not count.
    """
    registered = {id(parameter) for parameter in modules.parameters()}
    parts = holder.modules() if isinstance(holder, nn.Module) else [holder]
    names = []
    for part in parts:
        for name, value in _attributes(part):
            parameters = [parameter for item in _items([value], _MAX_LEVELS) for parameter in _parameters(item)]
            if any(parameter.requires_grad and id(parameter) not in registered for parameter in parameters):
                names.append(name)
    # Without repetitions, in the same order.
    return list(dict.fromkeys(names))


def _attributes(holder: object) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of an object. Parameters and submodules of a module are among them."""
    attributes = dict(getattr(holder, "__dict__", {}))
    if isinstance(holder, nn.Module):
        for registry in ("_parameters", "_modules"):
            attributes.update(attributes.pop(registry, {}))
    yield from attributes.items()


def _parameters(item: nn.Module | nn.Parameter) -> list[nn.Parameter]:
    return [item] if isinstance(item, nn.Parameter) else list(item.parameters())


def _faults(roots: list[nn.Module], owner: object, elsewhere: list[nn.Module]) -> list[str]:
    """Return a message for each container with a layer that is lost.

    The arguments are the ones of ``require_registered``.
    """
    modules = [part for root in roots for part in root.modules()]
    others = [part for root in elsewhere for part in root.modules()]
    registered = {id(part) for part in (*modules, *others)}
    for part in (*modules, *others):
        registered.update(map(id, part._parameters.values()))
        registered.update(map(id, part._buffers.values()))
    # A dict keeps the order, and each message once.
    faults: dict[str, None] = {}
    waiting: deque[Any] = deque()
    if owner is not None:
        waiting.append(owner)
    waiting.extend(modules)
    while waiting:
        holder = waiting.popleft()
        for name, value in _containers(holder):
            found = [item for item in _items(value, _MAX_LEVELS) if id(item) not in registered]
            if any(_is_lost(item, registered, saved=holder is owner) for item in found):
                faults[_describe(holder, name, value, is_owner=holder is owner)] = None
                continue
            # These items are harmless themselves, but they may have containers too.
            inner = [part for item in found if isinstance(item, nn.Module) for part in item.modules()]
            waiting.extend(part for part in inner if id(part) not in registered)
            registered.update(map(id, inner))
    return [*faults]


def _containers(holder: object) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of an object, and of its class, that are containers.

    Properties are not called.
    """
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
    """Yield the modules and parameters in a container, and in containers within it."""
    values = container.values() if isinstance(container, dict) else container
    for value in islice(values, _MAX_ITEMS):
        if isinstance(value, nn.Module | nn.Parameter):
            yield value
        elif levels > 1 and isinstance(value, dict | list | tuple | set | frozenset | deque):
            yield from _items(value, levels - 1)


def _is_lost(item: nn.Module | nn.Parameter, registered: set[int], *, saved: bool) -> bool:
    """Return whether training, saving or evaluation needs an item, and does not find it.

    Args:
        item: a module or parameter in a plain container.
        registered: the ids of what torch finds.
        saved: whether the item is saved in any case.
    """
    if isinstance(item, nn.Parameter):
        return item.requires_grad
    for part in item.modules():
        if id(part) in registered:
            continue
        for parameter in part._parameters.values():
            if parameter is not None and parameter.requires_grad and id(parameter) not in registered:
                return True
        if not part.training:
            continue
        if isinstance(part, _WITH_MODES):
            return True
        if not (saved or _buffers_are_registered(part, registered)):
            return True
    return False


def _buffers_are_registered(part: nn.Module, registered: set[int]) -> bool:
    """Return whether each buffer of a module that is saved belongs to a registered module too."""
    if isinstance(part, _Loss):
        # The buffers of a loss never change.
        return True
    buffers = part._buffers.items()
    saved = [value for name, value in buffers if name not in part._non_persistent_buffers_set]
    return all(value is None or id(value) in registered for value in saved)


def _describe(holder: object, name: str, container: Any, *, is_owner: bool) -> str:
    """Return the message for a container.

    It starts such as ``TinyCNN.stem is a list of 1 module; use nn.ModuleList``.

    Args:
        holder: the object that has the container.
        name: the attribute.
        container: its value.
        is_owner: whether the object is the Brain itself.
    """
    items = list(_items(container, _MAX_LEVELS))
    modules = [item for item in items if isinstance(item, nn.Module)]
    if modules:
        noun = "module"
        count = len(modules)
    else:
        noun = "parameter"
        count = len(items)
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
