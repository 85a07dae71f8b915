"""The plugin ``report``: it measures steps, and writes the page of the run, however that ends."""

from __future__ import annotations

import json
import signal
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import Result
from pipeline_plugins.report import plugin as module

from pipeline import Context, GeneralTrainer
from pipeline.config.load import ConfigBuilder
from pipeline.user_code.imports import REPORT_NEEDS
from pipeline.user_code.plugins import configured_plugins
from tests.conftest import Process
from tests.plugins.test_report import text, written

Call = Callable[..., Result]
PARTS = ("data", "forward", "backward", "update", "hooks", "other")


def steps(run_dir: Path, runner: str = "train_runner") -> list[dict[str, Any]]:
    lines = map(json.loads, (run_dir / runner / "timing.jsonl").read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line["event"] == "step"]


def train(config: Path, *overrides: str, resume: str = "never") -> Context:
    return GeneralTrainer(config, ["plugins=[report]", *overrides], resume=resume).run()


# A job in which each part of a step takes its own time, by a clock that stands still otherwise.
CLOCK = """
    import torch
    from torch import nn
    from pipeline import OptimScheduler, hookimpl, observe

    class Clock:
        now = 0.0

        @classmethod
        def wait(cls, seconds):
            cls.now += seconds

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            Clock.wait(100)
            return gradient

    class Model(nn.Linear):
        def __init__(self):
            super().__init__(1, 1)

        def forward(self, x):
            if self.training:
                Clock.wait(10)
                observe("x", x)
            return Slow.apply(super().forward(x))

    class Steps(torch.optim.SGD):
        def step(self, closure=None):
            Clock.wait(1000)
            return super().step(closure)

    class Line(torch.utils.data.Dataset):
        def __len__(self):
            return 24

        def __getitem__(self, index):
            Clock.wait(0.25)
            return torch.ones(1), torch.ones(1)

    class Plugin:
        @hookimpl
        def before_batch(self): Clock.wait(10_000)
        @hookimpl
        def before_backward(self): Clock.wait(10_000)
        @hookimpl
        def after_update(self): Clock.wait(10_000)
        @hookimpl
        def after_batch(self): Clock.wait(10_000)
        @hookimpl
        def on_observe(self): Clock.wait(10_000)
        @hookimpl
        def after_validation(self): Clock.wait(1e6)
        @hookimpl
        def on_print_interval(self): Clock.wait(1e6)
        @hookimpl
        def after_epoch(self): Clock.wait(1e6)
"""


