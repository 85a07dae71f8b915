"""The share of a stream that one worker reads."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count as numbers
from itertools import islice
from typing import TYPE_CHECKING, Any

from torch.utils.data import get_worker_info

# There is no public way to change what get_worker_info() says.
from torch.utils.data._utils import worker as torch_worker

from pipeline.data.blame import Raised, blame, uncollated
from pipeline.data.place import Marked, has_state, state_of
from pipeline.data.randomness import Draws, plain_states, seeded, states_of
from pipeline.errors import DataError

if TYPE_CHECKING:
    from pipeline.data.stream import Stream


class Share:
    """The part of a stream that one process reads.

    Args:
        stream: the whole.
        number: which share.
        count: of how many.
        seed: of the random generators; None leaves them to chance.
    """

    def __init__(self, stream: Stream, number: int, count: int, seed: int | None) -> None:
        begun = [each for each in stream.states if each]
        self.stream, self.number, self.count = stream, number, count
        # Those that were not begun are shuffled as the others were.
        self.seed = begun[0]["seed"] if begun else seed
        self.begun = stream.states[number] if stream.states else None
        self.dataset: Any = stream.dataset

    def batches(self) -> Iterator[Any]:
        """Its batches, or the rest of them."""
        if self.begun and self.begun["ended"]:
            # A dataset that has come to its end may begin again.
            return
        stream, size = self.stream, self.stream.batch_size or 1
        draws = Draws(self.seed, stream.epoch, "stream", self.number if has_shard(stream.dataset) else 0)
        if self.begun and self.begun["draws"]:
            draws.reached = states_of(self.begun["draws"])
        samples = self._samples()
        for number in numbers(self.begun["batches"] if self.begun else 0):
            try:
                taken, state = self._taken(samples, draws, number)
                if len(taken) < (size if stream.drop_last else 1):
                    return
                batch = self._collated(taken, number)
            except Exception as error:
                yield Raised.instead(error)
                return
            if stream.marks:
                batch = Marked(batch, self.number, self._mark(state, draws, number, ended=len(taken) < size))
            yield batch

    def _taken(self, samples: Iterator[Any], draws: Draws, number: int) -> tuple[list[Any], Any]:
        """The samples of a batch, and the state of the dataset after them."""
        stream, info = self.stream, get_worker_info()
        if stream.progress and info:
            samples = stream.progress.over(samples, number, info.id, there=True)
        try:
            with draws.going_on(), alone():
                taken = list(islice(samples, stream.batch_size or 1))
                return taken, state_of(self.dataset, stream.where) if stream.marks and has_state(self.dataset) else None
        except Exception as error:
            blame(error, stream.where, f"raised for {self._told(number)}")
            raise

    def _samples(self) -> Iterator[Any]:
        """Its samples. A generator: the dataset draws nothing before the first sample is asked for."""
        stream, number, count = self.stream, self.number, self.count
        shards = count > 1 and has_shard(self.dataset)
        if shards:
            self.dataset = self._shard()
        if self.begun:
            self.dataset.load_state_dict(self.begun["dataset"])
        elif stream.beginning:
            stream.beginning.restore(stream.epoch)
        if count == 1 or shards:
            yield from self._iterated()
        else:
            # Of a dataset that goes on, the samples that were up to the other workers come first.
            yield from islice(self._iterated(), count - 1 if self.begun else number, None, count)

    def _iterated(self) -> Iterator[Any]:
        try:
            return iter(self.dataset)
        except TypeError as error:
            if error.__traceback__ and error.__traceback__.tb_next:
                # __iter__ itself has raised it.
                raise
            what = f"{type(self.dataset).__name__}.__iter__ gives no iterator ({error})"
            raise DataError(f"{self.stream.where}: {what}; yield the samples in it, or return iter(…)") from error

    def _shard(self) -> Any:
        stream, number, count = self.stream, self.number, self.count
        with seeded(self.seed, stream.epoch, "shard"):
            shard = self.dataset.shard(rank=number, count=count)
        if shard is None:
            raise DataError(
                f"{stream.where}: {type(self.dataset).__name__}.shard(rank={number}, count={count}) returned None; "
                "return the dataset to iterate, self if it has changed itself"
            )
        return shard

    def _collated(self, samples: list[Any], number: int) -> Any:
        stream = self.stream
        given = samples if stream.batch_size else samples[0]
        try:
            with seeded(self.seed, stream.epoch, "collate", self.number, number):
                return stream.collate(given)
        except Exception as error:
            if told := uncollated(error, stream.where, self._told(number), given, stream.collate):
                raise told from error
            raise

    def _mark(self, state: Any, draws: Draws, number: int, *, ended: bool) -> dict[str, Any] | None:
        """What it needs to go on after a batch; None where the dataset does not know."""
        if not has_state(self.dataset):
            return None
        reached = plain_states(draws.reached) if draws.reached else None
        return {"batches": number + 1, "ended": ended, "seed": self.seed, "draws": reached, "dataset": state}

    def _told(self, number: int) -> str:
        of_share = f" of the worker that reads share {self.number}" if self.count > 1 else ""
        return f"batch {number}{of_share} in epoch {self.stream.epoch}"


def has_shard(dataset: Any) -> bool:
    """Whether a dataset has a method ``shard(rank, count)``; a shard with other parameters means something else."""
    try:
        inspect.signature(dataset.shard).bind(rank=0, count=1)
    except (AttributeError, TypeError):
        return False
    return True


@contextmanager
def alone() -> Iterator[None]:
    """In the block this worker is told that there is no other."""
    info = get_worker_info()
    if info:
        torch_worker._worker_info = type(info)(id=0, num_workers=1, seed=info.seed, dataset=info.dataset)
    try:
        yield
    finally:
        torch_worker._worker_info = info
