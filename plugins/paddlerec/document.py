"""A PaddleRec config in ruamel.yaml's round trip: edits keep every comment, and each value as it is written.

What changes is white space without a meaning: the whole file has one indentation, a list or mapping in braces is on one line
(a comment in it goes above), a string is on one line, and no blank line follows a block scalar. ``%YAML``, ``---`` and ``...``
are left out.
"""

from __future__ import annotations

import io
import re
import sys
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from ruamel.yaml import YAML
from ruamel.yaml.comments import Comment, CommentedMap, CommentedSeq
from ruamel.yaml.error import CommentMark, YAMLError
from ruamel.yaml.resolver import VersionedResolver
from ruamel.yaml.scalarstring import DoubleQuotedScalarString, PlainScalarString
from ruamel.yaml.tokens import CommentToken

from pipeline.config import yaml_tree
from pipeline.config.yaml_tree import Node
from pipeline.errors import ConfigError, Fault

Slot = tuple[CommentedMap | CommentedSeq, Any]
"""A mapping and a key, or a list and an index, in block style: there comments stand above and behind."""

_ENDS_OF_VALUES = (yaml.ScalarToken, yaml.ValueToken, yaml.FlowSequenceEndToken, yaml.FlowMappingEndToken)


class _AsWritten(VersionedResolver):
    """Takes a scalar for the text that it is, so that ``1e-3``, ``yes`` and ``null`` are written as they were read."""

    @property
    def versioned_resolver(self) -> dict[str, list[tuple[str, re.Pattern[str]]]]:
        """First letter -> (tag, pattern): only nothing at all is not a text."""
        return {"": [("tag:yaml.org,2002:null", re.compile(""))]}


class Scalar(NamedTuple):
    """A value without parts at a key or index; ``old`` is what PaddleRec read (YAML 1.1), ``new`` what is read here."""

    address: str
    line: int
    container: CommentedMap | CommentedSeq
    key: Any
    old: Any
    new: Any

    @property
    def text(self) -> str:
        """How it is written."""
        return str(self.container[self.key])


@dataclass(eq=False)
class Entry:
    """One ``key: value`` of a mapping.

    Attributes:
        key: the key.
        address: its dotted address, an item of a list by its name.
        mapping: where it stands.
        ours: the value as it is read here.
        outer: what is in block style right around the mapping; None for the whole config.
        added: the keys of the entries that were added behind it.
    """

    key: str
    address: str
    mapping: CommentedMap
    ours: Node
    outer: Slot | None
    added: list[str] = field(default_factory=list)

    @property
    def node(self) -> Any:
        """The value as it is written."""
        return self.mapping[self.key]

    @cached_property
    def value(self) -> Any:
        """The plain value, as PaddleRec read it."""
        return _old_value(self.node, self.ours)

    @property
    def line(self) -> int:
        """Line of the key, counted from 1."""
        return (self.ours.key or self.ours.origin).line

    @property
    def is_empty(self) -> bool:
        """Whether PaddleRec took it for not set."""
        return self.value in (None, "", [], {})

    @property
    def in_braces(self) -> bool:
        """Whether there are braces around it."""
        return not _is_block(self.mapping)

    @property
    def slot(self) -> Slot | None:
        """Where comments on it stand: for the first of a list's item those on the item, above the dash."""
        is_behind_dash = self.outer and isinstance(self.outer[0], CommentedSeq) and self.key == next(iter(self.mapping))
        return self.outer if self.in_braces or is_behind_dash else (self.mapping, self.key)

    @property
    def items(self) -> list[list[Entry]]:
        """The entries of each mapping in a list."""
        is_block = _is_block(self.node)
        return [
            entries(item, ours, f"{self.address}.{name}", (self.node, index) if is_block else self.slot)
            for index, (item, (name, ours)) in enumerate(zip(self.node, self.ours.children(), strict=True))
        ]

    @property
    def entries(self) -> list[Entry]:
        """The entries of a mapping."""
        return entries(self.node, self.ours, self.address, self.slot)

    def scalars(self) -> Iterator[Scalar]:
        """The scalars of the value."""
        return _scalars(self.mapping, self.key, self.ours, self.address)


