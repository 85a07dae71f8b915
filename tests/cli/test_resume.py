"""``pipeline resume`` and ``pipeline run --resume``, after real kills."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from pipeline import GeneralTrainer
from pipeline.brain.checkpointer import Checkpointer

Call = Callable[..., Result]
Process = Callable[..., "subprocess.CompletedProcess[str]"]
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


def killed(process: Process, config: Path) -> Path:
    """The run directory of a run that was killed in its second epoch."""
    done = process("run", str(config), 'plugins=["{workspace}/kill.py"]', "runner.train_runner.save_interval=2")
    assert done.returncode == -signal.SIGKILL, done.stderr
    return Path("runs/workspace/latest").resolve()


def numbers(run_dir: Path) -> list[str]:
    """What must be the same in every run."""
    return (run_dir / "train_runner" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize(
    "how", ["resume", pytest.param("auto", marks=pytest.mark.slow), pytest.param("directory", marks=pytest.mark.slow)]
)
def test_a_killed_run_goes_on_in_its_directory_and_ends_like_one_that_was_not(
    pipeline: Call, process: Process, killing: Path, how: str
) -> None:
    run_dir = killed(process, killing)
    same = [str(killing), 'plugins=["{workspace}/kill.py"]', "runner.train_runner.save_interval=2"]
    commands = {
        "resume": ["resume", str(run_dir)],
        "auto": ["run", *same, "--resume", "auto"],
        "directory": ["run", *same, "--resume", str(run_dir)],
    }
    done = pipeline(*commands[how])
    assert done.exit_code == 0, done.stderr
    # A checkpoint is written while the next batches train: that of 8 may not be there yet.
    assert re.search(r"going on after iteration [68]", done.stderr)
    whole = pipeline("run", str(killing), "runner.train_runner.save_interval=2", "output_dir=whole")
    assert whole.exit_code == 0, whole.stderr
    unbroken = Path("whole/workspace/latest").resolve()
    assert numbers(run_dir) == numbers(unbroken)
    ours, theirs = (Checkpointer(each / "train_runner" / "checkpoints").newest() for each in (run_dir, unbroken))
    assert ours is not None
    assert theirs is not None
    assert (ours / "line.safetensors").read_bytes() == (theirs / "line.safetensors").read_bytes()


def test_resuming_a_finished_run_does_nothing(pipeline: Call, linear: Path) -> None:
    assert pipeline("run", str(linear)).exit_code == 0
    done = pipeline("resume", "runs/workspace/latest")
    assert done.exit_code == 0, done.stderr
    assert "train_runner is finished already" in done.stderr


def test_a_finished_run_goes_on_with_more_epochs_and_keeps_that_in_mind(pipeline: Call, linear: Path) -> None:
    assert pipeline("run", str(linear)).exit_code == 0
    done = pipeline("resume", "runs/workspace/latest", "runner.train_runner.epochs=3")
    assert done.exit_code == 0, done.stderr
    assert "train_runner was finished, and is to train for longer now" in done.stderr
    assert json.loads(numbers(Path("runs/workspace/latest"))[-1])["iteration"] == 18
    assert "epochs=3" in Path("runs/workspace/latest/command.txt").read_text(encoding="utf-8")


def test_what_is_no_override_is_refused(pipeline: Call, linear: Path) -> None:
    assert pipeline("run", str(linear)).exit_code == 0
    done = pipeline("resume", "runs/workspace/latest", "epochs")
    assert done.exit_code == 2
    assert "override 'epochs': is no override; write KEY=VALUE" in done.stderr


def test_a_folder_that_is_no_run_directory_is_refused(pipeline: Call, tmp_path: Path) -> None:
    done = pipeline("resume", str(tmp_path))
    assert done.exit_code == 2
    assert f"{tmp_path}: is no run directory, or its command.txt cannot be read" in done.stderr


def test_a_run_directory_that_others_may_write_to_is_refused(pipeline: Call, linear: Path) -> None:
    assert pipeline("run", str(linear)).exit_code == 0
    run_dir = Path("runs/workspace/latest").resolve()
    run_dir.chmod(0o777)
    done = pipeline("resume", str(run_dir))
    assert done.exit_code == 2
    assert f"{run_dir}: others may write to it, and it names code to run; chmod go-w it" in done.stderr


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_a_run_directory_of_somebody_else_is_refused(pipeline: Call, linear: Path) -> None:
    assert pipeline("run", str(linear)).exit_code == 0
    run_dir = Path("runs/workspace/latest").resolve()
    os.chown(run_dir, 65534, -1)
    done = pipeline("resume", str(run_dir))
    assert done.exit_code == 2
    assert f"{run_dir}: belongs to user 65534, and names code to run; run the config yourself" in done.stderr


def test_a_checkpoint_may_be_named_instead_of_the_run_directory(
    pipeline: Call, process: Process, killing: Path
) -> None:
    run_dir = killed(process, killing)
    done = pipeline("resume", "runs/workspace/latest/train_runner/checkpoints/step-000000000004")
    assert done.exit_code == 0, done.stderr
    assert f"going on after iteration 4, from {run_dir}/train_runner/checkpoints/step-000000000004" in done.stderr
    assert (
        "step-000000000006: comes after what the run goes on from; it is now .later-step-000000000006-" in done.stderr
    )


def test_checkpoints_none_of_which_is_valid_are_exit_code_78(pipeline: Call, process: Process, killing: Path) -> None:
    run_dir = killed(process, killing)
    for each in (run_dir / "train_runner/checkpoints").glob("step-*/state.json"):
        each.unlink()
    for how in (["resume", str(run_dir)], ["run", str(killing), "--resume", "auto"]):
        done = pipeline(*how)
        assert done.exit_code == 78, done.stderr
        assert "is valid; bring one back from a copy, or begin a new run" in done.stderr
        assert "Traceback" not in done.stderr


def test_a_run_directory_in_use_is_exit_code_73(pipeline: Call, linear: Path) -> None:
    assert pipeline("run", str(linear)).exit_code == 0
    with open("runs/workspace/latest/lock", "r+", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.truncate(0)
        lock.write(f"host {socket.gethostname()}, pid {os.getpid()}, since 2026-01-01T00:00:00+00:00\n")
        lock.flush()
        done = pipeline("resume", "runs/workspace/latest")
    assert done.exit_code == 73
    assert re.search(r"is in use by host \S+, pid \d+, since 20\S+; wait for it, or stop it", done.stderr)


LIMIT = (
    "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2); del sys.argv[1]; "
)
MAIN = "sys.argv[0] = 'pipeline'; runpy.run_module('pipeline', run_name='__main__')"


@pytest.mark.parametrize(
    ("size", "refused"), [(0, "lock"), (100, "command.txt"), (4000, "context.json|checkpoints/step-000000000006")]
)
@pytest.mark.slow
def test_a_disk_that_is_full_is_exit_code_74_and_the_run_goes_on_with_more_space(
    pipeline: Call, size: int, refused: str, linear: Path
) -> None:
    command = [sys.executable, "-c", LIMIT + MAIN, str(size), "run", str(linear), "-q"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 74, done.stderr
    assert "Traceback" not in done.stderr
    assert re.search(
        rf"/({refused}): cannot be (written|saved): File too large; free or repair the storage", done.stderr
    )
    again = pipeline("run", str(linear), "--resume", "auto")
    assert again.exit_code == 0, again.stderr


def test_an_output_dir_that_is_a_file_is_told_before_anything_is_run(pipeline: Call, linear: Path) -> None:
    Path("runs").touch()
    done = pipeline("run", str(linear))
    assert done.exit_code == 2
    assert "output_dir: 'runs' is a file; name a folder" in done.stderr


REMOVE = """
import shutil
from pipeline import hookimpl

