"""What is changed in a dataset after persistent workers have taken their copies of it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

# How many attributes and items may lead to a value.
_DEPTH = 5
# Longer lists and dicts are not searched.
_MOST_ITEMS = 100
_LONGEST_TEXT = 1000

_OBJECT = "<object"


class WorkerCopies:
    """The values that objects have when workers take their copies of them.

    A number or a string is compared by its value, any other object by its identity. So a tensor
    in shared memory may be changed in place. Attributes, lists and dicts are searched.

    Args:
        owners: the objects by name, such as the dataset and the collate function.
    """

    def __init__(self, **owners: object) -> None:
        self._owners = owners
        self._values = dict(_values(owners))
        self._reported: set[str] = set()

    def changes(self) -> list[str]:
        """Return what was changed since then, such as ``dataset.level (1 -> 2)``, each once."""
        changed: list[str] = []
        texts: list[str] = []
        for path, value in _values(self._owners):
            before = self._values.get(path, _OBJECT)
            is_inside = any(path.startswith(f"{parent}.") for parent in changed)
            if before == value or is_inside:
                continue
            changed.append(path)
            is_shown = not before.startswith(_OBJECT) and not value.startswith(_OBJECT)
            if path not in self._reported:
                texts.append(f"{path} ({before} -> {value})" if is_shown else path)
        self._reported.update(changed)
        return texts


def _values(owners: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Yield (path, value as text) of everything that the objects hold, parents first."""
    yield from _values_in(owners, "", 0, set())


def _values_in(
    owner: object,
    place: str,
    depth: int,
    visited: set[int],
) -> Iterator[tuple[str, str]]:
    for name, value in _contents(owner):
        path = f"{place}.{name}" if place else str(name)
        yield path, _text(value)
        if depth + 1 < _DEPTH and id(value) not in visited:
            visited.add(id(value))
            yield from _values_in(value, path, depth + 1, visited)


def _contents(owner: object) -> list[tuple[Any, Any]]:
    if isinstance(owner, list | tuple):
        return list(enumerate(owner)) if len(owner) <= _MOST_ITEMS else []
    if isinstance(owner, dict):
        return list(owner.items()) if len(owner) <= _MOST_ITEMS else []
    if isinstance(owner, nn.Module | random.Random | type):
        return []
    return list(getattr(owner, "__dict__", {}).items())


def _text(value: object) -> str:
    """A number or a short string as it is, and the identity of anything else."""
    is_short = not isinstance(value, str | bytes) or len(value) <= _LONGEST_TEXT
    is_plain = isinstance(value, str | bytes | int | float | None)
    return repr(value) if is_plain and is_short else f"{_OBJECT} {id(value)}>"
