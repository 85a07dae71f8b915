"""``pipeline compare``: in what runs differ, and that nothing else does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from pipeline import GeneralTrainer

Call = Callable[..., Result]


def run(config: Path, *overrides: str) -> Path:
    run_dir: Path = GeneralTrainer(config, overrides).run()["run_dir"]
    return run_dir


def last_line(result: Result) -> str:
    assert result.exit_code == 0, result.stderr
    return str(result.stdout.splitlines()[-1])


def test_two_equal_runs_are_equal(pipeline: Call, linear: Path) -> None:
    runs = run(linear, "label=a"), run(linear, "label=b")
    assert last_line(pipeline("compare", *runs)) == "config, code and environment are equal"


def test_the_only_difference_is_named(pipeline: Call, linear: Path) -> None:
    runs = run(linear), run(linear, "runner.train_runner.epochs=3")
    result = pipeline("compare", *runs)
    assert last_line(result) == "the only difference is runner.train_runner.epochs: 2 -> 3"
    for run_dir, steps in zip(runs, ("12", "18"), strict=True):
        metrics = json.loads((run_dir / "train_runner" / "results.json").read_text())["metrics"]["line"]
        assert f"{metrics['valid_loss']:.5g}" in result.stdout
        assert steps in result.stdout


def test_numbers_of_compared_runs_are_rounded_until_they_would_look_alike(pipeline: Call, linear: Path) -> None:
    runs = run(linear), run(linear)
    for run_dir, loss in zip(runs, (0.12345678901234567, 0.12345679901234567), strict=True):
        results = {"metrics": {"line": {"loss": 1 / 3, "valid_loss": loss}}}
        results["best"] = {"metric": "valid_loss", "value": loss, "iteration": 6}
        (run_dir / "train_runner" / "results.json").write_text(json.dumps(results))
    rows = {
        line.split()[0]: line.split()[1:] for line in pipeline("compare", *runs).stdout.splitlines() if line.split()
    }
    assert rows["loss"] == ["0.33333", "0.33333"]
    assert rows["valid_loss"] == ["0.123456789", "0.123456799"]
    assert rows["best"] == ["valid_loss", "0.123456789", "at", "6", "valid_loss", "0.123456799", "at", "6"]


def test_code_and_environment_are_compared(pipeline: Call, linear: Path) -> None:
    first, data = run(linear), linear.parent / "data.py"
    data.write_text(data.read_text().replace("- 1", "- 2"))
    other = run(linear)
    environment = json.loads((other / "environment.json").read_text())
    environment["packages"]["torch"] = "1.0"
    (other / "environment.json").write_text(json.dumps(environment))
    result = pipeline("compare", first, other)
    assert "-        return self.x[index], 3 * self.x[index] - 1" in result.stdout
    assert last_line(result).startswith("the only differences are workspace/data.py; environment.packages.torch: ")


def test_what_is_another_in_each_start_of_several_processes_is_no_difference(pipeline: Call, linear: Path) -> None:
    runs = run(linear), run(linear)
    for number, run_dir in enumerate(runs):
        environment = json.loads((run_dir / "environment.json").read_text())
        environment["variables"]["MASTER_PORT"] = str(4000 + number)
        environment["ranks"] = [{"host": "a", "pid": 10 * number + rank} for rank in range(2)]
        (run_dir / "environment.json").write_text(json.dumps(environment))
    assert last_line(pipeline("compare", *runs)) == "config, code and environment are equal"


def test_another_workspace_with_the_same_files_differs_by_its_place(pipeline: Call, linear: Path) -> None:
    first = run(linear).rename("first")
    moved = linear.parent.rename(linear.parent.with_name("moved"))
    printed = json.loads(pipeline("compare", "--json", first, run(moved / "config.yaml")).stdout)
    [difference] = printed["differences"]
    assert [line.partition(":")[0] for line in difference["config"]] == ["workspace"]
    assert (difference["code"], difference["environment"]) == ({}, [])


def test_what_cannot_be_compared_is_told_of(pipeline: Call, linear: Path) -> None:
    first, other = run(linear), run(linear, "runner.train_runner.epochs=3")
    (other / "config.yaml").write_text("[1")
    (other / "environment.json").unlink()
    result = pipeline("compare", first, other)
    assert last_line(result) == "what could be compared differs in: nothing"
    assert f"{other}/environment.json: cannot be read" in result.stdout


def test_a_damaged_environment_is_told_of(pipeline: Call, linear: Path) -> None:
    first, other = run(linear), run(linear)
    (other / "environment.json").write_text("{}")
    result = pipeline("compare", first, other)
    assert (result.exit_code, result.exception) == (0, None)
    assert f"{other}/environment.json: makes no sense; it cannot be compared" in result.stdout


def test_all_of_it_is_there_as_json(pipeline: Call, linear: Path) -> None:
    runs = [run(linear, f"runner.train_runner.epochs={epochs}") for epochs in (1, 2, 3)]
    printed = json.loads(pipeline("compare", "--json", *runs).stdout)
    assert [row["steps"] for row in printed["runs"]] == [6, 12, 18]
    assert [entry["config"] for entry in printed["differences"]] == [
        [f"runner.train_runner.epochs: 1 -> {epochs}"] for epochs in (2, 3)
    ]


@pytest.mark.parametrize("which", ["runs/workspace", "nowhere"])
def test_what_is_no_run_is_refused(which: str, pipeline: Call, linear: Path) -> None:
    first, _ = run(linear), run(linear)
    result = pipeline("compare", first, which)
    assert result.exit_code == 2
    assert f"{which}: is no" in result.stderr


def test_one_run_alone_is_refused(pipeline: Call) -> None:
    assert "name two run directories or more" in pipeline("compare", "a").stderr
