"""The entries of a config: where each key and value stands in the text, what PaddleRec read, and what is read here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import yaml

from pipeline.config.yaml_tree import Node
from pipeline.errors import ConfigError


class Scalar(NamedTuple):
    """A value without parts, at ``text[start:end]``; ``old`` is what PaddleRec read (YAML 1.1), ``new`` what is read here."""

    address: str
    line: int
    start: int
    end: int
    old: Any
    new: Any


@dataclass(eq=False)
class Entry:
    """One ``key: value`` of a mapping.

    Attributes:
        key: the key.
        address: its dotted address, an item of a list by its name.
        key_node: where PyYAML found the key.
        node: the value as PyYAML found it.
        ours: the value as it is read here.
        text: the whole config.
        flow: where the outermost ``{`` or ``[`` around the entry stands; None in block style.
        siblings: the entries of its mapping, itself among them.
    """

    key: str
    address: str
    key_node: yaml.Node
    node: yaml.Node
    ours: Node
    text: str
    flow: int | None
    siblings: list[Entry]

    @property
    def start(self) -> int:
        """Index of the key."""
        return self.key_node.start_mark.index

    @property
    def column(self) -> int:
        """How far the key is indented."""
        return self.key_node.start_mark.column

    @property
    def line(self) -> int:
        """Line of the key, counted from 1."""
        return self.key_node.start_mark.line + 1

    @property
    def end(self) -> int:
        """Index after the value."""
        return max(self.key_node.end_mark.index, _end(self.node, self.text))

    @cached_property
    def value(self) -> Any:
        """The plain value, as PaddleRec read it."""
        return construct(self.node, self.ours)

    @property
    def is_empty(self) -> bool:
        """Whether PaddleRec took it for not set."""
        return self.value in (None, "", [], {})

    @property
    def is_block(self) -> bool:
        """Whether the value is a list or mapping on lines of its own."""
        return isinstance(self.node, yaml.CollectionNode) and not self.node.flow_style

    @property
    def items(self) -> list[list[Entry]]:
        """The entries of each mapping in a list."""
        flow = _flow(self.node, self.flow)
        pairs = zip(self.node.value, self.ours.children(), strict=True)
        return [entries(node, ours, self.text, f"{self.address}.{name}", flow) for node, (name, ours) in pairs]

    @property
    def entries(self) -> list[Entry]:
        """The entries of a mapping."""
        return entries(self.node, self.ours, self.text, self.address, self.flow)

    def scalars(self) -> Iterator[Scalar]:
        """The scalars of the value."""
        return _scalars(self.node, self.ours, self.address, self.text)


def entries(node: yaml.Node, ours: Node, text: str, address: str = "", flow: int | None = None) -> list[Entry]:
    """The entries of a mapping, in the order of the text.

    Raises:
        ConfigError: a key is written with ``?``.
    """
    flow = _flow(node, flow)
    found: list[Entry] = []
    for key_node, value_node in node.value:
        key = str(key_node.value)
        below = f"{address}.{key}" if address else key
        entry = Entry(key, below, key_node, value_node, ours.value[key], text, flow, found)
        if text[entry.start - key_node.start_mark.column : entry.start].rstrip().endswith("?"):
            place = entry.ours.key or entry.ours.origin
            raise ConfigError(
                [place.fault(below, "is written with '?', which cannot be converted; write `key: value`")]
            )
        found.append(entry)
    return found


def construct(node: yaml.Node, ours: Node) -> Any:
    """The plain value of a node, as PaddleRec read it.

    Raises:
        ConfigError: YAML 1.1 makes nothing of it.
    """
    if isinstance(node, yaml.MappingNode):
        return {str(key.value): construct(value, ours.value[key.value]) for key, value in node.value}
    if isinstance(node, yaml.SequenceNode):
        return [construct(*pair) for pair in zip(node.value, ours.value, strict=True)]
    try:
        return yaml.SafeLoader("").construct_object(node)
    except (yaml.YAMLError, ValueError) as error:
        problem = str(error).splitlines()[0]
        message = f"PaddleRec could not read it: {problem}; mend it, or quote it"
        raise ConfigError([ours.origin.fault("", message)]) from error


def refuse_aliases(node: yaml.Node, ours: Node) -> None:
    """Refuse values that stand for several places of the text: an edit of one would change the others.

    Raises:
        ConfigError: there are some.
    """
    seen: set[int] = set()

    def visit(node: yaml.Node, ours: Node, address: str) -> None:
        is_merged = isinstance(node, yaml.MappingNode) and any(key.tag.endswith(":merge") for key, _ in node.value)
        if id(node) in seen or is_merged:
            message = "uses an alias (`*name` or `<<:`), which cannot be converted; write its values out"
            raise ConfigError([(ours.key or ours.origin).fault(address, message)])
        seen.add(id(node))
        below = [each[1] for each in node.value] if isinstance(node, yaml.MappingNode) else node.value
        if not isinstance(node, yaml.ScalarNode):
            for child, (name, our_child) in zip(below, ours.children(), strict=True):
                visit(child, our_child, f"{address}.{name}" if address else name)

    visit(node, ours, "")


def _flow(node: yaml.Node, outer: int | None) -> int | None:
    """Where the outermost ``{`` or ``[`` around what is in a node stands."""
    opens = isinstance(node, yaml.CollectionNode) and node.flow_style
    return node.start_mark.index if outer is None and opens else outer


def _end(node: yaml.Node, text: str) -> int:
    """Index after a value; PyYAML counts the space behind a block to it."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return max(_end(each, text) for each in (last if isinstance(last, tuple) else [last]))
    start, end = node.start_mark.index, node.end_mark.index
    return start + len(text[start:end].rstrip())


def _scalars(node: yaml.Node, ours: Node, address: str, text: str) -> Iterator[Scalar]:
    if isinstance(node, yaml.ScalarNode):
        line = node.start_mark.line + 1
        yield Scalar(address, line, node.start_mark.index, _end(node, text), construct(node, ours), ours.value)
        return
    below = [each[1] for each in node.value] if isinstance(node, yaml.MappingNode) else node.value
    for child, (name, our_child) in zip(below, ours.children(), strict=True):
        yield from _scalars(child, our_child, f"{address}.{name}", text)
