"""A config as a tree in which every value knows where it was written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.errors import ConfigError, Fault

MAX_DEPTH = 64
"""Levels of a config: what is deeper holds itself, or is meant to break something."""


@dataclass(frozen=True)
class Origin:
    """The place at which a key or value was written.

    Attributes:
        where: the file as the user would type it, ``override 'key=value'``, ``dict`` or ``default``.
        folder: what a relative path written there is relative to; None where there is no folder.
        line, column: counted from 1; 0 where there is none.
        text: the source line.
    """

    where: str
    folder: Path | None = None
    line: int = 0
    column: int = 0
    text: str = ""

    def fault(self, address: str, message: str) -> Fault:
        """A fault at this place."""
        return Fault(self.where, self.line, self.column, address, message, self.text)

    def __str__(self) -> str:
        """``config.yaml:12``."""
        return f"{self.where}:{self.line}" if self.line else self.where


DEFAULT = Origin("default")


@dataclass
class Node:
    """A value of the config: a scalar, a dict of nodes or a list of nodes.

    Attributes:
        value: the value.
        origin: where the value was written.
        key: where its key was written, for a value of a mapping.
        unexpanded: the text before ``${env:…}`` was replaced, for the config that is kept with the run.
        written: the text before any ``${…}`` was replaced; None where there was none.
        earlier: what stood here before, in bases, files and overrides; the first comes first.
    """

    value: Any
    origin: Origin
    key: Origin | None = None
    unexpanded: str | None = field(default=None, compare=False)
    written: str | None = field(default=None, compare=False)
    earlier: tuple[Node, ...] = field(default=(), compare=False)

    @property
    def name(self) -> str | None:
        """The ``name`` of an item of a list of named items."""
        named = self.value.get("name") if isinstance(self.value, dict) else None
        return named.value if named and isinstance(named.value, str) else None

    def children(self) -> Iterator[tuple[str, Node]]:
        """(address part, child) of a mapping or list; an item with a name is addressed by it."""
        if isinstance(self.value, dict):
            yield from self.value.items()
        elif isinstance(self.value, list):
            yield from ((child.name or str(index), child) for index, child in enumerate(self.value))

    def child(self, part: str) -> Node | None:
        """The child with this address part."""
        if isinstance(self.value, dict):
            found: Node | None = self.value.get(part)
            return found
        return next((child for name, child in self.children() if name == part), None)

    def find(self, address: str) -> Node | None:
        """The node at a dotted address."""
        node: Node | None = self
        for part in address.split(".") if address else ():
            node = node.child(part) if node else None
        return node

    def walk(self, address: str = "") -> Iterator[tuple[str, Node]]:
        """(address, node) of everything below, parents first."""
        for part, child in self.children():
            below = f"{address}.{part}" if address else part
            yield below, child
            yield from child.walk(below)

    def plain(self, *, expanded: bool = True) -> Any:
        """The value without its marks; ``expanded=False`` keeps ``${env:…}`` as it was written."""
        if isinstance(self.value, dict):
            return {name: child.plain(expanded=expanded) for name, child in self.value.items()}
        if isinstance(self.value, list):
            return [child.plain(expanded=expanded) for child in self.value]
        return self.value if expanded or self.unexpanded is None else self.unexpanded

    def copy(self) -> Node:
        """A tree of its own; the scalars are shared."""
        value: Any = self.value
        if isinstance(value, dict):
            value = {name: child.copy() for name, child in value.items()}
        elif isinstance(value, list):
            value = [child.copy() for child in value]
        return Node(value, self.origin, self.key, self.unexpanded, self.written, self.earlier)

    def take_place_of(self, there: Node) -> Node:
        """This node in the place of ``there``, which it remembers; so does each value in it that was there too."""
        self.earlier = each_once(*there.earlier, there, *self.earlier)
        before = dict(there.children())
        for part, child in self.children():
            if part in before:
                child.take_place_of(before[part])
        return self


def each_once(*nodes: Node) -> tuple[Node, ...]:
    """The nodes, without those that were written where one before was: several bases may have one in common."""
    kept: dict[Origin, Node] = {}
    for each in nodes:
        kept.setdefault(each.origin, each)
    return tuple(kept.values())


def from_plain(value: Any, origin: Origin, key: Origin | None = None, depth: int = 0) -> Node:
    """A tree made of plain data, every value written at ``origin``.

    Raises:
        ConfigError: it is too deep.
    """
    if depth > MAX_DEPTH:
        raise ConfigError([origin.fault("", f"more than {MAX_DEPTH} levels; make the config smaller")])
    if isinstance(value, dict):
        below = {str(name): from_plain(child, origin, origin, depth + 1) for name, child in value.items()}
        return Node(below, origin, key)
    if isinstance(value, list | tuple):
        return Node([from_plain(child, origin, None, depth + 1) for child in value], origin, key)
    return Node(value, origin, key)
