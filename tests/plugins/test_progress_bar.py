"""The progress bar: a bar in a terminal, lines elsewhere."""

from __future__ import annotations

import builtins
import io
import os
import re
import select
import signal
import sys
import textwrap
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from threading import Event

import pytest
import yaml
from click.testing import Result
from forked_runs import Zygote
from pipeline_plugins.progress_bar import Bar, ProgressBar

from pipeline import Context, GeneralTrainer, hookimpl

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
    lines = [
        re.sub(r"^\d\d:\d\d:\d\d | (in|saved|pipeline|\d+\.\d s;) .*", "", line.rstrip()) for line in screen(output)
    ]
    talk = [[f"printed {number}", f"WARNING logged {number}"] for number in range(1, 13)]
    first, second = (list(chain.from_iterable(each)) for each in (talk[:6], talk[6:]))
    ends = ["epoch 0 done", "epoch 1 done", "train_runner took", "train_runner done;", "to look at the run:"]
    first_end, *last_ends = (f"INFO    {end}" for end in ends)
    assert lines[lines.index("printed 1") :] == [*first, first_end, *second, *last_ends, ""]


def test_a_line_wider_than_the_terminal_is_not_cut_and_one_without_an_end_comes_with_its_end(
    zygote: Zygote, linear: Path
) -> None:
    printing = """
        import sys
        from pipeline import hookimpl

        class Plugin:
            @hookimpl
            def after_batch(self, context):
                print("[bold]" + 50 * "wide " + "end", flush=True)
                print("half", end="", flush=True)
                sys.stderr.writelines(["no ", "line "])
                print(" and the other")
                if context["train_state"]["iteration"] == 12:
                    print("the last has no end", end="")
    """
    lines = [line.rstrip() for line in screen(run_in_terminal(zygote, with_plugin(linear, printing)))]
    assert [line for line in lines if "bold" in line] == 12 * ["[bold]" + 50 * "wide " + "end"]
    assert [line for line in lines if "half" in line] == 12 * ["half and the other"]
    assert len([line for line in lines if "the last has no end" in line]) == 1
    # As without a bar, the line of an epoch, of six batches, follows on what was begun in that stream.
    assert len([line for line in lines if line.startswith(6 * "no line ")]) == 2


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


SLOW = """
    import time
    from pipeline import hookimpl

    class Plugin:
        @hookimpl
        def after_batch(self):
            time.sleep(0.1)

    class Score:
        def update(self, predictions, target):
            time.sleep(0.1)
        def compute(self):
            return 1.0
        def reset(self):
            pass
"""


SCORE = 'phase.line.metrics={score: {class: "{workspace}/mine.py:Score"}}'


def shown(monkeypatch: pytest.MonkeyPatch, config: Path, *overrides: str) -> str:
    """What a run shows on a terminal, without colours."""
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", Terminal())
        GeneralTrainer(config, overrides).run()
        return re.sub(r"\x1b\[[\d;]*m", "", sys.stderr.getvalue())


