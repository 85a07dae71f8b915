"""Whether the optimizer of a config can be built, from source alone."""

from __future__ import annotations

from typing import Any

from pipeline import classes, source
from pipeline.annotations import shown
from pipeline.config.tree import Node
from pipeline.inspection import Inspection

OPTIMIZERS = "torch.optim"


def check_optimizer(inspection: Inspection, runner: Node) -> None:
    """``hyper_parameters.optimizer``: its class, and keys that are the optimizer's own."""
    address = "hyper_parameters.optimizer"
    node = inspection.tree.find(address)
    if node is None or not isinstance(node.value, dict) or "class" not in node.value:
        place = node.origin if node else runner.origin
        remedy = "add `optimizer: {class: Adam, learning_rate: 0.001}` to hyper_parameters"
        inspection.add(place, address, f"training needs an optimizer; {remedy}")
        return
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
        inspection.check_arguments(taken.without_first(), Node(given, node.origin), address, definition.name)
    if definition and definition.module.name.startswith(f"{OPTIMIZERS}."):
        _check_rate(inspection, node)


def _check_rate(inspection: Inspection, node: Node) -> None:
    """Every optimizer of torch refuses a rate below 0, and takes a Tensor too, so that its annotation says nothing."""
    for key in {"learning_rate", "lr"} & set(node.value):
        rate = node.value[key]
        certain = rate.value is None or isinstance(rate.value, str | int | float | dict | list)
        if certain and not (isinstance(rate.value, int | float) and rate.value >= 0):
            message = f"is {shown(rate.plain())}; write a number of at least 0, such as 0.001"
            inspection.add(rate.origin, f"hyper_parameters.optimizer.{key}", message)


def optimizer_name(name: Any) -> Any:
    """The class of torch.optim that a config means: ``ADAM``, as PaddleRec writes it, is ``Adam``."""
    module = source.read(OPTIMIZERS) if isinstance(name, str) and name.isidentifier() else None
    known = {each.lower(): each for each in (module.bindings if module else ())}
    return known.get(str(name).lower(), name) if module else name
