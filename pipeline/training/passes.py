"""The passes over data, and the one that trains: the hot loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.training.updater import UpdaterState


class Stage(Enum):
    """The pass in which a batch is computed."""

    TRAIN = auto()
    VALID = auto()
    TEST = auto()


def train_pass(
    loader: Iterable[Any],
    update: Callable[[Any], Any],
    own: UpdaterState,
    state: dict[str, int],
    due: int,
    on_due: Callable[[int], int],
) -> None:
    """Train on every batch of a loader. The hot loop.

    Args:
        loader: the batches, on their device.
        update: trains on one of them.
        own: the updater's counters; ``iteration`` is assigned, so that one that counts itself does not count twice.
        state: the counters of the run; ``iteration`` is kept up to date.
        due: the next iteration after which something has to be done.
        on_due: does it, and returns the next one; 0 ends the pass.
    """
    iteration = state["iteration"]
    others = iteration - own.iteration
    for batch in loader:
        update(batch)
        iteration += 1
        state["iteration"] = iteration
        own.iteration = iteration - others
        if iteration >= due:
            due = on_due(iteration)
            if not due:
                break


def length(loader: Any) -> int | None:
    """How many batches a loader gives; None where it does not know."""
    try:
        return len(loader)
    except TypeError:
        return None
