"""What stands in the context is what its types promise."""

from pipeline.brain.brain import Brain
from pipeline.checkpoint.run_checkpointer import RunCheckpointer
from pipeline.config.load import Config
from pipeline.context import (
    Batches,
    BrainView,
    CheckpointerView,
    ConfigView,
    TrainingLoop,
    UpdaterView,
)
from pipeline.engine.pass_engine import PassEngine
from pipeline.engine.train_pass import PassIterator
from pipeline.updater.updater import UpdaterBase


def config(value: Config) -> ConfigView:
    return value


def checkpointer(value: RunCheckpointer) -> CheckpointerView:
    return value


def brain(value: Brain) -> BrainView:
    return value


def updater(value: UpdaterBase) -> UpdaterView:
    return value


def loop(value: PassEngine) -> TrainingLoop:
    return value


def batches(value: PassIterator) -> Batches:
    return value
