"""A phase: its model, loss, metrics, data and updater, checked from source alone."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from pipeline.check.data_flow import is_untouched
from pipeline.check.dataset import check_dataset
from pipeline.check.inspection import Inspection, Setting, kind, names_in, place_of
from pipeline.check.optimizer import Metrics, check_optim_scheduler, check_short_form
from pipeline.check.stage import call_faults
from pipeline.config.schema import MODEL_LOSS, TARGETS, UpdaterSettings, has_effect
from pipeline.errors import nearest, one_of
from pipeline.user_code import class_path, classes, source, uncalled
from pipeline.user_code.class_path import METRICS, MODULES, ClassPath
from pipeline.user_code.plugins import configured_plugins
from pipeline.user_code.uncalled import BRAIN

MODULE = "torch.nn.modules.module:Module"

_COMPUTING, _STEPPING = ("compute_forward", "compute_objectives"), ("fit_batch", "evaluate_batch")


def check_model(runner: Setting, phase: Setting) -> None:
    """The model of a phase, with its arguments, its modules and its loss.

    Args:
        runner: the runner that it is built for.
        phase: the phase.
    """
    for name, module in phase["modules"].entries():
        _check_module(name, module)
    model = phase["model"]
    if model.value is None:
        model.fault("required key is missing; add `model:`, the class of the model")
        return
    definition = model.find_class("Model")
    _check_uncalled(runner, phase, definition)
    _check_count_samples(phase["count_samples"])
    if definition:
        _check_arguments(phase, definition)
        _check_loss(phase, definition)
        if classes.is_subclass(definition, BRAIN):
            _check_brain(runner, model, definition)
    elif phase["loss"].value != MODEL_LOSS:
        phase["loss"].find_class("Loss")


def _check_module(name: str, module: Setting) -> None:
    """One of the modules that the config names, with its arguments."""
    if not name.isidentifier():
        module.fault(f"'{name}' is no name of a module; use letters, digits and '_', as in 'encoder'", of_key=True)
    path = module.class_of("{class: Linear, args: {in_features: 8, out_features: 1}}")
    definition = path.find_class("Module", module=MODULES)
    if definition and classes.is_subclass(definition, MODULE) is False:
        path.fault(f"{definition.name} is not a torch.nn.Module; write `class {definition.name}(torch.nn.Module)`")
    elif definition:
        module["args"].check_call(definition, path.origin)


def _check_uncalled(runner: Setting, phase: Setting, definition: source.Definition | None) -> None:
    """Report methods of SpeechBrain that a Brain defines and nothing calls."""
    model, updater, own_runner = phase["model"], phase["updater"]["class_path"], runner["runner_class_path"]
    callers = [updater.find_class("Updater"), own_runner.find_class("Runner")]
    if any(path.node and not caller for path, caller in zip((updater, own_runner), callers, strict=True)):
        return
    modules = [*phase.inspection.modules.values(), *(caller.module for caller in callers if caller)]
    definition = source.class_definition(model.value) if isinstance(model.value, type) else definition
    for message in uncalled.uncalled_faults(definition, BRAIN, uncalled.BRAIN_REMEDIES, modules):
        model.fault(message)


def _makes_optimizers(phase: Setting) -> bool:
    """Whether the Brain of a phase makes its optimizers; then a fault where the config has one too."""
    model = phase["model"]
    given = source.class_definition(model.value) if isinstance(model.value, type) else model.find_class("Model")
    above = classes.ancestry(given)[0] if given else []
    maker = next((cls for cls in above if "init_optimizers" in classes.methods(cls)), None)
    # That of our own makes none in a config.
    if not maker or source.is_ours(maker.module):
        return False
    also, shared = phase["optim_schedulers"], phase.inspection.setting("hyper_parameters")["optimizer"]
    if (also := also if also.value else shared).value is not None:
        what = f"{maker.name}.init_optimizers makes those of phase '{phase.name}'; remove one or the other"
        also.fault(what, of_key=True)
    return True


def _check_arguments(phase: Setting, definition: source.Definition) -> None:
    """The model's parameters: from ``modules`` and ``model_args``, else by name from ``hyper_parameters``."""
    parameters, model = classes.parameters(definition), phase["model"]
    arguments = phase["model_args"].or_empty(model.origin)
    if parameters is None or not arguments.is_mapping:
        return
    if phase["modules"].value:
        _check_modules(phase, definition, parameters, arguments)
        parameters = parameters.without(["modules"])
    hyper_parameters = phase.inspection.setting("hyper_parameters")
    free = set(parameters.names) - set(arguments.value)
    filling = hyper_parameters.with_keys({name: own.node for name, own in hyper_parameters.entries() if name in free})
    # What hyper_parameters fill need not be given, but may be.
    required = parameters.without(list(filling.value)).required
    arguments.check_arguments(replace(parameters, required=required), definition.name)
    filling.check_arguments(replace(parameters, required=()), definition.name)


