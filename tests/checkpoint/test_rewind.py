"""Setting checkpoints aside that come after a chosen one."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from pipeline.checkpoint.checkpointer import Checkpointer
from pipeline.checkpoint.store import after, set_aside, verify
from pipeline.errors import ExitCode, NoCheckpointError, StorageError


@pytest.fixture
def saved() -> list[Path]:
    """Three checkpoints."""
    checkpointer, models = Checkpointer(Path("checkpoints")), {"p": {"model": nn.Linear(1, 1)}}
    return [checkpointer.save(models, {"iteration": step}, {}) for step in (2, 4, 6)]


def test_those_after_it_are_told_by_step(saved: list[Path]) -> None:
    saved[1].with_name(saved[1].name + ".new").mkdir()
    assert [path.name for path in after(saved[0])] == [
        "step-000000000004",
        "step-000000000004.new",
        "step-000000000006",
    ]


def test_what_is_set_aside_is_read_by_nobody_and_comes_back_by_its_name(saved: list[Path]) -> None:
    aside = set_aside(saved[2])
    checkpointer = Checkpointer(Path("checkpoints"), keep_last=2)
    found = checkpointer.newest_valid()
    assert found is not None
    assert found.path == saved[1]
    checkpointer.save({"p": {"model": nn.Linear(1, 1)}}, {"iteration": 7}, {})
    assert aside.name.startswith(".later-step-000000000006-")
    aside.rename(saved[2])
    assert checkpointer.verify(saved[2]) == []


def test_a_damaged_one_is_named(saved: list[Path]) -> None:
    (saved[1] / "p.safetensors").write_bytes(b"cut")
    with pytest.raises(NoCheckpointError, match=r"step-000000000004/p.safetensors: has 3 bytes, not the") as caught:
        verify(saved[1])
    assert caught.value.exit_code == ExitCode.NO_CHECKPOINT == 78


def test_one_that_cannot_be_renamed_is_a_storage_error(saved: list[Path]) -> None:
    with pytest.raises(StorageError, match=r"step-000000000009: cannot be set aside: No such file"):
        set_aside(saved[0].with_name("step-000000000009"))
