"""Whether the model of a phase can be built, and its modules and its loss, from source alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import replace

from pipeline import class_path
from pipeline.checks.inspection import Inspection, plain
from pipeline.checks.named_class import class_of, given
from pipeline.config.load import Config
from pipeline.config.schema import DEFAULT_PLUGINS, PhaseSchema, RunnerSchema
from pipeline.config.tree import Node
from pipeline.errors import ClassPathError, nearest
from pipeline.source_code import classes, source, uncalled
from pipeline.source_code.uncalled import BRAIN

MODULE = "torch.nn.modules.module:Module"
MODULES = "torch.nn"
"""Where the class of a module is looked up that has only a name."""


class ModelCheck:
    """The checks of the model of one phase.

    Args:
        inspection: where the faults go.
        runner: the runner that it is built for.
        address: the phase's.
        phase: the phase.
    """

    def __init__(self, inspection: Inspection, runner: Node, address: str, phase: Node) -> None:
        self.inspection = inspection
        self.runner = runner
        self.address = address
        self.phase = phase

    def all(self) -> None:
        """Check the model, its arguments, its modules and its loss."""
        model = self.phase.child("model")
        self.modules()
        if model is None or model.value is None:
            self.missing("model", "add `model:`, the class of the model")
            return
        definition = self.inspection.find_class(model, f"{self.address}.model", "Model")
        self.uncalled(model, definition)
        if definition:
            self.arguments(model, definition)
            self.loss(definition)
            self.brain(model, definition)
            self.constructor(model, definition)

    def uncalled(self, model: Node, definition: source.Definition | None) -> None:
        """Methods of SpeechBrain's that a Brain defines and nobody calls, be it in the updater or the runner stage."""
        updater, runner = self.phase.find("updater.class_path"), self.runner.child("runner_class_path")
        callers = [
            node and self.inspection.find_class(node, address, name)
            for node, address, name in (
                (updater, f"{self.address}.updater.class_path", "Updater"),
                (runner, f"runner.{self.runner.name}.runner_class_path", "Runner"),
            )
        ]
        if any(node and not caller for node, caller in zip((updater, runner), callers, strict=True)):
            return
        infers = str(plain(self.runner, "class")).lower().endswith("infer")
        remedies = uncalled.OF_A_BRAIN if infers else uncalled.IN_A_CONFIG
        found: list[str] = []
        if definition and isinstance(definition.node, source.ClassNode):
            modules = [*self.inspection.modules.values(), *(each.module for each in callers if each)]
            found = uncalled.in_source(definition, BRAIN, remedies, modules)
        elif isinstance(model.value, type):
            found = uncalled.in_class(model.value, BRAIN, remedies)
        for message in found:
            self.inspection.add(model.origin, f"{self.address}.model", message)

    def missing(self, key: str, remedy: str) -> None:
        """A fault for a key that the default network needs."""
        self.inspection.add(self.phase.origin, f"{self.address}.{key}", f"required key is missing; {remedy}")

    def modules(self) -> None:
        """The modules that the config names, each with its arguments."""
        for name, module in _children(self.phase.child("modules")):
            address = f"{self.address}.modules.{name}"
            if not name.isidentifier():
                remedy = "use letters, digits and '_', as in self.modules.encoder"
                self.inspection.add(module.key or module.origin, address, f"'{name}' is no name of a module; {remedy}")
            path = class_of(
                self.inspection, address, module, "{class: Linear, args: {in_features: 8, out_features: 1}}"
            )
            found = self.inspection.find_class(path, f"{address}.class", "Module", module=MODULES) if path else None
            if path is None or found is None:
                continue
            if isinstance(found.node, source.ClassNode) and classes.is_subclass(found, MODULE) is False:
                message = f"{found.name} is not a torch.nn.Module; write `class {found.name}(torch.nn.Module)`"
                self.inspection.add(path.origin, f"{address}.class", message)
                continue
            written = given(module.child("args"), path)
            self.inspection.check_arguments(classes.parameters(found), written, f"{address}.args", found.name)

    def arguments(self, model: Node, definition: source.Definition) -> None:
        """The model's parameters: from ``modules`` and ``model_args``, else by name from ``hyper_parameters``."""
        taken = classes.parameters(definition)
        written = given(self.phase.child("model_args"), model)
        if taken is None or not isinstance(written.value, dict):
            return
        modules = self.phase.child("modules")
        if modules is not None and modules.value:
            self.takes_modules(modules, definition, taken, written)
            taken = taken.without(["modules"])
        hyper_parameters = self.inspection.tree.child("hyper_parameters")
        filled = {
            name: node
            for name, node in (hyper_parameters.children() if hyper_parameters else ())
            if name in taken.names and name not in written.value
        }
        # What hyper_parameters fill need not be given, but may be.
        free = replace(taken, required=taken.without(list(filled)).required)
        self.inspection.check_arguments(free, written, f"{self.address}.model_args", definition.name)
        free = replace(taken, required=())
        self.inspection.check_arguments(free, Node(filled, model.origin), "hyper_parameters", definition.name)

    def takes_modules(
        self, modules: Node, definition: source.Definition, taken: classes.Parameters, written: Node
    ) -> None:
        """Modules that the config names go to a Brain, as the argument ``modules`` of its constructor."""
        name, address = definition.name, f"{self.address}.modules"
        place = modules.key or modules.origin
        is_brain = not isinstance(definition.node, source.ClassNode) or classes.is_subclass(definition, BRAIN)
        if is_brain is False:
            message = f"are given to a Brain, and {name} is none; write `class {name}(Brain)`, or remove them"
            self.inspection.add(place, address, message)
        elif "modules" not in taken.names and not taken.any_name:
            remedy = f"write `def __init__(self, modules)` in {definition.module.file.name}, or remove them"
            self.inspection.add(place, address, f"are given to {name} as `modules`, which it does not take; {remedy}")
        elif twice := written.value.get("modules"):
            message = f"{name} is given the phase's own `modules`; keep one of the two"
            self.inspection.add(twice.key or twice.origin, f"{self.address}.model_args.modules", message)

    def loss(self, definition: source.Definition) -> None:
        """A plain module needs a loss; a Brain brings its own."""
        loss, address, name = self.phase.child("loss"), f"{self.address}.loss", definition.name
        is_class = isinstance(definition.node, source.ClassNode)
        is_brain = classes.is_subclass(definition, BRAIN) if is_class else None
        if is_brain is False and classes.is_subclass(definition, MODULE) is False:
            message = f"{name} is neither a torch.nn.Module nor a Brain; write `class {name}(torch.nn.Module)`"
            self.inspection.add((self.phase.child("model") or self.phase).origin, f"{self.address}.model", message)
            return
        if loss and loss.value is not None:
            self.inspection.find_class(loss, address, "Loss")
            if is_brain:
                message = f"would be ignored: {name} is a Brain and computes its own; remove it"
                self.inspection.add(loss.key or loss.origin, address, message)
        elif is_brain is False:
            self.missing("loss", f"{name} is a plain module: add `loss: torch.nn.functional.…`")

    def constructor(self, model: Node, definition: source.Definition) -> None:
        """The constructor of a Brain calls the one above it."""
        if not isinstance(definition.node, source.ClassNode) or not classes.is_subclass(definition, BRAIN):
            return
        above, complete = classes.ancestry(definition)
        for each in above if complete else ():
            if f"{each.module.name}:{each.name}" == BRAIN:
                return
            own, text = classes.methods(each).get("__init__"), ast.unparse(each.node)
            if own and "super" not in text:
                if ".__init__" not in text:
                    what = (
                        f"{each.name}.__init__ ({each.module.file.name}:{own.lineno}) does not call super().__init__()"
                    )
                    remedy = "call it first, with the modules: super().__init__({'net': net})"
                    self.inspection.add(model.origin, f"{self.address}.model", f"{what}; {remedy}")
                return

    def brain(self, model: Node, definition: source.Definition) -> None:
        """A Brain has to say what it computes, unless it makes its own steps."""
        computed, steps = ("compute_forward", "compute_objectives"), ("fit_batch", "evaluate_batch")
        if not isinstance(definition.node, source.ClassNode) or not classes.is_subclass(definition, BRAIN):
            return
        left = classes.undefined(definition, (*computed, *steps), BRAIN)
        if set(steps) <= set(left):
            missing = [name for name in computed if name in left]
            undefined(self.inspection, self.runner, f"{self.address}.model", model, definition, missing)


