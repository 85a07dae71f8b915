"""Faults of the ancestors that must not come back. Each test says what the ancestor did."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline import GeneralTrainer
from pipeline.errors import ClassPathError, ConfigError, StageError
from pipeline.stages.base import METHODS

Workspace = Callable[..., Path]


@pytest.fixture
def two_runners(linear: Path) -> Path:
    """The small complete config with two train runners, named train and second; ``own.py`` is beside it."""
    text = linear.read_text()
    line = next(line for line in text.splitlines() if "name: train_runner" in line)
    second = line.replace("train_runner", "second_runner")
    linear.write_text(text.replace(line, f"{line}\n{second}"))
    return linear


def own(config: Path, code: str) -> None:
    (config.parent / "own.py").write_text(code, encoding="utf-8")


def test_a_stage_that_forgets_the_status_is_followed_by_the_next(linear: Path) -> None:
    # PaddleRec entered the same stage again, for ever.
    own(linear, "from pipeline import InstanceBase\nclass Instance(InstanceBase):\n"
                "    def instance(self, context): context['times'] = context.get('times', 0) + 1\n")  # fmt: skip
    assert GeneralTrainer(linear, ["runner.train_runner.instance_class_path={workspace}/own.py"]).run()["times"] == 1


def test_a_stage_that_always_names_itself_is_stopped(linear: Path) -> None:
    # PaddleRec repeated it for ever.
    own(linear, "from pipeline import InstanceBase\nclass Instance(InstanceBase):\n"
                "    def instance(self, context): context['status'] = 'uninit'\n")  # fmt: skip
    with pytest.raises(StageError, match=r"instance \(own\.Instance, .*more than 100 times.*max_stage_repeats"):
        GeneralTrainer(linear, ["runner.train_runner.instance_class_path={workspace}/own.py"]).run()


def test_a_mistyped_status_is_an_error_at_once(linear: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # PaddleRec said "unknow context_status, do nothing" and slept for 60 seconds, again and again.
    # Python's own wait for a process sleeps for milliseconds.
    monkeypatch.setattr(time, "sleep", lambda seconds: seconds < 1 or pytest.fail(f"slept for {seconds} s"))
    own(linear, "from pipeline import InstanceBase\nclass Instance(InstanceBase):\n"
                "    def instance(self, context): context['status'] = f'netwrok_{context[\"rank\"] or \"pass\"}'\n")  # fmt: skip
    with pytest.raises(StageError, match="'netwrok_pass', which is no status; did you mean 'network_pass'"):
        GeneralTrainer(linear, ["runner.train_runner.instance_class_path={workspace}/own.py"]).run()


def test_a_custom_terminal_runs_once(linear: Path) -> None:
    # PaddleRec called it twice.
    own(linear, "from pipeline import TerminalBase\nclass Terminal(TerminalBase):\n"
                "    def terminal(self, context): context['times'] = context.get('times', 0) + 1\n")  # fmt: skip
    assert GeneralTrainer(linear, ["runner.train_runner.terminal_class_path={workspace}/own.py"]).run()["times"] == 1


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("if True:\n    import no_such_package", "needs the package 'no_such_package', which is not installed"),
        ("1 / 0", "failed at .*own.py:2: ZeroDivisionError: division by zero; mend the file"),
        ("raise NotImplementedError", "failed at .*own.py:2: NotImplementedError"),
    ],
)
def test_a_file_that_fails_to_import_says_why(linear: Path, code: str, message: str) -> None:
    # PaddleRec printed the traceback, went on with None and died of "'NoneType' object is not callable".
    own(linear, f"from pipeline import stages\n{code}\nclass Startup(stages.Startup): ...\n")
    with pytest.raises(ClassPathError, match=message):
        GeneralTrainer(linear, ["runner.train_runner.startup_class_path={workspace}/own.py"]).run()
    assert not Path("runs").exists()


def test_a_class_that_a_file_does_not_define_is_named(linear: Path) -> None:
    # PaddleRec died of "'NoneType' object is not callable".
    own(linear, "from pipeline import stages\nclass Startpu(stages.Startup): ...\n")
    with pytest.raises(ConfigError, match=r"own\.py defines no 'Startup'; it defines Startpu; did you mean 'Startpu'"):
        GeneralTrainer(linear, ["runner.train_runner.startup_class_path={workspace}/own.py"])


@pytest.mark.parametrize("stage", METHODS)
def test_a_typo_in_a_class_path_key_is_an_error(linear: Path, stage: str) -> None:
    # PaddleRec ignored the key, trained with the default stage and left exit code 0.
    key = f"{stage}_class_paht"
    with pytest.raises(
        ConfigError, match=rf"runner\.train_runner\.{key}: unknown key; did you mean '{stage}_class_path'"
    ):
        GeneralTrainer(linear, [f"runner.train_runner.{key}={{workspace}}/own.py"])


def test_phases_are_matched_by_whole_names(linear: Path) -> None:
    # PaddleRec looked for a phase's name within the text of `phases`: `train_all` ran the phases `train` and `all` too.
    text = linear.read_text()
    phase = text[text.index("  - name: line") :]
    linear.write_text(
        text + phase.replace("name: line", "name: train") + phase.replace("name: line", "name: train_all")
    )
    context = GeneralTrainer(linear, ["runner.train_runner.phases=train_all"]).run()
    assert list(context["model"]) == ["train_all"]
    assert [phase["name"] for phase in context["phases"]] == ["train_all"]
    assert list(GeneralTrainer(linear, ["runner.train_runner.phases=train"]).run()["model"]) == ["train"]


@pytest.mark.parametrize("phases", ["lin", "[line, valid]", "line2"])
def test_an_unknown_phase_is_an_error(linear: Path, phases: str) -> None:
    # PaddleRec dropped it and trained the others, or nothing.
    unknown = phases.strip("[]").split(", ")[-1]
    with pytest.raises(ConfigError, match=rf"runner\.train_runner\.phases: there is no phase '{unknown}'; .*line"):
        GeneralTrainer(linear, [f"runner.train_runner.phases={phases}"])


def test_an_unknown_runner_in_mode_is_an_error_before_the_first_runs(two_runners: Path) -> None:
    # PaddleRec ran the first runner to its end, and found out then.
    with pytest.raises(ConfigError, match="mode: there is no runner 'secnd_runner'; did you mean 'second_runner'"):
        GeneralTrainer(two_runners, ["mode=[train_runner, secnd_runner]"])
    assert not Path("runs").exists()


def test_a_class_of_the_second_runner_that_cannot_be_loaded_is_told_before_the_first_runs(two_runners: Path) -> None:
    # PaddleRec loaded a class when its stage came: after the first runner had trained.
    own(two_runners, "from pipeline import stages\nraise OSError('no tree')\nclass Runner(stages.Runner): ...\n")
    trainer = GeneralTrainer(two_runners, ["runner.second_runner.runner_class_path={workspace}/own.py"])
    with pytest.raises(
        ClassPathError, match=r"runner\.second_runner\.runner_class_path: .*own\.py:2: OSError: no tree"
    ):
        trainer.run()
    assert not Path("runs").exists()
    assert trainer.contexts == {}


MUTATING = """
from pipeline import stages

