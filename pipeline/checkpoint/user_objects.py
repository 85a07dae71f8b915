"""What objects of the user hold: the items of containers, and the attributes of objects."""

from __future__ import annotations

import sys
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from functools import partial
from types import MethodType, SimpleNamespace
from typing import Any

from torch.utils.data import DataLoader, Dataset, Sampler

from pipeline import workspaces

# The most attributes and items that lead from an object to one that a search finds.
DEPTH = 8

# A list or dict with more items is data. It is not searched.
MOST_ITEMS = 100

# Subclasses of dict may compute their values.
_DICTS = {dict, OrderedDict, defaultdict}

# Packages whose objects are not searched, apart from datasets. The standard library is among them.
_OTHERS = {*sys.stdlib_module_names, "torch", "pipeline", "pipeline_plugins", "loguru", "numpy", "pandas", "pyarrow"}


def contents_of(value: Any) -> Sequence[tuple[Any, Any]]:
    """Return what a search looks at next: the items of a container, or the attributes of an object.

    Objects of other packages have none, apart from torch's datasets.
    """
    items = items_of(value)
    if items is not None:
        return items
    return attributes_of(value) if _is_searched(type(value)) else ()


def items_of(value: Any) -> Sequence[tuple[Any, Any]] | None:
    """Return what a container, a partial function or a bound method holds; None for any other object.

    A container with more than ``MOST_ITEMS`` items is data, and holds nothing.
    """
    if isinstance(value, partial):
        return [("func", value.func), ("args", value.args), ("keywords", value.keywords)]
    if isinstance(value, MethodType):
        return [("self", value.__self__)]
    if not isinstance(value, list | tuple) and type(value) not in _DICTS:
        return None
    return list(direct_items(value)) if len(value) <= MOST_ITEMS else ()


def direct_items(value: Any) -> Iterable[tuple[Any, Any]]:
    """Return the items of a list, tuple or dict, or the attributes of a SimpleNamespace."""
    if isinstance(value, list | tuple):
        return enumerate(value)
    items: Iterable[tuple[Any, Any]] = ()
    if type(value) in _DICTS:
        items = value.items()
    elif type(value) is SimpleNamespace:
        items = vars(value).items()
    return items


def attributes_of(value: Any) -> list[tuple[str, Any]]:
    """Return the attributes of an object, without those that a property computes."""
    slots = [name for cls in type(value).__mro__ for name in vars(cls).get("__slots__", ())]
    of_slots = {name: getattr(value, name) for name in slots if isinstance(name, str) and hasattr(value, name)}
    return list({**of_slots, **getattr(value, "__dict__", {})}.items())


def is_framework(module: str) -> bool:
    """Return whether a module, by its dotted name, is the framework's. A workspace's is the user's."""
    package = module.partition(".")[0]
    return package in {"pipeline", "pipeline_plugins"} and not _is_of_workspace(module)


def _is_of_workspace(module: str) -> bool:
    return module.startswith(f"{workspaces.__name__}.")


def _is_searched(kind: type) -> bool:
    """Return whether the attributes of an object of this class are searched."""
    if issubclass(kind, DataLoader):
        # Whoever iterates over it restores its generators.
        return False
    module = kind.__module__
    is_of_user = module.partition(".")[0] not in _OTHERS or _is_of_workspace(module)
    is_of_data = issubclass(kind, Dataset | Sampler) or module.startswith(("pipeline.data.", "pipeline.slots."))
    return is_of_user or is_of_data or kind is SimpleNamespace
