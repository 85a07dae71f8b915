"""Disks for the tests of checkpoints: one that records, one that fails, one that stops, one that leaves something out."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.checkpoint.storage import Buffer, Disk

OPERATIONS = ("mkdir", "write", "fsync", "rename", "fsync_folder", "remove")


class Stopped(BaseException):
    """The process is over: as after SIGKILL, nothing that comes later reaches the disk."""


class Operation(NamedTuple):
    """One operation with its paths; for ``write`` the content, for ``remove`` what was in the folder."""

    name: str
    path: Path
    detail: Any = None


class Watched(Disk):
    """Lets a subclass act at every operation; subclasses override ``at``, which decides whether it is done."""

    def __init__(self) -> None:
        self.open: dict[int, Path] = {}

    def at(self, name: str, path: Path, detail: Any = None) -> bool:
        return True

    def mkdir(self, path: Path) -> None:
        if self.at("mkdir", path):
            super().mkdir(path)

    def write(self, path: Path, parts: Iterable[Buffer]) -> int:
        content = b"".join(parts)
        self.at("write", path, content)
        descriptor = super().write(path, [content])
        self.open[descriptor] = path
        return descriptor

    def fsync(self, descriptor: int) -> None:
        # What these tests need of a disk they know from the record; waiting for the real one would only take time.
        os.close(descriptor)
        self.at("fsync", self.open.pop(descriptor))

    def rename(self, source: Path, target: Path) -> None:
        if self.at("rename", source, target):
            super().rename(source, target)

    def fsync_folder(self, path: Path) -> None:
        self.at("fsync_folder", path)

    def remove(self, path: Path) -> None:
        if self.at("remove", path, sorted(os.listdir(path)) if path.is_dir() else []):
            super().remove(path)


class Recorder(Watched):
    """Does everything and keeps what it did."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []

    @property
    def done(self) -> list[tuple[str, Path]]:
        return [(each.name, each.path) for each in self.operations]

    def at(self, name: str, path: Path, detail: Any = None) -> bool:
        self.operations.append(Operation(name, path, detail))
        return True


class Failing(Watched):
    """Raises at one operation, or at all from there on; those before are done.

    Args:
        number: which operation, counted from 0.
        error: makes what it raises.
        lasting: whether all later ones raise too.
        half: whether a write, or a removal of a folder, gets half way before.
    """

    def __init__(
        self, number: int, error: Callable[[], BaseException], lasting: bool = False, half: bool = False
    ) -> None:
        super().__init__()
        self.number, self.error, self.lasting, self.half = number, error, lasting, half
        self.count = -1

    def at(self, name: str, path: Path, detail: Any = None) -> bool:
        self.count += 1
        if self.count == self.number or (self.lasting and self.count > self.number):
            if self.half and self.count == self.number:
                self.begin(name, path, detail)
            raise self.error()
        return True

    def begin(self, name: str, path: Path, detail: Any) -> None:
        if name == "write":
            path.write_bytes(detail[: len(detail) // 2])
        if name == "remove":
            for each in detail[: len(detail) // 2]:
                (path / each).unlink()


class Forgetful(Recorder):
    """Leaves out every operation of a kind on a path that matches, without saying so: a mutant of the saver."""

    def __init__(self, name: str, matches: Callable[[Path], bool]) -> None:
        super().__init__()
        self.name, self.matches = name, matches
        self.left_out = 0

    def at(self, name: str, path: Path, detail: Any = None) -> bool:
        if name == self.name and self.matches(path):
            self.left_out += 1
            return False
        return super().at(name, path, detail)