class Document:
    """A config file that is being rewritten.

    Attributes:
        where: what messages call it.
        ours: the config as it is read here.
        entries: those of the whole config.

    Raises:
        ConfigError: it cannot be read, is no YAML or no mapping, or uses aliases.
    """

    def __init__(self, path: Path) -> None:
        self.where = str(path)
        faults: list[Fault] = []
        self.ours = yaml_tree.read_file(path, faults)
        if faults:
            raise ConfigError(faults)
        text = path.read_text(encoding="utf-8-sig")
        if rare := re.search("[\x85\u2028\u2029]", text):
            message = f"holds the character {ord(rare[0]):#06x}, which ends a line in YAML 1.1 only; take it out"
            raise ConfigError([self.ours.origin.fault("", message)])
        self._yaml = YAML()
        self._yaml.Resolver = _AsWritten
        self._yaml.preserve_quotes = True
        self._yaml.brace_single_entry_mapping_in_flow_sequence = True
        self._yaml.width = sys.maxsize
        try:
            self.root = self._yaml.load(text)
        except YAMLError as error:
            raise ConfigError([self.ours.origin.fault("", f"{error}; mend the YAML")]) from error
        _refuse_aliases(self.root, self.ours)
        self._indent, self._offset = _indentation(self.root)
        self._yaml.indent(mapping=self._indent, sequence=self._offset + 2, offset=self._offset)
        self._yaml.version = None
        self._head: list[CommentToken] = []
        self._tail: list[CommentToken] = []
        self._sort_comments(text if text.endswith("\n") else f"{text}\n")
        self.entries = entries(self.root, self.ours)

    def result(self) -> str:
        """The text after all edits."""
        text = self._dump(self.root)
        return "".join([*(token.value for token in self._head), text, *(token.value for token in self._tail)])

    def set(self, entry: Entry, value: Any) -> None:
        """Give an entry another value; a list or mapping of several lines stays as a comment."""
        new: Any
        if isinstance(value, dict):
            new = CommentedMap({name: _scalar(item, in_braces=True) for name, item in value.items()})
            new.fa.set_flow_style()
        else:
            new = _list(value) if isinstance(value, list) else _scalar(value, in_braces=entry.in_braces)
        if not _is_block(entry.mapping[entry.key]):
            entry.mapping[entry.key] = new
            return
        position = list(entry.mapping).index(entry.key)
        lines = self._take(entry, "was")
        entry.mapping.insert(position, entry.key, new)
        self._above(entry.slot).extend(lines)

    def replace(self, scalar: Scalar) -> None:
        """Write a number or a truth value as PaddleRec read it."""
        scalar.container[scalar.key] = PlainScalarString(yaml_tree.one_line(scalar.old))

    def rename(self, entry: Entry, key: str) -> None:
        """Give an entry another key."""
        _move(entry, entry.mapping, list(entry.mapping).index(entry.key), key)
        entry.key = key

    def add(self, after: Entry, key: str, value: Any) -> None:
        """Write a new entry behind another, and behind those added there before."""
        last = after.added[-1] if after.added else after.key
        after.mapping.insert(list(after.mapping).index(last) + 1, key, _scalar(value, in_braces=after.in_braces))
        after.added.append(key)

    def remark(self, entry: Entry, comment: str) -> None:
        """Write a comment line above an entry; above the whole of it where that is in braces."""
        self._above(entry.slot).append(_comment(f"# {comment}"))

    def comment_out(self, entry: Entry, reason: str) -> None:
        """Turn an entry into a comment, ``# reason: key: value``."""
        if entry.in_braces:
            removed = CommentedMap()
            removed.fa.set_flow_style()
            _move(entry, removed, 0)
            self.remark(entry, f"{reason}: {' '.join(self._dump(removed).split())[1:-1]}")
            return
        slot, position = entry.slot, list(entry.mapping).index(entry.key)
        lines, following = self._take(entry, reason), list(entry.mapping)[position:]
        below = self._above((entry.mapping, following[0])) if following else entry.mapping.ca.end
        below[:0] = lines
        if slot is entry.outer or not entry.mapping:
            self._above(entry.outer).extend(below)
            below.clear()
        if not entry.mapping and entry.outer:
            container, key = entry.outer
            container[key] = None  # behind a comment ruamel.yaml would write braces in the next line

    def _sort_comments(self, text: str) -> None:
        """Put each comment above or behind what it is about: ruamel.yaml has it at the end of what is before."""
        for node in _containers(self.root):
            setattr(node, Comment.attrib, Comment())
        slots = [*_slots(self.root)]
        lines = [line for line, _ in slots]
        for comment in _comments(text):
            following = bisect_right(lines, comment.line)
            before = slots[following - 1][1] if following else None
            if comment.is_inside or (comment.is_behind and not before):
                self._above(before).append(_comment(comment.text))
            elif comment.is_behind and before:
                container, key = before
                behind = _comment(comment.text, comment.column - container.lc.col)
                _comment_slots(container, key)[0 if isinstance(container, CommentedSeq) else 2] = behind
            elif following < len(slots):
                self._above(slots[following][1]).append(_comment(comment.text))
            else:
                self._tail.append(_comment(comment.text))

    def _above(self, slot: Slot | None) -> list[CommentToken]:
        """The comments above an entry or item; above the whole config for None."""
        if slot is None:
            return self._head
        slots = _comment_slots(*slot)
        above: list[CommentToken] = slots[1] or []
        slots[1] = above
        return above

    def _take(self, entry: Entry, reason: str) -> list[CommentToken]:
        """Take an entry in block style out of its mapping: the comments above it, and its lines as comments."""
        removed = CommentedMap()
        _move(entry, removed, 0)
        slots = removed.ca.items[entry.key]
        above, slots[1] = slots[1] or [], None
        first, *others = self._dump(removed).splitlines()
        return [*above, *(_comment(f"# {line}" if line else "") for line in (f"{reason}: {first}", *others))]

    def _dump(self, mapping: CommentedMap) -> str:
        self._align(mapping, 0)
        stream = io.StringIO()
        self._yaml.dump(mapping, stream)
        return stream.getvalue().removesuffix("...\n")

    def _align(self, node: Any, column: int) -> None:
        """Give the comments in a node in block style, which begins in a column, their columns."""
        if not _is_block(node):
            return
        is_list = isinstance(node, CommentedSeq)
        node.ca.comment = [None, None]  # without it ruamel.yaml writes no comments at the end
        for behind, above in ((slots[0 if is_list else 2], slots[1]) for slots in node.ca.items.values()):
            for token in above or ():
                token.start_mark.column = column
            if behind:
                behind.start_mark.column += column
        for token in node.ca.end:
            token.start_mark.column = column
        for child in node if is_list else node.values():
            width = 2 if is_list else self._offset if isinstance(child, CommentedSeq) else self._indent
            self._align(child, column + width)


