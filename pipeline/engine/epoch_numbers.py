"""EpochNumbers: the newest numbers of each phase, and the iterations that they belong to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pipeline.checkpoint.reader import Iterations
from pipeline.checkpoint.storage import as_number
from pipeline.context import Context


class EpochNumbers:
    """The numbers of the running epoch, such as ``loss`` and ``valid_loss`` of each phase.

    Args:
        context: the context of the training. Its key ``metrics`` has the numbers, too.

    Attributes:
        metrics: phase -> name -> number.
        measured_at: phase -> name -> the iteration in which the number was measured.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._counters: dict[str, int] = context["train_state"]
        self.metrics: dict[str, dict[str, Any]] = {}
        self.measured_at: dict[str, dict[str, int]] = {}

    def replace(self, metrics: dict[str, dict[str, Any]], measured_at: dict[str, dict[str, int]]) -> None:
        """Use other numbers: the ones of a checkpoint, of an earlier training, or of an epoch that starts."""
        self.metrics = metrics
        self.measured_at = measured_at
        self._context["metrics"] = metrics

    def take(self, phase: str, numbers: Mapping[str, float], *, trained: bool = False) -> None:
        """Put new numbers of a phase where plugins and checkpoints find them.

        Args:
            phase: the phase.
            numbers: name -> number.
            trained: whether they are the numbers of a training pass. Those come first.
        """
        others = self.metrics.get(phase, {})
        self.metrics[phase] = {**numbers, **others, **numbers} if trained else {**others, **numbers}
        iteration = self._counters["iteration"]
        self.measured_at.setdefault(phase, {}).update(dict.fromkeys(numbers, iteration))

    def has_trained(self, phase: str) -> bool:
        """Return whether a pass over the training data of a phase has ended in this epoch."""
        return "loss" in self.metrics.get(phase, {})

    def move_to_current_iteration(self) -> None:
        """Assign all numbers to the current iteration."""
        for iterations in self.measured_at.values():
            iterations.update(dict.fromkeys(iterations, self._counters["iteration"]))

    def make_plain(self) -> None:
        """Replace tensors by Python numbers, since plugins may have added some.

        Raises:
            StageError: a value is not a number.
        """
        for phase, numbers in self.metrics.items():
            for name, number in numbers.items():
                numbers[name] = as_number(number, f"metrics['{phase}']['{name}']")

    def iterations_of_weights(self, unchanged: Iterable[str], is_validated: Callable[[str, str], bool]) -> Iterations:
        """Return ``measured_at``, but with the current iteration for validations of unchanged weights.

        Args:
            unchanged: the phases whose weights were not trained since their validation.
            is_validated: returns whether the number of a phase was measured in a validation.
        """
        iterations = {phase: dict(numbers) for phase, numbers in self.measured_at.items()}
        for phase in unchanged:
            if phase in iterations:
                names = [name for name in iterations[phase] if is_validated(phase, name)]
                iterations[phase].update(dict.fromkeys(names, self._counters["iteration"]))
        return iterations
