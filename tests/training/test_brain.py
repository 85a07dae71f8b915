"""What is computed for a batch."""

from __future__ import annotations

import math
from collections import UserDict
from collections.abc import Callable
from typing import Any

import pluggy
import pytest
import torch
from torch import Tensor, nn

from pipeline import Brain, Context, GeneralTrainer, Stage, hookspecs
from pipeline.brain.module_brain import ModuleBrain
from pipeline.compute.trainable import trainable_of
from pipeline.data.batch import split
from pipeline.errors import ConfigError, DataError, DivergedError, ExitCode, StageError
from pipeline.optim.losses import losses_by_name
from pipeline.optim.schedules import Constant
from tests.training.conftest import in_turn

X, Y = torch.linspace(-1, 1, 8).view(4, 2), torch.linspace(0, 1, 4).view(4, 1)


class Returning(Brain):
    """Its objectives are what it is given, times its only parameter where that is possible."""

    def __init__(self, value: Any = 1.0) -> None:
        super().__init__({"net": nn.Linear(1, 1, bias=False)})
        self.value = value

    def compute_forward(self, batch: Any, stage: Stage) -> Any:
        return self.modules.net.weight.sum()

    def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> Any:
        return self.value(predictions, batch) if callable(self.value) else self.value


def bound(brain: Brain, *, patience: int = 3, plugins: tuple[type, ...] = ()) -> Brain:
    """A Brain that trains phase 'line' with SGD, as the network stage makes it."""
    manager = pluggy.PluginManager("pipeline")
    manager.add_hookspecs(hookspecs)
    for plugin in plugins:
        manager.register(plugin())
    context = Context(train_state={"iteration": 0, "update": 0, "epoch": 0, "samples": 0}, hooks=manager.hook)
    brain.bind("line", {"main": Constant("SGD", {"lr": 0.1}, brain.modules, grad_clip=None)}, context, patience)
    return brain


def test_a_brain_says_which_method_is_to_be_defined() -> None:
    class Mine(Brain):
        pass

    with pytest.raises(NotImplementedError, match=r"Mine does not define compute_forward\(batch, stage\)"):
        Mine().compute_forward(None, Stage.TRAIN)
    with pytest.raises(NotImplementedError, match=r"Mine does not define compute_objectives\(predictions, batch"):
        Mine().compute_objectives(None, None, Stage.TRAIN)


def test_an_error_at_the_beginning_of_a_pass_names_its_phase_once(config: Callable[[], dict[str, Any]]) -> None:
    class Failing(Returning):
        def on_stage_start(self, stage: Stage, epoch: int | None = None) -> None:
            raise ZeroDivisionError

    chosen = config()
    chosen["phase"] = [{"name": "line", "model": Failing, "dataset_name": "data"}]
    with pytest.raises(ZeroDivisionError) as caught:
        GeneralTrainer(chosen).run()
    assert caught.value.__notes__.count("phase.line") == 1


def test_a_training_step_is_forward_loss_backward_and_step() -> None:
    torch.manual_seed(0)
    brain = bound(ModuleBrain(nn.Linear(2, 1), nn.functional.mse_loss))
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    expected = nn.functional.mse_loss(model(X), Y)
    expected.backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    loss = brain.fit_batch((X, Y))
    assert torch.equal(loss, expected)
    assert not loss.requires_grad
    assert torch.equal(brain.modules.model.weight, model.weight)


def test_an_evaluation_step_returns_predictions_and_losses_and_trains_nothing() -> None:
    brain = bound(ModuleBrain(nn.Linear(2, 1), nn.functional.mse_loss))
    before = brain.modules.model.weight.detach().clone()
    predictions, losses = trainable_of(brain).predictions_and_losses((X, Y), Stage.VALID)
    assert torch.equal(predictions, brain.modules.model(X))
    assert torch.equal(losses["loss"], nn.functional.mse_loss(predictions, Y))
    assert torch.equal(brain.evaluate_batch((X, Y), Stage.VALID), losses["loss"])
    assert torch.equal(brain.modules.model.weight, before)


