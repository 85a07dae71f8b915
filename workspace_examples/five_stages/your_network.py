"""What is trained, and how."""

import torch

from pipeline import Context, NetworkBase


class Network(NetworkBase):
    """Writes `model` and `optimizer`."""

    reads = ("device",)
    writes = ("model", "optimizer")

    def build_network(self, context: Context) -> None:
        context["model"] = torch.nn.Linear(1, 1).to(context["device"])
        context["optimizer"] = torch.optim.SGD(context["model"].parameters(), lr=0.5)
        print(f"network: reads device ({context['device']}); writes model, optimizer")
