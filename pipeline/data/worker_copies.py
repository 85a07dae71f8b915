"""What is changed in a dataset after persistent workers have taken their copies of it."""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from torch import nn

# So many values are compared at most, those with the shortest paths first.
_MOST_VALUES = 10_000
# Longer lists and dicts are not searched.
_MOST_ITEMS = 100
_LONGEST_TEXT = 1000

_FUNCTION = "<function"
_OBJECT = "<object"
# They change on their own in the process of the training.
_NOT_SEARCHED = (logging.Logger, random.Random, ModuleType, type)


class WorkerCopies:
    """The values that objects have when workers take their copies of them.

    A number, a string or a short list is compared by its value, any other object by its identity.
    So a tensor in shared memory may be changed in place. Attributes, lists and dicts are searched.

    An attribute or an item that is added later is no change, since it is often a cached value. For
    the same reason None may become an object that is not callable, such as a file, or the reverse.

    Args:
        owners: the objects by name, such as the dataset and the collate function.
    """

    def __init__(self, **owners: object) -> None:
        self._owners = owners
        self._values = _values(owners)
        self._reported: set[str] = set()

    def changes(self) -> list[str]:
        """Return what was changed since then, such as ``dataset.level (1 -> 2)``, each once."""
        changed: list[str] = []
        texts: list[str] = []
        for path, value in _values(self._owners).items():
            before = self._values.get(path, value)
            is_inside = any(path.startswith(f"{parent}.") for parent in changed)
            if is_inside or not _differ(before, value):
                continue
            changed.append(path)
            is_shown = not before.startswith("<") and not value.startswith("<")
            if path not in self._reported:
                texts.append(f"{path} ({before} -> {value})" if is_shown else path)
        self._reported.update(changed)
        return texts


def _differ(before: str, value: str) -> bool:
    """Whether a value was changed, and not only opened, cached or closed."""
    is_object = before.startswith(_OBJECT) or value.startswith(_OBJECT)
    is_cached = is_object and "None" in (before, value)
    return before != value and not is_cached


def _values(owners: Mapping[str, object]) -> dict[str, str]:
    """Return each value that the objects hold as a text by its path, parents first."""
    values: dict[str, str] = {}
    visited: set[int] = set()
    to_search: deque[tuple[str, object]] = deque([("", {**owners})])
    while to_search and len(values) < _MOST_VALUES:
        place, owner = to_search.popleft()
        for name, value in _contents(owner, place):
            path = f"{place}.{name}" if place else str(name)
            values[path] = _text(value)
            if id(value) not in visited:
                visited.add(id(value))
                to_search.append((path, value))
    return values


def _contents(owner: object, place: str) -> list[tuple[Any, Any]]:
    """The items or attributes of an object; private ones of the dataset itself alone."""
    if isinstance(owner, list | tuple):
        return list(enumerate(owner)) if len(owner) <= _MOST_ITEMS else []
    if isinstance(owner, dict):
        return list(owner.items()) if len(owner) <= _MOST_ITEMS else []
    if isinstance(owner, _NOT_SEARCHED):
        return []
    attributes = list(getattr(owner, "__dict__", {}).items())
    with_private = place in ("dataset", "collate_fn")
    contents = [(name, value) for name, value in attributes if with_private or name[:1] != "_"]
    if isinstance(owner, nn.Module):
        contents += owner.named_children()
    return contents


def _text(value: object) -> str:
    """A number or a short text as it is, the length of a short list, and the identity of others."""
    if isinstance(value, int | float | None):
        return repr(value)
    if isinstance(value, str | bytes) and len(value) <= _LONGEST_TEXT:
        return repr(value)
    if isinstance(value, list | tuple) and len(value) <= _MOST_ITEMS:
        return f"<{len(value)} items>"
    return f"{_FUNCTION if callable(value) else _OBJECT} {id(value)}>"
