"""Every fault of a config, all at once, from source alone: no user code and no torch is imported.

The trainer calls this before it runs anything, and so does ``pipeline check``.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pipeline.check.data_flow import DataFlow, FlowCheck, default_path, flow_of_plugin, is_untouched, runs_in_order
from pipeline.check.hooks import definition_of, faults_of_hooks
from pipeline.check.hyper_parameter_check import unread_hyper_parameters
from pipeline.check.inspection import Inspection, Setting, kind
from pipeline.check.phase import PhaseCheck
from pipeline.check.runner import check_runner, experiment_of, missing_checkpoint
from pipeline.check.stage import check_arguments, method_faults, stage_faults, stage_notes
from pipeline.check.swap_report import swap_report
from pipeline.config.load import Config, ConfigBuilder, Source
from pipeline.config.usage import UsageTracker
from pipeline.config.yaml_tree import DEFAULT, Node, refusal, resolve_path
from pipeline.context import STAGES, base_of
from pipeline.errors import ConfigError, Fault
from pipeline.user_code import class_path, classes, source, uncalled
from pipeline.user_code.constructors import constructor_fault
from pipeline.user_code.context_flow import Flow
from pipeline.user_code.plugins import HOOKS, Plugin, configured_plugins, offered, plugin_faults
from pipeline.user_code.source import file_cache
from pipeline.user_code.tracebacks import error_context


@dataclass
class CheckResult:
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


def check_or_raise(
    config: Source, overrides: Sequence[str] = (), *, in_order: bool = True, resumes: bool = False
) -> Config:
    """The resolved config.

    Args:
        config: a config file or dict.
        overrides: ``"runner.train_runner.epochs=3"`` and the like.
        in_order: whether the stages follow each other as the default trainer's do.
        resumes: whether an earlier run may go on, which does not need its first weights any more.

    Raises:
        ConfigError: it has faults; all of them.
    """
    result = inspect(config, overrides, in_order=in_order, resumes=resumes)
    if result.config is None:
        raise ConfigError(result.faults)
    return result.config


@file_cache()
def inspect(
    config: Source, overrides: Sequence[str] = (), *, in_order: bool = True, resumes: bool = False
) -> CheckResult:
    """Check a config file or dict and everything that it names; the arguments are those of ``check_or_raise``."""
    builder = ConfigBuilder(config, overrides)
    if builder.tree is None:
        return CheckResult(builder.faults)
    # What could not be made out may be what is referred to.
    sound = not any(not fault.address or fault.address.startswith("hyper_parameters") for fault in builder.faults)
    certain = sound and in_order and not isinstance(config, Mapping)
    inspection = Inspection(builder.tree, builder.workspace, builder.faults, used=builder.used, certain=certain)
    runners = _runners(inspection)
    plugins = _check_plugins(inspection, several=any(map(_asks_for_several, runners.values())))
    _check_folders(inspection, runners)
    flows: dict[str, DataFlow] = inspection.flows
    is_open = not in_order
    # Another class than infer is a misspelt one.
    train_runners: dict[str, Setting] = {}
    for name, runner in runners.items():
        flows[name], open_here = _check_runner(runner, [flow for _, flow in plugins], train_runners, in_order=in_order)
        is_open |= open_here
        if kind(runner) != "infer":
            train_runners[name] = runner
        if runner.node and not resumes and (message := missing_checkpoint(runner.node)):
            runner.fault_at("init_model_path", message)
    if not is_open:
        inspection.faults.extend(faults_of_hooks(plugins, list(flows.values())))
    suspects = unread_hyper_parameters(inspection)
    for name, further_check in offered("checks").items():
        with error_context(f"check {name} of the entry-point group pipeline.checks"):
            further_check(inspection)
    # Two runners that share a phase share its faults.
    faults = sorted(dict.fromkeys(builder.faults), key=lambda fault: (fault.where, fault.line, fault.column))
    checked = _with_findings(builder.config, inspection, suspects) if builder.config and not faults else None
    return CheckResult(faults, checked, flows, inspection.files)


def _with_findings(config: Config, inspection: Inspection, suspects: set[str]) -> Config:
    """Return a config with what its inspection has found; ``suspects``: the ``hyper_parameters`` that nothing seems to read."""
    return replace(
        config,
        reads=UsageTracker(inspection.used, suspects),
        sources=inspection.files,
        swaps=swap_report(inspection.flows),
        notes=list(dict.fromkeys([*config.notes, *inspection.notes])),
        switched_off=inspection.switched_off,
    )


def _asks_for_several(runner: Setting) -> bool:
    """Whether a runner is for several processes."""
    count = runner["worker_num"].value
    return runner["class"].value == "cluster_train" or (isinstance(count, int) and count > 1)


def _check_plugins(inspection: Inspection, *, several: bool) -> list[tuple[Plugin, Flow | None]]:
    """What each plugin may do with the context; None: unknown."""
    plugins, faults = configured_plugins(inspection.tree, inspection.workspace)
    inspection.faults.extend(faults)
    flows: list[tuple[Plugin, Flow | None]] = []
    for plugin in plugins:
        inspection.faults.extend(plugin_faults(plugin, several=several))
        if isinstance(plugin.target, class_path.ClassPath):
            inspection.remember(plugin.target)
        definition = definition_of(plugin)
        if definition and (message := constructor_fault(definition, tuple(HOOKS))):
            inspection.faults.append(plugin.origin.fault("plugins", f"plugin '{plugin.name}': {message}"))
        flows.append((plugin, flow_of_plugin(definition, HOOKS, plugin.args) if definition else None))
    return flows


def _runners(inspection: Inspection) -> dict[str, Setting]:
    """Name -> runner, for the runners of ``mode`` in its order; a name that isn't there is a fault."""
    runners, mode = inspection.settings("runner"), inspection.setting("mode")
    names = mode.references("runner")
    count = len(mode.value) if isinstance(mode.value, list) else 1
    return {name: runners[name] for name in names} if names and len(names) == count else runners


