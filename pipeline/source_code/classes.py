"""What a class or function is, read from its source: its bases, its methods, the arguments that it takes.

As in ``source.py``, a question that the source doesn't answer has the answer None: cannot tell.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.errors import one_of
from pipeline.source_code import source
from pipeline.source_code.annotations import Annotation, annotation
from pipeline.source_code.finder import once


@dataclass(frozen=True)
class Parameters:
    """The parameters that a call by keyword may or must give; ``any_name`` where ``**kwargs`` takes the rest.

    ``annotations`` has those whose annotation says which values of a config they take.
    """

    names: tuple[str, ...]
    required: tuple[str, ...]
    any_name: bool
    positional: int = 0
    annotations: Mapping[str, Annotation] = field(default_factory=dict)

    def wrong(self, given: Mapping[str, Any], what: str) -> dict[str, str]:
        """What is wrong with arguments given by name: argument -> message; the missing ones come under ``""``.

        Args:
            given: the arguments as plain values of a config.
            what: who takes them, for the messages.
        """
        faults = {}
        for name, value in given.items():
            if name in self.annotations:
                if refused := self.annotations[name].refuses(value):
                    faults[name] = f"{what}'s argument {name} {refused}"
            elif name not in self.names and not self.any_name:
                accepted = one_of(name, self.names) if self.names else "; it takes no arguments"
                faults[name] = f"{what} has no argument '{name}'{accepted}"
        if missing := [name for name in self.required if name not in given]:
            named = f"the argument{'s' if len(missing) > 1 else ''} {', '.join(missing)}"
            faults[""] = f"{what} needs {named}; add {'them' if len(missing) > 1 else 'it'}"
        return faults

    def without(self, given: Sequence[str]) -> Parameters:
        """The same, less those that the caller gives anyway."""
        return Parameters(
            tuple(name for name in self.names if name not in given),
            tuple(name for name in self.required if name not in given),
            self.any_name,
            annotations={name: each for name, each in self.annotations.items() if name not in given},
        )

    def without_first(self) -> Parameters:
        """The same, less the one that the caller gives by position."""
        return self.without(self.names[: min(self.positional, 1)])


def ancestry(
    definition: source.Definition, below: tuple[source.Definition, ...] = ()
) -> tuple[list[source.Definition], bool]:
    """The class and its bases, in the order in which Python looks a method up, and whether that is all of them.

    What a function makes cannot be told.
    """
    node = definition.node
    if not isinstance(node, ast.ClassDef):
        return [definition], False
    parents, orders = list[source.Definition](), list[list[source.Definition]]()
    complete = not (node.decorator_list or node.keywords)
    for base in node.bases:
        name = source.base_name(base)
        if _adds_nothing(definition.module, name):
            continue
        parent = _parent(definition.module, name)
        if parent is None or parent in (*below, definition):
            complete = False
            continue
        above, whole = ancestry(parent, (*below, definition))
        complete = complete and whole
        parents.append(parent)
        orders.append(above)
    return [definition, *_merged([*orders, parents])], complete


def _merged(orders: list[list[source.Definition]]) -> list[source.Definition]:
    """One order of classes that keeps to several, as Python finds it: what two bases have in common comes after both."""
    found: list[source.Definition] = []
    while orders := [order for order in orders if order]:
        # Where none can be first, Python refuses the class.
        first = next((each[0] for each in orders if not any(each[0] in other[1:] for other in orders)), orders[0][0])
        found.append(first)
        orders = [[each for each in order if each != first] for order in orders]
    return found


def _adds_nothing(module: source.Module, name: str) -> bool:
    binding = module.bindings.get(name.partition(".")[0])
    if isinstance(binding, ast.ImportFrom):
        return name in {"ABC", "Generic", "Protocol"} and binding.module in {"abc", "typing", "typing_extensions"}
    return name == "object" if binding is None else name == "abc.ABC" and isinstance(binding, ast.Import)


@once
def _parent(module: source.Module, name: str) -> source.Definition | None:
    try:
        parent = source.define(module, name)
    except source.NotDefinedError:
        return None
    return parent if parent and isinstance(parent.node, ast.ClassDef) else None


def is_subclass(definition: source.Definition, base: str) -> bool | None:
    """Whether a class derives from ``module:Name``; None: cannot tell, as of a function."""
    above, complete = ancestry(definition)
    if any(f"{each.module.name}:{each.name}" == base for each in above):
        return True
    return False if complete else None


def methods(definition: source.Definition) -> dict[str, source.FunctionNode]:
    """The methods that the class itself defines."""
    return {
        node.name: node for node in definition.node.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def own_names(definition: source.Definition) -> set[str]:
    """The names that a class itself defines in whatever way."""
    assert isinstance(definition.node, ast.ClassDef)
    return {name for statement, _ in source.top_level(definition.node.body) for name in source.bound_names(statement)}


def abstract_methods(definition: source.Definition) -> list[str]:
    """The abstract methods that nobody implements; empty where that cannot be told."""
    above, complete = ancestry(definition)
    if not complete:
        return []
    left: list[str] = []
    for each in reversed(above):
        own = own_names(each)
        left = [name for name in left if name not in own]
        for name, node in methods(each).items():
            if any("abstractmethod" in ast.unparse(decorator) for decorator in node.decorator_list):
                left.append(name)
    return left


def undefined(definition: source.Definition, names: Sequence[str], base: str = "") -> list[str]:
    """The methods that certainly neither a class nor its bases define; ``base``'s, ``module:Name``, don't count."""
    above, complete = ancestry(definition)
    if not complete:
        return []
    bases = [each for each in above if f"{each.module.name}:{each.name}" == base]
    inherited = [each for found in bases for each in ancestry(found)[0]]
    own = [each for each in above if each not in inherited]
    text = "".join(each.module.file.read_text(encoding="utf-8", errors="replace") for each in own)
    if re.search(r"setattr|__getattr|__dict__|vars\(", text):
        return []
    left = [name for name in names if not any(name in own_names(each) for each in own)]
    # `self.compute = …` defines it as well.
    return [name for name in left if not re.search(rf"\.{name}\b(?!\s*\()", text)]


def parameters(definition: source.Definition) -> Parameters | None:
    """What a call of the class or function takes; None: cannot tell."""
    if not isinstance(definition.node, ast.ClassDef):
        return None if definition.node.decorator_list else _parameters(definition.node, definition.module, skip=0)
    above, complete = ancestry(definition)
    for each in above:
        node = each.node
        if isinstance(node, ast.ClassDef) and (node.decorator_list or node.keywords or "__new__" in methods(each)):
            return None
        constructor = methods(each).get("__init__")
        if constructor:
            return None if constructor.decorator_list else _parameters(constructor, each.module, skip=1)
        # A base that cannot be read may come before the next.
        if not complete or "__init__" in own_names(each):
            return None
    return Parameters((), (), any_name=False)


def method_parameters(definition: source.Definition, name: str) -> Parameters | None:
    """What a call of a method takes; None: cannot tell."""
    above, complete = ancestry(definition)
    for each in above:
        method = methods(each).get(name)
        if method:
            return None if method.decorator_list or not complete else _parameters(method, each.module, skip=1)
    return None


def _parameters(node: source.FunctionNode, module: source.Module, skip: int) -> Parameters:
    arguments = node.args
    positional = [argument.arg for argument in arguments.posonlyargs + arguments.args][skip:]
    optional = len(arguments.defaults)
    required = positional[: len(positional) - optional] if optional else list(positional)
    keywords = [argument.arg for argument in arguments.kwonlyargs]
    required += [name for name, value in zip(keywords, arguments.kw_defaults, strict=True) if value is None]
    types = {name: found for name in positional + keywords if (found := annotation(name, arguments, module))}
    return Parameters(
        tuple(positional + keywords), tuple(required), arguments.kwarg is not None, len(positional), types
    )