def _check_modules(
    phase: Setting, definition: source.Definition, parameters: classes.Parameters, arguments: Setting
) -> None:
    """Check that modules of the config go to a Brain whose constructor takes ``modules``."""
    name, modules = definition.name, phase["modules"]
    if classes.is_subclass(definition, BRAIN) is False:
        modules.fault(f"are for a Brain, and {name} is none; write `class {name}(Brain)`, or remove them", of_key=True)
    elif "modules" not in parameters.names and not parameters.any_name:
        remedy = f"write `def __init__(self, modules)` in {definition.module.file.name}, or remove them"
        modules.fault(f"are given to {name} as `modules`, which it does not take; {remedy}", of_key=True)
    elif "modules" in arguments.value:
        arguments["modules"].fault(f"{name} is given the phase's own `modules`; keep one of the two", of_key=True)


def _check_loss(phase: Setting, definition: source.Definition) -> None:
    """Check that a plain module has a loss, and a Brain has none in the config."""
    loss, name, is_brain = phase["loss"], definition.name, classes.is_subclass(definition, BRAIN)
    if is_brain is False and classes.is_subclass(definition, MODULE) is False:
        phase["model"].fault(f"{name} is neither a torch.nn.Module nor a Brain; write `class {name}(torch.nn.Module)`")
    elif loss.value is not None:
        if loss.value != MODEL_LOSS:
            loss.find_class("Loss")
        elif is_brain is False and not _takes_target(definition):
            remedy = "have it take labels=None and return the loss with them, or name a loss function"
            loss.fault(f"is `model`, and {name}.forward takes none of {', '.join(TARGETS)}; {remedy}")
        if is_brain:
            loss.fault(f"would be ignored: {name} is a Brain and computes its own; remove it", of_key=True)
    elif is_brain is False and phase["updater"].value is None:
        remedy = f"add `loss: torch.nn.functional.…`, or `loss: {MODEL_LOSS}` if it returns its own"
        loss.fault(f"required key is missing; {name} is a plain module: {remedy}")


def _check_count_samples(path: Setting) -> None:
    """Check that ``count_samples`` of a phase is a function that can be called with a batch."""
    definition = path.find_class("count_samples")
    if definition is None:
        return
    if isinstance(definition.node, source.ClassNode):
        path.fault(f"'{path.value}' is a class, not a function; name a function that takes a batch")
        return
    parameters = classes.parameters(definition)
    if parameters and len(parameters.required) > 1:
        name = definition.name
        path.fault(f"{name} is called with the batch alone; write `def {name}(batch)`")


def _takes_target(definition: source.Definition) -> bool:
    """Whether the forward of a class takes a target, or its source does not say."""
    parameters = classes.method_parameters(definition, "forward")
    return parameters is None or parameters.any_name or not {*TARGETS}.isdisjoint(parameters.names)


def _check_brain(runner: Setting, model: Setting, definition: source.Definition) -> None:
    """Check that a Brain defines what it computes."""
    undefined = classes.undefined_methods(definition, (*_COMPUTING, *_STEPPING), BRAIN)
    if set(_STEPPING) <= set(undefined):
        refuse_undefined(runner, model, definition, [name for name in _COMPUTING if name in undefined])


