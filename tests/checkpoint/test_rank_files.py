"""Checkpoints of several ranks: who writes what, in which order, and what other numbers of ranks make of it."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn

from pipeline.checkpoint import layout, reader
from pipeline.checkpoint.checkpointer import Checkpointer
from pipeline.distributed.world import current_world
from tests.distributed.ranks import Ranks


def save(folder: Path, *, asynchronous: bool = True, iteration: int = 3) -> list[str]:
    """Save as the loop does; the names of the checkpoints that this rank was told of."""
    torch.manual_seed(0)
    models = {"main": {"model": nn.Linear(2, 1)}}
    torch.manual_seed(current_world().rank)
    saver = Checkpointer(folder, asynchronous=asynchronous)
    saver.save(models, {"iteration": iteration}, {}, saver._capture(models, gradients={"main": {}}).to_tree())
    saver._wait()
    return [path.name for path in saver._poll()]


def test_each_rank_writes_its_own_and_rank_0_the_rest(two_ranks: Ranks, tmp_path: Path) -> None:
    assert two_ranks(save, tmp_path / "saved") == [["step-000000000003"]] * 2
    files = layout.listed_files(tmp_path / "saved/step-000000000003")
    assert [*files] == ["main.safetensors", "rank-00001-of-00002.safetensors", "state.json", "training.safetensors"]
    assert reader.problems_of(tmp_path / "saved/step-000000000003") == []


def test_an_equal_checkpoint_stays_on_all_ranks(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks(save, tmp_path / "saved")
    before = (tmp_path / "saved/step-000000000003").stat().st_ino
    assert two_ranks(save, tmp_path / "saved") == [[], []]
    assert (tmp_path / "saved/step-000000000003").stat().st_ino == before
    assert os.listdir(tmp_path / "saved") == ["step-000000000003"]
