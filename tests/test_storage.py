"""Small files are there whole, or as they were."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from pipeline.checkpoint.storage import storing, write, write_json
from pipeline.errors import ExitCode, StorageError

FULL = Path("/dev/full")


def test_a_file_is_replaced_whole_and_leaves_nothing_beside_it() -> None:
    for content in ("long content\n" * 100, "short\n"):
        write(Path("file.txt"), content)
    assert Path("file.txt").read_text() == "short\n"
    assert os.listdir() == ["file.txt"]


def test_what_is_no_utf_8_is_kept_byte_by_byte() -> None:
    write(Path("file.txt"), os.fsdecode(b"caf\xe9"))
    assert Path("file.txt").read_bytes() == b"caf\xe9"


def test_json_has_other_objects_as_text() -> None:
    write_json(Path("file.json"), {"path": Path("a/b"), "n": 1})
    assert json.loads(Path("file.json").read_text()) == {"path": "a/b", "n": 1}


def test_what_the_storage_refuses_is_told_with_the_file_and_the_remedy() -> None:
    Path("folder").write_text("in the way")
    with pytest.raises(StorageError, match=r"folder/\.file\.tmp: cannot be written: Not a directory; free") as caught:
        write(Path("folder/file"), "content")
    assert caught.value.exit_code == ExitCode.STORAGE == 74


def test_an_attempt_that_fails_leaves_the_old_file_and_nothing_else() -> None:
    Path("file.txt").mkdir()
    with pytest.raises(StorageError, match="cannot be written: Is a directory"):
        write(Path("file.txt"), "content")
    assert os.listdir() == ["file.txt"]


def test_a_full_disk_is_told() -> None:
    with pytest.raises(StorageError, match="log: cannot be written: No space left on device"), storing(Path("log")):
        FULL.write_text("x")


def test_nothing_is_written_through_a_link() -> None:
    Path("precious").write_text("all I have")
    Path(".file.txt.tmp").symlink_to("precious")
    with pytest.raises(StorageError, match="Too many levels of symbolic links"):
        write(Path("file.txt"), "content")
    assert Path("precious").read_text() == "all I have"
