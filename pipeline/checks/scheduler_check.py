"""Whether the ``optim_schedulers`` of a phase can be built, from source alone."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from pipeline.checks.inspection import Setting
from pipeline.checks.optimizer_check import check_optimizer
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


def check_optim_scheduler(scheduler: Setting, around: Around) -> None:
    """One of ``optim_schedulers``: ``{class, args}``.

    Args:
        scheduler: what is written there.
        around: the run that it is part of.
    """
    written = scheduler.class_of("{class: noam, args: {optim_type: Adam, …}}")
    if written.node is None:
        return
    path = written.with_value(schedule_name(written.value))
    definition = path.find_class("OptimScheduler", OPTIM_SCHEDULER, SCHEDULES)
    arguments = scheduler["args"].or_empty(written.origin)
    if not definition or not arguments.is_mapping:
        return
    arguments.check_arguments(_taken(definition), definition.name)
    optimizer, settings = arguments["optim_type"], arguments["optim_conf"]
    if optimizer.node and settings.is_mapping:
        applies = not classes.undefined(definition, ("apply",), OPTIM_SCHEDULER)
        check_optimizer(settings, optimizer, stepped=around.stepped and not applies)
    _check_loss(arguments["optim_loss"], around)
    if (definition.module.name, definition.name) == (SCHEDULES, "Plateau"):
        _check_metric(path, arguments["metric"], around)
    elif (definition.module.name, definition.name) == (SCHEDULES, "TorchSchedule"):
        _check_schedule(arguments)
        _check_length(arguments, around)


def _check_loss(loss: Setting, around: Around) -> None:
    """The loss that it descends has to be there."""
    name = "loss" if loss.value is None else loss.value
    if around.losses is not None and isinstance(name, str) and name not in around.losses:
        loss.fault(f"there is no loss '{name}' to descend{one_of(name, around.losses)}")


def _check_metric(path: Setting, metric: Setting, around: Around) -> None:
    """The number by which a Plateau falls has to be reported."""
    if isinstance(around.judged, str):
        path.fault(f"Plateau falls by the numbers of the validation, and there is none; {around.judged}")
    elif around.judged and isinstance(metric.value, str) and metric.value not in around.judged:
        metric.fault(f"nothing reports '{metric.value}'{one_of(metric.value, around.judged)}")


def _check_schedule(arguments: Setting) -> None:
    """The schedule of torch's that is named, and its arguments; its first is the optimizer, which is ours."""
    definition = arguments["schedule"].find_class("Schedule", f"{LR_SCHEDULERS}:LRScheduler", LR_SCHEDULERS)
    taken = classes.parameters(definition) if definition else None
    if definition and taken:
        arguments["args"].or_empty(arguments.origin).check_arguments(taken.without_first(), definition.name)


def _check_length(arguments: Setting, around: Around) -> None:
    """OneCycleLR ends at its last step; what is longer for want of data to tell is refused before the first step."""
    name, settings = arguments["schedule"].value, arguments["args"].value
    if not isinstance(name, str) or re.split("[.:]", name)[-1] != "OneCycleLR" or not isinstance(settings, dict):
        return
    total, epochs, steps = (settings.get(key) for key in ("total_steps", "epochs", "steps_per_epoch"))
    if total is None and isinstance(epochs, int) and isinstance(steps, int):
        total = epochs * steps
    accum_grad = arguments["accum_grad"].value or around.accum_grad or 1
    if not isinstance(total, int) or not isinstance(accum_grad, int):
        return
    per_epoch = arguments["per"].value == "epoch"
    needed = around.epochs if per_epoch else around.batches and -(-around.batches // accum_grad)
    if isinstance(needed, int) and needed > total:
        arguments["args"].fault(too_short(name, total, needed, per_epoch=per_epoch))


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
