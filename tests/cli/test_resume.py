"""``pipeline resume`` and ``pipeline run --resume``, after real kills."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.checkpoint.checkpointer import Checkpointer

KILL = """
    import os, signal
    from pathlib import Path
    from pipeline import hookimpl

    class Plugin:
        @hookimpl
        def before_batch(self, context):
            if context["train_state"]["iteration"] == 8 and not Path("killed").exists():
                Path("killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def killing(linear: Path) -> Path:
    """The linear config, with a plugin that kills the process once, after 8 of 12 iterations."""
    (linear.parent / "kill.py").write_text("\n".join(line[4:] for line in KILL.splitlines()), encoding="utf-8")
    return linear


def pipeline(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command, in a process of its own."""
    command = [sys.executable, "-m", "pipeline", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def killed(config: Path) -> Path:
    """The run directory of a run that was killed in its second epoch."""
    done = pipeline("run", str(config), 'plugins=["{workspace}/kill.py"]', "runner.train_runner.save_interval=2")
    assert done.returncode == -signal.SIGKILL, done.stderr
    return Path("runs/workspace/latest").resolve()


def numbers(run_dir: Path) -> list[str]:
    """What must be the same in every run."""
    return (run_dir / "train_runner" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("how", ["resume", "auto", "directory"])
def test_a_killed_run_goes_on_in_its_directory_and_ends_like_one_that_was_not(killing: Path, how: str) -> None:
    run_dir = killed(killing)
    same = [str(killing), 'plugins=["{workspace}/kill.py"]', "runner.train_runner.save_interval=2"]
    commands = {
        "resume": ["resume", str(run_dir)],
        "auto": ["run", *same, "--resume", "auto"],
        "directory": ["run", *same, "--resume", str(run_dir)],
    }
    done = pipeline(*commands[how])
    assert done.returncode == 0, done.stderr
    assert "going on after iteration 8" in done.stderr
    whole = pipeline("run", str(killing), "runner.train_runner.save_interval=2", "output_dir=whole")
    assert whole.returncode == 0, whole.stderr
    unbroken = Path("whole/workspace/latest").resolve()
    assert numbers(run_dir) == numbers(unbroken)
    ours, theirs = (Checkpointer(each / "train_runner" / "checkpoints").newest() for each in (run_dir, unbroken))
    assert ours is not None
    assert theirs is not None
    assert (ours / "line.safetensors").read_bytes() == (theirs / "line.safetensors").read_bytes()


def test_resuming_a_finished_run_does_nothing(linear: Path) -> None:
    assert pipeline("run", str(linear)).returncode == 0
    done = pipeline("resume", "runs/workspace/latest")
    assert done.returncode == 0, done.stderr
    assert "train_runner is finished already" in done.stderr


def test_a_folder_that_is_no_run_directory_is_refused(tmp_path: Path) -> None:
    done = pipeline("resume", str(tmp_path))
    assert done.returncode == 2
    assert f"{tmp_path}: is no run directory, or its command.txt cannot be read" in done.stderr


def test_a_run_directory_that_others_may_write_to_is_refused(linear: Path) -> None:
    assert pipeline("run", str(linear)).returncode == 0
    run_dir = Path("runs/workspace/latest").resolve()
    run_dir.chmod(0o777)
    done = pipeline("resume", str(run_dir))
    assert done.returncode == 2
    assert f"{run_dir}: others may write to it, and it names code to run; chmod go-w it" in done.stderr


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_a_run_directory_of_somebody_else_is_refused(linear: Path) -> None:
    assert pipeline("run", str(linear)).returncode == 0
    run_dir = Path("runs/workspace/latest").resolve()
    os.chown(run_dir, 65534, -1)
    done = pipeline("resume", str(run_dir))
    assert done.returncode == 2
    assert f"{run_dir}: belongs to user 65534, and names code to run; run the config yourself" in done.stderr