def refuse_undefined(runner: Setting, path: Setting, definition: source.Definition, methods: list[str]) -> None:
    """Report methods that the default runner calls and nothing defines."""
    if methods and is_untouched(runner.node, "runner"):
        hint = nearest(methods[0], classes.methods(definition))
        path.fault(class_path.missing_methods(str(path.value), definition.name, methods) + hint)


def is_brain(phase: Setting) -> bool | None:
    """Whether the model of a phase is a Brain; None: unknown."""
    definition = phase["model"].find_class("Model")
    return classes.is_subclass(definition, BRAIN) if definition else None


def loss_names(runner: Setting, phase: Setting) -> set[str] | None:
    """The names of the losses that reach the optimizers of a phase; None: unknown."""
    definition = phase["model"].find_class("Model")
    if not definition or not is_stepped(runner, phase):
        return None
    if not classes.is_subclass(definition, BRAIN):
        return {"loss"} if _is_single(phase["loss"]) else None
    ancestry, complete = classes.ancestry(definition)
    methods = [functions for functions in map(classes.methods, ancestry) if "compute_objectives" in functions]
    return _returned_keys(methods[0]["compute_objectives"]) if methods and complete else None


def is_stepped(runner: Setting, phase: Setting) -> bool:
    """Whether our own code certainly steps the optimizers of a phase: no updater, runner stage or ``fit_batch`` of the user."""
    definition = phase["model"].find_class("Model")
    if not definition or not is_untouched(runner.node, "runner") or phase["updater"].value is not None:
        return False
    derives = classes.is_subclass(definition, BRAIN)
    return derives is False or bool(derives and classes.undefined_methods(definition, ("fit_batch",), BRAIN))


def _returned_keys(function: source.FunctionNode) -> set[str] | None:
    """The keys of the dicts that a function returns; None if it may return something else."""
    values = [node.value for node in source.own_nodes(function) if isinstance(node, ast.Return)]
    keys = [key for value in values for key in (value.keys if isinstance(value, ast.Dict) else [None])]
    names = {str(key.value) for key in keys if isinstance(key, ast.Constant)}
    return names if names and all(isinstance(key, ast.Constant) for key in keys) else None


def may_report(inspection: Inspection, phases: Iterable[Setting]) -> bool:
    """Whether a validation of these phases may report other numbers than their losses and metrics.

    A Brain or a plugin of the user's may, and so may a loss of the user's that gives several; no shipped plugin does.
    """
    known, (plugins, _) = inspection.settings("phase"), configured_plugins(inspection.tree, inspection.workspace)
    targets = [plugin.target for plugin in plugins]
    owners = [known.get(str(phase["model_of"].value), phase) for phase in phases]
    own = any(is_brain(owner) is not False or not _is_single(owner["loss"]) for owner in owners)
    return own or not all(isinstance(target, ClassPath) and source.is_our_name(target.module) for target in targets)


def _is_single(loss: Setting) -> bool:
    """Whether a loss certainly gives one number: one of torch's, or the one that the model returns."""
    return isinstance(loss.value, str) and (loss.value == MODEL_LOSS or loss.value.startswith("torch."))


def reported_names(phase: Setting) -> set[str]:
    """The names of the numbers that a validation of a phase reports."""
    datasets = names_in(phase["valid_dataset_name"])
    prefixes = [f"{dataset}/" for dataset in datasets] if len(datasets) > 1 else ["valid_"]
    numbers = ["loss", *(name for name, _ in phase["metrics"].entries())]
    return {f"{prefix}{number}" for prefix in prefixes for number in numbers}


UPDATER = "pipeline.updater.updater:UpdaterBase"

# What the network stage gives an updater, as far as its constructor names it.
UPDATER_ARGUMENTS = ("model", "brain", "optim_schedulers", "optimizer", "loader", "dataloader")


