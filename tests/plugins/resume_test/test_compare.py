"""What is said of two runs, one straight and one interrupted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pipeline_plugins.resume_test.compare import compare
from pipeline_plugins.resume_test.files import NOTHING, Finding
from pipeline_plugins.resume_test.runs import FinishedRun
from torch import nn

from pipeline.brain.checkpointer import Checkpointer

LINES = [{"event": "train", "iteration": 3, "loss": 0.5}, {"event": "epoch", "iteration": 4, "loss": 0.25}]


def save(runner: Path, step: int, bias: float, **training: Any) -> None:
    model = nn.Linear(1, 1)
    nn.init.constant_(model.weight, 1.0)
    nn.init.constant_(model.bias, bias)
    state = {"optim_schedulers": {}, "random": {"torch": torch.zeros(3)}, **training}
    Checkpointer(runner / "checkpoints").save({"p": {"model": model}}, {"iteration": step}, {}, state)


def finished(
    folder: Path, *batches: str, lines: Any = LINES, step: int = 4, bias: float = 0.0, **training: Any
) -> FinishedRun:
    """A run that was in as many processes as there are batches of them; a letter stands for a batch."""
    runner = folder / "run" / "t"
    runner.mkdir(parents=True)
    (runner / "metrics.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in lines), encoding="utf-8")
    if step:
        save(runner, step, bias, **training)
    for count, each in enumerate(batches):
        noted = [{"runner": "t", "iteration": at, "batch": batch} for at, batch in enumerate(each, 1) if batch != " "]
        (folder / f"{count}.jsonl").write_text("\n".join(map(json.dumps, noted)), encoding="utf-8")
    return FinishedRun(folder / "run", [folder / f"{count}.jsonl" for count in range(len(batches))])


def found(tmp_path: Path, *batches: str, **how: Any) -> dict[str, Finding]:
    straight = finished(tmp_path / "straight", "abcd")
    interrupted = finished(tmp_path / "interrupted", *(batches or ("abc", "  cd")), **how)
    return {each.part: each for each in compare(straight, interrupted, "t")}


def test_equal_runs_differ_in_nothing(tmp_path: Path) -> None:
    said = found(tmp_path)
    assert not any(each.differs for each in said.values())
    assert said["batches and losses"].text == "the same in 4 iterations, of which none has a loss"
    assert said["metrics.jsonl"].text == "the same 2 lines"
    same = ("weights", "random state", "all else")
    assert [said[part].text for part in same] == ["the same"] * 3


def test_what_neither_run_has_is_not_called_the_same(tmp_path: Path) -> None:
    assert found(tmp_path)["optimizers"].text == NOTHING
    runs = [finished(tmp_path / name, "", lines=[], step=0) for name in ("one", "other")]
    bare = {each.part: each.text for each in compare(*runs, "t")}
    hook = f"{NOTHING}: the runner stage calls no hook before_batch"
    assert bare == {"batches and losses": hook, "metrics.jsonl": NOTHING, "last checkpoint": NOTHING}


def test_an_older_checkpoint_that_differs_is_a_difference(tmp_path: Path) -> None:
    runs = [finished(tmp_path / name, "abcd") for name in ("one", "other")]
    for run, bias in zip(runs, (0.0, 1.0), strict=True):
        save(run.directory / "t", 2, bias)
    save(runs[0].directory / "t", 3, 0.0)
    said = {each.part: each for each in compare(*runs, "t")}
    different = "weights p: bias: 1 of 1 elements, largest difference 1"
    assert said["checkpoint 2"] == Finding("checkpoint 2", different, differs=True)
    assert said["not compared"].text == "checkpoints of iteration 3, which only one run has"


def test_a_run_that_does_not_repeat_itself_is_told_from_one_that_cannot_be_resumed(tmp_path: Path) -> None:
    assert found(tmp_path, "aXc", "  cd")["before the kill"].text == "the batch of iteration 2"


def test_what_differs_only_after_the_kill_is_no_chance(tmp_path: Path) -> None:
    said = found(tmp_path, "abc", "  Xd")
    assert "before the kill" not in said
    assert said["batches and losses"] == Finding("batches and losses", "the batch of iteration 3", differs=True)


def test_of_the_metrics_the_first_line_that_differs_is_told(tmp_path: Path) -> None:
    said = found(tmp_path, lines=[LINES[0], {**LINES[1], "loss": 0.26}])
    assert said["metrics.jsonl"] == Finding(
        "metrics.jsonl", "line 2: loss: 0.25 and 0.26, at iteration 4", differs=True
    )


def test_a_line_of_the_metrics_that_is_missing_is_told(tmp_path: Path) -> None:
    assert found(tmp_path, lines=LINES[:1])["metrics.jsonl"].text == "line 2: only the straight run has it"


def test_weights_are_told_by_the_first_and_the_largest_difference(tmp_path: Path) -> None:
    said = found(tmp_path, bias=1e-3)
    assert said["weights"].text == "weights p: bias: 1 of 1 elements, largest difference 0.001"
    assert [part for part, each in said.items() if each.differs] == ["weights"]


@pytest.mark.parametrize(
    ("part", "training", "what"),
    [
        ("optimizers", {"optim_schedulers": {"p": 1}}, "training: optim_schedulers.p: nothing and 1"),
        ("optimizers", {"optimizer": 2}, "training: optimizer: nothing and 2"),
        ("random state", {"random": {"torch": torch.ones(3)}}, "training: random.torch: 3 of 3 elements"),
        ("all else", {"loop": 1}, "training: loop: nothing and 1"),
    ],
)
def test_each_part_of_the_training_state_is_compared(
    tmp_path: Path, part: str, training: dict[str, Any], what: str
) -> None:
    said = found(tmp_path, **training)
    assert [name for name, each in said.items() if each.differs] == [part]
    assert said[part].text.startswith(what)


def test_runs_of_another_length_are_not_compared_further(tmp_path: Path) -> None:
    said = found(tmp_path, step=5)
    assert said["last checkpoint"] == Finding("last checkpoint", "that of iteration 4 and 5", differs=True)


def test_a_missing_checkpoint_is_a_difference(tmp_path: Path) -> None:
    assert found(tmp_path, step=0)["last checkpoint"].text == "that of iteration 4 and None"
