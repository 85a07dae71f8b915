"""``pipeline runs``: the table, its columns, and which runs are in it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from pipeline import GeneralTrainer

Call = Callable[..., Result]
BEST = "runner.train_runner.keep_best={metric: valid_loss, mode: min}"


@pytest.fixture
def rates(linear: Path) -> dict[str, str]:
    """Label -> the name of the run directory, of two runs of which the second has the smaller loss."""
    runs = {}
    for rate in ("0.05", "0.2"):
        overrides = [f"hyper_parameters.optimizer.learning_rate={rate}", BEST]
        context = GeneralTrainer(linear, overrides, label=f"lr={rate}", tags=["swept", rate]).run()
        runs[f"lr={rate}"] = (
            context["run_dir"].rename(context["run_dir"].with_name(f"20260101-0000{len(runs)}0-abcdef")).name
        )
    for run in runs.values():
        (Path("runs/workspace") / run / "command.txt").unlink()
    return runs


def labels(result: Result) -> list[str]:
    assert result.exit_code == 0, result.stderr
    return [row["label"] for row in json.loads(result.stdout)]


def test_the_table_has_a_line_for_each_run(pipeline: Call, rates: dict[str, str]) -> None:
    lines = [line for line in pipeline("runs").stdout.splitlines() if "2026-01-01 00:00:" in line]
    for line, (label, run) in zip(lines, reversed(rates.items()), strict=True):
        for cell in (f"runs/workspace/{run}", "done", " 12 ", "valid_loss ", "at 12", label, "swept; "):
            assert cell in line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], ["lr=0.2", "lr=0.05"]),
        (["--sort", "valid_loss"], ["lr=0.2", "lr=0.05"]),
        (["--sort", "valid_loss", "--reverse"], ["lr=0.05", "lr=0.2"]),
        (["--sort", "label"], ["lr=0.05", "lr=0.2"]),
        (["--where", "tags=0.05"], ["lr=0.05"]),
        (["--where", "label=lr=0.0*"], ["lr=0.05"]),
        (["--where", "label!=lr=0.05"], ["lr=0.2"]),
        (["--where", "state=done", "-w", "steps>=12"], ["lr=0.2", "lr=0.05"]),
        (["--where", "steps>12"], []),
        (["--where", "state=failed", "-w", "valid_loss<100"], []),
        (["--where", "note<1"], []),
        (["--where", "best<0"], []),
        (["--where", "best<100"], ["lr=0.2", "lr=0.05"]),
        (["--where", "when>20260101-000000"], ["lr=0.2"]),
        (["--where", "when<2026"], []),
    ],
)
def test_runs_are_filtered_and_sorted(
    options: list[str], expected: list[str], pipeline: Call, rates: dict[str, str]
) -> None:
    assert labels(pipeline("runs", "--json", *options)) == expected


def test_a_metric_may_be_a_column_of_the_table(pipeline: Call, rates: dict[str, str]) -> None:
    [row, _] = json.loads(pipeline("runs", "--json").stdout)
    table = pipeline("runs", "-m", "valid_loss").stdout
    assert f"{row['valid_loss']:.5g}" in table
    assert "valid_loss" in table.splitlines()[1]


def test_an_unknown_column_is_an_error_with_the_nearest(pipeline: Call, rates: dict[str, str]) -> None:
    result = pipeline("runs", "--where", "valid_los<1")
    assert result.exit_code == 2
    assert "no run has the column 'valid_los'; did you mean 'valid_loss'?" in result.stderr


def test_what_is_no_condition_is_refused(pipeline: Call, rates: dict[str, str]) -> None:
    result = pipeline("runs", "--where", "done")
    assert result.exit_code == 2
    assert "is no condition; write state=done, or 'valid_loss<0.3'" in result.stderr


def test_a_damaged_run_is_in_the_table_and_told_of(pipeline: Call, rates: dict[str, str]) -> None:
    (Path("runs/workspace") / rates["lr=0.2"] / "status.json").write_text("{")
    result = pipeline("runs")
    assert "unknown (damaged)" in result.stdout
    assert f"runs/workspace/{rates['lr=0.2']}: status.json cannot be read" in result.stderr
    assert result.exit_code == 0


def test_no_runs_are_told_of(pipeline: Call) -> None:
    assert "there is no run in it" in pipeline("runs", ".").stderr
