"""Durable writes of whole files, and the messages when the storage refuses."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import stat
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from errno import EINVAL, EIO, EISDIR, ELOOP, ENAMETOOLONG, ENOENT, ENOTDIR, ENXIO
from functools import partial
from io import FileIO
from pathlib import Path
from types import NoneType
from typing import Any

from pipeline.errors import CheckpointError, StageError, StorageError

# What JSON has a form for, beside floats.
_PLAIN = frozenset({int, str, bool, NoneType})
_NUMBERS = frozenset({float, int, bool})


def finite(value: Any, where: str = "") -> Any:
    """Plain data for JSON; nan and inf become null.

    Args:
        value: what is to be written.
        where: it stands, for the error; ``""`` leaves what is no plain data as it is.

    Raises:
        StageError: some of it is none.
    """
    # The usual cases, on the way of every printed step.
    kind = type(value)
    if kind is float:
        return value if math.isfinite(value) else None
    if kind in _PLAIN:
        return value
    if isinstance(value, dict):
        return {without_numpy(name): finite(item, where and f"{where}[{name!r}]") for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item, where) for item in value]
    try:
        number = as_number(value, where)
    except StageError:
        if where:
            raise
        return value
    return None if isinstance(number, float) and not math.isfinite(number) else number


def as_number(value: Any, where: str) -> Any:
    """A plain number; also from a tensor or an array with one element, as a plugin may report it.

    Raises:
        StageError: it has several, or is something else; ``where`` it is.
    """
    if type(value) in _NUMBERS:
        return value
    try:
        return value.item()
    except (AttributeError, RuntimeError, ValueError) as error:
        shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
        message = f"{where} is a {type(value).__name__}{shape}, which is no number; put a number there"
        raise StageError(message) from error


def without_numpy(value: Any) -> Any:
    """Return the plain Python value of a numpy number, truth value or string; anything else as it is.

    numpy is not imported for this: a process that has not imported it has no numpy values.
    """
    if type(value) in _PLAIN:
        return value
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.generic):
        return value
    # The rest has no plain form that says what it was: dates, time spans, and floats that are wider than Python's.
    if not isinstance(value, numpy.bool_ | numpy.integer | numpy.floating | numpy.str_):
        return value
    plain = value.item()
    is_plain = type(plain) in {bool, int, float, str} and not isinstance(value, numpy.timedelta64)
    return plain if is_plain else value


def short(path: Path) -> str:
    """A path as one may type it where the command was given: relative to that folder, if it is below it."""
    with suppress(OSError, ValueError):
        here = os.getcwd()
        # ``pipeline resume`` goes to another folder than that of the shell.
        if os.path.realpath(os.environ.get("PWD", os.sep)) == here:
            return str(path.relative_to(here))
    return str(path)


def no_link(path: str, flags: int) -> int:
    """An opener for ``open`` that follows no link."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


@contextmanager
def storing(path: Path, otherwise: str = "set output_dir") -> Iterator[None]:
    """Turn the OSError of a block into an error that names the path and what to do.

    Args:
        path: what the block writes.
        otherwise: how to write elsewhere; ``""`` where nothing sets that.

    Raises:
        StorageError: the block raised an OSError.
    """
    try:
        yield
    except OSError as error:
        raise refusal(path, error, otherwise) from error


def refusal(path: Path | str, error: OSError, otherwise: str = "set output_dir") -> StorageError:
    """The error that ``storing`` raises, for a caller that is too frequent for a block."""
    remedy = f", or {otherwise}" if otherwise else ""
    return StorageError(f"{path}: cannot be written: {error.strerror or error}; free or repair the storage{remedy}")


def write(path: Path, content: str) -> None:
    """Put a whole text file in place, without waiting for the disk: a reader sees the old one or the new one.

    Raises:
        StorageError: the storage refuses; the old one is still there.
    """
    # What the system calls a file may be no UTF-8; the bytes are kept.
    with storing(path), replacing(path) as temporary, open(temporary, "xb") as file:
        file.write(content.encode(errors="surrogateescape"))


def write_json(path: Path, content: Any) -> None:
    """The same, as JSON."""
    write(path, json.dumps(content, indent=2, default=_in_json) + "\n")


def _in_json(value: Any) -> Any:
    """Return what stands in a JSON file for a value that JSON has no form for: a number of numpy's, or its text."""
    plain = without_numpy(value)
    return str(value) if plain is value else plain


Buffer = bytes | memoryview

# Bytes that are hashed, written or read at a time.
CHUNK = 4 * 2**20


