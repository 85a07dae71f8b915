"""What stands before the training of an experiment: its settings, and the steps of ``setup()`` in their order."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from loguru import logger
from torch import nn
from torch.optim import Optimizer

from pipeline import discovery
from pipeline.checkpoint import parts
from pipeline.checkpoint.checkpointer import Checkpointer
from pipeline.checkpoint.optimizer_state import options_of
from pipeline.config import yaml_text
from pipeline.context import TRAIN_STATE, Context
from pipeline.distributed import launch
from pipeline.errors import ConfigError, StageError, StorageError
from pipeline.stages.base import RunnerBase
from pipeline.training import experiment_settings as settings
from pipeline.training.checkpoints import Checkpoints
from pipeline.training.visualizers import PHASE, JsonLines, PluginNumbers, Visualizer

if TYPE_CHECKING:
    from loguru import Logger


class ExperimentSetup(RunnerBase):
    """The part of an experiment that is set up, by hand or out of what the trainer has made."""

    model: nn.Module
    optimizer: Any
    train_loader: Any
    valid_loader: Any
    device: torch.device
    output_dir: Path
    checkpointer: Checkpointer
    visualizer: Visualizer
    logger: Logger

    def __init__(self, config: Any, args: Any) -> None:
        self.config = settings.viewed(config, "config")
        self.args = settings.viewed(args, "args")
        self.alone = True
        self.iteration = self.epoch = 0
        self.train_state: dict[str, int] = dict.fromkeys(TRAIN_STATE, 0)
        self.context = Context(hooks=discovery.manager().hook, train_state=self.train_state)
        self._training: dict[str, Any] = {}
        self._resources = ExitStack()

    @classmethod
    def from_context(cls, context: Context, **args: Any) -> Self:
        """The experiment as a stage; ``args`` are what its constructor takes beside ``config`` and ``args``."""
        if context["is_infer"]:
            kind = f"runner.{context['runner_name']}.class: is infer, and {cls.__name__} is an experiment, which trains"
            raise ConfigError(f"{kind}; write train, or take runner_class_path out")
        training = settings.training_of(context)
        experiment = cls(settings.config_of(context, training), settings.args_of(context), **args)
        experiment.alone, experiment._training = False, training
        experiment.context, experiment.train_state = context, context["train_state"]
        return experiment

    @abstractmethod
    def setup_dataloader(self) -> None:
        """Set ``self.train_loader`` and ``self.valid_loader``."""

    @abstractmethod
    def setup_model(self) -> None:
        """Set ``self.model``, on ``self.device``, and ``self.optimizer``."""

    def setup(self) -> None:
        """Everything that stands before the training, in this order."""
        self._numbers = PluginNumbers(self.context)
        self._numbers.begin_epoch()
        self.setup_device()
        if self.parallel:
            self.init_parallel()
        self.setup_output_dir()
        self.dump_config()
        self.setup_visualizer()
        self.setup_logger()
        self.setup_checkpointer()
        self.setup_dataloader()
        self._count_iterations()
        self.setup_model()
        self._offer_model()
        on_error = "error" if self.alone else settings.runner_value(self.context, "on_save_error")
        self._checkpoints = Checkpoints(self.checkpointer, self.context, None, on_error)
        self.iteration = self.epoch = 0

    @property
    def parallel(self) -> bool:
        """Whether several processes are to train."""
        return int(settings.setting(self.args, "args.nprocs")) > 1

    def setup_device(self) -> None:
        """``self.device``: the run's, or the one that ``args.device`` means."""
        if not self.alone:
            self.device = self.context["device"]
            return
        try:
            self.device = launch.device(settings.setting(self.args, "args.device"))
        except ConfigError as error:
            raise ConfigError(f"args.device: {error}") from error

    def init_parallel(self) -> None:
        """Join the other processes."""
        several = f"args.nprocs: is {self.args.nprocs}, and several processes are not yet possible"
        raise ConfigError(f"{several}; set it to 1, or define init_parallel")

    def setup_output_dir(self) -> None:
        """``self.output_dir``: ``args.output``, made where it is not there; the runner's folder in a run directory."""
        self.output_dir = Path(settings.setting(self.args, "args.output")).expanduser()
        try:
            self.output_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"{self.output_dir}: cannot be made: {error.strerror}; set args.output") from error

    def dump_config(self) -> None:
        """``config.yaml`` in the output folder; a run directory has it already."""
        if self.alone:
            text = yaml_text.dump(settings.plain(self.config))
            (self.output_dir / "config.yaml").write_text(text, encoding="utf-8")

    def setup_visualizer(self) -> None:
        """``self.visualizer``: writes ``metrics.jsonl``; as a stage, tells the plugins."""
        self.visualizer = self._numbers
        if self.alone:
            self.visualizer = lines = JsonLines(self.output_dir / "metrics.jsonl")
            self._resources.callback(lines.close)

    def setup_logger(self) -> None:
        """``self.logger``: loguru's; by hand it writes ``worker_0.log`` too, for a run directory has ``log.txt``."""
        self.logger = logger
        if self.alone:
            sink = logger.add(self.output_dir / "worker_0.log", level="DEBUG", diagnose=False, encoding="utf-8")
            self._resources.callback(logger.remove, sink)

    def setup_checkpointer(self) -> None:
        """``self.checkpointer``: the run's, or one that writes to ``checkpoints`` in the output folder."""
        own = Checkpointer(self.output_dir / "checkpoints") if self.alone else None
        self.checkpointer = own or self.context["checkpointer"]

    def close(self) -> None:
        """Close the files that setup() has opened."""
        self._resources.close()

    def _count_iterations(self) -> None:
        """``config.training.max_iteration`` of a stage may depend on the loader."""
        if getattr(self, "train_loader", None) is None:
            raise StageError(f"{type(self).__name__}.setup_dataloader: has to set self.train_loader; give it batches")
        if not self.alone:
            self._training["max_iteration"] = settings.iterations_of(self.context, self.train_loader)

    def _offer_model(self) -> None:
        """Put the model where checkpoints and later stages find it."""
        model = getattr(self, "model", None)
        if not isinstance(model, nn.Module):
            kind = f"{type(self).__name__}.setup_model: self.model is a {type(model).__name__}, not an nn.Module"
            raise StageError(f"{kind}; set it to one, to an nn.ModuleDict where there are several")
        models = dict.get(self.context, "model") or {}
        self.context["model"] = {**models, PHASE: {"model": model}}
        optimizer = getattr(self, "optimizer", None)
        self._configured = options_of(optimizer) if isinstance(optimizer, Optimizer) else []
        self._options = {name: options_of(each) for name, each in self._parts().items() if isinstance(each, Optimizer)}
        self.checkpointer.begin(self.context["model"])

    def _parts(self) -> dict[str, Any]:
        """What stands in attributes beside model and optimizer and has a state of its own."""
        found = parts.parts_of({PHASE: {"model": self.model, "updater": self}})
        named = {place.removeprefix(f"phase.{PHASE}.updater."): each for place, each in found.items()}
        return {f"self.{name}": each for name, each in named.items() if name != "optimizer"}

    def _modules(self) -> dict[str, nn.Module]:
        """The model, and those of the parts that are modules."""
        others = {name: each for name, each in self._parts().items() if isinstance(each, nn.Module)}
        return {PHASE: self.model, **others}