@pytest.fixture
def clocked(linear: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The config of that job."""
    (linear.parent / "clock.py").write_text(textwrap.dedent(CLOCK), encoding="utf-8")
    config = (
        linear.read_text(encoding="utf-8").replace("data.py:Line", "clock.py:Line").replace("args: {size: 24}, ", "")
    )
    config = config.replace("torch.nn.Linear", '"{workspace}/clock.py:Model"').replace(
        "    model_args: {in_features: 1, out_features: 1}\n", ""
    )
    config = config.replace("class: SGD", 'class: "{workspace}/clock.py:Steps"')
    linear.write_text(config, encoding="utf-8")

    def now() -> float:
        [own] = [
            module
            for name, module in sys.modules.items()
            if name.endswith(".clock") and Path(str(module.__file__)).parent == linear.parent
        ]
        seconds: float = own.Clock.now
        return seconds

    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=now))
    return linear


@pytest.mark.usefixtures("without_charts")
@pytest.mark.parametrize("order", ["[report, '{workspace}/clock.py']", "['{workspace}/clock.py', report]"])
def test_each_part_of_a_step_has_its_time_and_the_other_plugins_have_theirs(clocked: Path, order: str) -> None:
    found = steps(GeneralTrainer(clocked, [f"plugins={order}"]).run()["run_dir"])
    assert {tuple(line[part] for part in PARTS) for line in found} == {(1.0, 10.0, 100.0, 1000.0, 50_000.0, 0.0)}


def test_the_check_knows_what_it_needs(linear: Path) -> None:
    [plugin] = [
        each
        for each in configured_plugins(ConfigBuilder(linear, ["plugins=[report]"]).tree, None)[0]
        if each.name == "report"
    ]
    assert tuple(plugin.declared("requires")) == REPORT_NEEDS


@pytest.mark.usefixtures("without_charts")
def test_one_step_in_each_print_interval_is_measured_each_time_another(linear: Path) -> None:
    found = steps(train(linear, "runner.train_runner.epochs=4")["run_dir"])
    iterations = [line["iteration"] for line in found]
    # Those of the intervals 1 to 3, 4 to 6 and so on.
    assert [(iteration - 1) // 3 for iteration in iterations] == [*range(8)]
    assert {(iteration - 1) % 3 for iteration in iterations} == {0, 1, 2}
    assert {(line["phase"], line["epoch"]) for line in found} == {("line", epoch) for epoch in range(4)}
    assert all(set(line) == {"event", "epoch", "iteration", "phase", *PARTS} for line in found)


@pytest.mark.usefixtures("without_charts")
def test_without_a_print_interval_one_step_is_measured(linear: Path) -> None:
    assert [
        line["iteration"] for line in steps(train(linear, "runner.train_runner.print_interval=null")["run_dir"])
    ] == [2]


@pytest.mark.usefixtures("without_charts")
def test_nothing_else_of_the_run_changes(linear: Path) -> None:
    plain, measured = GeneralTrainer(linear).run(), train(linear)
    one, other = ((run["run_dir"] / "train_runner" / "metrics.jsonl").read_bytes() for run in (plain, measured))
    assert one == other


@pytest.mark.slow
def test_the_steps_of_a_run_that_was_killed_and_resumed_are_there_once(linear: Path, process: Process) -> None:
    kill = """
        import os
        from pipeline import hookimpl

        class Plugin:
            @hookimpl
            def before_batch(self, context):
                if context["train_state"]["iteration"] == int(os.environ.get("AT", -1)):
                    os.kill(os.getpid(), 9)
    """
    (linear.parent / "kill.py").write_text(textwrap.dedent(kill), encoding="utf-8")
    words = (linear, 'plugins=[report, "{workspace}/kill.py"]', "runner.train_runner.save_interval=4",
             "runner.train_runner.epochs=4", "--resume", "auto")  # fmt: skip
    for at in ("7", "18"):
        assert process("run", *words, AT=at).returncode == -9
    assert process("run", *words).returncode == 0
    run_dir = Path("runs/workspace/latest").resolve()
    iterations = [line["iteration"] for line in steps(run_dir)]
    assert iterations == sorted(set(iterations))
    assert len(iterations) >= 7
    assert (run_dir / "report.html").is_file()


@pytest.mark.slow
def test_the_page_at_the_end_is_that_of_the_command(linear: Path, pipeline: Call, log_lines: list[str]) -> None:
    run_dir = train(linear)["run_dir"]
    page = (run_dir / "report.html").read_text(encoding="utf-8")
    assert any(f"INFO {run_dir}/report.html shows the run" in line for line in log_lines)
    words = text(page)
    assert "workspace done" in words
    assert "mean of 4 measured steps data forward backward update hooks other whole step" in words
    # The packages that were imported to write it are not known while it is written.
    assert (
        words.partition("packages that")[0][:-4]
        == text(written(pipeline("report", run_dir))).partition("packages that")[0][:-4]
    )


@pytest.mark.usefixtures("without_charts")
def test_of_several_runners_it_is_written_once_with_all_of_them(linear: Path, log_lines: list[str]) -> None:
    two = "runner=[{name: train_runner, class: train, device: cpu, epochs: 1}, {name: infer_runner, class: infer, device: cpu}]"
    run_dir = train(linear, two)["run_dir"]
    assert len([line for line in log_lines if "shows the run" in line]) == 1
    assert "loss, evaluation" in text((run_dir / "report.html").read_text(encoding="utf-8"))


@pytest.mark.usefixtures("without_charts")
def test_a_run_that_fails_has_its_page(linear: Path) -> None:
    own = "from pipeline import stages\nclass Runner(stages.Runner):\n    def run(self, context):\n        1 / 0\n"
    (linear.parent / "own.py").write_text(own)
    with pytest.raises(ZeroDivisionError):
        train(linear, 'runner.train_runner.runner_class_path="{workspace}/own.py"')
    words = text(Path("runs/workspace/latest/report.html").read_text(encoding="utf-8"))
    assert "workspace failed" in words
    assert "division by zero" in words


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("number", "code", "state"), [(signal.SIGTERM, 75, "stopped"), (signal.SIGINT, 130, "interrupted")]
)
def test_a_run_that_a_signal_ends_has_its_page(
    linear: Path, process: Process, number: int, code: int, state: str
) -> None:
    own = f"""
        import os
        from pipeline import hookimpl

        class Plugin:
            @hookimpl
            def after_batch(self, context):
                if context["train_state"]["iteration"] == 7:
                    os.kill(os.getpid(), {int(number)})
    """
    (linear.parent / "end.py").write_text(textwrap.dedent(own))
    assert process("run", linear, 'plugins=[report, "{workspace}/end.py"]').returncode == code
    words = text(Path("runs/workspace/latest/report.html").read_text(encoding="utf-8"))
    assert f"workspace {state}" in words
    assert "It can go on: pipeline resume" in words


def test_that_the_page_cannot_be_written_is_a_warning(linear: Path, log_lines: list[str]) -> None:
    own = """
        from pipeline import hookimpl

        class Plugin:
            @hookimpl
            def before_epoch(self, context):
                (context["run_dir"] / "report.html").mkdir(exist_ok=True)
    """
    (linear.parent / "own.py").write_text(textwrap.dedent(own))
    context = train(linear, 'plugins=[report, "{workspace}/own.py"]')
    assert json.loads((context["run_dir"] / "status.json").read_text())["state"] == "done"
    [warning] = [line for line in log_lines if line.startswith("WARNING") and "report.html" in line]
    assert f"`pipeline report {context['run_dir']}` writes it" in warning
