"""YAML text -> a tree of values that know their line and column, and back."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from pipeline.errors import ConfigError, Fault, nearest

# Levels of a config: what is deeper holds itself, or is meant to break something.
MAX_DEPTH = 64


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

    @property
    def is_override(self) -> bool:
        """Whether it is an override, and no file."""
        return self.where.startswith("override ")

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
        name = self.value.get("name") if isinstance(self.value, dict) else None
        return name.value if name and isinstance(name.value, str) else None

    def children(self) -> Iterator[tuple[str, Node]]:
        """(address part, child) of a mapping or list; an item with a name has it as its part."""
        if isinstance(self.value, dict):
            yield from self.value.items()
        elif isinstance(self.value, list):
            yield from ((child.name or str(index), child) for index, child in enumerate(self.value))

    def child(self, part: str) -> Node | None:
        """The child with this address part."""
        if isinstance(self.value, dict):
            child: Node | None = self.value.get(part)
            return child
        return next((child for name, child in self.children() if name == part), None)

    def section(self, name: str) -> dict[str, Node]:
        """Name -> item, for the mappings in a list of the config, such as ``runner``."""
        node = self.child(name)
        children = node.children() if node and isinstance(node.value, list) else ()
        return {part: item for part, item in children if isinstance(item.value, dict)}

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
        """The plain value; ``expanded=False`` keeps ``${env:…}`` as it was written."""
        if isinstance(self.value, dict):
            return {name: child.plain(expanded=expanded) for name, child in self.value.items()}
        if isinstance(self.value, list):
            return [child.plain(expanded=expanded) for child in self.value]
        return self.value if expanded or self.unexpanded is None else self.unexpanded

    def copy(self) -> Node:
        """A copy of the tree; the scalars are shared."""
        value: Any = self.value
        if isinstance(value, dict):
            value = {name: child.copy() for name, child in value.items()}
        elif isinstance(value, list):
            value = [child.copy() for child in value]
        return Node(value, self.origin, self.key, self.unexpanded, self.written, self.earlier)

    def map_texts(self, function: Callable[[str, Node], str]) -> None:
        """Replace each string below by what a function makes of its address and node."""
        for address, node in self.walk():
            if isinstance(node.value, str):
                node.value = function(address, node)

    def expand(self, value: Any, unexpanded: str | None, folder: Path | None = None) -> None:
        """Replace a text with references by its value; the text is kept as ``written``.

        Args:
            value: what the references give.
            unexpanded: what is kept with the run in its place; None keeps the value.
            folder: of the file that wrote the beginning of the value; None is that of the text.
        """
        self.written = self.value
        self.value = value
        self.unexpanded = unexpanded
        if folder:
            self.origin = replace(self.origin, folder=folder)

    def take_place_of(self, other: Node) -> Node:
        """This node in the place of ``other``, which it remembers; so does each value in it that was there too."""
        self.earlier = unique_nodes(*other.earlier, other, *self.earlier)
        children = dict(other.children())
        for part, child in self.children():
            if part in children:
                child.take_place_of(children[part])
        return self


def unique_nodes(*nodes: Node) -> tuple[Node, ...]:
    """The nodes, without repeated ones: several bases may share a base."""
    return tuple({node.origin: node for node in nodes}.values())


# Larger integers do not fit into a float, and Python refuses to print integers of some thousand digits.
MAX_BITS = 1000

_TOO_LARGE = f"is an integer of more than {MAX_BITS} bits; write a smaller one, or quote it to make it a string"


def from_plain(value: Any, origin: Origin, key: Origin | None = None, depth: int = 0) -> Node:
    """A tree from plain data, with ``origin`` for every value.

    Raises:
        ConfigError: it is too deep, or an integer is too large.
    """
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise ConfigError([origin.fault("", f"{hex(value)[:40]}… {_TOO_LARGE}")])
    if depth > MAX_DEPTH:
        raise ConfigError([origin.fault("", f"more than {MAX_DEPTH} levels; make the config smaller")])
    if isinstance(value, dict):
        below = {str(name): from_plain(child, origin, origin, depth + 1) for name, child in value.items()}
        return Node(below, origin, key)
    if isinstance(value, list | tuple):
        return Node([from_plain(child, origin, None, depth + 1) for child in value], origin, key)
    return Node(value, origin, key)


MAX_NODES = 100_000

TAG = "tag:yaml.org,2002:"


class Builder:
    """Turns PyYAML's nodes into ours, and counts them."""

    def __init__(self, text: str, origin: Origin) -> None:
        self.text = text
        self.lines = text.splitlines()
        self.origin = origin
        self.faults: list[Fault] = []
        self.count = 0

    def origin_of(self, node: yaml.Node) -> Origin:
        """The place where a node begins."""
        if not self.origin.folder or self.origin.is_override:
            return self.origin
        return _origin_at(self.origin, node.start_mark, self.lines)

    def build(self, node: yaml.Node, depth: int, key: Origin | None = None) -> Node:
        """Our node of a YAML node, with its children.

        Raises:
            ConfigError: it is too large or too deep, the values of its aliases counted each time.
        """
        place = self.origin_of(node)
        self.count += 1
        if self.count > MAX_NODES or depth > MAX_DEPTH:
            limit = f"{MAX_NODES} values" if self.count > MAX_NODES else f"{MAX_DEPTH} levels"
            message = f"more than {limit} once its aliases are expanded; make the config smaller"
            raise ConfigError([place.fault("", message)])
        if isinstance(node, yaml.MappingNode) and node.tag == TAG + "map":
            written = self.text[node.start_mark.index : node.end_mark.index]
            if written in ("{workspace}", "{run_dir}"):
                self.faults.append(place.fault("", _missing_quotes(written)))
                return Node(written, place, key)
            return Node(self.mapping(node, depth), place, key)
        if isinstance(node, yaml.SequenceNode) and node.tag == TAG + "seq":
            return Node([self.build(child, depth + 1) for child in node.value], place, key)
        if isinstance(node, yaml.ScalarNode):
            return Node(self.scalar(node, place), place, key)
        self.tag(node, place)
        return Node(None, place, key)

    def tag(self, node: yaml.Node, place: Origin) -> None:
        """Refuse a tag."""
        tag = node.tag.replace(TAG, "!!")
        self.faults.append(place.fault("", f"the tag '{tag}' is not allowed; a config holds plain values only"))

    def mapping(self, node: yaml.MappingNode, depth: int) -> dict[str, Node]:
        """The values of a mapping; its own win over merged ones."""
        values: dict[str, Node] = {}
        merged: dict[str, Node] = {}
        for key_node, value_node in node.value:
            place = self.origin_of(key_node)
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
        """The mapping or mappings of ``<<:``; an earlier one wins."""
        merged: dict[str, Node] = {}
        for part in node.value if isinstance(node, yaml.SequenceNode) else [node]:
            below = self.build(part, depth + 1)
            if isinstance(below.value, dict):
                merged = below.value | merged
            else:
                self.faults.append(below.origin.fault("<<", "merges something that is not a mapping; name a mapping"))
        return merged

    def scalar(self, node: yaml.ScalarNode, place: Origin) -> Any:
        """The value of a scalar."""
        text, kind = node.value, node.tag.removeprefix(TAG)
        try:
            match kind:
                case "str" | "merge":
                    return text
                case "null":
                    return None
                case "bool":
                    return {"true": True, "false": False}[text.lower()]
                case "int":
                    return _integer(text)
                case "float":
                    return float(re.sub(r"\.(inf|nan)", r"\1", text.lower()))
        except (ValueError, KeyError):
            self.faults.append(place.fault("", f"'{text[:40]}' is no {kind}; quote it to make it a string"))
        except OverflowError:
            self.faults.append(place.fault("", f"'{text[:40]}…' {_TOO_LARGE}"))
        else:
            self.tag(node, place)
        return None


