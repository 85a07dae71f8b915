"""Going on in the middle of an epoch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from loguru import logger
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

from pipeline.data.limits import Limited, order_of
from pipeline.data.place import has_state, state_of, unknown_place
from pipeline.data.seeded_loader import SeededLoader
from pipeline.data.share import has_shard
from pipeline.errors import DataError
from pipeline.stopping import STOP


def after(loader: Any, taken: int, place: Mapping[str, Any] | None = None) -> Any:
    """The batches of a pass that come after the first ``taken``; ``place_of`` them tells where the pass is.

    Of a map-style dataset these are not fetched, and a stream that has a state goes on from it. Of anything else they
    are read again, and left out.

    Args:
        loader: of the pass.
        taken: how many batches of it were taken before.
        place: what ``place_of`` told then.

    Raises:
        DataError: a stream was shared out over another number of workers.
    """
    if isinstance(loader, Limited):
        return Limited(after(loader.loader, taken, place), max(0, loader.count - taken))
    if not isinstance(loader, SeededLoader):
        if taken and place and has_state(loader):
            loader.load_state_dict(place["loader"])
            return loader
        return _ReadAgain(loader, taken) if taken else loader
    if not loader.streams:
        return loader.after(taken) if taken else loader
    if taken and place:
        refuse_other_shares(loader, place)
    # Of what a shard returns, it is seen in its worker whether it has a state.
    may_have_state = has_state(loader.dataset) or (loader.shares > 1 and has_shard(loader.dataset))
    if taken and place and place["states"] and may_have_state:
        return loader.placed(place)
    placed = loader.placed() if may_have_state else loader
    return _ReadAgain(placed, taken) if taken else placed


def place_of(loader: Any, taken: int) -> dict[str, Any] | None:
    """Where a pass is after ``taken`` batches, as plain data and tensors; None where that number says it all.

    Args:
        loader: what ``after`` returned for it.
        taken: how many batches of the pass are done: all that it has given, or all but the last.
    """
    while isinstance(loader, Limited | _ReadAgain):
        loader = loader.loader
    if not isinstance(loader, SeededLoader) and has_state(loader):
        return {"loader": state_of(loader, "the training data")}
    if not isinstance(loader, SeededLoader) or not loader.streams:
        return None
    return loader.place.after(taken) if loader.place else unknown_place(loader.shares, loader.batch_size, taken)


def order_drawn_by(loader: Any) -> str:
    """What draws the order of a loader's samples anew in each epoch, so that no place in it can be gone on from.

    Returns:
        Its class; ``""`` where the order is that of the dataset or depends on the epoch alone, and for a loader with
        ``state_dict`` and ``load_state_dict``. An order that is neither is taken to be drawn.
    """
    while isinstance(loader, Limited):
        loader = loader.loader
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset) or has_state(loader):
        return ""
    order = order_of(loader)
    certain = isinstance(order, SequentialSampler | list | tuple | range) or hasattr(order, "set_epoch")
    return "" if certain else type(order).__name__


def generators_of(loader: Any) -> list[torch.Generator]:
    """The random generators of a loader and its samplers, which it does not share with all else."""
    batches = getattr(loader, "batch_sampler", None)
    owners = (loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
    found = {id(each): each for each in (getattr(owner, "generator", None) for owner in owners)}
    return [each for each in found.values() if isinstance(each, torch.Generator)]


def refuse_other_shares(loader: SeededLoader, place: Mapping[str, Any]) -> None:
    """Refuse to go on with a stream that is read in other parts: samples would come twice, and others not at all."""
    if place["shares"] != loader.shares:
        raise DataError(
            f"{loader.where}: num_workers is {loader.num_workers}, and the epoch was begun with {place['shares']}; each "
            f"worker reads a part of the stream, so set it to {place['shares']} until the epoch is over"
        )
    if not place["states"] and place["batch_size"] != loader.batch_size:
        raise DataError(
            f"{loader.where}: batch_size is {loader.batch_size}, and the epoch was begun with {place['batch_size']}; the "
            f"batches are counted to find the place in it, so set it to {place['batch_size']} until the epoch is over"
        )


class _ReadAgain:
    """Reads the first batches of a loader, and gives the others."""

    def __init__(self, loader: Any, taken: int) -> None:
        self.loader, self.taken = loader, taken

    def __iter__(self) -> Iterator[Any]:
        spared = "; state_dict and load_state_dict in its dataset would spare that"
        logger.warning(
            f"{self.taken} batches of the epoch are read again, to go on after them: a stream has no index"
            + (spared if isinstance(self.loader, SeededLoader) else "")
        )
        batches: Iterator[Any] = iter(self.loader)
        found = 0
        for _ in islice(STOP.waited_for(batches) if getattr(self.loader, "num_workers", 0) else batches, self.taken):
            found += 1
            # Nothing is to be saved: the checkpoint is there that the run goes on from.
            STOP.end()
        if found < self.taken:
            raise DataError(
                f"the epoch has {found} batches, and {self.taken} of them were trained on before; go on with the data "
                "and batch size of the run that is resumed"
            )
        return batches

    def __len__(self) -> int:
        return max(0, len(self.loader) - self.taken)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)
