"""What the tests share: a workspace made of files, and a folder of their own to run in."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import pytest
from click import Context
from click.testing import CliRunner, Result
from forked_runs import Zygote
from loguru import logger

from pipeline.cli import group
from tests.distributed.ranks import Ranks

REPOSITORY = Path(__file__).parents[1]
Workspace = Callable[..., Path]
_Case = TypeVar("_Case")

RUN_FILES = {
    "config.yaml",
    "environment.json",
    "command.txt",
    "log.txt",
    "lock",
    "status.json",
    "context.json",
    "swaps.txt",
}
"""The files in the folder of a run, whatever its stages are."""
Process = Callable[..., "subprocess.CompletedProcess[str]"]

# Each process of the tests computes on one core; read when torch is imported, by programs that a test starts too.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# torch looks up the name of each host that connects to its store. If the name server does not answer, wait for one
# second instead of five.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
# What a shell starts in the background ignores Ctrl-C, and so does what it starts; tests send it to runs.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """A few files are quicker in one process: only all tests together are shared out."""
    return None if config.args_source is pytest.Config.ArgsSource.TESTPATHS else 0


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark cases as slow, where a function says with ``quick_cases`` how many of them are quick."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if "quick_cases" in marks and not marks & {"slow", "release"}:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for of_function in cases.values():
        mark = of_function[0].get_closest_marker("quick_cases")
        assert mark
        quick = evenly(of_function, mark.args[0])
        for item in of_function:
            if item not in quick:
                item.add_marker("slow")


def evenly(cases: Sequence[_Case], number: int) -> list[_Case]:
    """Choose so many cases: the first, the last, and others at equal distances between them."""
    step = (len(cases) - 1) / max(number - 1, 1)
    return [cases[round(each * step)] for each in range(number)]


class LogSinks:
    """The sinks of the log, which are the same for each test."""

    def __init__(self) -> None:
        self._clean = ""

    def restore(self) -> None:
        """Leave one sink, stderr, if there are others or none; to add one takes milliseconds."""
        # The representation lists the sinks.
        if repr(logger) != self._clean:
            logger.remove()
            logger.add(sys.stderr)
            self._clean = repr(logger)


@pytest.fixture(scope="session")
def _log_sinks() -> LogSinks:
    return LogSinks()


@pytest.fixture(autouse=True)
def _clean_process(_log_sinks: LogSinks) -> Iterator[None]:
    """Give each test the same log sink, and restore the environment variables that it changes."""
    variables = dict(os.environ)
    _log_sinks.restore()
    yield
    changed = dict(os.environ)
    # pytest sets this one itself.
    changed["PYTEST_CURRENT_TEST"] = variables["PYTEST_CURRENT_TEST"]
    if changed != variables:
        os.environ.clear()
        os.environ.update(variables)


@pytest.fixture(autouse=True)
def _own_folder(_clean_process: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs go to the test's own folder, since they are relative to where a command runs."""
    folder = tmp_path / "cwd"
    folder.mkdir()
    monkeypatch.chdir(folder)


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """Writes files into a folder and returns the folder: ``workspace({"config.yaml": "…", "data.py": "…"})``."""
    from pipeline import testing  # noqa: PLC0415 - torch has to find OMP_NUM_THREADS

    return lambda files, name="workspace": testing.write_files(tmp_path / name, files)


@pytest.fixture
def pipeline() -> Callable[..., Result]:
    """Calls a command in this process: ``pipeline("check", path)``."""

    def call(*arguments: object) -> Result:
        return CliRunner().invoke(group, [str(argument) for argument in arguments], prog_name="pipeline")

    return call


def command_texts() -> dict[str, str]:
    """Every command, in order, and what it does: the first line of its help."""
    context = Context(group)
    texts = {}
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        texts[name] = str(command and command.help).splitlines()[0]
    return texts


@pytest.fixture
def log_lines() -> Iterator[list[str]]:
    """What is logged while the test runs."""
    lines: list[str] = []
    sink = logger.add(lambda line: lines.append(str(line)), level="DEBUG", format="{level} {message}")
    yield lines
    logger.remove(sink)


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """Forks processes from one that has imported torch, which takes a new one two seconds."""
    with Zygote() as zygote:
        yield zygote


@pytest.fixture
def process(zygote: Zygote, tmp_path: Path) -> Process:
    """A command in a process and a group of its own: ``process("run", path)``."""
    output, errors = tmp_path / "stdout", tmp_path / "stderr"

    def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
        command = [str(argument) for argument in arguments]
        output.write_bytes(b"")
        errors.write_bytes(b"")
        with zygote.start(Path.cwd(), command, errors, os.environ | environment, output) as forked:
            code = forked.wait()
        assert code is not None
        return subprocess.CompletedProcess(command, code, output.read_text("utf-8"), errors.read_text("utf-8"))

    return run


@pytest.fixture
def linear(tmp_path: Path) -> Path:
    """The path of a small complete config: a line fitted by torch.nn.Linear, 6 batches to an epoch."""
    from pipeline import testing  # noqa: PLC0415 - torch has to find OMP_NUM_THREADS

    return testing.Workspace(tmp_path / "workspace").config


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    """Two processes: ``two_ranks(function, argument)`` is what the function returns on each."""
    ranks = Ranks(2)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def three_ranks() -> Iterator[Ranks]:
    """Three processes, likewise."""
    ranks = Ranks(3)
    yield ranks
    ranks.stop()
