"""``pipeline resume-test`` runs a config straight, and killed and resumed, in real processes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from pipeline import testing

Call = Callable[..., Result]
Workspace = Callable[..., Path]
PLUGIN = """
    from pipeline import hookimpl

    class Plugin:
        def __init__(self, factor):
            self.factor = factor

        @hookimpl
        def before_batch(self, batch):
            batch[0].mul_(self.factor)
"""
COUNTING = """
    import torch
    from pipeline import Brain

    class Model(Brain):
        def __init__(self):
            super().__init__({"net": torch.nn.Linear(1, 1)})
            self.seen = 0

        def compute_forward(self, batch, stage):
            return self.modules.net(batch[0])

        def compute_objectives(self, predictions, batch, stage):
            self.seen += 1
            return torch.nn.functional.mse_loss(predictions, batch[1]) * self.seen
"""
APPENDING = """
    import time
    from pipeline import hookimpl

    class Plugin:
        volatile = ("clock.txt",)

        @hookimpl
        def after_batch(self, context):
            folder = context["run_dir"] / context["runner_name"]
            with open(folder / "lines.txt", "a") as file:
                file.write("a batch\\n")
            (folder / "clock.txt").write_text(str(time.time()))
"""
EVALUATING = """
    from pipeline import RunnerBase

    class Runner(RunnerBase):
        def run(self, context):
            context["current_epoch"], context["metrics"] = 0, {}
"""
RANDOM = """
    import random, torch
    from torch.utils.data import Dataset

    class Line(Dataset):
        def __len__(self):
            return 24

        def __getitem__(self, index):
            return torch.tensor([random.SystemRandom().random()]), torch.tensor([1.0])
"""
CONFIG = """
    hyper_parameters:
      optimizer: {class: SGD, learning_rate: 0.1}
    plugins: [{plugin.py: {factor: 2}}]
    dataset:
      - {name: train_data, class_path: data.py:Line, args: {size: 24}, batch_size: 4, shuffle: true}
    runner:
      - {name: first, class: train, device: cpu, epochs: 2, save_interval: 3}
      - {name: second, class: train, device: cpu, epochs: 1, save_interval: 1, seed: 7}
      - {name: measured, class: infer, device: cpu}
    phase:
      - name: line
        model: torch.nn.Linear
        model_args: {in_features: 1, out_features: 1}
        loss: torch.nn.functional.mse_loss
        dataset_name: train_data
