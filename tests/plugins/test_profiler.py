"""``profiler``: a window of steps as torch.profiler sees them, in a trace and a table."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from pipeline_plugins.profiler import Profiler
from torch import nn
from torch.utils.data import TensorDataset

from pipeline import Context, GeneralTrainer, RunnerBase, hookimpl
from pipeline.errors import ConfigError

Call = Callable[..., Result]


def config(arguments: dict[str, Any], *plugins: Any, **runner: Any) -> dict[str, Any]:
    """Two epochs of 6 batches; a step has one product for the prediction, and one for the gradient."""
    data = TensorDataset(torch.ones(12, 3), torch.ones(12, 1))
    phase = {"name": "p", "model": lambda: nn.Linear(3, 1), "loss": nn.functional.mse_loss, "dataset_name": "data"}
    return {
        "name": "config",
        "hyper_parameters": {"optimizer": {"class": "SGD", "lr": 0.01}},
        "plugins": [{"progress_bar": False}, {"profiler": arguments}, *plugins],
        "dataset": [{"name": "data", "class_path": lambda: data, "batch_size": 2}],
        "runner": [{"name": "t", "class": "train", "device": "cpu", "epochs": 2, **runner}],
        "phase": [phase],
    }


def folder(context: Context, name: str = "profiler") -> Path:
    path: Path = context["run_dir"] / "t" / name
    return path


def spans(context: Context) -> list[str]:
    """The iterations of the traces that were written."""
    return sorted(path.stem.removeprefix("trace_") for path in folder(context).glob("trace_*.json"))


def steps(context: Context, span: str) -> list[str]:
    """The steps of a trace, in their order."""
    trace = json.loads((folder(context) / f"trace_{span}.json").read_text(encoding="utf-8"))
    events = [event for event in trace["traceEvents"] if event.get("name", "").startswith("ProfilerStep#")]
    return [event["name"] for event in sorted(events, key=lambda event: float(event["ts"]))]


def calls(context: Context, span: str, operator: str) -> int:
    """How often an operator is in a trace."""
    trace = json.loads((folder(context) / f"trace_{span}.json").read_text(encoding="utf-8"))
    return sum(event.get("name") == operator for event in trace["traceEvents"])


def test_a_window_has_the_operators_of_its_steps_and_no_other() -> None:
    context = GeneralTrainer(config({"wait": 1, "warmup": 1, "active": 3})).run()
    assert spans(context) == ["3-5"]
    assert steps(context, "3-5") == ["ProfilerStep#1", "ProfilerStep#2", "ProfilerStep#3"]
    assert calls(context, "3-5", "aten::addmm") == 3
    assert calls(context, "3-5", "Optimizer.step#SGD.step") == 3


def test_the_table_has_the_operators_that_take_the_most_time_and_its_head_is_logged(log_lines: list[str]) -> None:
    context = GeneralTrainer(config({"wait": 1, "warmup": 1, "active": 3, "rows": 8})).run()
    table = (folder(context) / "operators_3-5.txt").read_text(encoding="utf-8")
    rows = [line.split() for line in table.split("\n---")[1].splitlines()[1:]]
    assert len(rows) == 8
    logged = next(line for line in log_lines if "profiler: iterations 3-5, in " in line)
    assert all(row[0] in logged for row in rows[:5])
    assert "Self CPU %" in logged
    assert "CPU Mem" not in table


def test_windows_repeat(log_lines: list[str]) -> None:
    context = GeneralTrainer(config({"wait": 1, "warmup": 1, "active": 2, "repeat": 3})).run()
    assert spans(context) == ["11-12", "3-4", "7-8"]
    assert [calls(context, span, "aten::addmm") for span in spans(context)] == [2, 2, 2]


def test_the_first_iterations_may_be_profiled() -> None:
    assert spans(GeneralTrainer(config({"wait": 0, "warmup": 1, "active": 1})).run()) == ["2-2"]


def test_memory_is_recorded_on_request() -> None:
    context = GeneralTrainer(config({"wait": 1, "active": 1, "memory": True})).run()
    assert "CPU Mem" in (folder(context) / "operators_4-4.txt").read_text(encoding="utf-8")
    assert calls(context, "4-4", "[memory]") > 0


def test_a_window_that_the_end_of_the_training_cuts_is_written() -> None:
    context = GeneralTrainer(config({"wait": 8, "warmup": 1, "active": 50})).run()
    assert spans(context) == ["10-12"]
    assert calls(context, "10-12", "aten::addmm") == 3


def test_a_window_without_a_recorded_step_is_told(log_lines: list[str]) -> None:
    context = GeneralTrainer(config({"wait": 10, "warmup": 5})).run()
    assert not folder(context).exists()
    assert any("profiler: the training has ended before a step was recorded" in line for line in log_lines)


class KilledError(BaseException):
    """Stands for the end of the process."""


class Kill:
    """Ends the process once, in iteration ``at``."""

    at = 0

    @hookimpl
    def after_batch(self, context: Context) -> None:
        if self.at and context["train_state"]["iteration"] == self.at:
            Kill.at = 0
            raise KilledError


def test_a_window_that_an_error_cuts_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Kill, "at", 5)
    with pytest.raises(KilledError):
        GeneralTrainer(config({"wait": 1, "warmup": 1, "active": 50}, Kill)).run()
    assert spans(Context(run_dir=Path("runs/config/latest"))) == ["3-5"]


def test_a_resumed_run_profiles_the_windows_that_are_still_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Kill, "at", 5)
    own = config({"wait": 2, "warmup": 1, "active": 1, "repeat": 3}, Kill, save_interval="1 iteration")
    with pytest.raises(KilledError):
        GeneralTrainer(own).run()
    context = GeneralTrainer(own, resume="auto").run()
    assert spans(context) == ["12-12", "4-4", "8-8"]


class Loop(RunnerBase):
    """A loop of one's own, with one pass in the batches of another."""

    def run(self, context: Context) -> None:
        fit = {name: phase.brain.fit_batch for name, phase in context["model"].items()}
        for batch in context.batches("p"):
            for other in context.batches("q", count=1, repeat=True):
                fit["q"](other)
            fit["p"](batch)


