"""The same training written by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from .data import ITEMS, Shuffled, choices, popularity
from .towers import Towers

EPOCHS, RATE, K = 4, 0.002, 10


@torch.no_grad()
def score(model: Towers, loader: Any) -> tuple[float, Tensor]:
    model.eval()
    found, scores = [], []
    for users, items in loader:
        scores.append(model(users, torch.arange(ITEMS)))
        found.append((scores[-1].topk(K, dim=1).indices == items[:, None]).any(dim=1))
    return torch.cat(found).double().mean().item(), torch.cat(scores)


def main() -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = choices(4096, seed=1)
    sampler = Shuffled(data, seed=0)
    loader = DataLoader(data, batch_size=128, sampler=sampler)
    valid_loader = DataLoader(choices(512, seed=2), batch_size=256)
    correction = popularity(data).log()
    model = Towers(width=16)
    embeddings = [model.users[0].weight, model.items[0].weight]
    others = [parameter for parameter in model.parameters() if all(parameter is not other for other in embeddings)]
    optimizer = torch.optim.Adam([{"params": embeddings, "lr": 5 * RATE}, {"params": others}], lr=RATE)
    recalls, best = [], -1.0
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        model.train()
        for users, items in loader:
            loss = cross_entropy(model(users, items) - correction[items], torch.arange(len(users)))
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
        recall, scores = score(model, valid_loader)
        recalls.append(recall)
        if recall > best:
            best, best_scores = recall, scores
    return {"weights": model.state_dict(), "recalls": recalls, "best_scores": best_scores}
