"""Any PyTorch training job as five swappable stages: instance -> network -> startup -> runner -> terminal.

The public names are imported when they are first used, so importing ``pipeline`` imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.brain.brain import Brain as Brain
    from pipeline.brain.checkpointer import Checkpointer as Checkpointer
    from pipeline.brain.main_process import ddp_init_group as ddp_init_group
    from pipeline.brain.main_process import if_main_process as if_main_process
    from pipeline.brain.main_process import main_process_only as main_process_only
    from pipeline.brain.main_process import run_on_main as run_on_main
    from pipeline.brain.run_options import RunOptions as RunOptions
    from pipeline.brain.run_options import parse_arguments as parse_arguments
    from pipeline.brain.script import create_experiment_directory as create_experiment_directory
    from pipeline.compute.stage import Stage as Stage
    from pipeline.context import Context as Context
    from pipeline.context import EngineMode as EngineMode
    from pipeline.context import Phase as Phase
    from pipeline.data.loader import make_loader as make_loader
    from pipeline.data.rng import sample_generator as sample_generator
    from pipeline.engine.triggers import Trigger as Trigger
    from pipeline.experiment.experiment import ExperimentBase as ExperimentBase
    from pipeline.hookspecs import hookimpl as hookimpl
    from pipeline.hookspecs import observe as observe
    from pipeline.optim.optim_scheduler import OptimScheduler as OptimScheduler
    from pipeline.optim.optim_scheduler import optimize as optimize
    from pipeline.run.runs import list_runs as list_runs
    from pipeline.stages.base import InstanceBase as InstanceBase
    from pipeline.stages.base import NetworkBase as NetworkBase
    from pipeline.stages.base import RunnerBase as RunnerBase
    from pipeline.stages.base import StartupBase as StartupBase
    from pipeline.stages.base import TerminalBase as TerminalBase
    from pipeline.stages.trained_model import TrainedModel as TrainedModel
    from pipeline.stages.trained_model import load as load
    from pipeline.trainer import GeneralTrainer as GeneralTrainer
    from pipeline.updater.updater import StandardUpdater as StandardUpdater
    from pipeline.updater.updater import Updater as Updater
    from pipeline.updater.updater import UpdaterBase as UpdaterBase
    from pipeline.updater.updater import UpdaterState as UpdaterState

_HOMES = {
    "pipeline.brain.brain": ("Brain",),
    "pipeline.brain.checkpointer": ("Checkpointer",),
    "pipeline.brain.main_process": ("ddp_init_group", "if_main_process", "main_process_only", "run_on_main"),
    "pipeline.brain.script": ("create_experiment_directory",),
    "pipeline.context": ("Context", "EngineMode", "Phase"),
    "pipeline.data.loader": ("make_loader",),
    "pipeline.data.rng": ("sample_generator",),
    "pipeline.brain.run_options": ("RunOptions", "parse_arguments"),
    "pipeline.compute.stage": ("Stage",),
    "pipeline.engine.triggers": ("Trigger",),
    "pipeline.experiment.experiment": ("ExperimentBase",),
    "pipeline.hookspecs": ("hookimpl", "observe"),
    "pipeline.optim.optim_scheduler": ("OptimScheduler", "optimize"),
    "pipeline.run.runs": ("list_runs",),
    "pipeline.stages.base": ("InstanceBase", "NetworkBase", "RunnerBase", "StartupBase", "TerminalBase"),
    "pipeline.stages.trained_model": ("TrainedModel", "load"),
    "pipeline.trainer": ("GeneralTrainer",),
    "pipeline.updater.updater": ("StandardUpdater", "Updater", "UpdaterBase", "UpdaterState"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
__all__ = list(_HOME_OF)

if not TYPE_CHECKING:  # it would accept any misspelt name

    def __getattr__(name: str) -> Any:
        if name not in _HOME_OF:
            raise AttributeError(f"module 'pipeline' has no attribute '{name}'")
        return getattr(import_module(_HOME_OF[name]), name)
