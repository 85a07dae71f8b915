"""What stages read and write: declared in ``reads`` and ``writes``, inferred, and held against the context."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import replace
from functools import cache

from pipeline.context import STAGES, Context, PipelineStage
from pipeline.errors import ClassPathError, ContextError, nearest
from pipeline.inference.flow import ANY, Flow, Use
from pipeline.inference.frame import is_ours
from pipeline.inference.members import declared
from pipeline.inference.stage import flow_of
from pipeline.user_code import class_path, classes, source
from pipeline.user_code.classes import calls_super


def check_reads(stage: PipelineStage, method: str, place: str, context: Context) -> None:
    """Before a stage runs its method: what it declares to read must be there.

    Raises:
        ContextError: a key is missing.
    """
    written = list(context)
    missing = [key for key in _held_to(stage, method, "reads") if key not in written]
    if missing:
        key = missing[0]
        hint = nearest(key, written) or "; write it in an earlier stage, or take it out of `reads`"
        raise ContextError(
            f"{place} declares that it reads context['{key}'], which nothing wrote; written so far: {', '.join(context)}{hint}"
        )


def check_writes(stage: PipelineStage, method: str, place: str, context: Context) -> None:
    """After a stage has run its method: what it declares to write must be there.

    Raises:
        ContextError: a key is missing.
    """
    written = list(context)
    missing = [key for key in _held_to(stage, method, "writes") if key not in written]
    if missing:
        raise ContextError(
            f"{place} declares that it writes context['{missing[0]}'] but did not; write it, or take it out of `writes`"
        )


def _held_to(stage: PipelineStage, method: str, attribute: str) -> tuple[str, ...]:
    """What the stage declares, or a base whose method it certainly calls."""
    for each in (stage, *type(stage).__mro__):
        if attribute in vars(each):
            keys: tuple[str, ...] = vars(each)[attribute]
            return keys
        if method in vars(each) and not _calls_super(each, method):
            break
    return ()


def _calls_super(cls: object, method: str) -> bool:
    try:
        found = class_path.define(class_path.parse(class_path.describe(cls))) if isinstance(cls, type) else None
    except ClassPathError:  # such as a class within a function
        return False
    return found is not None and isinstance(found.node, ast.ClassDef) and calls_super(found, method)


def flow_of_stage(
    definition: source.Definition,
    stage: str,
    arguments: Mapping[str, object] | None = None,
    facts: Mapping[str, object] | None = None,
) -> Flow:
    """What a stage reads and writes: what it declares, and what its source shows.

    Args:
        definition: its class.
        stage: which of the five it is.
        arguments: those that the config gives it.
        facts: keys of the context whose value is known before anything runs.
    """
    if definition.module.name.startswith("pipeline.stages.") and not arguments:
        inferred = _of_ours(definition, STAGES[stage], frozenset((facts or {}).items()))
    else:
        inferred = flow_of(definition, STAGES[stage], arguments, facts)
    promised = [] if tells_all(definition, stage, inferred) else _unseen(definition, stage, inferred)
    found = {use.key for use in inferred.demands()}
    owed = [key for key in _promises(definition, stage, "reads", inferred) if key not in found]
    needed = [Use((key,), "read", definition.place, sure=True) for key in owed]
    left = [Use((key,), "write", definition.place, sure=True) for key in promised]
    opaque = inferred.opaque | {(key,) for key in promised}
    return replace(inferred, uses=(*needed, *inferred.uses, *left), opaque=frozenset(opaque))


@cache
def _of_ours(definition: source.Definition, method: str, facts: frozenset[tuple[str, object]]) -> Flow:
    """What a default stage does, found out once."""
    return flow_of(definition, method, {}, dict(facts))


def broken(definition: source.Definition, stage: str, flow: Flow) -> list[str]:
    """The keys that a stage declares to write, and certainly doesn't."""
    return _unseen(definition, stage, flow) if tells_all(definition, stage, flow) else []


def _unseen(definition: source.Definition, stage: str, flow: Flow) -> list[str]:
    seen = {use.key for use in flow.uses if use.action == "write"}
    return [key for key in _promises(definition, stage, "writes", flow) if key not in seen]


def _promises(definition: source.Definition, stage: str, attribute: str, flow: Flow) -> tuple[str, ...]:
    """What a class declares, or a base whose method it certainly calls."""
    method, (above, _) = STAGES[stage], classes.ancestry(definition)
    runs = any(is_ours(each.module) and f"{each.name}.{method}" in flow.runs for each in above)
    for each in above:
        if attribute in classes.own_names(each):
            return declared(definition, attribute) or ()
        if method in classes.own_names(each) and not (runs or calls_super(each, method)):
            break
    return ()


def tells_all(definition: source.Definition, stage: str, flow: Flow) -> bool:
    """Whether all that a stage writes stands in source of the user's own, and was followed."""
    method, (above, complete) = STAGES[stage], classes.ancestry(definition)
    home = next((each for each in above if method in classes.methods(each)), None)
    if (
        home is None
        or flow.unknown
        or ANY in flow.statuses
        or not complete
        or home.module.name.startswith("pipeline.stages.")
    ):
        return False
    if any(isinstance(node, ast.Raise) for node in classes.methods(home)[method].body):
        return False
    users = [each for each in above if not each.module.name.startswith("pipeline.stages.")]
    # What our own classes do is not followed to its end.
    calls = (node for each in users for node in ast.walk(each.node) if isinstance(node, ast.Attribute | ast.Name))
    return not any("super" in ast.unparse(node) or getattr(node, "attr", "") == method for node in calls)
