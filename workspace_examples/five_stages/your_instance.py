"""What must stand before the model: here, the data."""

import torch

from pipeline import Context, InstanceBase


class Instance(InstanceBase):
    """Writes `points`: x [100, 1] and y [100, 1] on a line with noise."""

    writes = ("points",)

    def instance(self, context: Context) -> None:
        random = torch.Generator().manual_seed(0)
        x = torch.rand(100, 1, generator=random)
        y = 3 * x - 1 + 0.01 * torch.randn(100, 1, generator=random)
        context["points"] = (x, y)
        print(f"instance: reads nothing; writes points ({len(x)} of them)")
