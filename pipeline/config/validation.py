"""A tree against the schema: typed settings, or faults in plain words at the place where each value was written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import BaseModel, ValidationError

from pipeline.config import keys
from pipeline.config.aliases import use_canonical_keys
from pipeline.config.foreign_keys import foreign_remedy
from pipeline.config.schema import SECTIONS, ConfigSchema
from pipeline.config.yaml_tree import DEFAULT, Node, from_plain
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


def validate(tree: Node) -> tuple[ConfigSchema | None, list[Fault]]:
    """The typed config, or its faults; aliases and defaults are applied to ``tree``."""
    faults = use_canonical_keys(tree)
    faults += _repeated_names(tree)
    try:
        settings = ConfigSchema.model_validate(tree.plain())
    except ValidationError as error:
        return None, faults + _explain(error, tree)
    _fill_defaults(tree, settings)
    return settings, faults


def _repeated_names(tree: Node) -> list[Fault]:
    faults = []
    for section in SECTIONS:
        items = tree.child(section)
        first: dict[str, Node] = {}
        for item in items.value if items and isinstance(items.value, list) else ():
            if item.name in first:
                message = f"the name is taken, first by {first[item.name].origin}; give each its own"
                faults.append(item.origin.fault(f"{section}.{item.name}", message))
            first[item.name] = item
    return faults


def _fill_defaults(node: Node, settings: BaseModel) -> None:
    """Add missing values, marked as defaults."""
    for name, info in type(settings).model_fields.items():
        value, key = getattr(settings, name), info.alias or name
        child = node.child(key)
        if child is None:
            node.value[key] = from_plain(value, DEFAULT)
        elif isinstance(value, list) and value and isinstance(value[0], BaseModel):
            for item, below in zip(child.value, value, strict=True):
                _fill_defaults(item, below)
        elif isinstance(value, BaseModel):
            _fill_defaults(child, value)
        elif isinstance(value, list) and isinstance(child.value, str):
            node.value[key] = replace(child, value=[Node(child.value, child.origin)])
        elif isinstance(value, str) and isinstance(child.value, str):
            node.value[key] = replace(child, value=value)


def _explain(error: ValidationError, tree: Node) -> list[Fault]:
    """The faults of a config, in the order of the file."""
    faults: dict[tuple[str, str], Fault] = {}
    for detail in error.errors():
        fault = _fault(dict(detail), tree)
        faults.setdefault((fault.address, str(fault.line)), fault)
    return sorted(faults.values(), key=lambda fault: (fault.where, fault.line, fault.column))


def _fault(detail: dict[str, Any], tree: Node) -> Fault:
    node, address = tree, ""
    model: type[BaseModel] = ConfigSchema
    for part in detail["loc"]:
        # A part may also be the name of a type.
        below = [pair for index, pair in enumerate(node.children()) if part in (index, pair[0])]
        if not below:
            continue
        name, node = below[0]
        address = f"{address}.{name}" if address else name
        model = SECTIONS.get(str(part), model) if not address.count(".") else model
    kind, last = detail["type"], str(detail["loc"][-1]) if detail["loc"] else ""
    if kind == "extra_forbidden":
        return (node.key or node.origin).fault(address, f"unknown key{_remedy(last, model, tree)}")
    if kind == "missing":
        return node.origin.fault(f"{address}.{last}" if address else last, f"required key is missing; add `{last}:`")
    examples = {"a mapping": keys.example_of(address), "a list": keys.example_of(address, otherwise="")}
    example = examples.get(_EXPECTED.get(kind, ""), "")
    return node.origin.fault(address, f"{message(detail, node.plain())}{example}")


def _remedy(key: str, model: type[BaseModel], tree: Node) -> str:
    """What to write in the place of an unknown key of a section, with its leading ``;``."""
    known = list(keys.fields(model))
    if found := foreign_remedy(key, known) or keys.did_you_mean(tree, key) or nearest(key, known):
        return found
    most = ", ".join(known) if len(known) < 12 else f"{', '.join(known[:12])}, …"
    return f"; known: {most}"


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
    if kind == "string_too_long":
        return f"has {len(value)} characters, and files are called so; write {context['max_length']} at the most"
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
