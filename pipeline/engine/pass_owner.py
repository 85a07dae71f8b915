"""What a TrainPass needs of the engine that it belongs to, and of the updater that trains on its batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from pipeline.compute.trainable import Computation
from pipeline.context import Context
from pipeline.metrics.meters import Meters

if TYPE_CHECKING:
    from pipeline.engine.train_pass import PassCount, TrainPass


class PassOwner(Protocol):
    """What a pass needs of the engine that it belongs to.

    Attributes:
        context: the context of the training.
        counters: ``context["train_state"]``.
        next_check: the next iteration after which ``run_scheduled`` is called.
        active_passes: the passes that have an active batch, the outermost first.
        before_batch, after_batch: call the plugins; None if no plugin listens.
    """

    context: Context
    counters: dict[str, int]
    next_check: int
    active_passes: list[TrainPass]
    before_batch: Callable[..., Any] | None
    after_batch: Callable[..., Any] | None

    def generators(self) -> dict[str, Any]:
        """Return the random generators of the Brains, the updaters and the data, by name."""

    def open(self, training: TrainPass) -> Iterator[Any] | None:
        """Start a pass, or continue one, and return its batches; None if it is over at once."""

    def next_round(self, training: TrainPass) -> Iterator[Any]:
        """Return the batches of one more round over the data of a pass that repeats."""

    def start(self, training: TrainPass, batches: int) -> None:
        """Prepare the Brain of a pass; ``batches`` is the argument of ``TrainPass.start``."""

    def report_length(self, training: TrainPass, batches: int) -> None:
        """Warn if a round had another number of batches than its loader has announced; 0 if it has announced none."""

    def finish_inner_batches(self, training: TrainPass) -> None:
        """Finish what the code of the last batch has started, since the pass is asked for its next batch."""

    def run_scheduled(self, training: TrainPass) -> bool:
        """Do what is scheduled or requested after an iteration, and return whether the pass continues."""

    def close(self, training: TrainPass) -> None:
        """End a pass."""


class BatchTrainer(Protocol):
    """What trains on the batches of a phase: its ``updater``."""

    @property
    def state(self) -> Any:
        """Its counters: ``iteration`` and ``epoch``."""

    def is_plain(self, brain: Computation) -> bool:
        """Return whether it trains on a batch as ``Trainable.fit_batch`` of this computation does."""

    def begin_pass(self, epoch: int, count: PassCount, logged: Meters) -> None:
        """Let a pass count the iterations, and report what is logged.

        Args:
            epoch: the epoch that is running, from 0.
            count: counts the iterations.
            logged: the numbers that the pass reports.
        """

    def end_pass(self, epoch: int | None) -> None:
        """Note that a pass has ended.

        Args:
            epoch: how many epochs are done after it; None if the pass was cut short.
        """
