"""One batch of a loader, taken in such a way that the loader gives afterwards what it would have given anyway."""

from __future__ import annotations

import copy
import multiprocessing
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from pipeline.data.limits import Limited
from pipeline.data.randomness import restore, states
from pipeline.data.seeded_loader import SeededLoader
from pipeline.errors import DataError


def first_batch(loader: Any) -> Any:
    """The first batch of a loader; random generators, samplers and streams are as if nobody had asked.

    The samples of a map-style dataset are a function of their index, so such a dataset is asked once more. One that is
    iterated may count what it gives: it is asked in another process.

    Args:
        loader: a DataLoader, or any iterable that can be iterated again.

    Raises:
        DataError: it gives no batch, or can be iterated only once.
    """
    while isinstance(loader, Limited):
        loader = loader.loader
    before = states()
    try:
        batches = iter(_apart(loader) if isinstance(loader, DataLoader) else loader)
        if batches is loader:
            kind = f"a {type(loader).__name__} can be iterated only once"
            raise DataError(f"{kind}, and a batch taken before the training would be missing in it; use a DataLoader")
        return next(batches)
    except StopIteration:
        raise DataError("the loader gave no batch; check the dataset, or drop_last with few samples") from None
    finally:
        restore(before)


def _apart(loader: DataLoader[Any]) -> DataLoader[Any]:
    """A loader of the same dataset whose samplers and generator are copies, with one worker at most."""
    other = loader.with_parts() if isinstance(loader, SeededLoader) else copy.copy(loader)
    same = {id(loader.dataset): loader.dataset}
    parts = {name: copy.deepcopy(getattr(loader, name), same) for name in ("generator", "sampler", "batch_sampler")}
    # A DataLoader refuses to have most of these assigned.
    vars(other).update(parts, _iterator=None, persistent_workers=False)
    if loader.num_workers:
        other.num_workers = 1
    elif isinstance(loader.dataset, IterableDataset):
        other.num_workers, other.prefetch_factor = 1, 1
        # Only a forked process has the dataset without its being pickled, as with no worker.
        other.multiprocessing_context = multiprocessing.get_context("fork")
    return other
