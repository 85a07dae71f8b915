"""``pipeline report``: the page says what the files of a run say, whatever these are."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_plugins.report.charts import MOST, thin
from pipeline_plugins.report.run_data import RunData, read_run

from pipeline import GeneralTrainer
from pipeline.run.runs import list_runs
from pipeline.testing import Workspace
from tests.plugins.test_doctor import linked_packages

Call = Callable[..., Result]


def run(config: Path, *overrides: str) -> Path:
    run_dir: Path = GeneralTrainer(config, overrides).run()["run_dir"]
    return run_dir


def written(result: Result) -> str:
    """The page whose path a command has printed."""
    assert result.exit_code == 0, result.output
    return Path(result.stdout.splitlines()[-1]).read_text(encoding="utf-8")


def text(page: str) -> str:
    """What a page says in words."""
    words = re.sub(r"<(script|style)\b.*?</\1>|<[^>]*>", " ", page, flags=re.DOTALL)
    return " ".join(unescape(words).split())


def read(run_dir: Path) -> RunData:
    [record] = list_runs(run_dir)
    return read_run(record)


def curves(run_dir: Path, runner: str = "train_runner") -> dict[tuple[str, str], list[tuple[int, float | None]]]:
    """(Metric, name) -> points."""
    [own] = [each for each in read(run_dir).runners if each.name == runner]
    return {(curve.metric, curve.name): [*zip(curve.x, curve.y, strict=True)] for curve in own.curves}


def write_lines(run_dir: Path, lines: list[dict[str, Any]], file: str = "train_runner/metrics.jsonl") -> None:
    (run_dir / file).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def line(iteration: int, event: str = "train", **numbers: Any) -> dict[str, Any]:
    return {"event": event, "epoch": 0, "iteration": iteration, "phase": "line", **numbers}


# Curves


def test_every_number_of_the_file_is_in_a_curve_once(linear: Path) -> None:
    run_dir = run(linear)
    lines = [json.loads(text) for text in (run_dir / "train_runner/metrics.jsonl").read_text().splitlines()]
    events = {"train": "training", "validate": "validation", "epoch": "mean of the epoch"}
    expected: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for own in lines:
        for name in own.keys() - {"event", "epoch", "iteration", "phase", "valid_loss"}:
            expected.setdefault((name, events[own["event"]]), []).append((own["iteration"], own[name]))
    assert curves(run_dir) == expected
    assert len(expected) == 4


def test_a_validation_on_several_datasets_has_a_curve_for_each(linear: Path) -> None:
    run_dir = run(linear, "runner.train_runner.epochs=1")
    write_lines(run_dir, [
        line(3, "validate", **{"old/loss": 1.0, "new/loss": 2.0}),
        line(3, "epoch", **{"loss": 0.5, "old/loss": 1.0, "new/loss": 2.0}),
    ])  # fmt: skip
    assert curves(run_dir) == {
        ("loss", "validation on old"): [(3, 1.0)],
        ("loss", "validation on new"): [(3, 2.0)],
        ("loss", "mean of the epoch"): [(3, 0.5)],
    }


def test_a_number_of_a_validation_that_a_plugin_has_changed_since_is_kept(linear: Path) -> None:
    run_dir = run(linear, "runner.train_runner.epochs=1")
    write_lines(run_dir, [line(3, "validate", loss=1.0), line(3, "epoch", valid_loss=0.25)])
    expected = {("loss", "validation"): [(3, 1.0)], ("loss", "validation, as the epoch has it"): [(3, 0.25)]}
    assert curves(run_dir) == expected


def test_what_is_not_finite_is_a_gap_and_counted(linear: Path, pipeline: Call) -> None:
    run_dir = run(linear, "runner.train_runner.epochs=1")
    write_lines(run_dir, [line(1, loss=1.0), line(2, loss=None), line(3, loss=float("inf")), line(4, loss=10**400)])
    assert curves(run_dir)["loss", "training"] == [(1, 1.0), (2, None), (3, None), (4, None)]
    assert "3 numbers are not finite" in text(written(pipeline("report", run_dir)))


NUMBERS = st.one_of(st.none(), st.floats(-1e9, 1e9), st.just(0.0))


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 50), st.lists(NUMBERS, min_size=1, max_size=60), st.integers(0, 2**32))
def test_a_thinned_curve_has_all_that_counts_in_each_column(step: int, values: list[float | None], seed: int) -> None:
    chance = random.Random(seed)
    y = [chance.choice(values) for _ in range(MOST + 1 + seed % 3000)]
    x = [chance.randrange(step) + step * index for index in range(len(y))]
    kept = thin(x, y)
    assert kept == sorted(set(kept))
    assert len(kept) <= 5 * 500
    columns: dict[int, list[int]] = {}
    for place in range(len(x)):
        columns.setdefault((x[place] - x[0]) * 500 // (x[-1] - x[0] + 1), []).append(place)
    for inside in columns.values():
        shown = sorted(set(inside) & set(kept))
        numbers = [y[place] for place in inside if y[place] is not None]
        assert shown[:1] + shown[-1:] == inside[:1] + inside[-1:]
        for extreme in (min, max):
            assert not numbers or extreme(numbers) in [y[place] for place in shown]  # type: ignore[type-var]
        assert (None in [y[place] for place in inside]) == (None in [y[place] for place in shown])


def test_a_short_curve_is_shown_as_it_is() -> None:
    assert thin(range(MOST), [0.0] * MOST) == [*range(MOST)]


@pytest.mark.slow
def test_of_a_hundred_thousand_lines_no_spike_is_lost(linear: Path, pipeline: Call) -> None:
    run_dir = run(linear, "runner.train_runner.epochs=1")
    write_lines(run_dir, [line(at, loss=7654.25 if at == 61_803 else 1.0) for at in range(100_000)])
    page = written(pipeline("report", run_dir))
    assert "7654.25" in page
    assert "1 curves have more than 2,000 points" in text(page)
    assert len(page) < 2_500_000


# The page


def test_the_page_of_one_run_lies_in_it_and_its_path_is_printed(linear: Path, pipeline: Call) -> None:
    run_dir = run(linear, "label=first try", "note=why not", "tags=[quick]")
    result = pipeline("report", run_dir)
    assert result.stdout == f"{run_dir}/report.html\n"
    words = text(written(result))
    for expected in ("workspace done", "first try", "why not", "#quick", "iterations 12", "Steps were not measured"):
        assert expected in words


@pytest.mark.slow
def test_the_page_of_several_runs_lies_where_one_is_and_says_in_what_they_differ(linear: Path, pipeline: Call) -> None:
    first, other = run(linear), run(linear, "runner.train_runner.epochs=3", "label=longer")
    result = pipeline("report", first, other)
    assert result.stdout == "report.html\n"
    words = text(written(result))
    assert "2 runs" in words
    assert f"longer beside {first.name}: the only difference is runner.train_runner.epochs: 2 -> 3" in words


@pytest.mark.usefixtures("without_charts")
def test_a_folder_stands_for_the_runs_in_it_each_of_which_is_there_once(linear: Path, pipeline: Call) -> None:
    runs = [run(linear), run(linear)]
    words = text(written(pipeline("report", "runs", runs[0], "runs/workspace/latest", "-o", "page.html")))
    assert "2 runs" in words
    assert [words.count(str(run_dir.name)) > 0 for run_dir in runs] == [True, True]


@pytest.mark.usefixtures("without_charts")
def test_two_runs_of_one_label_are_told_apart_by_their_paths(linear: Path, pipeline: Call) -> None:
    runs = [run(linear, "label=same") for _ in range(2)]
    words = text(written(pipeline("report", *runs)))
    assert all(f"same ({run_dir})" in words for run_dir in runs)


@pytest.mark.slow
def test_the_page_is_the_same_each_time(linear: Path, pipeline: Call) -> None:
    run_dir = run(linear)
    one, other = (
        re.sub(r"p\d+|[0-9a-f]{8}-[0-9a-f-]{27}", "#", written(pipeline("report", run_dir))) for _ in range(2)
    )
    assert one == other


@pytest.mark.parametrize("folder", ["nowhere", "empty"])
def test_where_there_is_no_run_it_says_so(pipeline: Call, folder: str) -> None:
    Path("empty").mkdir()
    result = pipeline("report", folder)
    assert result.exit_code == 2
    assert folder in result.stderr


@pytest.mark.usefixtures("without_charts")
def test_a_place_that_cannot_be_written_is_an_error_that_names_the_option(linear: Path, pipeline: Call) -> None:
    run_dir = run(linear)
    (run_dir / "report.html").mkdir()
    result = pipeline("report", run_dir)
    assert result.exit_code == 74
    assert "report.html: cannot be written" in result.stderr
    assert "write it elsewhere with -o FILE" in result.stderr
    assert pipeline("report", run_dir, "-o", "page.html").exit_code == 0


@pytest.mark.usefixtures("without_charts")
def test_a_link_in_the_place_of_the_page_is_replaced_and_not_followed(linear: Path, pipeline: Call) -> None:
    run_dir = run(linear)
    Path("mine.txt").write_text("mine")
    (run_dir / "report.html").symlink_to(Path("mine.txt").absolute())
    assert pipeline("report", run_dir).exit_code == 0
    assert Path("mine.txt").read_text() == "mine"


def test_without_what_draws_it_the_extra_is_named(linear: Path, tmp_path: Path) -> None:
    run_dir = run(linear)
    site = linked_packages(tmp_path / "site", "bokeh")
    command = [sys.executable, "-S", "-m", "pipeline", "report", str(run_dir)]
    environment = os.environ | {"PYTHONPATH": str(site)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "needs the package 'bokeh', which is not installed; pip install 'five-stage-pipeline[report]'" in done.stderr


@pytest.mark.slow
def test_nothing_of_a_run_is_imported_nor_is_torch(linear: Path) -> None:
    run_dir = run(linear)
    for file in (run_dir / "workspace").rglob("*.py"):
        file.write_text("raise SystemExit('imported')")
    linear.with_name("data.py").write_text("raise SystemExit('imported')")
    code = (
        "import sys\nfrom click.testing import CliRunner\nfrom pipeline.cli import group\n"
        f"done = CliRunner().invoke(group, ['report', {str(run_dir)!r}])\n"
        "print(done.exit_code, 'torch' in sys.modules, [name for name in sys.modules if 'workspaces.' in name])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "0 False []\n"


# What a run says of itself


def test_the_config_shows_what_differs_from_the_defaults(linear: Path) -> None:
    config = read(run(linear, "runner.train_runner.keep_last=7", "runner.train_runner.save_interval=1 epoch")).config
    runner = {setting.key: (setting.value, setting.differs) for setting in config["runner.train_runner"]}
    assert runner["keep_last"] == ("7", True)
    assert runner["save_interval"] == ("1 epoch", False)
    assert runner["epochs"] == ("2", True)
    assert runner["grad_clip"] == ("null", False)


@pytest.mark.usefixtures("without_charts")
def test_the_stages_have_times_memory_keys_and_the_own_ones_are_marked(linear: Path, pipeline: Call) -> None:
    own = """
        from pipeline import stages

        class Startup(stages.Startup):
            def startup(self, context):
                super().startup(context)
                context["mine"] = 1

        class Terminal(stages.Terminal):
            def terminal(self, context):
                super().terminal(context)
                context["mine"]
    """
    (linear.parent / "own.py").write_text(textwrap.dedent(own))
    run_dir = run(
        linear,
        'runner.train_runner.startup_class_path="{workspace}/own.py"',
        'runner.train_runner.terminal_class_path="{workspace}/own.py"',
    )
    stages = {stage.name: stage for stage in read(run_dir).runners[0].stages}
    assert [*stages] == ["instance", "network", "startup", "runner", "terminal"]
    assert [stage.custom for stage in stages.values()] == [False, False, True, False, True]
    assert stages["startup"].gives == ["mine"]
    assert stages["network"].gives == ["dataset", "model"]
    assert all(len(stage.seconds) == 1 and stage.seconds[0] > 0 for stage in stages.values())
    memory = [stage.memory or 0 for stage in stages.values()]
    assert memory == sorted(memory)
    assert memory[0] > 2**20
    assert "startup custom {workspace}/own.py" in text(written(pipeline("report", run_dir)))


@pytest.mark.usefixtures("without_charts")
def test_the_best_checkpoint_and_the_newest_are_marked(linear: Path, pipeline: Call) -> None:
    run_dir = run(
        linear, "runner.train_runner.keep_best={metric: valid_loss, mode: min}", "runner.train_runner.epochs=3"
    )
    words = text(written(pipeline("report", run_dir)))
    assert re.search(r"18 3 [\d.]+ KiB loss [\d.e-]+ valid_loss [\d.e-]+ ★ best newest", words)
    assert "best valid_loss" in words


@pytest.mark.usefixtures("without_charts")
def test_a_failed_run_says_why_and_where(linear: Path, pipeline: Call) -> None:
    own = "from pipeline import stages\nclass Runner(stages.Runner):\n    def run(self, context):\n        1 / 0\n"
    (linear.parent / "own.py").write_text(own)
    with pytest.raises(ZeroDivisionError):
        run(linear, 'runner.train_runner.runner_class_path="{workspace}/own.py"')
    words = text(written(pipeline("report", "runs/workspace/latest")))
    assert "workspace failed" in words
    assert "ZeroDivisionError: division by zero" in words
    assert "runner custom did not come to its end" in words


LOOK = """
    from click.testing import CliRunner
    from pipeline import hookimpl
    from pipeline.cli import group

    class Plugin:
        @hookimpl
        def after_batch(self, context):
            if context["train_state"]["iteration"] == 8:
                with (context["run_dir"] / "train_runner/metrics.jsonl").open("a") as file:
                    file.write('{"event": "tr')
                context["seen"] = CliRunner().invoke(group, ["report", str(context["run_dir"]), "-o", "page.html"])