class Plugin:
    @hookimpl
    def before_batch(self, context):
        if context["train_state"]["iteration"] == {at}:
            # A checkpoint may be in work, which puts new files there.
            while context["run_dir"].exists():
                shutil.rmtree(context["run_dir"], ignore_errors=True)
"""


@pytest.mark.parametrize("at", [2, 8])
def test_a_run_directory_that_is_removed_while_it_runs_is_exit_code_74(pipeline: Call, at: int, linear: Path) -> None:
    (linear.parent / "remove.py").write_text(REMOVE.format(at=at), encoding="utf-8")
    done = pipeline("run", str(linear), 'plugins=["{workspace}/remove.py"]')
    assert done.exit_code == 74, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("overrides: [1", "command.txt cannot be read"),
        ("overrides: {}", "its overrides are {}"),
        ("config: None", "use GeneralTrainer"),
        ("folder: /no/such/folder", "the folder /no/such/folder is not there any more"),
        ("", "has no folder; name the config yourself: pipeline run CONFIG --resume "),
    ],
)
def test_a_command_txt_that_makes_no_sense_is_refused(pipeline: Call, line: str, told: str, linear: Path) -> None:
    run_dir = GeneralTrainer(linear).run()["run_dir"]
    file = run_dir / "command.txt"
    file.write_text(f"{file.read_text()}{line}\n" if line else f"config: {linear}\noverrides: []\n", encoding="utf-8")
    done = pipeline("resume", str(run_dir))
    assert done.exit_code == 2
    assert told in " ".join(done.stderr.split())


def test_a_command_line_of_several_lines_can_be_resumed(pipeline: Call, linear: Path) -> None:
    (linear.parent / "report.py").write_text("text = None", encoding="utf-8")  # A program beside the config.
    assert pipeline("run", str(linear), "+hyper_parameters.text='two\n\nlines: x'").exit_code == 0
    done = pipeline("resume", "runs/workspace/latest")
    assert done.exit_code == 0, done.stderr


def test_a_command_txt_that_others_may_write_to_is_refused(pipeline: Call, linear: Path) -> None:
    run_dir = GeneralTrainer(linear).run()["run_dir"]
    (run_dir / "command.txt").chmod(0o666)
    done = pipeline("resume", str(run_dir))
    assert done.exit_code == 2
    assert "command.txt: others may write to it, and it names code to run; chmod go-w it" in done.stderr