def _integer(text: str) -> int:
    """The value of an integer of the core schema.

    Raises:
        ValueError: it is none.
        OverflowError: it is too large.
    """
    if len(text) > MAX_BITS:
        raise OverflowError
    value = int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
    if value.bit_length() > MAX_BITS:
        raise OverflowError
    return value


MAX_BYTES = 1 << 20


_NUMBERS = "-+.0123456789"

_FLOAT = r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"

_BREAKS = frozenset("\n\r\x85\u2028\u2029")


_KINDS = {list: "a list", str: "a string", bool: "a truth value", int: "a number", float: "a number"}


class _Loader(yaml.SafeLoader):
    """PyYAML's safe composer, with the core schema's scalars."""


class _Dumper(yaml.SafeDumper):
    """Quotes the strings that YAML 1.1 or 1.2 would read as another type."""


_Loader.yaml_implicit_resolvers = {}

for _tag, _pattern, _first in (
    ("bool", "true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", "[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", _NUMBERS),
    ("float", _FLOAT, _NUMBERS),
    ("null", "~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("merge", "<<", "<"),
):
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(TAG + _tag, re.compile(rf"(?:{_pattern})\Z"), list(_first))


def _represent_string(dumper: _Dumper, value: str) -> yaml.Node:
    """Line breaks are escaped: PyYAML's other styles spread them over lines, and lose the rare ones."""
    return dumper.represent_scalar(TAG + "str", value, '"' if _BREAKS & set(value) else None)


_Dumper.add_representer(str, _represent_string)


def read_file(path: Path, faults: list[Fault]) -> Node:
    """The tree of a YAML file.

    Args:
        path: the file.
        faults: takes the faults in spite of which there is a tree.

    Raises:
        ConfigError: it cannot be read, is no YAML, or is no mapping.
    """
    origin = Origin(str(path), path.parent)
    try:
        if path.is_dir():
            raise ConfigError([origin.fault("", "is a folder, not a config file; name the file in it")])
        with path.open("rb") as file:
            # What has no size, like a pipe, is bounded too.
            size, content = path.stat().st_size, file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # a NUL in the path is a ValueError
        remedy = "; make it readable" if isinstance(error, PermissionError) else neighbour(path) or "; check the path"
        raise ConfigError([origin.fault("", f"cannot be read: {getattr(error, 'strerror', error)}{remedy}")]) from error
    if len(content) > MAX_BYTES:
        much = f"has {max(size, len(content))} bytes, more than the {MAX_BYTES} of a config"
        raise ConfigError([origin.fault("", f"{much}; name the right file")])
    node = parse(_decoded(content, origin), origin, faults)
    if not isinstance(node.value, dict):
        kind = "is empty" if node.value is None else f"holds {_KINDS[type(node.value)]}"
        raise ConfigError([origin.fault("", f"{kind}, not a mapping; write `key: value` lines")])
    return node


def neighbour(path: Path) -> str:
    """The remedy for a missing file: the one with the nearest name."""
    # Of os.path, which says of a name too long that nothing is there.
    if not os.path.isdir(path.parent):
        return ""
    # The suffix alone makes no two names alike.
    alike = [file.name for file in path.parent.glob("*.y*ml") if nearest(path.stem, [file.stem])]
    # One that is there, and cannot be read, is not misspelt.
    return "" if path.name in alike else nearest(path.name, sorted(alike))


def _decoded(content: bytes, origin: Origin) -> str:
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        what = f"is not UTF-8: byte {error.start + 1} is {error.object[error.start]:#04x}"
        raise ConfigError([replace(origin, line=line).fault("", f"{what}; save the file as UTF-8")]) from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


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
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        what = f"holds the character {error.character:#06x}, which no YAML may hold"
        raise ConfigError([replace(origin, line=line).fault("", f"{what}; take it out")]) from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise ConfigError([origin.fault("", f"is no YAML: {str(error).splitlines()[0]}; mend it")]) from error
    if root is None:
        return Node(None, origin)
    builder = Builder(text, origin)
    node = builder.build(root, 0)
    if faults is not None:
        faults += builder.faults
    elif builder.faults:
        raise ConfigError(builder.faults)
    return node


def dump(value: Any, *, flow: bool = False) -> str:
    """YAML text that ``parse`` reads back as the same plain value; ``flow`` keeps it on one line."""
    width = float("inf") if flow else 120
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=width, default_flow_style=flow)