def entries(node: CommentedMap, ours: Node, address: str = "", outer: Slot | None = None) -> list[Entry]:
    """The entries of a mapping, in the order of the text."""
    return [Entry(key, f"{address}.{key}" if address else key, node, ours.value[key], outer) for key in node]


def _is_block(node: Any) -> bool:
    """Whether a value is a list or mapping on lines of its own."""
    return isinstance(node, CommentedMap | CommentedSeq) and bool(node) and not node.fa.flow_style()


def _children(node: Any, ours: Node) -> Iterator[tuple[Any, str, Node]]:
    """(key or index, address part, value as it is read here) of what a list or mapping holds."""
    if isinstance(node, CommentedMap):
        yield from ((key, key, ours.value[key]) for key in node)
    elif isinstance(node, CommentedSeq):
        yield from ((index, name, child) for index, (name, child) in enumerate(ours.children()))


def _old_value(node: Any, ours: Node) -> Any:
    """The plain value of a node, as PaddleRec read it.

    Raises:
        ConfigError: YAML 1.1 makes nothing of it.
    """
    if isinstance(node, CommentedMap):
        return {str(key): _old_value(node[key], child) for key, _, child in _children(node, ours)}
    if isinstance(node, CommentedSeq):
        return [_old_value(node[index], child) for index, _, child in _children(node, ours)]
    if not isinstance(node, PlainScalarString) and type(node) is not str:
        return node if node is None else str(node)
    loader: Any = yaml.SafeLoader("")
    try:
        tag = loader.resolve(yaml.ScalarNode, node, (True, False))
        return loader.construct_object(yaml.ScalarNode(tag, str(node)))
    except (yaml.YAMLError, ValueError) as error:
        problem = str(error).splitlines()[0]
        message = f"PaddleRec could not read it: {problem}; mend it, or quote it"
        raise ConfigError([ours.origin.fault("", message)]) from error


def _scalars(container: Any, key: Any, ours: Node, address: str) -> Iterator[Scalar]:
    node = container[key]
    if not isinstance(node, CommentedMap | CommentedSeq):
        yield Scalar(address, ours.origin.line, container, key, _old_value(node, ours), ours.value)
    for below, name, child in _children(node, ours):
        yield from _scalars(node, below, child, f"{address}.{name}")


def _refuse_aliases(root: CommentedMap, ours: Node) -> None:
    """Refuse values that stand for several places of the text: an edit of one would change the others.

    Raises:
        ConfigError: there are some.
    """
    seen: set[int] = set()

    def visit(node: Any, ours: Node, address: str) -> None:
        # What `<<:` merges is not under that key here. A plain word may be one object in several places.
        is_merged = isinstance(node, CommentedMap) and any(key not in ours.value for key in node)
        if is_merged or (id(node) in seen and type(node) is not str and node is not None):
            message = "uses an alias (`*name` or `<<:`), which cannot be converted; write its values out"
            raise ConfigError([(ours.key or ours.origin).fault(address, message)])
        seen.add(id(node))
        for key, name, child in _children(node, ours):
            visit(node[key], child, f"{address}.{name}" if address else name)

    visit(root, ours, "")


