"""Samples of the lines of text files, made by a class of the user's: PaddleRec's Reader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from typing import Any

import torch
from loguru import logger
from torch import Tensor
from torch.utils.data import IterableDataset
from torch.utils.data._utils.collate import default_collate_fn_map

from pipeline.data.batch import SlotBatch, SparseSlot
from pipeline.data.fetch import changed_order
from pipeline.data.rng import permutation, seeding
from pipeline.errors import DataError
from pipeline.slots.lines import LineFiles, find_files

# Lines that are read at once; and lines at the beginning of which one has to give a sample.
_CHUNK, _LOOKED_AT = 64, 1000

# The slots that are the target where nobody names one, as in lines of slots.
_TARGETS = ("target", "label", "click")


class Sample(dict[str, Any]):
    """Slot -> values of one sample, of which torch's collate makes a batch as its reader says.

    Attributes:
        reader: which has made it.
        line: the number of its line; -1 where the reader reads the files itself.
    """

    def __init__(self, values: Mapping[str, Any] | Iterable[tuple[str, Any]], reader: ReaderBase, line: int) -> None:
        super().__init__(values)
        self.reader, self.line = reader, line


class ReaderBase(IterableDataset[Any]):
    """The samples of the lines of text files; a subclass says which samples a line has.

    ::

        class Reader(ReaderBase):
            def generate_sample(self, line):
                user, price, click = line.split(",")
                yield [("user", [int(user)]), ("price", [float(price)]), ("click", [int(click)])]

    A batch is a ``SlotBatch``. A slot of whole numbers is a ``SparseSlot`` in it, any number of them in each sample; one of
    other numbers is float32 (batch, n), as many of them in each; tensors and arrays are stacked. The first sample decides
    which it is: lines are read once more before the training, up to the one that gives it.

    Read it with ``make_loader``. Lines are shared out one by one among workers and processes. A run that is stopped goes
    on after its last sample, with the samples that its line still has; of lines that give thousands, ``resume: reread``
    spares each batch a copy of them.

    Args:
        data_path: files, folders, patterns, or a list of these; see ``find_files``.
        shuffle: whether each epoch has a new order of the lines.
        shuffle_filelist: whether each epoch has a new order of the files; their lines stay in order.
        target: the slot that becomes ``target``, float32 (batch,); by default ``target``, ``label`` or ``click``, the first that
            there is.

    Raises:
        DataError: there is no line; or the first 1,000 give no sample, or one that cannot be read.
    """

    def __init__(
        self,
        data_path: str | Sequence[str],
        *,
        shuffle: bool = False,
        shuffle_filelist: bool = False,
        target: str | None = None,
    ) -> None:
        self._where = type(self).__name__
        self._paths = find_files(data_path, self._where)
        self._target, self._widths = target, dict[str, int | None]()
        self._shuffle, self._shuffle_filelist, self._shard = shuffle, shuffle_filelist, (0, 1)
        self._order: int | None = None
        self._taken, self._line, self._ended, self._pending = 0, -1, False, list[Sample]()
        self.init()
        if hasattr(self, "generate_batch_from_trainfiles"):
            # It reads the files itself, so nobody knows where it is in them: what asks for a state finds none.
            vars(self).update(dict.fromkeys(("shard", "state_dict", "load_state_dict")))
            if shuffle or shuffle_filelist:
                what = "generate_batch_from_trainfiles decides the order; remove shuffle and shuffle_filelist"
                raise DataError(f"{self._where}: {what}")
            return
        self._lines = LineFiles(self._paths, self._where)
        self._look()

    def init(self) -> None:
        """Called once, before anything is read."""

    def generate_sample(self, line: str) -> Any:
        """The samples of a line.

        Args:
            line: without its end.

        Returns:
            An iterable of samples ``[(name, values), …]``, most often a generator, or a function without parameters that
            returns one. None among them is left out.
        """
        raise NotImplementedError(f"{type(self).__name__} has no generate_sample(line); define it")

    def __iter__(self) -> Iterator[Any]:
        """The samples of this shard that are left of the epoch; or the batches, where a subclass makes them."""
        if hasattr(self, "generate_batch_from_trainfiles"):
            for samples in _called(self.generate_batch_from_trainfiles(list(map(str, self._paths)))):
                if not (batch := [self._sample(sample, -1) for sample in samples]):
                    raise self._error(-1, "generate_batch_from_trainfiles gives a batch without a sample; leave it out")
                yield self.make_batch(batch)
            return
        if self._ended:
            self._order, self._taken, self._ended = None, 0, False
        if self._order is None:
            self._draw_order()
        numbers = self._numbers()
        yield from self._pop_pending()
        while chunk := numbers[self._taken : self._taken + _CHUNK]:
            for number, line in zip(chunk, self._lines.read(chunk).split(b"\n"), strict=False):
                self._pending, self._line = self._samples(number, line), number
                self._taken += 1
                yield from self._pop_pending()
        self._ended = True

    @property
    def draws_order(self) -> bool:
        """Whether the shards of an epoch need one seed, so that all have the same order."""
        return self._shuffle or self._shuffle_filelist

    def _pop_pending(self) -> Iterator[Sample]:
        while self._pending:
            yield self._pending.pop(0)

    def shard(self, rank: int, count: int) -> ReaderBase:
        """Read every ``count``-th line from the one on whose number is ``rank``; all shards have one order."""
        self._shard = rank, count
        self._draw_order()
        return self

    def _draw_order(self) -> None:
        self._order = int(torch.randint(2**62, ()))

    def _numbers(self) -> Sequence[int]:
        """The numbers of the lines of this shard, in their order."""
        rank, count = self._shard
        generator, first = torch.Generator().manual_seed(self._order or 0), self._lines.first
        if self._shuffle:
            return _Numbers(permutation(len(self._lines), generator)[rank::count].clone())
        if self._shuffle_filelist:
            files = torch.randperm(len(self._paths), generator=generator).tolist()
            return _Numbers(
                torch.cat([torch.arange(first[file], first[file + 1]) for file in files])[rank::count].clone()
            )
        return range(len(self._lines))[rank::count]

    def _samples(self, number: int, line: bytes) -> list[Sample]:
        try:
            found = _called(self.generate_sample(line.decode().removesuffix("\r")))
            return [self._sample(sample, number) for sample in found if sample is not None]
        except Exception as error:
            error.add_note(f"raised for {self._lines.place(number)}")
            raise

    def _sample(self, pairs: Iterable[tuple[str, Any]], line: int) -> Sample:
        """One sample as it is kept until it is in a batch.

        Raises:
            DataError: it is none, or has other slots than the first.
        """
        try:
            pairs = list(pairs.items() if isinstance(pairs, Mapping) else pairs)
            sample = Sample([(name, _plain(values)) for name, values in pairs], self, line)
        except (TypeError, ValueError, RuntimeError):
            what = f"a sample is {pairs!r:.100}"
            raise self._error(line, f"{what}; yield [(name, values), …] with values in lists or tensors") from None
        if len(sample) < len(pairs):
            raise self._error(line, f"a sample has a name twice: {', '.join(name for name, _ in pairs)}")
        if self._widths and sample.keys() != self._widths.keys():
            what = f"a sample has {', '.join(sample)}, and the first has {', '.join(self._widths)}"
            raise self._error(line, f"{what}; yield the same names in each")
        return sample

    def _error(self, line: int, what: str) -> DataError:
        return DataError(f"{self._where}: {self._lines.place(line) + ': ' if line >= 0 else ''}{what}")

    def _look(self) -> None:
        """Make the first sample, and say what is in it."""
        count = min(len(self._lines), _LOOKED_AT)
        with seeding(0, 0, "look"):
            lines = self._lines.read(range(count)).split(b"\n")[:count]
            first = next((sample for place in enumerate(lines) for sample in self._samples(*place)), None)
            if first is None:
                raise DataError(
                    f"{self._where}: the first {count} lines give no sample; see what generate_sample leaves out"
                )
            self.make_batch([first])
        kinds = {None: "a tensor", 0: "ids", 1: "1 number"}
        names = [f"{name} ({kinds.get(width, f'{width} numbers')})" for name, width in self._widths.items()]
        target = f"; the target is {self._target}" if self._target else ""
        files = f"{len(self._paths)} file{'s' * (len(self._paths) > 1)}"
        logger.info(f"{self._where}: {len(self._lines):,} lines in {files}; a sample has {', '.join(names)}{target}")

    def make_batch(self, samples: Sequence[Sample]) -> SlotBatch:
        """A batch of samples.

        Raises:
            DataError: a slot has values of another kind than in the first sample, or of another length.
        """
        fields = {name: self._field(name, samples) for name in samples[0]}
        if not self._widths:
            self._widths = {name: _width(values) for name, values in samples[0].items()}
            self._target = self._target or next((name for name in _TARGETS if name in fields), None)
            if self._target and self._target not in fields:
                raise DataError(f"{self._where}: target: a sample has no '{self._target}', but {', '.join(fields)}")
        if self._target:
            target, name = fields.pop(self._target), self._target
            wrong = next((sample for sample in samples if _count(sample[name]) != 1), None)
            if wrong:
                raise self._error(
                    wrong.line, f"slot {name}, the target, has {wrong[name]!r:.100}; yield one value in each"
                )
            if "target" in fields:
                raise self._error(-1, f"target: is {name}, beside a slot called target; rename that one")
            fields["target"] = (target.values if isinstance(target, SparseSlot) else target).float().flatten()
        return SlotBatch(fields)

    def _field(self, name: str, samples: Sequence[Sample]) -> Tensor | SparseSlot:
        """The values of one slot."""
        try:
            return _joined([sample[name] for sample in samples], self._widths.get(name, _width(samples[0][name])))
        except (TypeError, ValueError, RuntimeError) as error:
            reason = str(error).partition("\n")[0]
            if len(samples) > 1:
                for sample in samples:
                    # Of the one that is to blame, this raises.
                    self._field(name, [sample])
                reason = "its shape is not that of the others of its batch"
            remedy = "yield a list of ids, a list of as many floats in each sample, or a tensor"
            what = f"slot {name} has {samples[0][name]!r:.100}: {reason}; {remedy}"
            raise self._error(samples[0].line, what) from None

    def state_dict(self) -> dict[str, Any]:
        """The place in the epoch, and what the last line has given that is in no batch yet."""
        place = {"order": self._order, "taken": self._taken, "line": self._line, "ended": self._ended}
        return {**place, "pending": list(map(dict, self._pending)), "of": self._read_by()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a place.

        Raises:
            DataError: it is one among other lines, or in another order of them.
        """
        if why := changed_order(state["of"], self._read_by(), self._where):
            raise DataError(why)
        self._order, self._taken = state["order"], state["taken"]
        self._line, self._ended = state["line"], state["ended"]
        self._pending = [Sample(sample, self, self._line) for sample in state["pending"]]

    def _read_by(self) -> dict[str, Any]:
        """What decides which sample comes where."""
        return {"lines": len(self._lines), "shuffle": self._shuffle, "shuffle_filelist": self._shuffle_filelist}


