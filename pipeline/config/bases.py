"""``_base_``: a config that inherits from others."""

from __future__ import annotations

from pathlib import Path

from pipeline.config import yaml_text
from pipeline.config.tree import Node
from pipeline.errors import ConfigError, Fault


def read(path: Path, faults: list[Fault], chain: tuple[Path, ...] = ()) -> Node:
    """The tree of a file, merged over the bases that it names; a later base of a list goes over an earlier one.

    Args:
        path: the file.
        faults: takes what is wrong in spite of which there is a tree.
        chain: the files that led here by inheriting from it.

    Raises:
        ConfigError: one of the files cannot be read, or they inherit from each other in a circle.
    """
    tree = yaml_text.read(path, str(path), faults)
    given = tree.value.pop("_base_", None)
    merged: Node | None = None
    for item in () if given is None else given.value if isinstance(given.value, list) else [given]:
        parent = _base(item, path, faults, (*chain, path.resolve()))
        merged = parent if merged is None else merge(merged, parent, faults)
    if merged:
        return merge(merged, tree, faults)
    return tree if chain else _unmarked(tree, faults)


def _base(item: Node, path: Path, faults: list[Fault], chain: tuple[Path, ...]) -> Node:
    """The tree of one item of ``_base_``."""
    if not isinstance(item.value, str):
        raise ConfigError([item.origin.fault("_base_", f"is {item.plain()!r}; name a file, or a list of files")])
    base = path.parent / item.value
    if base.resolve() in chain:
        circle = " -> ".join(each.name for each in (*chain, base.resolve()))
        raise ConfigError([item.origin.fault("_base_", f"inherits in a circle: {circle}; remove one")])
    if not base.is_file():
        raise ConfigError([item.origin.fault("_base_", f"no such file: {base}; it is relative to {path.name}")])
    return read(base, faults, chain)


def merge(base: Node, over: Node, faults: list[Fault]) -> Node:
    """``over`` on top of ``base``: mappings key by key, lists of named items name by name, all else replaced.

    ``_delete_: true`` in a mapping replaces the base's instead of merging into it.
    """
    if isinstance(over.value, dict):
        replaces = _takes_mark(over, faults)
        if isinstance(base.value, dict) and not replaces:
            merged = dict(base.value)
            for name, child in over.value.items():
                there = base.value.get(name)
                merged[name] = merge(there, child, faults) if there else _unmarked(child, faults)
            return Node(merged, over.origin, over.key)
    if isinstance(over.value, list) and isinstance(base.value, list) and _named(base) and _named(over):
        items = {child.name: child for child in base.value}
        for child in over.value:
            there = items.get(child.name)
            items[child.name] = merge(there, child, faults) if there else _unmarked(child, faults)
        return Node(list(items.values()), over.origin, over.key)
    return _unmarked(over, faults)


def _takes_mark(node: Node, faults: list[Fault]) -> bool:
    """Take ``_delete_`` out of a mapping, and say what it was."""
    mark = node.value.pop("_delete_", None)
    if mark and not isinstance(mark.value, bool):
        faults.append(mark.origin.fault("_delete_", f"is {mark.plain()!r}; write true, or leave it out"))
    return bool(mark and mark.value is True)


def _named(node: Node) -> bool:
    names = [child.name for child in node.value]
    return bool(names) and all(names) and len(set(names)) == len(names)


def _unmarked(node: Node, faults: list[Fault]) -> Node:
    """The node without the ``_delete_`` marks in it, which have nothing left to replace."""
    for _, child in [("", node), *node.walk()]:
        if isinstance(child.value, dict):
            _takes_mark(child, faults)
    return node
