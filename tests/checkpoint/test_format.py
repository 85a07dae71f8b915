"""A checkpoint whose training state has another format: what refuses it, and what still reads it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from torch import Tensor

import pipeline as package
from pipeline import Checkpointer, GeneralTrainer
from pipeline.checkpoint.reader import read_checkpoint
from pipeline.checkpoint.state import VERSION, TrainingState
from pipeline.errors import FormatError
from pipeline.testing import Workspace, write_files
from tests.checkpoint.test_damaged_state import BATCHES, Fitted, experimented, net, rewrite
from tests.checkpoint.test_rank_files import restored, save
from tests.distributed.ranks import Ranks

Call = Callable[..., Result]

OLD = VERSION - 1
KEEP_BEST = "runner.train_runner.keep_best={metric: valid_loss, mode: min}"


def set_format(checkpoint: Path, number: Any = OLD) -> None:
    """Change the format number of a checkpoint, which stays valid."""
    training = read_checkpoint(checkpoint).training
    rewrite(checkpoint, {**training, "version": number})


def message(checkpoint: Path) -> str:
    return (
        f"{checkpoint}: its training state has format {OLD}, and this version of pipeline reads format {VERSION}; "
        f"resume it with the version that saved it, or start a new run with init_model_path: {checkpoint} "
        "(its weights can still be loaded)"
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder for checkpoints."""
    return tmp_path / "checkpoints"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


INTERRUPT = """
    from pipeline import hookimpl

    class Plugin:
        @hookimpl
        def before_batch(self, context):
            if context["train_state"]["iteration"] == 9:
                raise KeyboardInterrupt
"""
INTERRUPTED = ["runner.train_runner.save_interval=4", 'plugins=["{workspace}/interrupt.py"]']


@pytest.fixture
def interrupted(linear: Path) -> Path:
    """The checkpoints of a run that was interrupted after those of iterations 4 and 8."""
    write_files(linear.parent, {"interrupt.py": INTERRUPT})
    with pytest.raises(KeyboardInterrupt):
        GeneralTrainer(linear, INTERRUPTED).run()
    return Path("runs/workspace/latest/train_runner/checkpoints").resolve()


@pytest.mark.parametrize("number", [1, OLD, VERSION + 1, float(VERSION), True, str(VERSION), None, [VERSION]])
def test_state_of_another_format_is_refused_with_its_number(number: Any) -> None:
    tree = TrainingState.capture({}, {}, None).to_tree()
    with pytest.raises(FormatError) as caught:
        TrainingState.from_tree({**tree, "version": number}, "here")
    shown = "list of 1" if isinstance(number, list) else repr(number)
    assert f"here: its training state has format {shown}, and this" in str(caught.value)


def test_state_without_a_number_has_format_1() -> None:
    tree = TrainingState.capture({}, {}, None).to_tree()
    del tree["version"]
    with pytest.raises(FormatError, match="has format 1, and this version of pipeline reads"):
        TrainingState.from_tree(tree, "here")


# What continues a training ends with the error, and moves nothing.


def test_resumed_run_is_refused_and_no_older_checkpoint_used(linear: Path, interrupted: Path) -> None:
    newest = interrupted / "step-000000000008"
    set_format(newest)
    with pytest.raises(FormatError) as caught:
        GeneralTrainer(linear, INTERRUPTED, resume=interrupted.parents[1]).run()
    assert str(caught.value) == message(newest)
    assert names(interrupted) == ["step-000000000004", "step-000000000008"]


def test_run_resumed_from_an_older_checkpoint_is_refused(linear: Path, interrupted: Path) -> None:
    run_dir = interrupted.parents[1]
    older = interrupted / "step-000000000004"
    set_format(older)
    before = names(run_dir / "train_runner")
    with pytest.raises(FormatError) as caught:
        GeneralTrainer(linear, INTERRUPTED, resume=older).run()
    assert str(caught.value) == message(older)
    assert names(interrupted) == ["step-000000000004", "step-000000000008"]
    assert names(run_dir / "train_runner") == before
    assert not list(run_dir.glob("before-*"))


def test_resume_command_exits_with_1_and_the_message(interrupted: Path, pipeline: Call) -> None:
    newest = interrupted / "step-000000000008"
    set_format(newest)
    result = pipeline("resume", interrupted.parents[1])
    assert result.exit_code == 1
    assert message(newest) in result.stderr


def fitted(folder: Path) -> Fitted:
    return Fitted({"net": net()}, torch.optim.Adam, checkpointer=Checkpointer(folder))


def test_fit_is_refused_and_no_older_checkpoint_used(folder: Path) -> None:
    fitted(folder).fit([1, 2], BATCHES)
    before = names(folder)
    newest = folder / before[-1]
    set_format(newest)
    with pytest.raises(FormatError) as caught:
        fitted(folder).fit([1, 2, 3], BATCHES)
    assert str(caught.value) == message(newest)
    assert names(folder) == before


