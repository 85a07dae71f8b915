"""Datasets -> loaders."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sized
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from pipeline.config.schema import DatasetSchema
from pipeline.data.order import EpochSampler
from pipeline.data.seeded_loader import SeededLoader, tell_parts
from pipeline.errors import ConfigError, DataError, one_of

KEYWORDS = frozenset(inspect.signature(DataLoader).parameters) - {"dataset"}


def make_loader(
    dataset: Any,
    *,
    seed: int | None,
    shuffle: bool = False,
    batch_size: int | None = 1,
    where: str = "make_loader",
    **keywords: Any,
) -> SeededLoader:
    """A loader of any dataset.

    Args:
        dataset: map-style (a list will do) or iterable.
        seed: of the order and of the random generators; None leaves both to chance.
        shuffle: whether each epoch has an order of its own.
        batch_size: None for samples as they are.
        where: what messages begin with.
        keywords: any other of torch's DataLoader. A ``sampler`` or ``batch_sampler`` decides the order; so does a
            ``generator``, as torch has it.

    Raises:
        ConfigError: the DataLoader has no such keyword, or one would be ignored.
        DataError: the dataset is empty, has no length, or cannot be shuffled.
    """
    for name in keywords:
        if name not in KEYWORDS:
            raise ConfigError(f"{where}: a DataLoader has no argument '{name}'{one_of(name, KEYWORDS)}")
    ordered = any(keywords.get(name) is not None for name in ("sampler", "batch_sampler", "generator"))
    if isinstance(dataset, IterableDataset):
        if shuffle:
            kind = f"{type(dataset).__name__} is an IterableDataset"
            raise DataError(f"{where}: shuffle: true needs indices, and {kind}; shuffle in the dataset itself")
    elif not ordered:
        keywords["sampler"] = EpochSampler(length_of(dataset, where), shuffle, seed)
        shuffle = False
    if keywords.get("timeout") and not keywords.get("num_workers"):
        waits = f"timeout: {keywords['timeout']} is how long workers are waited for, and there are none"
        raise ConfigError(f"{where}: {waits}; remove it, or set num_workers")
    return SeededLoader(dataset, seed=seed, where=where, shuffle=shuffle, batch_size=batch_size, **keywords)


def length_of(dataset: Any, where: str) -> int:
    """How many samples a dataset has.

    Raises:
        DataError: none, or nobody knows.
    """
    name = type(dataset).__name__
    if not isinstance(dataset, Sized):
        raise DataError(f"{where}: {name} has no length; give it __len__, or make it an IterableDataset")
    try:
        length = len(dataset)
    except (TypeError, ValueError, OverflowError) as error:
        if error.__traceback__ and error.__traceback__.tb_next:
            # __len__ itself has raised it.
            raise
        raise DataError(f"{where}: {name}.__len__ gives no length ({error}); return an int of 0 or more") from error
    if not length:
        raise DataError(f"{where}: {name} has no samples; check its arguments")
    return length


def build_loader(
    dataset: Dataset[Any],
    settings: DatasetSchema,
    seed: int | None,
    device: torch.device,
    collate: Callable[[list[Any]], Any] | None,
) -> SeededLoader:
    """The loader of one item of ``dataset:``.

    Raises:
        DataError: the dataset is empty, has no length, or cannot be shuffled.
    """
    return make_loader(
        dataset,
        seed=seed,
        shuffle=settings.shuffle,
        batch_size=settings.batch_size,
        where=f"dataset.{settings.name}",
        num_workers=settings.num_workers,
        drop_last=settings.drop_last,
        collate_fn=collate,
        multiprocessing_context=settings.multiprocessing_context if settings.num_workers else None,
        timeout=(settings.timeout or 0) if settings.num_workers else 0,
        pin_memory=device.type == "cuda",
    )


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell a loader which epoch comes next; of one that does not want to know, its parts that do."""
    tell = getattr(loader, "set_epoch", None)
    if tell:
        tell(epoch)
    else:
        tell_parts(loader, epoch)