class Instance(stages.Instance):
    def instance(self, context):
        super().instance(context)
        context["found"] = [context["hyper_parameters"].get("left"), context["env"].get("left"), context["phases"][0].get("left")]
        context["found"] += [context["config"].get("left"), context["env"]["runner"][0].get("left")]
        context["hyper_parameters"]["left"] = context["env"]["left"] = context["env"]["runner"][0]["left"] = "mine"
        context["phases"][0]["left"] = "mine"
        context["train_state"]["iteration"] = 7
        context["own"] = context.get("own", 0) + 1
"""


def test_two_runners_do_not_see_each_others_config_or_context(two_runners: Path) -> None:
    # PaddleRec kept the config in os.environ and in module globals: the second runner found the first one's values.
    own(two_runners, MUTATING)
    paths = [f"runner.{name}.instance_class_path={{workspace}}/own.py" for name in ("train_runner", "second_runner")]
    trainer = GeneralTrainer(two_runners, paths)
    trainer.run()
    for context in trainer.contexts.values():
        assert context["found"] == [None] * 5
        assert (context["own"], context["train_state"]["iteration"]) == (1, 7 + 12)


GREEDY = """
import torch
from torch.utils.data import Dataset

class Line(Dataset):
    def __init__(self, sizes):
        self.size = sizes.pop()
    def __len__(self):
        return self.size
    def __getitem__(self, index):
        return torch.zeros(1), torch.zeros(1)
