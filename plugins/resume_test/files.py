"""The files of the two run directories: which of them are compared, and where one first differs."""

from __future__ import annotations

import filecmp
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from difflib import unified_diff
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.checkpoint.comparison import differences
from pipeline.errors import printable
from pipeline.run.directory import RunDirectory
from pipeline.run.provenance import Provenance

OURS = {
    "RunDirectory": RunDirectory.volatile,
    "Provenance": Provenance.volatile,
    # Its output_dir is another in each of the two runs.
    "resume-test": ("config.yaml",),
}
"""Writer -> the volatile files that are right in a run directory."""
NOTHING = "not saved on either side"
_MOST = 20
# So many lines of a text file are compared from its first difference on, and so many of the result are shown.
_WINDOW = 100
_MOST_LINES = 8
# Characters of a line.
_LONGEST = 200


class Finding(NamedTuple):
    """What came of comparing one part of the two runs.

    Attributes:
        part: what was compared.
        text: that it is the same, or the first thing in it that differs.
        differs: whether anything does.
        pattern: of a file, how the ``volatile`` of its writer would name it.
    """

    part: str
    text: str
    differs: bool = False
    pattern: str = ""


def volatile_files(folder: Path, patterns: Mapping[str, Sequence[str]]) -> dict[Path, str]:
    """Path -> the class that names it volatile, for the files and folders of a folder that fit its patterns."""
    return {
        Path(os.path.normpath(path)): writer
        for writer, names in patterns.items()
        for name in names
        for path in folder.glob(name)
    }


def compare_files(
    straight: Path,
    interrupted: Path,
    volatile: Sequence[Mapping[Path, str]],
    apart: Sequence[str],
    where: str = "",
) -> Iterator[Finding]:
    """Compare every file under two folders: JSON by its content, others byte by byte.

    Args:
        straight: the folder in the run that nothing interrupted.
        interrupted: the same folder in the other one.
        volatile: for each of the two, path -> the class that names it volatile.
        apart: the entries of the folders that are compared by themselves.
        where: the folders as seen from the folder of a runner.

    Yields:
        Each file that differs; those that are the same; those that were not compared, and why.
    """
    same: list[str] = []
    skipped: dict[str, list[str]] = {}
    for name in sorted(_names(straight, apart) | _names(interrupted, apart)):
        paths = straight / name, interrupted / name
        if reason := _not_comparable(paths, volatile):
            skipped.setdefault(reason, []).append(str(name))
        elif difference := file_difference(*paths):
            yield Finding(str(name), difference, differs=True, pattern=f"{where}{name}")
        else:
            same.append(str(name))
    if same:
        yield Finding("files", f"the same: {_listed(same)}")
    if skipped:
        parts = (f"{_listed(names)} ({reason})" for reason, names in skipped.items())
        yield Finding("not compared", "; ".join(parts))


def file_difference(straight: Path, interrupted: Path) -> str | None:
    """The first difference of two files, in words; None where they are the same."""
    for path, run in ((straight, "interrupted"), (interrupted, "straight")):
        if not os.path.lexists(path):
            return f"only the {run} run has it"
    if straight.is_symlink() or interrupted.is_symlink():
        targets = [os.readlink(path) if path.is_symlink() else "no link" for path in (straight, interrupted)]
        return None if targets[0] == targets[1] else f"leads to {targets[0]} and {targets[1]}"
    if filecmp.cmp(straight, interrupted, shallow=False):
        return None
    one, other = straight.read_bytes(), interrupted.read_bytes()
    try:
        if straight.suffix == ".jsonl":
            return _difference_of_lines(one, other)
        if straight.suffix == ".json":
            return next(map(str, differences(json.loads(one), json.loads(other))), None)
    except (ValueError, RecursionError):
        # It is no JSON, whatever its name says.
        pass
    shorter = min(len(one), len(other))
    equal = next((place for place in range(shorter) if one[place] != other[place]), shorter)
    line = one.count(b"\n", 0, equal) + 1
    return f"from byte {equal} on, in line {line}{_differing_lines(one, other, line)}"


def _differing_lines(one: bytes, other: bytes, first: int) -> str:
    """Return the lines that differ, one per line; ``""`` if a file is not text.

    Args:
        one: what the straight run has written.
        other: what the interrupted run has written.
        first: the number of the first line that differs, from 1.
    """
    try:
        straight, interrupted = (content.decode("utf-8").splitlines()[first - 1 :] for content in (one, other))
    except UnicodeDecodeError:
        return ""
    # The first two lines name the files.
    diff = unified_diff(straight[:_WINDOW], interrupted[:_WINDOW], n=0, lineterm="")
    changes = [line for line in diff if not line.startswith("@@")][2:]
    shown = [printable(line[:_LONGEST], keep="\t") for line in changes[:_MOST_LINES]]
    more = [f"… and {len(changes) - _MOST_LINES} more"] if len(changes) > _MOST_LINES else []
    return "\n".join([" (- straight, + interrupted):", *shown, *more])


def _difference_of_lines(one: bytes, other: bytes) -> str | None:
    for number, (line, its) in enumerate(zip_longest(one.splitlines(), other.splitlines()), 1):
        if line is None or its is None:
            return f"line {number}: only the {'interrupted' if line is None else 'straight'} run has it"
        if line != its and (found := list(differences(json.loads(line), json.loads(its)))):
            return f"line {number}: {', '.join(map(str, found))}{_iteration(json.loads(line))}"
    return None


def _iteration(entry: Any) -> str:
    known = isinstance(entry, dict) and "iteration" in entry
    return f", at iteration {entry['iteration']}" if known else ""


def _names(folder: Path, apart: Sequence[str]) -> set[Path]:
    """The files and links under a folder, relative to it; no link is followed."""
    names: set[Path] = set()
    for parent, folders, files in os.walk(folder):
        at = Path(parent).relative_to(folder)
        links = [name for name in folders if (Path(parent) / name).is_symlink()]
        if at == Path():
            folders[:] = [name for name in folders if name not in apart]
        names.update(at / name for name in (*files, *links))
    return names - {Path(name) for name in apart}


def _not_comparable(paths: Sequence[Path], volatile: Sequence[Mapping[Path, str]]) -> str:
    """Why the two of a file are not compared; ``""`` where they are."""
    for path, writers in zip(paths, volatile, strict=True):
        for place in (path, *path.parents):
            if place in writers:
                return f"volatile in {writers[place]}"
        if path.exists() and not path.is_symlink() and not path.is_file():
            return "no regular file"
        if path.is_file() and not path.is_symlink() and not os.access(path, os.R_OK):
            return "cannot be read"
    return ""


def _listed(names: Sequence[str]) -> str:
    more = f", and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return ", ".join(names[:_MOST]) + more
