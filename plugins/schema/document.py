"""The JSON Schema of a config, for editors."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from pipeline.config import aliases
from pipeline.config.schema import SECTIONS, SLOT_KEYS, ConfigSchema

from ..shared.json_schema import properties

DIALECT = "http://json-schema.org/draft-07/schema#"

"""What the editors' YAML servers understand."""


_REFERENCE = {"type": "string", "pattern": r"\$\{"}

_BASE = {
    "description": "the config, or configs, that this one inherits from",
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
}

_DELETE = {"description": "true replaces what the base has here, instead of merging into it", "type": "boolean"}


def document() -> dict[str, Any]:
    """The JSON Schema of a config file.

    Where a value is no string, a string with a reference may stand for it. A config that inherits need not be complete.
    """
    sections = {section: _section(model, f"{section}.x") for section, model in SECTIONS.items()}
    whole = _section(ConfigSchema, "")
    for name, info in ConfigSchema.model_fields.items():
        if name in sections:
            items = {"type": "array", "items": {"$ref": f"#/definitions/{name}"}}
            whole["properties"][name] = {"description": info.description, **items}
    complete: dict[str, Any] = {
        name: {"items": {"required": section["required"]}} for name, section in sections.items()
    }
    # Slots name the class that reads them, and a converter is one.
    complete["dataset"]["items"] = {
        "required": ["name"],
        "anyOf": [{"required": [key]} for key in ("class_path", "data_converter", *SLOT_KEYS)],
    }
    return {
        "$schema": DIALECT,
        "title": "A config of the five-stage pipeline",
        "if": {"not": {"required": ["_base_"]}},
        "then": {"required": whole.pop("required"), "properties": complete},
        **whole,
        "properties": {"_base_": _BASE, **whole["properties"]},
        "definitions": {name: {**section, "required": ["name"]} for name, section in sections.items()},
    }


def _section(model: type[BaseModel], address: str) -> dict[str, Any]:
    """One mapping: its keys, each under all its names."""
    known = properties(model)
    absent = aliases.NOT_YET.get(address.partition(".")[0], ())
    for name, alias in aliases.of(address).items():
        if alias.canonical not in absent:
            known[name] = _same_as(alias, known[alias.canonical])
    required = [info.alias or name for name, info in model.model_fields.items() if info.is_required()]
    return {
        "type": "object",
        "properties": {**{name: _or_reference(schema) for name, schema in known.items()}, "_delete_": _DELETE},
        "required": required,
        "additionalProperties": False,
    }


def _same_as(alias: aliases.Alias, canonical: dict[str, Any]) -> dict[str, Any]:
    one = alias.convert(1)
    unit = "" if one == 1 else f"; 1 means '{one}'"
    schema = {key: value for key, value in canonical.items() if key not in {"default", "title"}}
    if alias.convert(True) is not True:
        unit, schema = f"; true means '{alias.convert(True)}'", {"anyOf": [{"type": "boolean"}, schema]}
    return {**schema, "description": f"the same as {alias.canonical}{unit}"}


def _or_reference(schema: dict[str, Any]) -> dict[str, Any]:
    """The same, but for a value, and each within it, a reference may stand."""
    notes = {key: value for key, value in schema.items() if key in {"description", "default"}}
    choices = [_open(choice) for choice in _choices(schema)]
    if not any(
        choice.get("type") == "string" and not {"pattern", "enum", "const"} & choice.keys() for choice in choices
    ):
        choices.append(_REFERENCE)
    return {**notes, **choices[0]} if len(choices) == 1 else {**notes, "anyOf": choices}


def _choices(schema: dict[str, Any]) -> list[dict[str, Any]]:
    if "anyOf" in schema:
        return [choice for part in schema["anyOf"] for choice in _choices(part)]
    return [{key: value for key, value in schema.items() if key not in {"title", "description", "default"}}]


def _open(schema: dict[str, Any]) -> dict[str, Any]:
    """A mapping or list in which references may stand."""
    opened = dict(schema)
    for key in {"items", "additionalProperties"} & schema.keys():
        if isinstance(schema[key], dict) and "$ref" not in schema[key]:
            opened[key] = _or_reference(schema[key])
    if "properties" in schema:
        opened["properties"] = {name: _or_reference(below) for name, below in schema["properties"].items()}
    return opened
