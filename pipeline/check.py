"""Every fault of a config, all at once, from source alone: no user code and no torch is imported.

The trainer calls this before it runs anything, and so does ``pipeline check``.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path

from pipeline import class_path, discovery, plugin_hooks
from pipeline.checks import stage_check, stage_methods, swap_report
from pipeline.checks.data_flow import DataFlow
from pipeline.checks.experiment_check import check_experiment, experiment_of, with_experiment
from pipeline.checks.flow_check import FlowCheck, is_untouched, runs_in_order
from pipeline.checks.hook_check import definition_of, faults_of_hooks
from pipeline.checks.hyper_parameter_check import HyperParameterCheck
from pipeline.checks.init_check import InitCheck, absent
from pipeline.checks.inspection import Inspection, plain
from pipeline.checks.named_class import given
from pipeline.checks.phase_check import PhaseCheck
from pipeline.checks.runner_check import RunnerCheck
from pipeline.config.load import Config, Draft, Source
from pipeline.config.schema import RunnerSchema
from pipeline.config.tree import DEFAULT, Node
from pipeline.context import STAGES, base_of
from pipeline.errors import ConfigError, Fault
from pipeline.inference.flow import Flow
from pipeline.inference.stage import flow_of_plugin
from pipeline.source_code import classes, source, uncalled
from pipeline.source_code.finder import refusal, resolved, unchanging


@dataclass
class Checked:
    """What a check found.

    Attributes:
        faults: what is wrong; empty means that the config may run.
        config: the resolved config; None where there are faults.
        flows: runner name -> how the context's keys flow through its stages, for the runners of ``mode``.
        files: the files of user code that were read.
    """

    faults: list[Fault]
    config: Config | None = None
    flows: dict[str, DataFlow] = field(default_factory=dict)
    files: list[Path] = field(default_factory=list)


def check(config: Source, overrides: Sequence[str] = ()) -> list[Fault]:
    """The faults of a config file or dict; an empty list means that it may run."""
    return inspect(config, overrides).faults


def checked(config: Source, overrides: Sequence[str] = (), *, in_order: bool = True, resumes: bool = False) -> Config:
    """The resolved config.

    Args:
        config: a config file or dict.
        overrides: ``"runner.train_runner.epochs=3"`` and the like.
        in_order: whether the stages follow each other as the default trainer's do.
        resumes: whether an earlier run may go on, which does not need its first weights any more.

    Raises:
        ConfigError: it has faults; all of them.
    """
    found = inspect(config, overrides, in_order=in_order, resumes=resumes)
    if found.config is None:
        raise ConfigError(found.faults)
    return found.config


@unchanging()
def inspect(config: Source, overrides: Sequence[str] = (), *, in_order: bool = True, resumes: bool = False) -> Checked:
    """Look at a config file or dict, and at all that it names; the arguments are those of ``checked``."""
    draft = Draft(config, overrides)
    if draft.tree is None:
        return Checked(draft.faults)
    inspection = Inspection(draft.tree, draft.workspace, draft.faults)
    # What could not be made out may be what is referred to.
    sound = not any(not each.address or each.address.startswith("hyper_parameters") for each in draft.faults)
    plugins = _check_plugins(inspection)
    runners = _runners(inspection)
    _check_folders(inspection, runners)
    flows: dict[str, DataFlow] = {}
    checks: list[_RunnerCheck] = []
    for address, runner in runners.items():
        earlier = list(runners)[: list(runners).index(address)]
        # Another class is a misspelt one.
        trained = {each.partition(".")[2]: runners[each] for each in earlier if _kind(runners[each]) != "infer"}
        checks.append(_RunnerCheck(inspection, address, runner))
        flows[address.partition(".")[2]] = checks[-1].all(
            [flow for _, flow in plugins], trained=trained, in_order=in_order
        )
        if message := "" if resumes else absent(runner):
            checks[-1].add("init_model_path", message)
    if in_order and not any(each.is_open() for each in checks):
        inspection.faults += faults_of_hooks(plugins, list(flows.values()))
    certain = sound and in_order and not isinstance(config, Mapping)
    suspects = HyperParameterCheck(inspection, draft.used).all(certain=certain)
    # Two runners that share a phase share its faults.
    faults = sorted(dict.fromkeys(draft.faults), key=lambda fault: (fault.where, fault.line, fault.column))
    if draft.config:
        draft.config.sources = inspection.files
        draft.config.swaps = swap_report.text(flows)
        draft.config.reads.suspects = suspects
    return Checked(faults, None if faults else draft.config, flows, inspection.files)


def _check_plugins(inspection: Inspection) -> list[tuple[discovery.Plugin, Flow | None]]:
    """What each plugin may do with the context; None where that cannot be told."""
    plugins, faults = discovery.chosen(inspection.tree, inspection.workspace)
    inspection.faults += faults
    flows: list[tuple[discovery.Plugin, Flow | None]] = []
    for plugin in plugins:
        inspection.faults += discovery.faults_of(plugin)
        if isinstance(plugin.target, class_path.ClassPath):
            inspection.remember(plugin.target)
        flows.append((plugin, _plugin_flow(plugin)))
    return flows


def _plugin_flow(plugin: discovery.Plugin) -> Flow | None:
    definition = definition_of(plugin)
    if definition is None:
        return None
    return _as_it_comes(definition) if not plugin.args else flow_of_plugin(definition, plugin_hooks.HOOKS, plugin.args)


@lru_cache(maxsize=64)
def _as_it_comes(definition: source.Definition) -> Flow:
    """What a plugin without arguments does, found out once; a file that has changed is another definition."""
    return flow_of_plugin(definition, plugin_hooks.HOOKS, {})


def _runners(inspection: Inspection) -> dict[str, Node]:
    """Address -> runner, for the runners of ``mode`` in its order; a name that isn't there is a fault."""
    runners = inspection.section("runner")
    mode = inspection.tree.child("mode")
    named = inspection.referred(mode, "mode", "runner", runners) if mode and mode.value is not None else []
    certain = named and mode and len(named) == (len(mode.value) if isinstance(mode.value, list) else 1)
    return {f"runner.{name}": runners[name] for name in (named if certain else runners)}


