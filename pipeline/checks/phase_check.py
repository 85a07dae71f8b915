"""Whether a phase holds together: its model, loss, metrics, data and optimizer, from source alone."""

from __future__ import annotations

from dataclasses import replace

from pipeline import class_path
from pipeline.checks.inspection import Inspection, plain
from pipeline.checks.optimizer_check import check_short_form
from pipeline.checks.scheduler_check import check_optim_scheduler
from pipeline.config.schema import RunnerSchema
from pipeline.config.tree import DEFAULT, Node
from pipeline.errors import nearest
from pipeline.source_code import classes, source

BRAIN = "pipeline.training.brain:Brain"
MODULE = "torch.nn.modules.module:Module"
METRICS = "pipeline.training.metrics"
METRIC = ("update", "compute", "reset")
"""What the runner calls on a metric."""


class PhaseCheck:
    """The checks of what the default network stage builds.

    Args:
        inspection: where the faults go.
        runner: the runner that it is built for.
    """

    def __init__(self, inspection: Inspection, runner: Node) -> None:
        self.inspection = inspection
        self.tree = inspection.tree
        self.runner = runner

    def all(self, phases: dict[str, Node], *, trains: bool) -> None:
        """Check the phases of the runner, and the optimizer if it trains."""
        for name, phase in phases.items():
            self.phase(f"phase.{name}", phase, trains)
        if phases and trains:
            without = [phase for phase in phases.values() if not plain(phase, "optim_schedulers")]
            check_short_form(self.inspection, self.runner, needed=bool(without))

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
            self.brain(address, model, definition)
        for key in ("dataset_name", "valid_dataset_name"):
            self.dataset(phase, key, address)
        if plain(phase, "dataset_name") is None and (trains or plain(phase, "valid_dataset_name") is None):
            self.missing(phase, f"{address}.dataset_name", "add `dataset_name:`, one of `dataset:`")
        schedulers = phase.child("optim_schedulers")
        for name, scheduler in schedulers.children() if schedulers and isinstance(schedulers.value, dict) else ():
            judged = plain(phase, "valid_dataset_name") is not None
            check_optim_scheduler(self.inspection, f"{address}.optim_schedulers.{name}", scheduler, judged=judged)
        metrics = phase.child("metrics")
        for name, metric in metrics.children() if metrics and isinstance(metrics.value, dict) else ():
            self.metric(f"{address}.metrics.{name}", metric)

    def missing(self, phase: Node, address: str, remedy: str) -> None:
        """A fault for a key that the default network needs."""
        self.inspection.add(phase.origin, address, f"required key is missing; {remedy}")

    def model_arguments(self, address: str, phase: Node, model: Node, definition: source.Definition) -> None:
        """The model's parameters: filled from ``model_args``, else by name from ``hyper_parameters``."""
        taken = classes.parameters(definition)
        if taken is None:
            return
        hyper_parameters = self.tree.child("hyper_parameters")
        written = given(phase.child("model_args"), model)
        filled = {
            name: node
            for name, node in (hyper_parameters.children() if hyper_parameters else ())
            if name in taken.names and name not in written.value
        }
        # What hyper_parameters fill need not be given, but may be.
        free = replace(taken, required=taken.without(list(filled)).required)
        self.inspection.check_arguments(free, written, f"{address}.model_args", definition.name)
        free = replace(taken, required=())
        self.inspection.check_arguments(free, Node(filled, model.origin), "hyper_parameters", definition.name)

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

    def brain(self, address: str, model: Node, definition: source.Definition) -> None:
        """A Brain has to say what it computes, unless it makes its own steps."""
        computed, steps = ("compute_forward", "compute_objectives"), ("fit_batch", "evaluate_batch")
        if not isinstance(definition.node, source.ClassNode) or not classes.is_subclass(definition, BRAIN):
            return
        left = classes.undefined(definition, (*computed, *steps), BRAIN)
        if set(steps) <= set(left):
            self.undefined(f"{address}.model", model, definition, [name for name in computed if name in left])

    def undefined(self, address: str, path: Node, definition: source.Definition, left: list[str]) -> None:
        """A fault for methods that the default runner calls and nobody defines."""
        default = RunnerSchema.model_fields["runner_class_path"].default
        if left and plain(self.runner, "runner_class_path") in (None, default):
            hint = nearest(left[0], classes.methods(definition))
            message = class_path.left_abstract(str(path.value), definition.name, left) + hint
            self.inspection.add(path.origin, address, message)

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
                written = given(arguments, path or dataset)
                taken = classes.parameters(definition)
                self.inspection.check_arguments(taken, written, f"dataset.{name}.args", definition.name)
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
        if definition and not isinstance(definition.node, source.ClassNode):
            message = f"'{path.value}' is a function, not a class; name a class with update, compute and reset"
            self.inspection.add(path.origin, f"{address}.class", message)
        elif definition:
            self.undefined(f"{address}.class", path, definition, classes.undefined(definition, METRIC))
            written = given(metric.child("args"), path)
            taken = classes.parameters(definition)
            self.inspection.check_arguments(taken, written, f"{address}.args", definition.name)


def given(arguments: Node | None, otherwise: Node) -> Node:
    """The arguments where some are written; else none, to be reported where the class is named."""
    return arguments if arguments is not None and arguments.origin is not DEFAULT else Node({}, otherwise.origin)
