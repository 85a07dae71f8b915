"""BrainTrainable: how the engine trains and evaluates a Brain, with the methods that its class overrides."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor

from pipeline.compute.custom_code import CustomCode, LossAverage
from pipeline.compute.stage import Stage
from pipeline.compute.trainable import Trainable
from pipeline.optim.losses import Losses, losses_by_name
from pipeline.optim.precision import autocast, autocast_enabled, without_autocast
from pipeline.optim.stepping import backward_and_step, close_windows
from pipeline.optim.windowed_optimizer import WindowedOptimizer

if TYPE_CHECKING:
    from pipeline.brain.brain import Brain

# SpeechBrain's methods for the end of a window. They are called only if a subclass overrides one of them.
STEPPING_METHODS = ("optimizers_step", "freeze_optimizers", "check_loss_isfinite", "check_gradients")


def make_trainable(brain: Brain, overridden: Collection[str], **arguments: Any) -> BrainTrainable:
    """Return what the engine trains of a Brain.

    Args:
        brain: the Brain.
        overridden: the methods of Brain that its class overrides.
        arguments: further arguments of Trainable.
    """
    steps_itself = not set(STEPPING_METHODS).isdisjoint(overridden)
    kind = SteppingTrainable if steps_itself else BrainTrainable
    return kind(brain, overridden, **arguments)


class BrainTrainable(Trainable):
    """The training and evaluation of a Brain, with SpeechBrain's methods for both.

    Args:
        brain: the Brain.
        overridden: the methods of Brain that its class overrides.
        arguments: further arguments of Trainable.
    """

    brain: Brain

    def __init__(self, brain: Brain, overridden: Collection[str], **arguments: Any) -> None:
        stepping = [name for name in ("fit_batch", *STEPPING_METHODS) if name in overridden]
        custom = CustomCode(
            trains="fit_batch" in overridden,
            evaluates="evaluate_batch" in overridden,
            clears_gradients="zero_grad" in overridden,
            has_batch_hooks="on_fit_batch_start" in overridden or "on_fit_batch_end" in overridden,
            stepping_method=stepping[0] if stepping else "",
        )
        super().__init__(brain, custom=custom, **arguments)
        self._averages = "update_average" in overridden

    # SpeechBrain's update_average, if a subclass overrides it.

    def around(self, update: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a function for the loop that trains on a batch, and has the Brain average the loss."""
        return self._averaged(update) if self._averages else update

    def _averaged(self, update: Callable[[Any], Any]) -> Callable[[Any], None]:
        def train_on(batch: Any) -> None:
            loss = update(batch)
            # A batch without samples has no loss.
            if loss is not None and self.record.samples != 0:
                average = self.brain.update_average(loss, self.numbers.average or 0.0)
                self.numbers.replace(average=average)

        return train_on

    def mean_loss(self) -> float:
        """Return the mean loss of the pass; nan if no loss was computed."""
        return self.brain.avg_train_loss if self._averages else super().mean_loss()

    def custom_average(self) -> LossAverage | None:
        """Return the mean loss of an evaluation as the Brain computes it; None if it does not."""
        return BrainAverage(self.brain) if self._averages else None

    # SpeechBrain's evaluate_batch, if a subclass overrides it.

    def predictions_and_losses(self, batch: Any, stage: Stage) -> tuple[Any, Losses]:
        """Return the predictions and losses of one batch.

        If a subclass overrides ``evaluate_batch``, there are no predictions, and the only loss is
        the one that it returns.
        """
        if not self.custom.evaluates:
            return super().predictions_and_losses(batch, stage)
        # Not the autocast of evaluations: evaluate_batch may call super(), which enters that context,
        # and it cannot be entered twice.
        with autocast(self.options.eval_precision, self.device) or nullcontext():
            returned = self.brain.evaluate_batch(batch, stage)
        return None, losses_by_name(returned, f"{self.where}evaluate_batch")

    # SpeechBrain's optimizers_step, for a fit_batch of a subclass.

    def start_step(self) -> list[WindowedOptimizer] | None:
        """Start the ``optimizers_step`` of the class Brain.

        Returns:
            The optimizers whose windows it closes; None if a ``fit_batch`` of the user calls it.
        """
        return None

    def step(self, optimizers: Sequence[WindowedOptimizer], *, after_custom_backward: bool) -> bool:
        """Close the windows of some optimizers.

        Args:
            optimizers: the optimizers.
            after_custom_backward: whether code of the user has called ``backward`` for them.

        Returns:
            Whether an optimizer has acted.
        """
        if after_custom_backward:
            is_averaged = self.strategy is not None and self.strategy.average is not None
            for optimizer in optimizers:
                optimizer.open_by_hand(averaged=is_averaged)
        with without_autocast(self.device) if autocast_enabled(self.device) else nullcontext():
            return close_windows(optimizers, self.counters["epoch"])


