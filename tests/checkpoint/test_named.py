"""What ``init_model_path`` names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipeline.checkpoint.checkpointer import Checkpointer
from pipeline.checkpoint.initial_weights import Trained, first_valid, read, resolve
from pipeline.config.schema import BestSettings
from pipeline.errors import CheckpointError, ExitCode, NoCheckpointError

LOWEST = BestSettings(metric="valid_loss", mode="min")


def model(fill: float) -> dict[str, Any]:
    linear = nn.Linear(2, 1)
    nn.init.constant_(linear.weight, fill)
    return {"main": {"model": linear}}


def saved(folder: Path, *iterations: int, losses: tuple[float, ...] = (), best: Any = None) -> list[Path]:
    """Checkpoints whose weights are their iterations; ``best``: the pairs of number and iteration that are kept."""
    paths = []
    for iteration, loss in zip(iterations, losses or iterations, strict=True):
        training = {} if best is None else {"loop": {"validation": {"best": {"kept": best}}}}
        numbers = {"main": {"valid_loss": float(loss)}}
        checkpointer = Checkpointer(folder)
        paths.append(checkpointer.save(model(iteration), {"iteration": iteration}, numbers, training))
    return paths


def damage(path: Path) -> None:
    file = path / "main.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def weight(found: Any) -> float:
    value: float = found.weights["main"]["weight"][0, 0].item()
    return value


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory; the checkpoints of its runner ``train`` are of iterations 5 and 10, saved in the other order."""
    saved(tmp_path / "run" / "train" / "checkpoints", 10, 5)
    (tmp_path / "run" / "infer").mkdir()
    return tmp_path / "run"


@pytest.mark.parametrize("below", ["train/checkpoints", "train", "."])
def test_a_folder_of_checkpoints_a_runner_and_a_run_name_each_checkpoint_in_step_order(run: Path, below: str) -> None:
    folder = run / "train" / "checkpoints"
    assert resolve(run / below) == [folder / "step-000000000005", folder / "step-000000000010"]


@pytest.mark.parametrize(
    "name", ["train/checkpoints/step-000000000005", "train/checkpoints/step-000000000005/main.safetensors"]
)
def test_a_checkpoint_and_a_file_name_themselves(run: Path, name: str) -> None:
    assert resolve(run / name) == [run / name]


def test_a_checkpoint_under_another_name_is_one_still(run: Path) -> None:
    path = (run / "train" / "checkpoints" / "step-000000000005").rename(run / "mine")
    assert resolve(path) == [path]
    assert weight(read(path)) == 5


def test_of_one_and_another_that_was_to_take_its_place_the_first_counts_and_else_the_second(run: Path) -> None:
    folder = run / "train" / "checkpoints"
    saved(folder, 7)
    (folder / "step-000000000007").rename(folder / "step-000000000010.new")
    (folder / "step-000000000005").rename(folder / "step-000000000005.new")
    assert [path.name for path in resolve(folder)] == ["step-000000000005.new", "step-000000000010"]


def test_a_run_of_several_trained_runners_is_refused_with_their_names(run: Path) -> None:
    saved(run / "other" / "checkpoints", 3)
    message = r"run: holds checkpoints of several runners \(other, train\); name the folder of one of them"
    with pytest.raises(CheckpointError, match=message):
        resolve(run)


def test_a_folder_without_checkpoints_is_refused(run: Path) -> None:
    with pytest.raises(CheckpointError, match="infer: holds no checkpoint; name a step-… folder, a folder of them, or"):
        resolve(run / "infer")


def test_a_file_of_weights_is_read_as_one_without_counters(run: Path) -> None:
    found = read(run / "train" / "checkpoints" / "step-000000000005" / "main.safetensors")
    assert (found.train_state, list(found.weights)) == ({}, ["main.safetensors"])
    assert torch.equal(found.weights["main.safetensors"]["weight"], torch.full((1, 2), 5.0))


def test_a_path_to_nothing_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="gone: no such checkpoint; check the path"):
        read(tmp_path / "gone")


def test_what_is_damaged_is_left_out_with_a_warning_and_stays_as_it_is(run: Path, log_lines: list[str]) -> None:
    paths = resolve(run)
    damage(paths[0])
    before = sorted(run.rglob("*"))
    assert first_valid(paths).path == paths[1]
    assert sorted(run.rglob("*")) == before
    assert [line for line in log_lines if line.startswith("WARNING") and "000005/main.safetensors" in line]


def test_where_none_is_valid_it_is_an_error_that_names_them(run: Path) -> None:
    paths = resolve(run)
    for path in paths:
        damage(path)
    message = "checkpoints: none of step-000000000005, step-000000000010 is valid; .*name another in init_model_path"
    with pytest.raises(NoCheckpointError, match=message) as caught:
        first_valid(paths)
    assert caught.value.exit_code == ExitCode.NO_CHECKPOINT


# Of a train runner of the same run


def test_the_newest_of_a_runner_is_the_newest_valid_one_and_damaged_ones_are_set_aside(
    tmp_path: Path, log_lines: list[str]
) -> None:
    folder = tmp_path / "checkpoints"
    damage(saved(folder, 1, 2, 3)[2])
    assert weight(Trained("train", folder, None).newest()) == 2
    assert sorted(path.name[:21] for path in folder.iterdir()) == [
        ".bad-step-00000000000", "step-000000000001", "step-000000000002",
    ]  # fmt: skip
    assert any("000003/main.safetensors" in line and "the one before it is used" in line for line in log_lines)


def test_a_runner_all_of_whose_checkpoints_are_damaged_is_told_so(tmp_path: Path) -> None:
    for path in saved(tmp_path, 1, 2):
        damage(path)
    with pytest.raises(NoCheckpointError, match="none of its 2 checkpoints is valid"):
        Trained("train", tmp_path, None).newest()


def test_the_best_of_a_runner_is_the_one_that_it_kept_though_a_later_one_has_the_same_number(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3, losses=(5, 4, 4), best=[[4.0, 2], [5.0, 1]])
    assert weight(Trained("train", tmp_path, LOWEST).best()) == 2


def test_where_the_best_is_damaged_the_second_best_that_was_kept_is_used(tmp_path: Path, log_lines: list[str]) -> None:
    damage(saved(tmp_path, 1, 2, 3, best=[[4.0, 2], [5.0, 1]])[1])
    assert weight(Trained("train", tmp_path, LOWEST).best()) == 1
    assert any(line.startswith("WARNING") and "000002/main.safetensors" in line for line in log_lines)


def test_where_the_only_best_is_damaged_no_other_is_taken_for_it(tmp_path: Path) -> None:
    damage(saved(tmp_path, 1, 2, 3, best=[[4.0, 2]])[1])
    with pytest.raises(NoCheckpointError, match="none of step-000000000002 is valid"):
        Trained("train", tmp_path, LOWEST).best()


def test_of_a_runner_stage_that_keeps_no_best_the_numbers_of_the_checkpoints_tell_it(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3, losses=(5, 4, 6))
    assert weight(Trained("train", tmp_path, LOWEST).best()) == 2


def test_where_the_number_was_never_one_there_is_no_best(tmp_path: Path) -> None:
    saved(tmp_path, 1, best=[])
    with pytest.raises(CheckpointError, match="'valid_loss' was never a number, so none is the best; name `last`"):
        Trained("train", tmp_path, LOWEST).best()


def test_without_keep_best_there_is_no_best(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"runner.train: has no keep_best, .*; add it"):
        Trained("train", tmp_path, None).best()
