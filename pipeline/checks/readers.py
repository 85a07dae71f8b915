"""Who reads a value of the config, as far as the source tells: the config itself, the classes it names, their files, ours."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from pipeline import class_path
from pipeline.config import keys
from pipeline.config.references import REFERENCE
from pipeline.config.schema import SECTIONS
from pipeline.config.tree import Node
from pipeline.errors import ClassPathError
from pipeline.source_code import classes, source
from pipeline.source_code.finder import find_spec

PACKAGES = ("pipeline", "pipeline_plugins")
METRICS = "pipeline.training.metrics"


def readers(tree: Node, workspace: Path | None, address: str) -> list[str]:
    """``your_runner.py:17: the line`` of each place that reads the value at an address, the nearest to the user first."""
    own = {
        file: str(file.relative_to(workspace)) if workspace and file.is_relative_to(workspace) else file.name
        for file in user_files(tree, workspace)
    }
    return [
        *_references(tree, address),
        *_takers(tree, workspace, address),
        *_mentions(own, address),
        *_mentions(_our_files(), address),
    ]


def _references(tree: Node, address: str) -> Iterator[str]:
    """Values that take this one, or one that holds it."""
    for place, node in tree.walk():
        targets = [found[1] for found in REFERENCE.finditer(node.written or "")]
        if any(f"{address}.".startswith(f"{target}.") for target in targets):
            yield f"{node.origin}: {place} is {node.written}"


def _takers(tree: Node, workspace: Path | None, address: str) -> Iterator[str]:
    """Classes whose constructor has an argument of this name."""
    parent, _, name = address.rpartition(".")
    holder, _, arguments = parent.rpartition(".")
    section = tree.child("phase")
    if parent == "hyper_parameters":
        phases = [phase for _, phase in section.children()] if section else []
        paths = [("Model", phase.child("model")) for phase in phases if not phase.find(f"model_args.{name}")]
    elif arguments.endswith("_args"):
        taker = arguments.removesuffix("_args")
        path = tree.find(f"{holder}.{taker}_class_path") or tree.find(f"{holder}.{taker}")
        paths = [(taker.capitalize(), path)]
    else:
        paths = [("Dataset", tree.find(f"{holder}.class_path")), ("Metric", tree.find(f"{holder}.class"))]
    for implied, path in paths:
        definition = _definition(path, implied, workspace) if path and isinstance(path.value, str) else None
        taken = classes.parameters(definition) if definition else None
        if definition and taken and name in taken.names:
            yield f"{definition.place}: {definition.name} takes it as its argument '{name}'"


def _definition(path: Node, implied: str, workspace: Path | None) -> source.Definition | None:
    try:
        return class_path.define(class_path.parse(path.value, name=implied, workspace=workspace, module=METRICS))
    except ClassPathError:  # check says so
        return None


def user_files(tree: Node, workspace: Path | None) -> list[Path]:
    """The files of user code that the config names, and those that they import relatively."""
    plugins = tree.child("plugins")
    texts = [node.value for _, node in tree.walk()]
    texts += [name for _, item in (plugins.children() if plugins else ()) for name, _ in item.children()]
    found: set[Path] = set()
    for text in texts:
        if isinstance(text, str) and re.search(r"\.py(:\w+)?$", text):
            try:
                module = source.read(class_path.parse(text, name="Any", workspace=workspace).module)
            except (ClassPathError, SyntaxError, OSError):  # check says so
                continue
            found |= {each.file for each in source.neighbours(module)} if module else set()
    return sorted(found)


def _our_files() -> dict[Path, str]:
    """The files of the framework and of the plugins that come along -> what they are called here."""
    found = {}
    for package in PACKAGES:
        spec = find_spec(package)
        for folder in spec.submodule_search_locations or () if spec else ():
            for file in sorted(Path(folder).rglob("*.py")):
                # What lies beside the packages is no code of ours, such as what `new` copies.
                if (file.parent / "__init__.py").exists() and file != Path(__file__):
                    found[file] = f"{package}/{file.relative_to(folder)}"
    return found


def _mentions(files: dict[Path, str], address: str) -> Iterator[str]:
    """The lines of files that read the value."""
    wanted = _Wanted(address)
    for file, name in files.items():
        text = file.read_text(encoding="utf-8", errors="replace")
        try:
            lines = sorted(set(wanted.lines(ast.parse(text))))
        except (SyntaxError, ValueError):
            continue
        for line in lines:
            yield f"{name}:{line}: {text.splitlines()[line - 1].strip()}"


class _Wanted:
    """The ways in which source may spell one address."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.parts = address.split(".")
        self.in_section = self.parts[0] in SECTIONS and len(self.parts) > 2
        found = keys.key(address)
        self.key = found.name if found else ""
        self.names = {self.key} | (_attributes(found) if found else set())

    def lines(self, tree: ast.AST) -> Iterator[int]:
        """The lines of a file that read the value."""
        inner: set[ast.AST] = set()
        for node in ast.walk(tree):
            if not isinstance(node, ast.expr):
                continue
            names, spine = _chain(node)
            if node not in inner and self.is_read_by(names):
                yield node.lineno
            inner.update(spine)
            if self.is_text(node):
                yield node.lineno

    def is_read_by(self, names: list[str]) -> bool:
        """Whether ``context["hyper_parameters"]["width"]``, as the list of its names, reads the value or what holds it."""
        if self.parts[0] == "hyper_parameters":
            below = names[names.index("hyper_parameters") + 1 :] if "hyper_parameters" in names else []
            return bool(below) and all(one == other for one, other in zip(below, self.parts[1:], strict=False))
        for index in range(1, len(names)):
            holder = next(name for name in (*names[index - 1 :: -1], "") if name != "?")
            section = self.parts[0]
            holders = {section, f"{section}s", "settings"} if self.in_section else {"settings", "config", "tree", "env"}
            if names[index] in self.names and holder in holders:
                return True
        return False

    def is_text(self, node: ast.expr) -> bool:
        """Whether a string is the address, ``{…}`` standing for any part of it, or names the key to ``getattr``."""
        if isinstance(node, ast.Call):
            by_name = isinstance(node.func, ast.Name) and re.fullmatch(r"getattr|load(_\w+)?", node.func.id)
            return bool(by_name) and any(_fits(each, self.key) or _fits(each, self.address) for each in node.args)
        return _fits(node, self.address) and ast.unparse(node).lstrip("f\"'").startswith(f"{self.parts[0]}.")


