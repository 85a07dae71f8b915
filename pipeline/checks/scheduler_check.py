"""Whether the ``optim_schedulers`` of a phase can be built, from source alone."""

from __future__ import annotations

from typing import Any

from pipeline.checks.inspection import Inspection
from pipeline.checks.named_class import class_of
from pipeline.checks.optimizer_check import check_optimizer
from pipeline.config.tree import Node
from pipeline.source_code import classes, source
from pipeline.source_code.classes import Parameters

SCHEDULES = "pipeline.training.schedules"
OPTIM_SCHEDULER = "pipeline.training.optim_scheduler:OptimScheduler"


def check_optim_scheduler(inspection: Inspection, address: str, node: Node, *, unjudged: str) -> None:
    """One of ``optim_schedulers``: ``{class, args}``.

    Args:
        inspection: where the faults go.
        address: its address.
        node: what is written there.
        unjudged: what to do for the model to be validated; ``""`` where it is.
    """
    written = class_of(inspection, address, node, "{class: noam, args: {optim_type: Adam, …}}")
    if written is None:
        return
    path = Node(schedule_name(written.value), written.origin, written.key)
    found = inspection.find_class(path, f"{address}.class", "OptimScheduler", OPTIM_SCHEDULER, SCHEDULES)
    if found and found.name == "Plateau" and unjudged:
        message = f"Plateau falls by the numbers of the validation, and there is none; {unjudged}"
        inspection.add(written.origin, f"{address}.class", message)
    arguments = node.child("args") or Node({}, written.origin)
    if found and isinstance(arguments.value, dict):
        inspection.check_arguments(_taken(found), arguments, f"{address}.args", found.name)
        optimizer, settings = arguments.child("optim_type"), arguments.child("optim_conf")
        if optimizer and settings and isinstance(settings.value, dict):
            whole = Node({**settings.value, "class": optimizer}, settings.origin, settings.key)
            check_optimizer(inspection, f"{address}.args.optim_conf", whole)


def _taken(definition: source.Definition) -> Parameters | None:
    """What the constructor takes, and what it passes on to the schedule; the network stage gives the model."""
    general, special = classes.parameters(definition), classes.method_parameters(definition, "sche_init")
    if general is None or special is None:
        return None
    own = special.names if not special.any_name else ()
    taken = general.without(["model"])
    return Parameters(
        (*taken.names, *own),
        (*taken.required, *special.required),
        any_name=special.any_name,
        annotations={**taken.annotations, **special.annotations},
    )


def schedule_name(name: Any) -> Any:
    """The class of a schedule that comes along: ``noam`` and ``warmup_cosine`` are ``Noam`` and ``WarmupCosine``."""
    module = source.read(SCHEDULES) if isinstance(name, str) and name.isidentifier() else None
    known = {each.lower(): each for each in (source.classes(module) if module else ())}
    return known.get(str(name).lower().replace("_", ""), name) if module else name
