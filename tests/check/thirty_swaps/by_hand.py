"""Model, optimizer and loop by hand; nothing of the config's `phase` is built."""

from typing import Any

import torch
from torch.utils.data import DataLoader

from pipeline import Context, NetworkBase, RunnerBase

from .data import Clicks
from .model import Model


class Network(NetworkBase):
    def build_network(self, context: Context) -> None:
        context["clicks"] = DataLoader(Clicks(seed=1), batch_size=16, shuffle=True)
        context["net"] = Model(context["hyper_parameters"]["width"]).to(context["device"])
        context["optimizer"] = torch.optim.AdamW(context["net"].parameters(), lr=1e-3)


class Runner(RunnerBase):
    def run(self, context: Context) -> None:
        net, optimizer = context["net"], context["optimizer"]
        for epoch in range(context["runner"].epochs or 1):
            context["current_epoch"] = epoch
            total = sum(self.step(net, optimizer, *batch) for batch in context["clicks"])
            context["metrics"] = {"ranking": {"loss": total / len(context["clicks"])}}

    def step(self, net: Any, optimizer: Any, pairs: torch.Tensor, labels: torch.Tensor) -> float:
        loss = torch.nn.functional.cross_entropy(net(pairs), labels)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        return loss.item()
