"""Samples from the lines of text files, which a class of the user makes: PaddleRec's Reader."""

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

# How many lines are read at once.
_CHUNK = 64

# Among this many lines at the start, one must give a sample.
_LOOKED_AT = 1000

# The names of the slots that become the target if the config names none. The first that exists is
# taken.
_TARGETS = ("target", "label", "click")


class ReaderBase(IterableDataset[Any]):
    r"""The samples of the lines of text files. A subclass says which samples a line has.

    A batch is a ``SlotBatch``. A slot of whole numbers becomes a ``SparseSlot``, with any number of
    them in each sample. A slot of other numbers becomes float32 (batch, n), with n numbers in each
    sample. Tensors and arrays are stacked. The first sample decides the kind of each slot, so when
    the reader is constructed, lines are read up to the one that gives the first sample.

    Read it with ``make_loader``. Lines are shared out one by one among workers and processes. A run
    that is stopped continues after its last sample, with the remaining samples of the same line. If
    a line gives thousands of samples,
    ``resume: reread`` saves the cost of copying them for each batch.

    A subclass with ``generate_batch_from_trainfiles(self, files)`` reads the files itself and
    yields batches, which are lists of samples. It decides the order, and has no state.

    Args:
        data_path: files, folders, patterns, or a list of these; see ``find_files``.
        shuffle: whether each epoch has a new order of the lines.
        shuffle_filelist: whether each epoch has a new order of the files. The lines of a file stay
            in order.
        target: the slot that becomes ``target``, float32 (batch,). By default it is ``target``,
            ``label`` or ``click``, whichever exists first.

    Raises:
        DataError: there is no line; or the first 1,000 lines give no sample, or a sample that
            cannot be read.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from pipeline.slots.reader import ReaderBase
        >>> class Reader(ReaderBase):
        ...     def generate_sample(self, line):
        ...         user, price, click = line.split(",")
        ...         yield [("user", [int(user)]), ("price", [float(price)]), ("click", [int(click)])]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "sales.csv")
        ...     _ = path.write_text("7,1.5,0\n8,2.5,1\n")
        ...     reader = Reader(str(path))
        ...     batch = reader.make_batch(list(reader))
        >>> batch["user"].ids
        tensor([7, 8])
        >>> batch["target"]
        tensor([0., 1.])
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
        self._target = target
        # Slot -> its width in the first sample, see ``_width``. Empty until the first sample was
        # read.
        self._widths = dict[str, int | None]()
        self._shuffle = shuffle
        self._shuffle_filelist = shuffle_filelist
        self._shard = (0, 1)
        # The seed of the order of the current epoch; None until the epoch starts.
        self._order: int | None = None
        # How many lines of this shard were read, the number of the last one, and its samples that
        # were not yielded yet.
        self._taken = 0
        self._line = -1
        self._pending = list[Sample]()
        self._ended = False
        self.init()
        if hasattr(self, "generate_batch_from_trainfiles"):
            # Its position in the files is unknown, so this object must not seem to have a state or
            # shards.
            vars(self).update(dict.fromkeys(("shard", "state_dict", "load_state_dict")))
            if shuffle or shuffle_filelist:
                what = "generate_batch_from_trainfiles decides the order; remove shuffle and shuffle_filelist"
                raise DataError(f"{self._where}: {what}")
            return
        self._lines = LineFiles(self._paths, self._where)
        self._look()

    def init(self) -> None:
        """Prepare the reader. It is called once, before anything is read."""

    def generate_sample(self, line: str) -> Any:
        """Return the samples of a line.

        Args:
            line: the line, without its newline.

        Returns:
            An iterable of samples, usually a generator; or a function without parameters that
            returns one. A sample is ``[(name, values), …]`` or a mapping. None instead of a sample
            is skipped.
        """
        raise NotImplementedError(f"{type(self).__name__} has no generate_sample(line); define it")

    def __iter__(self) -> Iterator[Any]:
        """Yield the remaining samples of this shard; or batches, if a subclass makes them.

        Raises:
            DataError: a sample cannot be read, or a batch of the subclass is empty.
        """
        if hasattr(self, "generate_batch_from_trainfiles"):
            for samples in _called(self.generate_batch_from_trainfiles(list(map(str, self._paths)))):
                batch = [self._sample(sample, -1) for sample in samples]
                if not batch:
                    raise self._error(-1, "generate_batch_from_trainfiles gives a batch without a sample; leave it out")
                yield self.make_batch(batch)
            return
        if self._ended:
            self._order = None
            self._taken = 0
            self._ended = False
        if self._order is None:
            self._choose_order()
        numbers = self._numbers()
        yield from self._pop_pending()
        while chunk := numbers[self._taken : self._taken + _CHUNK]:
            for number, line in zip(chunk, self._lines.read(chunk).split(b"\n"), strict=False):
                self._pending = self._samples(number, line)
                self._line = number
                self._taken += 1
                yield from self._pop_pending()
        self._ended = True

    @property
    def draws_order(self) -> bool:
        """Whether the order is random, so all shards need the same seed to have the same order."""
        return self._shuffle or self._shuffle_filelist

    def shard(self, rank: int, count: int) -> ReaderBase:
        """Restrict the reader to every ``count``-th line, starting with line ``rank``.

        All shards have the same order.

        Returns:
            The reader itself.
        """
        self._shard = rank, count
        self._choose_order()
        return self

    def make_batch(self, samples: Sequence[Sample]) -> SlotBatch:
        """Return a batch of samples.

        Raises:
            DataError: a slot has values of another kind or length than in the first sample, or the
                target has not exactly one value in each sample.
        """
        fields = {name: self._field(name, samples) for name in samples[0]}
        if not self._widths:
            self._widths = {name: _width(values) for name, values in samples[0].items()}
            self._target = self._target or next((name for name in _TARGETS if name in fields), None)
            if self._target and self._target not in fields:
                raise DataError(f"{self._where}: target: a sample has no '{self._target}', but {', '.join(fields)}")
        if self._target:
            name = self._target
            target = fields.pop(name)
            wrong = next((sample for sample in samples if _count(sample[name]) != 1), None)
            if wrong:
                what = f"slot {name}, the target, has {wrong[name]!r:.100}; yield one value in each"
                raise self._error(wrong.line, what)
            if "target" in fields:
                raise self._error(-1, f"target: is {name}, beside a slot called target; rename that one")
            fields["target"] = (target.values if isinstance(target, SparseSlot) else target).float().flatten()
        return SlotBatch(fields)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the epoch, with samples of the last line that are in no batch."""
        place = {"order": self._order, "taken": self._taken, "line": self._line, "ended": self._ended}
        return {**place, "pending": list(map(dict, self._pending)), "of": self._read_by()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position.

        Raises:
            DataError: the position is in other lines, or in another order of the lines.
        """
        if why := changed_order(state["of"], self._read_by(), self._where):
            raise DataError(why)
        self._order = state["order"]
        self._taken = state["taken"]
        self._line = state["line"]
        self._ended = state["ended"]
        self._pending = [Sample(sample, self, self._line) for sample in state["pending"]]

    def _read_by(self) -> dict[str, Any]:
        """Return everything that decides which sample is at which position."""
        return {"lines": len(self._lines), "shuffle": self._shuffle, "shuffle_filelist": self._shuffle_filelist}

    def _choose_order(self) -> None:
        self._order = int(torch.randint(2**62, ()))

    def _numbers(self) -> Sequence[int]:
        """Return the numbers of the lines of this shard, in the order of the epoch."""
        rank, count = self._shard
        generator = torch.Generator().manual_seed(self._order or 0)
        if self._shuffle:
            return _Numbers(permutation(len(self._lines), generator)[rank::count].clone())
        if self._shuffle_filelist:
            first = self._lines.first
            files = torch.randperm(len(self._paths), generator=generator).tolist()
            numbers = torch.cat([torch.arange(first[file], first[file + 1]) for file in files])
            return _Numbers(numbers[rank::count].clone())
        return range(len(self._lines))[rank::count]

    def _pop_pending(self) -> Iterator[Sample]:
        while self._pending:
            yield self._pending.pop(0)

    def _samples(self, number: int, line: bytes) -> list[Sample]:
        """Return the samples of a line.

        Args:
            number: the number of the line.
            line: its text.
        """
        try:
            found = _called(self.generate_sample(line.decode().removesuffix("\r")))
            return [self._sample(sample, number) for sample in found if sample is not None]
        except Exception as error:
            error.add_note(f"raised for {self._lines.place(number)}")
            raise

    def _sample(self, pairs: Iterable[tuple[str, Any]], line: int) -> Sample:
        """Return a sample in the form in which it is kept until it is in a batch.

        Args:
            pairs: (name, values) of each slot, or a mapping.
            line: the number of its line; -1 if the subclass reads the files itself.

        Raises:
            DataError: ``pairs`` is not a sample, or has other slots than the first sample.
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
        """Make the first sample, and log which slots it has.

        Raises:
            DataError: the first lines give no sample.
        """
        count = min(len(self._lines), _LOOKED_AT)
        with seeding(0, 0, "look"):
            lines = self._lines.read(range(count)).split(b"\n")[:count]
            first = next((sample for place in enumerate(lines) for sample in self._samples(*place)), None)
            if first is None:
                what = f"the first {count} lines give no sample; see what generate_sample leaves out"
                raise DataError(f"{self._where}: {what}")
            self.make_batch([first])
        kinds = {None: "a tensor", 0: "ids", 1: "1 number"}
        names = [f"{name} ({kinds.get(width, f'{width} numbers')})" for name, width in self._widths.items()]
        target = f"; the target is {self._target}" if self._target else ""
        files = f"{len(self._paths)} file{'s' * (len(self._paths) > 1)}"
        logger.info(f"{self._where}: {len(self._lines):,} lines in {files}; a sample has {', '.join(names)}{target}")

    def _field(self, name: str, samples: Sequence[Sample]) -> Tensor | SparseSlot:
        """Return the values of one slot in all samples of a batch.

        Raises:
            DataError: the values cannot be joined.
        """
        try:
            return _joined([sample[name] for sample in samples], self._widths.get(name, _width(samples[0][name])))
        except (TypeError, ValueError, RuntimeError) as error:
            reason = str(error).partition("\n")[0]
            if len(samples) > 1:
                # A sample whose values are wrong by themselves raises here.
                for sample in samples:
                    self._field(name, [sample])
                reason = "its shape is not that of the others of its batch"
            remedy = "yield a list of ids, a list of as many floats in each sample, or a tensor"
            what = f"slot {name} has {samples[0][name]!r:.100}: {reason}; {remedy}"
            raise self._error(samples[0].line, what) from None


class Sample(dict[str, Any]):
    """A sample: slot -> values.

    torch's default collate function makes a batch of samples with their reader's ``make_batch``.

    Args:
        values: slot -> values.
        reader: the reader that has made the sample.
        line: the number of its line; -1 if the reader reads the files itself.
    """

    def __init__(self, values: Mapping[str, Any] | Iterable[tuple[str, Any]], reader: ReaderBase, line: int) -> None:
        super().__init__(values)
        self.reader = reader
        self.line = line


def _collate(samples: list[Sample], **_: object) -> SlotBatch:
    return samples[0].reader.make_batch(samples)


# This dictionary is how torch lets others extend its default collate function.
default_collate_fn_map[Sample] = _collate


class _Numbers(Sequence[int]):
    """Whole numbers in a tensor, which needs a fraction of the memory of a list."""

    def __init__(self, numbers: Tensor) -> None:
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, place: Any) -> Any:
        return self._numbers[place].tolist()


