"""Export, load and predict take the same checkpoint of a run, and ``init_model_path`` too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import Result
from safetensors.torch import load_file

import pipeline as package
from pipeline import GeneralTrainer
from pipeline.errors import ConfigError

Call = Callable[..., Result]
RUNNER = "runner.train_runner"
BEST = f"{RUNNER}.keep_best={{metric: valid_loss, mode: min}}"
# The loss rises with a rate that is too high, so the first of two epochs is the best.
RISING = "hyper_parameters.optimizer.learning_rate=3.0"
CASES = [
    ([BEST], None, 6, "the best checkpoint by valid_loss"),
    ([BEST], "last", 12, ""),
    ([], None, 12, "the newest checkpoint, since the run keeps no best one"),
    ([], "6", 6, ""),
]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("overrides", "which", "step", "reason"), CASES)
def test_which_of_a_run_is_the_same_everywhere(
    linear: Path,
    pipeline: Call,
    overrides: list[str],
    which: str | None,
    step: int,
    reason: str,
) -> None:
    run_dir = GeneralTrainer(linear, [RISING, *overrides]).run()["run_dir"].absolute()
    checkpoints = run_dir / "train_runner" / "checkpoints"
    expected = load_file(checkpoints / f"step-{step:012d}" / "line.safetensors")
    option = ["--which", which] if which else []
    argument = int(which) if which and which.isdecimal() else which

    loaded = package.load(run_dir, argument)
    exports = [
        pipeline("checkpoint", "export", path, "-o", f"{number}.safetensors", *option)
        for number, path in enumerate((run_dir, run_dir / "train_runner", checkpoints))
    ]
    predicted = pipeline("predict", run_dir, "-o", "out.jsonl", *option)

    assert loaded.checkpoint.name == f"step-{step:012d}"
    assert torch.equal(loaded.model.weight, expected["weight"])
    for number, export in enumerate(exports):
        assert torch.equal(load_file(f"{number}.safetensors")["weight"], expected["weight"])
        assert reason in export.stderr
    assert predicted.stdout.endswith(f"step-{step:012d}\n")
    assert reason in predicted.stderr


def test_initial_weights_of_a_run_are_the_best_or_newest(linear: Path) -> None:
    run_dirs = [GeneralTrainer(linear, [RISING, *more]).run()["run_dir"] for more in ([BEST], [])]
    starts = []
    for run_dir in run_dirs:
        initial = f"{RUNNER}.init_model_path={{run: {run_dir.absolute()}}}"
        still = "hyper_parameters.optimizer.learning_rate=0.0"
        context = GeneralTrainer(linear, [initial, still]).run()
        starts.append(context["model"]["line"]["model"].weight)

    for start, run_dir, step in zip(starts, run_dirs, (6, 12), strict=True):
        file = f"train_runner/checkpoints/step-{step:012d}/line.safetensors"
        assert torch.equal(start, load_file(run_dir / file)["weight"])


def test_which_with_a_checkpoint_is_refused(linear: Path, pipeline: Call) -> None:
    run_dir = GeneralTrainer(linear).run()["run_dir"].absolute()
    path = run_dir / "train_runner" / "checkpoints" / "step-000000000006"

    export = pipeline("checkpoint", "export", path, "-o", "w.safetensors", "--which", "12")
    with pytest.raises(ConfigError, match="which=12 has no effect"):
        package.load(path, 12)

    assert export.exit_code == 2
    assert "--which 12 names another" in export.stderr
