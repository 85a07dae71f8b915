"""Methods and attributes of SpeechBrain's Brain that only recipes with a ``fit_batch`` or checks need."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from loguru import logger
from torch import Tensor, nn
from torch.optim import Optimizer

from pipeline.brain.internals import BrainInternals, overridden
from pipeline.errors import DivergedError
from pipeline.optim.nonfinite import ADVICE


class RecipeMethods(BrainInternals):
    """Methods and attributes that recipes of SpeechBrain call or override."""

    # What SpeechBrain's fit_batch calls, for one of the user's own; of the default, where they are overridden.

    def optimizers_step(self) -> None:
        """End a window: the optimizers that ``freeze_optimizers`` returns step, and their gradients are cleared.

        Call it in a ``fit_batch`` of one's own, after the backward of the mean loss, scaled by ``scaler``; over several
        batches, after that of the last. Rate, clipping, checks and hooks are as in the default ``fit_batch``. Processes have
        averaged their gradients after each backward. It counts as one update.
        """
        if not self.optimizers_dict:
            return
        trainable = self._trainable
        due = trainable.begin_step()
        valid = {id(own) for own in self.freeze_optimizers(self.optimizers_dict).values()}
        active = [own for own in (trainable.schedulers if due is None else due) if id(own.optimizer) in valid]
        skips = self._run_options.skip_nonfinite_grads and not self.scaler.is_enabled()
        if skips and overridden(self, RecipeMethods, "check_gradients"):
            self.check_gradients()
        self.optimizer_step += trainable.step(active, by_hand=due is None)

    def freeze_optimizers(self, optimizers: dict[str, Optimizer]) -> dict[str, Optimizer]:
        """Those that step now; the gradients of the others wait."""
        return optimizers

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Clear the gradients of the optimizers that step now; one of a subclass is called when a training pass begins and ends."""
        for optimizer in self.freeze_optimizers(self.optimizers_dict).values() if self.optimizers_dict else ():
            optimizer.zero_grad(set_to_none=set_to_none)

    def check_loss_isfinite(self, loss: Tensor) -> None:
        """Read a loss, and count it where it is not finite; the default ``fit_batch`` needs no such call.

        Raises:
            DivergedError: there were more in this pass than ``nonfinite_patience``.
        """
        # A mean over no samples is nan.
        if self._trainable.record.samples != 0 and not torch.isfinite(loss).all():
            # Not nonfinite_count: where super().fit_batch has counted this loss, it would count twice.
            numbers = self._trainable.numbers
            numbers.replace(nonfinite=numbers.nonfinite + 1)
            count, patience = self.nonfinite_count, self._run_options.nonfinite_patience
            if patience is not None and count > patience:
                raise DivergedError(f"{self._where}{count} losses of this epoch were not finite; {ADVICE}")
            logger.warning(f"{self._where}a loss is not finite: number {count} of this epoch")

    def check_gradients(self) -> None:
        """Forget each gradient that is not finite; the run option ``skip_nonfinite_grads`` discards the whole window."""
        for name, parameter in self.modules.named_parameters():
            if parameter.grad is not None and not torch.isfinite(parameter.grad).all():
                parameter.grad = None
                logger.warning(f"{self._where}the gradient of '{name}' is not finite, and is left out")

    def update_average(self, loss: Tensor, avg_loss: float) -> float:
        """The mean of a pass, with one loss more; only one of a subclass is called, and what it returns is the loss of the pass."""
        if torch.isfinite(loss):
            avg_loss = avg_loss - avg_loss / self.step + float(loss) / self.step
        return avg_loss

    @contextmanager
    def no_sync(self, use: bool = True) -> Iterator[None]:
        """A block in which torch's DDP would not average the gradients of several processes; here it changes nothing."""
        yield

    @property
    def step(self) -> int:
        """The number of the batch in its pass, from 1; a validation within a pass counts separately."""
        return self._trainable.record.step

    @step.setter
    def step(self, value: int) -> None:
        self._trainable.record.renumber(value)

    @property
    def optimizer_step(self) -> int:
        """How many updates there were, discarded windows included; what a subclass sets goes on from there."""
        return self._trainable.counters["update"]

    @optimizer_step.setter
    def optimizer_step(self, value: int) -> None:
        self._trainable.counters["update"] = value

    @property
    def avg_train_loss(self) -> float:
        """The mean loss of the training pass so far; on a GPU this waits."""
        mean = self._trainable.numbers.mean_loss()
        return 0.0 if math.isnan(mean) else mean

    @avg_train_loss.setter
    def avg_train_loss(self, value: float) -> None:
        self._trainable.numbers.replace(average=value)

    @property
    def nonfinite_count(self) -> int:
        """How many losses of the training pass were not finite so far, as a subclass counts them or we; on a GPU this waits."""
        return self._trainable.numbers.nonfinite_losses()

    @nonfinite_count.setter
    def nonfinite_count(self, value: int) -> None:
        self._trainable.numbers.replace(nonfinite=value)

    @property
    def raw_modules(self) -> nn.ModuleDict:
        """``modules``: nothing is wrapped around them."""
        return self.modules

    def print_trainable_parameters(self) -> None:
        """Log how many parameters there are, and how many are trained; one of a subclass is called by the constructor."""
        total = sum(parameter.numel() for parameter in self.modules.parameters())
        trained = sum(parameter.numel() for parameter in self.modules.parameters() if parameter.requires_grad)
        logger.info(f"{type(self).__name__} trains {trained} of {total} parameters ({trained / (total or 1):.2%})")
