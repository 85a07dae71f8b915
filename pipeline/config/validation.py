"""The errors of the schema in plain words, at the place where the value was written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from pipeline.config.yaml_tree import Node
from pipeline.errors import Fault, nearest, one_of

_EXPECTED = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "string_type": "a string",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
}

_BOUNDS = {
    "greater_than": "greater than",
    "greater_than_equal": "at least",
    "less_than": "less than",
    "less_than_equal": "at most",
}


def explain(
    error: ValidationError, tree: Node, schema: type[BaseModel], sections: dict[str, type[BaseModel]]
) -> list[Fault]:
    """The faults of a config, in the order of the file."""
    faults: dict[tuple[str, str], Fault] = {}
    for detail in error.errors():
        fault = _fault(dict(detail), tree, schema, sections)
        faults.setdefault((fault.address, str(fault.line)), fault)
    return sorted(faults.values(), key=lambda fault: (fault.where, fault.line, fault.column))


def _fault(detail: dict[str, Any], tree: Node, schema: type[BaseModel], sections: dict[str, type[BaseModel]]) -> Fault:
    node, address, model = tree, "", schema
    for part in detail["loc"]:
        # A part may also be the name of a type, with nothing below it.
        below = [pair for index, pair in enumerate(node.children()) if part in (index, pair[0])]
        if not below:
            break
        name, node = below[0]
        address = f"{address}.{name}" if address else name
        model = sections.get(str(part), model) if not address.count(".") else model
    kind, last = detail["type"], str(detail["loc"][-1]) if detail["loc"] else ""
    if kind == "extra_forbidden":
        known = [info.alias or name for name, info in model.model_fields.items()]
        most = ", ".join(known) if len(known) < 12 else f"{', '.join(known[:12])}, …"
        return (node.key or node.origin).fault(address, f"unknown key{nearest(last, known) or f'; known: {most}'}")
    if kind == "missing":
        return node.origin.fault(f"{address}.{last}" if address else last, f"required key is missing; add `{last}:`")
    return node.origin.fault(address, message(detail, node.plain()))


def message(detail: Mapping[str, Any], value: Any) -> str:
    """What one of pydantic's errors says of a value, in our words."""
    kind, context = detail["type"], detail.get("ctx", {})
    text = repr(value) if len(repr(value)) < 60 else f"{repr(value)[:57]}…"
    if kind == "value_error":
        return str(context["error"])
    if kind in _EXPECTED:
        return f"is {text}, a {_kind(value)}; write {_EXPECTED[kind]}"
    if kind == "literal_error":
        allowed = [word.strip("' ") for word in str(context["expected"]).replace(" or ", ",").split(",")]
        return f"is {text}{one_of(str(value), allowed)}"
    if kind in _BOUNDS:
        return f"is {text}; it must be {_BOUNDS[kind]} {next(iter(context.values())):.12g}"
    if kind == "string_pattern_mismatch":
        return f"is {text}; use letters, digits, '_' and '-' only"
    if kind == "too_short":
        return "is empty; add at least one item"
    return f"is {text}: {detail['msg']}; change it"


def _kind(value: Any) -> str:
    return {
        "str": "string",
        "int": "whole number",
        "float": "fraction",
        "bool": "truth value",
        "NoneType": "null",
        "dict": "mapping",
    }.get(type(value).__name__, type(value).__name__)
