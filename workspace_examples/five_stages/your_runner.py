"""The training itself."""

import torch

from pipeline import Context, RunnerBase


class Runner(RunnerBase):
    """Fits the line by full batches, 50 to an epoch; writes `loss`."""

    reads = ("runner", "points", "line", "optimizer")
    writes = ("current_epoch", "loss")

    def run(self, context: Context) -> None:
        x, y = context["points"]
        line, optimizer = context["line"], context["optimizer"]
        for epoch in range(context["runner"].epochs or 1):
            context["current_epoch"] = epoch
            for _ in range(50):
                optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(line(x), y)
                torch.autograd.backward(loss)
                optimizer.step()
                context["loss"] = loss.item()
            print(f"runner: epoch {epoch}: loss {context['loss']:.6f}")
        print("runner: reads runner, points, line, optimizer; writes current_epoch, loss")
