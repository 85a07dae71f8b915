"""What the schema says of a key, by its address."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from pipeline.config import aliases, plugin_list
from pipeline.config.schema import SECTIONS, ConfigSchema
from pipeline.config.yaml_tree import DEFAULT, Node, from_plain, one_line


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
    """The key of the schema at or above an address; None if there is none."""
    model: type[BaseModel] = ConfigSchema
    section, _, below = address.partition(".")
    item, _, rest = below.partition(".")
    if section in SECTIONS and item and rest:
        model, address = SECTIONS[section], rest
    name, _, inside = address.partition(".")
    info = fields(model).get(name)
    return Key(model, name, info, inside) if info else None


def example_of(address: str, otherwise: str = ", such as {name: value}") -> str:
    """Return an example of the mapping or list at an address, for a message: ``, such as {width: 32}``.

    Args:
        address: the address.
        otherwise: what to return if its key has no example.
    """
    key = key_of(address)
    value: Any = key.info.examples[0] if key and key.info.examples else None
    for part in key.inside.split(".") if key and key.inside else ():
        value = _example_inside(value, part)
    return f", such as {one_line(value)}" if value is not None else otherwise


def _example_inside(value: Any, part: str) -> Any:
    """Return what an example has at a part of an address; names that users choose may be others there."""
    if isinstance(value, list):
        return value[0]
    if not isinstance(value, dict) or part in value:
        return (value or {}).get(part)
    first = next(iter(value.values()))
    return first if isinstance(first, dict) else None


def addresses_of(tree: Node) -> set[str]:
    """Every address of a config, with those of defaults."""
    addresses = {address for address, _ in tree.walk()} | set(fields(ConfigSchema))
    for section, model in SECTIONS.items():
        addresses |= {f"{section}.{item}.{name}" for item in tree.section(section) for name in fields(model)}
    return addresses


def full_addresses(tree: Node, short: str) -> list[str]:
    """Return the full addresses that a short one may mean, such as ``runner.t.epochs`` for ``epochs``.

    They have the parts of the short address in its order, and its last part at their end. Of keys that
    the config sets, keys that it may set, and what is inside of values, the first kind with such an
    address counts alone.
    """
    written = [address for address, node in tree.walk() if node.origin is not DEFAULT]
    inside = {address for address in written if (key := key_of(address)) and key.inside}
    kinds = ([each for each in written if each not in inside], sorted(addresses_of(tree) - inside), written)
    found = (_with_parts(short, addresses) for addresses in kinds)
    return next(filter(None, found), [])


def _with_parts(short: str, addresses: Iterable[str]) -> list[str]:
    """Return the addresses that have the parts of a short one, with its spelling of the last key."""
    *first, last = short.split(".")
    found = []
    for address in addresses:
        parent = address.rpartition(".")[0]
        canonical, *others = aliases.names_of(address)
        is_key = key_of(f"{parent}.{canonical}") is not None
        if not is_key or last not in (canonical, *others):
            continue
        parts = iter(parent.split("."))
        # `in` consumes the iterator up to the part that it finds.
        if parent and all(part in parts for part in first):
            found.append(f"{parent}.{last}")
    return [address for address in dict.fromkeys(found) if address != short]


def did_you_mean(tree: Node, short: str) -> str:
    """Return the remedy that names full addresses for a short one, with its leading ``;``.

    It is ``""`` if there is none, or if there are more than three.
    """
    found = [f"'{address}'" for address in full_addresses(tree, short)]
    return f"; did you mean {' or '.join(found)}?" if 1 <= len(found) <= 3 else ""


def find_key(tree: Node, address: str) -> Node | None:
    """The value at an address, under any of its names; else its default."""
    address = plugin_list.full_address(address)
    names, section = aliases.names_of(address), tree.find(address.rpartition(".")[0])
    if section is None or not isinstance(section.value, dict):
        return tree.find(address)
    spellings = [name for name in names if name in section.value]
    if spellings and names[0] not in aliases.ADDING:
        return section.child(spellings[0])
    return tree.find(address) if spellings else default_of(address)


def default_of(address: str) -> Node | None:
    """The default of a key; None if it has none."""
    key = key_of(address)
    if key is None or key.inside or key.info.is_required():
        return None
    return from_plain(key.info.get_default(call_default_factory=True), DEFAULT)