def _attributes(key: keys.Key) -> set[str]:
    """What an object of the section calls a key, or what it makes of it: ``intervals`` reads ``save_interval``."""
    field = next(field for field, info in key.model.model_fields.items() if info is key.info)
    made = [(name, each.fget) for name, each in vars(key.model).items() if isinstance(each, property)]
    return {field} | {name for name, make in made if make and field in make.__code__.co_names}


def _chain(node: ast.expr) -> tuple[list[str], list[ast.expr]]:
    """The names by which an expression goes down from an object, ``?`` for what is computed; and its parts."""
    names: list[str] = []
    spine = [node]
    while True:
        match spine[-1]:
            case ast.Attribute(value=value, attr=name):
                names.append(name)
            case ast.Subscript(value=value, slice=index):
                names.append(_constant(index))
            case ast.Call(func=ast.Attribute(value=value, attr="get") as get, args=[first, *_]):
                names.append(_constant(first))
                spine.append(get)
            case ast.Call(func=ast.Attribute(value=ast.Name("tree") as value, attr="child") as child, args=[first, *_]):
                names.append(_constant(first))
                spine.append(child)
            case ast.Name(name):
                return [name, *reversed(names)], spine
            case _:
                return ["?", *reversed(names)], spine
        spine.append(value)


def _constant(node: ast.expr) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else "?"


def _fits(node: ast.expr, text: str) -> bool:
    """Whether a string, or an f-string that ends with a word of its own, may be this text."""
    if isinstance(node, ast.JoinedStr):
        parts = [each.value if isinstance(each, ast.Constant) else None for each in node.values]
        pattern = "".join(".+" if part is None else re.escape(str(part)) for part in parts)
        return parts[-1] is not None and re.fullmatch(pattern, text) is not None
    return bool(text) and _constant(node) == text
