"""Who has chosen which item, made on the spot: users and items have tastes, and the nearest items are chosen most."""

from collections.abc import Iterator, Sized

import torch
from torch import Tensor
from torch.utils.data import Sampler, TensorDataset

USERS, ITEMS = 200, 100


def choices(size: int, seed: int) -> TensorDataset:
    """Users [size] and the item [size] that each has chosen."""
    fixed, random = torch.Generator().manual_seed(0), torch.Generator().manual_seed(seed)
    tastes, kinds = torch.randn(USERS, 3, generator=fixed), torch.randn(ITEMS, 3, generator=fixed)
    users = torch.randint(USERS, (size,), generator=random)
    items = torch.multinomial((2 * tastes[users] @ kinds.T).softmax(dim=1), 1, generator=random)[:, 0]
    return TensorDataset(users, items)


def popularity(data: TensorDataset) -> Tensor:
    """How often each item was chosen [items], as a share, and at least a bit."""
    return (torch.bincount(data.tensors[1], minlength=ITEMS) + 1.0) / (len(data) + ITEMS)


class Shuffled(Sampler[int]):
    """The samples in an order of its own in each epoch."""

    def __init__(self, dataset: Sized, seed: int) -> None:
        self.size, self.seed, self.epoch = len(dataset), seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(self.size, generator=torch.Generator().manual_seed(self.seed + self.epoch)).tolist()
