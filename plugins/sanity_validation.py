"""Validates on a few batches before the first step, so that an error there does not come at the end of an epoch."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any

from loguru import logger
from torch.utils.data import DataLoader

from pipeline import hookimpl, hookspecs
from pipeline.brain.brain import Brain, Stage
from pipeline.checkpoint.random_state import random_state, restore_random_state
from pipeline.compute.evaluation import evaluate, no_batch
from pipeline.config.schema import PhaseSchema
from pipeline.context import Context
from pipeline.data.batch import on_device
from pipeline.data.generators import generators_of_phases
from pipeline.data.loader import for_evaluation, without_state
from pipeline.data.workers import supervise_workers
from pipeline.distributed.world import SINGLE
from pipeline.engine.phase import loader_of, pass_loader, phase_errors, phase_of
from pipeline.errors import ConfigError, DataError
from pipeline.metrics.base import build_metrics

from .shared.brain_copy import copy_of


class _EnoughError(Exception):
    """As many batches as were wanted are computed."""


class SanityValidation:
    """Computes the first validation batches of each phase, once, before the first step of a training.

    ``on_stage_start`` is called, then the loss and the metrics of these batches are computed; ``on_stage_end`` is not
    called, and no hook. It is done with copies of the Brain, which has the same weights, of the loader and of the metrics,
    and the random generators are put back: the run is the same, bit for bit, as without this plugin, unless its code
    changes something else, such as a global variable, or an attribute that cannot be copied. A run that is resumed does
    without.

    Args:
        batches: how many of each phase that has validation data.

    Raises:
        ConfigError: ``batches`` is out of range.
    """

    # Each process computes its own slices, and waits for no other.
    every_rank = True

    def __init__(self, batches: int = 2) -> None:
        if batches < 1:
            raise ConfigError(f"sanity_validation: batches is {batches}; write 1 or more")
        self.batches, self.over = batches, False

    @hookimpl
    def on_resume(self) -> None:
        """Leave it out."""
        self.over = True

    @hookimpl
    def before_epoch(self, context: Context) -> None:
        """Validate, before the first epoch."""
        self.validate(context)

    @hookimpl
    def before_pass(self, context: Context) -> None:
        """Validate, where a loop of one's own has no epochs."""
        self.validate(context)

    def validate(self, context: Context) -> None:
        """Validate each phase that has validation data, once.

        Raises:
            Exception: what the user's code raises, with a note that names the phase.
        """
        phases: list[PhaseSchema] = [] if self.over else context["config"].phases(context["runner"])
        self.over = True
        for phase in phases:
            for dataset in phase.valid_datasets:
                with phase_errors(phase.name), _unnoticed(context):
                    loader = _loader(dataset, phase, context)
                    brain = copy_of(phase_of(phase.name, context)["brain"], context, *context["dataset"].values())
                    self._compute(brain, loader, phase, context, dataset)
            if phase.valid_datasets:
                logger.info(f"sanity_validation: {phase.name}  the first batches of its validation raise no error")

    def _compute(self, brain: Brain, loader: Any, phase: PhaseSchema, context: Context, dataset: str) -> None:
        metrics = build_metrics(phase.metrics, context["config"].workspace, f"phase.{phase.name}.metrics")
        batches = iter(on_device(without_state(for_evaluation(loader)), context["device"]))
        with supervise_workers(batches), suppress(_EnoughError):
            first = self._first(batches, dataset)
            evaluate(brain, first, Stage.VALID, metrics, epoch=context["current_epoch"], world=SINGLE)

    def _first(self, batches: Iterable[Any], dataset: str) -> Iterator[Any]:
        """The first batches; then the evaluation is left, before it is complete."""
        done = 0
        for batch in islice(batches, self.batches):
            yield batch
            done += 1
        if not done:
            raise DataError(no_batch(f"'{dataset}'"))
        raise _EnoughError


def _loader(dataset: str, phase: PhaseSchema, context: Context) -> Any:
    """The validation data as a validation has it, from a copy of the loader, whose workers do not stay."""
    runner = context["runner"]
    name = phase.dataset_name or "" if runner.overfit_batches else dataset
    loader = loader_of(name, context)
    own = copy.copy(loader) if isinstance(loader, DataLoader) else loader
    return pass_loader(name, runner, Context(dataset={name: own}, config=context["config"]))


@contextmanager
def _unnoticed(context: Context) -> Iterator[None]:
    """In the block ``observe`` calls no plugin; in the end the random generators are as they were, the run's own too."""
    own = generators_of_phases(context["model"], context["dataset"])
    before = random_state(own)
    observer, hookspecs.observer = hookspecs.observer, None
    try:
        yield
    finally:
        hookspecs.observer = observer
        restore_random_state(before, own)
