"""What stages read and write: declared in ``reads`` and ``writes``, and held against the context."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from pipeline import classes, source
from pipeline.context import Context
from pipeline.errors import ContextError, nearest
from pipeline.stages.base import StageBase


def check_reads(stage: StageBase, place: str, context: Context) -> None:
    """Before a stage runs: what it declares to read must be there.

    Raises:
        ContextError: a key is missing.
    """
    written = list(context)
    missing = [key for key in stage.reads if key not in written]
    if missing:
        key = missing[0]
        hint = nearest(key, written) or "; write it in an earlier stage, or take it out of `reads`"
        raise ContextError(
            f"{place} declares that it reads context['{key}'], which nothing wrote; written so far: {', '.join(context)}{hint}"
        )


def check_writes(stage: StageBase, place: str, context: Context) -> None:
    """After a stage has run: what it declares to write must be there.

    Raises:
        ContextError: a key is missing.
    """
    written = list(context)
    missing = [key for key in stage.writes if key not in written]
    if missing:
        raise ContextError(
            f"{place} declares that it writes context['{missing[0]}'] but did not; write it, or take it out of `writes`"
        )


def declared(definition: source.Definition, attribute: str) -> tuple[str, ...] | None:
    """The literal ``reads`` or ``writes`` of a class, its bases included; None where there is none to see."""
    above, _ = classes.ancestry(definition)
    for each in above:
        for node in each.node.body:
            targets = (
                node.targets
                if isinstance(node, ast.Assign)
                else [node.target]
                if isinstance(node, ast.AnnAssign)
                else []
            )
            if any(isinstance(target, ast.Name) and target.id == attribute for target in targets):
                return _literal(node)
    return None


def _literal(node: ast.stmt) -> tuple[str, ...] | None:
    assert isinstance(node, ast.Assign | ast.AnnAssign)
    try:
        value = ast.literal_eval(node.value) if node.value else None
    except ValueError:
        return None
    return tuple(map(str, value)) if isinstance(value, tuple | list) else None


def unwritten(stages: Mapping[str, source.Definition | None], given: frozenset[str]) -> dict[str, str]:
    """The first declared read of each stage that no earlier stage writes: stage -> message. From source alone.

    As soon as an earlier stage doesn't say what it writes, nothing is certain any more, and nothing is reported.

    Args:
        stages: the classes in the order in which they run.
        given: the keys that the trainer writes before the first.
    """
    written, faults = set(given), {}
    for stage, definition in stages.items():
        reads = declared(definition, "reads") if definition else None
        missing = [key for key in reads or () if key not in written]
        if missing and definition:
            hint = (
                nearest(missing[0], written)
                or f"; written by then: {', '.join(sorted(written - given)) or 'nothing but what the trainer writes'}"
            )
            faults[stage] = (
                f"{definition.name} ({definition.place}) reads context['{missing[0]}']; no earlier stage writes it{hint}"
            )
        writes = declared(definition, "writes") if definition else None
        if not writes:
            break
        written.update(writes)
    return faults