@pytest.mark.slow
def test_it_moves_by_the_clock_while_nothing_is_reported_and_at_most_ten_times_a_second(
    linear: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = time.monotonic()
    output = shown(monkeypatch, with_plugin(linear, SLOW), "runner.train_runner.print_interval=null")
    places = re.findall(r"epoch (\d) ━[^\r]* (\d)/6", output)
    assert places == sorted(places)
    assert {*places} > {("0", "0"), ("1", "6")}
    assert len({*places}) > 5
    # A line of the log needs a redraw too.
    assert len(places) <= 10 * (time.monotonic() - began) + 5


@pytest.mark.slow
def test_a_validation_is_shown_while_it_runs(linear: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = shown(monkeypatch, with_plugin(linear, SLOW.replace("after_batch", "after_pipeline")), SCORE)
    counts = re.findall(r"epoch 0 validation ━[^\r]* (\d)/6 [^\r]* line", output)
    assert counts == sorted(counts)
    assert {*counts} & {*"12345"}
    assert re.search(r"epoch 1 ━.*6/6.*line loss \d", output.rpartition("epoch 1 validation")[2])


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("valid", ["train_data", "null"])
def test_the_evaluation_of_an_infer_runner_is_shown(linear: Path, monkeypatch: pytest.MonkeyPatch, valid: str) -> None:
    runners = "runner=[{name: t, class: train, device: cpu, epochs: 1}, {name: i, class: infer, device: cpu}]"
    config = with_plugin(linear, SLOW.replace("after_batch", "after_pipeline"))
    output = shown(monkeypatch, config, runners, SCORE, f"phase.line.valid_dataset_name={valid}")
    assert re.search(r"evaluation ━[^\r]* [1-5]/6 [^\r]* line", output)


def test_an_experiment_has_a_bar_without_an_end(
    monkeypatch: pytest.MonkeyPatch, pipeline: Callable[..., Result]
) -> None:
    pipeline("new", "mine", "--kind", "experiment")
    assert re.search(r"epoch 4 ━[^\r]* \d+/\?", shown(monkeypatch, Path("mine/config.yaml")))


def test_a_process_that_is_forked_while_the_bar_is_drawn_can_print(monkeypatch: pytest.MonkeyPatch) -> None:
    class SlowTerminal(Terminal):
        def write(self, text: str) -> int:
            drawing.set()
            time.sleep(0.05)
            return super().write(text)

    drawing = Event()
    monkeypatch.setattr(sys, "stderr", SlowTerminal())
    bar = Bar()
    bar.count(lambda: 1, 2, "epoch 0", "")
    drawing.clear()
    assert drawing.wait(10)
    child = os.fork()
    if not child:
        print("a line of a worker", file=sys.stderr)
        os._exit(0)
    deadline = time.monotonic() + 10
    while not (over := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL) if not over[0] else None
    bar.close()
    assert over == (child, 0)


@pytest.mark.slow
def test_what_a_worker_prints_is_whole(zygote: Zygote, linear: Path) -> None:
    data = (linear.parent / "data.py").read_text(encoding="utf-8")
    printing = data.replace("return self.x[index]", 'print("read", index)\n        return self.x[index]')
    (linear.parent / "data.py").write_text(printing, encoding="utf-8")
    text = linear.read_text(encoding="utf-8")
    linear.write_text(text.replace("batch_size: 4", "batch_size: 4, num_workers: 1"), encoding="utf-8")
    lines = [line.rstrip() for line in screen(run_in_terminal(zygote, linear))]
    # Each epoch reads all for training, and then for validation.
    assert [line for line in lines if "read" in line] == [f"read {index}" for index in range(24)] * 4
    assert not [line for line in lines if "━" in line]


OWN_LOOP = """
    from pipeline import stages

    class Runner(stages.Runner):
        def run(self, context):
            for batch in context.batches("line", count=9, repeat=True):
                context["model"]["line"].brain.fit_batch(batch)
"""


@pytest.mark.parametrize(("limit", "end"), [("null", "?"), ("9", "9")])
def test_a_loop_without_epochs_is_counted_from_its_first_iteration(
    linear: Path, log_lines: list[str], limit: str, end: str
) -> None:
    (linear.parent / "runner.py").write_text(textwrap.dedent(OWN_LOOP), encoding="utf-8")
    runner = 'runner.train_runner.runner_class_path="{workspace}/runner.py"'
    GeneralTrainer(linear, [runner, f"runner.train_runner.max_steps={limit}"]).run()
    places = [re.findall(r"INFO (\w+)  batch (\S+)", line) for line in log_lines if "  batch " in line]
    assert places == [[("training", f"{done}/{end}")] for done in (3, 6, 9)]


@pytest.mark.parametrize(
    ("limit", "ends"),
    [("limit_batches=2", [2, 2]), ("overfit_batches=3", [3, 3]), ("max_steps=8", [6, 2]), ("debug=true", [2, 2])],
)
def test_an_epoch_is_as_long_as_the_runner_lets_it_be(
    linear: Path, log_lines: list[str], limit: str, ends: list[int]
) -> None:
    GeneralTrainer(linear, [f"runner.train_runner.{limit}", "runner.train_runner.print_interval=1"]).run()
    places = [place for line in log_lines for place in re.findall(r"epoch (\d)  batch (\d)/(\d)", line)]
    assert places == [(f"{epoch}", f"{done}", f"{end}") for epoch, end in enumerate(ends) for done in range(1, end + 1)]


class KilledError(BaseException):
    """Stands for the end of the process."""


class Kill:
    """A plugin that ends the run in an iteration, once."""

    at: int | None = None

    @hookimpl
    def before_batch(self, context: Context) -> None:
        if context["train_state"]["iteration"] == self.at:
            raise KilledError


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("phases", [("line",), ("line", "other")])
@pytest.mark.parametrize("shown", [True, False])
def test_a_run_that_goes_on_counts_the_batches_of_the_whole_epoch(
    linear: Path, log_lines: list[str], monkeypatch: pytest.MonkeyPatch, shown: bool, phases: tuple[str, ...]
) -> None:
    config = yaml.safe_load(linear.read_text(encoding="utf-8"))
    config |= {"workspace": str(linear.parent), "name": "config"}
    config["phase"] = [{**config["phase"][0], "name": name} for name in phases]
    config["runner"][0] |= {"save_interval": "2 iteration", "print_interval": 1}
    at = 9 * len(phases)
    monkeypatch.setattr(Kill, "at", at)
    with pytest.raises(KilledError):
        GeneralTrainer({**config, "plugins": [Kill, *([] if shown else [{"progress_bar": False}])]}).run()
    monkeypatch.setattr(Kill, "at", None)
    del log_lines[:]
    GeneralTrainer({**config, "plugins": [Kill]}, resume="auto").run()
    batches = 6 * len(phases)
    places = [place for line in log_lines for place in re.findall(r"epoch 1  batch (\d+/\d+)", line)]
    assert places == [f"{done}/{batches}" for done in range(at // 2 * 2 - batches + 1, batches + 1)]


def test_a_notebook_that_has_ipywidgets_shows_the_bar(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert not ProgressBar().live
    # By this rich knows a notebook.
    shell = type("ZMQInteractiveShell", (), {})
    monkeypatch.setattr(builtins, "get_ipython", shell, raising=False)
    assert not ProgressBar().live
    (tmp_path / "ipywidgets.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert ProgressBar().live


@pytest.mark.parametrize("live", [False, True])
def test_a_runner_without_a_progress_bar_shows_neither_bar_nor_lines(
    linear: Path, log_lines: list[str], live: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    overrides = ["runner.train_runner.noprogressbar=true", f"plugins=[{{progress_bar: {{live: {str(live).lower()}}}}}]"]
    GeneralTrainer(linear, overrides).run()
    assert [line for line in log_lines if "  batch " in line] == []
    assert "━" not in terminal.getvalue()
