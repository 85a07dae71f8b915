"""Names of modules, and patterns of names: which tensors they cover."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from pipeline.errors import nearest, one_of


def covered(patterns: Sequence[str], names: Iterable[str]) -> list[str]:
    """The names that one of the patterns (``*.bias``) covers, or that are in a module of one of those names."""
    return [name for name in names if any(_covers(pattern, name) for pattern in patterns)]


def empty(patterns: Sequence[str], names: Iterable[str]) -> str | None:
    """The first pattern that covers none of the names."""
    names = list(names)
    return next((pattern for pattern in patterns if not covered([pattern], names)), None)


def near(pattern: str, names: Iterable[str]) -> str:
    """The remedy for a pattern that covers nothing: what may be meant, at any depth; else the modules at the top."""
    parts = [name.split(".") for name in names]
    anything = {".".join(each[:depth]) for each in parts for depth in range(1, len(each) + 1)}
    return nearest(pattern, anything) or one_of(pattern, {each[0] for each in parts})


def _covers(pattern: str, name: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")
