"""``wandb``: what it has written, as wandb's own reader prints it."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import wandb
from click.testing import Result

from pipeline import GeneralTrainer
from tests.plugins.conftest import PHASES, RUNNERS, Numbers, reported

Tracked = Callable[[str], Path]


def records(folder: Path) -> list[dict[str, Any]]:
    """Those of each process that has logged to the run of a folder, in their order."""
    found = []
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(path)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        found += [json.loads(line) for line in done.stdout.splitlines()]
    return found


def history(folder: Path) -> Numbers:
    """Name -> [(iteration, number)]."""
    numbers: Numbers = {}
    for row in (record["history"]["item"] for record in records(folder) if record["type"] == "history"):
        for name in row.keys() - {"iteration", "_step", "_runtime", "_timestamp"}:
            numbers.setdefault(name, []).append((row["iteration"], row[name]))
    return numbers


@pytest.mark.slow
def test_every_number_is_logged_once_at_its_iteration(tracked: Tracked) -> None:
    run_dir = GeneralTrainer(tracked("wandb")).run()["run_dir"]
    found = history(run_dir / "train_runner")
    assert found == reported(run_dir)
    assert [step for step, _ in found["valid_loss"]] == [6, 12]


@pytest.mark.slow
def test_of_several_phases_the_name_of_a_number_begins_with_the_phase(tracked: Tracked) -> None:
    run_dir = GeneralTrainer(tracked("wandb"), [f"phase={PHASES}"]).run()["run_dir"]
    found = history(run_dir / "train_runner")
    assert [step for step, _ in found["a.valid_loss"]] == [6, 18]
    assert {"a.loss", "a.epoch_loss", "b.loss", "b.epoch_loss", "b.valid_loss"} < {*found}


def test_an_infer_runner_has_a_run_of_its_own(tracked: Tracked) -> None:
    run_dir = GeneralTrainer(tracked("wandb"), [f"runner={RUNNERS}"]).run()["run_dir"]
    assert history(run_dir / "infer_runner") == reported(run_dir, "infer_runner") != {}


def test_its_config_is_the_resolved_one_and_the_run_directory(
    tracked: Tracked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RATE", "0.25")
    overrides = ["hyper_parameters.optimizer.learning_rate=${env:RATE}"]
    run_dir = GeneralTrainer(tracked("wandb"), overrides).run()["run_dir"]
    (run,) = [record["run"] for record in records(run_dir / "train_runner") if record["type"] == "run"]
    config = run["config"]["update"]
    assert (run["project"], run["display_name"]) == ("workspace", f"{run_dir.name}/train_runner")
    assert config["run_dir"] == str(run_dir)
    assert config["hyper_parameters.optimizer.learning_rate"] == "${env:RATE}"
    assert (config["dataset.train_data.batch_size"], config["runner.train_runner.max_steps"]) == (4, None)


@pytest.mark.slow
def test_two_under_two_names_have_two_folders(tracked: Tracked) -> None:
    two = "wandb, {name: second, class_path: wandb, args: {project: other}}"
    folder = GeneralTrainer(tracked(two)).run()["run_dir"] / "train_runner"
    assert history(folder) == history(folder / "second_wandb") != {}


@pytest.mark.slow
def test_a_run_that_is_killed_has_each_number_once(tracked: Tracked, killed: Callable[..., Path]) -> None:
    # Each process finds this one's service of wandb in its environment, which outlives the killed.
    wandb.teardown()
    wandb.setup()
    assert "WANDB_SERVICE" in os.environ
    # Before each kill there is time to write what was logged.
    run_dir = killed(tracked("{wandb: {flush_seconds: 0.1}}"), seconds=1)
    folder = run_dir / "train_runner"
    found, numbers = history(folder), reported(run_dir)
    # Of a step that comes again, the speed is that of the first time.
    assert [step for step, _ in found.pop("samples_per_second")] == [
        step for step, _ in numbers.pop("samples_per_second")
    ]
    assert found == numbers
    rows = [record["history"]["item"]["_step"] for record in records(folder) if record["type"] == "history"]
    assert rows == [*range(len(rows))]
    assert len({record["run"]["run_id"] for record in records(folder) if record["type"] == "run"}) == 1


@pytest.mark.slow
def test_resume_test_says_that_it_can_be_resumed(tracked: Tracked, resume_test: Callable[..., Result]) -> None:
    result = resume_test(tracked("wandb"), "--at", "8")
    assert result.exit_code == 0, result.output


@pytest.mark.slow
def test_what_an_experiment_shows_is_there_once_at_its_iteration(showing: Tracked) -> None:
    config = showing("wandb")
    run_dir = GeneralTrainer(config).run()["run_dir"]
    folder = run_dir / "train_runner"
    back = folder / "checkpoints" / "step-000000000002"
    GeneralTrainer(config, ["runner.train_runner.max_steps=6"], resume=back).run()
    found = history(folder)
    for tag, kind in (("valid/picture", "png"), ("valid/tone", "wav")):
        own = [hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob(f"visuals/{tag}-*.{kind}"))]
        assert found[f"{tag}.sha256"] == list(zip((2, 4, 6), own, strict=True))
