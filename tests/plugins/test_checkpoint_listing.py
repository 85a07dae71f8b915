"""What checkpoints say of themselves, also where they are strange or vanish meanwhile."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from pipeline_plugins.shared import checkpoint_listing as listing
from torch import nn

from pipeline.brain.checkpointer import Checkpointer
from pipeline.checkpoint import layout
from pipeline.errors import ConfigError


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of phase 'main' at iteration 12."""
    models = {"main": {"model": nn.Linear(2, 1)}}
    return Checkpointer(tmp_path / "checkpoints").save(models, {"iteration": 12}, {"main": {"loss": 0.25}})


def rewritten(checkpoint: Path, state: object) -> listing.Checkpoint:
    """A checkpoint with another ``state.json``, which its manifest lists."""
    content = json.dumps(state).encode()
    (checkpoint / "state.json").write_bytes(content)
    files = layout.read_manifest(checkpoint) | {"state.json": layout.file_entry(content)}
    (checkpoint / layout.MANIFEST).write_bytes(layout.encode_manifest(files))
    return listing.describe_checkpoint(checkpoint)


def test_a_checkpoint_describes_itself(saved: Path) -> None:
    found = listing.describe_checkpoint(saved)
    assert (found.step, found.counters, found.metrics) == (12, {"iteration": 12}, {"main": {"loss": 0.25}})
    assert found.size == sum((saved / name).stat().st_size for name in ("main.safetensors", "state.json"))
    assert not found.problem


@pytest.mark.parametrize(
    "state", [[], {}, {"train_state": {}, "metrics": {}}, {"train_state": {"iteration": "1"}, "metrics": {}},
              {"train_state": {"iteration": 12}, "metrics": {"main": 3}}, {"train_state": None, "metrics": {}}]
)  # fmt: skip
def test_counters_that_make_no_sense_are_a_problem_of_that_checkpoint(saved: Path, state: object) -> None:
    found = rewritten(saved, state)
    assert f"{saved}/state.json: makes no sense" in found.problem
    assert found.step == 12


def test_the_folders_of_a_run_whose_checkpoints_go_elsewhere_are_found(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere" / "stamp").mkdir(parents=True)
    saved.parent.rename(tmp_path / "elsewhere" / "stamp" / "train")
    assert listing.checkpoint_folders(tmp_path / "elsewhere" / "stamp") == [tmp_path / "elsewhere" / "stamp" / "train"]


def test_a_checkpoint_that_is_removed_while_it_is_looked_at_is_not_listed(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = saved.with_name("step-000000000009")
    names = sorted([*os.listdir(saved.parent), gone.name])
    monkeypatch.setattr(os, "listdir", lambda _: names)
    assert [each.path for each in listing.list_checkpoints(saved.parent)] == [saved]


def test_of_an_experiment_or_weights_alone_no_best_is_known(saved: Path) -> None:
    assert [each.best for each in listing.list_checkpoints(saved.parent)] == [False]


def test_a_link_to_a_run_directory_is_followed(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    saved.parent.rename(tmp_path / "run" / "checkpoints")
    (tmp_path / "latest").symlink_to("run")
    assert listing.choose_checkpoint(tmp_path / "latest") == tmp_path / "latest" / "checkpoints" / saved.name


def test_a_folder_with_links_to_runners_alone_has_no_checkpoints(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "link").symlink_to(saved.parent)
    with pytest.raises(ConfigError, match=r"other: has no checkpoints; name a run directory"):
        listing.checkpoint_folders(tmp_path / "other")
