"""How stages are built."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline import Context, GeneralTrainer, RunnerBase
from pipeline.stages.instance import Instance


def run(linear: Path, seed: str) -> tuple[float, float]:
    config = GeneralTrainer(linear, [f"runner.train_runner.seed={seed}"]).config
    Instance(Context()).instance(Context(runner=config.runner("train_runner")))
    return random.random(), torch.rand(()).item()


@pytest.mark.parametrize("seed", ["0", "7"])
def test_a_seed_decides_what_python_and_torch_draw(linear: Path, seed: str) -> None:
    assert run(linear, seed) == (random.Random(int(seed)).random(), by_torch(int(seed)))


def by_torch(seed: int) -> float:
    return torch.rand((), generator=torch.Generator().manual_seed(seed)).item()


def test_without_a_seed_the_generators_go_on_from_where_they_were(linear: Path) -> None:
    random.seed(3)
    torch.manual_seed(3)
    assert run(linear, "null") == (random.Random(3).random(), by_torch(3))


def results(context: Context) -> Any:
    """What results.json says; nan and the like, which are no JSON, are refused."""

    def refuse(name: str) -> None:
        raise ValueError(name)

    folder = context["run_dir"] / context["runner_name"]
    return json.loads((folder / "results.json").read_text(), parse_constant=refuse)


def test_the_results_of_training_are_numbers_counters_and_the_newest_checkpoint(config: dict[str, Any]) -> None:
    config["mode"] = "train"
    context = GeneralTrainer(config).run()
    assert results(context) == {
        "metrics": context["metrics"],
        "train_state": {"iteration": 6, "update": 6, "epoch": 2, "samples": 20, "phase_index": 0},
        "best": None,
        "checkpoint": "train/checkpoints/step-000000000006",
    }
    assert set(context["metrics"]["line"]) == {"loss", "valid_loss"}


def test_the_results_of_inference_name_no_checkpoint_of_its_own(config: dict[str, Any]) -> None:
    context = GeneralTrainer(config).run()
    assert results(context)["checkpoint"] is None
    assert results(context)["metrics"] == context["metrics"]


def test_the_results_of_inference_have_the_numbers_of_each_checkpoint(config: dict[str, Any]) -> None:
    config["runner"][1]["init_model_path"] = "{run_dir}/train"
    context = GeneralTrainer(config).run()
    assert results(context)["checkpoints"] == {path.name: each for path, each in context["checkpoints"].items()}
    assert list(results(context)["checkpoints"]) == ["step-000000000003", "step-000000000006"]


def test_the_results_of_inference_name_the_one_checkpoint_that_was_evaluated(config: dict[str, Any]) -> None:
    context = GeneralTrainer(config).run()
    assert results(context)["checkpoints"] == {"step-000000000006": context["metrics"]}


class Undefined:
    """A metric that is never a finite number."""

    def __init__(self, value: float = math.nan) -> None:
        self.value = value

    def update(self, predictions: Tensor, target: Tensor) -> None:
        pass

    def compute(self) -> float:
        return self.value

    def reset(self) -> None:
        pass


def test_numbers_that_are_not_finite_become_null(config: dict[str, Any]) -> None:
    config["phase"][0]["metrics"] = {
        "undefined": {"class": Undefined},
        "endless": {"class": Undefined, "args": {"value": -math.inf}},
        "four": {"class": Undefined, "args": {"value": 4.0}},
    }
    told = results(GeneralTrainer(config).run())["metrics"]["line"]
    assert (told["undefined"], told["endless"], told["four"]) == (None, None, 4.0)


def test_a_runner_stage_that_writes_no_metrics_leaves_results_without_any(config: dict[str, Any]) -> None:
    class Silent(RunnerBase):
        def run(self, context: Context) -> None:
            context["seen"] = True

    config["mode"] = "train"
    config["runner"][0]["runner_class_path"] = Silent
    told = results(GeneralTrainer(config).run())
    assert told["metrics"] == {}
    assert told["checkpoint"] is None


def test_what_is_no_json_in_the_metrics_of_a_runner_of_ones_own_is_written_as_text(config: dict[str, Any]) -> None:
    class Telling(RunnerBase):
        def run(self, context: Context) -> None:
            context["metrics"] = {"line": {"device": context["device"], "loss": math.inf}}

    config["mode"] = "train"
    config["runner"][0]["runner_class_path"] = Telling
    assert results(GeneralTrainer(config).run())["metrics"] == {"line": {"device": "cpu", "loss": None}}
