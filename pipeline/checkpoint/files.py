"""The only place that makes durable writes: what these functions did is on disk when they return."""

from __future__ import annotations

import hashlib
import os
import shutil
import uuid
from pathlib import Path


def make_folder(path: Path) -> None:
    """Make a folder, and those above it."""
    path.mkdir(parents=True, exist_ok=True)


def write(path: Path, content: bytes) -> str:
    """Write a new file and wait until the disk has it.

    Returns:
        The SHA-256 of the content, in hex.
    """
    with open(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return hashlib.sha256(content).hexdigest()


def replace(path: Path, content: bytes) -> None:
    """Put a whole file in place, with the folders above it: whatever happens, there is the old one or the new one."""
    make_folder(path.parent)
    temporary = path.with_name(f".tmp-{uuid.uuid4().hex}")
    try:
        write(temporary, content)
        move_into_place(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def sync_folder(path: Path) -> None:
    """Wait until the disk has a folder's entries."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def move_into_place(temporary: Path, final: Path) -> None:
    """Give a finished folder or file its name, in one step."""
    temporary.rename(final)
    sync_folder(final.parent)


def remove(path: Path) -> None:
    """Remove a folder of ours; a link in it is removed, never followed."""
    shutil.rmtree(path)
