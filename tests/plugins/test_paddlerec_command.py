"""``pipeline convert`` writes a config of ours, and says what it could not carry."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

Call = Callable[..., Result]

THEIRS = "# mine\ndebug: true\nrunner: [{name: r, class: infer, device: cpu, print_interval: 5}]\n"
OURS = "# mine\n# not carried: debug: true\nrunner: [{name: r, class: infer, device: cpu, print_interval: 5}]\n"
NOTE = "not carried: it timed the operators of a QueueDataset; time them with torch.profiler in a plugin\n"


@pytest.fixture(autouse=True)
def _config() -> None:
    Path("config.yaml").write_text(THEIRS, encoding="utf-8")


def test_the_config_goes_to_stdout_and_the_notes_to_stderr(pipeline: Call) -> None:
    done = pipeline("convert", "config.yaml")
    assert (done.exit_code, done.stdout, done.stderr) == (0, OURS, f"config.yaml:2: debug: {NOTE}")


@pytest.mark.parametrize("option", ["-o", "--output"])
def test_the_config_goes_to_a_new_file(pipeline: Call, option: str) -> None:
    done = pipeline("convert", "config.yaml", option, "ours.yaml")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "", f"config.yaml:2: debug: {NOTE}")
    assert Path("ours.yaml").read_text(encoding="utf-8") == OURS


def test_a_relative_workspace_is_relative_to_the_new_file(pipeline: Call) -> None:
    Path("config.yaml").write_text(f"workspace: .\n{THEIRS}", encoding="utf-8")
    Path("new").mkdir()
    pipeline("convert", "config.yaml", "-o", "new/config.yaml")
    assert Path("new/config.yaml").read_text(encoding="utf-8") == f"workspace: ..\n{OURS}"


def test_a_file_is_never_overwritten(pipeline: Call) -> None:
    done = pipeline("convert", "config.yaml", "-o", "config.yaml")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == "config.yaml: exists already; name another file, or remove it\n"
    assert Path("config.yaml").read_text(encoding="utf-8") == THEIRS


def test_a_file_that_cannot_be_written_exits_2(pipeline: Call) -> None:
    done = pipeline("convert", "config.yaml", "-o", "none/ours.yaml")
    assert done.exit_code == 2
    assert done.stderr == "none/ours.yaml: cannot be written: No such file or directory; check the path\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "config.yaml: cannot be read: No such file or directory; check the path"),
        ("a: [", "config.yaml:1:5: expected the node content, but found '<stream end>'; mend the YAML\n    a: [\n        ^"),
        ("runner: {epochs: 1}", ("config.yaml:1:9: runner: is a mapping, as in PaddleRec 2.x, which has no stages; "
         "name a config of PaddleRec 1.8.5\n    runner: {epochs: 1}\n            ^")),
    ],
)  # fmt: skip
def test_what_is_no_config_of_paddlerec_exits_2(pipeline: Call, text: str | None, message: str) -> None:
    Path("config.yaml").unlink()
    if text:
        Path("config.yaml").write_text(text, encoding="utf-8")
    done = pipeline("convert", "config.yaml", "-o", "ours.yaml")
    assert (done.exit_code, done.stdout, done.stderr) == (2, "", f"{message}\n")
    assert not Path("ours.yaml").exists()


def test_neither_torch_nor_anything_of_the_user_is_imported() -> None:
    code = (
        "import sys; from pipeline.cli import group\n"
        "group(['convert', 'config.yaml'], standalone_mode=False)\n"
        "sys.exit('torch' in sys.modules or any(name.startswith('pipeline.workspaces.') for name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, OURS)


def test_without_ruamel_yaml_it_is_said_what_to_install(tmp_path: Path) -> None:
    # A package that cannot be imported stands for one that is not there.
    (tmp_path / "ruamel").mkdir()
    (tmp_path / "ruamel" / "__init__.py").write_text("", encoding="utf-8")
    call = [sys.executable, "-m", "pipeline", "convert", "config.yaml"]
    done = subprocess.run(
        call, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(tmp_path)}
    )
    assert (done.returncode, done.stdout) == (2, "")
    needed = "it is needed to keep comments; run `pip install 'five-stage-pipeline[paddlerec]'`"
    assert done.stderr == f"ruamel.yaml: is not installed, and {needed}\n"


def test_its_help_says_what_it_does(pipeline: Call) -> None:
    done = pipeline("convert", "--help")
    assert done.stdout.startswith("Usage: pipeline convert [OPTIONS] CONFIG\n")
    assert "Turn a PaddleRec 1.8.5 config into one of ours." in done.stdout
