"""The default runner stage, evaluating; how it trains is tested in tests/training/test_loop.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from pipeline import Brain, Context, GeneralTrainer, Stage, StartupBase, hookimpl, stages
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
    config["runner"][1]["predictions"] = {}
    assert len(lines(GeneralTrainer(config).run())) == 10


def test_predictions_are_the_models_outputs_in_order_with_their_targets(config: dict[str, Any], data: Data) -> None:
    config["runner"][1]["predictions"] = {}
    context = GeneralTrainer(config).run()
    model, (x, y) = context["model"]["line"]["model"].eval(), data(7, 2).tensors
    with torch.no_grad():
        outputs = torch.cat([model(some) for some in x.split(4)])
    rows = lines(context)
    assert [row["index"] for row in rows] == list(range(7))
    assert torch.equal(torch.tensor([row["prediction"] for row in rows]), outputs)
    assert torch.equal(torch.tensor([row["target"] for row in rows]), y)


def test_several_phases_write_a_file_each(config: dict[str, Any]) -> None:
    config["runner"][1]["predictions"] = {}
    config["phase"].append({**config["phase"][0], "name": "other", "valid_dataset_name": "train_data"})
    context = GeneralTrainer(config).run()
    assert (len(lines(context, "line")), len(lines(context, "other"))) == (7, 10)
    assert list(context["metrics"]) == ["line", "other"]


def test_without_predictions_there_is_no_file(config: dict[str, Any]) -> None:
    context = GeneralTrainer(config).run()
    assert list((context["run_dir"] / "infer").glob("*predictions*")) == []


def test_inference_counts_as_epoch_0_and_has_the_counters_of_its_checkpoint(config: dict[str, Any]) -> None:
    trainer = GeneralTrainer(config)
    context = trainer.run()
    assert context["current_epoch"] == 0
    assert context["train_state"] == trainer.contexts["train"]["train_state"]
    assert context["train_state"] is not trainer.contexts["train"]["train_state"]


OUTPUTS = {
    "prediction is a tuple of 2, with no row per sample; return a tensor": lambda scores: (scores, scores),
    r"a batch has {'a': 4, 'b': 3}; return a row per sample": lambda scores: {"a": scores, "b": scores[1:]},
    r"a batch has {'prediction': 3, 'target': 4}; return a row": lambda scores: scores[1:],
    "cannot be written as JSON .*; return numbers or text": lambda scores: [object()] * 4,
}


@pytest.mark.parametrize(("message", "output"), OUTPUTS.items())
def test_predictions_that_have_no_row_per_sample_are_refused(config: dict[str, Any], message: str, output: Any) -> None:
    class Mine(Brain):
        def __init__(self) -> None:
            super().__init__({"net": nn.Linear(3, 1)})

        def compute_forward(self, batch: Any, stage: Stage) -> Any:
            return output(self.modules.net(batch[0]))

        def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> Tensor:
            return self.modules.net.weight.square().sum()

    config["runner"][1]["predictions"] = {}
    config["phase"][0] = {"name": "line", "model": Mine, "dataset_name": "train_data"}
    with pytest.raises(DataError, match=f"phase.line: predictions: {message}"):
        GeneralTrainer(config).run()


def test_data_that_cannot_be_evaluated_is_told_with_the_phase(config: dict[str, Any]) -> None:
    config["dataset"][1]["class_path"] = lambda: [torch.ones(3)] * 4
    config["runner"][0]["valid_interval"] = None
    with pytest.raises(DataError, match=r"phase.line: a batch is a tensor of shape \(4, 3\), not \(inputs, target\)"):
        GeneralTrainer(config).run()


# Several checkpoints


@pytest.fixture
def steps(config: dict[str, Any], data: Data) -> Callable[[Context], dict[str, float]]:
    """Has the infer runner evaluate each checkpoint of the train runner; then the losses by hand: name -> loss."""
    config["runner"][1] |= {"init_model_path": "{run_dir}/train", "predictions": {}}

    def by_hand(context: Context) -> dict[str, float]:
        model, (x, y) = config["phase"][0]["model"]().eval(), data(7, 2).tensors
        losses = {}
        for path in sorted((context["run_dir"] / "train" / "checkpoints").glob("step-*")):
            model.load_state_dict(load_file(path / "line.safetensors"))
            with torch.no_grad():
                losses[path.name] = nn.functional.mse_loss(model(x), y).item()
        return losses

    return by_hand


Steps = Callable[[Context], dict[str, float]]


def test_each_of_several_checkpoints_is_evaluated_in_step_order(config: dict[str, Any], steps: Steps) -> None:
    context = GeneralTrainer(config).run()
    found = {path.name: numbers["line"]["loss"] for path, numbers in context["checkpoints"].items()}
    assert list(found) == ["step-000000000003", "step-000000000006"] == list(steps(context))
    assert found == pytest.approx(steps(context), rel=1e-5)
    assert found["step-000000000003"] != found["step-000000000006"]


def test_the_metrics_and_counters_are_in_the_end_those_of_the_last(config: dict[str, Any], steps: Steps) -> None:
    context = GeneralTrainer(config).run()
    assert context["metrics"] == list(context["checkpoints"].values())[-1]
    assert context["train_state"]["iteration"] == 6


def test_each_of_several_checkpoints_has_a_folder_for_its_predictions(config: dict[str, Any], steps: Steps) -> None:
    context = GeneralTrainer(config).run()
    for name, loss in steps(context).items():
        text = (context["run_dir"] / "infer" / name / "line_predictions.jsonl").read_text()
        rows = [json.loads(line) for line in text.splitlines()]
        errors = [(row["prediction"][0] - row["target"][0]) ** 2 for row in rows]
        assert sum(errors) / 7 == pytest.approx(loss, rel=1e-5)


class Watching:
    """A plugin that writes down at which iteration it is told what."""

    @hookimpl
    def before_validation(self, context: Context, phase: str) -> None:
        context.setdefault("told", []).append((context["train_state"]["iteration"], phase, "before"))

    @hookimpl
    def after_validation(self, context: Context, phase: str) -> None:
        context["told"].append((context["train_state"]["iteration"], phase, "after"))


def test_the_plugins_are_told_of_each_evaluation_with_the_iteration_of_its_checkpoint(
    config: dict[str, Any], steps: Steps
) -> None:
    config["plugins"].append(Watching)
    config["phase"].append({**config["phase"][0], "name": "other"})
    assert GeneralTrainer(config).run()["told"] == [
        (iteration, phase, moment) for iteration in (6, 12) for phase in ("line", "other") for moment in ("before", "after")
    ]  # fmt: skip


class Damaging(stages.Startup):
    """Finds one of the checkpoints damaged."""

    def startup(self, context: Context) -> None:
        (context["run_dir"] / "train" / "checkpoints" / "step-000000000006" / "line.safetensors").write_bytes(b"")
        super().startup(context)


def test_a_damaged_one_of_several_is_left_out_with_a_warning(
    config: dict[str, Any], steps: Steps, log_lines: list[str]
) -> None:
    config["runner"][0]["epochs"] = 3
    config["runner"][1]["startup_class_path"] = Damaging
    checkpoints = GeneralTrainer(config).run()["checkpoints"]
    assert [path.name for path, numbers in checkpoints.items() if numbers] == ["step-000000000003", "step-000000000009"]
    assert any(line.startswith("WARNING") and "000006/line.safetensors" in line for line in log_lines)


def test_a_startup_that_loads_by_itself_has_nothing_else_loaded_behind_its_back(
    config: dict[str, Any], steps: Steps
) -> None:
    class Zero(StartupBase):
        def startup(self, context: Context) -> None:
            nn.init.zeros_(context["model"]["line"]["model"][3].weight)

    config["runner"][1]["startup_class_path"] = Zero
    context = GeneralTrainer(config).run()
    assert torch.equal(context["model"]["line"]["model"][3].weight, torch.zeros(1, 4))
    assert context["train_state"]["iteration"] == 0


def test_what_a_startup_does_to_the_weights_that_it_has_loaded_stays(config: dict[str, Any]) -> None:
    class Zero(stages.Startup):
        def startup(self, context: Context) -> None:
            super().startup(context)
            nn.init.zeros_(context["model"]["line"]["model"][3].weight)

    config["runner"][1]["startup_class_path"] = Zero
    assert torch.equal(GeneralTrainer(config).run()["model"]["line"]["model"][3].weight, torch.zeros(1, 4))


def test_a_checkpoint_that_is_damaged_on_one_rank_is_left_out_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ranks:
        def all_gather(self, value: Any) -> list[Any]:
            return [value, None if value["iteration"] == 2 else value]

    first, damaged, last = Path("1"), Path("2"), Path("3")
    context: Any = {
        "checkpoints": {first: {}, damaged: {}, last: {}},
        "model": {},
        "train_state": {"iteration": 1},
        "world": Ranks(),
    }
    monkeypatch.setattr("pipeline.stages.runner.load_next", lambda path, models: {"iteration": int(path.name)})
    monkeypatch.setattr(
        stages.Runner, "_evaluate_phases", lambda self, made: {"loss": made["train_state"]["iteration"]}
    )
    stages.Runner(context)._infer(context)
    assert context["checkpoints"] == {first: {"loss": 1}, damaged: {}, last: {"loss": 3}}