def _check_folders(inspection: Inspection, runners: Mapping[str, Setting]) -> None:
    """Check the folders that a run writes: none may lie below a file."""
    keys = ("save_checkpoint_path", "save_inference_path")
    for folder in (inspection.setting("output_dir"), *(runner[key] for runner in runners.values() for key in keys)):
        if isinstance(folder.value, str) and (message := _wrong_folder(folder.value)):
            folder.fault(message)


def _wrong_folder(text: str) -> str:
    """Why a path cannot be a folder; ``""`` if it can."""
    try:
        resolve_path(Path(text))
    except OSError as error:
        if error.errno in {errno.EINVAL, errno.ENAMETOOLONG}:
            return f"'{text}' can be no folder: {error.strerror}; check the path"
    path = os.path.abspath(text.replace("{run_dir}", ""))
    file = next((str(above) for above in (Path(path), *Path(path).parents) if os.path.isfile(above)), None)
    where = "is a file" if file == path else f"lies below {file}, which is a file"
    return refusal(path) or (f"'{text}' {where}; name a folder" if file else "")


def _check_runner(
    runner: Setting, plugins: Sequence[Flow | None], train_runners: Mapping[str, Setting], *, in_order: bool
) -> tuple[DataFlow, bool]:
    """Check one runner and the phases that it runs.

    Args:
        runner: the runner.
        plugins: what each plugin may do with the context.
        train_runners: name -> runner, for the train runners that precede this one.
        in_order: whether the stages follow each other as the default trainer's do.

    Returns:
        How the keys of the context flow through the stages, and whether other code than the stages and plugins may use
        the context.
    """
    assert runner.node, "a section has what is written alone"
    definitions = {stage: _find_stage(runner, stage) for stage in STAGES}
    trainer = runner["trainer_class"]
    trainer_class = trainer.find_class("Trainer", uncalled.TRAINER) if trainer.is_written else None
    for message in uncalled.uncalled_faults(trainer_class, uncalled.TRAINER, uncalled.TRAINER_REMEDIES):
        trainer.fault(message)
    default = {stage for stage, cls in definitions.items() if cls and classes.is_subclass(cls, default_path(stage))}
    names, phases = runner["phases"], runner.inspection.settings("phase")
    if names.value is not None:
        phases = {name: phases[name] for name in names.references("phase")}
    check_runner(runner, phases, train_runners, default, experiment_of(runner, definitions["runner"]))
    if "network" in default:
        PhaseCheck(runner, phases).all()
    flow_check = FlowCheck(runner, phases)
    facts = {"is_infer": kind(runner) == "infer", "is_fleet": False} if kind(runner) in {"train", "infer"} else {}
    flow = flow_check.flow(definitions, plugins, facts)
    in_order = in_order and runs_in_order(runner.node)
    if in_order:
        flow_check.faults(flow)
    for stage, stage_flow in flow.stages.items():
        for message in stage_notes(stage_flow) if stage_flow and (stage != "runner" or kind(runner) == "train") else ():
            runner[f"{stage}_class_path"].note(message)
    files = runner.inspection.modules.values() if in_order else None
    for stage, cls in definitions.items():
        for message in method_faults(cls, stage, files) if cls and not is_untouched(runner.node, stage) else ():
            runner.fault_at(f"{stage}_class_path", message)
    return flow, not in_order or flow_check.is_reached(flow)


def _find_stage(runner: Setting, stage: str) -> source.Definition | None:
    """The class of a stage, checked with its arguments; None: unknown."""
    path, arguments = runner[f"{stage}_class_path"], runner[f"{stage}_args"]
    path = path if path.node else replace(path, node=Node(default_path(stage), DEFAULT))
    definition = path.find_class(stage.capitalize(), base_of(stage))
    for message in stage_faults(definition, stage) if definition else ():
        runner.fault_at(path.name, message)
    if definition and arguments.node:
        check_arguments(definition, arguments.or_empty(path.origin))
    return definition
