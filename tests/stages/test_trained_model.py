"""A trained model, back in Python: the weights of the run, its code, and nothing else than these."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import pipeline
from pipeline import Context, GeneralTrainer
from pipeline.errors import CheckpointError, ConfigError

Workspace = Callable[..., Path]
BEST = "runner.train_runner.keep_best={metric: valid_loss, mode: min}"
TWO = "phase=[{name: one, model: '{workspace}/net.py', loss: torch.nn.functional.mse_loss, dataset_name: train_data}, {name: two, model: '{workspace}/net.py', loss: torch.nn.functional.mse_loss, dataset_name: train_data}]"
NET = """
    import torch

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.line, self.drop = torch.nn.Linear(1, 1), torch.nn.Dropout(0.5)

        def forward(self, x):
            return self.line(self.drop(x))
"""


def run(config: Path, *overrides: str) -> Context:
    return GeneralTrainer(config, overrides).run()


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("which", ["best", "last", 12])
def test_the_weights_are_those_of_the_run(which: str | int, linear: Path) -> None:
    context = run(linear, BEST)
    trained = pipeline.load("runs/workspace/latest", which)
    assert torch.equal(trained.model.weight, context["model"]["line"]["model"].weight)
    assert trained.brain.modules["model"] is trained.model
    assert trained.config.get("runner.train_runner.epochs") == 2


def test_an_earlier_iteration_has_the_weights_of_its_checkpoint(linear: Path) -> None:
    expected = run(linear, "runner.train_runner.epochs=1")["model"]["line"]["model"].weight
    run_dir = run(linear)["run_dir"]
    path = run_dir / "train_runner" / "checkpoints" / "step-000000000006"
    assert torch.equal(pipeline.load(run_dir, 6).model.weight, expected)
    assert torch.equal(pipeline.load(path).model.weight, expected)


def test_predictions_are_those_of_the_weights_without_dropout(linear: Path, workspace: Workspace) -> None:
    workspace({"net.py": NET})
    model = run(linear, "phase.line.model={workspace}/net.py", "phase.line.model_args={}")["model"]["line"]["model"]
    trained = pipeline.load("runs/workspace/latest", "last")
    x = torch.randn(5, 1)
    [predictions] = trained.predict([x])
    assert torch.equal(predictions, x * model.line.weight.detach() + model.line.bias.detach())
    assert not trained.model.training
    assert not predictions.requires_grad


def test_nothing_is_written_and_random_states_stay(linear: Path) -> None:
    run_dir = run(linear)["run_dir"]
    before, states = files(Path.cwd()), (torch.get_rng_state(), random.getstate())
    pipeline.load(run_dir, "last")
    assert files(Path.cwd()) == before
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]


def test_without_keep_best_the_best_is_an_error_that_names_the_way_out(linear: Path) -> None:
    run(linear)
    with pytest.raises(CheckpointError, match=r"has no keep_best, so none of its checkpoints is the best; .*`last`"):
        pipeline.load("runs/workspace/latest", "best")


def test_load_without_keep_best_takes_the_newest(linear: Path, log_lines: list[str]) -> None:
    run(linear)
    trained = pipeline.load("runs/workspace/latest")
    assert trained.checkpoint.name == "step-000000000012"
    assert any("is taken: the newest checkpoint, since" in line for line in log_lines)


def test_of_several_phases_one_is_chosen(linear: Path, workspace: Workspace) -> None:
    workspace({"net.py": NET})
    context = run(linear, TWO)
    trained = pipeline.load("runs/workspace/latest", "last")
    assert torch.equal(trained["two"].model.line.weight, context["model"]["two"]["model"].line.weight)
    with pytest.raises(ConfigError, match=r"is of the phases one, two; choose one: \[…\]\['one'\]"):
        _ = trained.model


def test_a_workspace_that_has_moved_is_named(linear: Path, workspace: Workspace) -> None:
    workspace({"net.py": NET})
    expected = run(linear, "phase.line.model={workspace}/net.py", "phase.line.model_args={}")["model"]["line"]["model"]
    moved = shutil.move(linear.parent, linear.parent.with_name("new 'place'"))
    with pytest.raises(
        ConfigError, match=r"workspace .*/workspace is not there any more; say where it is now: workspace=…"
    ):
        pipeline.load("runs/workspace/latest", "last")
    trained = pipeline.load("runs/workspace/latest", "last", workspace=moved)
    assert torch.equal(trained.model.line.weight, expected.line.weight)


def test_a_checkpoint_alone_needs_the_config(linear: Path) -> None:
    context = run(linear)
    copy = shutil.copytree(context["checkpointer"].newest(), "best")
    with pytest.raises(ConfigError, match=r"best: is no run directory.*workspace=…"):
        pipeline.load(copy)
    for where in (linear, linear.parent):
        assert torch.equal(pipeline.load(copy, workspace=where).model.weight, context["model"]["line"]["model"].weight)


def test_code_that_has_changed_is_used_and_the_log_says_so(
    linear: Path, workspace: Workspace, log_lines: list[str]
) -> None:
    workspace({"net.py": NET})
    run(linear, "phase.line.model={workspace}/net.py", "phase.line.model_args={}")
    workspace({"net.py": NET.replace("0.5", "0.25")})
    assert pipeline.load("runs/workspace/latest", "last").model.drop.p == 0.25
    assert any("net.py: is not as it was" in line for line in log_lines)


def test_load_after_an_edit_names_the_copy_of_the_code(
    linear: Path, workspace: Workspace, log_lines: list[str]
) -> None:
    """The weights do not fit the new code, and do fit the copy that the log names."""
    workspace({"net.py": NET})
    run(linear, "phase.line.model={workspace}/net.py", "phase.line.model_args={}")
    workspace({"net.py": NET.replace("Linear(1, 1)", "Linear(1, 2)")})
    with pytest.raises(CheckpointError):
        pipeline.load("runs/workspace/latest", "last")
    copy = Path("runs/workspace/latest/workspace").absolute()
    assert any(f"load(…, workspace={str(copy)!r})" in line for line in log_lines)
    log_lines.clear()
    trained = pipeline.load("runs/workspace/latest", "last", workspace=copy)
    assert trained.model.line.out_features == 1
    assert not any("workspace=" in line for line in log_lines)


def test_a_run_directory_that_others_may_write_to_is_refused(linear: Path) -> None:
    run_dir = run(linear)["run_dir"]
    (run_dir / "config.yaml").chmod(0o666)
    with pytest.raises(ConfigError, match=r"config\.yaml: others may write to it, and it names code to run"):
        pipeline.load(run_dir, "last")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_a_run_directory_of_somebody_else_is_refused(linear: Path) -> None:
    run_dir = run(linear)["run_dir"]
    os.chown(run_dir, 65534, -1)
    with pytest.raises(ConfigError, match="belongs to user 65534, and names code to run"):
        pipeline.load(run_dir, "last")


def test_a_damaged_checkpoint_is_left_out_and_stays_where_it_is(linear: Path, log_lines: list[str]) -> None:
    context = run(linear)
    newest = context["checkpointer"].newest()
    with (newest / "line.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    trained = pipeline.load(context["run_dir"], "last")
    assert trained.checkpoint.name == "step-000000000006"
    assert newest.is_dir()
    assert any("SHA-256" in line for line in log_lines)


def test_the_model_of_a_network_stage_of_ones_own_is_built_by_it(linear: Path, workspace: Workspace) -> None:
    workspace(
        {
            "own.py": """
            import torch
            from pipeline import stages

            class Network(stages.Network):
                def build_model(self, phase, context):
                    assert len(context["dataset"]["train_data"]) == 6
                    return torch.nn.Linear(1, 1, bias=False)
            """
        }
    )
    context = run(linear, "runner.train_runner.network_class_path={workspace}/own.py")
    trained = pipeline.load("runs/workspace/latest", "last")
    assert torch.equal(trained.model.weight, context["model"]["line"]["model"].weight)
    assert trained.model.bias is None


def test_a_model_that_a_plugin_wraps_is_wrapped_and_no_other_plugin_is_built(
    linear: Path, workspace: Workspace
) -> None:
    workspace(
        {
            "wrap.py": """
            import torch
            from pipeline import hookimpl

            class Plugin:
                @hookimpl
                def wrap_model(self, model):
                    return torch.nn.Sequential(model, torch.nn.Linear(1, 1))

            class Loud:
                def __init__(self):
                    with open("built", "a") as file:
                        file.write(".")

                @hookimpl
                def before_epoch(self):
                    pass
            """
        }
    )
    context = run(linear, 'plugins=["{workspace}/wrap.py", "{workspace}/wrap.py:Loud"]')
    trained = pipeline.load("runs/workspace/latest", "last")
    assert torch.equal(trained.model[1].weight, context["model"]["line"]["model"][1].weight)
    assert Path("built").read_text() == "."
