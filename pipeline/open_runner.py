"""A runner that is ready for its first stage: its classes, plugins and context."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pluggy
import torch
from loguru import logger

from pipeline import contracts, discovery
from pipeline.checkpoint.checkpointer import Checkpointer
from pipeline.config.load import Config
from pipeline.config.schema import PhaseSchema, RunnerSchema
from pipeline.context import STAGES, Context, PipelineStage
from pipeline.discovery import Plugin
from pipeline.errors import ContextError
from pipeline.resuming import mid_epoch
from pipeline.resuming.mid_epoch import MidEpoch
from pipeline.resuming.standing import is_resumable
from pipeline.run_directory import RunDirectory

BeginFit = Callable[[Context, list[PhaseSchema], RunnerSchema], None]
"""Has the Brains of some phases begin their training."""
OWN = ("config", "runner_name", "hooks", "run_dir", "checkpointer", "train_state", "resources")
"""Context keys whose objects the trainer itself goes on with."""


@dataclass
class OpenRunner:
    """A runner that is ready for its first stage.

    Attributes:
        settings: its part of the config.
        context: the context.
        classes: stage -> class.
        plugins: the plugins of this runner, once they are built.
        chosen: what they are built from.
        directory: the run directory.
        mid_epoch: what may not change in the middle of an epoch.
        over: whether every stage has run.
        stopped: whether ``is_exit`` has ended it before its terminal stage: it is not through.
        resumes: whether it goes on from a checkpoint, once it comes to the runner stage.
        trains: whether it has come to the runner stage.
        begin_fit: has the Brains begin their training.
    """

    begin_fit: BeginFit
    settings: RunnerSchema
    context: Context
    classes: dict[str, type[PipelineStage]]
    plugins: pluggy.PluginManager
    chosen: list[Plugin]
    directory: RunDirectory
    over: bool = False
    stopped: bool = False
    resumes: bool = False
    trains: bool = False

    def __post_init__(self) -> None:
        config: Config = dict.__getitem__(self.context, "config")
        self._note_own()
        self.mid_epoch = MidEpoch(self.context, self.settings, config.phases(self.settings))

    @property
    def hooks(self) -> pluggy.HookRelay:
        """What calls the plugins."""
        return self.plugins.hook

    def build_plugins(self) -> None:
        """Build the plugins: from here on, the hooks call them, and checkpoints keep the state of those that have one."""
        discovery.register(self.chosen, self.plugins)
        checkpointer: Checkpointer = dict.__getitem__(self.context, "checkpointer")
        checkpointer.add_recoverable(mid_epoch.NAME, self.mid_epoch)
        for name, plugin in self.plugins.list_name_plugin():
            if hasattr(plugin, "state_dict") and hasattr(plugin, "load_state_dict"):
                checkpointer.add_recoverable(f"plugin:{name}", plugin)

    def build(self, stage: str) -> PipelineStage:
        """The stage, built with its ``<stage>_args``."""
        arguments: dict[str, Any] = getattr(self.settings, f"{stage}_args")
        return self.classes[stage].from_context(self.context, **arguments)

    def run_stage(self, stage: str) -> None:
        """Build the stage and call its method; it is held to the keys that it declares.

        Raises:
            ContextError: a key that it reads is not there before, or one that it writes is not there after.
        """
        if stage == "runner" and not self.trains:
            self.trains = True
            self.begin()
        # Plugins may have put theirs there.
        self._note_own()
        place, built, method = self.place(stage), self.build(stage), STAGES[stage]
        contracts.check_reads(built, method, place, self.context)
        if stage == "runner":
            self.tell_unread()
        getattr(built, method)(self.context)
        self.check_own(place)
        # What the stage has saved is on disk before the next begins, or it is this stage that has failed.
        dict.__getitem__(self.context, "checkpointer").wait()
        contracts.check_writes(built, method, place, self.context)

    def tell_unread(self) -> None:
        """Before the first batch: log each hyper-parameter that nobody has read, and that no source names."""
        config: Config = dict.__getitem__(self.context, "config")
        # Of `env`, which is the whole config as plain data, nobody knows what was read.
        if not any(each.key == "env" and each.stage != "trainer" for each in self.context.accesses):
            for line in config.reads.unread_so_far(config.tree):
                logger.warning(line)

    def _note_own(self) -> None:
        self._own = {key: dict.__getitem__(self.context, key) for key in OWN}

    def check_own(self, place: str) -> None:
        """After a stage: what the trainer goes on with is what it was, and the device is one.

        Raises:
            ContextError: it is not.
        """
        if replaced := self.take_back():
            what = f"replaced context['{replaced[0]}'], with which the trainer goes on"
            raise ContextError(f"{place} {what}; change what is in it, or use a key of your own")
        device = dict.get(self.context, "device")
        if not isinstance(device, torch.device):
            raise ContextError(f"{place} wrote context['device'] = {device!r}; write a torch.device")

    def take_back(self) -> list[str]:
        """Put back what the trainer goes on with, where a stage has put something else in its place; which that was."""
        replaced = [key for key, own in self._own.items() if dict.get(self.context, key) is not own]
        for key in replaced:
            dict.__setitem__(self.context, key, self._own[key])
        return replaced

    def begin(self) -> None:
        """Have the Brains begin; then, of a run that is resumed, everything is as it was."""
        if self.settings.kind == "train":
            config: Config = dict.__getitem__(self.context, "config")
            self.begin_fit(self.context, config.phases(self.settings), self.settings)
            checkpointer: Checkpointer = dict.__getitem__(self.context, "checkpointer")
            checkpointer.begin(dict.get(self.context, "model"))
        if self.resumes:
            self.restore()

    def restore(self) -> None:
        """Go on from the newest valid checkpoint, whichever startup stage has run.

        Raises:
            NoCheckpointError: some were committed, and none is valid.
            CheckpointError: the run is not the one that saved it.
        """
        checkpointer: Checkpointer = dict.__getitem__(self.context, "checkpointer")
        checkpointer.restore(self.context)
        if checkpointer.resumed:
            self.mid_epoch.check(checkpointer.resumed)
        else:
            logger.warning(f"{checkpointer.folder}: no checkpoint was ever saved; beginning again")

    def place(self, stage: str) -> str:
        """``startup (tdm_startup.Startup, config.yaml:12)``, for messages."""
        config: Config = dict.__getitem__(self.context, "config")
        origin = config.origin(f"runner.{self.settings.name}.{stage}_class_path")
        cls = self.classes.get(stage)
        return (
            f"{stage} ({cls.__module__.rpartition('.')[2]}.{cls.__name__}, {origin})" if cls else f"{stage} ({origin})"
        )

    def tell_status(self) -> None:
        """Say in ``status.json`` that the runner is running."""
        train_state = dict.__getitem__(self.context, "train_state")
        self.directory.write_status("running", resumable=is_resumable(self.directory), train_state=train_state)
