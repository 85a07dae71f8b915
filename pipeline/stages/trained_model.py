"""A trained model, back in Python: built as in its run, with the weights of a checkpoint."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from loguru import logger

from pipeline.brain.brain import Brain
from pipeline.brain.internals import apply_options
from pipeline.brain.run_options import RunOptions
from pipeline.checkpoint import foreign, weights
from pipeline.checkpoint.initial_weights import checkpoint_of_run
from pipeline.checkpoint.random_state import random_state, restore_random_state
from pipeline.checkpoint.reader import LoadedCheckpoint
from pipeline.compute import evaluation
from pipeline.config import yaml_tree
from pipeline.config.load import Config, ConfigBuilder, Source
from pipeline.config.schema import RunnerSchema
from pipeline.context import STAGES, Context, Phase
from pipeline.distributed.device import resolve_device
from pipeline.engine.phase import phase_of
from pipeline.errors import ConfigError
from pipeline.run.directory import RunDirectory, is_run_directory
from pipeline.run.exclusive import exclusive
from pipeline.run.resume import changed_copies, refuse_strangers, split_path
from pipeline.run.session import Run, RunnerSession, load_stages
from pipeline.user_code.plugin_calls import register_plugins
from pipeline.workspaces import renew


@dataclass(frozen=True)
class TrainedModel:
    """What ``pipeline.load`` returns: the models of a runner, in evaluation mode.

    Of a runner with several phases, ``trained["generator"]`` is the same with this phase alone.

    Attributes:
        checkpoint: the checkpoint, or the file, that the weights were read from.
        config: the config of the run.
        phases: phase name -> {model, brain}.
    """

    checkpoint: Path
    config: Config = field(repr=False)
    phases: Mapping[str, Phase] = field(repr=False)

    def __getitem__(self, phase: str) -> TrainedModel:
        """The same with one phase."""
        return replace(self, phases={phase: self.phases[phase]})

    @property
    def model(self) -> Any:
        """What the phase's ``model`` names: a module, or a Brain."""
        return self._phase.model

    @property
    def brain(self) -> Brain:
        """The Brain of the phase, which knows its device."""
        brain: Brain = self._phase["brain"]
        return brain

    def predict(self, batches: Iterable[Any]) -> Iterator[Any]:
        """What the model predicts for each batch, without gradients; a batch needs no target."""
        return evaluation.predict(self.brain, batches, self.brain.device)

    @property
    def _phase(self) -> Phase:
        first, *others = self.phases
        if others:
            what = f"{self.checkpoint}: is of the phases {', '.join(self.phases)}"
            raise ConfigError(f"{what}; choose one: […]['{first}']")
        return self.phases[first]


def load(
    run: str | os.PathLike[str],
    which: str | int | None = None,
    workspace: str | os.PathLike[str] | None = None,
) -> TrainedModel:
    """The trained model of a run. Nothing is trained or written, and the random states stay as they are.

    The instance and the network stage of the run build it, from the config in the run directory, with the code of its
    workspace as that is now. The log says what has changed in it. ``load(run, workspace=run / "workspace")`` uses the copy
    in the run directory instead: the code as it was. The plugins that wrap models do so, no others are built.

    Args:
        run: a run directory, or a checkpoint in one; with ``workspace``, a checkpoint or a file of weights anywhere.
        which: of a run directory: ``best``, for which the runner needs ``keep_best``; ``last``; or
            an iteration. None: the best if the runner keeps one, otherwise the last; the log says
            which.
        workspace: where the code is, if not where it was. Without a run: the config of the checkpoint, or its folder.

    Raises:
        ConfigError: there is no such run; others may have written to it; its workspace is gone; it
            builds no model; ``which`` is given for a path that is a checkpoint already.
        ClassPathError: a class cannot be loaded.
        CheckpointError: there is no such checkpoint, none is valid, or it does not fit the model.
        ConcurrentRunError: another thread of this process is training. To build the model draws random numbers, and
            putting the generators back afterwards would change what the training draws.
    """
    with exclusive("pipeline.load", trains=False, may_nest=True):
        return _load(run, which, workspace)


