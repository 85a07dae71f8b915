"""A run that is resumed on as many ranks comes to the same bits, on another number of them to the same but for rounding."""

from __future__ import annotations

from pathlib import Path
from shutil import copytree

import pytest
import torch

from pipeline import GeneralTrainer
from pipeline.checkpoint import reader
from tests.conftest import Workspace
from tests.distributed.ranks import Ranks
from tests.distributed.test_equality import FILES, assert_same_training, numbers, weights

# Saved within an epoch, a window of accumulation and a print interval.
JOB = [
    "runner.train.accum_grad=3", "runner.train.save_interval=4", "runner.train.keep_last=null", "mode=[train]",
    "phase.waves.train_metrics={mae: {class: MAE}}",
]  # fmt: skip


@pytest.fixture
def config(workspace: Workspace) -> Path:
    return workspace(FILES) / "config.yaml"


def run_job(config: Path, folder: Path, resume: str | Path = "never") -> str:
    """Run or resume a job on this rank; the run directory."""
    return str(GeneralTrainer(config, [*JOB, f"output_dir={folder}"], resume).run()["run_dir"])


def go_on(run_dir: str, ranks: Ranks | None, config: Path, name: str) -> str:
    """Resume a copy of a run from iteration 4; its run directory."""
    copy = copytree(run_dir, config.parent / name / "run", symlinks=True)
    checkpoint = copy / "train" / "checkpoints" / "step-000000000004"
    if ranks is None:
        return run_job(config, copy.parent, checkpoint)
    return str(ranks(run_job, config, copy.parent, checkpoint)[0])


def assert_same_bits(run_dir: str, expected: str) -> None:
    theirs = weights(expected)
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in weights(run_dir).items())
    assert numbers(run_dir) == numbers(expected)


def test_two_ranks_go_on_bit_for_bit(two_ranks: Ranks, config: Path) -> None:
    straight = two_ranks(run_job, config, config.parent / "straight")[0]
    resumed = go_on(straight, two_ranks, config, "resumed")
    assert_same_bits(resumed, straight)
    last = [max(Path(own, "train", "checkpoints").glob("step-*")) for own in (resumed, straight)]
    ours, theirs = (reader.read_checkpoint(path) for path in last)
    assert str(ours.own) == str(theirs.own)


def test_another_number_of_ranks_goes_on(two_ranks: Ranks, three_ranks: Ranks, config: Path) -> None:
    straight = two_ranks(run_job, config, config.parent / "straight")[0]
    for name, ranks in {"one": None, "three": three_ranks}.items():
        resumed = go_on(straight, ranks, config, name)
        assert_same_training(resumed, straight)


def test_several_ranks_go_on_with_a_run_of_one(two_ranks: Ranks, config: Path) -> None:
    straight = run_job(config, config.parent / "straight")
    assert_same_training(go_on(straight, two_ranks, config, "two"), straight)


def test_fewer_ranks_go_on(two_ranks: Ranks, three_ranks: Ranks, config: Path) -> None:
    straight = three_ranks(run_job, config, config.parent / "straight")[0]
    assert_same_training(go_on(straight, two_ranks, config, "two"), straight)
