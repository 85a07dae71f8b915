"""The methods and counters of SpeechBrain's Brain that ported recipes call or override."""

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
    """The methods and counters of a Brain that a recipe with custom training steps uses.

    SpeechBrain's ``fit_batch`` calls these methods, so a ``fit_batch`` of a subclass may call them. The
    default ``fit_batch`` calls only the ones that a subclass overrides.

    Example::

        class Recipe(Brain):
            def compute_forward(self, batch, stage):
                return self.modules.net(batch[0])

            def compute_objectives(self, predictions, batch, stage):
                return torch.nn.functional.mse_loss(predictions, batch[1])

            def fit_batch(self, batch):
                with self.training_ctx:
                    predictions = self.compute_forward(batch, Stage.TRAIN)
                    loss = self.compute_objectives(predictions, batch, Stage.TRAIN)
                self.scaler.scale(loss).backward()
                self.optimizers_step()
                return loss.detach()


        data = [(torch.randn(3), torch.randn(1)) for _ in range(8)]
        make_sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
        brain = Recipe({"net": torch.nn.Linear(3, 1)}, opt_class=make_sgd)
        brain.fit(range(1), data, train_loader_kwargs={"batch_size": 4})
        assert brain.optimizer_step == 2
    """

    def optimizers_step(self) -> None:
        """End a window: the optimizers that ``freeze_optimizers`` returns step, and their gradients are cleared.

        Call it in a ``fit_batch`` of a subclass, after the backward of the mean loss, scaled by
        ``scaler``. If a window has multiple batches, call it after the backward of the last one. Rate,
        clipping, checks and hooks are as in the default ``fit_batch``. The processes have already
        averaged their gradients after each backward. The call counts as one update.
        """
        if not self.optimizers_dict:
            return
        trainable = self._trainable
        to_close = trainable.start_step()
        stepping = {id(optimizer) for optimizer in self.freeze_optimizers(self.optimizers_dict).values()}
        # None: a `fit_batch` of a subclass called this after a backward.
        candidates = trainable.schedulers if to_close is None else to_close
        active = [scheduler for scheduler in candidates if id(scheduler.optimizer) in stepping]
        skips = self._run_options.skip_nonfinite_grads and not self.scaler.is_enabled()
        if skips and overridden(self, RecipeMethods, "check_gradients"):
            self.check_gradients()
        self.optimizer_step += trainable.step(active, after_custom_backward=to_close is None)

    def freeze_optimizers(self, optimizers: dict[str, Optimizer]) -> dict[str, Optimizer]:
        """Return the optimizers that step now, by name. The gradients of the others wait."""
        return optimizers

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Clear the gradients of the optimizers that step now.

        If a subclass overrides it, it is called when a training pass starts and ends.
        """
        if not self.optimizers_dict:
            return
        for optimizer in self.freeze_optimizers(self.optimizers_dict).values():
            optimizer.zero_grad(set_to_none=set_to_none)

    def check_loss_isfinite(self, loss: Tensor) -> None:
        """Read a loss, and count it if it is not finite. The default ``fit_batch`` needs no such call.

        Raises:
            DivergedError: more than ``nonfinite_patience`` losses of this pass were not finite.
        """
        # A mean over no samples is nan.
        if self._trainable.record.samples != 0 and not torch.isfinite(loss).all():
            # Not nonfinite_count, which includes this loss if super().fit_batch has counted it.
            numbers = self._trainable.numbers
            numbers.replace(nonfinite=numbers.nonfinite + 1)
            count = self.nonfinite_count
            patience = self._run_options.nonfinite_patience
            if patience is not None and count > patience:
                raise DivergedError(f"{self._where}{count} losses of this epoch were not finite; {ADVICE}")
            logger.warning(f"{self._where}a loss is not finite: number {count} of this epoch")

    def check_gradients(self) -> None:
        """Delete each gradient that is not finite.

        The run option ``skip_nonfinite_grads`` discards the whole window instead.
        """
        for name, parameter in self.modules.named_parameters():
            if parameter.grad is not None and not torch.isfinite(parameter.grad).all():
                parameter.grad = None
                logger.warning(f"{self._where}the gradient of '{name}' is not finite, and is left out")

    def update_average(self, loss: Tensor, avg_loss: float) -> float:
        """Return the mean loss of a pass after one more loss.

        It is called only if a subclass overrides it. What that returns is the loss of the pass.

        Args:
            loss: the loss of a batch.
            avg_loss: the mean before it.
        """
        if torch.isfinite(loss):
            avg_loss = avg_loss - avg_loss / self.step + float(loss) / self.step
        return avg_loss

    @contextmanager
    def no_sync(self, use: bool = True) -> Iterator[None]:
        """Return a block in which torch's DDP would not average gradients. Here it changes nothing."""
        yield

    @property
    def step(self) -> int:
        """The number of the batch in its pass, from 1. A validation within a pass counts separately."""
        return self._trainable.record.step

    @step.setter
    def step(self, value: int) -> None:
        self._trainable.record.renumber(value)

    @property
    def optimizer_step(self) -> int:
        """The number of updates, including discarded windows. If a subclass sets it, it counts from there."""
        return self._trainable.counters["update"]

    @optimizer_step.setter
    def optimizer_step(self, value: int) -> None:
        self._trainable.counters["update"] = value

    @property
    def avg_train_loss(self) -> float:
        """The mean loss of the training pass so far. Reading it waits for a GPU."""
        mean = self._trainable.numbers.mean_loss()
        return 0.0 if math.isnan(mean) else mean

    @avg_train_loss.setter
    def avg_train_loss(self, value: float) -> None:
        self._trainable.numbers.replace(average=value)

    @property
    def nonfinite_count(self) -> int:
        """The number of losses of the training pass that were not finite so far.

        A subclass or the framework has counted them. Reading it waits for a GPU.
        """
        return self._trainable.numbers.nonfinite_losses()

    @nonfinite_count.setter
    def nonfinite_count(self, value: int) -> None:
        self._trainable.numbers.replace(nonfinite=value)

    @property
    def raw_modules(self) -> nn.ModuleDict:
        """``modules``. Nothing is wrapped around them."""
        return self.modules

    def print_trainable_parameters(self) -> None:
        """Log the number of parameters, and how many of them are trained.

        If a subclass overrides it, the constructor calls it.
        """
        total = sum(parameter.numel() for parameter in self.modules.parameters())
        trained = sum(parameter.numel() for parameter in self.modules.parameters() if parameter.requires_grad)
        logger.info(f"{type(self).__name__} trains {trained} of {total} parameters ({trained / (total or 1):.2%})")