def undefined(
    inspection: Inspection, runner: Node, address: str, path: Node, definition: source.Definition, left: list[str]
) -> None:
    """A fault for methods that the default runner calls and nobody defines."""
    if left and has_default_runner(runner):
        hint = nearest(left[0], classes.methods(definition))
        message = class_path.left_abstract(str(path.value), definition.name, left) + hint
        inspection.add(path.origin, address, message)


def has_default_runner(runner: Node) -> bool:
    """Whether the runner stage is the default itself."""
    default = RunnerSchema.model_fields["runner_class_path"].default
    return plain(runner, "runner_class_path") in (None, default)


def loss_names(inspection: Inspection, runner: Node, address: str, phase: Node) -> set[str] | None:
    """The names of the losses that drive the optimizers of a phase, where it is ours that does; None: cannot tell.

    Args:
        inspection: finds the classes.
        runner: the runner that trains it.
        address: the phase's.
        phase: the phase.
    """
    model, loss = phase.child("model"), plain(phase, "loss")
    found = inspection.find_class(model, f"{address}.model", "Model") if model and model.value is not None else None
    if not found or not isinstance(found.node, source.ClassNode) or not is_stepped(found, runner, phase):
        return None
    above, complete = classes.ancestry(found)
    if classes.is_subclass(found, BRAIN) is False:
        return {"loss"} if isinstance(loss, str) and loss.startswith("torch.") else None
    defining = [each for each in above if "compute_objectives" in classes.methods(each)]
    return _returned_keys(classes.methods(defining[0])["compute_objectives"]) if defining and complete else None


