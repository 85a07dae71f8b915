"""How far the runners of a run have come, as its directory shows."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from pipeline.checkpoint.checkpointer import Checkpointer
from pipeline.errors import StorageError
from pipeline.run.directory import RunDirectory, is_done, is_resumable, mark_done


@pytest.fixture
def directory() -> RunDirectory:
    """One of a run with a single runner."""
    return RunDirectory.new(Path("runs"), "config", ["t"])


def test_a_runner_is_done_once_that_is_noted(directory: RunDirectory) -> None:
    assert not is_done(directory, "t")
    mark_done(directory, "t", {"iteration": 3})
    assert is_done(directory, "t")
    assert [path.name for path in (directory.path / "t").iterdir()] == ["done.json"]


@pytest.mark.parametrize("content", ["", '{"iteration"', "\x00\x00"])
def test_a_damaged_note_is_none_and_told(content: str, directory: RunDirectory, log_lines: list[str]) -> None:
    (directory.path / "t/done.json").write_text(content)
    assert not is_done(directory, "t")
    assert "done.json: is damaged" in log_lines[0]
    assert "t goes through its stages again" in log_lines[0]


def test_what_a_killed_process_left_of_a_note_is_replaced(directory: RunDirectory) -> None:
    (directory.path / "t/.done.json.tmp").write_text('{"iter')
    mark_done(directory, "t", {"iteration": 3})
    assert is_done(directory, "t")


def test_a_note_that_cannot_be_written_is_a_storage_error(directory: RunDirectory) -> None:
    with pytest.raises(StorageError, match=r"other/\.done\.json\.tmp: cannot be written: No such file or directory"):
        mark_done(directory, "other", {})


def test_a_run_is_resumable_with_a_checkpoint_or_a_runner_that_is_done(directory: RunDirectory) -> None:
    assert not is_resumable(directory)
    saved = Checkpointer(directory.path / "t/checkpoints").save({"p": {"model": nn.Linear(1, 1)}}, {"iteration": 2}, {})
    assert is_resumable(directory)
    (saved / "p.safetensors").write_bytes(b"cut")
    assert not is_resumable(directory)
    mark_done(directory, "t", {})
    assert is_resumable(directory)
