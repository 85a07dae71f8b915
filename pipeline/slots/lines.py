"""The lines of text files: by number, and one after the other."""

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

# What differs in two versions of a file.
_Version: TypeAlias = tuple[int, int, int]

# Of every so many lines it is kept where in the file they begin.
STEP = 8

# Text that is read at once, in bytes.
_CHUNK = 2**20

# How compressed files end.
COMPRESSED = (".gz", ".zst")


def find_files(data_path: str | Sequence[str], where: str) -> list[Path]:
    """The files that paths name, sorted.

    Args:
        data_path: files, folders with all that is in them, or patterns such as ``part-*`` and ``**/*.txt``. Hidden files,
            and those in hidden folders, are left out of the latter two, which the log says.
        where: what messages begin with.

    Raises:
        DataError: a path names no file.
    """
    found: set[Path] = set()
    for path in [data_path] if isinstance(data_path, str) else data_path:
        if Path(path).is_file():
            found.add(Path(path))
            continue
        pattern = os.path.join(glob.escape(path), "**") if Path(path).is_dir() else path
        files, all_files = (
            {file for file in map(Path, glob.glob(pattern, recursive=True, include_hidden=hidden)) if file.is_file()}
            for hidden in (False, True)
        )
        if hidden := all_files - files:
            logger.info(f"{where}: what is hidden is left out, {len(hidden)} in all, the first {min(hidden)}")
        if not files:
            raise DataError(f"{where}: data_path names no file: {path}; check the path")
        found |= files
    return sorted(found)


def read_chunks(path: Path, *, header: bool = False) -> Iterator[bytes]:
    """The text of a file, some whole lines at a time, each with a newline at its end.

    Args:
        path: of the file; what ends in ``.gz`` or ``.zst`` is decompressed.
        header: whether the first line is left out.

    Raises:
        DataError: it cannot be.
    """
    with reading(path), _open(path) as file:
        if header:
            file.readline()
        while text := file.read(_CHUNK):
            text += file.readline()
            yield text if text.endswith(b"\n") else text + b"\n"


def first_line(path: Path) -> bytes:
    """The first line of a file, decompressed, with a newline at its end; nothing where the file is empty.

    Raises:
        DataError: it cannot be read.
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


def _decompressed(path: Path, where: str) -> Path:
    """A file whose lines can be found by their places: of a compressed one, a copy that is made once."""
    if path.suffix not in COMPRESSED:
        return path

    def make(folder: Path) -> None:
        logger.info(f"{where}: {path} is decompressed to {folder.with_suffix('')}, once")
        with (folder / "lines").open("wb") as file:
            file.writelines(read_chunks(path))
            (folder / "size").write_text(str(file.tell()), "utf-8")

    folder = cached(content_key([path], "lines"), make, where)
    try:
        whole = (folder / "lines").stat().st_size == int((folder / "size").read_text("utf-8"))
    except (OSError, ValueError):
        whole = False
    if not whole:
        raise DataError(f"{where}: {folder}, a copy of {path}, is damaged; remove that folder, to make it anew")
    return folder / "lines"


class LineFiles:
    """The lines of text files in their order, each read where it is when it is asked for.

    Args:
        paths: the files, which may not change from here on. Of a compressed one a decompressed copy is read, see ``cached``.
        where: what messages begin with.
        header: whether the first line of each is none of them.

    Attributes:
        first: how many lines come before each file, and at last all.

    Raises:
        DataError: they have no line, or cannot be read.
    """

    def __init__(self, paths: Sequence[Path], where: str, *, header: bool = False) -> None:
        self.paths, self.where, self._above = paths, where, int(header)
        if columns := next((path for path in paths if path.suffix == PARQUET), None):
            what = "is Parquet, which has columns and no lines"
            raise DataError(
                f"{where}: {columns} {what}; name its columns in sparse_slots and dense_slots, without a class"
            )
        self._files = [_decompressed(path, where) for path in paths]
        indices = [_index(path, header) for path in self._files]
        self._marks = [marks for marks, _, _ in indices]
        self._versions = [version for _, _, version in indices]
        self.first = [0, *accumulate(count for _, count, _ in indices)]
        if not len(self):
            raise DataError(f"{where}: there is no line in {', '.join(map(str, paths[:3]))}; check data_path")

    def __len__(self) -> int:
        """How many lines there are."""
        return self.first[-1]

    def place(self, number: int) -> str:
        """``/data/part-1, line 17`` of the line of that number, which counts from 0 over all files."""
        file = bisect_right(self.first, number) - 1
        return f"{self.paths[file]}, line {number - self.first[file] + 1 + self._above}"

    def read(self, numbers: Iterable[int]) -> bytes:
        """The lines of these numbers, each with a newline at its end.

        Raises:
            DataError: a file has changed since.
        """
        parts = []
        for begin, end in _runs(numbers):
            place = begin
            while place < end:
                file = bisect_right(self.first, place) - 1
                before, stop = self.first[file], min(end, self.first[file + 1])
                parts.append(self._read(file, place - before, stop - before))
                place = stop
        return b"".join(parts)

    def _read(self, file: int, begin: int, end: int) -> bytes:
        """Lines of one file."""
        marks, block = self._marks[file], begin // STEP
        start, stop = marks[block], marks[min((end - 1) // STEP + 1, len(marks) - 1)]
        text = os.pread(_OpenFile(str(self._files[file]), self._versions[file]).descriptor, stop - start, start)
        text += b"" if text.endswith(b"\n") else b"\n"
        first = _after(text, begin - block * STEP, 0)
        last = _after(text, end - begin, first) if end % STEP else len(text)
        if text.count(b"\n", first, last) != end - begin:
            raise DataError(f"{self.where}: {self.paths[file]} has changed since it was read first; begin anew")
        return text[first:last]


def _after(text: bytes, count: int, place: int) -> int:
    """The place after so many lines; beyond the text where there are fewer."""
    for _ in range(count):
        place = text.find(b"\n", place) + 1 or len(text) + 1
    return place


def _index(path: Path, header: bool) -> tuple[array[int], int, _Version]:
    """Where every STEP-th line begins, and the end of the file; how many lines there are; and which version this is."""
    marks, number = array("q"), -1
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
    """(first, after the last) of each part in which every number is one more than the one before."""
    begin = end = -1
    for number in numbers:
        if number != end:
            if begin < end:
                yield begin, end
            begin = number
        end = number + 1
    if begin < end:
        yield begin, end


@lru_cache(maxsize=32)
class _OpenFile:
    """A file, open until others have taken its place; a process may share it with those that it has forked.

    Raises:
        DataError: it is another version.
    """

    def __init__(self, path: str, version: _Version) -> None:
        self.descriptor = os.open(path, os.O_RDONLY)
        if file_version(self.descriptor) != version:
            raise DataError(f"{path} has changed since it was read first; begin anew")

    def __del__(self) -> None:
        """Close it."""
        os.close(self.descriptor)


def file_version(file: int | Path) -> _Version:
    """Which file this is, its size, and when it was written."""
    stat = os.stat(file)
    return stat.st_ino, stat.st_size, stat.st_mtime_ns