def is_stepped(model: source.Definition, runner: Node, phase: Node) -> bool:
    """Whether it certainly is ours that steps the optimizers of a phase: no updater, Runner or ``fit_batch`` of the user's."""
    if not has_default_runner(runner) or plain(phase, "updater") is not None:
        return False
    is_brain = classes.is_subclass(model, BRAIN)
    return is_brain is False or bool(is_brain and classes.undefined(model, ("fit_batch",), BRAIN))


def _returned_keys(function: source.FunctionNode) -> set[str] | None:
    """The keys of the dicts that a function returns; None where some of what it returns is something else."""
    keys: set[str] = set()
    for value in _returned(function):
        if not isinstance(value, ast.Dict):
            return None
        for key in value.keys:
            if not isinstance(key, ast.Constant):
                return None
            keys.add(str(key.value))
    return keys or None


def _returned(node: ast.AST) -> Iterator[ast.expr | None]:
    for each in ast.iter_child_nodes(node):
        if isinstance(each, ast.Return):
            yield each.value
        if not isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            yield from _returned(each)


def may_report(inspection: Inspection, phases: Mapping[str, Node]) -> bool:
    """Whether a validation of these phases may report other numbers than their losses and metrics.

    A Brain or a plugin of the user's may, and so may a loss of the user's that gives several.
    """
    section = inspection.section("phase")
    for name in {str(plain(phase, "model_of") or name) for name, phase in phases.items()} & set(section):
        loss = plain(section[name], "loss")
        is_plain = is_plain_module(inspection, f"phase.{name}", section[name])
        if not (is_plain and isinstance(loss, str) and loss.startswith("torch.")):
            return True
    plugins = inspection.tree.child("plugins")
    items = [item for _, item in plugins.children()] if plugins else []
    names = [name for each in items for name in (each.value if isinstance(each.value, dict) else [each.value])]
    return any(name not in DEFAULT_PLUGINS for name in names)


def reported(phase: Node) -> set[str]:
    """The names of the numbers that the loss and the metrics of a phase give in a validation."""
    metrics = phase.child("metrics")
    return {"valid_loss", *(f"valid_{name}" for name, _ in (metrics.children() if metrics else ()))}


def is_plain_module(inspection: Inspection, address: str, phase: Node) -> bool:
    """Whether the model of a phase is certainly no Brain of the user's, which may log numbers of its own."""
    model = phase.child("model")
    found = inspection.find_class(model, f"{address}.model", "Model") if model and model.value is not None else None
    return bool(found and isinstance(found.node, source.ClassNode) and classes.is_subclass(found, BRAIN) is False)


def notes(config: Config) -> list[str]:
    """What is no fault of a config, and perhaps not meant either: two phases with a model each from one file."""
    found = dict.fromkeys(note for runner in config.runners for note in _twins(config.phases(runner), config))
    return list(found)


def _twins(phases: list[PhaseSchema], config: Config) -> Iterator[str]:
    first: dict[tuple[str, str], str] = {}
    for phase in phases:
        if not isinstance(phase.model, str):
            continue
        try:
            path = class_path.parse(phase.model, name="Model", workspace=config.workspace)
        except ClassPathError:  # a fault already
            continue
        if path.file is None:
            continue
        other = first.setdefault((path.module, path.name), phase.name)
        if other != phase.name:
            address = f"phase.{phase.name}.model"
            what = f"'{path.file.name}' is the model of phase '{other}' too, and each gets one of its own"
            yield f"{config.origin(address)}: {address}: {what}; to share one, write `model_of: {other}`"


def _children(node: Node | None) -> Iterator[tuple[str, Node]]:
    """The items of a mapping that are mappings themselves; the schema speaks of others."""
    for name, child in node.children() if node and isinstance(node.value, dict) else ():
        if isinstance(child.value, dict):
            yield name, child
