"""Gradients that other code leaves behind, where two ranks train."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pipeline import Brain, GeneralTrainer, Stage, hookimpl
from pipeline.context import Context
from tests.distributed.ranks import Ranks

mse = nn.functional.mse_loss


class Probe:
    """On rank 0 alone, so that no other rank could take part in an average."""

    @hookimpl
    def after_validation(self, context: Context) -> None:
        for parameter in context["model"]["line"].brain.modules.parameters():
            (5 * parameter.sum()).backward()


class Line(Brain):
    """Goes backward in each validation too; each rank has as many batches as it has."""

    def __init__(self) -> None:
        super().__init__({"line": nn.Linear(3, 1)})

    def compute_forward(self, batch: Any, stage: Stage) -> Tensor:
        predictions: Tensor = self.modules.line(batch[0])
        return predictions

    def compute_objectives(self, predictions: Tensor, batch: Any, stage: Stage) -> Tensor:
        if stage is Stage.VALID:
            with torch.enable_grad():
                torch.autograd.backward([own.sum() for own in self.modules.parameters()])
        return mse(predictions, batch[1])


class ByHand(Line):
    """Steps by itself after two batches; the ranks average its gradients after each backward."""

    def fit_batch(self, batch: Any) -> Tensor:
        loss = self.compute_objectives(self.compute_forward(batch, Stage.TRAIN), batch, Stage.TRAIN)
        (loss / 2).backward()
        if self.step % 2 == 0:
            self.optimizers_step()
        return loss.detach()


def table(samples: int) -> Any:
    random = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, 3, generator=random)
    return torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())


def train(folder: str, kind: type[Brain], accum_grad: int) -> list[list[float]]:
    """8 samples, of which each rank has one of each batch of two; validated on 3 batches, between two of a window."""
    runner = {"name": "train", "class": "train", "device": "cpu", "epochs": 2, "valid_interval": 3}
    runner |= {"accum_grad": accum_grad}
    data = {"class_path": lambda: table(8), "batch_size": 1}
    phase = {"name": "line", "model": kind, "dataset_name": "data", "valid_dataset_name": "more"}
    context = GeneralTrainer({
        "output_dir": folder,
        "plugins": [{"progress_bar": False}, {"metric_log": False}, Probe],
        "hyper_parameters": {"optimizer": {"class": "SGD", "lr": 0.1}},
        "dataset": [{"name": "data", **data}, {"name": "more", "class_path": lambda: table(3), "batch_size": 1}],
        "runner": [runner],
        "phase": [phase],
    }).run()  # fmt: skip
    return [own.flatten().tolist() for own in context["model"]["line"].brain.modules.parameters()]


def by_hand(window: int) -> list[list[float]]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    inputs, target = table(8).tensors
    for _ in range(2):
        for x, y in zip(inputs.split(2 * window), target.split(2 * window), strict=True):
            optimizer.zero_grad()
            mse(model(x), y).backward()
            optimizer.step()
    return [own.flatten().tolist() for own in model.parameters()]


def test_two_ranks_leave_no_gradient_to_the_next_update(two_ranks: Ranks, tmp_path: Any) -> None:
    for name, kind, accum_grad in (("a", Line, 1), ("b", Line, 2), ("c", ByHand, 1)):
        window = 2 if kind is ByHand else accum_grad
        for weights in two_ranks(train, str(tmp_path / name), kind, accum_grad):
            torch.testing.assert_close(weights, by_hand(window))
