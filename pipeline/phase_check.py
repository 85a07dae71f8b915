"""Whether a phase holds together: its model, loss, metrics, data and optimizer, from source alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pipeline import classes, source
from pipeline.config.tree import DEFAULT, Node
from pipeline.errors import nearest
from pipeline.inspection import Inspection, plain

BRAIN = "pipeline.training.brain:Brain"
MODULE = "torch.nn.modules.module:Module"
OPTIMIZERS = "torch.optim"
METRICS = "pipeline.training.metrics"


class PhaseCheck:
    """The checks of what the default network stage builds.

    Args:
        inspection: where the faults go.
    """

    def __init__(self, inspection: Inspection) -> None:
        self.inspection = inspection
        self.tree = inspection.tree

    def all(self, phases: dict[str, Node], runner: Node, *, trains: bool) -> None:
        """Check the phases of a runner, and the optimizer if it trains."""
        for name, phase in phases.items():
            self.phase(f"phase.{name}", phase, trains)
        if phases and trains:
            self.optimizer(runner)

    def phase(self, address: str, phase: Node, trains: bool) -> None:
        """Check one phase."""
        model = phase.child("model")
        definition = None
        if model is None or model.value is None:
            self.missing(phase, f"{address}.model", "add `model:`, the class of the model")
        else:
            definition = self.inspection.find_class(model, f"{address}.model", "Model")
        if definition and model:
            self.model_arguments(address, phase, model, definition)
            self.loss(address, phase, definition)
        for key in ("dataset_name", "valid_dataset_name"):
            self.dataset(phase, key, address)
        if plain(phase, "dataset_name") is None and (trains or plain(phase, "valid_dataset_name") is None):
            self.missing(phase, f"{address}.dataset_name", "add `dataset_name:`, one of `dataset:`")
        metrics = phase.child("metrics")
        for name, metric in metrics.children() if metrics and isinstance(metrics.value, dict) else ():
            self.metric(f"{address}.metrics.{name}", metric)

    def missing(self, phase: Node, address: str, remedy: str) -> None:
        """A fault for a key that the default network needs."""
        self.inspection.add(phase.origin, address, f"required key is missing; {remedy}")

    def model_arguments(self, address: str, phase: Node, model: Node, definition: source.Definition) -> None:
        """The model's parameters: filled from ``model_args``, else by name from ``hyper_parameters``."""
        taken = classes.parameters(definition)
        hyper_parameters = self.tree.child("hyper_parameters")
        filled = [name for name, _ in hyper_parameters.children()] if hyper_parameters else []
        given = phase.child("model_args")
        written = given if given is not None and given.origin is not DEFAULT else Node({}, model.origin)
        names = [name for name in filled if taken and name in taken.names and name not in written.value]
        # What hyper_parameters fill need not be given, but may be.
        free = taken and replace(taken, required=taken.without(names).required)
        self.inspection.check_arguments(free, written, f"{address}.model_args", definition.name)

    def loss(self, address: str, phase: Node, definition: source.Definition) -> None:
        """A plain module needs a loss; a Brain brings its own."""
        loss = phase.child("loss")
        is_class = isinstance(definition.node, source.ClassNode)
        is_brain = classes.is_subclass(definition, BRAIN) if is_class else None
        if is_brain is False and classes.is_subclass(definition, MODULE) is False:
            name = definition.name
            message = f"{name} is neither a torch.nn.Module nor a Brain; write `class {name}(torch.nn.Module)`"
            self.inspection.add((phase.child("model") or phase).origin, f"{address}.model", message)
            return
        if loss and loss.value is not None:
            self.inspection.find_class(loss, f"{address}.loss", "Loss")
            if is_brain:
                message = f"would be ignored: {definition.name} is a Brain and computes its own; remove it"
                self.inspection.add(loss.key or loss.origin, f"{address}.loss", message)
        elif is_brain is False:
            remedy = f"{definition.name} is a plain module: add `loss: torch.nn.functional.…`"
            self.missing(phase, f"{address}.loss", remedy)

    def dataset(self, phase: Node, key: str, address: str) -> None:
        """The dataset that a phase names."""
        node, datasets = phase.child(key), self.inspection.section("dataset")
        if node is None or node.value is None:
            return
        for name in self.inspection.referred(node, f"{address}.{key}", "dataset", datasets):
            dataset = datasets[name]
            path, arguments = dataset.child("class_path"), dataset.child("args")
            definition = self.inspection.find_class(path, f"dataset.{name}.class_path", "Dataset") if path else None
            if definition:
                given = _given(arguments, path or dataset)
                taken = classes.parameters(definition)
                self.inspection.check_arguments(taken, given, f"dataset.{name}.args", definition.name)
            start = dataset.child("multiprocessing_context")
            if start and start.value and not plain(dataset, "num_workers"):
                message = "would be ignored: with num_workers: 0 nothing is started; remove it, or set num_workers"
                self.inspection.add(start.origin, f"dataset.{name}.multiprocessing_context", message)
            collate = dataset.child("collate_fn")
            if collate and collate.value is not None:
                self.inspection.find_class(collate, f"dataset.{name}.collate_fn", "collate")

    def metric(self, address: str, metric: Node) -> None:
        """One metric: ``{class, args}``."""
        path = metric.child("class")
        for name, node in metric.children():
            if name not in {"class", "args"}:
                message = f"unknown key{nearest(name, ('class', 'args')) or '; known: args, class'}"
                self.inspection.add(node.key or node.origin, f"{address}.{name}", message)
        if path is None:
            self.inspection.add(metric.origin, address, "has no class; write {class: AUC} or {class: …, args: {…}}")
            return
        definition = self.inspection.find_class(path, f"{address}.class", "Metric", module=METRICS)
        if definition:
            given = _given(metric.child("args"), path)
            taken = classes.parameters(definition)
            self.inspection.check_arguments(taken, given, f"{address}.args", definition.name)

    def optimizer(self, runner: Node) -> None:
        """``hyper_parameters.optimizer``: its class, and keys that are the optimizer's own."""
        address = "hyper_parameters.optimizer"
        node = self.tree.find(address)
        if node is None or not isinstance(node.value, dict) or "class" not in node.value:
            place = node.origin if node else runner.origin
            remedy = "add `optimizer: {class: Adam, learning_rate: 0.001}` to hyper_parameters"
            self.inspection.add(place, address, f"training needs an optimizer; {remedy}")
            return
        if {"learning_rate", "lr"} <= set(node.value):
            message = "means the same as 'learning_rate', which is set too; keep one"
            self.inspection.add(node.value["lr"].key or node.origin, f"{address}.lr", message)
        written = node.value["class"]
        path = Node(optimizer_name(written.value), written.origin, written.key)
        definition = self.inspection.find_class(path, f"{address}.class", "Optimizer", module=OPTIMIZERS)
        taken = classes.parameters(definition) if definition else None
        if taken and definition:
            given = {("lr" if key == "learning_rate" else key): each for key, each in node.value.items()}
            given.pop("class")
            # The first are the parameters to optimize, which the network stage gives.
            free = taken.without_first()
            self.inspection.check_arguments(free, Node(given, node.origin), address, definition.name)


def _given(arguments: Node | None, otherwise: Node) -> Node:
    """The arguments where some are written; else none, to be reported where the class is named."""
    return arguments if arguments is not None and arguments.origin is not DEFAULT else Node({}, otherwise.origin)


def optimizer_name(name: Any) -> Any:
    """The class of torch.optim that a config means: ``ADAM``, as PaddleRec writes it, is ``Adam``."""
    module = source.read(OPTIMIZERS) if isinstance(name, str) and name.isidentifier() else None
    known = {each.lower(): each for each in (module.bindings if module else ())}
    return known.get(str(name).lower(), name) if module else name
