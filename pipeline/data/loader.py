"""Datasets -> loaders. The order of the samples is a pure function of (seed, epoch)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sized
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from pipeline.config.schema import DatasetSchema
from pipeline.errors import DataError


def mix(seed: int, *parts: int) -> int:
    """A seed of 63 bits made of ``seed`` and ``parts``: neighbouring epochs share nothing."""
    digest = hashlib.sha256(":".join(map(str, (seed, *parts))).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


class EpochSampler(Sampler[int]):
    """Indices in order, or in a new order for each epoch.

    Args:
        length: how many samples there are.
        shuffle: whether to shuffle.
        seed: with the epoch it decides the order; None draws one from torch.
    """

    def __init__(self, length: int, shuffle: bool, seed: int | None) -> None:
        self.length = length
        self.shuffle = shuffle
        self.seed = int(torch.randint(2**31, ()).item()) if seed is None else seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """The epoch whose order comes next, from 0."""
        self.epoch = epoch

    def __len__(self) -> int:
        """How many samples there are."""
        return self.length

    def __iter__(self) -> Iterator[int]:
        """The indices of one epoch."""
        if not self.shuffle:
            return iter(range(self.length))
        generator = torch.Generator().manual_seed(mix(self.seed, self.epoch))
        return iter(torch.randperm(self.length, generator=generator).tolist())


def build_loader(
    dataset: Dataset[Any],
    settings: DatasetSchema,
    seed: int | None,
    device: torch.device,
    collate: Callable[[list[Any]], Any] | None,
) -> DataLoader[Any]:
    """The loader of one item of ``dataset:``.

    Raises:
        DataError: the dataset is empty, or cannot be shuffled.
    """
    where = f"dataset.{settings.name}"
    sampler = None
    if isinstance(dataset, IterableDataset):
        kind = f"{type(dataset).__name__} is an IterableDataset"
        if settings.num_workers > 1:
            twice = f"with num_workers: {settings.num_workers} each worker would give every sample"
            raise DataError(f"{where}: {kind}: {twice}; set it to 0 or 1 until streams are shared out")
        if settings.shuffle:
            raise DataError(f"{where}: shuffle: true needs indices, and {kind}; shuffle in the dataset itself")
    elif not isinstance(dataset, Sized):
        raise DataError(
            f"{where}: {type(dataset).__name__} has no length; give it __len__, or make it an IterableDataset"
        )
    elif len(dataset) == 0:
        raise DataError(f"{where}: {type(dataset).__name__} has no samples; check its arguments {settings.args}")
    else:
        sampler = EpochSampler(len(dataset), settings.shuffle, seed)
    return DataLoader(
        dataset,
        batch_size=settings.batch_size,
        sampler=sampler,
        num_workers=settings.num_workers,
        drop_last=settings.drop_last,
        collate_fn=collate,
        multiprocessing_context=settings.multiprocessing_context if settings.num_workers else None,
        pin_memory=device.type == "cuda",
    )


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell a loader's sampler, and an IterableDataset that wants to know, which epoch comes next."""
    for part in (getattr(loader, "sampler", None), getattr(loader, "dataset", None)):
        tell = getattr(part, "set_epoch", None)
        if tell:
            tell(epoch)
