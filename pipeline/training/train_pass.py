"""One pass of training over the batches of a loader: the hot loop, and what is around it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pipeline.checkpoint.random_state import restore_random_state
from pipeline.context import Context
from pipeline.data.batch import on_device
from pipeline.data.loader import has_own_state, length, random_sampler_of, remaining_batches, set_epoch
from pipeline.data.workers import supervise_workers
from pipeline.errors import DataError
from pipeline.signals import SHUTDOWN, exit_requested
from pipeline.training.batch_brain import BatchBrain, Stage
from pipeline.training.updater import UpdaterBase, UpdaterState, make_update


class NextDue:
    """The next iteration after which something is due; a signal or ``is_exit`` makes it the current one.

    Attributes:
        iteration: that iteration.
        context: the run's; None for a Brain that trains by itself.
    """

    def __init__(self, iteration: int, context: Context | None) -> None:
        self.iteration = iteration
        self.context = context

    def wake(self) -> None:
        """Make the current iteration the one after which something is due."""
        self.iteration = 0

    def set(self, iteration: int) -> None:
        """Set the next one; the end of the run may have been requested in the meantime."""
        self.iteration = iteration
        if exit_requested(self.context):
            self.wake()


def train_pass(
    batches: Iterable[Any],
    update: Callable[[Any], Any],
    counters: dict[str, int],
    updater_state: UpdaterState,
    next_due: NextDue,
    on_due: Callable[[int], int],
) -> None:
    """Train on every batch of a pass. The hot loop.

    Args:
        batches: the batches, on their device.
        update: trains on one batch, and counts it in ``counters``.
        counters: the run's; ``context["train_state"]``.
        updater_state: the updater's own counters.
        next_due: the next iteration after which ``on_due`` is called.
        on_due: does what is due, and returns the next such iteration; 0 ends the pass.
    """
    # The updater counts its own iterations; other phases have trained in the rest.
    in_other_phases = counters["iteration"] - updater_state.iteration
    for batch in batches:
        update(batch)
        iteration = counters["iteration"]
        # Assigned and not added, so that an updater which counts by itself does not count twice.
        updater_state.iteration = iteration - in_other_phases
        if iteration >= next_due.iteration:
            following = on_due(iteration)
            if not following:
                break
            next_due.set(following)


def train_epoch(
    brain: BatchBrain,
    updater: UpdaterBase,
    loader: Iterable[Any],
    epoch: int,
    first_due: int,
    on_due: Callable[[int], int],
    *,
    context: Context | None = None,
    dataset: str = "the training set",
    pass_state: Mapping[str, Any] | None = None,
) -> dict[str, float]:
    """Train on every batch of a loader, or until ``on_due`` ends the pass.

    Args:
        brain: bound to its optimizers.
        updater: trains on one batch.
        loader: the batches.
        epoch: its number.
        first_due: the first iteration after which ``on_due`` is called.
        on_due: does what is due, and returns the next such iteration; 0 ends the pass.
        context: the run's; None: there are no plugins.
        dataset: what messages call the data.
        pass_state: the states ``pass`` and ``random`` of a checkpoint saved in the middle of this pass, which goes on
            from there; first ``on_due`` is called, since a validation may have been interrupted or a limit changed.

    Returns:
        ``loss`` and what the Brain has logged, means over samples.

    Raises:
        DataError: there was no batch.
        DivergedError: too many losses were not finite.
    """
    counters = brain._train_state
    first_iteration = counters["iteration"]
    set_epoch(loader, epoch)
    brain._begin_pass(length(loader) or 0)
    if pass_state:
        brain._load_pass_state(pass_state["pass"])
    brain.on_stage_start(Stage.TRAIN, epoch)
    update = make_update(brain, updater, context)
    remaining = remaining_batches(loader, brain._batches_taken, pass_state["pass"]["data"] if pass_state else None)
    brain._pass_loader = remaining
    batches: Iterable[Any] = iter(on_device(remaining, brain.device))
    # An interrupted wait may lose a batch: where nothing says which one, no resumed run could make it again.
    if getattr(remaining, "num_workers", 0) and not random_sampler_of(remaining) and not has_own_state(remaining):
        batches = SHUTDOWN.interruptible(batches, lambda: on_due(counters["iteration"]))
    if pass_state:
        # Only now: the start of an iteration over the loader draws a number, as it did when the pass began.
        restore_random_state(pass_state["random"])
    next_due = NextDue(first_due, context)
    if context is not None:
        context.wake = next_due.wake
    with SHUTDOWN.defer(next_due.wake), supervise_workers(batches):
        following = on_due(first_iteration) if pass_state else first_due
        if following:
            next_due.set(following)
            train_pass(batches, update, counters, updater.state, next_due, on_due)
    if counters["iteration"] == first_iteration and not pass_state:
        raise DataError(f"{dataset} gave no batch in epoch {epoch}; check the dataset, or drop_last with few samples")
    brain._end_pass()
    loss = brain._pass_loss.mean()
    brain.on_stage_end(Stage.TRAIN, loss, epoch)
    return brain._with_logged({"loss": loss})
