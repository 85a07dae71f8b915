"""What the schema and the aliases say of the key at an address."""

from __future__ import annotations

from typing import NamedTuple

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from pipeline.config import aliases
from pipeline.config.schema import SECTIONS, ConfigSchema
from pipeline.config.tree import DEFAULT, Node, from_plain


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


def key(address: str) -> Key | None:
    """The key that an address leads to, or into; None: the schema has none."""
    model: type[BaseModel] = ConfigSchema
    section, _, below = address.partition(".")
    item, _, rest = below.partition(".")
    if section in SECTIONS and item and rest:
        model, address = SECTIONS[section], rest
    name, _, inside = address.partition(".")
    info = fields(model).get(name)
    return Key(model, name, info, inside) if info else None


def addresses(tree: Node) -> set[str]:
    """Every address of a config: of what is written, and of what has its default."""
    found = {address for address, _ in tree.walk()} | set(fields(ConfigSchema))
    for section, model in SECTIONS.items():
        items = tree.child(section)
        for name, item in items.children() if items and isinstance(items.value, list) else ():
            found |= {f"{section}.{name}.{each}" for each in fields(model) if isinstance(item.value, dict)}
    return found


def find(tree: Node, address: str) -> Node | None:
    """The value at an address, under whichever of its names it was written; else its default."""
    names = aliases.spellings(address)
    parent = address.rpartition(".")[0]
    section = tree.find(parent)
    if section is None or not isinstance(section.value, dict):
        return tree.find(address)
    written = [name for name in names if name in section.value]
    if written and names[0] not in aliases.ADDING:
        return section.child(written[0])
    return tree.find(address) if written else default(address)


def default(address: str) -> Node | None:
    """The default of a key; None where it has none."""
    found = key(address)
    if found is None or found.inside or found.info.is_required():
        return None
    return from_plain(found.info.get_default(call_default_factory=True), DEFAULT)
