"""One epoch of training on the batches of one loader: the hooks of the Brain around the hot loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from pipeline.checkpoint.random_state import restore_random_state
from pipeline.context import Context
from pipeline.data.batch import on_device
from pipeline.data.loader import set_epoch
from pipeline.data.place import has_state
from pipeline.data.position import after, order_drawn_by
from pipeline.data.workers import supervised
from pipeline.errors import DataError
from pipeline.stopping import STOP
from pipeline.training.batch_brain import BatchBrain
from pipeline.training.passes import Due, Stage, length, train_pass
from pipeline.training.updater import UpdaterBase
from pipeline.training.updates import update_of


def train_epoch(
    brain: BatchBrain,
    updater: UpdaterBase,
    loader: Iterable[Any],
    epoch: int,
    due: int,
    on_due: Callable[[int], int],
    *,
    context: Context | None = None,
    name: str = "the training set",
    begun: Mapping[str, Any] | None = None,
) -> dict[str, float]:
    """Train on every batch of a loader, or until ``on_due`` says that it is enough.

    Args:
        brain: bound to its optimizers.
        updater: trains on one batch.
        loader: the batches.
        epoch: its number.
        due: the next iteration after which something has to be done.
        on_due: does it, and returns the next one; 0 ends the training.
        context: the run's; None: there are no plugins.
        name: what the data is called, for messages.
        begun: ``pass`` and ``random`` of a checkpoint that was saved in the middle of this pass; ``on_due`` is then
            called first, for it may have been saved in a validation, or the limits may have changed.

    Returns:
        ``loss`` and what the Brain has logged, means over samples.

    Raises:
        DataError: there was no batch.
        DivergedError: too many losses were not finite.
    """
    state = brain._train_state
    before = state["iteration"]
    set_epoch(loader, epoch)
    brain._begin_pass(length(loader) or 0)
    if begun:
        brain._load_pass_state(begun["pass"])
    brain.on_stage_start(Stage.TRAIN, epoch)
    update = update_of(brain, updater, context)
    rest = after(loader, brain._batches_taken, begun["pass"]["data"] if begun else None)
    brain._pass_loader = rest
    batches: Iterator[Any] = iter(on_device(rest, brain.device))
    # To end the wait for a batch may lose it, after which no other loader could go on.
    if getattr(rest, "num_workers", 0) and not order_drawn_by(rest) and not has_state(rest):
        batches = STOP.waited_for(batches, lambda: on_due(state["iteration"]))
    if begun:
        # Only now: beginning to iterate draws a number, as it did when the pass began.
        restore_random_state(begun["random"])
    looked = Due(due, {} if context is None else context)
    if context is not None:
        context.hurry = looked.hurry
    with STOP.deferred(looked.hurry), supervised(batches):
        following = on_due(before) if begun else due
        if following:
            looked.put(following)
            train_pass(batches, update, updater.state, state, looked, on_due)
    if state["iteration"] == before and not begun:
        raise DataError(f"{name} gave no batch in epoch {epoch}; check the dataset, or drop_last with few samples")
    brain._end_pass()
    loss = brain._pass_loss.mean()
    brain.on_stage_end(Stage.TRAIN, loss, epoch)
    return brain._with_logged({"loss": loss})