_IMPOSSIBLE = (errno.EINVAL, errno.ENAMETOOLONG)


def _check_folders(inspection: Inspection, runners: Mapping[str, Node]) -> None:
    """Where a run writes: below a file there can be no folder."""
    places = {"output_dir": inspection.tree.child("output_dir")}
    for address, runner in runners.items():
        places |= {f"{address}.{key}": runner.child(key) for key in ("save_checkpoint_path", "save_inference_path")}
    for address, node in places.items():
        if node is None or not isinstance(node.value, str):
            continue
        try:
            resolved(Path(node.value))
        except OSError as error:
            if error.errno in _IMPOSSIBLE:
                inspection.add(
                    node.origin, address, f"'{node.value}' can be no folder: {error.strerror}; check the path"
                )
                continue
        path = os.path.abspath(node.value.replace("{run_dir}", ""))
        if refused := refusal(path):
            inspection.add(node.origin, address, refused)
            continue
        file = next((str(each) for each in (Path(path), *Path(path).parents) if os.path.isfile(each)), None)
        if file:
            where = "is a file" if file == path else f"lies below {file}, which is a file"
            inspection.add(node.origin, address, f"'{node.value}' {where}; name a folder")


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
        self.is_open: Callable[[], bool] = lambda: True

    def all(self, plugins: Sequence[Flow | None], *, trained: Mapping[str, Node], in_order: bool) -> DataFlow:
        """Check everything.

        Args:
            plugins: what each plugin may do with the context.
            trained: name -> runner, for the train runners that precede this one.
            in_order: whether the stages follow each other as the default trainer's do.

        Returns:
            How the keys of the context flow through the stages.
        """
        definitions = {stage: self.stage(stage) for stage in STAGES}
        trainer = self.runner.child("trainer_class")
        if trainer and trainer.origin is not DEFAULT:
            self.trainer(trainer)
        default = {stage for stage, found in definitions.items() if found and _is_default(found, stage)}
        self.budget(default)
        experiment = experiment_of(self.runner, definitions["runner"])
        if experiment:
            check_experiment(experiment, self.inspection, self.runner, self.add)
        InitCheck(self.runner, self.kind, trained, self.add).all(default, experiment)
        phases = self.phases(default, needed=experiment == "")
        flow_check = FlowCheck(self.inspection, self.runner, phases, self.add)
        facts = {"is_infer": self.kind == "infer", "is_fleet": False} if self.kind in {"train", "infer"} else {}
        flow = flow_check.flow({**definitions, "runner": None} if experiment else definitions, plugins, facts)
        if experiment:
            flow = with_experiment(flow, definitions["runner"])
        in_order = in_order and runs_in_order(self.runner)
        if in_order:
            flow_check.faults(flow)
            self.is_open = partial(flow_check.is_reached, flow)
        for stage, definition in definitions.items():
            if definition and not is_untouched(self.runner, stage):
                self.methods(stage, definition, in_order=in_order)
        return flow

    def methods(self, stage: str, definition: source.Definition, *, in_order: bool) -> None:
        """What the methods of a stage of the user's call, and whether somebody calls them."""
        for message in stage_methods.wrong_supers(definition):
            self.add(f"{stage}_class_path", message)
        # A trainer of the user's own may call other methods.
        for message in stage_methods.uncalled(definition, stage, self.inspection.modules.values()) if in_order else ():
            self.add(f"{stage}_class_path", message)

    def add(self, key: str, message: str) -> None:
        """A fault at one of the runner's keys, or at the runner where the key is not written."""
        node = self.runner.child(key) if key else None
        written = node is not None and node.origin is not DEFAULT
        origin = node.origin if node and written else self.runner.origin
        self.inspection.add(origin, f"{self.address}.{key}" if written else self.address, message)

    def stage(self, stage: str) -> source.Definition | None:
        """The class of a stage, checked with its arguments; None: it cannot be told which."""
        key = f"{stage}_class_path"
        node = self.runner.child(key) or Node(RunnerSchema.model_fields[key].default, DEFAULT)
        address, name = f"{self.address}.{key}", stage.capitalize()
        definition = self.inspection.find_class(node, address, name, base_of(stage))
        for message in stage_check.faults_of(definition, stage) if definition else ():
            self.add(key, message)
        arguments = self.runner.child(f"{stage}_args")
        if definition and arguments is not None:
            self.arguments(stage, definition, given(arguments, node))
        return definition

    def arguments(self, stage: str, definition: source.Definition, written: Node) -> None:
        """The arguments of a stage's constructor, beside those that it is given by position."""
        first = stage_check.parameters_given(definition)
        for name, what in first.items():
            if name != what and isinstance(written.value, dict) and name in written.value:
                message = f"{definition.name}'s parameter '{name}' is given the {what}"
                remedy = f"write `def __init__(self, {', '.join(first.values())}, {name}, …)`"
                self.inspection.add(written.origin, f"{self.address}.{stage}_args.{name}", f"{message}; {remedy}")
                return
        taken = classes.parameters(definition)
        free = taken and taken.without(list(first))
        self.inspection.check_arguments(free, written, f"{self.address}.{stage}_args", definition.name)

    def trainer(self, node: Node) -> None:
        """The class of the trainer: one of ours, whose methods somebody calls."""
        definition = self.inspection.find_class(node, f"{self.address}.trainer_class", "Trainer", uncalled.TRAINER)
        if definition:
            for message in uncalled.in_source(definition, uncalled.TRAINER, uncalled.OF_A_TRAINER, ()):
                self.add("trainer_class", message)

    def budget(self, default: set[str]) -> None:
        """What the runner's keys say together, and how long it trains; ``default``: the stages that are the default."""
        keys = RunnerCheck(self.inspection, self.runner, self.address, self.add)
        keys.debug()
        if "runner" not in default or self.kind not in {"train", "infer"}:
            return
        keys.all(trains=self.trains, whole=all(is_untouched(self.runner, stage) for stage in ("network", "runner")))
        limits = ("epochs", "max_steps", "optimizer_step_limit")
        if self.trains and all(plain(self.runner, key) is None for key in limits):
            self.add("", "does not say how long to train; add `epochs:` or `max_steps:`")

    def phases(self, default: set[str], *, needed: bool) -> dict[str, Node]:
        """The phases that the runner runs; the default network and runner need some, but for an experiment."""
        phases = self.inspection.section("phase")
        chosen = self.runner.child("phases")
        if chosen is not None and chosen.value is not None:
            known = self.inspection.referred(chosen, f"{self.address}.phases", "phase", phases)
            phases = {name: phases[name] for name in known}
        elif needed and not phases and default & {"network", "runner"}:
            needy = sorted(default & {"network", "runner"})
            need = f"{' and '.join(needy)} need{'s' if len(needy) == 1 else ''}"
            self.add("", f"the default {need} a phase; add `phase:`, or replace network and runner")
        if "network" in default:
            PhaseCheck(self.inspection, self.runner).all(phases, trains=self.trains)
        return phases


def _is_default(definition: source.Definition, stage: str) -> bool:
    return classes.is_subclass(definition, RunnerSchema.model_fields[f"{stage}_class_path"].default) is True
