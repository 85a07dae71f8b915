"""What reaches the context past the stages: a Brain that uses the one it is told, a file that patches what it imports."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from pipeline.inference.frame import is_ours
from pipeline.inference.members import ancestry, root_of
from pipeline.user_code import source
from pipeline.user_code.source import once

_BRAIN = "pipeline.training.brain:Brain"


def is_reached(modules: Iterable[source.Module]) -> bool:
    """Whether code of some files, and of those that they import relatively, may change what the stages find or do."""
    return any(_reaches(each) for module in modules for each in source.neighbours(module))


def keeps_context(definition: source.Definition) -> bool:
    """Whether a model may be a Brain that uses the context which the runner stage tells it."""
    above, complete = ancestry(definition)
    is_brain = any(f"{each.module.name}:{each.name}" == _BRAIN for each in above)
    return (is_brain or not complete) and any(_uses_context(each.node) for each in above if not is_ours(each.module))


def _uses_context(node: ast.AST) -> bool:
    parts = ast.walk(node)
    return any(
        (isinstance(each, ast.FunctionDef) and each.name == "bind")
        or (isinstance(each, ast.Attribute) and each.attr == "_run_context")
        or (isinstance(each, ast.Name) and each.id in {"getattr", "vars"})
        for each in parts
    )


@once
def _reaches(module: source.Module) -> bool:
    if is_ours(module):
        return False
    for statement in module.body:
        for node in ast.walk(statement):
            if (
                isinstance(node, ast.ClassDef)
                and _uses_context(node)
                and keeps_context(source.Definition(node, module))
            ):
                return True
            if _is_patch(node, module):
                return True
    return False


def _is_patch(node: ast.AST, module: source.Module) -> bool:
    """``lib.helper = …``, ``Startup.load = …``, ``setattr(Startup, …)`` of what the file imports from its neighbours or from us."""
    match node:
        case ast.Attribute(value=owner, ctx=ast.Store() | ast.Del()):
            pass
        case ast.Call(func=ast.Name(id="setattr" | "delattr"), args=[owner, *_]):
            pass
        case _:
            return False
    while isinstance(owner, ast.Attribute):
        owner = owner.value
    binding = module.bindings.get(owner.id) if isinstance(owner, ast.Name) else None
    if isinstance(binding, ast.ImportFrom) and binding.level:
        return True
    return binding is not None and root_of(binding) == "pipeline"