def check_updater(phase: Setting) -> None:
    """Check ``{class_path, args}`` of an updater: the class and its own arguments."""
    updater = phase["updater"]
    path = updater["class_path"]
    updater.check_keys(list(UpdaterSettings.model_fields))
    updater["args"].check_mapping()
    definition = path.find_class("Updater", UPDATER)
    arguments = updater["args"].or_empty(path.origin)
    for name in UPDATER_ARGUMENTS:
        if path.node and arguments[name].node:
            message = f"an updater is given '{name}' where its constructor names it; take it out"
            arguments[name].fault(message, of_key=True)
    own = {name: argument.node for name, argument in arguments.entries() if name not in UPDATER_ARGUMENTS}
    if arguments.is_mapping:
        arguments.with_keys(own).check_call(definition, path.origin, UPDATER_ARGUMENTS)
    definition = source.class_definition(path.value) if isinstance(path.value, type) else definition
    for message in uncalled.uncalled_faults(definition, uncalled.STANDARD_UPDATER, uncalled.UPDATER_REMEDIES):
        path.fault(message)
    parameters, schedulers = classes.parameters(definition) if definition else None, phase["optim_schedulers"].entries()
    if parameters and "optimizer" in parameters.required and len(names := [name for name, _ in schedulers]) > 1:
        path.fault(f"takes one optimizer, and the phase has {', '.join(names)}; let it take optim_schedulers, by name")


# How code of an updater reaches the optimizers that the network stage has built.
_OPTIMIZERS_OF_BRAIN = {"fit_batch", "optimizers_step", "optimizer", "optimizers_dict", "zero_grad"}


def updates_alone(phase: Setting) -> bool:
    """Return whether the updater of a phase certainly does not use the optimizers that a config gives to it.

    Its constructor takes none of them then, and its source reaches none through the Brain.
    """
    path = phase["updater"]["class_path"]
    if path.node is None:
        return False
    given = isinstance(path.value, type)
    definition = source.class_definition(path.value) if given else path.find_class("Updater", UPDATER)
    parameters = classes.parameters(definition) if definition else None
    if definition is None or parameters is None:
        return False
    if not {"optimizer", "optim_schedulers"}.isdisjoint(parameters.names):
        return False
    above, complete = classes.ancestry(definition)
    own = [cls for cls in above if f"{cls.module.name}:{cls.name}" != uncalled.STANDARD_UPDATER]
    attributes = [node for cls in own for node in ast.walk(cls.node) if isinstance(node, ast.Attribute)]
    return complete and not any(_is_optimizer_of_phase(attribute) for attribute in attributes)


def _is_optimizer_of_phase(attribute: ast.Attribute) -> bool:
    """Return whether an attribute is ``optim_schedulers``, or one of a Brain that steps its optimizers."""
    if attribute.attr == "optim_schedulers":
        return True
    owner = source.dotted_name(attribute.value).rpartition(".")[2]
    return owner == "brain" and attribute.attr in _OPTIMIZERS_OF_BRAIN


# What the runner calls on a metric: method -> the arguments that it passes by position.
METRIC: Mapping[str, tuple[str, ...]] = {"update": ("predictions", "target"), "compute": (), "reset": ()}
TRAIN_METRIC: Mapping[str, tuple[str, ...]] = {**METRIC, "state_dict": (), "load_state_dict": ("state",)}


def check_calls(path: Setting, definition: source.Definition, methods: Mapping[str, tuple[str, ...]]) -> None:
    """Check that the methods of a metric take the arguments that the runner passes by position."""
    for name, arguments in methods.items():
        method, owner = classes.member(definition, name) or (None, definition)
        if not isinstance(method, source.FunctionNode):
            continue
        # What `update` takes beyond predictions and target is passed by name, see `check_fields`.
        takes_both = method.args.vararg is not None or classes.count_positional(method.args) > len(arguments)
        if name == "update" and takes_both:
            continue
        for message in call_faults(method, place_of(owner, name, method), arguments):
            path.fault(message)


def check_fields(fields: Setting, path: Setting, definition: source.Definition) -> None:
    """``batch`` of a metric: what its ``update`` gets beside predictions and target, by the names of its arguments."""
    fields.check_mapping()
    for _, field in fields.entries():
        if not isinstance(field.value, str):
            field.fault(f"is {classes.describe_value(field.value)}; write the name of a field of the batch")
    parameters = classes.method_parameters(definition, "update")
    if parameters and (fields.is_mapping or not fields.node):
        beside = replace(parameters.without(parameters.names[: min(parameters.positional, 2)]), annotations={})
        given: Mapping[str, Any] = fields.value or {}
        faults = beside.argument_faults(given, f"{definition.name}.update")
        if missing := faults.pop("", ""):
            example = ", ".join(f"{name}: <field of the batch>" for name in beside.required if name not in given)
            path.fault(f"{missing}: batch: {{{example}}}")
        for name, message in faults.items():
            fields[name].fault(message, of_key=True)


