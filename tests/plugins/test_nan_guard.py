"""``nan_guard``: which module, and which of its tensors, is first not finite; the run goes on as without it."""

from __future__ import annotations

import math
import operator
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pipeline_plugins.nan_guard import NanGuard
from pipeline_plugins.shared.brain_copy import copy_of
from pipeline_plugins.shared.differences import checkpoint_differences
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from pipeline import Brain, Context, GeneralTrainer, RunnerBase, Stage, observe, stages
from pipeline.checkpoint.reader import read_checkpoint
from pipeline.errors import ConfigError, DivergedError

mse = nn.functional.mse_loss


def config(model: Any, arguments: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """Two epochs of 4 batches of 2 samples, of which the batch 2 has the inputs -1, all others 1."""
    data = TensorDataset(torch.ones(8, 3), torch.ones(8, 1))
    data.tensors[0][4:6] = -1
    data.tensors[0][4:6] = changes.pop("third", -1.0)
    phase = {"name": "p", "model": model, "loss": mse, "dataset_name": "data"}
    return {
        "hyper_parameters": {"optimizer": {"class": "SGD", "lr": changes.pop("lr", 0.01)}},
        "plugins": [{"progress_bar": False}, *([] if arguments is None else [{"nan_guard": arguments}])],
        "dataset": [{"name": "data", "class_path": lambda: data, "batch_size": 2}],
        "runner": [{"name": "t", "class": "train", "device": "cpu", "epochs": 2, "save_interval": 2} | changes.pop("runner", {})],
        "phase": [phase | changes],
    }  # fmt: skip


def finding(model: Any, **changes: Any) -> str:
    """What ends a run."""
    with pytest.raises(DivergedError) as raised:
        GeneralTrainer(config(model, {}, **changes)).run()
    assert raised.value.exit_code == 5
    return str(raised.value)


class Log(nn.Module):
    """The logarithm of the inputs, which is nan for those below zero, and -inf for zero."""

    def forward(self, x: Tensor) -> Any:
        return x.log()


class Root(nn.Module):
    """The square root, whose gradient at zero is inf."""

    def forward(self, x: Tensor) -> Any:
        return x.sqrt()


def one(weight: float = 1.0, size: int = 3) -> nn.Linear:
    """A layer that gives each sample the sum of its numbers."""
    layer = nn.Linear(size, 1, bias=False)
    nn.init.constant_(layer.weight, weight)
    return layer


def test_the_module_whose_output_is_first_not_finite_is_named() -> None:
    assert finding(lambda: nn.Sequential(nn.Identity(), Log(), one(0.1))) == (
        "phase.p: the loss 'loss' is nan in iteration 3; first not finite: the output of 'model.1' (Log), with 6 nan of "
        "6 numbers; mend that, or give nan_guard the action warn"
    )


def test_what_is_computed_between_modules_is_told_by_the_input_of_the_next() -> None:
    class Between(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 3), one()

        def forward(self, x: Tensor) -> Any:
            return self.second(self.first(x) / (x + 1))

    assert "first not finite: the input of 'model.second' (Linear), with 6 inf of 6 numbers" in finding(Between)


def test_an_inf_and_the_first_nan_are_told_apart() -> None:
    class Difference(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x - x

    found = finding(lambda: nn.Sequential(Log(), Difference(), one()), third=0.0)
    assert (
        "first not finite: the output of 'model.0' (Log), with 6 inf of 6 numbers; first nan: the output of 'model.1'"
        in found
    )


def test_a_batch_that_is_not_finite_itself_is_told() -> None:
    found = finding(lambda: nn.Sequential(one()), third=math.nan)
    assert (
        "first not finite: the input of 'model' (Sequential), with 6 nan of 6 numbers; the batch itself has 6 nan"
        in found
    )


def test_a_loss_that_is_not_finite_by_itself_is_told() -> None:
    def loss(predictions: Tensor, target: Tensor) -> Tensor:
        return predictions.log().mean()

    found = finding(one, loss=loss)
    assert "first not finite: the loss that compute_objectives returns, with 1 nan of 1 numbers" in found


def test_a_parameter_that_is_not_finite_is_named() -> None:
    found = finding(lambda: nn.Sequential(one(), one(math.inf, 1)))
    assert "the loss 'loss' is inf in iteration 1; the parameter 'model.1.weight' is not finite already" in found


@pytest.mark.parametrize(
    ("model", "place"),
    [
        (
            lambda: nn.Sequential(one(), Root()),
            "the gradient of the input of 'model.1' (Root), with 2 inf of 2 numbers",
        ),
        (
            lambda: nn.Sequential(one(), nn.Sequential(nn.Identity(), Root()), nn.Identity()),
            "the gradient of the input of 'model.1.1' (Root), with 2 inf of 2 numbers",
        ),
    ],
)
def test_the_module_whose_backward_is_first_not_finite_is_named(model: Callable[[], nn.Module], place: str) -> None:
    found = finding(model, third=0.0, lr=1e-9)
    assert "phase.p: the loss is finite, but a gradient is not in iteration 3; first not finite: " in found
    assert place in found


class Rows(nn.Module):
    """The square roots of rows of a table with sparse gradients, of which row 0 is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.EmbeddingBag.from_pretrained(torch.tensor([[0.0], [1.0]]), freeze=False, sparse=True)

    def forward(self, x: Tensor) -> Any:
        return self.rows((x > 0).long()).sqrt()


def test_a_sparse_gradient_is_looked_at() -> None:
    found = finding(Rows)
    assert "the loss is finite, but a gradient is not in iteration 3; first not finite: the gradient of" in found


def test_a_gradient_that_comes_from_the_loss_is_that_of_an_output() -> None:
    def loss(predictions: Tensor, target: Tensor) -> Tensor:
        return predictions.abs().sqrt().mean()

    found = finding(lambda: nn.Sequential(one()), third=0.0, loss=loss, lr=1e-9)
    assert "first not finite: the gradient of the output of 'model' (Sequential), with 2" in found


def test_the_repeat_has_the_same_dropout() -> None:
    class Dropped(nn.Module):
        """Not finite only where dropout has left exactly one of its inputs."""

        def __init__(self) -> None:
            super().__init__()
            self.drop, self.one = nn.Dropout(0.5), one()

        def forward(self, x: Tensor) -> Any:
            left = (self.drop(x) != 0).sum()
            return self.one(torch.where(left == 1, math.nan, x))

    assert "first not finite: the input of 'model.one' (Linear), with 6 nan" in finding(Dropped, runner={"epochs": 50})


class Counting(Brain):
    """Draws, counts and keeps statistics in its forward, and is not finite in its third batch."""

    def __init__(self) -> None:
        net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 1))
        super().__init__({"net": net, "scale": one()})
        # Many, since copies of one must not come to be those of another; and one that cannot be copied.
        vars(self).update({f"calls_{index}": [0] for index in range(100)})
        self.lock = threading.Lock()

    def compute_forward(self, batch: Any, stage: Stage) -> Tensor:
        for calls in self.calls():
            calls[0] += 1
        self.log("drawn", torch.rand(()))
        return observe("net", self.modules.net(batch[0])) * self.modules.scale(batch[0]).sqrt()

    def compute_objectives(self, predictions: Tensor, batch: Any, stage: Stage) -> Tensor:
        return mse(predictions, batch[1]) * (1 + 0.001 * sum(calls[0] for calls in self.calls()))

    def calls(self) -> list[list[int]]:
        return [calls for name, calls in vars(self).items() if name.startswith("calls_")]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("third", [-1.0, 0.0])
def test_with_warn_the_run_goes_on_as_without_it_bit_for_bit(third: float, log_lines: list[str]) -> None:
    options = {"loss": None, "third": third, "runner": {"check_gradients": True, "save_interval": 1}}
    runs = [GeneralTrainer(config(Counting, own, **options)).run() for own in (None, {"action": "warn"})]
    # In both epochs the same place: it is logged once.
    assert sum("nan_guard: phase.p: the loss" in line for line in log_lines) == 1
    folders = [context["run_dir"] / "t" for context in runs]
    texts = [(folder / "metrics.jsonl").read_text(encoding="utf-8") for folder in folders]
    assert texts[0] == texts[1]
    saved = [sorted(folder.glob("checkpoints/step-*")) for folder in folders]
    assert saved[0]
    for pair in zip(*saved, strict=True):
        places = [found.place for found in checkpoint_differences(*map(read_checkpoint, pair))]
        # The length of timing.jsonl depends on the clock.
        assert [place for place in places if not place.endswith("metric_log.timing")] == []


def test_what_a_brain_computes_itself_is_told() -> None:
    assert "first not finite: what compute_forward returns, with 2 nan of 2 numbers" in finding(Counting, loss=None)


def test_a_copy_of_a_brain_shares_its_weights_and_what_cannot_be_copied() -> None:
    # A run shows this only by chance: it depends on where objects lie in memory.
    brain = Counting()
    own: Any = copy_of(brain)
    assert not any(map(operator.is_, own.calls(), brain.calls()))
    assert all(map(operator.is_, own.modules.parameters(), brain.modules.parameters()))
    assert own.lock is brain.lock


def test_it_looks_at_as_many_batches_as_it_says() -> None:
    model = lambda: nn.Sequential(Log(), one(0.1))  # noqa: E731
    assert "iteration 3; " in finding(model)
    # Of the iterations 1, 4 and 7 the seventh is not finite again.
    with pytest.raises(DivergedError, match=r"is nan in iteration 7; first not finite: the output of 'model\.0'"):
        GeneralTrainer(config(model, {"every": 3})).run()
    GeneralTrainer(config(model, {"every": 5})).run()


def test_gradients_are_left_alone_on_request() -> None:
    model = config(
        lambda: nn.Sequential(one(), Root()), {"gradients": False}, third=0.0, lr=1e-9, runner={"max_steps": 3}
    )
    GeneralTrainer(model).run()


class Own(stages.Runner):
    """Trains on a loss that the Brain does not compute."""

    def train_batch(self, context: Context, phase: Any, batch: Any) -> Any:
        loss = phase.model(batch[0]).mean().log()
        phase.optim_schedulers["main"].step(loss)
        return loss


def test_a_loss_that_the_brain_does_not_compute_is_told() -> None:
    found = finding(one, runner={"runner_class_path": Own})
    assert (
        "is nan in iteration 3; computed again by compute_forward and compute_objectives alone, all is finite" in found
    )


class Loop(RunnerBase):
    """A loop of one's own, with one pass in the batches of another."""

    def run(self, context: Context) -> None:
        fit = {name: phase.brain.fit_batch for name, phase in context["model"].items()}
        for batch in context.batches("p"):
            for other in context.batches("q", count=1, repeat=True):
                fit["q"](other)
            fit["p"](batch)


def test_the_phase_is_named_in_a_loop_of_ones_own() -> None:
    chosen = config(lambda: nn.Sequential(Log(), one(0.1)), {}, runner={"runner_class_path": Loop})
    chosen["phase"].append({**chosen["phase"][0], "name": "q", "model": one})
    with pytest.raises(DivergedError, match=r"phase\.p: the loss 'loss' is nan .* the output of 'model.0' \(Log\)"):
        GeneralTrainer(chosen).run()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"action": "stop"}, "action is 'stop'; write raise or warn"), ({"every": 0}, "every is 0; write 1 or more")],
)
def test_an_argument_out_of_range_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"nan_guard: {message}"):
        NanGuard(**arguments)
