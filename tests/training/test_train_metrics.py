"""Metrics of the predictions on which a phase is trained."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from pipeline import Brain, GeneralTrainer, Stage, hookimpl, optimize
from pipeline.brain.module_brain import ModuleBrain
from pipeline.compute.trainable import trainable_of
from pipeline.context import Context
from pipeline.errors import ConfigError, DataError
from pipeline.stages import Runner
from tests.training.conftest import Kill, KilledError, mse

Config = Callable[..., dict[str, Any]]
Run = Callable[[dict[str, Any]], Context]
Table = Callable[..., TensorDataset]


class Net(Brain):
    """A line with the loss of the tests."""

    def __init__(self) -> None:
        super().__init__({"net": nn.Linear(3, 1)})

    def compute_forward(self, batch: Any, stage: Stage) -> Any:
        return self.modules.net(batch[0])

    def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> Any:
        return mse(predictions, batch[1])


def judged(config: Config, model: Any = None, metric: Any = "MAE", **runner: Any) -> dict[str, Any]:
    """A config whose phase has the train metric ``mae``."""
    chosen = config(**runner)
    chosen["phase"][0]["train_metrics"] = {"mae": {"class": metric}}
    if model:
        chosen["phase"][0]["model"] = model
        del chosen["phase"][0]["loss"]
    return chosen


def by_a_plain_loop(make_table: Table, epochs: int) -> list[float]:
    """The mean absolute error of the predictions of each epoch, made before the update of their batch."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer, (x, y) = torch.optim.SGD(model.parameters(), 0.1), make_table(10).tensors
    means = []
    for _ in range(epochs):
        errors = []
        for inputs, targets in zip(x.split(4), y.split(4), strict=True):
            predictions = model(inputs)
            errors.append((predictions - targets).abs().detach())
            optimizer.zero_grad()
            mse(predictions, targets).backward()
            optimizer.step()
        means.append(torch.cat(errors).mean().item())
    return means


def epochs_of(context: Context) -> list[dict[str, Any]]:
    lines = (context["run_dir"] / "train" / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["event"] == "epoch"]


def test_each_epoch_reports_the_metrics_of_its_own_predictions(config: Config, run: Run, make_table: Table) -> None:
    chosen = judged(config, epochs=3, valid_interval=2)
    chosen["phase"][0] |= {"valid_dataset_name": "data", "metrics": {"mae": {"class": "MAE"}}}
    del chosen["plugins"]
    context = run(chosen)
    assert [line["mae"] for line in epochs_of(context)] == pytest.approx(by_a_plain_loop(make_table, 3), rel=1e-6)
    assert list(context["metrics"]["line"]) == ["loss", "mae", "valid_loss", "valid_mae"]


def test_plugins_get_the_predictions_as_without_them(config: Config, run: Run) -> None:
    class Keeps:
        shapes: list[tuple[int, ...]] = []  # noqa: RUF012

        @hookimpl
        def after_batch(self, predictions: Tensor) -> None:
            self.shapes.append(tuple(predictions.shape))

    chosen = judged(config, epochs=1)
    chosen["plugins"].append(Keeps)
    run(chosen)
    assert Keeps.shapes == [(4, 1), (4, 1), (2, 1)]


class Classes(Net):
    """Gives its metrics two classes, by whether the target is above zero."""

    def readable(self, predictions: Tensor, batch: Any) -> Any:
        assert not predictions.requires_grad
        return predictions.flatten().sigmoid()

    def target(self, batch: Any) -> Any:
        return (batch[1].flatten() > 0).float()


@pytest.mark.slow
@pytest.mark.parametrize("metric", ["Mean", "MAE", "RMSE", "AUC", "LogLoss", "Precision", "Recall", "F1"])
def test_a_run_resumed_within_an_epoch_reports_the_same_to_the_last_bit(config: Config, run: Run, metric: str) -> None:
    keys = {"epochs": 3, "save_interval": 1}
    whole = run(judged(config, Classes, metric, **keys))
    chosen = judged(config, Classes, metric, **keys)
    with pytest.raises(KilledError):
        run({**chosen, "plugins": [*chosen["plugins"], Kill]})
    resumed = GeneralTrainer(chosen, resume="auto").run()
    assert resumed["metrics"] == whole["metrics"]
    assert resumed["train_state"]["iteration"] == 9


class Largest:
    """The largest prediction; as documented, only ``reset`` sets its value."""

    def reset(self) -> None:
        self.value = -math.inf

    def update(self, predictions: Tensor, target: Tensor) -> None:
        self.value = max(self.value, predictions.max().item())

    def compute(self) -> float:
        return self.value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert self.value == -math.inf
        self.value = state["value"]


