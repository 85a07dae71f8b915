"""Configs gone wrong: the examples' and a small one's, mutated as text and as a tree, with overrides gone wrong too."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from example_needs import runnable_examples
from hypothesis import strategies as st
from tokens import KEYS, PATHS, PLAIN, SOURCES, TOKENS

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "workspace_examples"
SMALL = {file.name: file.read_text(encoding="utf-8") for file in REPOSITORY.glob("pipeline/testing/templates/*.*")}
CANARY = "raise SystemExit('user code was imported')\n"
"""Begins every file of user code."""
_PATH_KEYS = (
    "class_path",
    "class",
    "model",
    "loss",
    "collate_fn",
    "trainer_class",
    "plugins",
    "_base_",
    "init_model_path",
    "workspace",
)
_WORD = re.compile(r"[\w./{}$]+|[^\w\s]|\s+")


class Case(NamedTuple):
    """A config file of one of the workspaces, and overrides for it."""

    workspace: str
    text: str
    overrides: list[str]


def write_workspaces(folder: Path) -> None:
    """A workspace for each base under ``folder``, whose code must not run."""
    for name in BASES:
        (folder / name).mkdir()
        for file, source in SOURCES.items():
            (folder / name / file).write_bytes(source)
        (folder / name / "data.py").write_text(CANARY + SMALL["data.py"], encoding="utf-8")
        for code in (EXAMPLES / name).glob("*.py"):
            (folder / name / code.name).write_text(CANARY + code.read_text(encoding="utf-8"), encoding="utf-8")
        (folder / name / "folder.py").mkdir()
        (folder / name / "loop.py").symlink_to("loop.py")
        (folder / name / "gone.py").symlink_to("nowhere.py")
        os.mkfifo(folder / name / "fifo.py")


BASES = {"linear": SMALL["config.yaml"]} | {
    folder.name: (folder / "config.yaml").read_text(encoding="utf-8") for folder in runnable_examples()
}
_TREES = {name: yaml.load(text, yaml.CSafeLoader) for name, text in BASES.items()}


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key or index) of everything in a tree."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in list(items):
        yield value, key
        yield from _places(child)


def _addresses(value: Any, above: str = "") -> Iterator[str]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        part = child["name"] if isinstance(key, int) and isinstance(child, dict) and "name" in child else key
        yield f"{above}{part}"
        yield from _addresses(child, f"{above}{part}.")


_ADDRESSES = sorted({each for tree in _TREES.values() for each in _addresses(tree)})
_index = st.integers(0, 10_000)
_token = st.sampled_from(TOKENS)


@st.composite
def _mutated_text(draw: st.DrawFn, text: str) -> str:
    """Lines deleted, doubled, swapped, indented; words replaced; tokens put in."""
    lines = text.splitlines()
    at, other = draw(_index) % max(len(lines), 1), draw(_index) % max(len(lines), 1)
    match draw(st.sampled_from(["delete", "double", "swap", "indent", "cut", "word", "insert", "line"])):
        case "delete":
            del lines[at : at + 1]
        case "double":
            lines[at:at] = lines[at : at + 1]
        case "swap" if lines:
            lines[at], lines[other] = lines[other], lines[at]
        case "indent" if lines:
            lines[at] = draw(st.sampled_from(["  ", "\t", " ", "- ", "? "])) + lines[at]
        case "cut":
            return text[: draw(_index) % (len(text) + 1)]
        case "word":
            words = _WORD.findall(text)
            if words:
                words[draw(_index) % len(words)] = draw(_token)
            return "".join(words)
        case "insert":
            place = draw(_index) % (len(text) + 1)
            return text[:place] + draw(_token) + text[place:]
        case "line":
            lines.insert(at, draw(_token))
    return "\n".join(lines) + "\n"


@st.composite
def _mutated_tree(draw: st.DrawFn, name: str) -> str:
    """Keys renamed, values replaced, items moved, in the parsed config; written as YAML again."""
    tree = yaml.load(BASES[name], yaml.CSafeLoader)
    for _ in range(draw(st.integers(1, 3))):
        places = list(_places(tree))
        if not places:
            break
        holder, key = places[draw(_index) % len(places)]
        other, there = places[draw(_index) % len(places)]
        match draw(st.sampled_from(["value", "plain", "path", "key", "drop", "move", "add"])):
            case "value":
                holder[key] = draw(_token)
            case "plain":
                holder[key] = deepcopy(draw(st.sampled_from(PLAIN)))
            case "path":
                paths = [each for each in places if str(each[1]).endswith(_PATH_KEYS)] or places
                holder, key = paths[draw(_index) % len(paths)]
                holder[key] = draw(st.sampled_from(PATHS))
            case "key" if isinstance(holder, dict):
                holder[draw(st.sampled_from(KEYS))] = holder.pop(key)
            case "drop":
                del holder[key]
            case "move":
                other[there] = deepcopy(holder[key])
            case "add" if isinstance(holder, dict):
                holder[draw(st.sampled_from(KEYS))] = draw(st.sampled_from(PATHS))
    try:
        return yaml.dump(tree, Dumper=yaml.CSafeDumper, sort_keys=False, allow_unicode=True)
    except UnicodeEncodeError:  # a lone surrogate
        return BASES[name]


@st.composite
def _overrides(draw: st.DrawFn) -> list[str]:
    made = []
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 3]))):
        address = draw(st.sampled_from(_ADDRESSES))
        if draw(st.booleans()):
            address += draw(st.sampled_from(["", ".", ".x", ".0"])) + draw(st.sampled_from(KEYS))
        made.append(f"{address}{draw(st.sampled_from(['=', '=', '=', '', '==']))}{draw(_token)}")
    return made


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A config that is likely to have something wrong with it."""
    name = draw(st.sampled_from(sorted(BASES)))
    as_tree = draw(st.booleans())
    text = draw(_mutated_tree(name)) if as_tree else BASES[name]
    for _ in range(draw(st.integers(0 if as_tree else 1, 2 if as_tree else 4))):
        text = draw(_mutated_text(text))
    return Case(name, text, draw(_overrides()))
