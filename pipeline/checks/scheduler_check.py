"""Whether the ``optim_schedulers`` of a phase can be built, from source alone."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from pipeline.checks.inspection import Inspection, plain
from pipeline.checks.named_class import class_of
from pipeline.checks.optimizer_check import check_optimizer
from pipeline.config.tree import Node
from pipeline.errors import one_of
from pipeline.source_code import classes, source
from pipeline.source_code.classes import Parameters

SCHEDULES = "pipeline.training.schedules"
OPTIM_SCHEDULER = "pipeline.training.optim_scheduler:OptimScheduler"
LR_SCHEDULERS = "torch.optim.lr_scheduler"


@dataclass(frozen=True)
class Around:
    """What is known of the run that an OptimScheduler is part of.

    Attributes:
        judged: the numbers that a validation reports to it; as a text, what to do for there to be one; None: cannot tell.
        losses: the names of the losses that reach it; None: cannot tell.
        stepped: whether it certainly is ours that steps it.
        batches: how many it trains on, where the config says so.
        accum_grad: how many make a window, where it does not say so itself.
        epochs: how many it trains for, where the config says so, right or wrong.
    """

    judged: str | set[str] | None
    losses: set[str] | None
    stepped: bool
    batches: int | None
    accum_grad: Any
    epochs: Any


def check_optim_scheduler(inspection: Inspection, address: str, node: Node, around: Around) -> None:
    """One of ``optim_schedulers``: ``{class, args}``.

    Args:
        inspection: where the faults go.
        address: its address.
        node: what is written there.
        around: the run that it is part of.
    """
    written = class_of(inspection, address, node, "{class: noam, args: {optim_type: Adam, …}}")
    if written is None:
        return
    path = Node(schedule_name(written.value), written.origin, written.key)
    found = inspection.find_class(path, f"{address}.class", "OptimScheduler", OPTIM_SCHEDULER, SCHEDULES)
    arguments = node.child("args") or Node({}, written.origin)
    if not found or not isinstance(arguments.value, dict):
        return
    inspection.check_arguments(_taken(found), arguments, f"{address}.args", found.name)
    optimizer, settings = arguments.child("optim_type"), arguments.child("optim_conf")
    if optimizer and settings and isinstance(settings.value, dict):
        whole = Node({**settings.value, "class": optimizer}, settings.origin, settings.key)
        applies = not classes.undefined(found, ("apply",), OPTIM_SCHEDULER)
        check_optimizer(inspection, f"{address}.args.optim_conf", whole, stepped=around.stepped and not applies)
    _check_loss(inspection, address, written, arguments, around)
    if found.module.name == SCHEDULES and found.name == "Plateau":
        _check_metric(inspection, address, written, arguments, around)
    elif found.module.name == SCHEDULES and found.name == "TorchSchedule":
        _check_schedule(inspection, address, arguments)
        _check_length(inspection, address, arguments, around)


def _check_loss(inspection: Inspection, address: str, written: Node, arguments: Node, around: Around) -> None:
    """The loss that it descends has to be there."""
    node = arguments.child("optim_loss")
    name = node.value if node and node.value is not None else "loss"
    if around.losses is None or not isinstance(name, str) or name in around.losses:
        return
    place = node if node and node.value is not None else written
    message = f"there is no loss '{name}' to descend{one_of(name, around.losses)}"
    inspection.add(place.origin, f"{address}.args.optim_loss", message)


def _check_metric(inspection: Inspection, address: str, written: Node, arguments: Node, around: Around) -> None:
    """The number by which a Plateau falls has to be reported."""
    if isinstance(around.judged, str):
        message = f"Plateau falls by the numbers of the validation, and there is none; {around.judged}"
        inspection.add(written.origin, f"{address}.class", message)
        return
    node = arguments.child("metric")
    if around.judged and node and isinstance(node.value, str) and node.value not in around.judged:
        message = f"nothing reports '{node.value}'{one_of(node.value, around.judged)}"
        inspection.add(node.origin, f"{address}.args.metric", message)


def _check_schedule(inspection: Inspection, address: str, arguments: Node) -> None:
    """The schedule of torch's that is named, and its arguments; its first is the optimizer, which is ours."""
    name, given = arguments.child("schedule"), arguments.child("args")
    place, base = f"{address}.args", f"{LR_SCHEDULERS}:LRScheduler"
    found = inspection.find_class(name, f"{place}.schedule", "Schedule", base, LR_SCHEDULERS) if name else None
    taken = classes.parameters(found) if found else None
    if found and taken:
        written = given if given and given.value is not None else Node({}, arguments.origin)
        inspection.check_arguments(taken.without_first(), written, f"{place}.args", found.name)


def _check_length(inspection: Inspection, address: str, arguments: Node, around: Around) -> None:
    """OneCycleLR ends at its last step; what is longer for want of data to tell is refused before the first step."""
    name, settings = plain(arguments, "schedule"), plain(arguments, "args")
    if not isinstance(name, str) or re.split("[.:]", name)[-1] != "OneCycleLR" or not isinstance(settings, dict):
        return
    total, epochs, steps = (settings.get(key) for key in ("total_steps", "epochs", "steps_per_epoch"))
    if total is None and isinstance(epochs, int) and isinstance(steps, int):
        total = epochs * steps
    accum_grad = plain(arguments, "accum_grad") or around.accum_grad or 1
    if not isinstance(total, int) or not isinstance(accum_grad, int):
        return
    per_epoch = plain(arguments, "per") == "epoch"
    needed = around.epochs if per_epoch else around.batches and -(-around.batches // accum_grad)
    if isinstance(needed, int) and needed > total:
        node = arguments.child("args") or arguments
        inspection.add(node.origin, f"{address}.args.args", too_short(name, total, needed, per_epoch=per_epoch))


def too_short(name: str, total: int, needed: int, *, per_epoch: bool) -> str:
    """The message for a schedule that is over before the training is."""
    unit = "epochs" if per_epoch else "windows of accumulation"
    return f"{name} has {total} steps, and the training has {needed} {unit}; write total_steps: {needed} or more"


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