def one_line(value: Any) -> str:
    """YAML text of one line."""
    return dump(value, flow=True).removesuffix("\n...\n").strip()


def brief(value: Any) -> str:
    """The same, cut where it is long, for messages."""
    text = one_line(value)
    return text if len(text) < 60 else f"{text[:57]}…"


def differences(before: Any, now: Any, address: str = "") -> Iterator[str]:
    """``runner.t.epochs: 2 -> 3`` for each plain value that differs; items of lists with names count by their names."""
    before, now = _by_name(before), _by_name(now)
    if not (isinstance(before, dict) and isinstance(now, dict)):
        if one_line(before) != one_line(now):
            yield f"{address}: {brief(before)} -> {brief(now)}"
        return
    for key in before | now:
        below = f"{address}.{key}" if address else str(key)
        if key not in now:
            yield f"{below}: gone, it was {brief(before[key])}"
        elif key not in before:
            yield f"{below}: new, {brief(now[key])}"
        else:
            yield from differences(before[key], now[key], below)
    orders = [[str(key) for key in mapping if key in before and key in now] for mapping in (before, now)]
    if address in {"runner", "phase", "plugins"} and orders[0] != orders[1]:
        yield f"{address}: the order was {', '.join(orders[0])} -> {', '.join(orders[1])}"


