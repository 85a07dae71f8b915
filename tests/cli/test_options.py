"""What all commands with a config share: where the config is, and a stage that is swapped in a word."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pipeline.cli import group
from pipeline.context import STAGES
from pipeline.run.directory import parse_command

Call = Callable[..., Result]
STARTUP = """
from pipeline import stages

class Startup(stages.Startup):
    pass

class Other(stages.Startup):
    pass
"""


@pytest.fixture
def here(linear: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the config, where one stands; beside it, a startup stage in a folder of its own."""
    folder = linear.parent
    monkeypatch.chdir(folder)
    Path("mine").mkdir()
    Path("mine/startup.py").write_text(STARTUP, encoding="utf-8")
    return folder


def two_runners(config: Path, mode: str = "[train_runner, judge]") -> None:
    text = config.read_text(encoding="utf-8").replace(
        "phase:\n", "  - {name: judge, class: infer, device: cpu}\nphase:\n"
    )
    config.write_text(f"mode: {mode}\n{text}", encoding="utf-8")


# A swap


@pytest.mark.parametrize("stage", STAGES)
def test_the_option_of_a_stage_is_the_override_of_its_class_path(pipeline: Call, here: Path, stage: str) -> None:
    swapped = pipeline("show", "config.yaml", f"--{stage}", "./mine/startup.py:Other")
    written = pipeline("show", "config.yaml", f"runner.train_runner.{stage}_class_path=./mine/startup.py:Other")
    assert f"{here}/mine/startup.py:Other" in swapped.output
    assert (swapped.exit_code, swapped.output) == (written.exit_code, written.output)


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ("mine/startup.py", "{}/mine/startup.py"),
        ("../workspace/mine/startup.py:Other", "{}/../workspace/mine/startup.py:Other"),
        ("pipeline.stages.startup:Startup", "pipeline.stages.startup:Startup"),
        ("{workspace}/mine/startup.py", "{}/mine/startup.py"),
    ],
)
@pytest.mark.parametrize("prefix", ["", "train_runner="])
def test_a_class_is_named_as_in_a_config_and_a_file_from_where_one_types(
    pipeline: Call, here: Path, value: str, path: str, prefix: str
) -> None:
    done = pipeline("show", "--startup", prefix + value)
    assert f"startup_class_path: {path.replace('{}', str(here))} " in done.stdout


def test_a_swap_is_of_every_runner_of_mode_or_of_one(pipeline: Call, here: Path) -> None:
    two_runners(here / "config.yaml")
    both = pipeline("show", "--startup", "mine/startup.py").stdout
    one = pipeline("show", "--startup", "judge=mine/startup.py").stdout
    left_out = pipeline("show", "mode=train_runner", "--startup", "mine/startup.py").stdout
    assert [text.count("# override 'runner.judge.startup") for text in (both, one, left_out)] == [1, 1, 0]
    assert [text.count("# override 'runner.train_runner.startup") for text in (both, one, left_out)] == [1, 0, 1]


def test_each_runner_may_have_its_own(pipeline: Call, here: Path) -> None:
    two_runners(here / "config.yaml")
    done = pipeline("check", "--startup", "judge=mine/startup.py", "--startup", "train_runner=mine/startup.py:Other")
    assert "judge: startup is startup.py:Startup" in done.stdout
    assert "train_runner: startup is startup.py:Other" in done.stdout


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["check"], "train_runner: startup is startup.py:Startup"),
        (["graph"], "custom startup.py:4"),
        (["explain", "runner.train_runner.startup_class_path"], "/mine/startup.py"),
    ],
)
def test_the_other_commands_take_it_too(pipeline: Call, here: Path, words: list[str], line: str) -> None:
    done = pipeline(*words, "--startup", "./mine/startup.py")
    assert (done.exit_code, line in done.stdout) == (0, True)


def test_a_run_keeps_a_swap_as_the_override_that_it_is_and_goes_on_with_it(pipeline: Call, here: Path) -> None:
    os.chdir("mine")
    assert pipeline("run", "-q", "..", "--startup", "startup.py").exit_code == 0
    run_dir = Path("runs/workspace/latest")
    command = parse_command((run_dir / "command.txt").read_text(encoding="utf-8"))
    assert json.loads(command["overrides"]) == ["runner.train_runner.startup_class_path=startup.py"]
    assert "startup is startup.py:Startup" in (run_dir / "swaps.txt").read_text(encoding="utf-8")
    os.chdir(here)
    assert pipeline("resume", here / "mine" / run_dir).exit_code == 0


