"""YAML text -> a tree with marks, and plain values -> YAML text. Safely: no tag builds an object, aliases and depth are bounded.

The scalars are those of YAML 1.2's core schema: ``1e-3`` is a float; ``on``, ``yes``, ``1_000`` and dates are strings;
``010`` is ten and ``0o10`` eight.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from pipeline.config.tree import Node, Origin
from pipeline.errors import ConfigError, Fault

MAX_BYTES = 1 << 20
MAX_NODES = 100_000
MAX_DEPTH = 64

_NUMBERS = "-+.0123456789"
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_NULL = re.compile(r"~|null|Null|NULL|")
_BREAKS = frozenset("\n\r\x85\u2028\u2029")
_TAG = "tag:yaml.org,2002:"


class _Loader(yaml.SafeLoader):
    """PyYAML's safe composer, with the core schema's scalars."""


class _Dumper(yaml.SafeDumper):
    """Quotes the strings that a reader of YAML 1.1 or of 1.2 would take for something else."""


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("bool", _BOOL, "tTfF"),
    ("int", _INT, _NUMBERS),
    ("float", _FLOAT, _NUMBERS),
    ("null", _NULL, ["~", "n", "N", ""]),
    ("merge", re.compile("<<"), "<"),
):
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_TAG + _tag, re.compile(rf"(?:{_pattern.pattern})\Z"), list(_first))


def _represent_string(dumper: _Dumper, value: str) -> yaml.Node:
    """Line breaks are escaped: PyYAML's other styles spread them over lines, and lose the rare ones."""
    return dumper.represent_scalar(_TAG + "str", value, '"' if _BREAKS & set(value) else None)


_Dumper.add_representer(str, _represent_string)


def read(path: Path, where: str, faults: list[Fault] | None = None) -> Node:
    """The tree of a YAML file.

    Args:
        path: the file.
        where: what messages call it.
        faults: takes the faults in spite of which there is a tree; without it they are raised too.

    Raises:
        ConfigError: it cannot be read, is no YAML, or is no mapping.
    """
    origin = Origin(where, path.parent)
    try:
        if path.is_dir():
            raise ConfigError([origin.fault("", "is a folder, not a config file; name the file in it")])
        if path.stat().st_size > MAX_BYTES:
            size = f"has {path.stat().st_size} bytes, more than the {MAX_BYTES} of a config"
            raise ConfigError([origin.fault("", f"{size}; name the right file")])
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError([origin.fault("", f"cannot be read: {error.strerror}; check the path")]) from error
    except UnicodeDecodeError as error:
        raise ConfigError([origin.fault("", f"is not UTF-8 at byte {error.start}; save it as UTF-8")]) from error
    node = parse(text, origin, faults)
    if not isinstance(node.value, dict):
        kind = "is empty" if node.value is None else f"holds a {type(node.value).__name__}"
        raise ConfigError([origin.fault("", f"{kind}, not a mapping; write `key: value` lines")])
    return node


def parse(text: str, origin: Origin, faults: list[Fault] | None = None) -> Node:
    """The tree of YAML text written at ``origin`` (its line and column are filled in here).

    Args:
        text: the YAML.
        origin: where it stands.
        faults: takes duplicate keys and tags; without it they are raised too.

    Raises:
        ConfigError: syntax, a bomb.
    """
    try:
        root = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        raise ConfigError([_syntax(error, text, origin)]) from error
    except RecursionError as error:
        raise ConfigError([origin.fault("", f"more than {MAX_DEPTH} levels; make the config smaller")]) from error
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError([origin.fault("", f"is no YAML: {str(error).splitlines()[0]}; mend it")]) from error
    if root is None:
        return Node(None, origin)
    builder = _Builder(text, origin)
    node = builder.build(root, 0)
    if builder.faults and faults is None:
        raise ConfigError(builder.faults)
    if faults is not None:
        faults += builder.faults
    return node


def dump(value: Any, *, one_line: bool = False) -> str:
    """YAML text that ``parse`` reads back as the same plain value; ``one_line`` keeps it on one line."""
    text: str = yaml.dump(
        value,
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        width=float("inf") if one_line else 120,
        default_flow_style=one_line,
    )
    return text


def _syntax(error: yaml.MarkedYAMLError, text: str, origin: Origin) -> Fault:
    mark = error.problem_mark or error.context_mark
    line = mark.line if mark else 0
    lines = text.splitlines()
    source = lines[line] if line < len(lines) else ""
    remedy = "indent with spaces, not tabs" if "\t" in source else "mend the YAML"
    problem = error.problem or error.context or "syntax error"
    if "single document" in (error.context or ""):
        problem, remedy = "holds several YAML documents", "keep one"
    place = replace(origin, line=line + 1, column=(mark.column if mark else 0) + 1, text=source)
    return place.fault("", f"{problem}; {remedy}")


class _Builder:
    """Turns PyYAML's nodes into ours, counting them as it goes."""

    def __init__(self, text: str, origin: Origin) -> None:
        self.lines = text.splitlines() or [""]
        self.origin = origin
        self.faults: list[Fault] = []
        self.count = 0

    def place(self, node: yaml.Node) -> Origin:
        line, column = node.start_mark.line, node.start_mark.column
        if not self.origin.folder or self.origin.where.startswith("override '"):
            return self.origin
        text = self.lines[line] if line < len(self.lines) else ""
        return replace(self.origin, line=line + 1, column=column + 1, text=text)

    def build(self, node: yaml.Node, depth: int, key: Origin | None = None) -> Node:
        place = self.place(node)
        self.count += 1
        if self.count > MAX_NODES or depth > MAX_DEPTH:
            limit = f"{MAX_NODES} values" if self.count > MAX_NODES else f"{MAX_DEPTH} levels"
            raise ConfigError(
                [place.fault("", f"more than {limit} once its aliases are expanded; make the config smaller")]
            )
        if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
            return Node(self.mapping(node, depth), place, key)
        if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
            return Node([self.build(child, depth + 1) for child in node.value], place, key)
        if isinstance(node, yaml.ScalarNode):
            return Node(self.scalar(node, place), place, key)
        self.tag(node, place)
        return Node(None, place, key)

    def tag(self, node: yaml.Node, place: Origin) -> None:
        """Refuse a tag, as it was written."""
        written = node.tag.replace(_TAG, "!!")
        self.faults.append(place.fault("", f"the tag '{written}' is not allowed; a config holds plain values only"))

    def mapping(self, node: yaml.MappingNode, depth: int) -> dict[str, Node]:
        values: dict[str, Node] = {}
        merged: dict[str, Node] = {}
        for key_node, value_node in node.value:
            place = self.place(key_node)
            if key_node.tag == _TAG + "merge":
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
        text, kind = node.value, node.tag.removeprefix(_TAG)
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
