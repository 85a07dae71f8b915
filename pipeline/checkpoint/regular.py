"""Files that are read only if they are what they were said to be: regular, of a known size, and no links."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from pipeline.errors import CheckpointError, StorageError

_DAMAGE = {
    errno.ENOENT,
    errno.ELOOP,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ENXIO,
    errno.EIO,
    errno.EINVAL,
    errno.ENAMETOOLONG,
}
"""What a damaged folder or disk says; anything else may pass, such as a permission or too many open files."""


@contextmanager
def opened(path: Path) -> Iterator[FileIO]:
    """A regular file, opened for reading without a buffer; no pipe is waited for, no link followed.

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
    """The bytes of a regular file that is no link, without opening it; None for anything else."""
    try:
        found = path.lstat()
    except (OSError, ValueError):
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def content_of(path: Path, most: int) -> bytes:
    """All of a small file.

    Raises:
        CheckpointError: it is larger than ``most``, or as ``opened``.
    """
    with opened(path) as file:
        content = file.read(most + 1) or b""
    if len(content) > most:
        raise CheckpointError(f"{path}: has more than {most} bytes; use another")
    return content
