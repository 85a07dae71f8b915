"""``pipeline check`` names every mistake of a config."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from pipeline.check import check

Call = Callable[..., Result]


def test_a_config_without_faults_exits_0(pipeline: Call, linear: Path) -> None:
    done = pipeline("check", linear)
    assert (done.exit_code, done.stdout, done.stderr) == (0, f"{linear}: no faults\n", "")


@pytest.mark.parametrize("arguments", [["-m", "{}"], ["--model", "{}", "-o", "runner.train_runner.epochs=3"],
                                       ["output_dir=x", "{}"]])  # fmt: skip
def test_the_config_and_overrides_may_be_given_as_options(pipeline: Call, linear: Path, arguments: list[str]) -> None:
    assert pipeline("check", *(each.replace("{}", str(linear)) for each in arguments)).exit_code == 0


def test_faults_go_to_stderr_and_exit_2(pipeline: Call, linear: Path) -> None:
    overrides = ["runner.train_runner.epochs=two", "outptu_dir=x"]
    done = pipeline("check", linear, overrides[0], "-o", overrides[1])
    faults = "\n".join(str(fault) for fault in check(linear, overrides))
    assert done.exit_code == 2
    assert done.stdout == ""
    assert done.stderr == f"{faults}\n2 faults; nothing was run\n"


def test_one_fault_is_counted_as_one(pipeline: Call) -> None:
    assert pipeline("check", "nope.yaml").stderr == (
        "nope.yaml: cannot be read: No such file or directory; check the path\n1 fault; nothing was run\n"
    )


def test_json_gives_the_faults_as_data_on_stdout(pipeline: Call, linear: Path) -> None:
    linear.write_text(
        linear.read_text(encoding="utf-8").replace("epochs: 2", "epochs: two, größe: 1"), encoding="utf-8"
    )
    done = pipeline("check", linear, "--json", "outptu_dir=x")
    assert (done.exit_code, done.stderr) == (2, "")
    assert json.loads(done.stdout) == [fault.as_dict() for fault in check(linear, ["outptu_dir=x"])]
    assert [fault["address"] for fault in json.loads(done.stdout)] == [
        "runner.train_runner.epochs",
        "runner.train_runner.größe",
        "outptu_dir",
    ]


def test_json_of_no_faults_is_an_empty_list(pipeline: Call, linear: Path) -> None:
    done = pipeline("check", "--json", linear)
    assert (done.exit_code, json.loads(done.stdout)) == (0, [])


def test_a_check_runs_nothing_and_writes_nothing(pipeline: Call, linear: Path) -> None:
    (linear.parent / "data.py").write_text("open('touched', 'w')\nclass Line:\n    def __init__(self, size): pass\n")
    assert pipeline("check", linear).exit_code == 0
    assert list(Path.cwd().iterdir()) == []


def test_the_process_leaves_with_2() -> None:
    Path("config.yaml").write_text("runer: 1\n", encoding="utf-8")
    command = [sys.executable, "-m", "pipeline", "check", "config.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "config.yaml:1:1: runer: unknown key; did you mean 'runner'?\n    runer: 1\n    ^\n" in done.stderr
    assert "Traceback" not in done.stderr


def test_class_files_in_a_folder_of_the_workspace_are_followed(pipeline: Call, linear: Path) -> None:
    folder = linear.parent / "deep" / "er"
    folder.mkdir(parents=True)
    (linear.parent / "data.py").rename(folder / "data.py")
    path = "dataset.train_data.class_path=deep/er/data.py:Line"
    assert pipeline("check", linear, path).exit_code == 0
    assert "did you mean 'Line'?" in pipeline("check", linear, path.replace(":Line", ":Lin")).stderr
