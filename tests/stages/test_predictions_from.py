"""`predictions.from` decides what is written, and nothing else."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import Result
from safetensors.torch import load_file
from torch import nn

from pipeline import GeneralTrainer, testing

OWN = """
import torch


def selected(predictions, batch):
    return {"twice": predictions.mul_(2).squeeze(1), "x": batch[0]}


def too_few(predictions, batch):
    return {"one": predictions[:1], "all": predictions}


class Whole:
    \"\"\"The mean of the predictions; without `merge`, so whole batches are judged.\"\"\"

    def __init__(self):
        self.reset()

    def reset(self):
        self.sum = 0.0
        self.count = 0

    def update(self, predictions, target):
        assert predictions.shape == target.shape
        self.sum += float(predictions.sum())
        self.count += len(predictions)

    def compute(self):
        return self.sum / self.count

    def state_dict(self):
        return {"sum": self.sum, "count": self.count}

    def load_state_dict(self, state):
        self.sum = state["sum"]
        self.count = state["count"]
"""
CONFIG = testing.SMALL["config.yaml"].replace(
    "phase:\n",
    '  - {name: infer, class: infer, device: cpu, predictions: {from: "{workspace}/own.py:selected"}}\nphase:\n',
)
METRICS = 'phase.line.metrics={rmse: {class: RMSE}, mean: {class: "{workspace}/own.py:Whole"}}'
X = torch.linspace(-1, 1, 24).unsqueeze(1)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return testing.Workspace(tmp_path / "job", {"own.py": OWN, "config.yaml": CONFIG}).config


def test_metrics_with_from_judge_the_model_s_predictions(job: Path) -> None:
    """The function changes what it gets in place."""
    context = GeneralTrainer(job, [METRICS]).run()

    run_dir = context["run_dir"]
    model = nn.Linear(1, 1)
    checkpoint = run_dir / "train_runner" / "checkpoints" / "step-000000000012"
    model.load_state_dict(load_file(checkpoint / "line.safetensors"))
    with torch.no_grad():
        expected = model(X)
    rmse = math.sqrt(float((expected - (3 * X - 1)).square().mean()))
    assert context["metrics"]["line"]["rmse"] == pytest.approx(rmse)
    assert context["metrics"]["line"]["mean"] == pytest.approx(float(expected.mean()))
    lines = (run_dir / "infer" / "line_predictions.jsonl").read_text().splitlines()
    rows = [json.loads(line)["prediction"] for line in lines]
    assert [row["twice"] for row in rows] == pytest.approx((2 * expected).flatten().tolist())


def test_check_steps_finds_a_from_that_does_not_fit(
    job: Path,
    pipeline: Callable[..., Result],
) -> None:
    """It fails in the infer runner, which a run would reach only after the training."""
    assert pipeline("check", job, "--steps", 1, METRICS).exit_code == 0
    source = "runner.infer.predictions.from={workspace}/own.py:too_few"
    checked = pipeline("check", job, "--steps", 1, source)
    assert checked.exit_code != 0
    assert "return a row per sample of each" in checked.output
