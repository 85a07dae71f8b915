"""Whether somebody calls the methods of a stage class, and whether its ``super()`` leads to one; from source alone."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator, Sequence

from pipeline.errors import nearest, one_of
from pipeline.inference.flow import ANY
from pipeline.inference.frame import is_ours
from pipeline.inference.members import mark, patched
from pipeline.source_code import classes, source
from pipeline.source_code.finder import once
from pipeline.source_code.supers import supers

_OPTIONAL = {"terminal": {"abort"}}
"""Methods that a stage may have without a base class having them."""
_ELSEWHERE, _INSTEAD = {"runner": ("train",)}, {"runner": "; the trainer calls run(context)"}
"""Methods that other trainers have, near which nobody calls one; and what to write instead."""
_LOOKS = {"__class__", "__dict__", "__subclasses__", "__mro__", "__bases__", "__getattribute__"}
"""Attributes by which code reaches methods that it does not name."""


def wrong_supers(definition: source.Definition) -> Iterator[str]:
    """Each ``super().m`` that is certainly reached, of a method that no class after it in the order of bases has."""
    above, complete = classes.ancestry(definition)
    users = [each for each in above if not is_ours(each.module)]
    changed = frozenset[str]().union(*(patched(each.module) for each in users))
    if not complete or ANY in changed or any("__init_subclass__" in classes.methods(each) for each in above):
        return
    for index, each in enumerate(above):
        known = {name for other in above[index + 1 :] for name in classes.own_names(other)} | changed | set(dir(object))
        for name, method in classes.methods(each).items() if each in users else ():
            if mark(method, each.module) == "?" or any(_hides(lower, name) for lower in above[:index]):
                continue
            for asked in supers(method, each):
                if asked.attr not in known:
                    place = f"{each.name}.{name} ({each.module.file.name}:{asked.lineno})"
                    there = {name for other in above[index + 1 :] for name in classes.methods(other)}
                    hint = one_of(asked.attr, (name for name in there if not name.startswith("_")))
                    yield f"{place} calls super().{asked.attr}, which no class after {each.name} has{hint}"


def _hides(definition: source.Definition, name: str) -> bool:
    """Whether a class has a method in the place of its bases' that does not call them."""
    method = classes.methods(definition).get(name)
    return method is not None and "super" not in ast.unparse(method)


def uncalled(definition: source.Definition, stage: str, files: Iterable[source.Module]) -> Iterator[str]:
    """Each method that is named nearly as one of the stage's, and that certainly nobody calls.

    Args:
        definition: the class of the stage.
        stage: which of the five it is.
        files: the files of the workspace.
    """
    above, complete = classes.ancestry(definition)
    users = [each for each in above if not is_ours(each.module)]
    modules = {near for each in (*files, *(each.module for each in users)) for near in source.neighbours(each)}
    known = {name for each in above if each not in users for name in classes.methods(each)} | _OPTIONAL.get(
        stage, set()
    )
    own = {name for each in users for name in classes.methods(each)}
    public = [name for name in known - own if not name.startswith("_")]
    for each in users if complete else ():
        if not _is_beside(each, definition):
            continue
        for name, method in classes.methods(each).items():
            hint = nearest(name, public) or (_INSTEAD[stage] if nearest(name, _ELSEWHERE.get(stage, ())) else "")
            plain = not name.startswith("_") and not method.decorator_list and name not in known
            if hint and plain and not _is_reached(name, above, modules):
                yield f"{each.name}.{name} ({each.module.file.name}:{method.lineno}) is called by nobody{hint}"


def _is_beside(definition: source.Definition, other: source.Definition) -> bool:
    """Whether two classes are in one folder; what others have written serves others too."""
    return definition.module.file.parent == other.module.file.parent


def _is_reached(name: str, above: Sequence[source.Definition], modules: Iterable[source.Module]) -> bool:
    """Whether anything in some modules may call a method of a class, which has these bases."""
    names = {each.name for each in above}
    if any(not each.complete or name in _mentioned(each) or names & _loose(each) for each in modules):
        return True
    return any(_gives_itself_away(each, names) for each in above if not is_ours(each.module))


@once
def _mentioned(module: source.Module) -> frozenset[str]:
    """The names of attributes that a module uses, and its strings: a method may be asked for by its name."""
    nodes = [node for statement in module.body for node in ast.walk(statement)]
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return frozenset(texts | {node.attr for node in nodes if isinstance(node, ast.Attribute)})


@once
def _loose(module: source.Module) -> frozenset[str]:
    """The names that a module uses as values, and not to derive from them, to ask for an attribute or as a type."""
    nodes = [node for statement in module.body for node in ast.walk(statement)]
    held = {id(part) for node in nodes for part in _held(node)}
    renamed = {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names if alias.asname}
    used = {node.id for node in nodes if isinstance(node, ast.Name) and id(node) not in held}
    return frozenset(used | renamed)


def _held(node: ast.AST) -> Iterator[ast.AST]:
    """The parts of a node that give nothing away of what they name."""
    match node:
        case ast.Attribute(value=value):
            yield value
        case ast.ClassDef(bases=bases):
            yield from bases
        case ast.Call(func=ast.Name("super" | "isinstance"), args=given):
            yield from given
        case ast.arg(annotation=kind) | ast.AnnAssign(annotation=kind) | ast.FunctionDef(returns=kind) if kind:
            yield from ast.walk(kind)


def _gives_itself_away(definition: source.Definition, names: Collection[str]) -> bool:
    """Whether an object of a class may come to others as a whole, or looks at itself: then anything may call its methods."""
    for method in classes.methods(definition).values():
        if mark(method, definition.module) == "staticmethod":
            continue
        own = next((each.arg for each in (*method.args.posonlyargs, *method.args.args)), "")
        nodes = list(ast.walk(method))
        held = {id(part) for node in nodes for part in _held(node)}
        for node in nodes:
            # `Base.method(self, …)`
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
                held |= {id(node.args[0])} if ast.unparse(node.func.value).rpartition(".")[2] in names else set()
        if not own or any(isinstance(each, ast.Name) and each.id == own and id(each) not in held for each in nodes):
            return True
        if any(isinstance(each, ast.Attribute) and each.attr in _LOOKS for each in nodes):
            return True
    return False
