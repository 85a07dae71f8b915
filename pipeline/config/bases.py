"""``_base_``: a config that inherits from others."""

from __future__ import annotations

from pathlib import Path

from pipeline.config import yaml_text
from pipeline.config.tree import Node
from pipeline.errors import ConfigError


def read(path: Path, chain: tuple[Path, ...] = ()) -> Node:
    """The tree of a file, merged over the bases that it names; a later base of a list goes over an earlier one.

    Raises:
        ConfigError: one of the files cannot be read, or they inherit from each other in a circle.
    """
    tree = yaml_text.read(path, str(path))
    given = tree.value.pop("_base_", None)
    if given is None:
        return tree
    merged: Node | None = None
    for item in given.value if isinstance(given.value, list) else [given]:
        if not isinstance(item.value, str):
            raise ConfigError([item.origin.fault("_base_", f"is {item.plain()!r}; name a file, or a list of files")])
        base = path.parent / item.value
        resolved = base.resolve()
        if resolved in (*chain, path.resolve()):
            circle = " -> ".join(each.name for each in (*chain, path.resolve(), resolved))
            raise ConfigError([item.origin.fault("_base_", f"inherits in a circle: {circle}; remove one")])
        if not base.is_file():
            raise ConfigError([item.origin.fault("_base_", f"no such file: {base}; it is relative to {path.name}")])
        parent = read(base, (*chain, path.resolve()))
        merged = parent if merged is None else merge(merged, parent)
    return merge(merged, tree) if merged else tree


def merge(base: Node, over: Node) -> Node:
    """``over`` on top of ``base``: mappings key by key, lists of named items name by name, all else replaced.

    ``_delete_: true`` in a mapping replaces the base's instead of merging into it.
    """
    if isinstance(over.value, dict):
        delete = over.value.pop("_delete_", None)
        if isinstance(base.value, dict) and not (delete and delete.value is True):
            merged = dict(base.value)
            for name, child in over.value.items():
                merged[name] = merge(base.value[name], child) if name in base.value else strip(child)
            return Node(merged, over.origin, over.key)
    if isinstance(over.value, list) and isinstance(base.value, list) and _named(base) and _named(over):
        items = {child.name: child for child in base.value}
        for child in over.value:
            items[child.name] = merge(items[child.name], child) if child.name in items else strip(child)
        return Node(list(items.values()), over.origin, over.key)
    return strip(over)


def _named(node: Node) -> bool:
    names = [child.name for child in node.value]
    return bool(names) and all(names) and len(set(names)) == len(names)


def strip(node: Node) -> Node:
    """The node without the ``_delete_`` marks in it, which have nothing left to replace."""
    for _, child in [("", node), *node.walk()]:
        if isinstance(child.value, dict):
            child.value.pop("_delete_", None)
    return node
