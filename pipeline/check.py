"""Every fault of a config, all at once, from source alone: no user code and no torch is imported.

The trainer calls this before it runs anything, and so does ``pipeline check``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeline import class_path, classes, contracts, discovery, source
from pipeline.config.load import Config, Draft, Source
from pipeline.config.schema import RunnerSchema
from pipeline.config.tree import DEFAULT, Node
from pipeline.context import KEYS
from pipeline.errors import ConfigError, Fault
from pipeline.inspection import Inspection, plain
from pipeline.phase_check import PhaseCheck
from pipeline.stages.base import METHODS

_GIVEN = frozenset(key.name for key in KEYS if key.writer == "trainer")


def check(config: Source, overrides: Sequence[str] = ()) -> list[Fault]:
    """The faults of a config file or dict; an empty list means that it may run."""
    draft = Draft(config, overrides)
    _inspect(draft)
    return draft.faults


def checked(config: Source, overrides: Sequence[str] = ()) -> Config:
    """The resolved config.

    Raises:
        ConfigError: it has faults; all of them.
    """
    draft = Draft(config, overrides)
    files = _inspect(draft)
    if draft.faults or draft.config is None:
        raise ConfigError(draft.faults)
    draft.config.sources = files
    return draft.config


def _inspect(draft: Draft) -> list[Path]:
    """Add to a draft's faults what is wrong with its classes; the files of user code that it names."""
    if draft.tree is None:
        return []
    inspection = Inspection(draft.tree, draft.workspace, draft.faults)
    _check_plugins(inspection)
    runners = _runners(inspection)
    for address, runner in runners.items():
        earlier = list(runners)[: list(runners).index(address)]
        trained = any(_kind(runners[each]) == "train" for each in earlier)
        _RunnerCheck(inspection, address, runner).all(trained_before=trained)
    # Two runners that share a phase share its faults.
    draft.faults[:] = sorted(dict.fromkeys(draft.faults), key=lambda fault: (fault.where, fault.line, fault.column))
    return inspection.files


def _check_plugins(inspection: Inspection) -> None:
    plugins, faults = discovery.chosen(inspection.tree, inspection.workspace)
    inspection.faults += faults
    for plugin in plugins:
        inspection.faults += discovery.faults_of(plugin)
        if isinstance(plugin.target, class_path.ClassPath):
            inspection.remember(plugin.target)


def _runners(inspection: Inspection) -> dict[str, Node]:
    """Address -> runner, for the runners of ``mode`` in its order; a name that isn't there is a fault."""
    runners = inspection.section("runner")
    mode = inspection.tree.child("mode")
    named = inspection.referred(mode, "mode", "runner", runners) if mode and mode.value is not None else []
    certain = named and mode and len(named) == (len(mode.value) if isinstance(mode.value, list) else 1)
    return {f"runner.{name}": runners[name] for name in (named if certain else runners)}


def _kind(runner: Node) -> str:
    """``train`` or ``infer``; anything else is a fault of the schema's."""
    return str(plain(runner, "class")).lower().removeprefix("single_")


