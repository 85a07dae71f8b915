"""One pass of training over the batches of a loader: the hot loop, and the hooks around it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pipeline.checkpoint.state import restore_random_state
from pipeline.context import Context
from pipeline.data.batch import on_device
from pipeline.data.loader import after, length, order_drawn_by, set_epoch
from pipeline.data.stream import has_state
from pipeline.data.workers import supervised
from pipeline.errors import DataError
from pipeline.signals import SHUTDOWN, exit_requested
from pipeline.training.batch_brain import BatchBrain, Stage
from pipeline.training.updater import UpdaterBase, update_of

if TYPE_CHECKING:
    from pipeline.training.updater import UpdaterState


class NextDue:
    """The next iteration after which something has to be done; a signal or ``is_exit`` makes it the one that runs.

    Attributes:
        at: that iteration.
        context: the run's; empty where a Brain trains alone.
    """

    def __init__(self, at: int, context: dict[str, Any]) -> None:
        self.at = at
        self.context = context

    def wake(self) -> None:
        """After this iteration."""
        self.at = 0

    def put(self, at: int) -> None:
        """After a later one; unless the run has been asked to end in the meantime."""
        self.at = at
        if exit_requested(self.context):
            self.wake()


def train_pass(
    loader: Iterable[Any],
    update: Callable[[Any], Any],
    own: UpdaterState,
    state: dict[str, int],
    due: NextDue,
    on_due: Callable[[int], int],
) -> None:
    """Train on every batch of a loader. The hot loop.

    Args:
        loader: the batches, on their device.
        update: trains on one of them, and counts it in ``state`` before it tells the plugins that it is done.
        own: the updater's counters; ``iteration`` is assigned, so that one that counts itself does not count twice.
        state: the counters of the run.
        due: the next iteration after which something has to be done.
        on_due: does it, and returns the next one; 0 ends the pass.
    """
    others = state["iteration"] - own.iteration
    for batch in loader:
        update(batch)
        iteration = state["iteration"]
        own.iteration = iteration - others
        if iteration >= due.at:
            following = on_due(iteration)
            if not following:
                break
            due.put(following)


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
        batches = SHUTDOWN.interruptible(batches, lambda: on_due(state["iteration"]))
    if begun:
        # Only now: beginning to iterate draws a number, as it did when the pass began.
        restore_random_state(begun["random"])
    looked = NextDue(due, {} if context is None else context)
    if context is not None:
        context.wake = looked.wake
    with SHUTDOWN.defer(looked.wake), supervised(batches):
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