def test_it_serves_a_loop_of_ones_own_with_a_pass_in_another() -> None:
    chosen = config({"wait": 2, "warmup": 1, "active": 2}, runner_class_path=Loop)
    chosen["phase"].append({**chosen["phase"][0], "name": "q"})
    context = GeneralTrainer(chosen).run()
    assert len(spans(context)) == 1
    assert calls(context, spans(context)[0], "aten::addmm") > 1


def test_two_of_them_write_into_folders_of_their_own() -> None:
    other = {"name": "late", "class_path": "profiler", "args": {"wait": 6, "active": 1}}
    context = GeneralTrainer(config({"wait": 0, "active": 1}, other)).run()
    assert (spans(context), len(list(folder(context, "late_profiler").iterdir()))) == (["3-3"], 2)


def test_it_changes_no_number_of_a_run() -> None:
    runs = [GeneralTrainer({**config({"wait": 1}), **plugins}).run() for plugins in ({}, {"plugins": []})]
    texts = [(context["run_dir"] / "t" / "metrics.jsonl").read_text(encoding="utf-8") for context in runs]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("name", ["warmup", "active", "repeat", "rows"])
def test_an_argument_out_of_range_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"profiler: {name} is 0; write 1 or more"):
        Profiler(**{name: 0})


@pytest.mark.slow
def test_resume_test_leaves_its_files_out(resume_test: Call, linear: Path) -> None:
    done = resume_test(linear, "plugins=[{profiler: {wait: 1, active: 2, repeat: 2}}]", "--at", 7)
    assert done.exit_code == 0, done.output
    assert "profiler/" in done.stdout
    assert done.stdout.endswith("\nequal, bit for bit\n")


def test_keys_of_a_runner_turn_it_on_for_its_first_iterations() -> None:
    chosen = config({}, profile_training=True, profile_warmup=1, profile_steps=2)
    chosen["plugins"] = [{"progress_bar": False}]
    chosen["runner"].append({"name": "second", "class": "train", "device": "cpu", "epochs": 1})
    context = GeneralTrainer(chosen).run()
    assert spans(context) == ["2-3"]
    assert not (context["run_dir"] / "second" / "profiler").exists()
    chosen["runner"][0] |= {"profile_training": False, "profile_warmup": 5, "profile_steps": 5}
    assert spans(GeneralTrainer(chosen).run()) == []
