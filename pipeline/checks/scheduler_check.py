"""Whether the ``optim_schedulers`` of a phase can be built, from source alone."""

from __future__ import annotations

from typing import Any

from pipeline.checks.inspection import Inspection
from pipeline.checks.optimizer_check import check_optimizer
from pipeline.config.tree import Node
from pipeline.errors import nearest
from pipeline.source_code import classes, source
from pipeline.source_code.classes import Parameters

SCHEDULES = "pipeline.training.schedules"
OPTIM_SCHEDULER = "pipeline.training.optim_scheduler:OptimScheduler"
_KEYS = ("class", "args")


def check_optim_scheduler(inspection: Inspection, address: str, node: Node, *, judged: bool) -> None:
    """One of ``optim_schedulers``: ``{class, args}``; ``judged``: whether the phase is validated."""
    for name, child in node.children():
        if name not in _KEYS:
            message = f"unknown key{nearest(name, _KEYS) or '; known: args, class'}"
            inspection.add(child.key or child.origin, f"{address}.{name}", message)
    written = node.child("class")
    if written is None:
        if not set(node.value) - set(_KEYS):  # else the class may be misspelt
            inspection.add(node.origin, address, "has no class; write {class: noam, args: {optim_type: Adam, …}}")
        return
    path = Node(schedule_name(written.value), written.origin, written.key)
    found = inspection.find_class(path, f"{address}.class", "OptimScheduler", OPTIM_SCHEDULER, SCHEDULES)
    if found and found.name == "Plateau" and not judged:
        message = (
            "Plateau falls by the numbers of the validation, and there is none; add valid_dataset_name to the phase"
        )
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
