"""Whether a class can stand as a stage: how its method is called, and what it declares; from source alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from pipeline.source_code import classes, source
from pipeline.stages.base import METHODS


def faults_of(definition: source.Definition, stage: str) -> Iterator[str]:
    """What makes a class unfit, each as a message."""
    method = METHODS[stage][1]
    for each in classes.ancestry(definition)[0]:
        for node in each.node.body:
            yield from _declaration(node, each)
    for each in classes.ancestry(definition)[0]:
        if found := classes.methods(each).get(method):
            yield from _method(found, f"{each.name}.{method} ({each.module.file.name}:{found.lineno})")
            return


def _declaration(node: ast.stmt, definition: source.Definition) -> Iterator[str]:
    """``reads = ("model")`` is no tuple: its comma is missing."""
    match node:
        case ast.Assign(targets=[ast.Name(id="reads" | "writes" as name)], value=ast.Constant(value=str(text))):
            place = f"{definition.name} ({definition.module.file.name}:{node.lineno})"
            yield f"{place}: `{name}` is '{text}', a string; write {name} = (\"{text}\",)"


def _method(node: source.FunctionNode, place: str) -> Iterator[str]:
    name = node.name
    marks = [ast.unparse(mark) for mark in node.decorator_list]
    static = marks == ["staticmethod"]
    if "property" in marks:
        yield f"{place} is a property; take @property away: the trainer calls {name}(context) on the stage"
    elif isinstance(node, ast.AsyncFunctionDef):
        yield f"{place} is async, and nobody would await it: it would do nothing; write `def {name}(self, context)`"
    elif not marks and _yields(node):
        yield f"{place} has a yield: called, it would do nothing; take the yield out"
    elif (static or not marks) and not _takes(node.args, 1 if static else 2):
        remedy = f"write `def {name}({'' if static else 'self, '}context)`"
        yield f"{place} takes ({ast.unparse(node.args)}), and is called with the context alone; {remedy}"


def _takes(arguments: ast.arguments, count: int) -> bool:
    """Whether a function can be called with so many arguments, by position."""
    positional = len(arguments.posonlyargs) + len(arguments.args)
    required = positional - len(arguments.defaults)
    if any(default is None for default in arguments.kw_defaults):
        return False
    return required <= count and (positional >= count or arguments.vararg is not None)


def _yields(node: ast.AST) -> bool:
    """Whether a function is a generator; what it defines within is another function."""
    inner = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef
    below = [child for child in ast.iter_child_nodes(node) if not isinstance(child, inner)]
    return any(isinstance(child, ast.Yield | ast.YieldFrom) or _yields(child) for child in below)
