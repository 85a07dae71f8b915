"""Damaged checkpoints; the long version is ``tests/faults/checkpoint_corruption.py``."""

from __future__ import annotations

import os
from pathlib import Path

import checkpoint_corruption as corruption
import pytest
import torch
from checkpoint_disks import Recorder
from checkpoint_power import models, number_of

from pipeline.brain.checkpointer import Checkpointer
from pipeline.checkpoint.reader import problems_of
from pipeline.errors import ExitCode, NoCheckpointError


def test_whatever_is_damaged_is_detected_named_and_set_aside_and_the_one_before_is_used(tmp_path: Path) -> None:
    counts = corruption.sweep(tmp_path, flips=8)
    assert counts["damaged"] > 80
    assert len(set(counts.values())) == 1


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Checkpoints of steps 1 and 2, numbered so."""
    corruption.two_checkpoints(tmp_path / "checkpoints")
    return tmp_path / "checkpoints"


def damage(path: Path) -> None:
    corruption.flip(path / "main.safetensors", 200, 3)


def test_the_log_says_which_was_set_aside_why_and_what_is_used(folder: Path, log_lines: list[str]) -> None:
    damage(folder / "step-000000000002")
    Checkpointer(folder).store.newest_valid()
    [line] = [line for line in log_lines if line.startswith("WARNING")]
    assert "step-000000000002/main.safetensors: is damaged: its SHA-256 is not" in line
    assert line.endswith("and the one before it is used\n")
    assert next(folder.glob(".bad-*")).name in line


def test_where_all_are_damaged_it_is_an_error_also_the_next_time(folder: Path) -> None:
    for path in list(folder.iterdir()):
        damage(path)
    for _ in range(2):
        message = "checkpoints: none of its 2 checkpoints is valid; bring one back from a copy, or begin a new run"
        with pytest.raises(NoCheckpointError, match=message) as caught:
            Checkpointer(folder).store.newest_valid()
    assert caught.value.exit_code == ExitCode.NO_CHECKPOINT == 78


def test_where_nothing_was_ever_committed_there_is_none(tmp_path: Path) -> None:
    assert Checkpointer(tmp_path / "none").store.newest_valid() is None
    (tmp_path / "some" / ".tmp-step-000000000001-0123abcd").mkdir(parents=True)
    assert Checkpointer(tmp_path / "some").store.newest_valid() is None
    assert list((tmp_path / "some").iterdir()) == []


def test_only_leftovers_of_our_own_names_are_removed(folder: Path) -> None:
    names = [".tmp-mine", ".del-step-1-x", ".bad-step-000000000007-0123abcd", "step-best", "notes"]
    for name in [*names, ".tmp-step-000000000003-0123abcd", ".del-step-000000000003.new-0123abcd"]:
        (folder / name).mkdir()
    Checkpointer(folder).store.newest_valid()
    assert {path.name for path in folder.iterdir()} == {"step-000000000001", "step-000000000002", *names}


def test_a_leftover_that_is_a_link_is_removed_and_what_it_leads_to_stays(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (folder / ".tmp-step-000000000003-0123abcd").symlink_to(tmp_path / "kept")
    Checkpointer(folder).store.newest_valid()
    assert (tmp_path / "kept").is_dir()
    assert len(list(folder.iterdir())) == 2


def test_a_checkpoint_that_is_a_link_or_of_another_step_is_set_aside(folder: Path) -> None:
    (folder / "step-000000000008").symlink_to(folder / "step-000000000001")
    (folder / "step-000000000002").rename(folder / "step-000000000009")
    assert number_of(Checkpointer(folder)) == 1
    assert len(list(folder.glob(".bad-*"))) == 2


def test_the_highest_step_is_the_newest_whatever_the_clock_said(folder: Path) -> None:
    (folder / "step-000000000001").touch()
    for path in [folder / "step-000000000002", *(folder / "step-000000000002").iterdir()]:
        os.utime(path, (1, 1))
    assert number_of(Checkpointer(folder)) == 2


def test_what_is_saved_after_one_was_set_aside_counts_on(folder: Path) -> None:
    damage(folder / "step-000000000002")
    checkpointer = Checkpointer(folder, keep_last=2)
    assert number_of(checkpointer) == 1
    checkpointer.save(models(5), {"iteration": 2}, {"main": {"number": 5}}, {"number": 5})
    assert number_of(checkpointer) == 5


def test_a_checkpoint_read_gives_every_part_as_it_was_saved(folder: Path) -> None:
    found = Checkpointer(folder).store.newest_valid()
    assert found
    assert (found.path.name, found.train_state, found.metrics) == (
        "step-000000000002",
        {"iteration": 2},
        {"main": {"number": 2}},
    )
    assert found.training
    assert (found.training["number"], found.training["list"]) == (2, [1.5, (2, None)])
    assert torch.equal(found.weights["main"]["weight"], torch.full((2, 2), 2.0))


def test_weights_alone_load_where_only_the_training_state_is_damaged(folder: Path) -> None:
    path = folder / "step-000000000002"
    corruption.flip(path / "training.safetensors", 100, 3)
    target = models(0)
    Checkpointer(folder).load_weights(path, target)
    assert torch.equal(target["main"]["model"].weight, torch.full((2, 2), 2.0))


def test_all_that_is_wrong_with_a_checkpoint_is_told(folder: Path) -> None:
    path = folder / "step-000000000002"
    damage(path)
    (path / "state.json").unlink()
    weights, state = problems_of(path)
    assert weights.startswith(f"{path}/main.safetensors: is damaged: its SHA-256 is not that of the manifest")
    assert state.startswith(f"{path}/state.json: is missing or no regular file")
    assert problems_of(folder / "step-000000000001") == []


def test_where_a_damaged_one_cannot_be_renamed_the_one_before_is_used_all_the_same(
    folder: Path, log_lines: list[str]
) -> None:
    class ReadOnly(Recorder):
        def rename(self, source: Path, target: Path) -> None:
            raise OSError(30, "Read-only file system")

    damage(folder / "step-000000000002")
    assert number_of(Checkpointer(folder, disk=ReadOnly())) == 1
    assert any("it cannot be renamed (Read-only file system)" in line for line in log_lines)
