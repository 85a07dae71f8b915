"""Whether the optimizers and ``optim_schedulers`` of a phase can be built, from source alone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

from pipeline.check.inspection import Setting
from pipeline.config.foreign_keys import foreign_remedy
from pipeline.config.schema import multiple_of, too_short
from pipeline.errors import one_of
from pipeline.user_code import classes, source
from pipeline.user_code.class_path import LAZY_OPTIMIZERS, LR_SCHEDULERS, OPTIMIZERS, SCHEDULES
from pipeline.user_code.classes import Parameters, describe_value
from pipeline.user_code.source import find_spec


def check_short_form(runner: Setting, *, needed: bool, stepped: bool) -> None:
    """Check ``hyper_parameters.optimizer``, which every phase without ``optim_schedulers`` uses.

    Args:
        runner: the runner.
        needed: whether some phase does so.
        stepped: whether it certainly is ours that steps that of some phase.
    """
    optimizer = runner.inspection.setting("hyper_parameters")["optimizer"]
    if not needed:
        if optimizer.value is not None:
            message = "would be ignored: every phase of this runner has optim_schedulers; remove one or the other"
            optimizer.fault(message, of_key=True)
    elif optimizer["class"].node is None and optimizer["_target_"].node is not None:
        optimizer["_target_"].fault(f"unknown key{foreign_remedy('_target_', ['class'])}", of_key=True)
    elif optimizer["class"].node is None:
        place = optimizer if optimizer.node else replace(optimizer, parent_origin=runner.origin)
        example = "{class: Adam, lr: 0.001}"
        if optimizer.value is None:
            place.fault(f"training needs an optimizer; add `optimizer: {example}` to hyper_parameters")
        elif not optimizer.is_mapping:
            place.fault(f"is {describe_value(optimizer.value)}; write a mapping, such as {example}")
        else:
            place.fault(f"has no key `class`, which names the optimizer; add it, as in {example}")
    else:
        check_optimizer(optimizer, optimizer["class"], optimizer, stepped=stepped)


def check_optimizer(settings: Setting, optimizer: Setting, holder: Setting, *, stepped: bool) -> None:
    """An optimizer's class, its own keys, and its groups in ``holder``; ``stepped``: certainly by ours."""
    path = replace(optimizer.with_spelling_of(OPTIMIZERS), address=f"{settings.address}.class")
    definition = path.find_class("Optimizer", module=OPTIMIZERS)
    parameters = classes.parameters(definition) if definition else None
    # The first are the parameters to optimize, which the network stage gives.
    free = parameters.without_first() if parameters else None
    _check_options(settings, free, definition.name if definition else "", _OURS)
    if holder is not settings:
        _check_misplaced(settings, free)
    if definition and stepped and (argument := _step_needs(definition)):
        remedy = "write an updater or a Runner of your own, or name another optimizer"
        path.fault(f"{definition.name}.step needs a {argument}, and nobody gives it one; {remedy}")
    if definition and definition.module.name.startswith(f"{OPTIMIZERS}."):
        _check_rate(settings)
        if holder["lazy_mode"].value is True and definition.name not in LAZY_OPTIMIZERS:
            what = f"{definition.name} cannot step single rows"
            holder["lazy_mode"].fault(f"{what}; leave it out, or use {', '.join(LAZY_OPTIMIZERS)}", of_key=True)
    # A function takes other arguments than the optimizer that it makes.
    is_class = definition and isinstance(definition.node, source.ClassNode)
    _check_groups(holder, free if is_class else None, definition.name if definition else "")


# What a config has among the keys of an optimizer, and no optimizer takes.
_OURS = ("class", "groups", "remove_vector_weight_decay", "lazy_mode")


def _check_misplaced(settings: Setting, parameters: Parameters | None) -> None:
    """Report keys of ``optim_conf`` that are arguments of the OptimScheduler, and not of the optimizer."""
    for key in ("groups", "remove_vector_weight_decay", "lazy_mode"):
        is_taken = parameters is None or parameters.any_name or key in parameters.names
        if settings[key].node and not is_taken:
            what = f"'{key}' is an argument of the OptimScheduler, not of the optimizer"
            settings[key].fault(f"{what}; write it next to optim_conf, in args", of_key=True)
    if settings["class"].node:
        settings["class"].fault("optim_type names the class of the optimizer; remove it", of_key=True)


