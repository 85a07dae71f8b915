"""What is computed for a batch: forward, objectives, and one training or evaluation step. Names are SpeechBrain's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from enum import Enum, auto
from typing import Any

from torch import Tensor, nn

from pipeline.context import Context
from pipeline.data.batch import shape_of, split, uncountable
from pipeline.discovery import plain_callable
from pipeline.errors import DataError, DivergedError, StageError
from pipeline.training.metrics import Mean
from pipeline.training.optim_scheduler import OptimScheduler
from pipeline.training.optimize import close, optimize

Losses = dict[str, Tensor]


class Stage(Enum):
    """The pass in which a batch is computed."""

    TRAIN = auto()
    VALID = auto()
    TEST = auto()


class Brain:
    """Computes predictions and losses; a subclass defines ``compute_forward`` and ``compute_objectives``.

    Args:
        modules: name -> module, all that is trained and saved; available as ``self.modules.<name>``.

    Attributes:
        train_loss: mean of the finite training losses since it was last reset.
        nonfinite: how many batches of the pass were discarded for a loss that is not finite.
    """

    def __init__(self, modules: Mapping[str, nn.Module] | None = None) -> None:
        self.modules = nn.ModuleDict(dict(modules or {}))
        self.train_loss = Mean()
        self.nonfinite = 0
        self._first_nonfinite = 0
        self._phase = ""
        self._patience = 0
        self._context: Context | None = None
        self._train_state: dict[str, int] = {"iteration": 0, "update": 0, "epoch": 0}
        self._optim_schedulers: list[OptimScheduler] = []
        self._before_batch: Callable[..., Any] | None = None
        self._after_batch: Callable[..., Any] | None = None

    def bind(
        self, phase: str, optim_schedulers: Mapping[str, OptimScheduler], context: Context, patience: int = 0
    ) -> None:
        """Make this Brain work on ``phase`` of a run; the runner stage does so before it begins.

        Args:
            phase: its name, for messages.
            optim_schedulers: name -> the schedulers that its losses drive.
            context: the run's; its hooks are resolved here, once.
            patience: how many non-finite losses a pass may have before training ends.
        """
        self._phase, self._patience, self._context = phase, patience, context
        self._train_state = context["train_state"]
        self._optim_schedulers = list(optim_schedulers.values())
        self._before_batch = plain_callable(context["hooks"], "before_batch")
        self._after_batch = plain_callable(context["hooks"], "after_batch")

    def unregistered(self) -> list[str]:
        """The attributes that hold parameters to be trained, but outside of ``modules``: nobody trains or saves them."""
        known = set(self.modules.parameters())
        held = {name: each for name, each in vars(self).items() if isinstance(each, nn.Module)}
        return [
            name for name, each in held.items() if any(p.requires_grad and p not in known for p in each.parameters())
        ]

    def begin_pass(self) -> None:
        """Training mode, and the training numbers of the pass before forgotten."""
        self.modules.train()
        self.train_loss.reset()
        self.nonfinite = 0

    def end_pass(self) -> None:
        """Close the windows of accumulation that the last batches left open."""
        self._train_state["update"] += close(self._optim_schedulers, self._train_state["epoch"])

    def compute_forward(self, batch: Any, stage: Stage) -> Any:
        """The predictions for a batch."""
        raise NotImplementedError(f"{type(self).__name__} does not define compute_forward(batch, stage)")

    def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> Tensor | Losses:
        """The loss, a scalar tensor that is a mean over samples; or several by name, ``loss`` being the one trained on."""
        raise NotImplementedError(
            f"{type(self).__name__} does not define compute_objectives(predictions, batch, stage)"
        )

    def fit_batch(self, batch: Any) -> Tensor:
        """One training step.

        Returns:
            The loss, detached, on its device; not finite where the step was discarded.
        """
        if not self._optim_schedulers:
            raise StageError(
                "Brain.fit_batch: no OptimScheduler trains it; call bind(phase, optim_schedulers, context) first"
            )
        if self._before_batch:
            self._before_batch(context=self._context, batch=batch)
        predictions = self.compute_forward(batch, Stage.TRAIN)
        losses = self._losses(self.compute_objectives(predictions, batch, Stage.TRAIN))
        samples = self.count_samples(batch) or uncountable(batch)
        finite, updated = optimize(losses, self._optim_schedulers, self._train_state["epoch"], samples)
        self._train_state["update"] += updated
        if finite:
            self.train_loss.add(losses["loss"].detach(), samples)
        else:
            self._discarded(losses["loss"])
        if self._after_batch:
            self._after_batch(context=self._context, batch=batch, predictions=predictions, losses=losses)
        return losses["loss"].detach()

    def evaluate_batch(self, batch: Any, stage: Stage) -> tuple[Any, Losses]:
        """Predictions and losses of one batch, without training."""
        predictions = self.compute_forward(batch, stage)
        return predictions, self._losses(self.compute_objectives(predictions, batch, stage))

    def count_samples(self, batch: Any) -> int:
        """How many samples a batch holds: the length of the first tensor in it."""
        if isinstance(batch, Tensor):
            return batch.shape[0] if batch.dim() else 0
        parts = batch if isinstance(batch, list | tuple) else batch.values() if isinstance(batch, Mapping) else ()
        for part in parts:
            if count := self.count_samples(part):
                return count
        return 0

    def target(self, batch: Any) -> Any:
        """What the metrics compare the predictions with."""
        return split(batch)[1]

    def _losses(self, losses: Tensor | Losses) -> Losses:
        named = {"loss": losses} if isinstance(losses, Tensor) else losses
        if not isinstance(named, dict) or not isinstance(named.get("loss"), Tensor):
            raise DataError(
                f"phase.{self._phase}: compute_objectives returned {shape_of(losses)}; return a scalar tensor, or a dict with 'loss'"
            )
        if named["loss"].dim():
            raise DataError(
                f"phase.{self._phase}: the loss has shape {tuple(named['loss'].shape)}; return a scalar, e.g. its mean()"
            )
        return named

    def _discarded(self, loss: Tensor) -> None:
        if not self.nonfinite:
            self._first_nonfinite = self._train_state["iteration"] + 1
        self.nonfinite += 1
        if self.nonfinite > self._patience:
            times = f"{self.nonfinite} of its losses in this epoch were not finite, the first in iteration"
            raise DivergedError(
                f"phase.{self._phase}: 'loss' is {loss.item()}: {times} {self._first_nonfinite}; lower the learning "
                "rate, set grad_clip, or check the data; none of these batches changed the weights"
            )


class ModuleBrain(Brain):
    """The Brain around a plain module and a loss function.

    Args:
        module: called with the batch's inputs, by position or name.
        loss: ``loss(predictions, target)`` -> scalar.
    """

    def __init__(self, module: nn.Module, loss: Callable[[Any, Any], Tensor]) -> None:
        super().__init__({"model": module})
        self.module = module
        self.loss = loss
        taken = inspect.signature(module.forward).parameters.values()
        named = [each for each in taken if each.kind in {each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY}]
        self._names = [each.name for each in named]
        self._needed = [each.name for each in named if each.default is each.empty]

    def compute_forward(self, batch: Any, stage: Stage) -> Any:
        """The module's output for the batch's inputs."""
        inputs, _ = split(batch)
        if isinstance(inputs, Tensor):
            return self.module(inputs)
        if isinstance(inputs, list | tuple):
            return self.module(*inputs)
        if not isinstance(inputs, Mapping):
            return self.module(inputs)
        if isinstance(batch, Mapping):
            # A mapping may hold more than the module takes; the inputs of a pair are meant as they are.
            if missing := [name for name in self._needed if name not in batch]:
                what = f"a batch with the keys {', '.join(map(str, batch))} has no '{missing[0]}'"
                raise DataError(
                    f"{what}, which {type(self.module).__name__}.forward takes; name one so, or write a Brain"
                )
            inputs = {name: batch[name] for name in self._names if name in batch} or inputs
        return self.module(**inputs)

    def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> Tensor:
        """The loss of the predictions."""
        return self.loss(predictions, split(batch)[1])
