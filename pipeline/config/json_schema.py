"""What the schema says of a key, and the JSON Schema for editors."""

from __future__ import annotations

from typing import Any, NamedTuple

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema

from pipeline.config import aliases
from pipeline.config.schema import SECTIONS, ConfigSchema
from pipeline.config.yaml_tree import DEFAULT, Node, from_plain


class Key(NamedTuple):
    """A key of the schema.

    Attributes:
        model: the section that it belongs to.
        name: its name in a config.
        info: its type, default and meaning.
        inside: what the address names in its value; ``""`` for the value itself.
    """

    model: type[BaseModel]
    name: str
    info: FieldInfo
    inside: str


def fields(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Name in a config -> field, for the keys of a section."""
    return {info.alias or name: info for name, info in model.model_fields.items()}


def key_of(address: str) -> Key | None:
    """The key that an address leads to, or into; None: the schema has none."""
    model: type[BaseModel] = ConfigSchema
    section, _, below = address.partition(".")
    item, _, rest = below.partition(".")
    if section in SECTIONS and item and rest:
        model, address = SECTIONS[section], rest
    name, _, inside = address.partition(".")
    info = fields(model).get(name)
    return Key(model, name, info, inside) if info else None


def addresses_of(tree: Node) -> set[str]:
    """Every address of a config: of what is written, and of what has its default."""
    addresses = {address for address, _ in tree.walk()} | set(fields(ConfigSchema))
    for section, model in SECTIONS.items():
        addresses |= {f"{address}.{name}" for address, _ in tree.items(section) for name in fields(model)}
    return addresses


def find_key(tree: Node, address: str) -> Node | None:
    """The value at an address, under whichever of its names it was written; else its default."""
    names = aliases.names_of(address)
    parent = address.rpartition(".")[0]
    section = tree.find(parent)
    if section is None or not isinstance(section.value, dict):
        return tree.find(address)
    written = [name for name in names if name in section.value]
    if written and names[0] not in aliases.ADDING:
        return section.child(written[0])
    return tree.find(address) if written else default_of(address)


def default_of(address: str) -> Node | None:
    """The default of a key; None where it has none."""
    key = key_of(address)
    if key is None or key.inside or key.info.is_required():
        return None
    return from_plain(key.info.get_default(call_default_factory=True), DEFAULT)


DIALECT = "http://json-schema.org/draft-07/schema#"

"""What the editors' YAML servers understand."""


_REFERENCE = {"type": "string", "pattern": r"\$\{"}

_BASE = {
    "description": "the config, or configs, that this one inherits from",
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
}

_DELETE = {"description": "true replaces what the base has here, instead of merging into it", "type": "boolean"}


class _Untitled(GenerateJsonSchema):
    """Without a title for each key that only repeats its name."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


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
    complete = {name: {"items": {"required": section["required"]}} for name, section in sections.items()}
    return {
        "$schema": DIALECT,
        "title": "A config of the five-stage pipeline",
        "if": {"not": {"required": ["_base_"]}},
        "then": {"required": whole.pop("required"), "properties": complete},
        **whole,
        "properties": {"_base_": _BASE, **whole["properties"]},
        "definitions": {name: {**section, "required": ["name"]} for name, section in sections.items()},
    }


def properties(model: type[BaseModel]) -> dict[str, Any]:
    """Key -> what the schema says of it, for a section."""
    known: dict[str, Any] = model.model_json_schema(schema_generator=_Untitled)["properties"]
    return known


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
    if not any(choice.get("type") == "string" and "pattern" not in choice for choice in choices):
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


def in_words(schema: dict[str, Any]) -> str:
    """What a value may be: ``integer above 0, or null``."""
    if "title" in schema:
        return str(schema["title"])
    if "anyOf" in schema:
        kinds = [in_words(choice) for choice in schema["anyOf"]]
        return ", or ".join(kinds)
    if "enum" in schema:
        return " or ".join(", ".join(schema["enum"]).rsplit(", ", 1))
    kind = {"object": "mapping", "array": "list", "boolean": "true or false"}.get(schema["type"], schema["type"])
    if "items" in schema and "$ref" not in schema["items"]:
        kind += f" of {in_words(schema['items'])}s"
    words = {"exclusiveMinimum": "above", "minimum": "from", "exclusiveMaximum": "below"}
    return " ".join([kind, *(f"{word} {schema[bound]}" for bound, word in words.items() if bound in schema)])