def _check_options(settings: Setting, parameters: Parameters | None, name: str, ours: Sequence[str]) -> None:
    """The options of an optimizer, or of one of its groups; ``ours``: the keys that are none."""
    # A custom optimizer may take `learning_rate` instead of `lr`.
    is_alias = parameters is None or "lr" in parameters.names or "learning_rate" not in parameters.names
    if is_alias and settings["learning_rate"].node and settings["lr"].node:
        settings["lr"].fault("means the same as 'learning_rate', which is set too; keep one", of_key=True)
    if is_alias and parameters and "lr" in parameters.names:
        parameters = replace(parameters, names=(*parameters.names, "learning_rate"))
    read = list(ours)
    for key, option in settings.entries():
        taken = parameters is None or parameters.any_name or key in parameters.names
        if not taken and (remedy := foreign_remedy(key, read)):
            option.fault(f"unknown key{remedy}", of_key=True)
            read.append(key)
    entries = ((key, option.node) for key, option in settings.entries() if key not in read)
    options = {"lr" if is_alias and key == "learning_rate" else key: node for key, node in entries}
    if settings["fused"].value == "auto" and "params" not in ours:
        del options["fused"]
    settings.with_keys(options).check_arguments(parameters, name)


def _check_groups(holder: Setting, parameters: Parameters | None, name: str) -> None:
    """``groups``, whose options are those of the optimizer; ``remove_vector_weight_decay`` and ``lazy_mode``."""
    groups, spares = holder["groups"], holder["remove_vector_weight_decay"]
    example = "{params: '*.bias', weight_decay: 0}"
    if groups.node and not isinstance(groups.node.value, list):
        groups.fault(f"is {describe_value(groups.value)}; write a list: [{example}]")
    for place, _ in groups.node.children() if groups.node else ():
        group = groups[place]
        patterns = group["params"].value
        listed = patterns if isinstance(patterns, list) else [patterns]
        if not listed or not all(isinstance(pattern, str) for pattern in listed):
            group["params"].fault(f"is {describe_value(patterns)}; write names of parameters or patterns: {example}")
        if parameters:
            _check_options(group, replace(parameters, required=()), name, ("params",))
        _check_rate(group, multiples=True)
    for switch in (spares, holder["lazy_mode"]):
        if switch.value not in (None, True, False):
            switch.fault(f"is {describe_value(switch.value)}; write true or false")
    if spares.value is True and parameters and not parameters.any_name and "weight_decay" not in parameters.names:
        spares.fault(f"would be ignored: {name} has no weight_decay; remove it", of_key=True)


def _step_needs(definition: source.Definition) -> str:
    """The argument that the optimizer's step needs: the closure of LBFGS; ``""`` for none."""
    ancestry, _ = classes.ancestry(definition)
    step = next((step for base in ancestry if (step := classes.methods(base).get("step"))), None)
    required = step.args.args[1 : len(step.args.args) - len(step.args.defaults)] if step else []
    return required[0].arg if required else ""


def _check_rate(settings: Setting, *, multiples: bool = False) -> None:
    """Check that the learning rate is not below 0, which every optimizer of torch refuses; or a multiple, in a group."""
    for rate in (settings["learning_rate"], settings["lr"]):
        value = rate.value
        certain = rate.node and (value is None or isinstance(value, str | int | float | dict | list))
        right = (isinstance(value, int | float) and value >= 0) or (multiples and multiple_of(value) is not None)
        if certain and not right:
            also = ", or 0.1x for a multiple of the base rate" if multiples else ""
            rate.fault(f"is {describe_value(value)}; write a number of at least 0, such as 0.001{also}")


# The numbers that a validation reports; as a text, what to do for there to be one; None: cannot tell.
Metrics: TypeAlias = str | set[str] | None

# The schedules of SpeeChain -> ours.
_OF_SPEECHAIN = {"noam.Noamlr": "noam", "noam.NoamLr": "noam", "exp.ExponentDecayLr": "exponential_decay"}

OPTIM_SCHEDULER = "pipeline.optim.optim_scheduler:OptimScheduler"