def test_what_is_wrong_with_swaps_is_named_with_all_else(pipeline: Call, here: Path) -> None:
    swaps = [
        "--startup",
        "train_runer=mine/startup.py",
        "--network",
        "mine/startip.py",
        "--runner",
        "mine/startup.py:Othr",
    ]
    done = pipeline("run", *swaps, "--terminal", "os.pth:join", "outptu_dir=x")
    assert (done.exit_code, Path("runs").exists()) == (2, False)
    assert "there is no 'runner.train_runer' to set this in; did you mean 'train_runner'?" in done.stderr
    assert f"no such file: {here}/mine/startip.py; did you mean 'startup.py'?" in done.stderr
    assert "startup.py defines no 'Othr'; it defines Startup, Other; did you mean 'Other'?" in done.stderr
    assert "runner.train_runner.terminal_class_path: 'os.pth:join'" in done.stderr
    assert "outptu_dir: unknown key; did you mean 'output_dir'?" in done.stderr


ADDRESS = "runner.train_runner.startup_class_path"


@pytest.mark.parametrize(
    ("words", "setters"),
    [
        ([f"{ADDRESS}=b.py", "--startup", "a.py"], [f"override '{ADDRESS}=b.py'", "--startup a.py"]),
        (["--startup", "a.py", "--startup", "train_runner=b.py"], ["--startup a.py", "--startup train_runner=b.py"]),
    ],
)
def test_a_class_that_is_set_twice_is_refused(pipeline: Call, here: Path, words: list[str], setters: list[str]) -> None:
    done = pipeline("check", *words)
    assert done.exit_code == 2
    assert f"{ADDRESS}: is set by {setters[0]} and by {setters[1]}; leave one of them out" in done.stderr


def test_a_swap_in_a_config_that_cannot_be_read_changes_nothing_of_what_is_said(pipeline: Call, here: Path) -> None:
    (here / "config.yaml").write_text("runner: [", encoding="utf-8")
    assert pipeline("check", "--startup", "a.py").output == pipeline("check").output


@pytest.mark.parametrize(
    "words", ["pipeline run --startup ./mi", "pipeline run ./mi", "pipeline run --startup one = ./mi"]
)
def test_a_shell_completes_the_path_of_a_class_and_of_a_config(words: str) -> None:
    asked = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" ")), "_PIPELINE_COMPLETE": "bash_complete"}
    done = CliRunner(env=asked).invoke(group, prog_name="pipeline")
    assert done.stdout == "file,./mi\n"


# Where the config is


@pytest.mark.parametrize("command", [["check"], ["show"], ["graph"]])
@pytest.mark.parametrize("words", [[], ["."], ["../workspace"], ["-m", "../workspace/"]])
def test_a_folder_stands_for_its_config_and_so_does_nothing(
    pipeline: Call, here: Path, command: list[str], words: list[str]
) -> None:
    done = pipeline(*command, "runner.train_runner.epochs=3", *words)
    assert (done.exit_code, done.stderr) == (0, "")


def test_an_override_alone_is_one_of_the_config_there(pipeline: Call, here: Path) -> None:
    assert pipeline("run", "-q", "runner.train_runner.epochs=1").exit_code == 0
    command = parse_command(Path("runs/workspace/latest/command.txt").read_text(encoding="utf-8"))
    assert (command["config"], command["overrides"]) == (f"{here}/config.yaml", '["runner.train_runner.epochs=1"]')


def test_explain_needs_nothing_but_the_address(pipeline: Call, here: Path) -> None:
    done = pipeline("explain", "runner.train_runner.epochs")
    assert "set by   config.yaml:7: 2" in done.stdout


@pytest.mark.parametrize("command", ["run", "check", "show", "graph", "resume-test --at 1", "explain mode"])
def test_a_folder_without_a_config_is_refused_with_what_to_do(pipeline: Call, command: str) -> None:
    done = pipeline(*command.split())
    assert done.exit_code == 2
    assert (
        f"{Path.cwd()}: has no config.yaml; name a config or its folder, or write one: pipeline new DIR" in done.stderr
    )


def test_what_a_folder_has_in_the_place_of_a_config_is_named(pipeline: Call, linear: Path) -> None:
    linear.rename(linear.with_name("mine.yaml"))
    assert (
        f"{linear.parent}: has no config.yaml, only mine.yaml; name a config" in pipeline("run", linear.parent).stderr
    )


def test_a_run_directory_is_no_config(pipeline: Call, linear: Path) -> None:
    assert pipeline("run", "-q", linear).exit_code == 0
    done = pipeline("run", "runs/workspace/latest")
    assert done.exit_code == 2
    what = "runs/workspace/latest: is a run directory; to go on with it: pipeline resume runs/workspace/latest"
    assert f"{what}; for a new run of its config, name runs/workspace/latest/config.yaml" in done.stderr
    assert len(list(Path("runs/workspace").glob("2*"))) == 1