def test_experiment_is_refused_and_no_older_checkpoint_used(tmp_path: Path) -> None:
    checkpoints = experimented(tmp_path).checkpointer.all()
    set_format(checkpoints[-1])
    with pytest.raises(FormatError):
        experimented(tmp_path)
    assert names(tmp_path / "checkpoints") == [path.name for path in checkpoints]


class Count:
    def state_dict(self) -> dict[str, int]:
        return {"count": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise AssertionError(state)


def test_recover_if_possible_is_refused_for_recoverables(folder: Path) -> None:
    for _ in range(2):
        Checkpointer(folder, {"count": Count()}).save_checkpoint()
    before = names(folder)
    set_format(folder / before[-1])
    with pytest.raises(FormatError):
        Checkpointer(folder, {"count": Count()}).recover_if_possible()
    assert names(folder) == before


def refused(folder: Path) -> str:
    try:
        restored(folder)
    except FormatError as error:
        return str(error)
    return ""


def test_every_rank_is_refused(two_ranks: Ranks, folder: Path) -> None:
    two_ranks(save, folder)
    [name] = names(folder)
    set_format(folder / name)
    assert two_ranks(refused, folder) == [message(folder / name)] * 2


# What needs the weights alone takes them.


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the best checkpoint at iteration 12; the checkpoints have the old format, and are only read."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        config = Workspace(folder / "workspace").config
        run_dir: Path = GeneralTrainer(config, [KEEP_BEST, "runner.train_runner.save_interval=6"]).run()["run_dir"]
    for checkpoint in run_dir.glob("train_runner/checkpoints/*"):
        set_format(checkpoint)
    return run_dir.resolve()


def weights_of(run_dir: Path) -> Tensor:
    newest = run_dir / "train_runner" / "checkpoints" / "step-000000000012"
    return read_checkpoint(newest, with_training=False).weights["line"]["weight"]


@pytest.mark.parametrize("which", ["step", "folder", "run", "best"])
def test_init_model_path_loads_weights(finished: Path, tmp_path: Path, which: str) -> None:
    checkpoints = finished / "train_runner" / "checkpoints"
    paths = {
        "step": checkpoints / "step-000000000012",
        "folder": checkpoints,
        "run": f"{{run: {finished}}}",
        "best": f"{{run: {finished}, which: best}}",
    }
    settings = [f"runner.train_runner.init_model_path={paths[which]}", "runner.train_runner.max_steps=1"]
    rate = "hyper_parameters.optimizer.learning_rate=0.0"
    context = GeneralTrainer(Workspace(tmp_path / "new").config, [*settings, rate]).run()
    assert torch.equal(context["model"]["line"]["model"].weight, weights_of(finished))


def test_loaded_model_has_the_best_weights(finished: Path) -> None:
    model = package.load(finished)
    assert torch.equal(model.model.weight, weights_of(finished))


def test_checkpointer_without_recoverables_loads_weights(folder: Path) -> None:
    brain = fitted(folder)
    brain.fit([1], BATCHES)
    [name] = names(folder)
    set_format(folder / name)
    other = fitted(folder)
    torch.nn.init.zeros_(other.modules["net"].weight)
    other.evaluate(BATCHES)
    assert torch.equal(other.modules["net"].weight, brain.modules["net"].weight)


@pytest.mark.parametrize("command", ["predict", "checkpoint export"])
def test_command_takes_the_best_weights(finished: Path, pipeline: Call, command: str) -> None:
    suffix = "jsonl" if command == "predict" else "safetensors"
    result = pipeline(*command.split(), finished, "-o", f"out.{suffix}")
    assert result.exit_code == 0, result.output
    assert Path(f"out.{suffix}").stat().st_size > 0


# What only describes runs and checkpoints shows them.


@pytest.mark.parametrize("command", ["ls", "show", "verify"])
def test_checkpoint_command_shows_the_checkpoint(finished: Path, pipeline: Call, command: str) -> None:
    result = pipeline("checkpoint", command, finished)
    assert result.exit_code == 0, result.output
    assert "12" in result.stdout


def test_checkpoint_ls_marks_the_best(finished: Path, pipeline: Call) -> None:
    lines = pipeline("checkpoint", "ls", finished).stdout.splitlines()
    assert lines[-1].endswith("newest, best")


def test_checkpoint_diff_names_the_format(finished: Path, tmp_path: Path, pipeline: Call) -> None:
    newest = finished / "train_runner" / "checkpoints" / "step-000000000012"
    other = shutil.copytree(newest, tmp_path / newest.name)
    set_format(other, VERSION)
    result = pipeline("checkpoint", "diff", newest, other)
    assert (result.exit_code, result.stdout) == (1, f"training: version: {OLD} and {VERSION}\n")


def test_run_commands_show_the_run(finished: Path, pipeline: Call) -> None:
    listed = pipeline("runs", finished)
    assert listed.exit_code == 0, listed.output
    assert "done" in listed.stdout
    compared = pipeline("compare", finished, finished)
    assert "config, code and environment are equal" in compared.stdout
