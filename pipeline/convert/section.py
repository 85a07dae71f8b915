"""What the sections of a config have in common when they are converted."""

from __future__ import annotations

import datetime
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pipeline.config.yaml_tree import brief
from pipeline.convert.document import Document, written
from pipeline.convert.entry import Entry, Scalar
from pipeline.convert.rules import KNOWN, NOT_CARRIED, OWN
from pipeline.errors import Fault, nearest


class Notes:
    """What a user has to know of a conversion.

    Args:
        where: the config, as messages call it.
    """

    def __init__(self, where: str) -> None:
        self.where = where
        self.all: list[Fault] = []

    def add(self, entry: Entry | Scalar, message: str, key: str = "") -> None:
        """A note at an entry, or on the new entry ``key`` beside it."""
        address = f"{entry.address.rpartition('.')[0]}.{key}" if key else entry.address
        self.all.append(Fault(self.where, entry.line, 0, address, message))


class Section(ABC):
    """The conversion of one mapping, key by key.

    Args:
        name: which: ``runner``, ``hyper_parameters.optimizer``; ``""`` for the whole config.
        entries: its entries.
        document: where they stand.
        notes: take what could not be carried, or is different now.
    """

    def __init__(self, name: str, entries: Sequence[Entry], document: Document, notes: Notes) -> None:
        self.name = name
        self.entries = entries
        self.document = document
        self.notes = notes
        self.given = {entry.key: entry for entry in entries if not entry.is_empty}

    @property
    @abstractmethod
    def rules(self) -> Mapping[str, Callable[[Entry], None]]:
        """Key -> what converts it; a known key without one is kept."""

    def convert(self) -> None:
        """Convert every entry."""
        dropped = NOT_CARRIED[self.name]
        for entry in self.entries:
            if entry.key not in dropped and entry.key not in KNOWN[self.name]:
                self.unknown(entry)
            elif entry.is_empty and entry.key not in {"name", "phases"}:
                self.not_carried(entry, "it is empty; nothing to do")
            elif entry.key in dropped:
                self.not_carried(entry, dropped[entry.key])
            else:
                self.rules.get(entry.key, self.keep)(entry)

    def not_carried(self, entry: Entry, reason: str) -> None:
        """Leave an entry out; it stays as a comment."""
        self.document.comment_out(entry, "not carried")
        self.notes.add(entry, f"not carried: {reason}")

    def moved(self, entry: Entry, key: str, reason: str = "nothing to do") -> None:
        """An entry has become a part of ``key``; it stays as a comment."""
        self.document.comment_out(entry, f"now in {key}")
        self.notes.add(entry, f"is now in {key}; {reason}")

    def unknown(self, entry: Entry) -> None:
        """Leave out what PaddleRec itself did not read."""
        known = [*KNOWN[self.name], *NOT_CARRIED[self.name]]
        remedy = nearest(entry.key, known) or f"; if a class of yours did, put it into {OWN[self.name]}"
        self.not_carried(entry, f"PaddleRec 1.8.5 did not read it, and did not say so{remedy}")

    def change(self, entry: Entry, value: Any, reason: str) -> None:
        """Give an entry another value."""
        self.document.set(entry, value)
        self.notes.add(entry, f"is now {brief(value)}: {reason}")

    def add(self, after: Entry, key: str, value: Any, reason: str) -> None:
        """Write a new entry."""
        self.document.add(after, key, value)
        self.notes.add(after, f"is new, {brief(value)}: {reason}", key)

    def path(self, entry: Entry) -> None:
        """Keep a path, with the separators that PaddleRec made of Windows'."""
        if isinstance(entry.value, str) and slashes(entry.value) != entry.value:
            self.change(entry, slashes(entry.value), "PaddleRec wrote other separators itself; nothing to do")
        else:
            self.keep(entry)

    def number(self, entry: Entry) -> None:
        """Keep an integer, which PaddleRec took as a string too."""
        number = integer(entry)
        if isinstance(entry.value, str) and number is not None:
            self.change(entry, number, f"PaddleRec made a number of {brief(entry.value)} itself; nothing to do")
        else:
            self.keep(entry)

    def keep(self, entry: Entry) -> None:
        """Keep a value; where YAML 1.1 read something else, as PaddleRec did, write what it read."""
        for each in entry.scalars():
            if type(each.old) is type(each.new) and repr(each.old) == repr(each.new):
                continue
            written_so = self.document.text[each.start : each.end]
            if isinstance(each.old, str):
                note = f"PaddleRec read {written_so} as a string, here it is a number; quote it if you want the string"
            elif isinstance(each.old, datetime.date):
                note = f"PaddleRec read {written_so} as a date, here it is a string; make a date of it in your class"
            else:
                note = f"is now {written(each.old)}: so PaddleRec read {written_so}; check that it was meant"
                self.document.replace(each.start, each.end, each.old)
            self.notes.add(each, note)


def integer(entry: Entry) -> int | None:
    """The value of an entry that ``int()`` makes an integer of, as PaddleRec did."""
    try:
        return int(entry.value)
    except (TypeError, ValueError):
        return None


def slashes(path: Any) -> str:
    """A path with the separators that PaddleRec made of Windows' on other systems."""
    return str(path).replace("\\", "/")


def relative_note(path: Any) -> str:
    """What to say of a path that was relative to where the command ran."""
    relative = not slashes(path).startswith(("/", "{"))
    return "; it starts at this file now, not where the command runs" if relative else ""
