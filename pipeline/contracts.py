"""What stages read and write: declared in ``reads`` and ``writes``, inferred, and held against the context."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import replace
from functools import cache

from pipeline.context import Context
from pipeline.errors import ContextError, nearest
from pipeline.inference.flow import ANY, Flow, Use
from pipeline.inference.members import declared
from pipeline.inference.stage import flow_of
from pipeline.source_code import classes, source
from pipeline.stages.base import METHODS, StageBase


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
        inferred = _of_ours(definition, METHODS[stage][1], frozenset((facts or {}).items()))
    else:
        inferred = flow_of(definition, METHODS[stage][1], arguments, facts)
    promised = [] if tells_all(definition, stage, inferred) else _unseen(definition, inferred)
    found = {use.key for use in inferred.demands()}
    owed = [key for key in declared(definition, "reads") or () if key not in found]
    needed = [Use((key,), "read", definition.place, sure=True) for key in owed]
    left = [Use((key,), "write", definition.place, sure=True) for key in promised]
    opaque = inferred.opaque | {(key,) for key in promised}
    return replace(inferred, uses=(*needed, *inferred.uses, *left), opaque=frozenset(opaque))


@cache
def _of_ours(definition: source.Definition, method: str, facts: frozenset[tuple[str, object]]) -> Flow:
    """What a default stage does, found out once."""
    return flow_of(definition, method, {}, dict(facts))


def broken(definition: source.Definition, stage: str, flow: Flow) -> list[str]:
    """The keys that a stage declares to write, or inherits the declaration of, and certainly doesn't."""
    return _unseen(definition, flow) if tells_all(definition, stage, flow) else []


def _unseen(definition: source.Definition, flow: Flow) -> list[str]:
    seen = {use.key for use in flow.uses if use.action == "write"}
    return [key for key in declared(definition, "writes") or () if key not in seen]


def tells_all(definition: source.Definition, stage: str, flow: Flow) -> bool:
    """Whether all that a stage writes stands in source of the user's own, and was followed."""
    method, (above, complete) = METHODS[stage][1], classes.ancestry(definition)
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
