"""The header of a safetensors file, read entry by entry, so that a hostile one fills neither memory nor time.

Source: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, NamedTuple

from pipeline.errors import CheckpointError

METADATA = "__metadata__"
MAX_HEADER = 16 * 2**20
"""Bytes of a header."""
MAX_TENSORS = 100_000
WIDTHS = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
    "U16": 2, "U32": 4, "U64": 8, "C64": 8, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip
"""The bytes of one number of each type."""

_JSON = json.JSONDecoder()
_BLANK = re.compile(r"[ \t\r\n]*")
_MAX_ENTRY = 4096


class Entry(NamedTuple):
    """Where a tensor is."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class Header(NamedTuple):
    """What a file holds: name -> place, in the order of the places, and texts."""

    entries: dict[str, Entry]
    metadata: dict[str, str]


def parse(content: bytes, size: int) -> Header:
    """Read a header.

    Args:
        content: its JSON.
        size: how many bytes of numbers follow it.

    Raises:
        CheckpointError: it is not what the format says.
    """
    try:
        entries, metadata = _Scanner(content.decode()).header()
        _check_places(entries, size)
    except (ValueError, IndexError, RecursionError) as error:
        raise CheckpointError(f"is damaged: its header makes no sense ({error}); use another") from error
    return Header(entries, metadata)


class _Scanner:
    """Goes through the text of a header once.

    Args:
        text: all of it.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0

    def header(self) -> tuple[dict[str, Entry], dict[str, str]]:
        """Its entries, ordered by place, and its metadata."""
        entries: dict[str, Entry] = {}
        metadata: dict[str, str] | None = None
        self.take("{")
        while self.more(first=not entries and metadata is None):
            name = self.string()
            self.take(":")
            if name in entries or (name == METADATA and metadata is not None):
                raise ValueError(f"'{name}' twice")
            if name == METADATA:
                metadata = self.texts()
                continue
            if len(entries) == MAX_TENSORS:
                raise ValueError(f"more than {MAX_TENSORS} tensors")
            entries[name] = self.entry(name)
        if self.text[self.position :].strip(" \t\r\n"):
            raise ValueError("text after its end")
        return dict(sorted(entries.items(), key=lambda each: each[1][2:])), metadata or {}

    def texts(self) -> dict[str, str]:
        """An object of strings."""
        found: dict[str, str] = {}
        self.take("{")
        while self.more(first=not found):
            name = self.string()
            self.take(":")
            if name in found:
                raise ValueError(f"'{name}' twice")
            found[name] = self.string()
        return found

    def entry(self, name: str) -> Entry:
        """The object that describes a tensor: it has no object in it."""
        self.blank()
        end = self.text.find("}", self.position, self.position + _MAX_ENTRY) + 1
        saved = json.loads(self.text[self.position : end])
        self.position = end
        return _entry(name, saved)

    def more(self, first: bool) -> bool:
        """Whether the object goes on; what separates its members, or ends it, is taken."""
        self.blank()
        if self.text[self.position] == "}":
            self.position += 1
            return False
        if not first:
            self.take(",")
        return True

    def string(self) -> str:
        """The next string."""
        self.blank()
        if self.text[self.position] != '"':
            raise ValueError(f"{self.text[self.position]!r} where a string should be, at {self.position}")
        value, self.position = _JSON.raw_decode(self.text, self.position)
        return str(value)

    def take(self, character: str) -> None:
        """Go behind a character, which must be the next one."""
        self.blank()
        if self.text[self.position] != character:
            raise ValueError(f"{self.text[self.position]!r} where {character!r} should be, at {self.position}")
        self.position += 1

    def blank(self) -> None:
        """Go behind white space."""
        found = _BLANK.match(self.text, self.position)
        self.position = found.end() if found else self.position


def _entry(name: str, saved: Any) -> Entry:
    if not isinstance(saved, dict) or saved.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"'{name}' is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = saved["dtype"], saved["shape"], saved["data_offsets"]
    if not isinstance(dtype, str) or dtype not in WIDTHS:
        raise ValueError(f"'{name}' has the unknown dtype {str(dtype)[:20]!r}")
    if not _counts(shape) or not _counts(offsets) or len(offsets) != 2:
        raise ValueError(f"'{name}' has a shape or offsets that are no counts")
    # Sizes that no memory has would overflow, also beside a 0.
    if len(shape) > 64 or math.prod(size or 1 for size in shape) >= 2**60:
        raise ValueError(f"'{name}' has an impossible shape")
    start, end = offsets
    if end - start != math.prod(shape) * WIDTHS[dtype]:
        raise ValueError(f"'{name}' has {end - start} bytes, which is not what its shape needs")
    return Entry(dtype, tuple(shape), start, end)


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(each) is int and 0 <= each < 2**60 for each in value)


def _check_places(entries: dict[str, Entry], size: int) -> None:
    """The tensors fill the data, one after the other, without gap or overlap."""
    end = 0
    for name, entry in entries.items():
        if entry.start != end:
            raise ValueError(f"'{name}' begins at {entry.start}, not where the one before it ends, {end}")
        end = entry.end
    if end != size:
        raise ValueError(f"its tensors take {end} bytes, and there are {size}")
