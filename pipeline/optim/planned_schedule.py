"""What an engine needs to know of a schedule that depends on the length of the training."""

from __future__ import annotations

from abc import abstractmethod

from pipeline.optim.windowed_optimizer import WindowedOptimizer


class PlannedSchedule(WindowedOptimizer):
    """An optimizer whose learning rate may depend on the length of the training.

    The engine passes the length before the first step, also of a resumed run: to ``take_length`` if
    the schedule ``is_open``, else to ``check_length``.

    Attributes:
        per: the unit of the length: ``step``, which is an accumulation window, or ``epoch``.
        is_open: whether the arguments of the schedule leave the length of the training open.
    """

    per: str = "step"
    is_open: bool = False

    @abstractmethod
    def take_length(self, steps: int) -> None:
        """Plan the rates for a training of ``steps`` windows or epochs.

        Raises:
            ConfigError: an argument contradicts the length.
        """

    def check_length(self, steps: int) -> None:
        """Check the length of the training against the arguments of a schedule that is not open.

        Args:
            steps: the windows or epochs of the training.

        Raises:
            ConfigError: the schedule ends before the training.
        """
