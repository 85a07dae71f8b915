"""The same training written by hand, after nanoGPT's."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils.data import DataLoader

from .data import RandomBatches, decode, encode, pieces
from .model import Model, loss

LENGTH, EPOCHS, BATCHES, ACCUMULATE = 32, 2, 60, 2
RATE, FINAL, CLIP, VALID_UPDATES, VALID_BATCHES = 0.01, 0.1, 1.0, 20, 4


def rate_of(update: int, updates: int, warmup: int) -> float:
    if update < warmup:
        return RATE * update / warmup
    share = (update - warmup) / (updates - warmup)
    return RATE * (FINAL + (1 - FINAL) * (1 + math.cos(math.pi * share)) / 2)


@torch.no_grad()
def validate(model: Model, loader: Any) -> float:
    model.eval()
    total, samples = 0.0, 0
    for batch, (inputs, targets) in enumerate(loader):
        if batch == VALID_BATCHES:
            break
        total += loss(model(inputs), targets).item() * len(inputs)
        samples += len(inputs)
    model.train()
    return total / samples


def main() -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = pieces("train", LENGTH)
    sampler = RandomBatches(data, batch_size=16, batches=BATCHES, seed=0)
    loader = DataLoader(data, batch_sampler=sampler)
    valid_loader = DataLoader(pieces("valid", LENGTH), batch_size=64)
    model = Model(width=32, heads=2, layers=2, length=LENGTH)
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95))
    updates = EPOCHS * BATCHES // ACCUMULATE
    update, best, losses = 0, math.inf, []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for batch, (inputs, targets) in enumerate(loader):
            torch.autograd.backward(loss(model(inputs), targets) / ACCUMULATE)
            if batch % ACCUMULATE != ACCUMULATE - 1:
                continue
            update += 1
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            for group in optimizer.param_groups:
                group["lr"] = rate_of(update, updates, warmup=round(updates * 0.1))
            optimizer.step()
            optimizer.zero_grad()
            if update % VALID_UPDATES == 0:
                losses.append(validate(model, valid_loader))
                if losses[-1] < best:
                    best = losses[-1]
                    best_weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    model.eval()
    text = decode(model.generate(encode("The ")[None], 20)[0])
    return {"weights": model.state_dict(), "best": best_weights, "losses": losses, "text": text}
