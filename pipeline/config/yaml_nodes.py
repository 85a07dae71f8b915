"""PyYAML's nodes -> a tree with marks. No tag builds an object, and what aliases expand to is bounded."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import yaml

from pipeline.config.tree import MAX_DEPTH, Node, Origin
from pipeline.errors import ConfigError, Fault

MAX_NODES = 100_000
TAG = "tag:yaml.org,2002:"


class Builder:
    """Turns PyYAML's nodes into ours, counting them as it goes."""

    def __init__(self, text: str, origin: Origin) -> None:
        self.lines = text.splitlines() or [""]
        self.origin = origin
        self.faults: list[Fault] = []
        self.count = 0

    def place(self, node: yaml.Node) -> Origin:
        """Where a node begins."""
        line, column = node.start_mark.line, node.start_mark.column
        if not self.origin.folder or self.origin.where.startswith("override '"):
            return self.origin
        text = self.lines[line] if line < len(self.lines) else ""
        return replace(self.origin, line=line + 1, column=column + 1, text=text)

    def build(self, node: yaml.Node, depth: int, key: Origin | None = None) -> Node:
        """A node of ours, with all that is in it.

        Raises:
            ConfigError: it is too large or too deep, the values of its aliases counted each time.
        """
        place = self.place(node)
        self.count += 1
        if self.count > MAX_NODES or depth > MAX_DEPTH:
            limit = f"{MAX_NODES} values" if self.count > MAX_NODES else f"{MAX_DEPTH} levels"
            raise ConfigError(
                [place.fault("", f"more than {limit} once its aliases are expanded; make the config smaller")]
            )
        if isinstance(node, yaml.MappingNode) and node.tag == TAG + "map":
            return Node(self.mapping(node, depth), place, key)
        if isinstance(node, yaml.SequenceNode) and node.tag == TAG + "seq":
            return Node([self.build(child, depth + 1) for child in node.value], place, key)
        if isinstance(node, yaml.ScalarNode):
            return Node(self.scalar(node, place), place, key)
        self.tag(node, place)
        return Node(None, place, key)

    def tag(self, node: yaml.Node, place: Origin) -> None:
        """Refuse a tag, as it was written."""
        written = node.tag.replace(TAG, "!!")
        self.faults.append(place.fault("", f"the tag '{written}' is not allowed; a config holds plain values only"))

    def mapping(self, node: yaml.MappingNode, depth: int) -> dict[str, Node]:
        """The values of a mapping: what it writes itself goes over what it merges."""
        values: dict[str, Node] = {}
        merged: dict[str, Node] = {}
        for key_node, value_node in node.value:
            place = self.place(key_node)
            if key_node.tag == TAG + "merge":
                merged |= self.merge(value_node, depth)
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                self.faults.append(place.fault("", "a key must be a word; quote it"))
                continue
            self.scalar(key_node, place)
            key = str(key_node.value)
            if key in values:
                first = values[key].key
                before = f", first on line {first.line}" if first and first.line else ""
                self.faults.append(place.fault(key, f"duplicate key{before}; remove one"))
            values[key] = self.build(value_node, depth + 1, place)
        return merged | values

    def merge(self, node: yaml.Node, depth: int) -> dict[str, Node]:
        """The mapping, or mappings, that ``<<:`` names; an earlier one wins."""
        parts = node.value if isinstance(node, yaml.SequenceNode) else [node]
        merged: dict[str, Node] = {}
        for part in parts:
            below = self.build(part, depth + 1).value
            if isinstance(below, dict):
                merged = below | merged
            else:
                self.faults.append(
                    self.place(part).fault("<<", "merges something that is not a mapping; name a mapping")
                )
        return merged

    def scalar(self, node: yaml.ScalarNode, place: Origin) -> Any:
        """The value of a scalar."""
        text, kind = node.value, node.tag.removeprefix(TAG)
        try:
            match kind:
                case "str":
                    return text
                case "null":
                    return None
                case "bool":
                    return {"true": True, "false": False}[text.lower()]
                case "int":
                    return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
                case "float":
                    return float(re.sub(r"\.(inf|nan)", r"\1", text.lower()))
        except (ValueError, KeyError):
            self.faults.append(place.fault("", f"'{text[:40]}' is no {kind}; quote it to make it a string"))
            return None
        if kind == "merge":
            return text
        self.tag(node, place)
        return None
