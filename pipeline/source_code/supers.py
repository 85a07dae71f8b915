"""Where a method certainly asks the bases of its class, read from its source."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from pipeline.source_code import classes, source


def supers(method: source.FunctionNode, home: source.Definition) -> Iterator[ast.Attribute]:
    """Each ``super().m`` that is asked for whenever a method of the class ``home`` runs."""
    yield from _within(method.body, home)


def calls_super(definition: source.Definition, method: str) -> bool:
    """Whether a class has a method that certainly asks for the same of its bases."""
    node = classes.methods(definition).get(method)
    return node is not None and any(asked.attr == method for asked in supers(node, definition))


def _within(body: Sequence[ast.stmt], home: source.Definition) -> Iterator[ast.Attribute]:
    for statement in body:
        for node in _evaluated(statement):
            match node:
                case ast.Attribute(value=ast.Call(func=ast.Name("super"), args=given), ctx=ast.Load()):
                    own = not given or (len(given) == 2 and ast.unparse(given[0]) == home.name)
                    if own and "super" not in home.module.bindings:
                        yield node
        match statement:
            case ast.For(body=inner) | ast.Try(body=inner, handlers=[]):
                yield from _within(inner, home)
            case ast.With(items=items, body=inner) if not any("suppress" in ast.unparse(each) for each in items):
                yield from _within(inner, home)
        if any(isinstance(each, ast.Return | ast.Raise | ast.Break | ast.Continue) for each in ast.walk(statement)):
            return


def _evaluated(node: ast.AST) -> Iterator[ast.AST]:
    """The expressions that a statement evaluates in any case; none of those within its blocks."""
    yield node
    match node:
        case ast.Lambda() | ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return
        case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
            return
        case ast.Match(subject=first) | ast.IfExp(test=first) | ast.BoolOp(values=[first, *_]):
            yield from _evaluated(first)
        case _:
            for each in ast.iter_child_nodes(node):
                if isinstance(each, ast.expr | ast.keyword | ast.withitem):
                    yield from _evaluated(each)
