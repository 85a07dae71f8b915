"""Where log lines go: to stderr as far as asked for, and in full to the run's log.txt."""

from __future__ import annotations

import fcntl
import gc
import io
import logging
import os
import re
import resource
import signal
import struct
import sys
import termios
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from loguru import logger

from pipeline import GeneralTrainer, hookspecs, load
from pipeline.errors import StorageError
from pipeline.run import log


@pytest.fixture
def _stderr_as_before() -> Iterator[None]:
    """Puts loguru's own sink back, which ``to_stderr`` takes away."""
    yield
    logger.remove()
    logger.add(sys.stderr)


@pytest.mark.parametrize(
    ("level", "seen"),
    [("WARNING", ["warn"]), ("INFO", ["inform", "warn"]), ("DEBUG", ["detail", "inform", "warn"])],
    ids=["-q", "default", "-v"],
)
@pytest.mark.usefixtures("_stderr_as_before")
def test_stderr_gets_the_lines_from_its_level_up_and_the_file_gets_all(
    level: str, seen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", stderr := io.StringIO())
    log.to_stderr(level)
    with log.to_file(Path("log.txt"), rank=0):
        logger.debug("detail")
        logger.info("inform")
        logger.warning("warn")
    assert [line.split()[-1] for line in stderr.getvalue().splitlines()] == seen
    assert [line.split()[-1] for line in Path("log.txt").read_text().splitlines()] == ["detail", "inform", "warn"]


def shown(columns: int, level: str, message: str) -> str:
    """What a terminal of so many columns is sent for a line of the log, without colours."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with open(theirs, "w", buffering=1) as stderr, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", stderr)
        log.to_stderr("INFO")
        logger.log(level, message)
        sent = os.read(ours, 65536).decode()
    os.close(ours)
    return re.sub(r"\x1b\[[\d;]*m", "", sent).replace("\r\n", "\n")


INDENT = 17 * " "


@pytest.mark.usefixtures("_stderr_as_before")
def test_a_narrow_terminal_has_breaks_between_words_and_keeps_a_number_beside_its_name() -> None:
    line = shown(50, "INFO", "epoch 0 done  loss 0.5911  valid_loss 0.4975  gradient 12  of 3")
    assert line[17:] == f"epoch 0 done  loss 0.5911\n{INDENT}valid_loss 0.4975  gradient 12\n{INDENT}of 3\n"


@pytest.mark.usefixtures("_stderr_as_before")
def test_a_command_on_a_line_of_its_own_and_a_word_that_is_too_long_are_not_broken() -> None:
    path = "/".join(20 * ["folder"])
    line = shown(60, "WARNING", f"go on in {path} by\n  pipeline resume {path}")
    assert line[9:] == f"WARNING go on in\n{INDENT}{path}\n{INDENT}by\n  pipeline resume {path}\n"


@pytest.mark.usefixtures("_stderr_as_before")
@pytest.mark.parametrize("columns", [20, 200])
def test_a_wide_terminal_and_one_too_narrow_for_any_word_get_lines_as_they_are(columns: int) -> None:
    assert shown(columns, "INFO", "one two three four five six seven")[17:] == "one two three four five six seven\n"


@pytest.mark.usefixtures("_stderr_as_before")
def test_lines_go_to_the_stderr_of_the_moment_and_not_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    log.to_stderr("INFO")
    other = io.StringIO()
    logger.info("first")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", other)
        logger.info("second")
    printed = capsys.readouterr()
    assert (printed.out, "first" in printed.err, "second" in printed.err) == ("", True, False)
    assert "second" in other.getvalue()


def test_lines_in_the_file_name_level_rank_and_place() -> None:
    with log.to_file(Path("log.txt"), rank=3):
        logger.warning("tree is {lost} <red>")
    line = Path("log.txt").read_text()
    assert "WARNING rank 3 " in line
    assert "test_log:" in line
    assert line.endswith("tree is {lost} <red>\n")


def test_standard_logging_ends_up_in_the_file_with_its_logger_level_and_traceback() -> None:
    with log.to_file(Path("log.txt"), rank=0):
        logging.getLogger("other.package").warning("%d {trees} <b>", 3)
        try:
            {}["rotten"]
        except KeyError:
            logging.getLogger("other").exception("caught")
    text = Path("log.txt").read_text()
    assert "other.package: 3 {trees} <b>" in text
    assert "WARNING" in text
    assert "other: caught\nTraceback" in text
    assert "KeyError: 'rotten'" in text


def test_a_level_that_loguru_does_not_know_keeps_its_number() -> None:
    logging.addLevelName(25, "NOTICE")
    with log.to_file(Path("log.txt"), rank=0):
        logging.getLogger("some").log(25, "read this")
    assert "Level 25" in Path("log.txt").read_text()


def test_warnings_end_up_in_the_file_with_category_and_place() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        with log.to_file(Path("log.txt"), rank=0):
            warnings.warn("old way of planting", DeprecationWarning, stacklevel=1)
    text = Path("log.txt").read_text()
    assert f"{__file__}:" in text
    assert "DeprecationWarning: old way of planting" in text


@pytest.mark.parametrize("error", [None, ValueError("no")])
def test_logging_and_warnings_are_as_before_afterwards(error: Exception | None) -> None:
    before = (logging.root.handlers[:], logging.root.level, warnings.showwarning)
    with pytest.raises(ValueError, match="no") if error else warnings.catch_warnings(), log.to_file(Path("log.txt"), 0):
        assert logging.root.handlers != before[0]
        if error:
            raise error
    logger.info("later")
    assert (logging.root.handlers, logging.root.level, warnings.showwarning) == before
    assert "later" not in Path("log.txt").read_text()


OWN = """
import logging, warnings
from loguru import logger
from pipeline import stages

class Startup(stages.Startup):
    def startup(self, context):
        logging.getLogger("mine").info("by logging")
        logging.info("by root")
        logger.debug("by loguru")
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("by warnings", stacklevel=1)
"""


def test_what_a_stage_logs_in_any_way_is_in_the_runs_log(linear: Path) -> None:
    (linear.parent / "own.py").write_text(OWN)
    handlers = logging.root.handlers[:]
    GeneralTrainer(linear, ["runner.train_runner.startup_class_path={workspace}/own.py"]).run()
    text = Path("runs/workspace/latest/log.txt").read_text()
    for each in ("mine: by logging", "root: by root", "by loguru", "UserWarning: by warnings"):
        assert each in text
    assert logging.root.handlers == handlers


def test_a_second_run_writes_nothing_into_the_log_of_the_first(linear: Path) -> None:
    trainer = GeneralTrainer(linear)
    first = trainer.run()["run_dir"] / "log.txt"
    before = first.read_bytes()
    trainer.run()
    assert first.read_bytes() == before


@contextmanager
def largest(size: int) -> Iterator[None]:
    """Files may be no larger in the block, as if the disk were full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_told_once_and_lines_go_on_when_there_is_space(capsys: pytest.CaptureFixture[str]) -> None:
    with log.to_file(Path("log.txt"), rank=0):
        logger.info("first")
        with largest(Path("log.txt").stat().st_size):
            logger.info("second")
            told = [line for line in capsys.readouterr().err.splitlines() if "log.txt" in line]
            logger.info("third")
        logger.info("fourth")
    assert told == ["log.txt: cannot be written: File too large; lines are missing in it; free or repair the storage"]
    assert "log.txt" not in capsys.readouterr().err
    assert [line.split()[-1] for line in Path("log.txt").read_text().splitlines()] == ["first", "fourth"]


def test_a_log_that_cannot_be_opened_is_a_storage_error() -> None:
    with (
        pytest.raises(StorageError, match=r"gone/log.txt: cannot be written: No such file"),
        log.to_file(Path("gone/log.txt"), rank=0),
    ):
        pass


def state_of_python() -> dict[str, Any]:
    """What a run must leave as it was: handlers of signals, logs, warnings and errors, streams, threads."""
    core = logger._core  # type: ignore[attr-defined]
    return {
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "loguru": (dict(core.handlers), dict(core.extra)),
        "logging": (logging.root.handlers[:], logging.root.level, logging.lastResort),
        "warnings": (warnings.showwarning, warnings.filters[:]),
        "errors": (sys.excepthook, sys.unraisablehook, threading.excepthook),
        "sys": (sys.stdout, sys.stderr, sys.displayhook, sys.path[:], sys.gettrace(), gc.isenabled()),
        "others": (threading.enumerate(), Path.cwd(), hookspecs.observer, torch.get_num_threads()),
    }


@pytest.mark.parametrize("size", [1, 2])
def test_a_run_in_python_leaves_nothing_behind_whether_it_fails_or_not(size: int, linear: Path) -> None:
    # Which torch imports with its first optimizer, and which adds to the filters of warnings for good.
    import_module("sympy.utilities.exceptions")
    before = state_of_python()
    options = [f"phase.line.model_args={{in_features: {size}, out_features: 1}}", "runner.train_runner.threads=2"]
    with nullcontext() if size == 1 else pytest.raises(RuntimeError):
        GeneralTrainer(linear, ["plugins=[{progress_bar: {live: true}}]", *options]).run()
    assert state_of_python() == before


def test_loading_a_trained_model_leaves_nothing_behind(linear: Path) -> None:
    GeneralTrainer(linear, ["runner.train_runner.threads=2"]).run()
    before = state_of_python()
    load("runs/workspace/latest", "last")
    assert state_of_python() == before


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (("info", "%d of %s", 3, "four"), "INFO 3 of four"),
        (("info", "%(x)d", {"x": 1}), "INFO 1"),
        (("info", "{} of {x}", 3), "INFO {} of {x} 3"),
        (("info", "100% of {}", 3), "INFO 100% of 3"),
        (("info", "config {'lr': %.1f}", 0.1), "INFO config {'lr': 0.1}"),
        (("info", "loss", 3), "INFO loss 3"),
        (("info", "100% {"), "INFO 100% {"),
        (("warn", "%d", 3), "WARNING 3"),
        (("log", logging.ERROR, "%d", 3), "ERROR 3"),
        (("log", "SUCCESS", "{}", 3), "SUCCESS 3"),
        (("log", 25, "three"), "Level 25 three"),
    ],
)
def test_an_experiments_logger_takes_arguments_as_standard_logging_and_as_loguru(
    call: tuple[Any, ...], line: str
) -> None:
    lines: list[str] = []
    sink = logger.add(lines.append, format="{level} {message} {function}")
    getattr(log.StandardLogger(), call[0])(*call[1:])
    logger.remove(sink)
    assert lines == [f"{line} {sys._getframe().f_code.co_name}\n"]


def test_an_experiments_logger_shows_the_error_where_it_is_asked_to() -> None:
    lines: list[str] = []
    sink = logger.add(lines.append, format="{message}")
    try:
        int("too large")
    except ValueError as error:
        log.StandardLogger().error("step %d", 3, exc_info=True)
        log.StandardLogger().error("step %d", 4, exc_info=error)
    logger.remove(sink)
    assert [line.startswith(f"step {step}\nTraceback") for step, line in zip((3, 4), lines, strict=True)] == [True] * 2
    assert all("ValueError: invalid literal" in line for line in lines)
