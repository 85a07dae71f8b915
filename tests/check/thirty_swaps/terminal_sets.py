"""Evaluates on several test sets, and writes one line for each."""

import json

import torch

from pipeline import Context, make_loader, stages

from .data import Clicks


class Terminal(stages.Terminal):
    def __init__(self, context: Context, seeds: list[int]) -> None:
        super().__init__(context)
        self.seeds = seeds

    def terminal(self, context: Context) -> None:
        super().terminal(context)
        model = context["model"]["ranking"]["model"].eval()
        accuracies = {f"test_{seed}": self.accuracy(model, seed, context["device"]) for seed in self.seeds}
        with open(context["run_dir"] / "tests.json", "w", encoding="utf-8") as file:
            json.dump(accuracies, file)

    @torch.no_grad()
    def accuracy(self, model: torch.nn.Module, seed: int, device: torch.device) -> float:
        loader = make_loader(Clicks(seed), seed=None, batch_size=32)
        right = [(model(pairs.to(device)).argmax(1) == labels.to(device)).float().mean() for pairs, labels in loader]
        return torch.stack(right).mean().item()