"""


def test_arguments_that_a_runner_uses_up_are_whole_for_the_next(two_runners: Path) -> None:
    # PaddleRec's runners shared one parsed config.
    (two_runners.parent / "data.py").write_text(GREEDY)
    trainer = GeneralTrainer(two_runners, ["dataset.train_data.args={sizes: [8]}"])
    trainer.run()
    assert [context["train_state"]["iteration"] for context in trainer.contexts.values()] == [4, 4]


def outcome(config: Path) -> tuple[Any, list[Any]]:
    """The trained weights and the context's files, and where the config says they are."""
    context = GeneralTrainer(config).run()
    return context["model"]["line"]["model"].state_dict(), [
        context["config"].get("workspace"),
        context["run_dir"].parent,
    ]


def test_nothing_but_outputs_depends_on_the_current_folder(
    linear: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # PaddleRec resolved class paths, data and the config's own files against the current folder.
    text = linear.read_text().replace('"{workspace}/data.py:Line"', "./data.py:Line")
    linear.write_text(text)
    found = []
    for folder, path in ((linear.parent, Path("config.yaml")), (tmp_path / "cwd", Path("../workspace/config.yaml"))):
        monkeypatch.chdir(folder)
        weights, (workspace, runs) = outcome(path)
        found.append(weights["weight"])
        assert (workspace, runs) == (str(linear.parent), folder / "runs" / "workspace")
    assert torch.equal(found[0], found[1])


def test_a_stage_that_changes_the_current_folder_does_not_move_the_outputs(linear: Path, tmp_path: Path) -> None:
    # PaddleRec's paths were relative to wherever the process happened to be.
    own(linear, f"import os\nfrom pipeline import stages\nclass Startup(stages.Startup):\n"
                f"    def startup(self, context): os.chdir({str(tmp_path)!r})\n")  # fmt: skip
    run = GeneralTrainer(linear, ["runner.train_runner.startup_class_path={workspace}/own.py"]).run()["run_dir"]
    assert run.is_relative_to(tmp_path / "cwd")
    assert not (tmp_path / "runs").exists()
    assert (run / "train_runner" / "results.json").exists()


def test_nothing_is_put_on_the_search_path_for_modules(linear: Path) -> None:
    # PaddleRec appended a workspace's folder to sys.path: a file `model.py` of one hid that of another.
    own(linear, "from pipeline import stages\nclass Startup(stages.Startup): ...\n")
    before = (list(sys.path), {"own", "data"} & sys.modules.keys())
    GeneralTrainer(linear, ["runner.train_runner.startup_class_path={workspace}/own.py"]).run()
    assert (sys.path, {"own", "data"} & sys.modules.keys()) == before


def test_a_failed_run_leaves_no_success_as_its_exit_code(
    process: Callable[..., subprocess.CompletedProcess[str]], linear: Path
) -> None:
    # PaddleRec's multi-phase runners turned an exception into is_exit and left exit code 0.
    own(linear, "from pipeline import stages\nclass Runner(stages.Runner):\n"
                "    def run(self, context): raise ValueError('lost')\n")  # fmt: skip
    done = process("run", linear, "runner.train_runner.runner_class_path={workspace}/own.py")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("ValueError: lost") == 2  # the headline, and the end of the traceback
