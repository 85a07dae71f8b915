"""The same training written by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import OneCycleLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from .data import mixed, stripes
from .network import ResNet

EPOCHS = 4


@torch.no_grad()
def validate(model: Any, loader: Any) -> tuple[float, float]:
    model.eval()
    loss, correct, samples = 0.0, 0, 0
    for pictures, classes in loader:
        scores = model(pictures)
        loss += cross_entropy(scores, classes).item() * len(pictures)
        correct += int((scores.argmax(dim=1) == classes).sum())
        samples += len(pictures)
    return loss / samples, correct / samples


def main() -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    loader = DataLoader(stripes(512, seed=1), batch_size=32)
    valid_loader = DataLoader(stripes(256, seed=2), batch_size=64)
    model = ResNet(channels=8, blocks=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.0005)
    schedule = OneCycleLR(optimizer, max_lr=0.1, total_steps=EPOCHS * len(loader))
    averages = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.98), use_buffers=True)
    numbers = []
    for _ in range(EPOCHS):
        model.train()
        for batch in loader:
            pictures, targets = mixed(*batch)
            loss = cross_entropy(model(pictures), targets)
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            schedule.step()
            averages.update_parameters(model)
        # A DataLoader draws a number when it begins. Validations are not to change the training.
        with torch.random.fork_rng():
            numbers.append(validate(averages, valid_loader))
    return {"weights": averages.module.state_dict(), "numbers": numbers}
