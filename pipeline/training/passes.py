"""The passes over data, and the one that trains: the hot loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from pipeline.stopping import is_asked_to_end

if TYPE_CHECKING:
    from pipeline.training.updater import UpdaterState


class Stage(Enum):
    """The pass in which a batch is computed."""

    TRAIN = auto()
    VALID = auto()
    TEST = auto()


class Due:
    """The next iteration after which something has to be done; a signal or ``is_exit`` makes it the one that runs.

    Attributes:
        at: that iteration.
        context: the run's; empty where a Brain trains alone.
    """

    def __init__(self, at: int, context: dict[str, Any]) -> None:
        self.at = at
        self.context = context

    def hurry(self) -> None:
        """After this iteration."""
        self.at = 0

    def put(self, at: int) -> None:
        """After a later one; unless the run has been asked to end in the meantime."""
        self.at = at
        if is_asked_to_end(self.context):
            self.hurry()


def train_pass(
    loader: Iterable[Any],
    update: Callable[[Any], Any],
    own: UpdaterState,
    state: dict[str, int],
    due: Due,
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


def length(loader: Any) -> int | None:
    """How many batches a loader gives; None where it does not know."""
    try:
        return len(loader)
    except TypeError:
        return None
