"""The training, from the first epoch to the last."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from pipeline import Context, RunnerBase

Batches = Iterable[tuple[Tensor, Tensor]]


class Runner(RunnerBase):
    """Trains for the runner's `epochs`, and validates and saves after each."""

    reads = ("config", "runner_name", "device", "dataset", "model", "optimizer", "train_state", "hooks", "checkpointer")
    writes = ("current_epoch", "metrics")

    def run(self, context: Context) -> None:
        """All epochs."""
        self.model: nn.Module = context["model"]["sine"]["model"]
        self.optimizer: torch.optim.Optimizer = context["optimizer"]
        self.device: torch.device = context["device"]
        for epoch in range(context["config"].get(f"runner.{context['runner_name']}.epochs")):
            context["current_epoch"] = epoch
            context["hooks"].before_epoch(context=context)
            loss = self.train(context["dataset"]["train_data"], context["train_state"])
            context["metrics"] = {"sine": {"loss": loss, "valid_loss": self.valid(context["dataset"]["valid_data"])}}
            context["train_state"]["epoch"] = epoch + 1
            # The plugins write and log the numbers.
            context["hooks"].after_epoch(context=context)
            self.save(context)

    def train(self, batches: Batches, train_state: dict[str, int]) -> float:
        """One pass over the training data; the mean of its losses."""
        self.model.train()
        losses = []
        for x, y in batches:
            losses.append(self.train_batch(x.to(self.device), y.to(self.device)))
            train_state["iteration"] += 1
        return torch.stack(losses).mean().item()

    def train_batch(self, x: Tensor, y: Tensor) -> Tensor:
        """One step; the loss."""
        loss = nn.functional.mse_loss(self.model(x), y)
        self.optimizer.zero_grad()
        torch.autograd.backward(loss)
        self.optimizer.step()
        return loss.detach()

    @torch.no_grad()
    def valid(self, batches: Batches) -> float:
        """One pass over the validation data; the mean of its losses."""
        self.model.eval()
        losses = [nn.functional.mse_loss(self.model(x.to(self.device)), y.to(self.device)) for x, y in batches]
        return torch.stack(losses).mean().item()

    def save(self, context: Context) -> None:
        """A checkpoint of this moment, of which the plugins are told."""
        path = context["checkpointer"].save(context["model"], context["train_state"], context["metrics"])
        context["hooks"].after_checkpoint_saved(context=context, path=path)
