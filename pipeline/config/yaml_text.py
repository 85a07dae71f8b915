"""YAML text -> a tree with marks, and plain values -> YAML text. Safely: no tag builds an object, aliases and depth are bounded.

The scalars are those of YAML 1.2's core schema: ``1e-3`` is a float; ``on``, ``yes``, ``1_000`` and dates are strings;
``010`` is ten and ``0o10`` eight.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from pipeline.config.tree import MAX_DEPTH, Node, Origin
from pipeline.config.yaml_nodes import TAG, Builder
from pipeline.errors import ConfigError, Fault, nearest

MAX_BYTES = 1 << 20

_NUMBERS = "-+.0123456789"
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_NULL = re.compile(r"~|null|Null|NULL|")
_BREAKS = frozenset("\n\r\x85\u2028\u2029")


_KINDS = {list: "a list", str: "a string", bool: "a truth value", int: "a number", float: "a number"}


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
        _class.add_implicit_resolver(TAG + _tag, re.compile(rf"(?:{_pattern.pattern})\Z"), list(_first))


def _represent_string(dumper: _Dumper, value: str) -> yaml.Node:
    """Line breaks are escaped: PyYAML's other styles spread them over lines, and lose the rare ones."""
    return dumper.represent_scalar(TAG + "str", value, '"' if _BREAKS & set(value) else None)


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
        with path.open("rb") as file:
            # What has no size, like a pipe, is bounded too.
            size, content = path.stat().st_size, file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # a NUL in the path is a ValueError
        reason, remedy = getattr(error, "strerror", error), neighbour(path) or "; check the path"
        raise ConfigError([origin.fault("", f"cannot be read: {reason}{remedy}")]) from error
    if len(content) > MAX_BYTES:
        much = f"has {max(size, len(content))} bytes, more than the {MAX_BYTES} of a config"
        raise ConfigError([origin.fault("", f"{much}; name the right file")])
    node = parse(_decoded(content, origin), origin, faults)
    if not isinstance(node.value, dict):
        kind = "is empty" if node.value is None else f"holds {_KINDS[type(node.value)]}"
        raise ConfigError([origin.fault("", f"{kind}, not a mapping; write `key: value` lines")])
    return node


def neighbour(path: Path) -> str:
    """The file nearest in name, as a remedy for a path to none."""
    # Of os.path, which says of a name too long that nothing is there.
    if not os.path.isdir(path.parent):
        return ""
    # The suffix alone makes no two names alike.
    alike = [each.name for each in path.parent.glob("*.y*ml") if nearest(path.stem, [each.stem])]
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
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError([origin.fault("", f"is no YAML: {str(error).splitlines()[0]}; mend it")]) from error
    if root is None:
        return Node(None, origin)
    builder = Builder(text, origin)
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


def one_line(value: Any) -> str:
    """YAML text of one line, without what ends a document."""
    return dump(value, one_line=True).removesuffix("\n...\n").strip()


def brief(value: Any) -> str:
    """The same, cut where it is long, for messages."""
    text = one_line(value)
    return text if len(text) < 60 else f"{text[:57]}…"


def _syntax(error: yaml.MarkedYAMLError, text: str, origin: Origin) -> Fault:
    mark = error.problem_mark or error.context_mark
    line = mark.line if mark else 0
    lines = text.splitlines()
    source = lines[line] if line < len(lines) else ""
    remedy = "indent with spaces, not tabs" if "\t" in source else "mend the YAML"
    problem = error.problem or error.context or "syntax error"
    if "single document" in (error.context or ""):
        problem, remedy = "holds several YAML documents", "keep one"
    elif error.context_mark and error.context_mark.line < line:
        problem += f", in what begins on line {error.context_mark.line + 1}"
    place = replace(origin, line=line + 1, column=(mark.column if mark else 0) + 1, text=source)
    return place.fault("", f"{problem}; {remedy}")
