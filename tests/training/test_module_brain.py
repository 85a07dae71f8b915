"""The Brain around a plain module; how batches are split is tested in test_brain.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from pipeline.brain.module_brain import ModuleBrain
from pipeline.compute.stage import Stage
from pipeline.context import Context
from pipeline.errors import ConfigError, DataError
from tests.training.conftest import in_turn

mse = nn.functional.mse_loss
X, Y = torch.ones(4, 3), torch.ones(4, 1)


class Two(nn.Module):
    """Takes two inputs, and one by name alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, left: Tensor, right: Tensor, *, scale: float = 1.0) -> Tensor:
        result: Tensor = self.layer(left + right) * scale
        return result


class Inner(nn.Module):
    """Has a mistake of its own inside."""

    def forward(self, inputs: Tensor) -> Tensor:
        return len(7) + inputs  # type: ignore[arg-type,no-any-return] # a mistake


TAKES = r"Two.forward takes \(left: .*, right: .*, \*, scale: .*\)"


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (
            X,
            rf"the inputs of a batch are \(a tensor of shape \(4, 3\)\), and {TAKES} ?.*: missing .*'right'; return them",
        ),
        (
            (X, X, X),
            rf"are \(a tensor .*, a tensor .*, a tensor of shape \(4, 3\)\), and {TAKES}.*: too many positional",
        ),
        (["text"] * 64, rf"are \(64 times a str\), and {TAKES}.*: too many positional"),
        ([*["text"] * 4, X, *["text", 1] * 4], r"are \(4 times a str, a tensor of .*, a str, a int, .*a int, …\), and"),
        ({"left": X, "rihgt": X}, rf"are \(left: a tensor .*, rihgt: a tensor .*\), and {TAKES}.*: missing .*'right'"),
        ({"left": X, "right": X, "width": X}, rf"width: a tensor .*\), and {TAKES}.*: got an unexpected .*'width'"),
    ],
)
def test_a_batch_that_does_not_fit_forward_is_refused_with_both_signatures(inputs: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        ModuleBrain(Two(), mse).compute_forward((inputs, Y), Stage.TRAIN)


def test_in_a_run_that_is_told_with_the_phase(config: Callable[..., Any], run: Callable[[Any], Context]) -> None:
    chosen = config()
    chosen["phase"][0]["model"] = Two
    with pytest.raises(DataError, match=rf"phase.line: the inputs of a batch are .*, and {TAKES}.*, or write a Brain"):
        run(chosen)


def test_a_mistake_within_forward_keeps_its_own_message() -> None:
    with pytest.raises(TypeError, match=r"object of type 'int' has no len\(\)"):
        ModuleBrain(Inner(), mse).compute_forward((X, Y), Stage.TRAIN)


def test_a_list_of_inputs_and_a_mapping_reach_forward_as_they_are() -> None:
    brain = ModuleBrain(Two(), mse)
    expected = brain.module(X, 2 * X)
    assert torch.equal(brain.compute_forward(([X, 2 * X], Y), Stage.TRAIN), expected)
    assert torch.equal(brain.compute_forward(({"left": X, "right": 2 * X, "scale": 3.0}, Y), Stage.TRAIN), 3 * expected)


def test_it_is_saved_under_the_name_model_and_may_be_fitted_by_itself() -> None:
    brain = ModuleBrain(nn.Linear(3, 1), mse)
    before = brain.module.weight.detach().clone()
    brain.opt_class = lambda parameters: torch.optim.SGD(parameters, 0.1)
    brain.fit(range(1), [(torch.ones(3), torch.ones(1))])
    assert list(brain.modules) == ["model"]
    assert not torch.equal(brain.module.weight, before)


def test_a_loss_that_is_a_module_goes_to_the_device_too() -> None:
    brain = ModuleBrain(nn.Linear(3, 1), nn.CrossEntropyLoss(torch.ones(1)))
    brain.device = torch.device("meta")
    brain._place_modules()
    assert {each.device.type for each in (*brain.module.parameters(), *brain.loss.buffers())} == {"meta"}


class Output(NamedTuple):
    """What a model returns that computes its loss itself, with names as attributes."""

    loss: Tensor | None
    logits: Tensor


class Judge(nn.Module):
    """Returns its loss where it gets labels, as models of transformers do."""

    def __init__(self, make: Callable[..., Any] = Output) -> None:
        super().__init__()
        self.layer, self.make = nn.Linear(3, 1), make

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.layer(x)
        return self.make(loss=None if labels is None else mse(logits, labels), logits=logits)


@in_turn("make", [Output, dict])
@in_turn("batch", [{"x": X, "labels": Y}, {"x": X, "label": Y}, (X, Y), ([X], Y), ({"x": X}, Y)])
def test_without_a_loss_of_its_own_it_takes_the_one_that_the_module_returns(make: Any, batch: Any) -> None:
    brain = ModuleBrain(Judge(make), None)
    predictions = brain.compute_forward(batch, Stage.TRAIN)
    logits = brain.module.layer(X)
    assert torch.equal(brain.compute_objectives(predictions, batch, Stage.TRAIN), mse(logits, Y))
    assert torch.equal(brain.readable(predictions, batch), logits)


def test_what_metrics_get_is_else_what_the_module_returns() -> None:
    output = {"logits": X, "loss": Y}
    assert ModuleBrain(Judge(dict), mse).readable(output, (X, Y)) is output
    assert torch.equal(ModuleBrain(Judge(), None).readable(X, (X, Y)), X)


def test_a_module_that_returns_no_loss_is_refused_with_what_it_returns() -> None:
    brain = ModuleBrain(Judge(lambda loss, logits: logits), None)
    message = r"Judge.forward returned a tensor of shape \(4, 1\) without a loss; return it as `loss`, or name a loss f"
    with pytest.raises(DataError, match=message):
        brain.compute_objectives(brain.compute_forward((X, Y), Stage.TRAIN), (X, Y), Stage.TRAIN)


def returning(config: Callable[..., Any], model: Callable[[], nn.Module]) -> dict[str, Any]:
    """A run of a model that returns its loss."""
    chosen: dict[str, Any] = config()
    chosen["phase"][0] |= {"model": model, "loss": "model"}
    return chosen


def test_in_a_run_the_loss_of_the_model_trains_as_the_same_by_name(
    config: Callable[..., Any], run: Callable[[Any], Context]
) -> None:
    ours, other = (run(each)["model"]["line"]["model"] for each in (returning(config, Judge), config()))
    assert torch.equal(ours.layer.weight, other.weight)


def test_in_a_run_a_model_that_takes_no_labels_is_told_so_before_the_first_step(
    config: Callable[..., Any], run: Callable[[Any], Context]
) -> None:
    message = r"phase.line: Two.forward\(left: .*\) .*takes none of target, label, labels, to return"
    with pytest.raises(ConfigError, match=message):
        run(returning(config, Two))
