"""``KEY=VALUE``: a value set by its address, on the command line or from Python."""

from __future__ import annotations

import re
from pathlib import Path

from pipeline.config import aliases, yaml_text
from pipeline.config.tree import MAX_DEPTH, Node, Origin
from pipeline.errors import ConfigError, Fault, one_of

_PLACEHOLDER = re.compile(r"\{(workspace|run_dir)\}|\{\w+\}[^\s#]")
"""A placeholder at the beginning, known or misspelt, which YAML would take for the brace of a mapping."""


def apply(override: str, tree: Node) -> list[Fault]:
    """Set in ``tree`` what an override says, and what is wrong with it; a relative path in it belongs to where one types."""
    address, equals, text = override.partition("=")
    origin = Origin(f"override '{override}'", Path())
    if not equals or not address:
        return [origin.fault("", "is no override; write KEY=VALUE, e.g. runner.train_runner.epochs=3")]
    if address.count(".") >= MAX_DEPTH:
        return [origin.fault("", f"more than {MAX_DEPTH} levels; use a shorter address")]
    try:
        value = Node(text, origin) if _PLACEHOLDER.match(text) else yaml_text.parse(text, origin)
        _set(tree, address, value)
    except ConfigError as error:
        return [origin.fault(address, fault.message) for fault in error.faults]
    return []


def _set(tree: Node, address: str, value: Node) -> None:
    """Put a value where it belongs.

    Raises:
        ConfigError: there is nothing to put it in.
    """
    parent, _, key = address.rpartition(".")
    node = _parent(tree, parent, value.origin)
    if isinstance(node.value, dict):
        value.key = value.origin
        aliases.respell(node.value, key, parent)
        there = node.value.get(key)
        node.value[key] = value.take_place_of(there) if there else value
        return
    names = [name for name, _ in node.children()]
    if key not in names:
        raise ConfigError([value.origin.fault(address, f"there is no '{key}' in this list{one_of(key, names)}")])
    index = names.index(key)
    node.value[index] = value.take_place_of(node.value[index])


def _parent(tree: Node, address: str, origin: Origin) -> Node:
    """The mapping or list at an address, made where a mapping may have any key."""
    node, above = tree, ""
    for part in address.split(".") if address else ():
        inside, above = above, f"{above}.{part}".lstrip(".")
        below = node.child(part)
        if isinstance(node.value, dict) and (inside or part == "hyper_parameters"):
            if below is None:
                below = node.value[part] = Node({}, origin, origin)
            elif below.value is None:
                below = node.value[part] = Node({}, origin, origin).take_place_of(below)
        if below is None:
            known = one_of(part, [name for name, _ in node.children()])
            raise ConfigError([origin.fault("", f"there is no '{above}' to set this in{known}")])
        if not isinstance(below.value, dict | list):
            what = f"'{above}' is {below.value!r}, with nothing in it to set"
            raise ConfigError([origin.fault("", f"{what}; set '{above}' itself")])
        node = below
    return node