class Disk:
    """The six operations of every durable write, and the hash of the content."""

    def mkdir(self, path: Path) -> None:
        """Make one folder."""
        path.mkdir()

    def write(self, path: Path, parts: Iterable[Buffer]) -> int:
        """Write a new file, and return its descriptor, open until ``fsync``. Its mode is that of the umask."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            for chunk in _chunks(parts):
                _write_all(descriptor, chunk)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def fsync(self, descriptor: int) -> None:
        """Wait until the disk has what is open, and close it. After a failure it is worthless: asked again, it would say yes."""
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Give a file or folder another name in the same folder, in one step."""
        source.rename(target)

    def fsync_folder(self, path: Path) -> None:
        """Wait until the disk has the entries of a folder."""
        self.fsync(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))

    def remove(self, path: Path) -> None:
        """Remove a file or a folder; a link in it is removed, never followed."""
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


# The one that there is, outside of tests.
DISK = Disk()


def write_file(path: Path, parts: Sequence[Buffer], disk: Disk = DISK) -> tuple[str, int]:
    """Write a new file and wait until the disk has it; another thread hashes it meanwhile.

    Returns:
        Its SHA-256, in hex, and its size in bytes.
    """
    with ThreadPoolExecutor(1, "checkpoint hash") as pool:
        try:
            digest = pool.submit(disk.sha256, parts).result
        except RuntimeError:
            # The interpreter is ending, and starts no thread any more.
            digest = partial(disk.sha256, parts)
        disk.fsync(disk.write(path, parts))
        return digest(), sum(map(len, parts))


def make_folder(path: Path, disk: Disk = DISK) -> None:
    """Make a folder, and those above it, which may be there, and wait until the disk has all of them."""
    for folder in (*reversed(path.parents), path):
        if not folder.is_dir():
            # Another process may make it now; if it is no folder, what follows fails.
            with suppress(FileExistsError):
                disk.mkdir(folder)
    sync_folders(path, disk)


def sync_folders(path: Path, disk: Disk = DISK) -> None:
    """Wait until the disk has a folder's entries, and its parents."""
    path = path.absolute()
    disk.fsync_folder(path)
    for parent in path.parents:
        # A folder that is not ours to read was not made by us either.
        with suppress(PermissionError):
            disk.fsync_folder(parent)


def replace_durably(path: Path, content: bytes, otherwise: str = "set output_dir") -> None:
    """Replace a file durably, and make its parents: at any moment there is the old one or the new one.

    Raises:
        StorageError: the storage refuses; for ``otherwise`` see ``storing``.
    """
    with storing(path, otherwise):
        if not path.parent.is_dir():
            make_folder(path.parent)
        with replacing(path) as temporary:
            DISK.fsync(DISK.write(temporary, [content]))
        DISK.fsync_folder(path.parent)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A new name beside a file; what the block writes there takes the place of the file when the block ends."""
    # The next one takes the same name, so a killed process leaves nothing that stays.
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        yield temporary
        DISK.rename(temporary, path)
    except BaseException:  # a signal may end the run here too
        with suppress(OSError):
            temporary.unlink()
        raise


def move_into_place(source: Path, target: Path, disk: Disk = DISK) -> None:
    """Give a file or folder another name, in one step, and wait until the disk has the name."""
    disk.rename(source, target)
    disk.fsync_folder(target.parent)


def _chunks(parts: Iterable[Buffer]) -> Iterator[memoryview]:
    for part in parts:
        view = memoryview(part).cast("B")
        for start in range(0, len(view), CHUNK):
            yield view[start : start + CHUNK]


def _write_all(descriptor: int, chunk: memoryview) -> None:
    while chunk:
        count = os.write(descriptor, chunk)
        if not count:
            raise OSError(EIO, os.strerror(EIO))
        chunk = chunk[count:]


@contextmanager
def at_path(path: Path | str) -> Iterator[None]:
    """Have the CheckpointErrors of a block begin with the path of the file that is read."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


# What a damaged folder or disk says; anything else may pass, such as a permission or too many open files.
_DAMAGE = {ENOENT, ELOOP, ENOTDIR, EISDIR, ENXIO, EIO, EINVAL, ENAMETOOLONG}


@contextmanager
def open_regular(path: Path) -> Iterator[FileIO]:
    """Open a regular file for reading, without a buffer; links and pipes are refused.

    Raises:
        CheckpointError: it is missing, something else, or the disk cannot read it.
        StorageError: the storage refuses for a reason that may pass.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with FileIO(descriptor) as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise CheckpointError(f"{path}: is no regular file; use another")
            yield file
    except OSError as error:
        kind = CheckpointError if error.errno in _DAMAGE else StorageError
        raise kind(f"{path}: cannot be read ({error.strerror}); use another, or repair the storage") from error


def size_of(path: Path) -> int | None:
    """The size of a regular file, without opening it; None for anything else, also for a link."""
    try:
        status = path.lstat()
    except (OSError, ValueError):
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def read_small(path: Path, most: int) -> bytes:
    """The content of a small file.

    Raises:
        CheckpointError: it is larger than ``most``, or as ``open_regular``.
    """
    with open_regular(path) as file:
        content = file.read(most + 1) or b""
    if len(content) > most:
        raise CheckpointError(f"{path}: has more than {most} bytes; use another")
    return content
