"""A loss that broadcasts predictions [n, 1] and a target [n]."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from pipeline import Brain, GeneralTrainer, Stage
from tests.training.conftest import linear_config, table

Loss = Callable[[Tensor, Tensor], Tensor]


def flat_table() -> TensorDataset:
    """The table with targets [10]; in batches of 4, the last of which has 2."""
    x, y = table(10).tensors
    return TensorDataset(x, y.squeeze(1))


def line() -> nn.Module:
    return nn.Linear(3, 1)


def flat_line() -> nn.Module:
    """Make a line whose predictions are [n]."""
    return nn.Sequential(nn.Linear(3, 1), nn.Flatten(0))


def squared(predictions: Tensor, target: Tensor) -> Tensor:
    return ((predictions - target) ** 2).mean()


def of_probabilities(predictions: Tensor, target: Tensor) -> Tensor:
    return (target.abs().float() * predictions.sigmoid().log()).mean()


def squeezed(predictions: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(predictions.squeeze(-1), target)


def ranked(predictions: Tensor, target: Tensor) -> Tensor:
    """Compare each pair of predictions, as a ranking loss does."""
    order = (target[:, None] - target).sign()
    return nn.functional.softplus(-order * (predictions - predictions.T)).mean()


def kept(predictions: Tensor, target: Tensor) -> Tensor:
    """Keep each prediction at the index that its target names."""
    index = (target * 10).long().abs()
    kept: Tensor = torch.zeros(50, 1).index_copy(0, index, predictions).square().mean()
    return kept


def run(loss: Loss, *, model: Callable[[], nn.Module] = line, data: Any = flat_table) -> Any:
    config = linear_config()
    config["dataset"][0]["class_path"] = data
    own = {"model": model, "loss": loss, "valid_dataset_name": "data"}
    config["phase"][0] |= own
    return GeneralTrainer(config).run()


def reports(log_lines: list[str]) -> list[str]:
    return [line for line in log_lines if line.startswith("WARNING")]


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    "loss",
    [
        nn.functional.mse_loss,
        nn.functional.smooth_l1_loss,
        nn.functional.poisson_nll_loss,
        squared,
        of_probabilities,
    ],
)
def test_loss_that_broadcasts_is_reported_once(loss: Loss, log_lines: list[str]) -> None:
    run(loss)
    [report] = reports(log_lines)
    assert "phase.line: " in report
    assert "predictions (4, 1) and a target (4,) to (4, 4)" in report
    assert "predictions.squeeze(-1)" in report


@pytest.mark.parametrize("loss", [nn.functional.mse_loss, squared])
def test_loss_that_broadcasts_the_target_is_reported_once(loss: Loss, log_lines: list[str]) -> None:
    run(loss, model=flat_line, data=lambda: table(10))
    [report] = reports(log_lines)
    assert "predictions (4,) and a target (4, 1) to (4, 4)" in report
    assert "target.squeeze(-1)" in report


@pytest.mark.parametrize("loss", [squeezed, ranked, kept])
def test_loss_that_does_not_broadcast_is_not_reported(loss: Loss, log_lines: list[str]) -> None:
    run(loss)
    assert reports(log_lines) == []


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("other", [Tensor.to_sparse, torch.nested.as_nested_tensor])
def test_sparse_or_nested_prediction_is_not_watched(other: Callable[[Tensor], Tensor]) -> None:
    class Two(nn.Linear):
        def forward(self, inputs: Tensor) -> Any:
            predictions = super().forward(inputs)
            return predictions, other(predictions.detach())

    run(lambda predictions, target: squeezed(predictions[0], target), model=lambda: Two(3, 1))


class Net(Brain):
    """A Brain whose loss broadcasts."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__({"net": nn.Linear(3, 1)}, **arguments)

    def compute_forward(self, batch: Any, stage: Stage) -> Tensor:
        predictions: Tensor = self.modules["net"](batch[0])
        return predictions

    def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> Tensor:
        return squared(predictions, batch[1])


def test_brain_by_itself_reports_the_broadcast_of_its_loss(log_lines: list[str]) -> None:
    brain = Net(opt_class=lambda parameters: torch.optim.SGD(parameters, 0.1))
    arguments = {"batch_size": 4}
    brain.fit(range(2), flat_table(), flat_table(), False, arguments, arguments)
    [report] = reports(log_lines)
    assert "predictions (4, 1) and a target (4,) to (4, 4)" in report


def test_report_leaves_the_training_as_it_was() -> None:
    """The weights are those of a plain loop, broadcast or not."""
    context = run(squared)
    torch.manual_seed(0)
    model, (x, y) = nn.Linear(3, 1), flat_table().tensors
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        for inputs, target in zip(x.split(4), y.split(4), strict=True):
            optimizer.zero_grad()
            squared(model(inputs), target).backward()
            optimizer.step()
    trained = context["model"]["line"].model.state_dict()
    torch.testing.assert_close(trained, model.state_dict(), rtol=0, atol=0)


class Adversarial(Net):
    """Passes a further argument to its loss."""

    def fit_batch(self, batch: Any) -> Tensor:
        predictions = self.compute_forward(batch, Stage.TRAIN)
        loss = self.compute_objectives(predictions, batch, Stage.TRAIN, "generator")
        loss.backward()
        self.optimizers_step()
        return loss.detach()

    def compute_objectives(self, predictions: Any, batch: Any, stage: Stage, part: str = "") -> Tensor:
        return squared(predictions, batch[1])


def test_loss_with_a_further_argument_is_watched(log_lines: list[str]) -> None:
    brain = Adversarial(opt_class=lambda parameters: torch.optim.SGD(parameters, 0.1))
    brain.fit(range(1), flat_table(), train_loader_kwargs={"batch_size": 4})
    assert len(reports(log_lines)) == 1
