"""What is trained, and how."""

import torch

from pipeline import Context, NetworkBase


class Network(NetworkBase):
    """Writes `line` and `optimizer`."""

    reads = ("device",)
    writes = ("line", "optimizer")

    def build_network(self, context: Context) -> None:
        context["line"] = torch.nn.Linear(1, 1).to(context["device"])
        context["optimizer"] = torch.optim.SGD(context["line"].parameters(), lr=0.5)
        print(f"network: reads device ({context['device']}); writes line, optimizer")