# What a phase takes from the phase whose model it shares.
MODEL_KEYS = ("model", "model_args", "modules", "loss", "count_samples", "optim_schedulers")


class PhaseCheck:
    """The checks of what the default network stage builds.

    Args:
        runner: the runner that it is built for.
        phases: name -> phase, those that it runs.
    """

    def __init__(self, runner: Setting, phases: dict[str, Setting]) -> None:
        self.runner, self.phases, self.trains = runner, phases, kind(runner) == "train"

    def all(self) -> None:
        """Check the phases of the runner, and the optimizer if it trains."""
        for phase in self.phases.values():
            self.phase(phase)
        own_phases = [phase for phase in self.phases.values() if phase["model_of"].value is None]
        first: dict[source.Definition, str] = {}
        for phase in own_phases:
            if model := phase["model"].find_class("Model"):
                other, file = first.setdefault(model, phase.name), model.module.file
                if other != phase.name and file in self.runner.inspection.modules:
                    what = f"'{file.name}' is the model of phase '{other}' too, and each gets one of its own"
                    phase["model"].note(f"{what}; to share one, write `model_of: {other}`")
        if own_phases and self.trains:
            making = [phase for phase in own_phases if _makes_optimizers(phase)]
            without = [phase for phase in own_phases if not (phase["optim_schedulers"].value or phase in making)]
            stepped = any(is_stepped(self.runner, phase) for phase in without)
            needed = any(self.uses_optimizers(phase) for phase in without)
            shared = self.runner.inspection.setting("hyper_parameters")["optimizer"]
            is_written = bool(without) and shared.value is not None
            if needed or is_written or not (without or making):
                check_short_form(self.runner, needed=bool(without), stepped=stepped)
            elif len(without) == len(own_phases):
                self.refuse_optimizer_keys()

    def uses_optimizers(self, phase: Setting) -> bool:
        """Return whether training may use the optimizers that a config gives to a phase.

        Phases that share its model use them too.
        """
        sharing = [other for other in self.phases.values() if other["model_of"].value == phase.name]
        return any(not updates_alone(each) for each in (phase, *sharing))

    def refuse_optimizer_keys(self) -> None:
        """Refuse the runner's keys for optimizers if every phase has an updater with its own."""
        for key in ("grad_clip", "grad_clip_value", "accum_grad", "check_gradients"):
            setting = self.runner[key]
            if setting.is_written and has_effect(key, setting.value):
                setting.refuse_idle("the updater of each phase has its own optimizer; do this in it, and remove it")

    def phase(self, phase: Setting) -> None:
        """Check one phase."""
        if phase["model_of"].value is not None:
            self.sharing(phase)
        else:
            check_model(self.runner, phase)
            self.optim_schedulers(phase)
        for key in ("dataset_name", "valid_dataset_name"):
            for name in phase[key].references("dataset"):
                check_dataset(phase.inspection.settings("dataset")[name])
        if phase["dataset_name"].value is None and (self.trains or phase["valid_dataset_name"].value is None):
            phase["dataset_name"].fault("required key is missing; add `dataset_name:`, one of `dataset:`")
        if phase["updater"].is_mapping:
            check_updater(phase)
        self.metrics(phase)

    def metrics(self, phase: Setting) -> None:
        """Check the metrics of a phase; some runner of the config, in ``mode`` or not, has to have data for them."""
        for key, methods in (("metrics", METRIC), ("train_metrics", TRAIN_METRIC)):
            for name, metric in phase[key].entries():
                self.metric(name, metric, methods)
        runners = phase.inspection.settings("runner").values()
        own = [each for each in runners if each["phases"].value is None or phase.name in names_in(each["phases"])]
        kinds = {kind(runner) for runner in own}
        if not kinds <= {"train", "infer"} or not all(is_untouched(runner.node, "runner") for runner in own):
            return
        if phase["metrics"].value and "infer" not in kinds and not names_in(phase["valid_dataset_name"]):
            what = "have nothing to judge: the phase is neither validated nor evaluated by an infer runner"
            phase["metrics"].fault(f"{what}; add valid_dataset_name, or write train_metrics", of_key=True)
        if phase["train_metrics"].value and "train" not in kinds:
            phase["train_metrics"].fault("have nothing to judge: no runner trains the phase; remove them", of_key=True)

    def sharing(self, phase: Setting) -> None:
        """Check a phase with ``model_of``."""
        model_of, other = phase["model_of"], phase["model_of"].value
        if not isinstance(other, str):  # the schema says so
            return
        if other == phase.name:
            model_of.fault(f"'{other}' is this phase itself; name another, or a `model`")
        elif other not in phase.inspection.tree.section("phase"):
            model_of.fault(f"there is no phase '{other}'{one_of(other, self.phases.keys() - {phase.name})}")
        elif other not in self.phases:
            remedy = "add it to the runner's `phases`, or name one of those"
            model_of.fault(f"phase '{other}' is not run by runner '{self.runner.name}'; {remedy}")
        elif (first := self.phases[other]["model_of"].value) is not None:
            model_of.fault(f"'{other}' has the model of '{first}'; name '{first}' itself")
        for key in MODEL_KEYS:
            if phase[key].is_written and phase[key].value not in (None, {}):
                why = f"the model is that of phase '{other}'"
                phase[key].fault(f"would be ignored: {why}; remove it, or model_of", of_key=True)

    def optim_schedulers(self, phase: Setting) -> None:
        """Check the optimizers of a phase; they receive validation numbers from each phase that shares the model."""
        metrics, losses = self.validation_metrics(phase), loss_names(self.runner, phase) if self.trains else None
        stepped = self.trains and is_stepped(self.runner, phase)
        for _, scheduler in phase["optim_schedulers"].entries():
            check_optim_scheduler(scheduler, self.runner, metrics, losses, self.batches(), stepped=stepped)

    def validation_metrics(self, phase: Setting) -> Metrics:
        """The numbers that a validation reports to the optimizers; as a text, what to do to have one; None: unknown."""
        sharing = [phase, *(other for other in self.phases.values() if other["model_of"].value == phase.name)]
        validated = [other for other in sharing if other["valid_dataset_name"].value is not None]
        interval = self.runner["valid_interval"]
        if not validated:
            return "add valid_dataset_name to the phase"
        if not is_untouched(self.runner.node, "runner"):
            return None
        if interval.node and interval.value in (None, []):
            return "give the runner a valid_interval"
        if may_report(phase.inspection, validated):
            return None
        return set.intersection(*map(reported_names, validated))

    def batches(self) -> int | None:
        """How many batches the only phase of a runner trains on, if the runner's keys decide it."""
        limit, others = self.runner["max_steps"].value, ("epochs", "optimizer_step_limit", "debug")
        decides = len(self.phases) == 1 and not any(self.runner[key].value for key in others)
        return limit if decides and is_untouched(self.runner.node, "runner") and isinstance(limit, int) else None

    def metric(self, name: str, metric: Setting, methods: Mapping[str, tuple[str, ...]]) -> None:
        """One metric, ``{class, args}``; ``methods``: the methods that are called, with their arguments."""
        if name == "loss":
            metric.fault("would replace the loss of the phase, which is reported by that name; give it another")
        path = metric.class_of("{class: AUC} or {class: …, args: {…}}", "batch")
        definition = path.find_class("Metric", module=METRICS)
        if definition and not isinstance(definition.node, source.ClassNode):
            path.fault(f"'{path.value}' is a function, not a class; name a class with update, compute and reset")
        elif definition:
            refuse_undefined(self.runner, path, definition, classes.undefined_methods(definition, list(methods)))
            if is_untouched(self.runner.node, "runner"):
                check_calls(path, definition, methods)
            metric["args"].check_call(definition, path.origin)
            check_fields(metric["batch"], path, definition)
