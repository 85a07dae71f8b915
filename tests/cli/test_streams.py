"""What a command does where its standard streams are closed, full, or cannot take every character; and where paths are odd."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TextIO

import pytest
from click.testing import Result

from pipeline import GeneralTrainer

Call = Callable[..., Result]
LONG = "a" * 300


def shell(words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A command line of ``pipeline`` in a shell, which closes and leads streams elsewhere."""
    line = f"{sys.executable} -m pipeline {words}"
    return subprocess.run(line, shell=True, capture_output=True, text=True, check=False, env=os.environ | variables)


@pytest.mark.parametrize("closed", [pytest.param("2>&-", marks=pytest.mark.slow), "<&- >&- 2>&-"])
@pytest.mark.slow
def test_a_run_needs_no_standard_streams(linear: Path, closed: str) -> None:
    assert shell(f"run {linear} {closed}").returncode == 0
    assert "to look at the run" in Path("runs/workspace/latest/log.txt").read_text(encoding="utf-8").splitlines()[-1]


PRINTS = """
import subprocess, sys
from pipeline.cli import _use_streams

_use_streams()
subprocess.run([sys.executable, "-c", "import os; os.fstat(1)"], check=True)
"""


def test_what_a_command_starts_has_an_output_where_the_command_has_none() -> None:
    command = f"{shlex.quote(sys.executable)} -c {shlex.quote(PRINTS)} >&-"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("words", ["show {}", "--help", "stages"])
def test_a_full_disk_under_stdout_is_one_line_and_the_code_of_storage(linear: Path, words: str) -> None:
    done = shell(f"{words.format(linear)} > /dev/full")
    full = "stdout: cannot be written: No space left on device; free the storage, or write elsewhere\n"
    assert (done.returncode, done.stderr) == (74, full)


def test_a_pipe_that_nobody_reads_needs_no_word(linear: Path) -> None:
    done = shell("schema | true; exit 0")
    assert done.stderr == ""


@pytest.fixture
def abandoned_pipe() -> Iterator[TextIO]:
    """The writing end of a pipe whose reader has left, as behind `head -1`."""
    reading, writing = os.pipe()
    os.close(reading)
    with suppress(BrokenPipeError), os.fdopen(writing, "w", encoding="utf-8") as pipe:
        yield pipe


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("words", "code"), [
    ("check {} runner.train_runner.epoch=3", 2),
    ("check {} runner.train_runner.epoch=3 --json", 2),
    ("show {}", 0),
])  # fmt: skip
def test_command_without_reader_keeps_its_exit_code(
    linear: Path, abandoned_pipe: TextIO, words: str, code: int
) -> None:
    """``check … | head -1`` in a script still says whether there is a fault."""
    line = [sys.executable, "-m", "pipeline", *words.format(linear).split()]
    done = subprocess.run(line, stdout=abandoned_pipe, stderr=abandoned_pipe, check=False)
    assert done.returncode == code


@pytest.mark.slow
def test_run_without_reader_trains_to_its_end(linear: Path, abandoned_pipe: TextIO) -> None:
    with (linear.parent / "data.py").open("a", encoding="utf-8") as file:
        file.write("\n\nprint('imported', flush=True)\n")
    line = [sys.executable, "-m", "pipeline", "run", str(linear)]
    done = subprocess.run(line, stdout=abandoned_pipe, stderr=abandoned_pipe, check=False)
    assert done.returncode == 0
    assert "to look at the run" in Path("runs/workspace/latest/log.txt").read_text(encoding="utf-8").splitlines()[-1]


class OnlyWrites:
    """What a program may put in the place of a standard stream: `print` needs no more than this."""

    def write(self, text: str) -> int:
        """Take a text."""
        return len(text)


@pytest.mark.parametrize("live", ["null", "true"])
def test_run_with_stderr_that_only_writes_trains(linear: Path, monkeypatch: pytest.MonkeyPatch, live: str) -> None:
    monkeypatch.setattr(sys, "stderr", OnlyWrites())
    monkeypatch.setattr(sys, "stdout", OnlyWrites())
    context = GeneralTrainer(linear, [f"plugins=[{{progress_bar: {{live: {live}}}}}]"]).run()
    assert context["train_state"]["iteration"] == 12


def test_run_with_live_bar_without_reader_trains(
    linear: Path, monkeypatch: pytest.MonkeyPatch, abandoned_pipe: TextIO
) -> None:
    """rich would end the process as soon as the bar cannot be drawn."""
    monkeypatch.setattr(sys, "stderr", abandoned_pipe)
    context = GeneralTrainer(linear, ["plugins=[{progress_bar: {live: true}}]"]).run()
    assert context["train_state"]["iteration"] == 12


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("encoding", ["latin-1", "ascii:strict"])
def test_what_a_stream_cannot_encode_comes_as_its_number(linear: Path, encoding: str) -> None:
    done = shell(f"graph {linear}", PYTHONIOENCODING=encoding)
    assert (done.returncode, done.stderr) == (0, "")
    assert "instance" in done.stdout


def test_a_program_without_a_console_or_a_command_line_can_run_a_config(
    linear: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.delattr(sys, "argv")
    context = GeneralTrainer(linear).run()
    assert context["train_state"]["iteration"] == 12
    assert "command: \n" in (context["run_dir"] / "command.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("words", [
    f"check {LONG}/{LONG}.yaml", f"run {{}} --resume {LONG}", f"resume {LONG}", f"checkpoint ls {LONG}", f"checkpoint show {LONG}",
    f"checkpoint verify {LONG}", f"checkpoint diff {LONG} {LONG}", f"checkpoint export {LONG} -o x.safetensors", f"new {LONG}",
    f"schema -o {LONG}", f"check {{}} output_dir={LONG}", f"check {{}} runner.train_runner.save_checkpoint_path={LONG}",
    f"check {{}} phase.line.name={LONG}", f"check {{}} runner.train_runner.name={LONG}", f"check {{}} name={LONG}",
    "check {} output_dir='a\0b'", "check {} workspace='a\0b'", "run {} --resume 'a\0b'",
])  # fmt: skip
def test_a_path_that_no_file_can_have_is_a_wrong_command_line(pipeline: Call, linear: Path, words: str) -> None:
    done = pipeline(*words.format(linear).replace("'", '"' if "=" in words else "").split(" "))
    assert (done.exit_code, type(done.exception)) == (2, SystemExit)
    assert "Traceback" not in done.output


@pytest.mark.parametrize("folder", ["${x}", "a{b}", "a\nb"])
def test_a_folder_whose_name_a_config_takes_for_something_else_is_refused_before_the_run(
    linear: Path, pipeline: Call, folder: str
) -> None:
    there = linear.parent.rename(linear.parents[1] / folder)
    done = pipeline("run", there / "config.yaml")
    assert done.exit_code == 2
    assert f"{str(there / 'config.yaml')!r} has " in done.stderr
    assert "in its name, which" in done.stderr
    assert not Path("runs").exists()
