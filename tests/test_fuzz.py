"""Configs that went wrong in any way are answered with faults; nothing fails, and nothing is imported or run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.check.checker import check

PROGRAM = Path(__file__).parent / "faults" / "fuzz.py"
Workspace = Callable[..., Path]


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_mutated_configs_are_answered_with_faults_alone() -> None:
    count = os.environ.get("FUZZ_CONFIGS", "300")
    done = subprocess.run([sys.executable, str(PROGRAM), count], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"{count} configs: ")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("plugins=[null]", "'plugins.0'"),
        ("runner.train_runner.name=[lock]", "is ['lock'], a list; write a string"),
        (
            "plugins=[{progress_bar: 1}]",
            "'progress_bar': its arguments are 1; write a mapping such as {every: 5}, or false to remove it",
        ),
        (r'dataset.train_data.class_path="{workspace}/a\0.py"', "can be no file: embedded null byte; check the path"),
        (
            "dataset.train_data.class_path={workspace}/" + 300 * "x" + ".py",
            "can be no file: File name too long; check the path",
        ),
        (r'dataset.train_data.class_path="{workspace}/\ud800.py"', "can be no file: 'utf-8' codec can't encode"),
        ("dataset.train_data.class_path={workspace}/loop.py", "can be no file: Symlink loop from"),
        ("dataset.train_data.class_path={workspace}/deep.py", "is nested too deeply"),
        (r'workspace="\0"', "can be no folder: embedded null byte; check the path"),
        ("dataset.train_data.data_path=4", "is 4, a whole number"),
    ],
)
def test_what_it_found_stays_mended(linear: Path, override: str, message: str) -> None:
    (linear.parent / "loop.py").symlink_to("loop.py")
    (linear.parent / "deep.py").write_text(f"x = {20_000 * '-'}1\n", encoding="utf-8")
    faults = check(linear, [override])
    assert message in "\n".join(f"'{fault.address}' {fault.message}" for fault in faults)


@pytest.mark.parametrize(
    ("base", "message"),
    [(r'"\0"', "embedded null byte"), ("x" * 300, "File name too long"), ("loop.yaml", "Symlink loop")],
)
def test_a_base_that_can_be_no_file_is_named(workspace: Workspace, base: str, message: str) -> None:
    config = workspace({"config.yaml": f"_base_: {base}\n"}) / "config.yaml"
    (config.parent / "loop.yaml").symlink_to("loop.yaml")
    assert [fault.address for fault in check(config) if message in fault.message] == ["_base_"]


def test_a_config_that_can_be_no_file_is_named() -> None:
    (fault,) = check(Path("a\0b.yaml"))
    assert fault.message == "cannot be read: embedded null byte; check the path"