"""


def parts(done: Result) -> dict[str, str]:
    """The lines about what was compared, each by its first words."""
    lines = [line.strip().partition("  ") for line in done.stdout.splitlines() if line.startswith("  ")]
    return {name: rest.strip() for name, _, rest in lines if rest}


@pytest.mark.slow
def test_a_run_that_can_be_resumed_is_equal_bit_for_bit(pipeline: Call, resume_test: Call, tmp_path: Path) -> None:
    folder = tmp_path / "workspace"
    testing.Workspace(folder, {"config.yaml": CONFIG, "plugin.py": PLUGIN})
    elsewhere = ("output_dir=elsewhere", f"runner.second.save_checkpoint_path={folder / 'elsewhere'}")
    done = resume_test(folder / "config.yaml", *elsewhere, "--at", 5, "--at", 2, "--keep", "kept")
    assert done.exit_code == 0, done.output
    first, second = done.stdout.partition("second\n")[::2]
    anew = "no checkpoint was saved before, so it began anew; with a shorter save_interval it goes on"
    assert first.startswith(
        f"first\n  killed after iteration 2; {anew}\n  killed after iteration 5, resumed after iteration 3\n"
    )
    assert second.startswith(
        "  killed after iteration 2, resumed after iteration 1\n  killed after iteration 5, resumed after iteration 4\n"
    )
    # Batches, metrics.jsonl, four parts of the checkpoint, the files; in the end those of the run directory.
    assert [each.count("the same") for each in (first, second)] == [7, 8]
    assert second.endswith("\nequal, bit for bit\n")
    assert "measured" not in done.stdout
    assert Path("kept/straight/workspace/latest/second/checkpoints/step-000000000006").is_dir()
    assert not Path("elsewhere").exists()
    assert not (folder / "elsewhere").exists()
    kept = set(Path("kept/straight/workspace").iterdir())
    again = pipeline("run", folder / "config.yaml", "output_dir=kept/straight", "mode=[second]", "--resume", "auto")
    assert again.exit_code == 0, again.output
    assert len({*Path("kept/straight/workspace").iterdir()} - kept) == 1


@pytest.mark.slow
def test_a_state_that_no_checkpoint_holds_is_found_where_it_first_shows(resume_test: Call, linear: Path) -> None:
    (linear.parent / "model.py").write_text("\n".join(line[4:] for line in COUNTING.splitlines()), encoding="utf-8")
    text = linear.read_text(encoding="utf-8").replace("torch.nn.Linear", '"{workspace}/model.py"')
    text = text.replace("model_args: {in_features: 1, out_features: 1}", "").replace(
        "valid_dataset_name: train_data", ""
    )
    linear.write_text(text.replace("loss: torch.nn.functional.mse_loss", ""), encoding="utf-8")
    done = resume_test(linear, "runner.train_runner.save_interval=3", "--at", 8)
    assert done.exit_code == 1, done.output
    assert "  killed after iteration 8, resumed after iteration 6\n" in done.stdout
    assert parts(done)["batches and losses"].startswith("DIFFERS  the loss of iteration 7: ")
    assert parts(done)["weights"].startswith("DIFFERS  weights line: net.weight: 1 of 1 elements, largest difference ")
    assert parts(done)["random state"] == "the same"
    assert "NOT equal; first, in batches and losses: the loss of iteration 7: " in done.stdout
    assert "Usual causes: state that no checkpoint holds (an attribute of the model that is no buffer" in done.stdout


@pytest.mark.slow
def test_a_run_that_never_repeats_itself_is_not_blamed_on_resuming(pipeline: Call, linear: Path) -> None:
    (linear.parent / "data.py").write_text("\n".join(line[4:] for line in RANDOM.splitlines()), encoding="utf-8")
    linear.write_text(linear.read_text(encoding="utf-8").replace("args: {size: 24}, ", ""), encoding="utf-8")
    done = pipeline("resume-test", linear, "--at", 7)
    assert done.exit_code == 1, done.output
    assert "NOT equal; first, in before the kill: the batch of iteration 1\n" in done.stdout
    assert "The run does not repeat itself, even where nothing has interrupted it." in done.stdout


@pytest.mark.slow
def test_a_file_that_a_plugin_only_appends_to_is_found_and_a_volatile_one_listed(
    resume_test: Call, linear: Path, workspace: Workspace
) -> None:
    workspace({"appending.py": APPENDING})
    done = resume_test(linear, 'plugins=["{workspace}/appending.py"]')
    assert done.exit_code == 1, done.output
    # After two thirds of its 12 iterations.
    assert "killed after iteration 8, resumed after iteration 6\n" in done.stdout
    assert parts(done)["lines.txt"] == "DIFFERS  from byte 96 on, in line 13 (- straight, + interrupted):"
    assert f"\n{' ' * 22}+a batch\n" in done.stdout
    assert "of the plugin or stage that writes it:\nvolatile = ('lines.txt',)\n" in done.stdout
    assert "clock.txt (volatile in Plugin); timing.jsonl (volatile in MetricLog)" in done.stdout
    assert done.stdout.count("DIFFERS") == 1


@pytest.mark.slow
def test_a_runner_that_makes_no_iteration_is_refused(resume_test: Call, linear: Path, workspace: Workspace) -> None:
    workspace({"own.py": EVALUATING})
    done = resume_test(linear, "runner.train_runner.runner_class_path={workspace}/own.py", "--at", 1)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "train_runner: makes no iteration, as one that only evaluates, so there is none after which" in done.stderr


@pytest.mark.slow
def test_an_iteration_that_no_runner_comes_to_is_refused(resume_test: Call, linear: Path) -> None:
    done = resume_test(linear, "--at", 13)
    assert done.exit_code == 2
    assert "--at 13: train_runner ends after 12 iterations; choose one before that" in done.stderr


@pytest.mark.slow
def test_a_run_that_fails_by_itself_is_not_tested(pipeline: Call, linear: Path) -> None:
    broken = "phase.line.model_args={in_features: 2, out_features: 1}"
    done = pipeline("resume-test", linear, broken, "--at", 3)
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == f"{linear}: the straight run left with exit code 1; mend that first\n"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--at", "0"], "0 is not in the range x>=1"),
        (["--at", "1", "mode=nobody"], "there is no runner 'nobody'"),
        (
            ["--at", "1", "runner.train_runner.debug=true"],
            "nothing is kept of a debug run, to be compared; leave it out",
        ),
        (
            ["--at", "1", "runner.train_runner.epochs=null", "runner.train_runner.max_time=1 hour"],
            "two runs that a clock ends are not alike; say how long to train, with max_steps=20 behind the config",
        ),
        (["--at", "1", "--keep", "."], "--keep .: cannot be made: File exists; name a new folder"),
    ],
)
def test_what_cannot_be_tested_is_refused_before_anything_runs(
    pipeline: Call, linear: Path, more: list[str], message: str
) -> None:
    done = pipeline("resume-test", linear, *more)
    assert (done.exit_code, done.stdout) == (2, "")
    assert message in done.stderr


def test_a_config_without_training_is_refused(pipeline: Call, linear: Path) -> None:
    (linear.parent / "weights.safetensors").write_bytes(b"")
    infer = "class: infer, init_model_path: weights.safetensors, device: cpu}"
    text = linear.read_text(encoding="utf-8").replace("class: train, device: cpu, epochs: 2, print_interval: 3}", infer)
    linear.write_text(text, encoding="utf-8")
    done = pipeline("resume-test", linear, "--at", 1)
    assert done.exit_code == 2, done.output
    assert f"{linear}: has no runner that trains; name a config, or a mode, with one" in done.stderr


OWN_LOOPS = """
    from pipeline import RunnerBase, stages

    class Nested(RunnerBase):
        def run(self, context):
            fit = {name: phase.brain.fit_batch for name, phase in context["model"].items()}
            for _ in context.epochs():
                for batch in context.batches("line"):
                    fit["line"](batch)
                    for other in context.batches("other", count=2, repeat=True):
                        fit["other"](other)

    class Twice(stages.Runner):
        def train_batch(self, context, phase, batch):
            super().train_batch(context, phase, batch)
            return phase.brain.fit_batch(batch)
"""


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["Nested", "Twice"])
def test_a_loop_of_ones_own_is_killed_after_any_iteration_and_goes_on(
    resume_test: Call, linear: Path, workspace: Workspace, runner: str
) -> None:
    workspace({"own.py": OWN_LOOPS})
    text = linear.read_text(encoding="utf-8")
    linear.write_text(text + text.partition("phase:\n")[2].replace("name: line", "name: other"), encoding="utf-8")
    own = f"runner.train_runner.runner_class_path={{workspace}}/own.py:{runner}"
    done = resume_test(linear, own, "runner.train_runner.save_interval=2", "--at", 4, "--at", 17)
    assert done.exit_code == 0, done.output
    assert done.stdout.count(", resumed after iteration ") == 2
    assert re.search("batches and losses +the same in (24|36) iterations\n", done.stdout)
    assert done.stdout.endswith("\nequal, bit for bit\n")
