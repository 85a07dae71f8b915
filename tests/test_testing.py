"""``pipeline.testing``: what authors of plugins and stages test with."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import Result

from pipeline import Context, hookimpl, stages
from pipeline.check.checker import check
from pipeline.errors import ConfigError
from pipeline.testing import Workspace, recorder, write_files
from pipeline.user_code.plugins import HOOKS


class Counter:
    """A plugin with a state and an argument."""

    def __init__(self, step: int = 1) -> None:
        self.step, self.batches = step, 0

    @hookimpl
    def after_batch(self, context: Context) -> None:
        self.batches += self.step
        context["batches"] = self.batches

    def state_dict(self) -> int:
        return self.batches

    def load_state_dict(self, state: int) -> None:
        self.batches = state


def test_the_small_job_fits_its_line(tmp_path: Path) -> None:
    context = Workspace(tmp_path).run("runner.train_runner.epochs=30")
    weights = context["model"]["line"].model.state_dict()
    assert [weights["weight"].item(), weights["bias"].item()] == pytest.approx([3, -1], abs=0.1)
    assert context["train_state"]["iteration"] == 30 * 6


def test_the_config_is_a_file_that_the_commands_take(tmp_path: Path, pipeline: Callable[..., Result]) -> None:
    path = Workspace(tmp_path).config
    assert check(path) == []
    assert pipeline("run", path, "runner.train_runner.epochs=1").exit_code == 0


def test_what_it_runs_is_in_its_folder(tmp_path: Path) -> None:
    run_dir = Workspace(tmp_path / "job").run("runner.train_runner.max_steps=1")["run_dir"]
    assert run_dir.is_relative_to(tmp_path / "job" / "runs")
    assert list(Path().iterdir()) == []


def test_files_of_a_test_come_beside_those_of_the_job_or_in_their_place(tmp_path: Path) -> None:
    startup = """
        from pipeline import stages
        class Startup(stages.Startup):
            def startup(self, context):
                context["from_file"] = "yes"
    """
    data = (
        "import torch\ndef Line(size):\n    return torch.utils.data.TensorDataset(torch.ones(8, 1), torch.ones(8, 1))"
    )
    work = Workspace(tmp_path, {"parts/startup.py": startup, "data.py": data})
    context = work.run('runner.train_runner.startup_class_path="{workspace}/parts/startup.py"')
    assert (context["from_file"], context["train_state"]["iteration"]) == ("yes", 4)


def test_keys_stand_in_place_of_those_of_the_config_and_may_name_classes(tmp_path: Path) -> None:
    plugin = {"class_path": Counter, "args": {"step": 10}}
    assert Workspace(tmp_path).run(plugins=[plugin])["batches"] == 120


def test_a_run_that_was_killed_is_resumed(tmp_path: Path) -> None:
    class Kill:
        @hookimpl
        def before_batch(self, context: Context) -> None:
            if context["train_state"]["iteration"] == 8:
                raise KeyboardInterrupt

    work = Workspace(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        work.run(plugins=[Counter, Kill])
    assert work.run(plugins=[Counter], resume="auto")["batches"] == 12


def test_a_wrong_key_is_a_fault_as_in_any_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'epochs'"):
        Workspace(tmp_path).run("runner.train_runner.epoch=1")


def test_hooks_and_stages_are_called_by_hand_with_a_context(tmp_path: Path) -> None:
    context = Workspace(tmp_path).context(labels=["no", "yes"])
    Counter(step=2).after_batch(context)
    stages.Instance(context).instance(context)
    stages.Network(context).build_network(context)
    assert (context["batches"], context["labels"]) == (2, ["no", "yes"])
    assert isinstance(context["model"]["line"].model, torch.nn.Linear)
    assert context["train_state"]["iteration"] == 0


def test_the_recorder_has_the_calls_in_order_with_iteration_and_arguments(tmp_path: Path) -> None:
    calls = recorder("after_validation", "before_batch", "after_epoch")
    context = Workspace(tmp_path).run("runner.train_runner.epochs=1", plugins=[calls])
    assert [call[:2] for call in calls.calls] == [
        *(("before_batch", iteration) for iteration in range(6)), ("after_validation", 6), ("after_epoch", 6),
    ]  # fmt: skip
    first, validation, last = calls.calls[0][2], calls.calls[6][2], calls.calls[7][2]
    assert torch.equal(first["batch"][0], context["dataset"]["train_data"].dataset.x[:4])
    assert (first["phase"], validation["phase"], last) == ("line", "line", {})
    assert validation["metrics"]["loss"] == context["metrics"]["line"]["valid_loss"]


def test_without_names_the_recorder_has_every_hook_and_changes_no_run(tmp_path: Path) -> None:
    every = recorder()
    assert HOOKS.keys() <= vars(every).keys()
    work = Workspace(tmp_path)
    straight, recorded = work.run(), work.run(plugins=[every])
    assert recorded["metrics"] == straight["metrics"]
    names = [name for name, *_ in every.calls]
    assert (names[0], names[-1], names.count("after_batch")) == ("before_pipeline", "after_run", 12)


def test_each_recorder_has_its_own_calls(tmp_path: Path) -> None:
    one, other = recorder("after_epoch"), recorder("after_epoch")
    Workspace(tmp_path).run(plugins=[one])
    assert (len(one.calls), other.calls) == (2, [])


def test_texts_of_files_may_be_indented(tmp_path: Path) -> None:
    folder = write_files(tmp_path / "new", {"a/b.txt": "\n    one\n      two\n"})
    assert (folder / "a" / "b.txt").read_text() == "\none\n  two\n"


@pytest.mark.slow
def test_it_needs_no_pytest() -> None:
    command = "import sys; sys.modules['pytest'] = None; import pipeline.testing"
    assert subprocess.run([sys.executable, "-c", command], capture_output=True, check=False).returncode == 0