def _indentation(root: CommentedMap) -> tuple[int, int]:
    """By how much the first mapping in a mapping is indented, and the first list in one."""
    pairs = [(node, child) for node in _containers(root) for child in _values(node) if _is_block(child)]
    widths = [(type(child), child.lc.col - node.lc.col) for node, child in pairs if isinstance(node, CommentedMap)]
    mapping = next((width for kind, width in widths if kind is CommentedMap), 2)
    return mapping, next((width for kind, width in widths if kind is CommentedSeq), 0)


def _values(node: Any) -> Sequence[Any]:
    return list(node.values()) if isinstance(node, CommentedMap) else node if isinstance(node, CommentedSeq) else ()


def _containers(node: Any) -> Iterator[Any]:
    """A list or mapping, and all in it."""
    if isinstance(node, CommentedMap | CommentedSeq):
        yield node
        for child in _values(node):
            yield from _containers(child)


class _Comment(NamedTuple):
    """A comment of the text, or a blank line: behind something on its line, inside a value, or on a line of its own."""

    line: int
    column: int
    text: str
    is_behind: bool
    is_inside: bool


def _slots(node: Any) -> Iterator[tuple[int, Slot]]:
    """(line, where) of each entry and item in block style, in the order of the text."""
    if not _is_block(node):
        return
    is_list = isinstance(node, CommentedSeq)
    for key in range(len(node)) if is_list else node:
        yield (node.lc.item if is_list else node.lc.key)(key)[0], (node, key)
        yield from _slots(node[key])


def _comments(text: str) -> Iterator[_Comment]:
    """The comments and blank lines: all that there is between two tokens of YAML."""
    depth, tokens = 0, yaml.scan(text)
    previous = next(tokens)
    for token in tokens:
        end = previous.end_mark
        start = token.start_mark
        for number, piece in enumerate(text[end.index : start.index].split("\n")[:-1]):
            comment, is_rest = piece.strip(), number == 0 and end.column > 0
            if comment or not (depth or is_rest):
                column = len(piece) - len(piece.lstrip()) + (0 if number else end.column)
                is_behind = is_rest and isinstance(previous, _ENDS_OF_VALUES)
                yield _Comment(end.line + number, column, comment, is_behind, depth > 0)
        if isinstance(token, yaml.ScalarToken) and token.style in ("|", ">"):
            _, sign, comment = text[start.index :].split("\n", 1)[0].partition("#")
            if sign:
                yield _Comment(start.line, 0, f"#{comment}", is_behind=False, is_inside=True)
        depth += isinstance(token, yaml.FlowMappingStartToken | yaml.FlowSequenceStartToken)
        depth -= isinstance(token, yaml.FlowMappingEndToken | yaml.FlowSequenceEndToken)
        previous = token


def _comment(text: str, column: int = 0) -> CommentToken:
    return CommentToken(f"{text}\n", CommentMark(column))


def _comment_slots(container: CommentedMap | CommentedSeq, key: Any) -> list[Any]:
    """ruamel.yaml's comments on a key or index: above it is the second, behind it the third (in a list the first)."""
    slots: list[Any] = container.ca.items.setdefault(key, [None] * 4)
    return slots


def _move(entry: Entry, target: CommentedMap, position: int, key: str | None = None) -> None:
    """Move an entry with its comments to a position in a mapping."""
    slots = _comment_slots(entry.mapping, entry.key)
    value = entry.mapping[entry.key]
    del entry.mapping.ca.items[entry.key], entry.mapping[entry.key]
    target.insert(position, key or entry.key, value)
    target.ca.items[key or entry.key] = slots


def _scalar(value: Any, *, in_braces: bool) -> str:
    """A value as YAML text; a string that needs quotes has double ones, as in our examples."""
    text = yaml_tree.one_line([value])[1:-1] if in_braces else yaml_tree.one_line(value)
    scalar: str = DoubleQuotedScalarString(value) if text[0] in "'\"" else PlainScalarString(text)
    return scalar


def _list(values: list[Any]) -> CommentedSeq:
    """A list in braces."""
    new = CommentedSeq([_scalar(value, in_braces=True) for value in values])
    new.fa.set_flow_style()
    return new
