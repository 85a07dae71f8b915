"""What is made of data files once, kept for all runs that read the same."""

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


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """In the block a file is read; what goes wrong with that says which.

    Raises:
        DataError: it cannot be read, or is compressed and broken.
    """
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def content_key(paths: Iterable[Path], settings: Any) -> str:
    """A name for what some settings make of files: another one where a byte of either is another.

    Args:
        paths: the files, in the order in which they are read; what they are called does not count.
        settings: plain data.

    Raises:
        DataError: a file cannot be read.
    """
    digests = []
    for path in paths:
        with reading(path), path.open("rb") as file:
            digests.append(file_digest(file, "blake2b").hexdigest())
    return blake2b(json.dumps([settings, digests]).encode(), digest_size=16).hexdigest()


def cached(key: str, make: Callable[[Path], None], where: str, root: str | None = None) -> Path:
    """The folder with what ``make`` has written into it: by one process, while others wait, and never half of it.

    Args:
        key: see ``content_key``.
        make: called with an empty folder, if there is none of that key yet.
        where: what messages begin with.
        root: the folder with all of them; None is ``five-stage-pipeline`` in ``$XDG_CACHE_HOME``, else in ``~/.cache``.

    Raises:
        DataError: nothing can be written there.
    """
    base = Path(root) if root else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "five-stage-pipeline")
    folder = base.expanduser() / key
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with Path(f"{folder}.lock").open("w", encoding="utf-8") as lock:
            _wait_for(lock.fileno(), folder, where)
            if not folder.is_dir():
                _make(folder, make)
    except OSError as error:
        what = f"{where}: the cache cannot be written: {error}"
        raise DataError(f"{what}; set {'cache' if root else 'XDG_CACHE_HOME'} to a folder that can be") from error
    return folder


def _make(folder: Path, make: Callable[[Path], None]) -> None:
    partial = Path(f"{folder}.partial")
    # Of a process that was killed: whoever has the lock is alone.
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
    """Get the lock, which the end of a process gives back."""
    said = False
    while True:
        with suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        if not said:
            logger.info(f"{where}: waits for another process, which makes {folder}")
        said = True
        SHUTDOWN.raise_if_requested()
        time.sleep(0.05)
