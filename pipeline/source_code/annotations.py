"""Which values of a config a parameter takes, where its annotation is one of Python's plain types or a union of them."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pipeline.source_code import source

_NAMES = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "list": "a list",
    "dict": "a mapping",
    "None": "null",
}
_TAKES: dict[str, Callable[[Any], bool]] = {
    # 1e3 is a float in YAML; who writes it for a size may get away with it.
    "int": lambda value: isinstance(value, int) or (isinstance(value, float) and value.is_integer()),
    "float": lambda value: isinstance(value, int | float),
    "str": lambda value: isinstance(value, str),
    "bool": lambda value: isinstance(value, int),
    "list": lambda value: isinstance(value, list),
    "dict": lambda value: isinstance(value, dict),
    "None": lambda value: value is None,
}
_TYPING = {"List": "list", "Dict": "dict", "Optional": "", "Union": ""}


@dataclass(frozen=True)
class Annotation:
    """What a parameter takes.

    Attributes:
        types: the plain types.
        text: the parameter as it is written, with its place.
    """

    types: tuple[str, ...]
    text: str

    def refuses(self, value: Any) -> str | None:
        """What is wrong with a value of a config; None where nothing is, or it cannot be told."""
        unknown = isinstance(value, str) and "${" in value  # a reference to nothing, which is a fault of its own
        if unknown or _kind(value) not in _NAMES or any(_TAKES[name](value) for name in self.types):
            return None
        return f"is {shown(value)}; write {' or '.join(_NAMES[name] for name in self.types)} ({self.text})"


def shown(value: Any) -> str:
    """A value of a config and what it is: ``'two', a string``."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value!r}, {_NAMES.get(_kind(value), _kind(value))}"


def _kind(value: Any) -> str:
    return "None" if value is None else type(value).__name__


def annotation(name: str, arguments: ast.arguments, module: source.Module) -> Annotation | None:
    """What a parameter takes; None: cannot tell."""
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    written = next(each for each in every if each.arg == name)
    types = _types(written.annotation, module) if written.annotation else None
    if types is None or written.annotation is None:
        return None
    # `size: int = None` takes null, whatever its annotation says.
    default = _default(name, arguments)
    if isinstance(default, ast.Constant) and not any(_TAKES[name](default.value) for name in types):
        types += [kind] if (kind := _kind(default.value)) in _NAMES else []
    shown = ast.unparse(written.annotation).strip("'")
    text = f"{module.file.name}:{written.lineno}: {name}: {shown}"
    return Annotation(tuple(dict.fromkeys(types)), text)


def _default(name: str, arguments: ast.arguments) -> ast.expr | None:
    positional = [each.arg for each in (*arguments.posonlyargs, *arguments.args)]
    defaults = dict(zip(reversed(positional), reversed(arguments.defaults), strict=False))
    keywords = zip((each.arg for each in arguments.kwonlyargs), arguments.kw_defaults, strict=True)
    return {**defaults, **dict(keywords)}.get(name)


def _types(node: ast.expr, module: source.Module) -> list[str] | None:
    """The plain types that an annotation names; None where it names anything else."""
    if isinstance(node, ast.Constant):
        return ["None"] if node.value is None else _quoted(node.value, module)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _union([node.left, node.right], module)
    if isinstance(node, ast.Subscript):
        name = _name(node.value, module)
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if name in {"Optional", "Union"}:
            found = _union(parts, module)
            return [*found, "None"] if found and name == "Optional" else found
        return [_TYPING.get(name, name)] if name and _TYPING.get(name, name) in {"list", "dict"} else None
    name = _name(node, module)
    plain = _TYPING.get(name, name) if name else ""
    return [plain] if plain in _NAMES else None


def _union(parts: list[ast.expr], module: source.Module) -> list[str] | None:
    found = [_types(part, module) for part in parts]
    known = [types for types in found if types is not None]
    return [name for types in known for name in types] if len(known) == len(found) else None


def _quoted(value: Any, module: source.Module) -> list[str] | None:
    try:
        return _types(ast.parse(value, mode="eval").body, module) if isinstance(value, str) else None
    except SyntaxError:
        return None


def _name(node: ast.expr, module: source.Module) -> str | None:
    """The name of one of Python's own types, or of one of ``typing``, under which nothing else is meant."""
    text = ast.unparse(node)
    binding = module.bindings.get(text.partition(".")[0])
    if binding is None:
        return text if text in _NAMES and not module.stars else None
    if isinstance(binding, ast.ImportFrom) and binding.module == "typing":
        return next((alias.name for alias in binding.names if text == (alias.asname or alias.name)), None)
    last = text.removeprefix("typing.")
    return last if isinstance(binding, ast.Import) and text != last else None
