"""Which checkpoints are removed."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoint_disks import Recorder
from checkpoint_power import models

from pipeline.checkpoint.checkpointer import Checkpointer
from pipeline.errors import ConfigError


def save(checkpointer: Checkpointer, *steps: int) -> None:
    for step in steps:
        checkpointer.save(models(step), {"iteration": step}, {"main": {"number": step}}, {"number": step})


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in folder.glob("step-*"))


@pytest.mark.parametrize(
    ("keep_last", "kept"), [(None, [1, 2, 3, 4, 5]), (2, [4, 5]), (3, [3, 4, 5]), (9, [1, 2, 3, 4, 5])]
)
def test_the_newest_are_kept(tmp_path: Path, keep_last: int | None, kept: list[int]) -> None:
    save(Checkpointer(tmp_path / "c", keep_last=keep_last), 1, 2, 3, 4, 5)
    assert steps(tmp_path / "c") == kept
    assert len(list((tmp_path / "c").iterdir())) == len(kept)


@pytest.mark.parametrize("keep_last", [1, 0, -1])
def test_fewer_than_two_are_refused(tmp_path: Path, keep_last: int) -> None:
    with pytest.raises(ConfigError, match=f"keep_last is {keep_last}; use 2 at least, so that there is another"):
        Checkpointer(tmp_path, keep_last=keep_last)


def test_a_protected_one_stays_until_others_are_protected(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path / "c", keep_last=2)
    save(checkpointer, 1, 2)
    checkpointer.protect([tmp_path / "c" / "step-000000000001"])
    save(checkpointer, 3, 4)
    assert steps(tmp_path / "c") == [1, 3, 4]
    checkpointer.protect([tmp_path / "c" / "step-000000000003"])
    save(checkpointer, 5, 6)
    assert steps(tmp_path / "c") == [3, 5, 6]


def test_nothing_is_removed_before_a_new_one_is_committed(tmp_path: Path) -> None:
    save(Checkpointer(tmp_path / "c"), 1, 2, 3)
    checkpointer = Checkpointer(tmp_path / "c", keep_last=2)
    assert checkpointer.newest_valid() is not None
    assert steps(tmp_path / "c") == [1, 2, 3]
    save(checkpointer, 4)
    assert steps(tmp_path / "c") == [3, 4]


def test_a_damaged_one_is_not_counted_and_not_removed(tmp_path: Path) -> None:
    save(Checkpointer(tmp_path / "c"), 1, 2, 3)
    (tmp_path / "c" / "step-000000000003" / "main.safetensors").write_bytes(b"")
    content = bytearray((tmp_path / "c" / "step-000000000002" / "state.json").read_bytes())
    content[-3] ^= 1
    (tmp_path / "c" / "step-000000000002" / "state.json").write_bytes(content)
    save(Checkpointer(tmp_path / "c", keep_last=2), 4)
    assert steps(tmp_path / "c") == [1, 2, 3, 4]


def test_the_one_just_saved_stays_where_older_ones_have_higher_steps(tmp_path: Path) -> None:
    save(Checkpointer(tmp_path / "c"), 10, 20, 30)
    save(Checkpointer(tmp_path / "c", keep_last=2), 11)
    assert steps(tmp_path / "c") == [11, 20, 30]


def test_what_a_link_leads_to_stays(tmp_path: Path) -> None:
    save(Checkpointer(tmp_path / "elsewhere"), 1)
    save(Checkpointer(tmp_path / "c"), 2, 3)
    (tmp_path / "c" / "step-000000000001").symlink_to(tmp_path / "elsewhere" / "step-000000000001")
    save(Checkpointer(tmp_path / "c", keep_last=2), 4, 5)
    assert (tmp_path / "elsewhere" / "step-000000000001" / "main.safetensors").is_file()


def test_one_is_renamed_before_any_of_it_is_removed_and_only_after_the_new_one_is_on_disk(tmp_path: Path) -> None:
    disk = Recorder()
    save(Checkpointer(tmp_path / "c", keep_last=2, disk=disk), 1, 2, 3)
    end = [(each.name, each.path.name.partition("-")[0]) for each in disk.operations[-5:]]
    assert end == [
        ("rename", ".tmp"),
        ("fsync_folder", "c"),
        ("rename", "step"),
        ("fsync_folder", "c"),
        ("remove", ".del"),
    ]


def test_one_that_cannot_be_removed_is_told_and_the_save_counts(tmp_path: Path, log_lines: list[str]) -> None:
    class Refusing(Recorder):
        def remove(self, path: Path) -> None:
            raise PermissionError(13, "Permission denied")

    checkpointer = Checkpointer(tmp_path / "c", keep_last=2, disk=Refusing())
    save(checkpointer, 1, 2, 3)
    assert [path.name[-1] for path in checkpointer.poll()] == ["1", "2", "3"]
    assert any("step-000000000001: cannot be removed (Permission denied); what is left" in line for line in log_lines)
