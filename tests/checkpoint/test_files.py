"""Durable writes."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from pipeline.checkpoint import files


def test_a_written_file_has_its_content_and_the_hash_is_that_of_the_content(tmp_path: Path) -> None:
    content = bytes(range(256)) * 99
    assert files.write(tmp_path / "file", content) == hashlib.sha256(content).hexdigest()
    assert (tmp_path / "file").read_bytes() == content


def test_a_file_that_is_there_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    with pytest.raises(FileExistsError):
        files.write(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_text() == "old"


def test_a_folder_is_made_with_those_above_it_and_may_be_there(tmp_path: Path) -> None:
    files.make_folder(tmp_path / "a" / "b")
    files.make_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()


def test_a_folder_moved_into_place_is_there_whole_under_its_new_name_only(tmp_path: Path) -> None:
    (tmp_path / "temporary").mkdir()
    files.write(tmp_path / "temporary" / "file", b"content")
    files.sync_folder(tmp_path / "temporary")
    files.move_into_place(tmp_path / "temporary", tmp_path / "final")
    assert [path.name for path in tmp_path.iterdir() if path.name != "cwd"] == ["final"]
    assert (tmp_path / "final" / "file").read_bytes() == b"content"


def test_a_replaced_file_is_whole_and_alone_in_a_folder_that_is_made_for_it(tmp_path: Path) -> None:
    files.replace(tmp_path / "made" / "file", b"old")
    files.replace(tmp_path / "made" / "file", b"new")
    assert (tmp_path / "made" / "file").read_bytes() == b"new"
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["file"]


def test_a_file_that_cannot_be_replaced_is_as_it_was_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    (tmp_path / "folder" / "there").mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        files.replace(tmp_path / "folder" / "there", b"content")
    assert [path.name for path in (tmp_path / "folder").rglob("*")] == ["there"]


def test_removing_a_folder_leaves_what_a_link_in_it_points_to(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_text("kept")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "link").symlink_to(tmp_path / "kept")
    files.remove(tmp_path / "folder")
    assert not (tmp_path / "folder").exists()
    assert (tmp_path / "kept" / "file").read_text() == "kept"
