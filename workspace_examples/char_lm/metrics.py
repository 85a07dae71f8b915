"""A metric of our own: any class with these three methods is one."""

import torch
from torch import Tensor, nn


class Perplexity:
    """The exponential of the mean cross entropy: among how many characters the model might as well have guessed.

    Unlike the loss, this is no mean of what each batch gives, so `self.log` would not do.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start again."""
        self.total: Tensor = torch.zeros((), dtype=torch.float64)
        self.count = 0

    def update(self, predictions: Tensor, target: Tensor) -> None:
        """Take in scores [batch, alphabet, length] and characters [batch, length]."""
        self.total = self.total + nn.functional.cross_entropy(predictions, target, reduction="sum").double()
        self.count += target.numel()

    def compute(self) -> Tensor:
        """The number over all characters since the last reset."""
        return (self.total / self.count).exp()
