"""A learning curve: train on a part of the data."""

from typing import Any

from torch.utils.data import Subset

from pipeline import Context, make_loader, stages


class SubsetNetwork(stages.Network):
    def __init__(self, context: Context, fraction: float, seed: int = 0) -> None:
        super().__init__(context)
        self.fraction, self.seed = fraction, seed

    def build_dataset(self, settings: Any, runner: Any, context: Context) -> Any:
        loader = super().build_dataset(settings, runner, context)
        if settings.name != "train_data":
            return loader
        count = max(1, int(self.fraction * len(loader.dataset)))
        part = Subset(loader.dataset, range(count))
        return make_loader(part, seed=self.seed, shuffle=True, batch_size=settings.batch_size)
