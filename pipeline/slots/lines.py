"""The lines of text files: read by number, or in order."""

from __future__ import annotations

import glob
import gzip
import io
import os
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO, TypeAlias, cast

from loguru import logger

from pipeline.config.slots import PARQUET
from pipeline.errors import DataError
from pipeline.slots.file_cache import cached, content_key, reading
from pipeline.user_code.imports import no_package

# What identifies a version of a file: its inode, its size, and when it was written.
_Version: TypeAlias = tuple[int, int, int]

# The position in the file is kept for every line whose number is a multiple of this.
STEP = 8

# How many bytes of text are read at once.
_CHUNK = 2**20

# The suffixes of compressed files.
COMPRESSED = (".gz", ".zst")


def find_files(data_path: str | Sequence[str], where: str) -> list[Path]:
    """Return the files that paths name, sorted.

    Hidden files and files in hidden folders are left out of folders and patterns, and the log says
    so.

    Args:
        data_path: files; folders, of which all files at any depth are taken; or patterns such as
            ``part-*`` and ``**/*.txt``.
        where: what messages start with.

    Raises:
        DataError: a path names no file.
    """
    found: set[Path] = set()
    for path in [data_path] if isinstance(data_path, str) else data_path:
        if Path(path).is_file():
            found.add(Path(path))
            continue
        pattern = os.path.join(glob.escape(path), "**") if Path(path).is_dir() else path
        files = _matching_files(pattern, include_hidden=False)
        hidden = _matching_files(pattern, include_hidden=True) - files
        if hidden:
            logger.info(f"{where}: what is hidden is left out, {len(hidden)} in all, the first {min(hidden)}")
        if not files:
            raise DataError(f"{where}: data_path names no file: {path}; check the path")
        found |= files
    return sorted(found)


def _matching_files(pattern: str, *, include_hidden: bool) -> set[Path]:
    paths = glob.glob(pattern, recursive=True, include_hidden=include_hidden)
    return {path for path in map(Path, paths) if path.is_file()}


def read_chunks(path: Path, *, header: bool = False) -> Iterator[bytes]:
    """Yield the text of a file in parts of whole lines, each line with a newline.

    Args:
        path: the file. If its name ends in ``.gz`` or ``.zst``, it is decompressed.
        header: whether to leave out the first line.

    Raises:
        DataError: the file cannot be read.
    """
    with reading(path), _open(path) as file:
        if header:
            file.readline()
        while text := file.read(_CHUNK):
            text += file.readline()
            yield text if text.endswith(b"\n") else text + b"\n"


def first_line(path: Path) -> bytes:
    """Return the first line of a file, decompressed and with a newline; b"" if it is empty.

    Raises:
        DataError: the file cannot be read.
    """
    return b"".join(next(read_chunks(path), b"").partition(b"\n")[:2])


def _open(path: Path) -> BinaryIO:
    if path.suffix == ".gz":
        return cast("BinaryIO", gzip.open(path))
    if path.suffix != ".zst":
        return path.open("rb")
    try:
        import pyarrow as pa  # noqa: PLC0415 - an extra
    except ImportError:
        raise DataError(f"{no_package(str(path), 'pyarrow')}, or compress it with gzip") from None
    return cast("BinaryIO", io.BufferedReader(pa.CompressedInputStream(pa.OSFile(str(path)), "zstd")))


