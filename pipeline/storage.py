"""Small files that are written whole, and what is said where the storage refuses."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pipeline.errors import StorageError


def no_link(path: str, flags: int) -> int:
    """Open a file, as ``open`` wants it done, but no link: that would write where somebody else has it lead."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


@contextmanager
def storing(path: Path, otherwise: str = "set output_dir") -> Iterator[None]:
    """Say of what the storage refuses in the block that it did, and what to do; ``otherwise``: to write elsewhere.

    Raises:
        StorageError: the block raised an OSError.
    """
    try:
        yield
    except OSError as error:
        raise refusal(path, error, otherwise) from error


def refusal(path: Path | str, error: OSError, otherwise: str = "set output_dir") -> StorageError:
    """What ``storing`` raises, for who is called too often for a block."""
    what = f"{error.filename or path}: cannot be written: {error.strerror or error}"
    return StorageError(f"{what}; free or repair the storage, or {otherwise}")


def write(path: Path, content: str) -> None:
    """Put a whole file in place: a reader sees the old one or the new one.

    Raises:
        StorageError: the storage refuses; the old one is there still.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    with storing(path):
        try:
            # What the system calls a file may be no UTF-8; the bytes are kept.
            with open(temporary, "w", encoding="utf-8", errors="surrogateescape", opener=no_link) as file:
                file.write(content)
            temporary.replace(path)
        except BaseException:  # a signal may end the run here too
            with suppress(OSError):
                temporary.unlink()
            raise


def write_json(path: Path, content: Any) -> None:
    """The same, as JSON."""
    write(path, json.dumps(content, indent=2, default=str) + "\n")
