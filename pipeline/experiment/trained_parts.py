"""What an experiment trains and what its randomness comes from: the objects in its attributes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from pipeline.checkpoint import optimizer_state, parts
from pipeline.data.cursor import DataCursor
from pipeline.data.generators import own_generators
from pipeline.experiment.experiment_config import PHASE

if TYPE_CHECKING:
    from pipeline.experiment.experiment import ExperimentBase


def parts_of(experiment: ExperimentBase) -> dict[str, Any]:
    """Return every object with a state except the model, such as optimizers, by place."""
    models = {PHASE: {"model": experiment.model}}
    return {**optimizer_of(experiment), **parts.parts_of(models, {"self": experiment})}


def optimizer_of(experiment: ExperimentBase) -> dict[str, Any]:
    """Return ``self.optimizer`` by its place, or nothing if it has no state."""
    optimizer = experiment.optimizer
    return {"self.optimizer": optimizer} if hasattr(optimizer, "state_dict") else {}


def modules_of(experiment: ExperimentBase) -> dict[str, nn.Module]:
    """Return the model and the parts that are modules."""
    return parts.trained_modules({PHASE: {"model": experiment.model}}, parts_of(experiment))


def generators_of(experiment: ExperimentBase, cursor: DataCursor) -> dict[str, Any]:
    """Return the random generators in the attributes of an experiment and in its data, by name.

    Args:
        experiment: the experiment.
        cursor: the place in the data. An iterator of the user may hold generators too.
    """
    loaders = {name: getattr(experiment, name) for name in ("train_loader", "valid_loader")}
    # Checkpoints contain these names.
    return own_generators({"": experiment, "_cursor": cursor}, loaders)


@contextmanager
def schedules_restored(experiment: ExperimentBase) -> Iterator[None]:
    """Restore schedules and the options of optimizers after the block.

    A validation that no interval asks for may step a schedule. A run with a higher limit makes no
    such validation, so a resumed run must not depend on it.
    """
    trained = parts_of(experiment).values()
    schedules = [part for part in trained if isinstance(part, LRScheduler)]
    optimizers = [part for part in trained if isinstance(part, Optimizer)]
    states = [copy.deepcopy(schedule.state_dict()) for schedule in schedules]
    options = [optimizer_state.options_of(optimizer) for optimizer in optimizers]
    try:
        yield
    finally:
        for schedule, state in zip(schedules, states, strict=True):
            schedule.load_state_dict(state)
        for optimizer, groups in zip(optimizers, options, strict=True):
            for group, values in zip(optimizer.param_groups, groups, strict=True):
                group.update(values)