class LineFiles:
    """The lines of text files in order. Each line is read from its file when it is needed.

    Args:
        paths: the files, which must not change from here on. A compressed file is read from a
            decompressed copy, see ``cached``.
        where: what messages start with.
        header: whether the first line of each file is a header, which is not counted as a line.

    Attributes:
        first: the number of lines before each file, and at the end the number of all lines.

    Raises:
        DataError: the files have no line, or cannot be read.
    """

    def __init__(self, paths: Sequence[Path], where: str, *, header: bool = False) -> None:
        self.paths = paths
        self.where = where
        self._header_lines = int(header)
        parquet = next((path for path in paths if path.suffix == PARQUET), None)
        if parquet:
            what = f"{parquet} is Parquet, which has columns and no lines"
            raise DataError(f"{where}: {what}; name its columns in sparse_slots and dense_slots, without a class")
        self._files = [_decompressed(path, where) for path in paths]
        indices = [_index(path, header) for path in self._files]
        self._marks = [marks for marks, _, _ in indices]
        self._versions = [version for _, _, version in indices]
        self.first = [0, *accumulate(count for _, count, _ in indices)]
        if not len(self):
            raise DataError(f"{where}: there is no line in {', '.join(map(str, paths[:3]))}; check data_path")

    def __len__(self) -> int:
        """Return the number of lines."""
        return self.first[-1]

    def place(self, number: int) -> str:
        """Return the place of a line for messages, such as ``/data/part-1, line 17``.

        Args:
            number: the number of the line, counted from 0 over all files.
        """
        file = bisect_right(self.first, number) - 1
        return f"{self.paths[file]}, line {number - self.first[file] + 1 + self._header_lines}"

    def read(self, numbers: Iterable[int]) -> bytes:
        """Return the lines with these numbers, each with a newline.

        Raises:
            DataError: a file has changed since it was opened.
        """
        parts = []
        for start, end in _runs(numbers):
            number = start
            while number < end:
                file = bisect_right(self.first, number) - 1
                before = self.first[file]
                stop = min(end, self.first[file + 1])
                parts.append(self._read(file, number - before, stop - before))
                number = stop
        return b"".join(parts)

    def _read(self, file: int, start: int, end: int) -> bytes:
        """Return the lines of one file from ``start`` to before ``end``, counted in the file."""
        marks = self._marks[file]
        # Read from the last mark before the lines to the first mark behind them.
        block = start // STEP
        position = marks[block]
        stop = marks[min((end - 1) // STEP + 1, len(marks) - 1)]
        descriptor = _OpenFile(str(self._files[file]), self._versions[file]).descriptor
        text = os.pread(descriptor, stop - position, position)
        text += b"" if text.endswith(b"\n") else b"\n"
        first = _after(text, start - block * STEP, 0)
        last = _after(text, end - start, first) if end % STEP else len(text)
        if text.count(b"\n", first, last) != end - start:
            raise DataError(f"{self.where}: {self.paths[file]} has changed since it was read first; begin anew")
        return text[first:last]


def _decompressed(path: Path, where: str) -> Path:
    """Return a file that can be read at any position.

    That is the file itself, or of a compressed file a decompressed copy, which is made once.

    Raises:
        DataError: the file cannot be read, or the copy is damaged.
    """
    if path.suffix not in COMPRESSED:
        return path

    def make(folder: Path) -> None:
        logger.info(f"{where}: {path} is decompressed to {folder.with_suffix('')}, once")
        with (folder / "lines").open("wb") as file:
            file.writelines(read_chunks(path))
            (folder / "size").write_text(str(file.tell()), "utf-8")

    folder = cached(content_key([path], "lines"), make, where)
    try:
        is_whole = (folder / "lines").stat().st_size == int((folder / "size").read_text("utf-8"))
    except (OSError, ValueError):
        is_whole = False
    if not is_whole:
        raise DataError(f"{where}: {folder}, a copy of {path}, is damaged; remove that folder, to make it anew")
    return folder / "lines"


def _index(path: Path, header: bool) -> tuple[array[int], int, _Version]:
    """Read a file once.

    Returns:
        The positions of every ``STEP``-th line and of the end of the file; the number of lines; the
        version of the file.
    """
    marks = array("q")
    number = -1
    with reading(path), path.open("rb") as file:
        version = file_version(file.fileno())
        position = len(file.readline()) if header else 0
        for number, line in enumerate(file):
            if not number % STEP:
                marks.append(position)
            position += len(line)
    marks.append(position)
    return marks, number + 1, version


def _runs(numbers: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield (first, last + 1) of each run of consecutive numbers."""
    start = -1
    end = -1
    for number in numbers:
        if number != end:
            if start < end:
                yield start, end
            start = number
        end = number + 1
    if start < end:
        yield start, end


def _after(text: bytes, count: int, place: int) -> int:
    """Return the place ``count`` lines after ``place``; beyond the text if it has fewer lines."""
    for _ in range(count):
        place = text.find(b"\n", place) + 1 or len(text) + 1
    return place


@lru_cache(maxsize=32)
class _OpenFile:
    """A file that stays open until others replace it in the cache.

    A process shares it with the processes that it forks.

    Raises:
        DataError: the file has another version.
    """

    def __init__(self, path: str, version: _Version) -> None:
        self.descriptor = os.open(path, os.O_RDONLY)
        if file_version(self.descriptor) != version:
            raise DataError(f"{path} has changed since it was read first; begin anew")

    def __del__(self) -> None:
        """Close the file."""
        os.close(self.descriptor)


def file_version(file: int | Path) -> _Version:
    """Return the version of a file: its inode, its size, and when it was written."""
    stat = os.stat(file)
    return stat.st_ino, stat.st_size, stat.st_mtime_ns