class SteppingTrainable(BrainTrainable):
    """The training of a Brain whose class overrides a method for the end of a window.

    Args:
        brain: the Brain.
        overridden: the methods of Brain that its class overrides.
        arguments: further arguments of Trainable.
    """

    def __init__(self, brain: Brain, overridden: Collection[str], **arguments: Any) -> None:
        super().__init__(brain, overridden, **arguments)
        self._checks_losses = "check_loss_isfinite" in overridden
        self._overrides_step = "optimizers_step" in overridden
        # The windows that ``optimizers_step`` closes. None if a ``fit_batch`` of the user calls it,
        # after a backward of its own.
        self._windows_to_close: list[WindowedOptimizer] | None = None
        # Whether the running ``optimizers_step`` of a subclass steps the optimizers itself, without
        # the method of Brain.
        self._subclass_steps = False

    def begin_pass(self, *, keeps_outputs: bool = False) -> None:
        """Reset the modes and the numbers of the last pass.

        Args:
            keeps_outputs: whether a plugin or a metric needs the outputs of each training batch.
        """
        super().begin_pass(keeps_outputs=keeps_outputs)
        self._windows_to_close = None

    def _backward_and_step(
        self,
        losses: Losses,
        optimizers: Sequence[WindowedOptimizer],
        epoch: int,
        samples: int | None,
        *,
        last: bool = False,
    ) -> tuple[bool, bool]:
        """Do what the function ``backward_and_step`` does, through the methods of the Brain."""
        if self._checks_losses:
            for loss in losses.values():
                self.brain.check_loss_isfinite(loss)
        finite, _ = backward_and_step(losses, optimizers, epoch, samples, steps=False)
        closing = [optimizer for optimizer in optimizers if last or optimizer.is_full()]
        return finite, self._close_through_brain(closing)

    def _close_windows(self) -> bool:
        """Close the windows that are open at the end of a pass.

        Returns:
            Whether there was an update that is not counted yet.
        """
        return self._close_through_brain([optimizer for optimizer in self.schedulers if optimizer.window.batches])

    def _close_through_brain(self, closing: list[WindowedOptimizer]) -> bool:
        """Call ``optimizers_step`` of the Brain to close windows.

        Returns:
            Whether there was an update that ``optimizers_step`` has not counted.
        """
        if not closing:
            self._subclass_steps = False
            self._windows_to_close = None
            return False
        self._windows_to_close = closing
        # The method of Brain sets this to False in `start_step`.
        self._subclass_steps = self._overrides_step
        if self._subclass_steps:
            for optimizer in closing:
                optimizer.average()
        self.brain.optimizers_step()
        self._windows_to_close = None
        for optimizer in closing:
            optimizer.leave_window(stepped=self._subclass_steps)
        return self._subclass_steps

    def start_step(self) -> list[WindowedOptimizer] | None:
        """Start the ``optimizers_step`` of the class Brain.

        Returns:
            The optimizers whose windows it closes; None if a ``fit_batch`` of the user calls it.
        """
        self._subclass_steps = False
        return self._windows_to_close


class BrainAverage:
    """The mean loss of an evaluation, as a Brain computes it with ``update_average``.

    Args:
        brain: the Brain.
    """

    def __init__(self, brain: Brain) -> None:
        self._brain = brain
        self._mean = 0.0

    def add(self, loss: Tensor) -> None:
        """Add the loss of a batch."""
        self._mean = self._brain.update_average(loss, self._mean)

    def mean(self) -> float:
        """Return the mean of this rank."""
        return self._mean
