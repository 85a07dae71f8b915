"""What the code of a user does itself, and what it is asked for."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from pipeline.distributed.strategy import Options


class CustomCode(NamedTuple):
    """Which parts of the training the class of the user does with code of its own.

    Attributes:
        trains: whether it trains on a batch.
        evaluates: whether it evaluates a batch. Then there are no predictions.
        clears_gradients: whether it clears the gradients.
        has_batch_hooks: whether it is called before and after each training batch.
        stepping_method: the name of the first method with which it trains or steps its optimizers;
            empty if there is none.
    """

    trains: bool = False
    evaluates: bool = False
    clears_gradients: bool = False
    has_batch_hooks: bool = False
    stepping_method: str = ""


NO_CUSTOM_CODE = CustomCode()


class LossAverage(Protocol):
    """The mean loss of an evaluation, as the class of the user computes it."""

    def add(self, loss: Tensor) -> None:
        """Add the loss of a batch."""

    def mean(self) -> float:
        """Return the mean of this rank."""


class ComputeOptions(Options, Protocol):
    """The run options that concern what is computed for a batch."""

    @property
    def precision(self) -> str:
        """The precision of the training: ``fp32``, ``bf16`` or ``fp16``."""

    @property
    def eval_precision(self) -> str:
        """The precision of evaluations."""

    @property
    def skip_nonfinite_grads(self) -> bool:
        """Whether gradients that are not finite are discarded."""

    @property
    def grad_accumulation_factor(self) -> int:
        """The number of batches in a window."""