def test_a_brain_is_told_in_which_pass_it_is() -> None:
    seen: list[Stage] = []

    class Telling(Returning):
        def compute_forward(self, batch: Any, stage: Stage) -> Any:
            seen.append(stage)
            return super().compute_forward(batch, stage)

    brain = bound(Telling(lambda weight, batch: weight))
    brain.fit_batch(X)
    brain.evaluate_batch(X, Stage.VALID)
    brain.evaluate_batch(X, Stage.TEST)
    assert seen == [Stage.TRAIN, Stage.VALID, Stage.TEST]


class Two(nn.Module):
    """Takes two inputs by name, the second one not always."""

    def forward(self, left: Tensor, right: Tensor | None = None) -> Tensor:
        return left * 10 + (0 if right is None else right)


class KeywordOnly(nn.Module):
    def forward(self, *, left: Tensor) -> Tensor:
        return left * 10


class Everything(nn.Module):
    def forward(self, **inputs: Tensor) -> Tensor:
        return torch.stack([inputs[name] for name in sorted(inputs)])


ONE, FIVE, TARGET = torch.tensor([1.0]), torch.tensor([5.0]), torch.tensor([0.0])


@in_turn(
    ("module", "batch", "expected"),
    [
        (Two(), (ONE, TARGET), [10.0]),
        (Two(), [ONE, TARGET], [10.0]),
        (Two(), ((ONE, FIVE), TARGET), [15.0]),
        (Two(), ([ONE, FIVE], TARGET), [15.0]),
        (Two(), ({"right": FIVE, "left": ONE}, TARGET), [15.0]),
        (Two(), {"right": FIVE, "left": ONE, "target": TARGET}, [15.0]),
        (Two(), {"left": ONE, "label": TARGET, "row": FIVE}, [10.0]),
        (Two(), {"left": ONE, "labels": TARGET}, [10.0]),
        (Two(), UserDict(left=ONE, labels=TARGET), [10.0]),
        (KeywordOnly(), {"left": ONE, "row": FIVE, "target": TARGET}, [10.0]),
        (Everything(), {"a": ONE, "b": FIVE, "target": TARGET}, [[1.0], [5.0]]),
        (nn.Identity(), {"input": FIVE, "target": TARGET}, [5.0]),
    ],
)
def test_a_plain_module_gets_its_inputs_by_position_or_by_name(module: nn.Module, batch: Any, expected: Any) -> None:
    brain = ModuleBrain(module, lambda predictions, target: (predictions - target).mean())
    predictions = brain.compute_forward(batch, Stage.TRAIN)
    assert predictions.tolist() == expected
    assert brain.compute_objectives(predictions, batch, Stage.TRAIN).item() == torch.tensor(expected).mean()
    assert brain.target(batch) is TARGET


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (X, r"a batch is a tensor of shape \(4, 2\), not \(inputs, target\).*return a pair from the dataset"),
        ((X, X, Y), r"a batch is a tuple of 3, not \(inputs, target\).*return a pair"),
        ([X], r"a batch is a list of 1, not \(inputs, target\).*or write a Brain"),
        ("text", r"a batch is a str, not \(inputs, target\)"),
        (
            {"x": X, "y": Y},
            "a batch with the keys x, y has none of 'target', 'label', 'labels'; name one so, or write a Brain",
        ),
        (
            {"right": X, "label": Y},
            r"the keys right, label has no 'left', which Two.forward\(left: .*\) .* takes; name one so",
        ),
    ],
)
def test_a_batch_that_a_plain_module_cannot_take_is_refused_with_what_to_do(batch: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        ModuleBrain(Two(), nn.functional.mse_loss).compute_forward(batch, Stage.TRAIN)


def test_a_mapping_is_split_into_inputs_and_target_and_left_as_it_was() -> None:
    batch = {"x": X, "target": Y}
    assert split(batch) == ({"x": X}, Y)
    assert list(batch) == ["x", "target"]


@in_turn(
    ("batch", "count"),
    [
        (X, 4),
        ((X, Y[:2]), 4),
        ({"names": ["a", "b"], "x": X}, 4),
        ([["a"], {"deep": (None, Y[:3])}], 3),
        ({"epoch": torch.tensor(7), "x": X}, 4),
        (UserDict(x=X, labels=Y), 4),
        (["a", "b"], 0),
        (None, 0),
    ],
)
def test_a_batch_has_as_many_samples_as_its_first_tensor_is_long(batch: Any, count: int) -> None:
    assert Brain().count_samples(batch) == count


def test_a_batch_without_a_tensor_is_refused_and_not_counted_as_nothing() -> None:
    with pytest.raises(DataError, match="a list of 2 with no tensor to count samples by; define count_samples"):
        bound(Returning(lambda weight, batch: weight)).fit_batch(["a", "b"])


def test_a_brain_may_count_the_samples_itself() -> None:
    class Graphs(Returning):
        def count_samples(self, batch: Any) -> int:
            return len(batch)

    brain = bound(Graphs(lambda weight, batch: weight * 0 + len(batch)))
    brain.fit_batch(["a", "b"])
    brain.fit_batch(["a", "b", "c", "d"])
    assert trainable_of(brain).numbers.loss.mean() == pytest.approx((2 * 2 + 4 * 4) / 6)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "compute_objectives returned None; return a scalar tensor, or a dict of them"),
        (1.5, "compute_objectives returned a float; return a scalar tensor"),
        ({}, "compute_objectives returned a dict of 0; return a scalar tensor"),
        ({"loss": 1.5}, "compute_objectives returned a dict of 1; return a scalar tensor"),
        ((torch.tensor(1.0), 2), "compute_objectives returned a tuple of 2; return a scalar tensor"),
        (torch.zeros(4), r"compute_objectives: the loss 'loss' has shape \(4,\); return a scalar, e.g. mean\(\)"),
        ({"loss": torch.zeros(4, 1)}, r"compute_objectives: the loss 'loss' has shape \(4, 1\); return a scalar"),
    ],
)
def test_objectives_that_cannot_be_trained_on_are_refused_with_the_phase(returned: Any, message: str) -> None:
    with pytest.raises(DataError, match=f"phase.line: {message}"):
        bound(Returning(returned)).fit_batch(X)


