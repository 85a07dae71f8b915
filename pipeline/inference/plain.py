"""Plain values that stand in a source or a config."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from pipeline.inference.containers import Entries, Items
from pipeline.inference.values import Const, Value


def literal(value: object) -> Value:
    """A plain value, such as an argument that the config gives."""
    if isinstance(value, str | int | float | bool | None):
        return Const(frozenset({value}))
    if isinstance(value, list | tuple):
        return Items([literal(each) for each in value])
    if isinstance(value, Mapping):
        return Entries({str(name): literal(each) for name, each in value.items()})
    return None


def constant(node: ast.expr | None) -> Value:
    """A plain value that stands in the source and that nobody can change."""
    try:
        value = ast.literal_eval(node) if node else ...
    except (ValueError, TypeError, SyntaxError, RecursionError):
        return None
    return literal(value) if _is_fixed(value) else None


def _is_fixed(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_fixed, value))
    return isinstance(value, str | int | float | bool | None)