def check_optim_scheduler(
    setting: Setting, runner: Setting, metrics: Metrics, losses: set[str] | None, batches: int | None, *, stepped: bool
) -> None:
    """One of ``optim_schedulers``: ``{class, args}``.

    Args:
        setting: what is written there.
        runner: the runner.
        metrics: the numbers that a validation reports to it; as a text, what to do for there to be one; None: cannot tell.
        losses: the names of the losses that reach it; None: cannot tell.
        batches: how many it trains on, where the config says so.
        stepped: whether it certainly is ours that steps it.
    """
    class_setting = setting.class_of("{class: noam, args: {optim_type: Adam, …}}")
    if class_setting.node is None:
        return
    name = str(class_setting.value)
    # The spec of a mere folder, such as `exp` with SpeeChain's results, has no origin.
    if name in _OF_SPEECHAIN and not getattr(find_spec(name.partition(".")[0]), "origin", None):
        class_setting.fault(f"'{name}' is SpeeChain's name; write {_OF_SPEECHAIN[name]}, its arguments are the same")
        return
    path = class_setting.with_spelling_of(SCHEDULES)
    definition = path.find_class("OptimScheduler", OPTIM_SCHEDULER, SCHEDULES)
    arguments = setting["args"].or_empty(class_setting.origin)
    if not definition or not arguments.is_mapping:
        return
    arguments.check_arguments(_scheduler_parameters(definition), definition.name)
    _check_optimizer_of(arguments, definition, stepped=stepped)
    loss = arguments["optim_loss"]
    name = "loss" if loss.value is None else loss.value
    if losses is not None and isinstance(name, str) and name not in losses:
        loss.fault(f"there is no loss '{name}' to descend{one_of(name, losses)}")
    if (definition.module.name, definition.name) == (SCHEDULES, "Plateau"):
        metric = arguments["metric"]
        if isinstance(metrics, str):
            path.fault(f"Plateau falls by the numbers of the validation, and there is none; {metrics}")
        elif metrics and isinstance(metric.value, str) and metric.value not in metrics:
            metric.fault(f"nothing reports '{metric.value}'{one_of(metric.value, metrics)}")
    elif definition.module.name == SCHEDULES and definition.name in ("Noam", "WarmupLinear", "WarmupCosine"):
        _check_rise(definition.name, arguments, _windows(arguments, runner, batches))
    elif (definition.module.name, definition.name) == (SCHEDULES, "TorchSchedule"):
        # Its optimizer, the first parameter, is ours.
        schedule = arguments["schedule"].find_class("Schedule", f"{LR_SCHEDULERS}:LRScheduler", LR_SCHEDULERS)
        if schedule and (parameters := classes.parameters(schedule)):
            # The run says how long the training is, where this does not.
            required = tuple(name for name in parameters.required if name != "T_max")
            parameters = replace(parameters, required=required)
            if arguments["args"].value is not None:
                arguments["args"].check_mapping()
            arguments["args"].or_empty(arguments.origin).check_arguments(parameters.without_first(), schedule.name)
        _check_length(arguments, runner, batches)


def _check_optimizer_of(arguments: Setting, definition: source.Definition, *, stepped: bool) -> None:
    """Check ``optim_type`` and ``optim_conf`` of an OptimScheduler."""
    optimizer, settings = arguments["optim_type"], arguments["optim_conf"]
    if settings.node and not settings.is_mapping and "${" not in str(settings.value):
        settings.fault(f"is {describe_value(settings.value)}; write a mapping, for example {{lr: 0.001}}")
    if optimizer.node and settings.is_mapping:
        applies = not classes.undefined_methods(definition, ("apply",), OPTIM_SCHEDULER)
        check_optimizer(settings, optimizer, arguments, stepped=stepped and not applies)


def _check_length(arguments: Setting, runner: Setting, batches: int | None) -> None:
    """Check that a OneCycleLR does not end before the training; if the data decide, the run checks it before its first step."""
    name, settings = arguments["schedule"].value, arguments["args"].value
    if not isinstance(name, str) or re.split("[.:]", name)[-1] != "OneCycleLR" or not isinstance(settings, dict):
        return
    schedule_steps, epochs, steps = (settings.get(key) for key in ("total_steps", "epochs", "steps_per_epoch"))
    if schedule_steps is None and isinstance(epochs, int) and isinstance(steps, int):
        schedule_steps = epochs * steps
    per_epoch, training_steps = arguments["per"].value == "epoch", _windows(arguments, runner, batches)
    if per_epoch:
        training_steps = runner["epochs"].value if runner["max_steps"].value is None else None
    if isinstance(training_steps, int) and isinstance(schedule_steps, int) and training_steps > schedule_steps:
        arguments["args"].fault(too_short(name, schedule_steps, training_steps, per_epoch=per_epoch))


def _windows(arguments: Setting, runner: Setting, batches: int | None) -> int | None:
    """How many windows so many batches are; None: nobody knows."""
    accum_grad = arguments["accum_grad"].value or runner["accum_grad"].value or 1
    return -(-batches // accum_grad) if batches and isinstance(accum_grad, int) else None


def _check_rise(name: str, arguments: Setting, windows: int | None) -> None:
    """Check that a rise ends before its schedule, or that it is a share; ``windows``: those of the training."""
    rise, total = arguments["warmup_steps"], arguments["total_steps"].value or windows
    if isinstance(rise.value, float) and not 0 <= rise.value < 1:
        rise.fault(f"is {rise.value}; write a whole number of steps, or a share of them, of 0 or more and below 1")
    elif name != "Noam" and isinstance(rise.value, int) and isinstance(total, int) and rise.value >= total:
        rise.fault(f"is {rise.value}, and the schedule has {total} steps; the rise must end before the total")


def _scheduler_parameters(definition: source.Definition) -> Parameters | None:
    """The parameters of the constructor and of the schedule, without the model."""
    general, special = classes.parameters(definition), classes.method_parameters(definition, "sche_init")
    if general is None or special is None:
        return None
    general = general.without(["model"])
    names, required = (*general.names, *special.names), (*general.required, *special.required)
    annotations = {**general.annotations, **special.annotations}
    return Parameters(names, required, special.any_name, annotations=annotations)