def losses_of(values: list[float]) -> Callable[[Tensor, Any], Tensor]:
    """Objectives whose value is the next of a list, with a gradient."""
    left = iter(values)
    return lambda weight, batch: weight * 0 + weight / weight.detach() * next(left)


def test_losses_that_are_not_finite_change_neither_the_weights_nor_the_mean() -> None:
    brain = bound(Returning(losses_of([2.0, math.nan, math.inf, 4.0])))
    weights, returned = [], []
    for _ in range(4):
        returned.append(brain.fit_batch(X).item())
        weights.append(brain.modules.net.weight.item())
    assert weights[0] == weights[1] == weights[2] != weights[3]
    assert returned[2] == math.inf
    assert trainable_of(brain).numbers.loss.mean() == pytest.approx(3.0)


def test_more_losses_that_are_not_finite_than_patience_allows_end_the_training() -> None:
    brain = bound(Returning(losses_of([math.nan, 1.0, math.nan, -math.inf])), patience=2)
    for iteration in range(3):
        trainable_of(brain).counters["iteration"] = iteration
        brain.fit_batch(X)
    trainable_of(brain).counters["iteration"] = 3
    message = (
        "phase.line: 'loss' is nan: 3 of its .* in this epoch were not finite, the first in iteration 1; lower the"
    )
    with pytest.raises(DivergedError, match=message) as caught:
        brain.fit_batch(X)
    assert caught.value.exit_code == ExitCode.DIVERGED == 5


class Forgetful(Brain):
    """Its constructor does not call the one above it."""

    def __init__(self) -> None:
        self.net = nn.Linear(1, 1)


@pytest.mark.parametrize(
    "use",
    [
        lambda brain: brain.fit(range(1), [(X, Y)]),
        lambda brain: brain.evaluate([(X, Y)]),
        lambda brain: brain.fit_batch((X, Y)),
        lambda brain: brain.evaluate_batch((X, Y), Stage.VALID),
        lambda brain: brain.bind("line", {}),
        lambda brain: brain.modules.net,
    ],
)
def test_a_brain_whose_constructor_does_not_call_the_one_above_it_says_so(use: Callable[[Brain], object]) -> None:
    message = r"Forgetful.__init__ has not called super\(\).__init__\(\); call it first, with the modules: super\(\)"
    with pytest.raises(ConfigError, match=message):
        use(Forgetful())
    assert not hasattr(Forgetful(), "optimizer")