def _load(
    run: str | os.PathLike[str],
    which: str | int | None,
    workspace: str | os.PathLike[str] | None,
) -> TrainedModel:
    renew()
    run_dir, path = split_path(Path(run))
    is_run = is_run_directory(run_dir)
    if which is not None and (path or not is_run):
        what = f"{run}: is no run directory, so which={which!r} has no effect"
        raise ConfigError(f"{what}; name the run directory, or leave `which` out")
    if is_run:
        refuse_strangers(run_dir)
        config, directory = _config_of_run(run_dir, workspace), run_dir.resolve()
        checkpoint = foreign.read_weights(path or checkpoint_of_run(directory, which))
        return _build(config, config.runner(checkpoint.path.parents[1].name), directory, checkpoint)
    if workspace is None:
        remedy = "name a run directory, or the config of a checkpoint without one: workspace=…"
        raise ConfigError(f"{run}: is no run directory, so nothing says which code it is of; {remedy}")
    config = _read(Path(workspace, "config.yaml") if os.path.isdir(workspace) else workspace)
    return _build(config, config.runners[0], Path(run).parent, foreign.read_weights(Path(run)))


def _config_of_run(run_dir: Path, workspace: str | os.PathLike[str] | None) -> Config:
    """The config of a run, with the code in a workspace; None: in its own."""
    file = run_dir / "config.yaml"
    before = yaml_tree.read_file(file, []).plain().get("workspace")
    if before and workspace is None and not os.path.isdir(before):
        raise ConfigError(f"{file}: its workspace {before} is not there any more; say where it is now: workspace=…")
    source: Source = file
    if before and workspace is not None:
        inside, now = rf"{re.escape(before)}(?![^/:'\"\s])", str(Path(workspace).resolve())
        text = re.sub(inside, lambda _: now, file.read_text(encoding="utf-8"))
        source = yaml_tree.parse(text, yaml_tree.Origin(str(file))).plain()
    config = _read(source)
    logger.info(f"config {file}, workspace {config.workspace}")
    changes = changed_copies(RunDirectory(run_dir), config.workspace)
    for message in changes:
        logger.warning(message)
    copy = run_dir / "workspace"
    if changes and workspace is None and copy.is_dir():
        logger.warning(f"the code is used as it is now; for that of the run: load(…, workspace={str(copy)!r})")
    return config


def _read(source: Source) -> Config:
    builder = ConfigBuilder(source)
    if builder.config is None:
        raise ConfigError(builder.faults)
    return builder.config


def _build(config: Config, runner: RunnerSchema, folder: Path, checkpoint: LoadedCheckpoint) -> TrainedModel:
    """The models of a runner, with the weights of a checkpoint; ``folder``: what ``{run_dir}`` stands for."""
    before = random_state()
    try:
        context = _run_stages(config, runner, folder)
    finally:
        restore_random_state(before)
    built = context.peek("model") or {}
    phases = {name: phase_of(name, context) for name, entry in built.items() if weights.is_entry(entry)}
    if not phases:
        what = f"runner.{runner.name}: its network stage builds no model"
        raise ConfigError(f"{what}; load {checkpoint.path} in the code that does, such as an experiment")
    weights.load_weights(checkpoint.weights, phases, str(checkpoint.path), checkpoint.resized)
    options = RunOptions(device=str(context["device"]), eval_precision=runner.eval_precision)
    for phase in phases.values():
        weights.module_of(phase).eval()
        if isinstance(phase.get("brain"), Brain):
            apply_options(phase["brain"], options)
    return TrainedModel(checkpoint.path, config, phases)


def _run_stages(config: Config, runner: RunnerSchema, folder: Path) -> Context:
    """The context after the instance and the network stage of a runner; the default network builds no data."""
    device = resolve_device(runner.device) if torch.cuda.is_available() else torch.device("cpu")
    classes, devices = {runner.name: load_stages(config, runner)}, {runner.name: device}
    run = Run(config, RunDirectory(folder), {}, classes, devices, resumed=False)
    session = RunnerSession(runner.name, run)
    is_default = runner.network_class_path == RunnerSchema.model_fields["network_class_path"].default
    methods = {"instance": STAGES["instance"], "network": "build_models" if is_default else STAGES["network"]}
    with session.resources:
        wrappers = [plugin for plugin in session.plugins if hasattr(plugin.target, "wrap_model")]
        register_plugins(wrappers, session.manager)
        session.context["is_infer"] = True
        for stage, method in methods.items():
            session.context.enter(stage)
            getattr(session.build(stage), method)(session.context)
    return session.context
