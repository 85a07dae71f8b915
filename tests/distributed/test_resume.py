"""A run that is resumed on as many ranks comes to the same bits, on another number of them to the same but for rounding."""

from __future__ import annotations

from collections.abc import Iterable
from errno import ENOSPC
from pathlib import Path
from shutil import copytree

import pytest
import torch

from pipeline import GeneralTrainer
from pipeline.checkpoint import layout, reader
from pipeline.checkpoint.storage import Buffer, Disk
from pipeline.errors import PipelineError
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


@pytest.mark.slow
def test_another_number_of_ranks_goes_on(two_ranks: Ranks, three_ranks: Ranks, config: Path) -> None:
    straight = two_ranks(run_job, config, config.parent / "straight")[0]
    for name, ranks in {"one": None, "three": three_ranks}.items():
        resumed = go_on(straight, ranks, config, name)
        assert_same_training(resumed, straight)


def test_several_ranks_go_on_with_a_run_of_one(two_ranks: Ranks, config: Path) -> None:
    straight = run_job(config, config.parent / "straight")
    assert_same_training(go_on(straight, two_ranks, config, "two"), straight)


@pytest.mark.slow
def test_fewer_ranks_go_on(two_ranks: Ranks, three_ranks: Ranks, config: Path) -> None:
    straight = three_ranks(run_job, config, config.parent / "straight")[0]
    assert_same_training(go_on(straight, two_ranks, config, "two"), straight)


class FullDisk:
    """In the block, this rank cannot write its file of iteration 4."""

    def __enter__(self) -> None:
        self.write = Disk.write

        def write(disk: Disk, path: Path, parts: Iterable[Buffer]) -> int:
            if path.name.startswith("rank-") and "step-000000000004" in path.parent.name:
                raise OSError(ENOSPC, "No space left on device")
            return self.write(disk, path, parts)

        Disk.write = write  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        Disk.write = self.write  # type: ignore[method-assign]


def run_on_full_disk(config: Path, folder: Path, on_error: str) -> tuple[str, str]:
    """The run directory, or the error, of a run in which the disk of rank 1 is full at iteration 4."""
    with FullDisk():
        overrides = [*JOB, f"output_dir={folder}", f"runner.train.on_save_error={on_error}"]
        try:
            return "", str(GeneralTrainer(config, overrides).run()["run_dir"])
        except PipelineError as error:
            return f"{error.exit_code:d} {error}", ""


def test_where_the_disk_of_one_rank_is_full_all_go_on_without_that_checkpoint(two_ranks: Ranks, config: Path) -> None:
    first, second = two_ranks(run_on_full_disk, config, config.parent / "warned", "warn")
    assert first == second
    checkpoints = layout.committed_checkpoints(Path(first[1], "train", "checkpoints"))
    assert [layout.step_of(path) for path in checkpoints] == [8, 12, 15]
    assert not layout.leftovers(checkpoints[0].parent)


def test_where_the_disk_of_one_rank_is_full_all_fail(config: Path) -> None:
    ranks = Ranks(2)
    try:
        first, second = ranks(run_on_full_disk, config, config.parent / "failed", "error")
    finally:
        ranks.stop()
    assert first[0].startswith("74 rank 1: ")
    assert "No space left on device" in first[0]
    assert second[0].startswith("74 ")


def run_and_ask(config: Path, folder: Path) -> tuple[list[int | None], str, str]:
    """What each rank finds of the checkpoints of a run that keeps two of them and the best."""
    own = ["runner.train.keep_last=2", "runner.train.keep_best={metric: valid_mae, mode: min}"]
    exported = "runner.train.save_inference_interval=1"
    context = GeneralTrainer(config, [*JOB, *own, exported, f"output_dir={folder}"]).run()
    saver = context["checkpointer"]
    best = saver.best("valid_mae", "min")
    return [layout.step_of(path) for path in saver.all()], str(saver.newest()), str(best)


def test_all_ranks_find_the_same_checkpoints(two_ranks: Ranks, config: Path) -> None:
    first, second = two_ranks(run_and_ask, config, config.parent / "found")
    assert first == second
    assert first[0][-2:] == [12, 15]
    [run_dir] = [path for path in (config.parent / "found").glob("*/2*") if path.is_dir()]
    exported = sorted(path.name for path in (run_dir / "train" / "inference").iterdir())
    assert exported == [f"waves-{iteration:012d}.safetensors" for iteration in (5, 10, 15)]


def limited(config: Path, folder: Path, *limits: int) -> str:
    """The run directory of a job that is run up to each of these steps in turn, on this rank."""
    resume = "never"
    for steps in limits:
        overrides = [
            *JOB,
            f"output_dir={folder}",
            f"runner.train.max_steps={steps}",
            "runner.train.save_interval=1 epoch",
        ]
        trainer = GeneralTrainer(config, overrides, resume)
        resume = str(trainer.run()["run_dir"])
    return resume


@pytest.mark.slow
def test_limit_inside_epoch_resumes_exactly_on_two_ranks(two_ranks: Ranks, config: Path) -> None:
    unbroken = two_ranks(limited, config, config.parent / "unbroken", 10)[0]
    resumed = two_ranks(limited, config, config.parent / "limited", 4, 10)[0]
    assert_same_bits(resumed, unbroken)