class _Numbers(Sequence[int]):
    """Whole numbers in a tensor, which take a fraction of what a list does."""

    def __init__(self, numbers: Tensor) -> None:
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, place: Any) -> Any:
        return self._numbers[place].tolist()


def _width(values: Any) -> int | None:
    """How many numbers a slot has in each sample; 0: they are ids, any number of them; None: it has a tensor."""
    if not isinstance(values, list):
        return None
    return 0 if all(isinstance(value, int) for value in values) else len(values)


def _joined(values: list[Any], width: int | None) -> Tensor | SparseSlot:
    """The values of one slot in all samples of a batch, which has a width in the first sample."""
    if width is None:
        return torch.stack(values)
    lengths = list(map(len, values))
    flat = torch.tensor(list(chain.from_iterable(values)), dtype=torch.float32 if width else None)
    if width:
        if other := {*lengths} - {width}:
            raise ValueError(f"of {min(other)} numbers, and the first sample has {width}")
        return flat.view(len(values), width)
    if len(flat) and flat.is_floating_point():
        raise ValueError("these are not whole numbers as in the first sample, where floats would be numbers")
    return SparseSlot(flat.long(), torch.tensor([0, *accumulate(lengths[:-1])]))


def _plain(values: Any) -> list[Any] | Tensor:
    """Values as a checkpoint can hold them: a list of Python's numbers, or a tensor."""
    if not isinstance(values, list | tuple):
        return torch.as_tensor(values)
    return [value.item() if hasattr(value, "item") else value for value in values]


def _count(values: list[Any] | Tensor) -> int:
    return values.numel() if isinstance(values, Tensor) else len(values)


def _called(samples: Any) -> Any:
    """The samples; PaddleRec has a function return them."""
    made = samples() if callable(samples) else samples
    if made is None:
        raise DataError("a Reader gives None in place of samples; yield them, or nothing")
    return made


def _collate(samples: list[Sample], **_: object) -> SlotBatch:
    return samples[0].reader.make_batch(samples)


default_collate_fn_map[Sample] = _collate  # torch's way of extending its collate
