"""The names that a function binds, and those of them whose value at a given moment the source doesn't tell."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache

from pipeline.user_code import source

_LOOPS = ast.For | ast.AsyncFor | ast.While
_DEFINES = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef
_COMPREHENDS = ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp


@dataclass(frozen=True)
class Scope:
    """The names of one function.

    Attributes:
        bound: its local names.
        unsettled: those that are bound more than once and used by a function within, which sees now this value, now that.
        foreign: those of another scope that it binds, and its own that a function within binds.
    """

    bound: frozenset[str] = frozenset()
    unsettled: frozenset[str] = frozenset()
    foreign: frozenset[str] = frozenset()


@dataclass
class _Sites:
    """Where names are bound: how often each, what functions and classes stand within, which names are foreign."""

    times: Counter[str] = field(default_factory=Counter)
    within: list[ast.AST] = field(default_factory=list)
    foreign: set[str] = field(default_factory=set)

    def add(self, node: ast.AST, weight: int = 1) -> None:
        """Look through a node; ``weight``: how often it runs, twice standing for any number."""
        for name in _bound_by(node):
            self.times[name] += weight
        if isinstance(node, ast.Global | ast.Nonlocal):
            self.foreign |= set(node.names)
        if isinstance(node, _DEFINES):
            self.within.append(node)
            children: Iterable[ast.AST] = _evaluated_outside(node)
        elif isinstance(node, _COMPREHENDS):
            children = [*_outcomes(node), *(each for part in node.generators for each in (part.iter, *part.ifs))]
        else:
            children = ast.iter_child_nodes(node)
        for child in children:
            self.add(child, 2 * weight if isinstance(node, _LOOPS) else weight)


def _bound_by(node: ast.AST) -> Iterable[str]:
    """The names that a node itself binds."""
    match node:
        case ast.Name(ctx=ast.Store() | ast.Del()):
            return [node.id]
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return [node.name]
        case ast.ExceptHandler() | ast.MatchAs() | ast.MatchStar():
            return [node.name] if node.name else []
        case ast.MatchMapping():
            return [node.rest] if node.rest else []
        case ast.Import() | ast.ImportFrom():
            return source.bound_names(node)
    return []


def _evaluated_outside(node: ast.AST) -> list[ast.AST]:
    """The parts of a definition that are evaluated where it stands."""
    if isinstance(node, ast.ClassDef):
        return [*node.decorator_list, *node.bases, *node.keywords]
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    marks: list[ast.expr] = [] if isinstance(node, ast.Lambda) else node.decorator_list
    return [*marks, *defaults(node)]


def _outcomes(node: ast.AST) -> list[ast.AST]:
    return [node.key, node.value] if isinstance(node, ast.DictComp) else [getattr(node, "elt", ast.Pass())]


def defaults(node: source.FunctionNode | ast.Lambda) -> list[ast.expr]:
    """The values that parameters have unless a call gives others."""
    return [*node.args.defaults, *(each for each in node.args.kw_defaults if each)]


def parameters(node: source.FunctionNode | ast.Lambda) -> list[str]:
    """The names of all parameters."""
    takes = node.args
    stars = [each for each in (takes.vararg, takes.kwarg) if each]
    return [each.arg for each in (*takes.posonlyargs, *takes.args, *takes.kwonlyargs, *stars)]


@lru_cache(maxsize=1024)
def scope_of(node: source.FunctionNode | ast.Lambda) -> Scope:
    """The names of a function."""
    sites = _Sites()
    for each in [node.body] if isinstance(node, ast.Lambda) else node.body:
        sites.add(each)
    sites.times.update(parameters(node))
    used = {part.id for each in sites.within for part in ast.walk(each) if isinstance(part, ast.Name)}
    inner = [part for each in sites.within for part in ast.walk(each) if isinstance(part, ast.Nonlocal)]
    foreign = sites.foreign | {name for each in inner for name in each.names}
    unsettled = {name for name, times in sites.times.items() if name in used and times > 1}
    return Scope(frozenset(sites.times) - sites.foreign, frozenset(unsettled | foreign), frozenset(foreign))


@lru_cache(maxsize=1024)
def stored(nodes: tuple[ast.AST, ...]) -> Counter[str]:
    """How often statements bind each name; twice for any number of times."""
    sites = _Sites()
    for each in nodes:
        sites.add(each)
    return sites.times