def _by_name(value: Any) -> Any:
    """A list of items with names as a mapping; anything else as it is."""
    if isinstance(value, list) and value and all(isinstance(item, dict) and "name" in item for item in value):
        return {str(item["name"]): item for item in value}
    return value


# Quoted text and comments, which are skipped, and then words with the braces of a placeholder or reference.
_WORDS_WITH_BRACES = re.compile(
    r"""
    "(?:\\.|[^"\\])*" | '[^']*' | (?<!\S)\#.*
    | (?P<word> [^\s,\[\]{}"']* (?: \$\{[^\s{}]*\} | \{\w+\} ) (?: [^\s,\[\]{}"'] | \$?\{[^\s{}]*\} )* )
    """,
    re.VERBOSE,
)

# What PyYAML says of plain text that begins with one of YAML's special characters.
_SPECIAL_START = re.compile(r"cannot start any token|undefined alias|expected alphabetic or numeric character")


def _missing_quotes(word: str) -> str:
    return f'YAML takes the braces of {word} for a mapping; put the value in quotes: "{word}"'


def _unquoted(line: str, column: int) -> str:
    """Return the word with braces at a column, counted from 0, of a line that is no YAML.

    It is ``""`` if there is none. The time for the search grows with the square of the line's length,
    so a long line is not searched.
    """
    if len(line) > 2000:
        return ""
    for match in _WORDS_WITH_BRACES.finditer(line):
        is_here = match.start() <= column and not line[match.end() : column].strip()
        if match["word"] and is_here:
            return match["word"].removesuffix(":")
    return ""


def _syntax(error: yaml.MarkedYAMLError, text: str, origin: Origin) -> Fault:
    assert error.problem_mark, "every error of the scanner, the parser and the composer has one"
    place, line = _origin_at(origin, error.problem_mark, text.splitlines()), error.problem_mark.line
    problem = error.problem or ""
    if word := _unquoted(place.text, error.problem_mark.column):
        return place.fault("", _missing_quotes(word))
    if "\t" in place.text:
        remedy = "indent with spaces, not tabs"
    elif _SPECIAL_START.search(problem):
        remedy = "put the value in quotes"
    else:
        remedy = "mend the YAML"
    if "single document" in (error.context or ""):
        problem, remedy = "holds several YAML documents", "keep one"
    elif error.context_mark and error.context_mark.line < line:
        problem += f", in what begins on line {error.context_mark.line + 1}"
    return place.fault("", f"{problem}; {remedy}")


def _origin_at(origin: Origin, mark: yaml.Mark, lines: list[str]) -> Origin:
    """The place of a mark of PyYAML's in a text of these lines."""
    text = lines[mark.line] if mark.line < len(lines) else ""
    return replace(origin, line=mark.line + 1, column=mark.column + 1, text=text)


def resolve_path(path: Path) -> Path:
    """The path with its links resolved; it need not exist.

    Raises:
        OSError: no file can have this path: it is too long, holds a NUL, or its links go in a circle.
    """
    try:
        target = path.resolve()
        target.exists()
    except (RuntimeError, ValueError) as error:
        raise OSError(errno.EINVAL, str(error)) from error
    return target


def refusal(path: Path | str) -> str:
    """Why a folder or file cannot be used although it is there, with the remedy; ``""`` where it can."""
    match = re.search(r"\$?\{[^/]*?\}|[\x00-\x1f]", str(path))
    if match is None:
        return ""
    why = "cannot stand in a line" if match[0] < " " else "a config takes for another value"
    return f"{str(path)!r} has {match[0]!r} in its name, which {why}; rename it"
