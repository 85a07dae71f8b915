"""The command line as a whole: its commands, its help, and what it imports."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from example_needs import runnable_examples

from tests.conftest import command_texts

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "workspace_examples"
EXAMPLE = EXAMPLES / "movielens_deepfm" / "config.yaml"
WITH_TORCH = {
    "trainer",
    "testing",
    "brain",
    "checkpoint",
    "compute",
    "data",
    "distributed",
    "engine",
    "experiment",
    "metrics",
    "optim",
    "slots",
    "updater",
    "cli.run",
    "__main__",
}
WITH_TORCH |= {
    f"run.{module}"
    for module in (
        "session",
        "resume",
        "provenance",
        "failures",
        "mid_epoch",
        "run_context",
        "plugin_report",
        "run_summary",
        "run_ending",
    )
}
WITH_TORCH |= {f"stages.{module}" for module in ("build", "trained_model")}
WITH_TORCH |= {f"stages.{stage}" for stage in ("instance", "network", "startup", "runner", "terminal")}
WITHOUT_TORCH = {f"checkpoint.{module}" for module in ("layout", "header", "storage")}
Call = Callable[..., Result]


def modules_after(code: str) -> set[str]:
    """The modules that a new process has imported once it has run the code."""
    script = f"{code}\nimport json, sys; print('\\n' + json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def module_names() -> list[str]:
    files = [path for path in (REPOSITORY / "pipeline").rglob("*.py") if "templates" not in path.parts]
    paths = [path.relative_to(REPOSITORY).with_suffix("") for path in files]
    return sorted(".".join(path.parts).removesuffix(".__init__") for path in paths)


@pytest.mark.parametrize("name", ["click", "dataclasses", "difflib", "inspect"])
def test_a_file_of_the_folder_where_one_stands_is_not_imported_in_the_place_of_what_we_need(name: str) -> None:
    Path(f"{name}.py").write_text("raise SystemExit('the wrong one')", encoding="utf-8")
    done = subprocess.run([sys.executable, "-m", "pipeline", "--help"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_folder_that_is_gone_is_no_reason_to_fail() -> None:
    command = f"cd {Path.cwd()} && rmdir {Path.cwd()} && {sys.executable} -m pipeline --help"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_help_names_every_command_with_what_it_does(pipeline: Call) -> None:
    done = pipeline("--help")
    listed = " ".join(done.stdout.partition("Commands:")[2].split())
    assert done.exit_code == 0
    assert listed == " ".join(f"{name} {text}" for name, text in command_texts().items())


USAGE = {
    "check": "[CONFIG] [KEY=VALUE]…",
    "resume": "RUN_DIR|CHECKPOINT [KEY=VALUE]…",
    "run": "[CONFIG] [KEY=VALUE]…",
}


@pytest.mark.parametrize("name", USAGE)
def test_the_help_of_a_command_says_the_same(pipeline: Call, name: str) -> None:
    done = pipeline(name, "--help")
    assert done.exit_code == 0
    assert done.stdout.splitlines()[0] == f"Usage: pipeline {name} [OPTIONS] {USAGE[name]}".rstrip()
    assert command_texts()[name] in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["chek"], "there is no command 'chek'; did you mean 'check'?"),
        (
            ["xyz"],
            "there is no command 'xyz'; known: check, checkpoint, compare, convert, doctor, explain, graph, new, plugins, predict, report, resume, resume-test, run, runs, schema, show, stages, sweep",
        ),
        (["--nope"], "No such option '--nope'"),
        (["check", "--jsn", "config.yaml"], "No such option '--jsn'. Did you mean '--json'?"),
        (["run", "config.yaml", "--nproc", "0"], "'0' is no number of processes; write 2, or auto"),
        (["check"], "has no config.yaml; name a config or its folder, or write one: pipeline new DIR"),
        (["check", "a.yaml", "b.yaml"], "name one config, not 2: a.yaml b.yaml; an override has the form KEY=VALUE"),
        (["check", "-m", "a.yaml", "b.yaml"], "name one config, not 2: a.yaml b.yaml"),
    ],
)
def test_a_wrong_command_line_is_refused_with_2(pipeline: Call, arguments: list[str], message: str) -> None:
    done = pipeline(*arguments)
    assert done.exit_code == 2
    assert message in done.stderr
    assert done.stdout == ""


def test_python_m_pipeline_is_the_same_command() -> None:
    done = subprocess.run([sys.executable, "-m", "pipeline", "chek"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "Usage: pipeline [OPTIONS] COMMAND" in done.stderr
    assert "there is no command 'chek'; did you mean 'check'?" in done.stderr


def test_torch_is_imported_only_where_it_is_needed() -> None:
    names = [
        name
        for name in module_names()
        if name.removeprefix("pipeline.") in WITHOUT_TORCH
        or not any(f"{name}.".startswith(f"pipeline.{part}.") for part in WITH_TORCH)
    ]
    found = modules_after("\n".join(f"import {name}" for name in names))
    assert {"pipeline.check.checker", "pipeline.cli.options", "pipeline.stages.base"} <= set(names) <= found
    assert "torch" not in found


@pytest.mark.slow
def test_commands_that_read_source_alone_import_neither_torch_nor_user_code() -> None:
    commands = [["check", str(folder / "config.yaml")] for folder in runnable_examples("**/config.yaml")]
    commands += [["new", "mine"], ["new", ".", "--plugin"], ["runs", "."]]
    found = modules_after(
        f"from click.testing import CliRunner; from pipeline.cli import group\n"
        f"for command in {commands}:\n"
        f"    done = CliRunner().invoke(group, command)\n"
        f"    assert done.exit_code == 0, done.output"
    )
    assert "pipeline.check.checker" in found
    assert not {"torch", "numpy", "pipeline.stages.network"} & found
    assert not {"pipeline_plugins.metric_log", "pipeline_plugins.progress_bar"} & found
    assert not [name for name in found if name.startswith("pipeline.workspaces.")]


def test_help_imports_only_what_it_needs() -> None:
    found = modules_after("from click.testing import CliRunner; from pipeline.cli import group\n"
                          "CliRunner().invoke(group, ['--help'])")  # fmt: skip
    assert not {"torch", "pydantic", "yaml", "loguru", "pipeline.check", "pipeline.config.schema"} & found