"""


@pytest.mark.usefixtures("without_charts")
def test_a_run_that_goes_on_is_shown_as_far_as_it_is(linear: Path) -> None:
    (linear.parent / "look.py").write_text(textwrap.dedent(LOOK))
    context = GeneralTrainer(linear, ['plugins=["{workspace}/look.py"]']).run()
    words = text(written(context["seen"]))
    assert "workspace running" in words
    assert "The run goes on; this page shows it as it was after iteration 6" in words
    assert "What cannot be read" not in words


STOP = """
    from pipeline import hookimpl

    class Plugin:
        @hookimpl
        def after_batch(self, context):
            context["is_exit"] = True
"""


@pytest.mark.usefixtures("without_charts")
def test_report_stopped_run_without_times(linear: Path, pipeline: Call) -> None:
    (linear.parent / "stop.py").write_text(textwrap.dedent(STOP))
    run_dir = run(linear, 'plugins=["{workspace}/stop.py"]')
    (run_dir / "train_runner" / "timing.jsonl").unlink()
    words = text(written(pipeline("report", run_dir)))
    assert "workspace stopped" in words
    assert "time not recorded" in words
    assert "What cannot be read" not in words


def test_a_run_in_two_parts_has_the_times_of_both(linear: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(linear, f'plugins=["{write_interrupt(linear)}"]', "runner.train_runner.save_interval=4")
    context = GeneralTrainer(linear, ["runner.train_runner.save_interval=4", "plugins=[]"], resume="auto").run()
    stages = {stage.name: stage for stage in read(context["run_dir"]).runners[0].stages}
    assert [len(stages[name].seconds) for name in ("instance", "network", "startup", "terminal")] == [2, 2, 2, 1]
    assert stages["runner"].completed


def write_interrupt(config: Path) -> str:
    code = "from pipeline import hookimpl\nclass Plugin:\n    @hookimpl\n    def before_batch(self, context):\n"
    code += "        if context['train_state']['iteration'] == 9:\n            raise KeyboardInterrupt\n"
    config.with_name("interrupt.py").write_text(code)
    return "{workspace}/interrupt.py"


# Damage


def files_of(run_dir: Path) -> Iterator[Path]:
    yield from sorted(file for file in run_dir.rglob("*") if file.is_file() and file.name != "lock")


DAMAGES: dict[str, Callable[[Path], object]] = {
    "empty": lambda file: file.write_bytes(b""),
    "half": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "noise": lambda file: file.write_bytes(random.Random(1).randbytes(3000)),
    "list": lambda file: file.write_bytes(b"[1, {}]\n"),
    "number": lambda file: file.write_bytes(b"3\n"),
    "deep": lambda file: file.write_bytes(b"[" * 20_000 + b"\n"),
    "null": lambda file: file.write_bytes(re.sub(rb'(": )[^,}\n{\[]+', rb"\1null", file.read_bytes())),
    "word": lambda file: file.write_bytes(re.sub(rb'(": )[^,}\n{\[]+', rb'\1"word"', file.read_bytes())),
    "list within": lambda file: file.write_bytes(re.sub(rb'(": )[^,}\n{\[]+', rb"\1[[1], {}]", file.read_bytes())),
    "huge": lambda file: file.write_bytes(re.sub(rb'(": )[^,}\n{\[]+', rb"\g<1>1" + b"0" * 400, file.read_bytes())),
    "folder": lambda file: (file.unlink(), file.mkdir()),
    "link to itself": lambda file: (file.unlink(), file.symlink_to(file)),
    "gone": lambda file: file.unlink(),
    "pipe": lambda file: (file.unlink(), os.mkfifo(file)),
}


# One of each way in which a file can be wrong: no text, no JSON, too much of it, other values, no file.
QUICK_DAMAGES = {"empty", "half", "deep", "list within", "pipe"}
every_damage = pytest.mark.parametrize(
    "damage", [pytest.param(name, marks=() if name in QUICK_DAMAGES else pytest.mark.slow) for name in DAMAGES]
)


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that the tests copy before they damage it."""
    folder = tmp_path_factory.mktemp("finished")
    words = f"output_dir={folder / 'runs'}", "runner.train_runner.keep_best={metric: valid_loss, mode: min}"
    run_dir: Path = Workspace(folder / "workspace").run(*words)["run_dir"]
    return run_dir


