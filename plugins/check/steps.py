"""What watches the steps of ``check --steps``: ends them, and finds losses that are not finite."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.nn.parameter import is_lazy

from pipeline import hookimpl
from pipeline.checkpoint.weights import is_entry, unique_modules
from pipeline.context import Context
from pipeline.errors import DivergedError

_ADVICE = "check the data, the model and the loss; the plugin nan_guard names the module"


class NonFiniteLossError(DivergedError):
    """A loss of a check is not finite."""


class CheckedSteps:
    """The plugin that ``check --steps`` adds to the plugins of a config.

    It ends a training after some steps. So the limits of the config keep their values, which
    schedules and the code of the user may read.

    The first loss that is not finite ends the check: a loss that an OptimScheduler descends, one
    that is reported of a batch, or that of an evaluation. Code that trains without telling its
    losses is judged by its weights. A gradient that is not finite is no fault, because fp16 has
    them while it finds its scale.

    Args:
        steps: iterations of each phase.
    """

    every_rank = True

    def __init__(self, steps: int) -> None:
        self.steps = steps
        # What is wrong with a loss of the batch that is being trained on.
        self.fault = ""
        # The phases whose losses are known.
        self.phases_with_losses: set[str] = set()
        # The tensors that were not finite before the training.
        self.nonfinite_before: set[tuple[str, str]] = set()

    @hookimpl
    def before_stage(self, name: str, context: Context) -> None:
        """Remember which weights are not finite before the training, such as a mask."""
        if name == "runner":
            self.phases_with_losses.clear()
            self.nonfinite_before = set(_nonfinite_weights(context))

    @hookimpl
    def before_backward(self, phase: str, losses: Mapping[str, Any]) -> None:
        """Look at the losses that are descended; `after_batch` raises."""
        self._look_at(phase, losses)

    @hookimpl
    def after_batch(self, context: Context, phase: str, losses: Mapping[str, Any]) -> None:
        """Look at the losses that are reported, and end the training after the last step.

        Raises:
            NonFiniteLossError: a loss of this batch is not finite.
        """
        self._look_at(phase, losses)
        iteration = context.peek("train_state")["iteration"]
        if self.fault:
            raise NonFiniteLossError(f"{self.fault} in iteration {iteration}; {_ADVICE}")
        if iteration >= self.steps * (len(context.peek("phases")) or 1):
            context.stop("the steps of the check are done")

    @hookimpl
    def after_validation(self, phase: str, metrics: Mapping[str, float]) -> None:
        """Look at the loss of an evaluation.

        Raises:
            NonFiniteLossError: it is not finite.
        """
        self._look_at(phase, {name: value for name, value in metrics.items() if _is_loss(name)})
        if self.fault:
            raise NonFiniteLossError(f"{self.fault} in an evaluation; {_ADVICE}")

    @hookimpl
    def after_stage(self, name: str, context: Context) -> None:
        """Look at the weights that were trained without a known loss.

        Raises:
            NonFiniteLossError: some are not finite, and were before.
        """
        if name != "runner":
            return
        for phase, weight in _nonfinite_weights(context):
            is_known = phase in self.phases_with_losses or (phase, weight) in self.nonfinite_before
            if not is_known:
                what = f"phase.{phase}: '{weight}' is not finite after the training"
                raise NonFiniteLossError(f"{what}; {_ADVICE}")

    def _look_at(self, phase: str, losses: Mapping[str, Any]) -> None:
        if losses:
            self.phases_with_losses.add(phase)
        for name, loss in losses.items():
            value = float(loss.detach()) if isinstance(loss, Tensor) else float(loss)
            if not math.isfinite(value) and not self.fault:
                self.fault = f"phase.{phase}: '{name}' is {value}"


def _is_loss(name: str) -> bool:
    """Whether a number of an evaluation is the loss; of several datasets it has their names."""
    return name.rpartition("/")[2] == "loss"


def _nonfinite_weights(context: Context) -> Iterator[tuple[str, str]]:
    """Yield the phase and the name of each trained parameter that is not finite."""
    models = context.peek("model")
    entries = models if isinstance(models, Mapping) else {}
    modules = unique_modules({phase: entry for phase, entry in entries.items() if is_entry(entry)})
    for phase, module in modules.items():
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and not is_lazy(parameter) and not _is_finite(parameter):
                yield phase, name


def _is_finite(tensor: Tensor) -> bool:
    return bool(tensor.detach().isfinite().all())
