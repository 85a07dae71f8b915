"""Power lost at every moment of saving: every state that a disk may then legally be in, and what is loaded from it.

What was not fsynced may be there, or not, or in part: a file's content (whole, empty, half, zeros, noise) and each entry
of a folder, in any combination. A rename is one step, as in every journaling file system.

    python tests/faults/checkpoint_power.py

prints the number of states, of wrong loads and of lost checkpoints; then the same for savers that leave out one fsync,
rename or hash, each of which must be caught.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, combinations, product
from pathlib import Path
from typing import Any

import torch
from checkpoint_disks import Operation, Recorder, Stopped
from loguru import logger
from torch import nn

from pipeline.brain.checkpointer import Checkpointer
from pipeline.checkpoint.reader import problems_of
from pipeline.checkpoint.storage import Buffer, Disk
from pipeline.errors import PipelineError

Tree = tuple[tuple[str, Any], ...]
"""A folder: names, each with the content of a file or with another folder."""


# What is saved: the content says which save it was.


def models(number: int) -> dict[str, dict[str, nn.Module]]:
    model = nn.Linear(2, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(number)
    return {"main": {"model": model}}


def number_of(checkpointer: Checkpointer) -> int | None:
    """Which save is the newest valid one; -1 where its parts are of several."""
    found = checkpointer.store.newest_valid()
    if found is None:
        return None
    numbers = {int(value) for tensor in found.weights["main"].values() for value in tensor.unique().tolist()}
    numbers |= {found.training["number"] if found.training else -1, found.metrics["main"]["number"]}
    return numbers.pop() if len(numbers) == 1 else -1


@dataclass
class Record:
    """What was done below a folder, and after how many operations which save was reported."""

    base: Path
    operations: list[Operation] = field(default_factory=list)
    reported: list[tuple[int, int]] = field(default_factory=list)
    report: Callable[[], list[tuple[int, int]]] = list

    def last_reported(self, done: int) -> int:
        return max((number for at, number in self.reported if at <= done), default=-1)


def save(record: Record, folder: Path, disk: Disk, saves: Iterable[tuple[int, int]]) -> None:
    """One process: (step, number) after (step, number)."""
    checkpointer = Checkpointer(folder / "checkpoints", keep_last=2, disk=disk)
    for step, number in saves:
        # Somebody asks before every operation what has been committed.
        record.report = lambda number=number: [(len(record.operations), number) for _ in checkpointer.store.poll()]
        path = checkpointer.save(models(number), {"iteration": step}, {"main": {"number": number}}, {"number": number})
        record.reported.append((len(record.operations), number))
        checkpointer.store.poll()
        if not path.is_dir():
            raise NotADirectoryError(path)


class Stopping(Recorder):
    """Records into a record that goes on, and stops at one of its own operations."""

    def __init__(self, record: Record, last: int = -1) -> None:
        super().__init__()
        self.record, self.operations = record, record.operations
        self.last = last
        self.count = 0

    def at(self, name: str, path: Path, detail: Any = None) -> bool:
        self.record.reported += self.record.report()
        if not path.is_relative_to(self.record.base):
            return True
        if self.count == self.last:
            raise Stopped
        self.count += 1
        return super().at(name, path, detail)


SAVES = [(1, 0), (2, 1), (2, 2), (3, 3), (4, 4), (4, 4)]
"""A step twice with another content and once with the same; the first ones are removed meanwhile."""


def scenario(folder: Path, stops: Iterable[int], make: Callable[[Record, int], Disk]) -> Record:
    """One process after the other, each of which ends at an operation of its own (negative: it does not)."""
    record = Record(folder)
    saves = SAVES
    for stop in [*stops, -1]:
        try:
            save(record, folder, make(record, stop), saves)
            break
        except Stopped:
            saves = [(2, 2), (3, 3)]
    return record


# The model of a disk.


@dataclass
class File:
    content: bytes
    synced: bool = False

    def states(self) -> list[bytes]:
        if self.synced:
            return [self.content]
        half, size = self.content[: len(self.content) // 2], len(self.content)
        return [self.content, b"", half, bytes(size), half + b"\xa5" * (size - len(half))]


@dataclass
class Folder:
    """What the disk has for sure, and what it may have besides."""

    entries: dict[str, Any] = field(default_factory=dict)
    pending: list[tuple[str | None, str | None, Any]] = field(default_factory=list)

    def now(self) -> dict[str, Any]:
        return self.after(range(len(self.pending)))

    def after(self, chosen: Iterable[int]) -> dict[str, Any]:
        entries = dict(self.entries)
        for old, new, what in (self.pending[index] for index in chosen):
            if old is not None:
                entries.pop(old, None)
            if new is not None:
                entries[new] = what
        return entries

    def sync(self) -> None:
        self.entries, self.pending = self.now(), []


def apply(root: Folder, base: Path, operation: Operation) -> None:
    """Do to the model what an operation does to the disk."""
    name, path, detail = operation
    parent = root
    if path == base:
        root.sync()
        return
    for part in path.relative_to(base).parts[:-1]:
        parent = parent.now()[part]
    if name == "mkdir":
        parent.pending.append((None, path.name, Folder()))
    elif name == "write":
        parent.pending.append((None, path.name, File(detail)))
    elif name == "fsync":
        parent.now()[path.name].synced = True
    elif name == "rename":
        parent.pending.append((path.name, detail.name, parent.now()[path.name]))
    elif name == "fsync_folder":
        parent.now()[path.name].sync()
    else:
        removed = parent.now()[path.name]
        removed.pending.extend((each, None, None) for each in detail)
        parent.pending.append((path.name, None, None))


def states(folder: Folder) -> Iterator[Tree]:
    """Every state that a folder may be in; what is under a temporary name is removed unseen, so it counts as empty."""
    for chosen in _subsets(len(folder.pending)):
        entries = sorted(folder.after(chosen).items())
        for contents in product(*(_states(name, what) for name, what in entries)):
            yield tuple((name, content) for (name, _), content in zip(entries, contents, strict=True))


def _subsets(count: int) -> Iterator[tuple[int, ...]]:
    return chain.from_iterable(combinations(range(count), size) for size in range(count + 1))


def _states(name: str, what: Any) -> Iterable[Any]:
    if isinstance(what, File):
        return what.states()
    return [()] if name.startswith((".tmp-", ".del-")) else states(what)


def put(tree: Tree, folder: Path) -> None:
    folder.mkdir()
    for name, content in tree:
        if isinstance(content, bytes):
            (folder / name).write_bytes(content)
        else:
            put(content, folder / name)


# The experiment.


@dataclass
class Result:
    states: int = 0
    distinct: int = 0
    wrong: int = 0
    lost: int = 0
    incomplete: int = 0
    left: int = 0

    @property
    def faults(self) -> int:
        return self.wrong + self.lost + self.incomplete + self.left


def lose_power(
    record: Record, base: Path, scratch: Path, result: Result, seen: set[Any], *, until_fault: bool = False
) -> None:
    """Try every state after every operation, or until one is faulty; one that was tried before is only counted."""
    root = Folder()
    for done in range(len(record.operations) + 1):
        if done:
            apply(root, base, record.operations[done - 1])
        for tree in states(root):
            result.states += 1
            key = (tree, record.last_reported(done))
            if key in seen:
                continue
            seen.add(key)
            result.distinct += 1
            look(tree, record.last_reported(done), scratch, result)
            if until_fault and result.faults:
                return


def look(tree: Tree, reported: int, scratch: Path, result: Result) -> None:
    """Load from one state, and judge."""
    folder = scratch / "state"
    shutil.rmtree(folder, ignore_errors=True)
    put(tree, folder)
    checkpointer = Checkpointer(folder / "checkpoints", disk=Recorder())
    result.incomplete += any(problems_of(path) for path in checkpointer.all())
    try:
        number = number_of(checkpointer)
    except PipelineError:
        result.lost += 1
        return
    result.wrong += number == -1
    result.lost += (-1 if number is None else number) < reported
    result.left += sum(path.name.startswith((".tmp-", ".del-")) for path in folder.glob("checkpoints/.*"))


# Savers that leave something out.


class Mutant(Stopping):
    """Leaves out the n-th operation of a kind, or gives no real hash for the n-th file."""

    def __init__(self, record: Record, last: int, kind: str, number: int) -> None:
        super().__init__(record, last)
        self.kind, self.number = kind, number
        self.seen = -1

    def at(self, name: str, path: Path, detail: Any = None) -> bool:
        if name == self.kind and path.is_relative_to(self.record.base):
            self.seen += 1
            if self.seen == self.number:
                return False
        return super().at(name, path, detail)

    def sha256(self, parts: Iterable[Buffer]) -> str:
        if self.kind == "hash":
            self.seen += 1
            if self.seen == self.number:
                return "0" * 64
        return super().sha256(parts)


def kinds(record: Record) -> dict[str, int]:
    """How often each kind of operation that may be left out is in a record."""
    names = [operation.name for operation in record.operations]
    hashes = sum(each.name == "write" and each.path.name != "manifest.json" for each in record.operations)
    return {**{name: names.count(name) for name in ("fsync", "fsync_folder", "rename")}, "hash": hashes}


def is_caught(kind: str, number: int, stops: tuple[int, ...], scratch: Path) -> bool:
    """Whether a mutant breaks, or loses something in one of the states."""
    base = Path(tempfile.mkdtemp(dir=scratch))
    result = Result()
    try:
        record = scenario(base, stops, lambda record, last: Mutant(record, last, kind, number))
        lose_power(record, base, scratch, result, set(), until_fault=True)
    except (OSError, PipelineError, KeyError):
        return True
    return result.faults > 0


def all_states(stops: Iterable[tuple[int, ...]], scratch: Path) -> tuple[Result, dict[tuple[int, ...], Record]]:
    """The states of every scenario."""
    result, seen = Result(), set[Any]()
    records = {}
    for each in stops:
        base = Path(tempfile.mkdtemp(dir=scratch))
        records[each] = scenario(base, each, Stopping)
        lose_power(records[each], base, scratch, result, seen)
        shutil.rmtree(base)
    return result, records


def survivors(record: Record, stops: Iterable[tuple[int, ...]], scratch: Path) -> tuple[int, list[tuple[str, int]]]:
    """How many mutants there are, and those that nothing catches in any of the scenarios."""
    mutants = [(kind, number) for kind, times in kinds(record).items() for number in range(times)]
    return len(mutants), [each for each in mutants if not any(is_caught(*each, stop, scratch) for stop in stops)]


def main(scratch: Path) -> int:
    logger.remove()
    once = [(stop,) for stop in range(-1, 85)]
    twice = [(first, second) for first in range(12, 80) for second in range(40)]
    result, records = all_states([*once, *twice], scratch)
    moments = sum(len(record.operations) for record in records.values())
    print(f"saver: {len(records)} scenarios, power lost at {moments} moments, {result}")
    count, left = survivors(records[-1,], once, scratch)
    print(f"mutants: {count}, {count - len(left)} caught; not caught: {left}")
    return bool(result.faults or left)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        sys.exit(main(Path(folder)))
