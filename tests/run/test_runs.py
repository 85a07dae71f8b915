"""The table of runs: what it says of runs that are done, running, killed, failed or damaged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import pipeline
from pipeline import GeneralTrainer
from pipeline.errors import ConfigError
from pipeline.run.runs import RunRecord

STRANGE = b'{"state": [], "iteration": {}, "tags": 5, "label": [1], "metrics": {"line": 3}, "best": "no"}'
BEST = "runner.train_runner.keep_best={metric: valid_loss, mode: min}"


@pytest.fixture
def run_dir(linear: Path) -> Path:
    """The directory of a run that is done."""
    run_dir: Path = GeneralTrainer(linear, [BEST, "tags=[a, b]"], label="first").run()["run_dir"]
    return run_dir


def record(run_dir: Path) -> RunRecord:
    [found] = pipeline.list_runs(run_dir)
    return found


def change(run_dir: Path, **values: Any) -> None:
    """Change the status of a run."""
    file = run_dir / "status.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def test_a_run_is_described_by_its_files(run_dir: Path) -> None:
    found, results = record(run_dir), json.loads((run_dir / "train_runner" / "results.json").read_text())
    assert (found.state, found.steps, found.label, found.tags) == ("done", 12, "first", ["a", "b"])
    assert found.when == run_dir.name[:15]
    assert found.overrides == [BEST]
    assert found.best == results["best"]
    assert found.metrics == results["metrics"]["line"]
    assert found.problems == []


def test_metrics_are_columns_of_a_row(run_dir: Path) -> None:
    row = record(run_dir).as_row()
    assert row["valid_loss"] == record(run_dir).metrics["valid_loss"]
    assert row["path"] == run_dir


def test_the_runs_of_a_folder_are_listed_from_the_newest_without_links(linear: Path) -> None:
    paths = []
    for day in ("20260101", "20260301", "20260201"):
        run_dir = GeneralTrainer(linear, ["runner.train_runner.epochs=1"]).run()["run_dir"]
        paths.append(run_dir.rename(run_dir.with_name(f"{day}-000000-abcdef")))
        (paths[-1] / "command.txt").unlink()
    expected = [paths[1].name, paths[2].name, paths[0].name]
    for folder in (".", "runs", "runs/workspace"):
        assert [found.path.name for found in pipeline.list_runs(folder)] == expected


def test_the_trials_of_a_sweep_are_listed_and_its_folder_is_no_run(linear: Path) -> None:
    straight = GeneralTrainer(linear).run()["run_dir"]
    sweep = Path("runs/workspace/sweeps/20260101-000000-abcdef")
    for name in ("trial-000", "trial-001"):
        (sweep / name).mkdir(parents=True)
    run_dir = GeneralTrainer(linear, resume=sweep / "trial-000").run()["run_dir"]
    time = json.loads((run_dir / "environment.json").read_text())["time"]
    for folder in (".", "runs", "runs/workspace"):
        found = {run.path.name: run for run in pipeline.list_runs(folder)}
        assert set(found) == {straight.name, "trial-000"}
        when = found["trial-000"].when
        assert f"{when[:4]}-{when[4:6]}-{when[6:8]}T{when[9:11]}:{when[11:13]}:{when[13:]}+00:00" == time
    for folder in ("runs/workspace/sweeps", str(sweep), str(sweep / "trial-000")):
        assert [run.path.name for run in pipeline.list_runs(folder)] == ["trial-000"]
    # Neither is it found where a run is looked for to go on with.
    assert GeneralTrainer(linear, ["runner.train_runner.epochs=3"], resume="auto").run()["run_dir"] == straight


def test_a_folder_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ConfigError, match="runs: is no folder; name one with runs in it"):
        pipeline.list_runs()


def test_what_another_runner_or_phase_reports_has_its_name(linear: Path) -> None:
    infer = (
        "runner=[{name: train_runner, class: train, device: cpu, epochs: 1}, {name: test, class: infer, device: cpu}]"
    )
    run_dir = GeneralTrainer(linear, [infer]).run()["run_dir"]
    assert {"train_runner.valid_loss", "test.loss"} <= record(run_dir).metrics.keys()


def test_a_run_that_is_going_on_has_its_newest_numbers(run_dir: Path) -> None:
    (run_dir / "train_runner" / "done.json").unlink()
    change(run_dir, state="running", iteration=0)
    (run_dir / "lock").write_text(f"host {os.uname().nodename}, pid {os.getpid()}, since now\n")
    with (run_dir / "train_runner" / "metrics.jsonl").open("a") as file:
        line = {"event": "validate", "epoch": 1, "iteration": 15, "phase": "line", "loss": 0.5}
        file.write(json.dumps(line) + '\n{"event": "tra')
    found = record(run_dir)
    assert (found.state, found.steps, found.metrics["valid_loss"]) == ("running", 15, 0.5)


def test_a_run_whose_process_is_gone_was_killed(run_dir: Path) -> None:
    change(run_dir, state="running")
    ended = subprocess.Popen([sys.executable, "-S", "-c", ""])
    ended.wait()
    (run_dir / "lock").write_text(f"host {os.uname().nodename}, pid {ended.pid}, since then\n")
    assert record(run_dir).state == "killed"


def test_only_the_end_of_long_files_is_read(run_dir: Path) -> None:
    (run_dir / "train_runner" / "done.json").unlink()
    file = run_dir / "train_runner" / "metrics.jsonl"
    last = file.read_text().splitlines()[-1]
    file.write_text("no JSON at all\n" + f"{last}\n" * 2000)
    assert record(run_dir).metrics == {"loss": json.loads(last)["loss"], "valid_loss": json.loads(last)["valid_loss"]}


def test_a_failed_run_has_its_reason(linear: Path) -> None:
    with pytest.raises(RuntimeError):
        GeneralTrainer(linear, ["phase.line.model_args={in_features: 2, out_features: 1}"]).run()
    [found] = pipeline.list_runs()
    assert found.state == "failed"
    assert "mat1 and mat2 shapes cannot be multiplied" in found.reason


def test_status_without_label_and_tags_is_read(run_dir: Path) -> None:
    status = json.loads((run_dir / "status.json").read_text())
    (run_dir / "status.json").write_text(json.dumps({name: status[name] for name in ("state", "iteration", "epoch")}))
    found = record(run_dir)
    assert (found.state, found.label, found.tags, found.problems) == ("done", None, [], [])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["status.json", "command.txt", "train_runner/results.json"])
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[1",
        b"[[[",
        b'{"state": 1e999}',
        b'{"state": "done", "iteration": 1e999, "metrics": {}}',
        b"\xff\xfe",
        b"null",
        b'"x"',
        STRANGE,
    ],
)
def test_a_damaged_file_is_told_of_and_the_rest_is_there(name: str, content: bytes, run_dir: Path) -> None:
    (run_dir / name).write_bytes(content)
    found = record(run_dir)
    assert found.when == run_dir.name[:15]
    assert isinstance(found.state, str)
    assert name == "status.json" or found.state == "done"
    assert all(problem.startswith(name) for problem in found.problems)


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(run_dir: Path) -> None:
    (run_dir / "status.json").unlink()
    os.mkfifo(run_dir / "status.json")
    found = record(run_dir)
    assert found.state == "unknown"
    assert "is no regular file" in found.problems[0]


def test_a_run_that_ended_before_its_first_file_is_listed(tmp_path: Path) -> None:
    (tmp_path / "20260101-000000-abcdef").mkdir()
    [found] = pipeline.list_runs(tmp_path)
    assert (found.state, found.when) == ("killed", "20260101-000000")
