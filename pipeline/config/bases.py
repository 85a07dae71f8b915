"""``_base_``: a config that inherits from others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pipeline.config import aliases, yaml_text
from pipeline.config.tree import Node, each_once
from pipeline.errors import ConfigError, Fault
from pipeline.source_code.finder import resolved


def read(path: Path, faults: list[Fault], chain: tuple[Path, ...] = (), known: dict[Path, Node] | None = None) -> Node:
    """The tree of a file, merged over the bases that it names.

    Two bases of a list may not set one thing to different values, unless the file says which it is to be.

    Args:
        path: the file.
        faults: takes what is wrong in spite of which there is a tree.
        chain: the files that led here by inheriting from it.
        known: the trees of the bases that were read so far; each is read once.

    Raises:
        ConfigError: one of the files cannot be read, or they inherit from each other in a circle.
    """
    tree = yaml_text.read(path, str(path), faults)
    given = tree.value.pop("_base_", None)
    merged: Node | None = None
    clashes: list[tuple[str, Node, Node]] = []
    known = {} if known is None else known
    for item in () if given is None else given.value if isinstance(given.value, list) else [given]:
        parent = _base(item, path, faults, (*chain, path.resolve()), known)
        if merged:
            clashes += _clashes(merged, parent)
        merged = merge(merged, parent, faults) if merged else parent
    if merged is None:
        return tree if chain else _unmarked(tree, faults)
    merged = merge(merged, tree, faults)
    faults += [_clash(*each, path) for each in clashes if merged.find(each[0]) is each[2]]
    return merged


def _base(item: Node, path: Path, faults: list[Fault], chain: tuple[Path, ...], known: dict[Path, Node]) -> Node:
    """The tree of one item of ``_base_``, for the caller alone."""
    if not isinstance(item.value, str):
        raise ConfigError([item.origin.fault("_base_", f"is {item.plain()!r}; name a file, or a list of files")])
    base = path.parent / item.value
    try:
        file = resolved(base)
    except OSError as error:
        message = f"'{item.value}' can be no file: {error.strerror}; check the path"
        raise ConfigError([item.origin.fault("_base_", message)]) from error
    if file in chain:
        circle = " -> ".join(each.name for each in (*chain, file))
        raise ConfigError([item.origin.fault("_base_", f"inherits in a circle: {circle}; remove one")])
    if not base.is_file():
        remedy = yaml_text.neighbour(base) or f"; it is relative to {path.name}"
        raise ConfigError([item.origin.fault("_base_", f"no such file: {base}{remedy}")])
    if file not in known:
        known[file] = read(base, faults, chain, known)
    return known[file].copy()


def _clashes(first: Node, second: Node, address: str = "") -> Iterator[tuple[str, Node, Node]]:
    """(address, value, other value) of all that two bases set differently, neither knowing of the other's."""
    if isinstance(first.value, dict) and isinstance(second.value, dict):
        if (mark := second.value.get("_delete_")) and mark.value is True:
            return
    elif not (isinstance(first.value, list) and isinstance(second.value, list) and _named(first) and _named(second)):
        if repr(first.plain()) != repr(second.plain()) and not (_refines(first, second) or _refines(second, first)):
            yield address, first, second
        return
    there = dict(first.children())
    for part, child in second.children():
        aliases.respell(there, part, address)
        if part in there:
            yield from _clashes(there[part], child, f"{address}.{part}".lstrip("."))


def _clash(address: str, first: Node, second: Node, path: Path) -> Fault:
    what = f"is {yaml_text.brief(second.plain())}, but {first.origin} says {yaml_text.brief(first.plain())}"
    return second.origin.fault(address, f"{what}, and {path} inherits from both; set it in {path.name}")


def _refines(node: Node, other: Node) -> bool:
    """Whether a value was written over the other one: in a base that both have."""
    return any(each.origin == other.origin for each in node.earlier)


def merge(base: Node, over: Node, faults: list[Fault], address: str = "") -> Node:
    """``over`` on top of ``base``: mappings key by key, lists of named items name by name, all else replaced.

    ``_delete_: true`` in a mapping replaces the base's instead of merging into it.
    """
    earlier = each_once(*base.earlier, base, *over.earlier)
    if isinstance(over.value, dict):
        replaces = _takes_mark(over, faults)
        if isinstance(base.value, dict) and not replaces:
            there = dict(base.value)
            for name in over.value:
                aliases.respell(there, name, address)
            merged = there | _merged(there, over, faults, address)
            return Node(merged, over.origin, over.key, earlier=earlier)
    if isinstance(over.value, list) and isinstance(base.value, list) and _named(base) and _named(over):
        items = dict(base.children())
        items |= _merged(items, over, faults, address)
        return Node(list(items.values()), over.origin, over.key, earlier=earlier)
    if _refines(base, over):
        return base
    return _unmarked(over, faults).take_place_of(base)


def _merged(there: dict[str, Node], over: Node, faults: list[Fault], address: str) -> dict[str, Node]:
    """The children of ``over``, each on top of the one that is there."""
    return {
        part: merge(there[part], child, faults, f"{address}.{part}".lstrip("."))
        if part in there
        else _unmarked(child, faults)
        for part, child in over.children()
    }


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
