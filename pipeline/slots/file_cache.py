"""A cache of what is made from data files, for all runs that read the same files."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b, file_digest
from pathlib import Path
from typing import Any

from loguru import logger

from pipeline.errors import DataError
from pipeline.signals import SHUTDOWN


def cached(key: str, make: Callable[[Path], None], where: str, root: str | None = None) -> Path:
    """Return the folder of the cache with this key. If there is none yet, make it.

    One process makes the folder, while others wait. It exists only when it is complete.

    Args:
        key: the name of the folder, see ``content_key``.
        make: called with an empty folder, into which it writes.
        where: what messages start with.
        root: the folder of the cache. None is ``five-stage-pipeline`` in ``$XDG_CACHE_HOME``, or
            else in ``~/.cache``.

    Raises:
        DataError: the cache cannot be written.
    """
    base = Path(root) if root else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "five-stage-pipeline")
    folder = base.expanduser() / key
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with Path(f"{folder}.lock").open("w", encoding="utf-8") as lock:
            _wait_for(lock.fileno(), folder, where)
            # Another process may have made it while this one waited.
            if not folder.is_dir():
                _make(folder, make)
    except OSError as error:
        what = f"{where}: the cache cannot be written: {error}"
        raise DataError(f"{what}; set {'cache' if root else 'XDG_CACHE_HOME'} to a folder that can be") from error
    return folder


def content_key(paths: Iterable[Path], settings: Any) -> str:
    """Return a key for what is made from files with some settings.

    It changes if any byte of the files or of the settings changes.

    Args:
        paths: the files, in the order in which they are read. Their names do not count.
        settings: plain data, which JSON can hold.

    Raises:
        DataError: a file cannot be read.
    """
    digests = []
    for path in paths:
        with reading(path), path.open("rb") as file:
            digests.append(file_digest(file, "blake2b").hexdigest())
    return blake2b(json.dumps([settings, digests]).encode(), digest_size=16).hexdigest()


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn errors of reading a file in this block into errors that name the file.

    Raises:
        DataError: the file cannot be read, or is compressed and broken.
    """
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _make(folder: Path, make: Callable[[Path], None]) -> None:
    """Make a folder under another name, and rename it when it is complete and on the disk."""
    partial = Path(f"{folder}.partial")
    # It may be left from a process that was killed. No other process writes there, because this one
    # holds the lock.
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        make(partial)
        for file in partial.iterdir():
            with file.open("rb") as written:
                os.fsync(written.fileno())
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _wait_for(lock: int, folder: Path, where: str) -> None:
    """Wait until this process holds the lock.

    The lock is released when the file is closed, also by the end of the process.

    Args:
        lock: the descriptor of the lock file.
        folder: the folder that the lock protects, for the message.
        where: what messages start with.
    """
    has_logged = False
    while True:
        with suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        if not has_logged:
            logger.info(f"{where}: waits for another process, which makes {folder}")
            has_logged = True
        SHUTDOWN.raise_if_requested()
        time.sleep(0.05)
