"""The default runner stage, evaluating; how it trains is tested in tests/training/test_loop.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from pipeline import Brain, Context, GeneralTrainer, Stage
from pipeline.errors import DataError

Data = Callable[[int, int], TensorDataset]


def lines(context: Context, phase: str = "line") -> list[dict[str, Any]]:
    path: Path = context["run_dir"] / "infer" / f"{phase}_predictions.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_numbers_of_inference_are_those_of_the_last_validation(config: dict[str, Any]) -> None:
    config["phase"][0]["metrics"] = {"rmse": {"class": "RMSE"}}
    trainer = GeneralTrainer(config)
    evaluated = trainer.run()["metrics"]["line"]
    validated = trainer.contexts["train"]["metrics"]["line"]
    assert evaluated == {name: validated[f"valid_{name}"] for name in ("loss", "rmse")}


def test_inference_is_in_evaluation_mode_and_changes_nothing(config: dict[str, Any], data: Data) -> None:
    trainer = GeneralTrainer(config)
    context = trainer.run()
    model, (x, y) = context["model"]["line"]["model"], data(7, 2).tensors
    before = trainer.contexts["train"]["model"]["line"]["model"].state_dict()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    expected = nn.functional.mse_loss(model.eval()(x), y).item()
    assert context["metrics"]["line"]["loss"] == pytest.approx(expected, rel=1e-5)


def test_without_validation_data_inference_is_on_the_training_data(config: dict[str, Any]) -> None:
    del config["phase"][0]["valid_dataset_name"]
    config["runner"][1]["write_predictions"] = True
    assert len(lines(GeneralTrainer(config).run())) == 10


def test_predictions_are_the_models_outputs_in_order_with_their_targets(config: dict[str, Any], data: Data) -> None:
    config["runner"][1]["write_predictions"] = True
    context = GeneralTrainer(config).run()
    model, (x, y) = context["model"]["line"]["model"].eval(), data(7, 2).tensors
    with torch.no_grad():
        outputs = torch.cat([model(some) for some in x.split(4)])
    rows = lines(context)
    assert [row["index"] for row in rows] == list(range(7))
    assert torch.equal(torch.tensor([row["prediction"] for row in rows]), outputs)
    assert torch.equal(torch.tensor([row["target"] for row in rows]), y)


def test_several_phases_write_a_file_each(config: dict[str, Any]) -> None:
    config["runner"][1]["write_predictions"] = True
    config["phase"].append({**config["phase"][0], "name": "other", "valid_dataset_name": "train_data"})
    context = GeneralTrainer(config).run()
    assert (len(lines(context, "line")), len(lines(context, "other"))) == (7, 10)
    assert list(context["metrics"]) == ["line", "other"]


def test_without_write_predictions_there_is_no_file(config: dict[str, Any]) -> None:
    context = GeneralTrainer(config).run()
    assert list((context["run_dir"] / "infer").glob("*predictions*")) == []


def test_inference_counts_as_epoch_0_and_trains_no_iteration(config: dict[str, Any]) -> None:
    context = GeneralTrainer(config).run()
    assert context["current_epoch"] == 0
    assert context["train_state"]["iteration"] == 0


@pytest.mark.parametrize("output", [lambda scores: {"score": scores}, lambda scores: (scores, scores)])
def test_predictions_that_have_no_row_per_sample_are_refused(config: dict[str, Any], output: Any) -> None:
    class Mine(Brain):
        def __init__(self) -> None:
            super().__init__({"net": nn.Linear(3, 1)})

        def compute_forward(self, batch: Any, stage: Stage) -> Any:
            return output(self.modules.net(batch[0]))

        def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> Tensor:
            return self.modules.net.weight.square().sum()

    config["runner"][1]["write_predictions"] = True
    config["phase"][0] = {"name": "line", "model": Mine, "dataset_name": "train_data"}
    with pytest.raises(DataError, match=r"write_predictions: (dict|tuple) has no row per sample; return a tensor"):
        GeneralTrainer(config).run()


def test_data_that_cannot_be_evaluated_is_told_with_the_phase(config: dict[str, Any]) -> None:
    config["dataset"][1]["class_path"] = lambda: [torch.ones(3)] * 4
    config["runner"][0]["valid_interval"] = None
    with pytest.raises(DataError, match=r"phase.line: a batch is a tensor of shape \(4, 3\), not \(inputs, target\)"):
        GeneralTrainer(config).run()


def test_an_evaluate_batch_of_its_own_has_no_predictions_to_be_written(config: dict[str, Any]) -> None:
    class Mine(Brain):
        def __init__(self) -> None:
            super().__init__({"net": nn.Linear(3, 1)})

        def compute_forward(self, batch: Any, stage: Stage) -> Any:
            return self.modules.net(batch[0])

        def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> Tensor:
            return nn.functional.mse_loss(predictions, batch[1])

        def evaluate_batch(self, batch: Any, stage: Stage) -> Tensor:
            return self.compute_objectives(self.compute_forward(batch, stage), batch, stage)

    config["runner"][1]["write_predictions"] = True
    config["phase"][0] = {"name": "line", "model": Mine, "dataset_name": "train_data"}
    with pytest.raises(
        DataError, match=r"phase.line: Mine has its own evaluate_batch.*; leave out metrics and write_pred"
    ):
        GeneralTrainer(config).run()
