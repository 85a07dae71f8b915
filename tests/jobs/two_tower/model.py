"""Trains the towers: the other items of a batch are those that a user has not chosen."""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from pipeline import Brain, Stage

from .data import ITEMS, choices, popularity
from .towers import Towers


class Model(Brain):
    def __init__(self, width: int, size: int, seed: int) -> None:
        super().__init__({"towers": Towers(width)})
        self.correction = popularity(choices(size, seed)).log()

    def compute_forward(self, batch: tuple[Tensor, Tensor], stage: Stage) -> Tensor:
        users, items = batch
        if stage is not Stage.TRAIN:
            return self.modules["towers"](users, torch.arange(ITEMS))
        return self.modules["towers"](users, items) - self.correction[items]

    def compute_objectives(self, predictions: Tensor, batch: tuple[Tensor, Tensor], stage: Stage) -> Tensor | None:
        if stage is not Stage.TRAIN:
            return None
        return cross_entropy(predictions, torch.arange(len(predictions)))
