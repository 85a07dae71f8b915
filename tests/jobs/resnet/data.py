"""Small pictures of stripes in four directions, made on the spot."""

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

DIRECTIONS = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [1.0, -1.0]])


def stripes(size: int, seed: int, noise: float = 1.0) -> TensorDataset:
    """Pictures [1, 12, 12], and the direction of the stripes of each (0 to 3)."""
    random = torch.Generator().manual_seed(seed)
    classes = torch.randint(4, (size,), generator=random)
    places = torch.stack(torch.meshgrid(torch.arange(12.0), torch.arange(12.0), indexing="ij"))
    waves = torch.einsum("bc,chw->bhw", DIRECTIONS[classes], places) + 6 * torch.rand(size, 1, 1, generator=random)
    pictures = waves.sin() + noise * torch.randn(size, 12, 12, generator=random)
    return TensorDataset(pictures[:, None], classes)


def mixed(pictures: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
    """Mixup: each picture blended with another of the batch, and the shares [batch, 4] of the classes."""
    share = torch.distributions.Beta(0.4, 0.4).sample()
    other = torch.randperm(len(pictures))
    targets = torch.nn.functional.one_hot(classes, 4).float()
    return torch.lerp(pictures[other], pictures, share), torch.lerp(targets[other], targets, share)