class _RunnerCheck:
    """The checks of one runner and of the phases that it runs."""

    def __init__(self, inspection: Inspection, address: str, runner: Node) -> None:
        self.inspection = inspection
        self.address = address
        self.runner = runner
        self.kind = _kind(runner)
        self.trains = self.kind == "train"

    def all(self, *, trained_before: bool) -> None:
        """Check everything; ``trained_before`` says whether a train runner precedes this one."""
        definitions = {stage: self.stage(stage) for stage in METHODS}
        # A plugin doesn't say which keys it writes.
        certain = not plain(self.inspection.tree, "plugins")
        for stage, message in contracts.unwritten(definitions, _GIVEN).items() if certain else ():
            self.add(f"{stage}_class_path", message)
        trainer = self.runner.child("trainer_class")
        if trainer and trainer.origin is not DEFAULT:
            self.inspection.find_class(
                trainer, f"{self.address}.trainer_class", "Trainer", "pipeline.trainer:GeneralTrainer"
            )
        default = {stage for stage, found in definitions.items() if found and _is_default(found, stage)}
        if "runner" in default and self.kind in {"train", "infer"}:
            self.budget()
        if self.kind == "infer" and {"startup", "network"} <= default:
            self.weights(trained_before)
        if all(_is_untouched(self.runner, stage) for stage in ("instance", "startup")):
            self.initial_weights()
        self.phases(default)

    def add(self, key: str, message: str) -> None:
        """A fault at one of the runner's keys, or at the runner where the key is not written."""
        node = self.runner.child(key) if key else None
        written = node is not None and node.origin is not DEFAULT
        origin = node.origin if node and written else self.runner.origin
        self.inspection.add(origin, f"{self.address}.{key}" if written else self.address, message)

    def stage(self, stage: str) -> source.Definition | None:
        """The class of a stage, checked with its arguments; None: it cannot be told which."""
        key, base = f"{stage}_class_path", METHODS[stage][0]
        node = self.runner.child(key) or Node(RunnerSchema.model_fields[key].default, DEFAULT)
        address, name = f"{self.address}.{key}", stage.capitalize()
        definition = self.inspection.find_class(node, address, name, class_path.describe(base))
        arguments = self.runner.child(f"{stage}_args")
        if definition and arguments is not None:
            taken = classes.parameters(definition)
            # The first is the context, which the trainer gives.
            free = taken and taken.without_first()
            self.inspection.check_arguments(free, arguments, f"{self.address}.{stage}_args", definition.name)
        return definition

    def budget(self) -> None:
        """What the default runner stage wants to be told, and what it would ignore."""
        training = ("epochs", "max_steps", "save_interval", "grad_clip", "nonfinite_patience")
        idle = dict.fromkeys(training, "an infer runner makes one pass")
        if self.trains:
            idle = {"write_predictions": "a train runner writes no predictions"}
        for key, reason in idle.items():
            node = self.runner.child(key)
            if node and node.origin is not DEFAULT and node.value not in (None, False):
                self.add(key, f"would be ignored: {reason}; remove it")
        if self.trains and not plain(self.runner, "epochs") and not plain(self.runner, "max_steps"):
            self.add("", "does not say how long to train; add `epochs:` or `max_steps:`")

    def weights(self, trained_before: bool) -> None:
        """An infer runner has to get its weights from somewhere."""
        if not trained_before and not plain(self.runner, "init_model_path"):
            remedy = "add `init_model_path:`, or name a train runner before it in `mode`"
            self.add("", f"has no weights to evaluate; {remedy}")

    def initial_weights(self) -> None:
        """A file of weights that is to be loaded has to be there, unless it is made by the run itself."""
        path = plain(self.runner, "init_model_path")
        if isinstance(path, str) and Path(path).is_absolute() and not Path(path).exists():
            self.add("init_model_path", f"no such checkpoint: {path}; check the path")

    def phases(self, default: set[str]) -> None:
        """The phases that the runner runs, and whether it needs any."""
        phases = self.inspection.section("phase")
        chosen = self.runner.child("phases")
        if chosen is not None and chosen.value is not None:
            known = self.inspection.referred(chosen, f"{self.address}.phases", "phase", phases)
            phases = {name: phases[name] for name in known}
        elif not phases and default & {"network", "runner"}:
            needy = sorted(default & {"network", "runner"})
            need = f"{' and '.join(needy)} need{'s' if len(needy) == 1 else ''}"
            self.add("", f"the default {need} a phase; add `phase:`, or replace network and runner")
        if "network" in default:
            PhaseCheck(self.inspection).all(phases, self.runner, trains=self.trains)


def _is_untouched(runner: Node, stage: str) -> bool:
    """Whether a stage is the default itself; a subclass may do more before and after."""
    default = RunnerSchema.model_fields[f"{stage}_class_path"].default
    return plain(runner, f"{stage}_class_path") in (None, default)


def _is_default(definition: source.Definition, stage: str) -> bool:
    return classes.is_subclass(definition, RunnerSchema.model_fields[f"{stage}_class_path"].default) is True
