"""The loader whose batches are a pure function of (seed, epoch)."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, TypeVar, cast

from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from pipeline.data.fetch import FetchedDataset, Fetches, draws_nothing
from pipeline.data.order import EpochSampler
from pipeline.data.place import Beginning, Place, has_state
from pipeline.data.progress import Progress
from pipeline.data.share import has_shard
from pipeline.data.stream import Stream
from pipeline.data.workers import Workers, unreported
from pipeline.errors import ConfigError
from pipeline.stopping import Deaf, unheard

_T = TypeVar("_T")


class SeededLoader(DataLoader[Any]):
    """A torch DataLoader that draws nothing by chance.

    With a map-style dataset, python's, torch's and (where it is imported) numpy's random generators are seeded once
    per batch from (seed, epoch, how many samples of the epoch come before the batch), and are afterwards as they were.
    So samples and collation that draw from them make the same batches with any number of workers, however these are
    started, and others in each epoch. Slices of tensors draw nothing, and nothing is seeded for them, see
    ``draws_nothing``. An IterableDataset is shared out over the workers, see ``Stream``.

    Tell it the epoch before each pass: ``loader.set_epoch(epoch)``. In all else it is what torch makes of the arguments.

    Args:
        dataset: gives the samples.
        seed: None leaves the generators to chance, as torch does.
        where: what messages begin with, such as ``dataset.train``.
        keywords: those of the DataLoader.

    Attributes:
        place: where the pass is that this loader is for; None where nobody asks. Only of a stream.

    Raises:
        ConfigError: ``persistent_workers`` with a dataset that has to be told the epoch in its workers.
    """

    def __init__(self, dataset: Dataset[Any], *, seed: int | None, where: str = "", **keywords: Any) -> None:
        self.seed = seed
        self.where = where or type(dataset).__name__
        self.epoch = 0
        self.place: Place | None = None
        self._fetching: SeededLoader | None = None
        self.fetches: Fetches | None = None
        self.progress: Progress | None = None
        self._taken = 0
        if keywords.get("num_workers"):
            keywords["worker_init_fn"] = Deaf(keywords.get("worker_init_fn"))
        super().__init__(dataset, **keywords)
        self.streams = isinstance(dataset, IterableDataset)
        alone = self.streams and not self.num_workers and has_state(dataset)
        self._beginning = Beginning(dataset, self.where) if alone else None
        if self.persistent_workers and (self.streams or hasattr(dataset, "set_epoch")):
            raise ConfigError(
                f"persistent_workers: is True, but the workers of {type(dataset).__name__} have to be told the epoch; "
                "remove it, so that they are started anew in each"
            )

    def set_epoch(self, epoch: int) -> None:
        """The epoch that comes next, from 0; the sampler and the dataset are told too, if they want to know."""
        self.epoch = epoch
        if self.fetches is not None:
            self.fetches.epoch = epoch
        tell_parts(self, epoch)

    def __iter__(self) -> Any:
        """The batches of the epoch: torch's, where neither workers nor messages of ours nor a place to go on from are needed."""
        if not (self.streams or self._taken or self.num_workers) and (self.seed is None or self._cannot_fail()):
            return super().__iter__()
        fetching = self._fetching or self._that_fetches()
        if self.persistent_workers:
            self._fetching = fetching
        if not fetching.progress:
            batches: Any = DataLoader.__iter__(fetching)
        else:
            # While its workers are started, nobody could tell which one has died, and none is deaf to signals yet.
            with unreported(), unheard():
                batches = DataLoader.__iter__(fetching)
            batches = Workers(batches, self.where, fetching.progress, fetching.fetches).watched()
        return self.place.over(batches) if self.place else batches

    def _cannot_fail(self) -> bool:
        """Whether nothing in a pass draws, and any samples make a batch: no message of ours would be missed."""
        alike = type(self.dataset) is TensorDataset and type(self.sampler) is EpochSampler
        return alike and draws_nothing(self.dataset, self.collate_fn)

    def _that_fetches(self) -> SeededLoader:
        """This loader as its workers see it: the dataset gives whole batches, and nothing is left to collate."""
        progress = Progress(self.num_workers) if self.num_workers else None
        if isinstance(self.dataset, IterableDataset):
            fetching = self.with_parts(dataset=self._stream(progress), batch_sampler=None, collate_fn=as_it_is)
        else:
            fetching = self._of_table(progress)
        fetching.progress = progress
        return fetching

    def _stream(self, progress: Progress | None) -> Stream:
        return Stream(
            cast("IterableDataset[Any]", self.dataset),
            self.collate_fn,
            self.batch_size,
            self.drop_last,
            self.seed,
            self.epoch,
            where=self.where,
            place=self.place,
            beginning=self._beginning,
            progress=progress,
        )

    def _of_table(self, progress: Progress | None) -> SeededLoader:
        """The same of a map-style dataset."""
        batched = self.batch_sampler is not None
        # Those that workers have not given yet: it is told which of them a worker failed at.
        kept = self.num_workers * (self.prefetch_factor or 0) + 1 if progress else 0
        self.fetches = Fetches(self.batch_sampler if batched else self.sampler, self.epoch, self._taken, kept)
        seed = None if draws_nothing(self.dataset, self.collate_fn) else self.seed
        dataset = FetchedDataset(self.dataset, self.collate_fn, seed, batched, where=self.where, progress=progress)
        sampler = {"batch_sampler" if batched else "sampler": self.fetches}
        fetching = self.with_parts(dataset=dataset, collate_fn=as_it_is, **sampler)
        fetching.fetches = self.fetches
        return fetching

    def after(self, taken: int) -> SeededLoader:
        """The same loader without the first ``taken`` batches, which are not fetched; not of a stream."""
        return self.with_parts(_taken=taken)

    def placed(self, saved: Mapping[str, Any] | None = None) -> SeededLoader:
        """The same loader of a stream for one pass, of which it keeps the place.

        Args:
            saved: the place at which to go on; None: the beginning of the epoch.
        """
        place = Place(self.shares, self.batch_size)
        if saved:
            place.go_on(saved)
        return self.with_parts(place=place)

    @property
    def shares(self) -> int:
        """Into how many parts a stream is shared out."""
        return self.num_workers or 1

    def with_parts(self, **parts: Any) -> SeededLoader:
        """The same loader with other parts, which a DataLoader refuses to have assigned."""
        other = copy.copy(self)
        vars(other).update(parts, _fetching=None, fetches=None, _iterator=None)
        return other

    def __len__(self) -> int:
        """How many batches there are; exact for a stream that has a length, although each worker has a short last one.

        Raises:
            TypeError: nobody knows, because the dataset has no length or shares itself out.
        """
        if not self.streams:
            return max(0, super().__len__() - self._taken)
        workers = self.shares
        if workers > 1 and has_shard(self.dataset):
            raise TypeError(f"{type(self.dataset).__name__} shares itself out, so its loader has no length")
        samples = range(len(self.dataset))  # type: ignore[arg-type]  # the TypeError of one without length is right
        size = self.batch_size or 1
        up = 0 if self.drop_last else size - 1
        return sum((len(samples[worker::workers]) + up) // size for worker in range(workers))


def as_it_is(batch: _T) -> _T:
    """Collate nothing: the dataset has done it."""
    return batch


def tell_parts(loader: Any, epoch: int) -> None:
    """Tell the samplers and the dataset of a loader the epoch, each that wants to know, once."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    parts = (
        getattr(loader, "sampler", None),
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
        getattr(loader, "dataset", None),
    )
    for part in {id(each): each for each in parts}.values():
        tell = getattr(part, "set_epoch", None)
        if tell:
            tell(epoch)