def _width(values: Any) -> int | None:
    """Return how many numbers a slot has in each sample.

    It is 0 for ids, of which a sample may have any number, and None for a tensor.
    """
    if not isinstance(values, list):
        return None
    return 0 if all(isinstance(value, int) for value in values) else len(values)


def _joined(values: list[Any], width: int | None) -> Tensor | SparseSlot:
    """Return the values of one slot as a field of a batch.

    Args:
        values: the values in each sample.
        width: the width of the slot in the first sample, see ``_width``.

    Raises:
        ValueError: the values are of another kind or length than in the first sample.
        TypeError, RuntimeError: torch cannot join the values.
    """
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
    """Return values in a form that a checkpoint can hold: a list of Python numbers, or a tensor."""
    if not isinstance(values, list | tuple):
        return torch.as_tensor(values)
    return [value.item() if hasattr(value, "item") else value for value in values]


def _count(values: list[Any] | Tensor) -> int:
    return values.numel() if isinstance(values, Tensor) else len(values)


def _called(samples: Any) -> Any:
    """Return samples; if they are a function, as in PaddleRec, return what it returns.

    Raises:
        DataError: there are no samples, but None.
    """
    made = samples() if callable(samples) else samples
    if made is None:
        raise DataError("a Reader gives None in place of samples; yield them, or nothing")
    return made
