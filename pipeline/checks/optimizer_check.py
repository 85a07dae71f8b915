"""Whether the optimizer of a config can be built, from source alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pipeline.checks.inspection import Setting
from pipeline.source_code import classes, source
from pipeline.source_code.annotations import shown

OPTIMIZERS = "torch.optim"


def check_short_form(runner: Setting, *, needed: bool, stepped: bool) -> None:
    """``hyper_parameters.optimizer``, of which every phase without ``optim_schedulers`` makes its own.

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
    elif optimizer["class"].node is None:
        remedy = "add `optimizer: {class: Adam, learning_rate: 0.001}` to hyper_parameters"
        place = optimizer if optimizer.node else replace(optimizer, above=runner.origin)
        place.fault(f"training needs an optimizer; {remedy}")
    else:
        check_optimizer(optimizer, optimizer["class"], stepped=stepped)


def check_optimizer(settings: Setting, named: Setting, *, stepped: bool) -> None:
    """An optimizer's class, and its own keys; ``stepped``: certainly by ours."""
    if settings["learning_rate"].node and settings["lr"].node:
        settings["lr"].fault("means the same as 'learning_rate', which is set too; keep one", of_key=True)
    path = named.with_value(optimizer_name(named.value), f"{settings.address}.class")
    definition = path.find_class("Optimizer", module=OPTIMIZERS)
    taken = classes.parameters(definition) if definition else None
    if taken and definition:
        given = {
            ("lr" if key == "learning_rate" else key): each.node for key, each in settings.entries() if key != "class"
        }
        # The first are the parameters to optimize, which the network stage gives.
        free = taken.without_first()
        if "lr" in free.names:
            free = replace(free, names=(*free.names, "learning_rate"))
        settings.with_value(given).check_arguments(free, definition.name)
    if definition and stepped and (argument := _step_needs(definition)):
        remedy = "write an updater or a Runner of your own, or name another optimizer"
        path.fault(f"{definition.name}.step needs a {argument}, and nobody gives it one; {remedy}")
    if definition and definition.module.name.startswith(f"{OPTIMIZERS}."):
        _check_rate(settings)


def _step_needs(definition: source.Definition) -> str:
    """The argument without which an optimizer makes no step: the closure of LBFGS; ``""`` for none."""
    above, _ = classes.ancestry(definition)
    step = next((classes.methods(each)["step"] for each in above if "step" in classes.methods(each)), None)
    required = step.args.args[1 : len(step.args.args) - len(step.args.defaults)] if step else []
    return required[0].arg if required else ""


def _check_rate(settings: Setting) -> None:
    """Every optimizer of torch refuses a rate below 0, and takes a Tensor too, so that its annotation says nothing."""
    for rate in (settings["learning_rate"], settings["lr"]):
        value = rate.value
        certain = rate.node and (value is None or isinstance(value, str | int | float | dict | list))
        if certain and not (isinstance(value, int | float) and value >= 0):
            rate.fault(f"is {shown(value)}; write a number of at least 0, such as 0.001")


def optimizer_name(name: Any) -> Any:
    """The class of torch.optim that a config means: ``ADAM``, as PaddleRec writes it, is ``Adam``."""
    module = source.read(OPTIMIZERS) if isinstance(name, str) and name.isidentifier() else None
    known = {each.lower(): each for each in (module.bindings if module else ())}
    return known.get(str(name).lower(), name) if module else name