def test_train_metric_is_reset_before_each_pass(config: Config, run: Run, make_table: Table) -> None:
    """The first pass too, and an earlier pass with larger predictions leaves nothing behind."""
    chosen = judged(config, metric=Largest, epochs=3)
    del chosen["plugins"]
    context = run(chosen)
    torch.manual_seed(0)
    model, (x, y) = nn.Linear(3, 1), make_table(10).tensors
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    expected = []
    for _ in range(3):
        predictions = []
        for inputs, targets in zip(x.split(4), y.split(4), strict=True):
            predictions.append(model(inputs))
            optimizer.zero_grad()
            mse(predictions[-1], targets).backward()
            optimizer.step()
        expected.append(torch.cat(predictions).max().item())
    assert [line["mae"] for line in epochs_of(context)] == pytest.approx(expected, rel=1e-6)


def test_train_metric_is_reset_before_its_state_is_loaded(config: Config, run: Run) -> None:
    keys = {"epochs": 3, "save_interval": 1}
    whole = run(judged(config, metric=Largest, **keys))
    chosen = judged(config, metric=Largest, **keys)
    with pytest.raises(KilledError):
        run({**chosen, "plugins": [*chosen["plugins"], Kill]})
    assert GeneralTrainer(chosen, resume="auto").run()["metrics"] == whole["metrics"]


class Unsaved:
    """A metric without a state."""

    def update(self, predictions: Any, target: Any) -> None: ...
    def compute(self) -> float:
        return 0.0

    def reset(self) -> None: ...


def test_a_metric_without_a_state_is_refused_before_the_first_step(config: Config, run: Run) -> None:
    message = "phase.line.train_metrics.mae: Unsaved lacks state_dict or load_state_dict, without which no run"
    with pytest.raises(ConfigError, match=re.escape(message)):
        run(judged(config, metric=Unsaved))


def test_a_metric_of_torchmetrics_kind_is_asked_to_keep_its_state(config: Config, run: Run) -> None:
    class Asked(Unsaved):
        kept: list[bool] = []  # noqa: RUF012

        def persistent(self, mode: bool) -> None:
            self.kept.append(mode)

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: Any) -> None: ...

    run(judged(config, metric=Asked, epochs=1))
    assert Asked.kept == [True]


class WithOwnStep(Net):
    """Trains in a method of its own, which gives no predictions."""

    def fit_batch(self, batch: Any) -> Any:
        loss = self.compute_objectives(self.compute_forward(batch, Stage.TRAIN), batch, Stage.TRAIN)
        optimize(loss, trainable_of(self).schedulers)
        return loss.detach()


NO_PREDICTIONS = "phase.line.train_metrics: nothing gives the predictions on which this phase is trained"


def test_a_fit_batch_that_gives_no_predictions_is_an_error_that_says_so(config: Config, run: Run) -> None:
    with pytest.raises(DataError, match=NO_PREDICTIONS):
        run(judged(config, WithOwnStep))


def test_a_fit_batch_around_the_one_of_brain_gives_its_predictions(config: Config, run: Run, make_table: Table) -> None:
    class Around(Net):
        def fit_batch(self, batch: Any) -> Tensor:
            return super().fit_batch(batch)

    numbers = run(judged(config, Around, epochs=1))["metrics"]["line"]
    assert numbers["mae"] == pytest.approx(by_a_plain_loop(make_table, 1)[0], rel=1e-6)


def test_a_loop_of_one_s_own_that_calls_fit_batch_has_them_too(config: Config, run: Run, make_table: Table) -> None:
    class Own(Runner):
        def run(self, context: Context) -> None:
            for _ in context.epochs(1):
                for batch in context.batches("line"):
                    context["model"]["line"]["brain"].fit_batch(batch)

    numbers = run(judged(config, runner_class_path=Own))["metrics"]["line"]
    assert numbers["mae"] == pytest.approx(by_a_plain_loop(make_table, 1)[0], rel=1e-6)


def test_a_number_that_is_logged_by_the_name_of_one_is_an_error(config: Config, run: Run) -> None:
    class Logs(Net):
        def compute_forward(self, batch: Any, stage: Stage) -> Any:
            self.log("mae", 1.0)
            return super().compute_forward(batch, stage)

    with pytest.raises(ConfigError, match=r"log\('mae', …\) would replace the metric of the pass"):
        run(judged(config, Logs, epochs=1))


def test_of_two_phases_that_share_a_model_the_one_that_has_them_reports_them(config: Config, run: Run) -> None:
    chosen = judged(config, epochs=1)
    chosen["phase"].append({"name": "again", "model_of": "line", "dataset_name": "data"})
    metrics = run(chosen)["metrics"]
    assert (list(metrics["line"]), list(metrics["again"])) == (["loss", "mae"], ["loss"])


def test_without_them_no_predictions_are_kept(config: Config, run: Run) -> None:
    chosen = judged(config, ModuleBrainOfLine, epochs=1)
    del chosen["phase"][0]["train_metrics"]
    brain = run(chosen)["model"]["line"]["brain"]
    assert not trainable_of(brain).keeps_outputs


class ModuleBrainOfLine(ModuleBrain):
    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 1), mse)
