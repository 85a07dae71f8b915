"""The progress bar: a bar in a terminal, lines elsewhere."""

from __future__ import annotations

import io
import os
import re
import select
import sys
import textwrap
from itertools import chain
from pathlib import Path

import pytest
from forked_runs import Zygote

from pipeline import GeneralTrainer

TALKING = """
    import sys
    from loguru import logger
    from pipeline import hookimpl

    class Plugin:
        @hookimpl
        def after_batch(self, context):
            iteration = context["train_state"]["iteration"]
            print("printed", iteration)
            logger.warning(f"logged {iteration}")
"""
FAILING = """
    from pipeline import hookimpl

    class Plugin:
        @hookimpl
        def on_print_interval(self):
            raise ZeroDivisionError("in the middle of an epoch")
"""


class Terminal(io.StringIO):
    """A stderr that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


def with_plugin(config: Path, source: str) -> Path:
    (config.parent / "mine.py").write_text(textwrap.dedent(source), encoding="utf-8")
    with config.open("a", encoding="utf-8") as file:
        file.write("plugins: [mine.py]\n")
    return config


def screen(output: str) -> list[str]:
    """What a terminal shows in the end: carriage return, line feed, cursor up, erase line and text; colours ignored."""
    lines, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[[?\d;]*[A-Za-z]|[\r\n]|[^\x1b\r\n]+", output):
        if part == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif part == "\r":
            column = 0
        elif part.startswith("\x1b"):
            row -= int(part[2:-1] or 1) if part.endswith("A") else 0
            lines[row] = "" if part == "\x1b[2K" else lines[row]
        else:
            lines[row] = lines[row][:column].ljust(column) + part + lines[row][column + len(part) :]
            column += len(part)
    return lines


def run_in_terminal(zygote: Zygote, config: Path, output: Path | None = None) -> str:
    """What ``pipeline run`` shows with stderr, and stdout but where it goes to a file, on a pseudo-terminal of its own."""
    ours, theirs = os.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120"}
    shown = b""
    with zygote.start(Path.cwd(), ["run", str(config)], Path(os.ttyname(theirs)), environment, output) as run:
        # While theirs is open, the end of the run is no end of what can be read.
        while select.select([ours], [], [], 0.1)[0] or run.wait(0) is None:
            if select.select([ours], [], [], 0)[0]:
                shown += os.read(ours, 65536)
    os.close(theirs)
    os.close(ours)
    assert run.code == 0, shown.decode()
    return shown.decode()


def test_a_terminal_shows_a_bar_that_leaves_every_line_whole_and_nothing_of_itself(
    zygote: Zygote, linear: Path
) -> None:
    output = run_in_terminal(zygote, with_plugin(linear, TALKING))
    assert re.search(r"epoch 1 .*━.*6/6.*line loss \d", output)
    lines = [re.sub(r"^\d\d:\d\d:\d\d | (in|results) .*", "", line.rstrip()) for line in screen(output)]
    talk = [[f"printed {number}", f"WARNING logged {number}"] for number in range(1, 13)]
    first, second = (list(chain.from_iterable(each)) for each in (talk[:6], talk[6:]))
    ends = ["INFO    epoch 0 done", "INFO    epoch 1 done", "INFO    train_runner done;"]
    assert lines[lines.index("printed 1") :] == [*first, ends[0], *second, *ends[1:], ""]


def test_what_is_printed_goes_to_stdout_while_stderr_shows_a_bar(zygote: Zygote, linear: Path) -> None:
    output = run_in_terminal(zygote, with_plugin(linear, TALKING), Path("printed"))
    assert Path("printed").read_text(encoding="utf-8").splitlines() == [f"printed {number}" for number in range(1, 13)]
    assert "━" in output
    assert "printed 1" not in output


def test_without_a_terminal_there_is_one_line_per_print_interval(linear: Path, log_lines: list[str]) -> None:
    GeneralTrainer(linear).run()
    reports = [line for line in log_lines if "  batch " in line]
    number = r"line loss \d+\.\d{4}  learning_rate 0\.1000  samples_per_second [\d,.]+"
    for report, place in zip(reports, ["0  batch 3/6", "0  batch 6/6", "1  batch 3/6", "1  batch 6/6"], strict=True):
        assert re.fullmatch(rf"INFO epoch {place}  {number}", report.strip())


@pytest.mark.parametrize(("live", "shown"), [("true", True), ("false", False)])
def test_the_bar_may_be_forced_or_forbidden(
    linear: Path, monkeypatch: pytest.MonkeyPatch, live: str, shown: bool
) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    GeneralTrainer(linear, [f"plugins=[{{progress_bar: {{live: {live}}}}}]"]).run()
    assert ("━" in sys.stderr.getvalue()) is shown


def test_the_bar_is_taken_down_when_the_run_fails(linear: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with pytest.raises(ZeroDivisionError):
        GeneralTrainer(with_plugin(linear, FAILING)).run()
    assert sys.stderr is terminal
    assert terminal.getvalue().rindex("\x1b[?25h") > terminal.getvalue().rindex("\x1b[?25l")
    assert not [line for line in screen(terminal.getvalue()) if "━" in line]


def test_a_loader_without_a_length_has_a_bar_without_an_end(linear: Path, log_lines: list[str]) -> None:
    stream = """
        from torch.utils.data import IterableDataset
        from .data import Line

        class Stream(IterableDataset):
            def __iter__(self):
                return iter(Line(24)[index] for index in range(24))
    """
    (linear.parent / "stream.py").write_text(textwrap.dedent(stream), encoding="utf-8")
    data = ['dataset.train_data.class_path="{workspace}/stream.py:Stream"', "dataset.train_data.args={}"]
    GeneralTrainer(linear, data).run()
    assert any("epoch 0  batch 3/?  line loss" in line for line in log_lines)


def test_a_bar_in_a_terminal_that_was_closed_ends_no_run(linear: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    master, terminal = os.openpty()
    os.close(master)
    with io.TextIOWrapper(io.FileIO(terminal, "w"), write_through=True) as stderr, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stderr)
        context = GeneralTrainer(linear, ["plugins=[{progress_bar: {live: true}}]"]).run()
    assert context["train_state"]["iteration"] == 12


INTERRUPTED = """
    from pipeline import hookimpl

    class Plugin:
        @hookimpl
        def before_batch(self, context):
            if context["train_state"]["iteration"] == 9 and context["checkpointer"]._resumed is None:
                raise ZeroDivisionError("in the middle of the second epoch")
"""


def test_a_resumed_run_counts_the_batches_of_the_whole_epoch(linear: Path, log_lines: list[str]) -> None:
    overrides = ["runner.train_runner.save_interval=2"]
    with pytest.raises(ZeroDivisionError):
        GeneralTrainer(with_plugin(linear, INTERRUPTED), overrides).run()
    GeneralTrainer(linear, overrides, resume="auto").run()
    assert "batch 6/6" in next(line for line in reversed(log_lines) if "epoch 1  batch" in line)