@pytest.fixture
def copied_run(finished_run: Path, tmp_path: Path) -> Path:
    """A copy of that run, in a folder of the same name: the page has it as its title if nothing else says one."""
    return Path(shutil.copytree(finished_run, tmp_path / finished_run.parent.name / finished_run.name))


@pytest.mark.quick_cases(1)
@every_damage
def test_whatever_all_files_are_there_is_a_page(damage: str, copied_run: Path, pipeline: Call) -> None:
    for file in files_of(copied_run):
        DAMAGES[damage](file)
    assert f"<h1>{copied_run.parent.name}" in written(pipeline("report", copied_run, "-o", "page.html"))


@pytest.mark.quick_cases(1)
@every_damage
def test_whatever_one_file_is_the_others_are_shown(damage: str, copied_run: Path) -> None:
    for file in files_of(copied_run):
        content = file.read_bytes()
        DAMAGES[damage](file)
        data = read(copied_run)
        if file.is_dir():
            file.rmdir()
        else:
            file.unlink(missing_ok=True)
        file.write_bytes(content)
        assert [runner.name for runner in data.runners] == ["train_runner"]
        assert file.name == "metrics.jsonl" or len(data.runners[0].curves) == 4


@pytest.mark.slow
def test_what_is_damaged_is_told_on_the_page_with_its_name(linear: Path, pipeline: Call) -> None:
    run_dir = run(linear)
    (run_dir / "config.yaml").write_text("[1")
    (run_dir / "environment.json").write_text("{")
    with (run_dir / "train_runner/metrics.jsonl").open("a") as file:
        file.write('nonsense\n{"event": "train", "iteration": "many", "phase": "line"}\n')
    words = text(written(pipeline("report", run_dir)))
    assert "config.yaml cannot be read" in words
    assert "environment.json cannot be read" in words
    assert "train_runner/metrics.jsonl: 1 of its lines make no sense" in words
    assert "mean of the epoch" in written(pipeline("report", run_dir))


# compare --html


@pytest.mark.usefixtures("without_charts")
def test_compare_writes_the_page_of_these_runs_beside_what_it_says(linear: Path, pipeline: Call) -> None:
    runs = run(linear), run(linear, "runner.train_runner.epochs=3")
    result = pipeline("compare", *runs, "--html")
    assert result.stdout == pipeline("compare", *runs).stdout + "report.html\n"
    assert written(result) == Path("report.html").read_text()
    assert "the only difference is runner.train_runner.epochs: 2 -> 3" in text(written(result))
    assert pipeline("compare", "--html=other.html", *runs).stdout.endswith("\nother.html\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--html", "runs/a", "runs/b"), "--html runs/a: is no name of a page; write --html=page.html"),
        (("runs/a", "runs/b", "--json", "--html"), "choose one"),
    ],
)
def test_compare_refuses_a_page_that_it_would_misunderstand(
    words: tuple[str, ...], message: str, pipeline: Call
) -> None:
    result = pipeline("compare", *words)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
