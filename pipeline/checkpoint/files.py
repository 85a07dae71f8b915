"""The only place that makes durable writes: what these functions did is on disk when they return."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import threading
import uuid
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

Buffer = bytes | memoryview
CHUNK = 4 * 2**20
"""Bytes that are hashed, written or read at a time."""


class Written(NamedTuple):
    """A file whose content the system has, but perhaps not the disk."""

    descriptor: int
    size: int


class Disk:
    """The six operations of which every durable write is made, and the hash of what is written."""

    def mkdir(self, path: Path) -> None:
        """Make one folder."""
        path.mkdir()

    def write(self, path: Path, parts: Iterable[Buffer]) -> Written:
        """Write a new file; it stays open until ``fsync``. Its mode is that of the umask."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        size = 0
        try:
            for chunk in _chunks(parts):
                _write_all(descriptor, chunk)
                size += len(chunk)
        except BaseException:
            os.close(descriptor)
            raise
        return Written(descriptor, size)

    def fsync(self, written: Written) -> None:
        """Wait until the disk has a file. Where this fails the file is worthless: asked again, the system says yes."""
        try:
            os.fsync(written.descriptor)
        finally:
            os.close(written.descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Give a file or folder another name in the same folder, in one step."""
        source.rename(target)

    def fsync_folder(self, path: Path) -> None:
        """Wait until the disk has the entries of a folder."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def remove(self, path: Path) -> None:
        """Remove a file, or a folder with what is in it; a link in it is removed, never followed."""
        if path.is_symlink() or not path.is_dir():
            path.unlink()
        else:
            shutil.rmtree(path)

    def sha256(self, parts: Iterable[Buffer]) -> str:
        """The SHA-256 of a content, in hex."""
        digest = hashlib.sha256()
        for chunk in _chunks(parts):
            digest.update(chunk)
        return digest.hexdigest()


DISK = Disk()
"""The one that there is, outside of tests."""


def write_file(path: Path, parts: Sequence[Buffer], disk: Disk = DISK) -> tuple[str, int]:
    """Write a new file and wait until the disk has it; it is hashed meanwhile.

    Returns:
        Its SHA-256, in hex, and its size in bytes.
    """
    digest: Future[str] = Future()
    thread = threading.Thread(target=_hash, args=[digest, parts, disk], name="checkpoint hash")
    try:
        thread.start()
    except RuntimeError:
        # The interpreter is ending, and starts no thread any more.
        _hash(digest, parts, disk)
    try:
        written = disk.write(path, parts)
        disk.fsync(written)
        return digest.result(), written.size
    finally:
        wait([digest])


def _hash(digest: Future[str], parts: Sequence[Buffer], disk: Disk) -> None:
    try:
        digest.set_result(disk.sha256(parts))
    except BaseException as error:
        digest.set_exception(error)


def write(path: Path, content: bytes) -> None:
    """The same for one content."""
    DISK.fsync(DISK.write(path, [content]))


def make_folder(path: Path) -> None:
    """Make a folder, and those above it; it may be there."""
    if not path.is_dir():
        make_way(path, DISK)
        sync_way(path, DISK)


def make_way(path: Path, disk: Disk) -> None:
    """Make a folder, and those above it, without waiting for the disk; it may be there."""
    if path.is_dir():
        return
    if path.parent != path:
        make_way(path.parent, disk)
    try:
        disk.mkdir(path)
    except FileExistsError:
        if not path.is_dir():
            raise


def sync_way(path: Path, disk: Disk) -> None:
    """Wait until the disk has the entries of a folder, and the folders on the way to it."""
    path = path.absolute()
    disk.fsync_folder(path)
    for parent in path.parents:
        # A folder that is not ours to read was not made by us either.
        with suppress(PermissionError):
            disk.fsync_folder(parent)


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


def move_into_place(temporary: Path, final: Path, disk: Disk = DISK) -> None:
    """Give a finished folder or file its name, in one step."""
    disk.rename(temporary, final)
    disk.fsync_folder(final.parent)


def _chunks(parts: Iterable[Buffer]) -> Iterator[memoryview]:
    for part in parts:
        view = memoryview(part).cast("B")
        for start in range(0, len(view), CHUNK):
            yield view[start : start + CHUNK]


def _write_all(descriptor: int, chunk: memoryview) -> None:
    while chunk:
        count = os.write(descriptor, chunk)
        if not count:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        chunk = chunk[count:]
