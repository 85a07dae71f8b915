"""What stages of PaddleRec's users still use of paddle; in the entry-point group ``pipeline.checks``."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from pipeline.check.inspection import Inspection, place_of
from pipeline.user_code import classes, source

from .comparisons import keys_of_framework, never_equal


def check_leftovers(inspection: Inspection) -> None:
    """Report what nothing stands for here, with what to write instead."""
    for runner, flow in inspection.flows.items():
        keys = keys_of_framework(flow)
        for stage in filter(None, flow.stages.values()):
            for base in classes.ancestry(stage.definition)[0]:
                for message in () if source.is_ours(base.module) else (*_paddle_uses(base), *never_equal(base, keys)):
                    inspection.settings("runner")[runner].fault_at(f"{stage.stage}_class_path", message)


def _paddle_uses(definition: source.Definition) -> Iterator[str]:
    """What a stage of PaddleRec's users still uses of paddle and of ``envs``, where nothing of that name is there."""
    for name, method in classes.methods(definition).items():
        nodes = list(ast.walk(method))
        own = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        own |= {node.arg for node in nodes if isinstance(node, ast.arg)}
        for node in nodes:
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id="envs" as root), attr="get_global_env")):
                    arguments = [*node.args, *(keyword.value for keyword in node.keywords)][:2]
                    call = f"context['config'].get({', '.join(map(source.text_of, arguments))})"
                    what = f"calls envs.get_global_env, which is PaddleRec's; write {call}"
                case ast.Name(id="fluid" | "paddle" as root):
                    what = f"uses {root}, and paddle is not used here; write it with torch, or take the line out"
                case _:
                    continue
            if root not in own and _is_missing(root, definition.module):
                yield f"{place_of(definition, name, node)} {what}"


def _is_missing(name: str, module: source.Module) -> bool:
    """Whether a module certainly has no such name, or would import it from a package of PaddleRec's that is not there."""
    binding = module.bindings.get(name)
    if binding is None:
        return module.complete and not module.stars
    imported = re.match(r"(?:from|import) (paddle\w*)", source.text_of(binding))
    return imported is not None and source.find_spec(imported[1]) is None
