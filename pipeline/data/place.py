"""Where a pass over a stream is: the state that its dataset had in each worker after the last batch that was used."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

# There is no public way to pin a part of what a worker gives.
from torch.utils.data._utils import pin_memory as torch_pin_memory

from pipeline.errors import DataError

_pin_memory: Callable[[Any], Any] = torch_pin_memory.pin_memory
_SCALARS = (type(None), bool, int, float, str, bytes, Tensor, nn.Parameter)
_MAPPINGS = (dict, OrderedDict, Counter)


class Marked(NamedTuple):
    """A batch of a stream, and where its worker is after it.

    Attributes:
        batch: the batch.
        share: which of the shares of the stream it is from.
        state: of that share; None where the dataset cannot tell.
    """

    batch: Any
    share: int
    state: dict[str, Any] | None

    def pin_memory(self) -> Marked:
        """The same with the batch in pinned memory; the state stays where it is."""
        return self._replace(batch=_pin_memory(self.batch))


class Place:
    """The place of one pass over a stream.

    Args:
        shares: into how many parts the stream is shared out: one for each worker.
        batch_size: of the loader.

    Attributes:
        states: share -> its state after the last batch of it; None where there was none yet.
        last: which share the last batch was from; the next one is from the one after it.
        taken: how many batches of the pass were given so far.
        certain: whether each of them came with a state.
    """

    def __init__(self, shares: int, batch_size: int | None) -> None:
        self.shares, self.batch_size = shares, batch_size
        self.states: list[dict[str, Any] | None] = [None] * shares
        self.last = shares - 1
        self.taken = 0
        self.certain = True
        self._before: tuple[int, int, dict[str, Any] | None] = (self.last, 0, None)

    def over(self, marked: Iterable[Marked]) -> Iterator[Any]:
        """The batches, the place moving with them."""
        for batch, share, state in marked:
            self._before = (self.last, share, self.states[share])
            self.last, self.states[share] = share, state
            self.taken += 1
            self.certain = self.certain and state is not None
            yield batch

    def after(self, taken: int) -> dict[str, Any]:
        """The place after so many batches of the pass, as plain data: all that were given, or all but the last."""
        ahead = self.taken - taken
        place = unknown_place(self.shares, self.batch_size, taken)
        if not self.certain or ahead not in {0, 1}:
            return place
        last, states = self.last, list(self.states)
        if ahead:
            last, share, before = self._before
            states[share] = before
        return {**place, "last": last, "states": states}

    def go_on(self, saved: Mapping[str, Any]) -> None:
        """Be where another was: its ``after``, with states."""
        self.taken, self.last, self.states = saved["taken"], saved["last"], list(saved["states"])

    @property
    def first(self) -> int:
        """The share that the next batch is from."""
        return (self.last + 1) % self.shares


def unknown_place(shares: int, batch_size: int | None, taken: int) -> dict[str, Any]:
    """What is known of a place where the dataset has no state: enough to see whether counting batches leads there."""
    return {"shares": shares, "batch_size": batch_size, "taken": taken, "last": None, "states": None}


class Beginning:
    """How a dataset begins each epoch that it goes through in the process that trains, where it keeps its place itself.

    A worker has a copy of its own in each epoch. Here it is the same object, and where it ended, or was led to by
    ``load_state_dict``, is no place to begin.

    Args:
        dataset: has a state.
        where: what messages begin with.
    """

    def __init__(self, dataset: Any, where: str) -> None:
        self.dataset = dataset
        self.state = state_of(dataset, where)

    def restore(self, epoch: int) -> None:
        """Be there again."""
        self.dataset.load_state_dict(copy.deepcopy(self.state))
        tell = getattr(self.dataset, "set_epoch", None)
        if tell:
            tell(epoch)


def has_state(dataset: Any) -> bool:
    """Whether a dataset can tell where it is, and go on from there."""
    return all(callable(getattr(dataset, name, None)) for name in ("state_dict", "load_state_dict"))


def state_of(dataset: Any, where: str) -> Any:
    """The state of a dataset as it is now; what it does later changes nothing in it.

    Raises:
        DataError: it holds something that no checkpoint can.
    """
    state = dataset.state_dict()
    _refuse_unplain(state, f"{where}: {type(dataset).__name__}.state_dict()", "")
    return copy.deepcopy(state)


def _refuse_unplain(value: Any, what: str, key: str) -> None:
    kind = type(value)
    if kind in _SCALARS:
        return
    if kind in _MAPPINGS:
        for name, each in value.items():
            if type(name) not in {str, int}:
                raise DataError(f"{what}{key} has the key {name!r}, which cannot be saved; use strings and integers")
            _refuse_unplain(each, what, f"{key}[{name!r}]")
    elif kind in {list, tuple}:
        for index, each in enumerate(value):
            _refuse_unplain(each, what, f"{key}[{index}]")
    else:
        plain = "numbers, strings, lists, tuples, dicts and tensors"
        raise DataError(f"{what}{key} is a {kind.__qualname__}, which cannot be saved; keep the state in {plain}")
