"""Every fault of a config, all at once, from source alone: no user code and no torch is imported.

The trainer calls this before it runs anything, and so does ``pipeline check``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pipeline import class_path, contracts, discovery, source
from pipeline.config.load import Config, Draft, Source, unknown_name
from pipeline.config.schema import RunnerSchema
from pipeline.config.tree import DEFAULT, Node, Origin
from pipeline.context import KEYS
from pipeline.errors import ClassPathError, ConfigError, Fault, nearest
from pipeline.stages.base import METHODS

BRAIN = "pipeline.training.brain:Brain"
OPTIMIZERS = "torch.optim"
METRICS = "pipeline.training.metrics"
_GIVEN = frozenset(key.name for key in KEYS if key.writer == "trainer")


def check(config: Source, overrides: Sequence[str] = ()) -> list[Fault]:
    """The faults of a config file or dict; an empty list means that it may run."""
    return _Check(Draft(config, overrides)).faults


def checked(config: Source, overrides: Sequence[str] = ()) -> Config:
    """The resolved config.

    Raises:
        ConfigError: it has faults; all of them.
    """
    draft = Draft(config, overrides)
    inspection = _Check(draft)
    if inspection.faults or draft.config is None:
        raise ConfigError(inspection.faults)
    draft.config.sources = inspection.files
    return draft.config


class _Check:
    """One inspection of one config; ``files`` are the workspace files that it came by."""

    def __init__(self, draft: Draft) -> None:
        self.faults = draft.faults
        self.workspace = draft.workspace
        self.modules: dict[Path, source.Module] = {}
        if draft.tree is None:
            return
        self.tree = draft.tree
        self._plugins()
        for address, runner in self._runners():
            self._runner(address, runner)
        self.faults[:] = list(dict.fromkeys(self.faults))

    @property
    def files(self) -> list[Path]:
        found = (neighbour.file for module in self.modules.values() for neighbour in source.neighbours(module))
        return sorted(set(found))

    def _section(self, name: str) -> dict[str, Node]:
        node = self.tree.child(name)
        items = node.children() if node and isinstance(node.value, list) else ()
        return {part: item for part, item in items if isinstance(item.value, dict)}

    def _add(self, origin: Origin, address: str, message: str) -> None:
        self.faults.append(origin.fault(address, message))

    def _plugins(self) -> None:
        plugins, faults = discovery.chosen(self.tree, self.workspace)
        self.faults += faults
        for plugin in plugins:
            self.faults += discovery.faults_of(plugin)
            if isinstance(plugin.target, class_path.ClassPath) and plugin.target.file:
                self._remember(plugin.target)

    def _runners(self) -> Iterable[tuple[str, Node]]:
        """The runners of ``mode``; a name that isn't there is a fault."""
        runners = self._section("runner")
        mode = self.tree.child("mode")
        for name in self._referred(mode, "mode", "runner", runners) if mode and mode.value is not None else runners:
            yield f"runner.{name}", runners[name]

    def _referred(self, node: Node, address: str, what: str, known: dict[str, Node]) -> list[str]:
        """The names in a list of references that exist; the others become faults."""
        names = []
        for item in node.value if isinstance(node.value, list) else [node]:
            if isinstance(item.value, str) and item.value in known:
                names.append(item.value)
            elif isinstance(item.value, str):
                self._add(item.origin, address, unknown_name(what, item.value, list(known)))
        return names

    def _runner(self, address: str, runner: Node) -> None:
        definitions = {stage: self._stage(address, runner, stage) for stage in METHODS}
        for stage, message in contracts.unwritten(definitions, _GIVEN).items():
            self._add(self._origin(runner, f"{stage}_class_path"), f"{address}.{stage}_class_path", message)
        trainer = runner.child("trainer_class")
        if trainer and trainer.origin is not DEFAULT:
            self._class(trainer, f"{address}.trainer_class", "Trainer", "pipeline.trainer:GeneralTrainer")
        default = {stage for stage, found in definitions.items() if found and _is_default(found, stage)}
        train = _plain(runner, "class") in {"train", "single_train"}
        self._budget(address, runner, default, train)
        phases = self._phases(address, runner)
        if not phases and default & {"network", "runner"} and not _plain(runner, "phases"):
            needy = " and ".join(sorted(default & {"network", "runner"}))
            self._add(runner.origin, address, f"the default {needy} needs a phase; add `phase:`, or replace network and runner")
        if "network" in default:
            for name, phase in phases.items():
                self._phase(f"phase.{name}", phase, train)
            if phases and train:
                self._optimizer(runner)

    def _origin(self, node: Node, key: str) -> Origin:
        child = node.child(key)
        return child.origin if child and child.origin is not DEFAULT else node.origin

    def _stage(self, address: str, runner: Node, stage: str) -> source.Definition | None:
        key, base = f"{stage}_class_path", METHODS[stage][0]
        node = runner.child(key) or Node(RunnerSchema.model_fields[key].default, DEFAULT)
        definition = self._class(node, f"{address}.{key}", stage.capitalize(), class_path.describe(base))
        arguments = runner.child(f"{stage}_args")
        if definition and arguments is not None:
            taken = source.parameters(definition)
            self._arguments(taken and taken.without(taken.names[:1]), arguments, f"{address}.{stage}_args", definition.name)
        return definition

    def _class(self, node: Node, address: str, name: str, base: str = "", module: str = "") -> source.Definition | None:
        """The definition behind a class path; everything wrong with it becomes a fault."""
        if not isinstance(node.value, str):
            return None
        try:
            path = class_path.parse(node.value, name=name, folder=node.origin.folder, workspace=self.workspace, module=module)
            self._remember(path)
            definition = class_path.define(path)
        except ClassPathError as error:
            self._add(node.origin, address, str(error))
            return None
        if definition is None or not base:
            return definition
        if not isinstance(definition.node, source.ClassNode):
            self._add(node.origin, address, f"'{node.value}' is a function, not a class; name a subclass of {base}")
            return None
        if source.is_subclass(definition, base) is False:
            self._add(node.origin, address, class_path.wrong_base(node.value, definition.name, base))
            return None
        if left := source.abstract_methods(definition):
            hint = nearest(left[0], source.methods(definition))
            self._add(node.origin, address, class_path.left_abstract(node.value, definition.name, left) + hint)
        return definition

    def _remember(self, path: class_path.ClassPath) -> None:
        try:
            module = source.read(path.module) if path.file else None
        except (SyntaxError, ValueError):
            return
        if module:
            self.modules[module.file] = module

    def _arguments(self, taken: source.Parameters | None, given: Node, address: str, what: str) -> None:
        if taken is None or not isinstance(given.value, dict):
            return
        for name, message in class_path.wrong_arguments(taken, given.value, what).items():
            place = given.value[name].key if name else given.origin
            self._add(place or given.origin, f"{address}.{name}".rstrip("."), message)

    def _budget(self, address: str, runner: Node, default: set[str], train: bool) -> None:
        """What the default runner and startup need of the runner's own keys."""
        set_here = {key: runner.child(key) for key in ("epochs", "max_steps", "write_predictions")}
        written = {key: node for key, node in set_here.items() if node and node.origin is not DEFAULT and node.value not in (None, False)}
        if "runner" in default and train and not {"epochs", "max_steps"} & set(written):
            self._add(runner.origin, address, "does not say how long to train; add `epochs:` or `max_steps:`")
        idle = {"write_predictions"} if train else {"epochs", "max_steps"}
        for key in idle & set(written) if "runner" in default else ():
            reason = "a train runner writes no predictions" if train else "an infer runner makes one pass"
            self._add(written[key].key or runner.origin, f"{address}.{key}", f"would be ignored: {reason}; remove it")
        if not train and {"startup", "network"} <= default and not _plain(runner, "init_model_path") and not self._trained_before(address):
            self._add(runner.origin, address, "has no weights to evaluate; add `init_model_path:`, or name a train runner before it in `mode`")

    def _trained_before(self, address: str) -> bool:
        for earlier, runner in self._runners_quietly():
            if earlier == address:
                return False
            if _plain(runner, "class") in {"train", "single_train"}:
                return True
        return False

    def _runners_quietly(self) -> list[tuple[str, Node]]:
        runners, mode = self._section("runner"), _plain(self.tree, "mode")
        names = list(runners) if mode is None else [mode] if isinstance(mode, str) else mode
        return [(f"runner.{name}", runners[name]) for name in names if name in runners]

    def _phases(self, address: str, runner: Node) -> dict[str, Node]:
        phases = self._section("phase")
        chosen = runner.child("phases")
        if chosen is None or chosen.value is None:
            return phases
        return {name: phases[name] for name in self._referred(chosen, f"{address}.phases", "phase", phases)}

    def _phase(self, address: str, phase: Node, train: bool) -> None:
        model = phase.child("model")
        definition = None
        if model is None or model.value is None:
            self._add(phase.origin, f"{address}.model", "required key is missing; add `model:`, the class of the model")
        else:
            definition = self._class(model, f"{address}.model", "Model")
        if definition:
            self._model_arguments(address, phase, definition)
            self._loss(address, phase, definition)
        for name in ("dataset_name", "valid_dataset_name"):
            self._dataset(phase, name, address)
        if _plain(phase, "dataset_name") is None and (train or _plain(phase, "valid_dataset_name") is None):
            self._add(phase.origin, f"{address}.dataset_name", "required key is missing; add `dataset_name:`, one of `dataset:`")
        metrics = phase.child("metrics")
        for name, metric in metrics.children() if metrics and isinstance(metrics.value, dict) else ():
            self._metric(f"{address}.metrics.{name}", metric)

    def _model_arguments(self, address: str, phase: Node, definition: source.Definition) -> None:
        taken = source.parameters(definition)
        hyper_parameters = self.tree.child("hyper_parameters")
        filled = [name for name, _ in hyper_parameters.children()] if hyper_parameters else []
        given = phase.child("model_args")
        explicit = given if given is not None and given.origin is not DEFAULT else Node({}, phase.child("model").origin)  # type: ignore[union-attr]
        names = [name for name in filled if taken and name in taken.names and name not in explicit.value]
        self._arguments(taken and taken.without(names), explicit, f"{address}.model_args", definition.name)

    def _loss(self, address: str, phase: Node, definition: source.Definition) -> None:
        loss = phase.child("loss")
        is_brain = source.is_subclass(definition, BRAIN) if isinstance(definition.node, source.ClassNode) else None
        if loss and loss.value is not None:
            self._class(loss, f"{address}.loss", "Loss")
            if is_brain:
                self._add(loss.key or loss.origin, f"{address}.loss", f"would be ignored: {definition.name} is a Brain and computes its own; remove it")
        elif is_brain is False:
            self._add(phase.origin, f"{address}.loss", f"required key is missing; {definition.name} is a plain module: add `loss: torch.nn.functional.…`")

    def _dataset(self, phase: Node, key: str, address: str) -> None:
        node, datasets = phase.child(key), self._section("dataset")
        if node is None or node.value is None:
            return
        for name in self._referred(node, f"{address}.{key}", "dataset", datasets):
            dataset = datasets[name]
            path, arguments = dataset.child("class_path"), dataset.child("args")
            definition = self._class(path, f"dataset.{name}.class_path", "Dataset") if path else None
            if definition:
                given = arguments or Node({}, path.origin if path else dataset.origin)
                self._arguments(source.parameters(definition), given, f"dataset.{name}.args", definition.name)
            collate = dataset.child("collate_fn")
            if collate and collate.value is not None:
                self._class(collate, f"dataset.{name}.collate_fn", "collate")

    def _metric(self, address: str, metric: Node) -> None:
        path = metric.child("class")
        if path is None:
            self._add(metric.origin, address, "has no class; write {class: AUC}, or {class: …, args: {…}}")
            return
        for name, node in metric.children():
            if name not in {"class", "args"}:
                self._add(node.key or node.origin, f"{address}.{name}", f"unknown key{nearest(name, ('class', 'args')) or '; known: args, class'}")
        definition = self._class(path, f"{address}.class", "Metric", module=METRICS)
        if definition:
            given = metric.child("args") or Node({}, path.origin)
            self._arguments(source.parameters(definition), given, f"{address}.args", definition.name)

    def _optimizer(self, runner: Node) -> None:
        address = "hyper_parameters.optimizer"
        node = self.tree.find(address)
        if node is None or not isinstance(node.value, dict) or "class" not in node.value:
            place = node.origin if node else runner.origin
            self._add(place, address, "training needs an optimizer; add `optimizer: {class: Adam, learning_rate: 0.001}` to hyper_parameters")
            return
        given = {("lr" if key == "learning_rate" else key): child for key, child in node.value.items() if key != "class"}
        if {"learning_rate", "lr"} <= set(node.value):
            self._add(node.value["lr"].key or node.origin, f"{address}.lr", "means the same as 'learning_rate', which is set too; keep one")
        path = Node(optimizer_name(node.value["class"].value), node.value["class"].origin)
        definition = self._class(path, f"{address}.class", "Optimizer", module=OPTIMIZERS)
        taken = source.parameters(definition) if definition else None
        if taken and definition:
            self._arguments(taken.without(taken.names[:1]), Node(given, node.origin), address, definition.name)


def _plain(node: Node, key: str) -> Any:
    child = node.child(key)
    return child.plain() if child else None


def _is_default(definition: source.Definition, stage: str) -> bool:
    return source.is_subclass(definition, RunnerSchema.model_fields[f"{stage}_class_path"].default) is True


def optimizer_name(name: Any) -> Any:
    """The class of torch.optim that a config means: ``ADAM``, as PaddleRec writes it, is ``Adam``."""
    module = source.read(OPTIMIZERS) if isinstance(name, str) and name.isidentifier() else None
    known = {each.lower(): each for each in (module.bindings if module else ())}
    return known.get(str(name).lower(), name) if module else name
