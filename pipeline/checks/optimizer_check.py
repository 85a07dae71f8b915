"""Whether the optimizer of a config can be built, from source alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pipeline.checks.inspection import Inspection
from pipeline.config.tree import Node
from pipeline.source_code import classes, source
from pipeline.source_code.annotations import shown

OPTIMIZERS = "torch.optim"


ADDRESS = "hyper_parameters.optimizer"


def check_short_form(inspection: Inspection, runner: Node, *, needed: bool, stepped: bool) -> None:
    """``hyper_parameters.optimizer``, of which every phase without ``optim_schedulers`` makes its own.

    Args:
        inspection: where the faults go.
        runner: the runner.
        needed: whether some phase does so.
        stepped: whether it certainly is ours that steps that of some phase.
    """
    node = inspection.tree.find(ADDRESS)
    if not needed:
        if node is not None and node.value is not None:
            message = "would be ignored: every phase of this runner has optim_schedulers; remove one or the other"
            inspection.add(node.key or node.origin, ADDRESS, message)
        return
    if node is None or not isinstance(node.value, dict) or "class" not in node.value:
        place = node.origin if node else runner.origin
        remedy = "add `optimizer: {class: Adam, learning_rate: 0.001}` to hyper_parameters"
        inspection.add(place, ADDRESS, f"training needs an optimizer; {remedy}")
    else:
        check_optimizer(inspection, ADDRESS, node, stepped=stepped)


def check_optimizer(inspection: Inspection, address: str, node: Node, *, stepped: bool) -> None:
    """An optimizer's ``class``, and the keys beside it, which are its own; ``stepped``: certainly by ours."""
    if {"learning_rate", "lr"} <= set(node.value):
        message = "means the same as 'learning_rate', which is set too; keep one"
        inspection.add(node.value["lr"].key or node.origin, f"{address}.lr", message)
    written = node.value["class"]
    path = Node(optimizer_name(written.value), written.origin, written.key)
    definition = inspection.find_class(path, f"{address}.class", "Optimizer", module=OPTIMIZERS)
    taken = classes.parameters(definition) if definition else None
    if taken and definition:
        given = {("lr" if key == "learning_rate" else key): each for key, each in node.value.items()}
        given.pop("class")
        # The first are the parameters to optimize, which the network stage gives.
        free = taken.without_first()
        named = replace(free, names=(*free.names, "learning_rate")) if "lr" in free.names else free
        inspection.check_arguments(named, Node(given, node.origin), address, definition.name)
    if definition and stepped and (argument := _step_needs(definition)):
        needs = f"{definition.name}.step needs a {argument}, and nobody gives it one"
        remedy = "write an updater or a Runner of your own, or name another optimizer"
        inspection.add(written.origin, f"{address}.class", f"{needs}; {remedy}")
    if definition and definition.module.name.startswith(f"{OPTIMIZERS}."):
        _check_rate(inspection, address, node)


def _step_needs(definition: source.Definition) -> str:
    """The argument without which an optimizer makes no step: the closure of LBFGS; ``""`` for none."""
    above = classes.ancestry(definition)[0] if isinstance(definition.node, source.ClassNode) else []
    step = next((classes.methods(each)["step"] for each in above if "step" in classes.methods(each)), None)
    required = step.args.args[1 : len(step.args.args) - len(step.args.defaults)] if step else []
    return required[0].arg if required else ""


def _check_rate(inspection: Inspection, address: str, node: Node) -> None:
    """Every optimizer of torch refuses a rate below 0, and takes a Tensor too, so that its annotation says nothing."""
    for key in {"learning_rate", "lr"} & set(node.value):
        rate = node.value[key]
        certain = rate.value is None or isinstance(rate.value, str | int | float | dict | list)
        if certain and not (isinstance(rate.value, int | float) and rate.value >= 0):
            message = f"is {shown(rate.plain())}; write a number of at least 0, such as 0.001"
            inspection.add(rate.origin, f"{address}.{key}", message)


def optimizer_name(name: Any) -> Any:
    """The class of torch.optim that a config means: ``ADAM``, as PaddleRec writes it, is ``Adam``."""
    module = source.read(OPTIMIZERS) if isinstance(name, str) and name.isidentifier() else None
    known = {each.lower(): each for each in (module.bindings if module else ())}
    return known.get(str(name).lower(), name) if module else name