def test_it_says_so_in_a_run_too(config: Callable[..., dict[str, Any]]) -> None:
    phase = {"name": "line", "model": lambda: Forgetful(), "dataset_name": "data"}  # noqa: PLW0108 - no source to check
    with pytest.raises(ConfigError, match=r"Forgetful.__init__ has not called super\(\).__init__\(\)"):
        GeneralTrainer({**config(), "phase": [phase]}).run()


def test_what_a_brain_does_not_have_is_told_as_python_tells_it() -> None:
    with pytest.raises(AttributeError, match="'ModuleBrain' object has no attribute 'optimiser'"):
        getattr(ModuleBrain(nn.Linear(1, 1), nn.functional.mse_loss), "optimiser")  # noqa: B009 - mypy knows it too


def test_a_new_pass_starts_the_count_again() -> None:
    brain = bound(Returning(losses_of([math.nan, math.nan, 1.0, math.nan])), patience=2)
    for _ in range(2):
        brain.fit_batch(X)
    trainable_of(brain).begin_pass()
    for _ in range(2):
        brain.fit_batch(X)
    trainable_of(brain).check_divergence()
    assert trainable_of(brain).numbers.loss.nonfinite == 1


def test_without_patience_the_first_loss_that_is_not_finite_ends_the_training() -> None:
    with pytest.raises(DivergedError, match=r"'loss' is nan: 1 of .* the first in iteration 1;"):
        bound(Returning(losses_of([math.nan])), patience=0).fit_batch(X)


def test_a_brain_that_nothing_trains_says_so() -> None:
    brain = ModuleBrain(nn.Linear(2, 1), nn.functional.mse_loss)
    with pytest.raises(
        StageError, match=r"no OptimScheduler trains it; give it opt_class and call fit, or call bind\("
    ):
        brain.fit_batch(X)


ONE_BATCH, TWO = torch.tensor(1.0), torch.tensor(2.0)


def test_a_tensor_alone_is_the_loss_and_several_keep_their_names() -> None:
    assert losses_by_name(ONE_BATCH, "here") == {"loss": ONE_BATCH}
    assert losses_by_name({"a": ONE_BATCH, "b": TWO}, "here") == {"a": ONE_BATCH, "b": TWO}


@pytest.mark.parametrize("several", [False, True])
def test_a_loss_of_shape_1_is_a_scalar_in_training_and_in_evaluation(several: bool) -> None:
    class Mine(Brain):
        def compute_forward(self, batch: Any, stage: Stage) -> Tensor:
            output: Tensor = self.modules.net(batch[0])
            return output

        def compute_objectives(self, predictions: Tensor, batch: Any, stage: Stage) -> Any:
            loss = nn.functional.mse_loss(predictions, batch[1]).view(1)
            return {"loss": loss, "double": loss * 2} if several else loss

    torch.manual_seed(0)
    net = nn.Linear(2, 1)
    expected = nn.functional.mse_loss(net(X), Y)
    (gradient,) = torch.autograd.grad(expected, [net.weight])
    weight = net.weight.detach() - 0.1 * gradient
    brain = Mine({"net": net})
    brain.bind("mine", {"main": Constant("SGD", {"lr": 0.1}, net, grad_clip=None)})
    evaluated = brain.evaluate_batch((X, Y), Stage.VALID)
    trained = brain.fit_batch((X, Y))
    assert evaluated.shape == trained.shape == ()
    assert evaluated == trained == expected
    torch.testing.assert_close(net.weight.detach(), weight)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (
            None,
            "Mine.update returned None; return a scalar tensor, or a dict of them with the names that the Optim",
        ),
        (1.5, "Mine.update returned a float; return a scalar tensor"),
        ((ONE_BATCH, TWO), "Mine.update returned a tuple of 2; return a scalar tensor"),
        ({}, "Mine.update returned a dict of 0; return a scalar tensor"),
        ({"a": ONE_BATCH, "b": 2.0}, "Mine.update returned a dict of 2; return a scalar tensor"),
        (torch.ones(3), r"Mine.update: the loss 'loss' has shape \(3,\); return a scalar, e.g. mean\(\)"),
        ({"a": ONE_BATCH, "b": torch.ones(1, 1)}, r"Mine.update: the loss 'b' has shape \(1, 1\); return a scalar"),
    ],
)
def test_anything_else_is_refused_with_the_method_that_returned_it(returned: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        losses_by_name(returned, "Mine.update")
