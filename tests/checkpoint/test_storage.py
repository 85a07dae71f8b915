"""Small files are there whole, or as they were."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
from pathlib import Path

import pytest
from checkpoint_disks import Recorder

from pipeline.checkpoint import storage
from pipeline.checkpoint.storage import storing, write, write_json
from pipeline.errors import ExitCode, StorageError

FULL = Path("/dev/full")


def test_a_file_is_replaced_whole_and_leaves_nothing_beside_it() -> None:
    for content in ("long content\n" * 100, "short\n"):
        write(Path("file.txt"), content)
    assert Path("file.txt").read_text() == "short\n"
    assert os.listdir() == ["file.txt"]


class Killing(str):
    """A text whose encoding ends the process, while the file is open."""

    def encode(self, *_: object, **__: object) -> bytes:
        os.kill(os.getpid(), signal.SIGKILL)
        return b""


def test_the_half_of_a_file_that_a_killed_process_leaves_goes_with_the_next_write() -> None:
    for _ in range(2):
        process = multiprocessing.get_context("fork").Process(target=write, args=[Path("file.txt"), Killing()])
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    assert len(os.listdir()) == 1
    write(Path("file.txt"), "content")
    assert os.listdir() == ["file.txt"]


def test_what_is_no_utf_8_is_kept_byte_by_byte() -> None:
    write(Path("file.txt"), os.fsdecode(b"caf\xe9"))
    assert Path("file.txt").read_bytes() == b"caf\xe9"


def test_json_has_other_objects_as_text() -> None:
    write_json(Path("file.json"), {"path": Path("a/b"), "n": 1})
    assert json.loads(Path("file.json").read_text()) == {"path": "a/b", "n": 1}


def test_what_the_storage_refuses_is_told_with_the_file_and_the_remedy() -> None:
    Path("folder").write_text("in the way")
    with pytest.raises(StorageError, match=r"folder/file: cannot be written: Not a directory; free") as caught:
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
    Path("file.txt").symlink_to("precious")
    write(Path("file.txt"), "content")
    assert (Path("precious").read_text(), Path("file.txt").read_text()) == ("all I have", "content")


def test_a_written_file_has_its_content(tmp_path: Path) -> None:
    content = bytes(range(256)) * 99
    storage.write_file(tmp_path / "file", [content])
    assert (tmp_path / "file").read_bytes() == content


def test_a_file_that_is_there_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    with pytest.raises(FileExistsError):
        storage.write_file(tmp_path / "file", [b"new"])
    assert (tmp_path / "file").read_text() == "old"


def test_a_folder_is_made_with_those_above_it_and_may_be_there(tmp_path: Path) -> None:
    storage.make_folder(tmp_path / "a" / "b")
    storage.make_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()


def test_folders_are_made_from_the_top_and_are_on_disk_with_the_way_to_them(tmp_path: Path) -> None:
    disk = Recorder()
    storage.make_folder(tmp_path / "a" / "b", disk)
    assert disk.done[:2] == [("mkdir", tmp_path / "a"), ("mkdir", tmp_path / "a" / "b")]
    synced = [tmp_path / "a" / "b", tmp_path / "a", tmp_path, *tmp_path.parents]
    assert disk.done[2:] == [("fsync_folder", path) for path in synced]


def test_a_file_where_a_folder_should_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        storage.make_folder(tmp_path / "file")


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_the_mode_of_a_file_is_that_of_the_umask(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        storage.write_file(tmp_path / "file", [b"content"])
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == mode


def test_a_file_in_parts_is_hashed_as_one(tmp_path: Path) -> None:
    parts: list[bytes | memoryview] = [b"", b"ab", memoryview(bytearray(storage.CHUNK + 1)), b"c"]
    written = storage.write_file(tmp_path / "file", parts)
    whole = b"".join(parts)
    assert written == (hashlib.sha256(whole).hexdigest(), len(whole))
    assert (tmp_path / "file").read_bytes() == whole


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_a_file_is_closed_when_it_is_on_disk_and_when_it_cannot_be_written(tmp_path: Path) -> None:
    before = len(descriptors())
    storage.write_file(tmp_path / "file", [b"content"])
    with pytest.raises(TypeError):
        storage.DISK.write(tmp_path / "other", ["no bytes"])  # type: ignore[list-item]
    assert len(descriptors()) == before


def test_a_folder_moved_into_place_is_there_whole_under_its_new_name_only(tmp_path: Path) -> None:
    (tmp_path / "temporary").mkdir()
    storage.write_file(tmp_path / "temporary" / "file", [b"content"])
    storage.move_into_place(tmp_path / "temporary", tmp_path / "final", storage.DISK)
    assert [path.name for path in tmp_path.iterdir() if path.name != "cwd"] == ["final"]
    assert (tmp_path / "final" / "file").read_bytes() == b"content"


def test_a_replaced_file_is_whole_and_alone_in_a_folder_that_is_made_for_it(tmp_path: Path) -> None:
    storage.replace_durably(tmp_path / "made" / "file", b"old")
    storage.replace_durably(tmp_path / "made" / "file", b"new")
    assert (tmp_path / "made" / "file").read_bytes() == b"new"
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["file"]


def test_a_file_that_cannot_be_replaced_is_as_it_was_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    (tmp_path / "folder" / "there").mkdir(parents=True)
    with pytest.raises(StorageError, match="there: cannot be written: Is a directory; free or repair the storage"):
        storage.replace_durably(tmp_path / "folder" / "there", b"content")
    assert [path.name for path in (tmp_path / "folder").rglob("*")] == ["there"]


def test_removing_a_folder_leaves_what_a_link_in_it_points_to(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_text("kept")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "link").symlink_to(tmp_path / "kept")
    storage.DISK.remove(tmp_path / "folder")
    assert not (tmp_path / "folder").exists()
    assert (tmp_path / "kept" / "file").read_text() == "kept"


def test_removing_a_link_leaves_what_it_points_to(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    storage.DISK.remove(tmp_path / "link")
    assert (tmp_path / "kept").is_dir()
    assert not (tmp_path / "link").is_symlink()
