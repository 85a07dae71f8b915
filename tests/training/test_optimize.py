"""Losses -> gradients -> parameters."""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from pipeline import Brain, Stage, optimize
from pipeline.compute.trainable import trainable_of
from pipeline.context import Context
from pipeline.errors import ConfigError, DataError, DivergedError, ExitCode
from pipeline.optim.optim_scheduler import OptimScheduler
from pipeline.optim.schedules import Constant
from pipeline.optim.stepping import close_windows
from tests.training.conftest import in_turn


def parts() -> tuple[nn.Linear, nn.Linear]:
    torch.manual_seed(0)
    return nn.Linear(3, 2), nn.Linear(2, 1)


def loss_of(first: nn.Module, second: nn.Module) -> Tensor:
    loss: Tensor = second(first(torch.linspace(-1, 1, 12).view(4, 3)).relu()).square().mean()
    return loss


def test_several_optimizers_each_step_their_own_parameters_from_one_backward() -> None:
    ours, theirs = parts(), parts()
    schedulers = [
        Constant("SGD", {"lr": 0.1}, ours[0], grad_clip=None),
        Constant("Adam", {"lr": 0.01}, ours[1], grad_clip=None),
    ]
    optimizers = [torch.optim.SGD(theirs[0].parameters(), 0.1), torch.optim.Adam(theirs[1].parameters(), 0.01)]
    for _ in range(3):
        assert optimize({"loss": loss_of(*ours)}, schedulers, epoch=0) == (True, True)
        loss_of(*theirs).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for own, other in zip(ours, theirs, strict=True):
        assert torch.equal(own.weight, other.weight)
        assert torch.equal(own.bias, other.bias)


def test_only_the_loss_named_loss_is_trained_on() -> None:
    ours, theirs = parts(), parts()
    loss = loss_of(*ours)
    optimize(
        {"regularizer": loss * 100, "loss": loss}, [Constant("SGD", {"lr": 0.1}, ours[1], grad_clip=None)], epoch=0
    )
    loss_of(*theirs).backward()
    torch.optim.SGD(theirs[1].parameters(), 0.1).step()
    assert torch.equal(ours[1].weight, theirs[1].weight)


@pytest.mark.parametrize("factor", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_changes_nothing(factor: float) -> None:
    model = parts()[0]
    before = model.weight.detach().clone()
    scheduler = Constant("Adam", {"lr": 0.1}, model)
    done = optimize({"loss": model(torch.ones(1, 3)).square().sum() * factor}, [scheduler], epoch=0)
    assert done == (False, True)
    assert torch.equal(model.weight, before)
    assert model.weight.grad is None
    assert not scheduler.optimizer.state
    assert scheduler.real_step == 1


def batches(sizes: list[int]) -> list[tuple[Tensor, Tensor]]:
    """Batches of these sizes, in double precision."""
    random = torch.Generator().manual_seed(1)
    return [(torch.randn(size, 3, generator=random, dtype=torch.double), torch.randn(size, 1, dtype=torch.double, generator=random))
            for size in sizes]  # fmt: skip


def line() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 1, dtype=torch.double)


def mse(model: nn.Module, inputs: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(inputs), target)


WINDOWS = [
    (1, [4, 4, 4], [[0], [1], [2]]),
    (2, [4, 4, 4, 4], [[0, 1], [2, 3]]),
    (2, [4, 4, 3], [[0, 1], [2]]),
    (4, [4, 4, 4, 4, 4, 2], [[0, 1, 2, 3], [4, 5]]),
    (4, [5, 1, 2], [[0, 1, 2]]),
]


@in_turn("clip", [None, 0.05])
@in_turn(("accum", "sizes", "windows"), WINDOWS)
def test_an_accumulated_window_is_one_large_batch(
    accum: int, sizes: list[int], windows: list[list[int]], clip: float | None
) -> None:
    data, ours, theirs = batches(sizes), line(), line()
    scheduler = Constant("SGD", {"lr": 0.1, "momentum": 0.9}, ours, accum_grad=accum, grad_clip=clip)
    optimizer = torch.optim.SGD(theirs.parameters(), 0.1, momentum=0.9)
    for number, (inputs, target) in enumerate(data, 1):
        optimize({"loss": mse(ours, inputs, target)}, [scheduler], 0, len(inputs), last=number == len(data))
    for window in windows:
        optimizer.zero_grad()
        mse(theirs, *(torch.cat([data[index][part] for index in window]) for part in (0, 1))).backward()
        if clip:
            nn.utils.clip_grad_norm_(theirs.parameters(), clip)
        optimizer.step()
    assert scheduler.real_step == len(windows)
    torch.testing.assert_close(ours.weight, theirs.weight, rtol=1e-6, atol=0)


def test_a_pass_without_a_known_end_is_closed_afterwards() -> None:
    ours, theirs = line(), line()
    scheduler = Constant("SGD", {"lr": 0.1}, ours, accum_grad=4, grad_clip=None)
    ((inputs, target),) = batches([3])
    assert optimize({"loss": mse(ours, inputs, target)}, [scheduler], 0, 3) == (True, False)
    assert close_windows([scheduler], 0) is True
    assert close_windows([scheduler], 0) is False
    mse(theirs, inputs, target).backward()
    torch.optim.SGD(theirs.parameters(), 0.1).step()
    torch.testing.assert_close(ours.weight, theirs.weight, rtol=1e-6, atol=0)


def test_a_loss_that_is_not_finite_discards_its_whole_window() -> None:
    model, data = line(), batches([4, 4, 4, 4])
    before = model.weight.detach().clone()
    scheduler = Constant("SGD", {"lr": 0.1}, model, accum_grad=2, grad_clip=None)
    for index, (inputs, target) in enumerate(data[:2]):
        optimize({"loss": mse(model, inputs, target) * (math.nan if index else 1)}, [scheduler], 0, 4)
    assert torch.equal(model.weight, before)
    for inputs, target in data[2:]:
        optimize({"loss": mse(model, inputs, target)}, [scheduler], 0, 4)
    other = line()
    mse(other, *(torch.cat([each[part] for each in data[2:]]) for part in (0, 1))).backward()
    torch.optim.SGD(other.parameters(), 0.1).step()
    torch.testing.assert_close(model.weight, other.weight, rtol=1e-6, atol=0)


@pytest.mark.parametrize("accum", [1, 2])
def test_two_losses_of_one_graph_reach_each_scheduler_alone(accum: int) -> None:
    (first, second), (one, two) = parts(), parts()
    schedulers = [Constant("SGD", {"lr": 0.1}, first, optim_loss="a", accum_grad=accum, grad_clip=None),
                  Constant("SGD", {"lr": 0.2}, second, optim_loss="b", accum_grad=accum, grad_clip=None)]  # fmt: skip
    for _ in range(accum):
        loss = loss_of(first, second)
        losses = {"a": loss * 2, "b": loss.square()}
        kept = {name: each.item() for name, each in losses.items()}
        optimize(losses, schedulers, 0, 4)
        assert kept == {name: each.item() for name, each in losses.items()}
    loss = loss_of(one, two)
    for parameters, objective, rate in ((one.parameters(), loss * 2, 0.1), (two.parameters(), loss.square(), 0.2)):
        own = list(parameters)
        gradients = torch.autograd.grad(objective, own, retain_graph=True)
        with torch.no_grad():
            for parameter, gradient in zip(own, gradients, strict=True):
                parameter.sub_(rate * gradient)
    torch.testing.assert_close([*first.parameters(), *second.parameters()], [*one.parameters(), *two.parameters()])


def test_a_gradient_that_is_not_finite_is_discarded_where_the_norm_is_at_hand() -> None:
    for settings in ({"grad_clip": 1.0}, {"grad_clip": None}):
        model = line()
        before = model.weight.detach().clone()
        scheduler = Constant("SGD", {"lr": 0.1}, model, **settings)
        scheduler.check_gradients = True
        # The root's slope at nought is infinite.
        optimize({"loss": (model.weight * 0).sum().sqrt()}, [scheduler], 0)
        assert torch.equal(model.weight, before)


WRONG = [
    ({"lss": torch.ones(())}, "there is no loss 'loss', which an OptimScheduler descends; did you mean 'lss'?"),
    (
        {"loss": torch.ones(())},
        "the loss 'loss' has no gradient; compute it from the model's output, outside of torch.no_grad()",
    ),
]


@pytest.mark.parametrize(("losses", "message"), WRONG)
def test_a_loss_that_cannot_be_descended_is_refused(losses: dict[str, Tensor], message: str) -> None:
    with pytest.raises(DataError) as caught:
        optimize(losses, [Constant("SGD", {"lr": 0.1}, line())], 0)
    assert str(caught.value) == message


def equal(ours: nn.Module, theirs: nn.Module) -> bool:
    """Bit for bit."""
    return all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


# Accumulation in whole runs.


class Line(Brain):
    """A line of double precision, with the loss of the batches that it saw."""

    def compute_forward(self, batch: Any, stage: Stage) -> Tensor:
        predictions: Tensor = self.modules.line(batch[0])
        return predictions

    def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> Tensor:
        return nn.functional.mse_loss(predictions, batch[1])


def samples(count: int) -> TensorDataset:
    ((inputs, target),) = batches([count])
    return TensorDataset(inputs, target)


def in_run(run: Any, config: Any, count: int, accum: int, size: int, epochs: int) -> tuple[nn.Module, int]:
    """The model, and how many updates there were."""
    chosen = config(accum_grad=accum, epochs=epochs)
    chosen["dataset"][0] |= {"class_path": lambda: samples(count), "batch_size": size}
    chosen["hyper_parameters"]["optimizer"] = {"class": "SGD", "lr": 0.1, "momentum": 0.9}
    chosen["phase"][0]["model"] = line
    context: Context = run(chosen)
    return context["model"]["line"]["model"], context["train_state"]["update"]


def in_fit(run: Any, config: Any, count: int, accum: int, size: int, epochs: int) -> tuple[nn.Module, int]:
    """The same without a config."""
    options = {"grad_accumulation_factor": accum, "max_grad_norm": None, "device": "cpu"}
    brain = Line({"line": line()}, lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9), run_opts=options)
    brain.fit(range(epochs), samples(count), progressbar=False, train_loader_kwargs={"batch_size": size})
    return brain.modules.line, trainable_of(brain).counters["update"]


RUNS = [
    # samples, factor, batch size, epochs -> updates
    (16, 2, 4, 2, 4),
    (10, 2, 4, 3, 6),
    (10, 4, 4, 5, 5),
    (11, 3, 2, 2, 4),
    (7, 3, 3, 2, 2),
]


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("train", [in_run, in_fit])
@pytest.mark.parametrize(("count", "accum", "size", "epochs", "updates"), RUNS)
def test_a_run_that_accumulates_is_one_of_larger_batches_and_closes_each_pass(
    run: Any, config: Any, train: Any, count: int, accum: int, size: int, epochs: int, updates: int
) -> None:
    ours, done = train(run, config, count, accum, size, epochs)
    theirs = line()
    optimizer, (inputs, target) = torch.optim.SGD(theirs.parameters(), 0.1, momentum=0.9), samples(count).tensors
    for _ in range(epochs):
        for x, y in zip(inputs.split(size * accum), target.split(size * accum), strict=True):
            optimizer.zero_grad()
            mse(theirs, x, y).backward()
            optimizer.step()
    torch.testing.assert_close([*ours.parameters()], [*theirs.parameters()], rtol=1e-6, atol=0)
    assert done == updates


def two_passes(first: Brain, second: Brain, accum: int) -> None:
    """A pass of one Brain, then one of the other, of 3 batches each, then again."""
    data = batches([4, 4, 4])
    for brain in (first, second):
        scheduler = Constant("SGD", {"lr": 0.1}, brain.modules, accum_grad=accum, grad_clip=None)
        brain.bind("", {"main": scheduler})
    for brain in (first, second, first, second):
        trainable_of(brain).begin_pass()
        for batch in data:
            brain.fit_batch(batch)
        close_windows(trainable_of(brain).schedulers, 0)


def test_nothing_leaks_between_two_phases_that_share_a_module() -> None:
    shared, theirs = line(), line()
    two_passes(Line({"line": shared}), Line({"line": shared}), accum=2)
    data = batches([4, 4, 4])
    for _ in range(4):
        for window in (data[:2], data[2:]):
            theirs.zero_grad()
            mse(theirs, *(torch.cat([each[part] for each in window]) for part in (0, 1))).backward()
            with torch.no_grad():
                for each in theirs.parameters():
                    each.sub_(0.1 * each.grad)
    torch.testing.assert_close(shared.weight, theirs.weight, rtol=1e-6, atol=0)


def test_nothing_leaks_into_a_part_that_the_second_phase_does_not_train(run: Any, config: Any) -> None:
    first, second = parts()
    other = Line({"line": nn.Sequential(first, second)})
    scheduler = Constant("SGD", {"lr": 0.1}, other.modules, updated_modules="line.1", accum_grad=2)
    other.bind("", {"main": scheduler})
    trainable_of(other).begin_pass()
    other.fit_batch((torch.ones(2, 3), torch.ones(2, 1)))
    assert first.weight.grad is None
    assert second.weight.grad is not None
    close_windows(trainable_of(other).schedulers, 0)
    assert second.weight.grad is None


def test_a_phase_that_trains_the_model_of_another_goes_on_with_its_optimizer(run: Any, config: Any) -> None:
    chosen = config(accum_grad=2, epochs=2)
    chosen["dataset"][0] |= {"class_path": lambda: samples(10), "batch_size": 4}
    chosen["dataset"].append({"name": "more", "class_path": lambda: samples(7), "batch_size": 3})
    chosen["hyper_parameters"]["optimizer"] = {"class": "SGD", "lr": 0.1, "momentum": 0.9}
    chosen["phase"][0]["model"] = line
    chosen["phase"].append({"name": "again", "model_of": "line", "dataset_name": "more"})
    context: Context = run(chosen)
    theirs = line()
    optimizer = torch.optim.SGD(theirs.parameters(), 0.1, momentum=0.9)
    for count, size in ((10, 8), (7, 6), (10, 8), (7, 6)):
        inputs, target = samples(count).tensors
        for x, y in zip(inputs.split(size), target.split(size), strict=True):
            optimizer.zero_grad()
            mse(theirs, x, y).backward()
            optimizer.step()
    ours = context["model"]["again"]["model"]
    torch.testing.assert_close([*ours.parameters()], [*theirs.parameters()], rtol=1e-6, atol=0)
    assert context["train_state"]["update"] == 8
    assert context["train_state"]["iteration"] == 12


# Several schedulers.


def counted(tensor: Tensor) -> list[int]:
    """Grows by one with each backward through a tensor."""
    calls: list[int] = []
    tensor.register_hook(lambda gradient: calls.append(1))
    return calls


def test_schedulers_that_share_a_loss_share_its_backward() -> None:
    first, second = parts()
    hidden = first(torch.ones(4, 3))
    calls = counted(hidden)
    schedulers = [Constant("SGD", {"lr": 0.1}, each, grad_clip=None) for each in (first, second)]
    optimize({"loss": second(hidden).square().mean()}, schedulers, 0)
    assert len(calls) == 1


def test_schedulers_of_different_losses_have_a_backward_for_each_loss_and_the_last_frees_the_graph() -> None:
    first, second = parts()
    hidden = first(torch.ones(4, 3))
    calls = counted(hidden)
    schedulers = [Constant("SGD", {"lr": 0.1}, part, optim_loss=name) for part, name in ((first, "a"), (second, "b"))]
    scores = second(hidden.tanh())
    optimize({"a": scores.mean(), "b": scores.square().mean()}, schedulers, 0)
    assert len(calls) == 1  # The loss of the second layer need not go through the first.
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        scores.sum().backward()


def test_a_scheduler_that_shared_a_weighted_loss_takes_the_next_one_that_is_its_own_as_it_is() -> None:
    (first, second), theirs = parts(), parts()[0]
    schedulers = [Constant("SGD", {"lr": 0.1}, each, grad_clip=None, accum_grad=accum) for each, accum in ((first, 1), (second, 2))]  # fmt: skip
    optimize({"loss": loss_of(first, second)}, schedulers, 0, samples=4)
    theirs.load_state_dict(first.state_dict())
    schedulers[0].owns_all = True
    optimize({"loss": first(torch.ones(4, 3)).square().mean()}, schedulers[:1], 0, samples=4)
    theirs(torch.ones(4, 3)).square().mean().backward()
    torch.optim.SGD(theirs.parameters(), 0.1).step()
    assert equal(first, theirs)


@pytest.mark.parametrize("names", [(None, None), ("a", "b")])
def test_two_schedulers_of_one_parameter_are_refused(names: tuple[str | None, str | None]) -> None:
    model = nn.Sequential(*parts())
    schedulers = [Constant("SGD", {"lr": 0.1}, model, optim_loss=names[0]),
                  Constant("SGD", {"lr": 0.1}, model, optim_loss=names[1], updated_modules="1")]  # fmt: skip
    loss = model(torch.ones(4, 3)).mean()
    with pytest.raises(
        ConfigError, match=r"two OptimSchedulers train '1\.weight'; confine each .* with updated_modules"
    ):
        optimize({"loss": loss, "a": loss, "b": -loss}, schedulers, 0)


def test_a_loss_that_nobody_acts_on_is_not_computed_backwards() -> None:
    first, second = parts()
    hidden = first(torch.ones(4, 3))
    calls = counted(hidden)
    scheduler = Constant("SGD", {"lr": 0.1}, first, step_per_update=2)
    assert optimize({"loss": second(hidden).mean()}, [scheduler], 0) == (True, False)
    assert calls == []
    assert first.weight.grad is None


def test_of_windows_in_which_it_does_not_act_a_scheduler_learns_nothing() -> None:
    ours, theirs, data = line(), line(), batches([4, 4, 4, 4])
    scheduler = Constant("SGD", {"lr": 0.1}, ours, step_per_update=2, accum_grad=2, grad_clip=None)
    for inputs, target in data:
        optimize({"loss": mse(ours, inputs, target)}, [scheduler], 0, 4)
    mse(theirs, *(torch.cat([each[part] for each in data[2:]]) for part in (0, 1))).backward()
    torch.optim.SGD(theirs.parameters(), 0.1).step()
    torch.testing.assert_close(ours.weight, theirs.weight, rtol=1e-6, atol=0)


def test_the_losses_of_the_caller_are_left_as_they_are() -> None:
    (first, second), accum = parts(), 3
    loss = loss_of(first, second)
    losses = {"loss": loss, "other": loss * 2}
    kept = {name: (each, each.item(), each.grad_fn) for name, each in losses.items()}
    schedulers: list[OptimScheduler] = [
        Constant("SGD", {"lr": 0.1}, first, accum_grad=accum),
        Constant("SGD", {"lr": 0.1}, second, optim_loss="other", accum_grad=accum),
    ]
    optimize(losses, schedulers, 0, samples=4)
    assert {name: (each, each.item(), each.grad_fn) for name, each in losses.items()} == kept


def deep() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 2, dtype=torch.double), nn.Tanh(), nn.Linear(2, 1, dtype=torch.double))


@pytest.mark.parametrize("factors", [(1, 2), (2, 1), (1, 3), (2, 3)])
@pytest.mark.parametrize("clip", [None, 0.01])
def test_schedulers_that_share_a_loss_may_have_windows_of_different_lengths(
    factors: tuple[int, int], clip: float | None
) -> None:
    ours, theirs, data = deep(), deep(), batches([4, 3, 5, 2, 4, 1, 3])
    schedulers = [
        Constant("SGD", {"lr": 0.1}, ours[place], accum_grad=accum, grad_clip=clip)
        for place, accum in zip((0, 2), factors, strict=True)
    ]
    open_windows: list[list[Any]] = [[], []]
    for number, (inputs, target) in enumerate(data, 1):
        optimize({"loss": mse(ours, inputs, target)}, schedulers, 0, len(inputs), last=number == len(data))
        loss = mse(theirs, inputs, target)
        for place, window in zip((0, 2), open_windows, strict=True):
            own = list(theirs[place].parameters())
            window.append((len(inputs), torch.autograd.grad(loss, own, retain_graph=True)))
        for place, window, accum in zip((0, 2), open_windows, factors, strict=True):
            if len(window) == accum or number == len(data):
                step_by_hand(list(theirs[place].parameters()), window, clip)
    torch.testing.assert_close([*ours.parameters()], [*theirs.parameters()], rtol=1e-6, atol=0)


def step_by_hand(own: list[nn.Parameter], window: list[Any], clip: float | None) -> None:
    """A step of 0.1 along the mean over the samples of a window of (samples, gradients), which is then empty."""
    total = sum(count for count, _ in window)
    for index, each in enumerate(own):
        each.grad = sum(count * gradients[index] for count, gradients in window) / total
    if clip:
        nn.utils.clip_grad_norm_(own, clip)
    with torch.no_grad():
        for each in own:
            each.sub_(0.1 * each.grad)
            each.grad = None
    window.clear()


@pytest.mark.parametrize("accum", [1, 2])
def test_adversaries_are_trained_each_on_its_own_loss_through_the_other(accum: int) -> None:
    ours, theirs = deep(), deep()
    schedulers = [
        Constant("SGD", {"lr": 0.1}, ours[0], optim_loss="one", accum_grad=accum, grad_clip=None),
        Constant("SGD", {"lr": 0.2}, ours[2], optim_loss="two", grad_clip=None),
    ]
    window: list[Any] = []
    for inputs, target in batches([4, 4, 2, 2]):
        loss = mse(ours, inputs, target)
        optimize({"one": -loss, "two": loss}, schedulers, 0, len(inputs))
        loss = mse(theirs, inputs, target)
        first, second = list(theirs[0].parameters()), list(theirs[2].parameters())
        window.append((len(inputs), torch.autograd.grad(-loss, first, retain_graph=True)))
        step = torch.autograd.grad(loss, second)
        if len(window) == accum:
            step_by_hand(first, window, None)
        with torch.no_grad():
            for each, gradient in zip(second, step, strict=True):
                each.sub_(0.2 * gradient)
    torch.testing.assert_close([*ours.parameters()], [*theirs.parameters()], rtol=1e-6, atol=0)


# Losses and gradients that are not finite.


def snapshot(scheduler: OptimScheduler) -> Any:
    """Weights and the optimizer's state, copied."""
    return copy.deepcopy((scheduler.parameters, scheduler.optimizer.state_dict()))


def same(one: Any, other: Any) -> bool:
    (weights, state), (others, another) = one, other
    tensors, theirs = ([*each["state"].values()] for each in (state, another))
    pairs = [(a[name], b[name]) for a, b in zip(tensors, theirs, strict=True) for name in a]
    return all(torch.equal(a, b) for a, b in [*zip(weights, others, strict=True), *pairs])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", ["Adam", "SGD"])
def test_a_bad_shared_loss_changes_no_weight_and_no_state_of_any_of_its_schedulers(kind: str, bad: float) -> None:
    first, second = parts()
    conf = {"lr": 0.1, "momentum": 0.9} if kind == "SGD" else {"lr": 0.1}
    schedulers = [Constant(kind, conf, each, grad_clip=None) for each in (first, second)]
    optimize({"loss": loss_of(first, second)}, schedulers, 0)
    before = [snapshot(each) for each in schedulers]
    assert optimize({"loss": loss_of(first, second) * bad}, schedulers, 0) == (False, True)
    assert all(same(snapshot(each), kept) for each, kept in zip(schedulers, before, strict=True))
    assert first.weight.grad is second.weight.grad is None


@pytest.mark.parametrize("bad", ["one", "two"])
def test_of_two_losses_the_bad_one_alone_is_discarded(bad: str) -> None:
    ours, theirs = parts(), parts()
    schedulers = {
        "one": Constant("Adam", {"lr": 0.1}, ours[0], optim_loss="one", grad_clip=None),
        "two": Constant("Adam", {"lr": 0.1}, ours[1], optim_loss="two", grad_clip=None),
    }
    losses = {name: loss_of(*ours) * (math.nan if name == bad else 1) for name in schedulers}
    assert optimize(losses, list(schedulers.values()), 0) == (False, True)
    good = theirs[1 if bad == "one" else 0]
    loss_of(*theirs).backward()
    torch.optim.Adam(good.parameters(), 0.1).step()
    assert equal(ours[0], theirs[0])
    assert equal(ours[1], theirs[1])
    assert not schedulers[bad].optimizer.state


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_bad_loss_anywhere_in_a_shared_window_discards_it_and_only_it(place: int, turned: bool) -> None:
    ours, theirs = parts(), parts()
    schedulers = [Constant("SGD", {"lr": 0.1}, ours[0], accum_grad=3, grad_clip=None),
                  Constant("SGD", {"lr": 0.1}, ours[1], accum_grad=1, grad_clip=None)]  # fmt: skip
    given = schedulers[::-1] if turned else schedulers
    for index in range(3):
        optimize({"loss": loss_of(*ours) * (math.nan if index == place else 1)}, given, 0, samples=4)
        if index != place:
            loss_of(*theirs).backward()
            torch.optim.SGD(theirs[1].parameters(), 0.1).step()
            theirs[1].zero_grad()
    torch.testing.assert_close(ours[1].weight, theirs[1].weight)
    assert torch.equal(ours[0].weight, theirs[0].weight)
    assert schedulers[0].window.batches == 0


def test_without_patience_nobody_looks_at_the_loss() -> None:
    model = line()
    scheduler = Constant("SGD", {"lr": 0.1}, model, grad_clip=None)
    scheduler.guarded = False
    optimize({"loss": model(torch.ones(1, 3, dtype=torch.double)).sum() * math.nan}, [scheduler], 0)
    assert model.weight.isnan().all()


class Root(nn.Module):
    """A root at nought: the loss is finite, its slope is not."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.scale = nn.Linear(3, 1), nn.Linear(1, 1, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        predictions: Tensor = self.head(inputs) + (self.scale.weight * 0).sum().sqrt()
        return predictions


@pytest.mark.parametrize("runner", [{"check_gradients": True}, {"grad_clip": 1.0}])
def test_gradients_that_are_not_finite_end_a_run_with_their_first_parameter(
    run: Any, config: Any, runner: dict[str, Any]
) -> None:
    chosen = config(nonfinite_patience=1, print_interval=1, **runner)
    chosen["phase"][0]["model"] = Root
    with pytest.raises(DivergedError) as caught:
        run(chosen)
    assert caught.value.exit_code == ExitCode.DIVERGED == 5
    message = str(caught.value)
    assert "phase.line: the loss is finite, but 2 of its gradients in this epoch were not finite" in message
    assert "up to iteration 2" in message
    assert "scale.weight'; lower the learning rate" in message


def test_gradients_that_are_not_finite_leave_the_weights_of_a_run_as_they_were(run: Any, config: Any) -> None:
    chosen = config(check_gradients=True, nonfinite_patience=100)
    chosen["phase"][0]["model"] = Root
    context: Context = run(chosen)
    torch.manual_seed(0)
    assert equal(context["model"]["line"]["model"], Root())
    assert context["train_state"]["update"] == context["train_state"]["iteration"] == 6


# Scalers of gradients, which on a GPU come with fp16.


def scaler_of(scale: float) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)


@pytest.mark.parametrize("scale", [2.0**10, 2.0**126])
def test_schedulers_that_share_a_loss_and_a_scaler_are_a_loop_with_one_scaler(scale: float) -> None:
    ours, theirs, scaler, shared = parts(), parts(), scaler_of(scale), scaler_of(scale)
    schedulers = [Constant("SGD", {"lr": 0.01}, ours[0]), Constant("Adam", {"lr": 0.01}, ours[1], grad_clip=None)]
    for each in schedulers:
        each.scaler = shared
    optimizers = [torch.optim.SGD(theirs[0].parameters(), 0.01), torch.optim.Adam(theirs[1].parameters(), 0.01)]
    for factor in (1, 50, 20, 1, 2, 3):
        optimize({"loss": loss_of(*ours) * factor}, schedulers, 0)
        scaler.scale(loss_of(*theirs) * factor).backward()
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(theirs[0].parameters(), 1.0)
        for optimizer in optimizers:
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
    assert equal(ours[0], theirs[0])
    assert equal(ours[1], theirs[1])
    assert shared.state_dict() == scaler.state_dict()


@pytest.mark.parametrize(("first", "second"), [({"accum_grad": 2}, {"accum_grad": 2, "step_per_update": 2}), ({}, {"step_per_update": 3})])  # fmt: skip
def test_schedulers_that_share_a_scaler_may_act_in_different_windows(
    first: dict[str, int], second: dict[str, int]
) -> None:
    ours, plain, shared = parts(), parts(), scaler_of(16.0)
    made = [
        [Constant("SGD", {"lr": 0.01}, model, grad_clip=None, **conf) for model, conf in zip(both, (first, second), strict=True)]
        for both in (ours, plain)
    ]  # fmt: skip
    for each in made[0]:
        each.scaler = shared
    for _ in range(12):
        for both, schedulers in zip((ours, plain), made, strict=True):
            optimize({"loss": loss_of(*both)}, schedulers, 0, samples=4)
    torch.testing.assert_close(
        [*ours[0].parameters(), *ours[1].parameters()], [*plain[0].parameters(), *plain[1].parameters()]
    )
    acted = [12 // each.accum_grad // each.step_per_update for each in made[0]]
    assert shared.get_scale() == 16.0 * 2 ** (max(acted) // 2)


@pytest.mark.parametrize("second", [None, 2.0**5])
@pytest.mark.parametrize("factors", [(1, 1), (1, 3), (2, 1)])
def test_schedulers_that_share_a_loss_with_scalers_of_their_own_or_none_are_trained_as_without(
    factors: tuple[int, int], second: float | None
) -> None:
    ours, plain = parts(), parts()
    made = [
        [Constant("SGD", {"lr": 0.01}, model, grad_clip=None, accum_grad=accum) for model, accum in zip(both, factors, strict=True)]
        for both in (ours, plain)
    ]  # fmt: skip
    made[0][0].scaler, made[0][1].scaler = (scaler_of(2.0**10), scaler_of(second) if second else None)
    if factors == (2, 1):
        made[0][0].scaler, made[0][1].scaler = made[0][1].scaler, made[0][0].scaler
    for _ in range(12):
        for both, schedulers in zip((ours, plain), made, strict=True):
            optimize({"loss": loss_of(*both)}, schedulers, 0, samples=4)
    torch.testing.assert_close(
        [*ours[0].parameters(), *ours[1].parameters()], [*plain[0].parameters(), *plain[1].parameters()]
    )
    grown = [each.scaler.get_scale() for each in made[0] if each.scaler]
    assert all(scale > 2.0**5 for scale in grown)


def test_schedulers_with_windows_of_different_lengths_cannot_share_a_scaler() -> None:
    first, second = parts()
    schedulers = [Constant("SGD", {"lr": 0.1}, each, accum_grad=accum) for each, accum in ((first, 1), (second, 2))]
    schedulers[0].scaler = schedulers[1].scaler = scaler_of(16.0)
    with pytest.raises(
        ConfigError, match=r"an accum_grad of 1 and 2 share a GradScaler.*; give each a scaler of its own"
    ):
        optimize({"loss": loss_of(first, second)}, schedulers, 0, samples=4)


def test_a_scaler_adapts_when_the_end_of_a_pass_closes_a_window() -> None:
    model, scaler = line(), scaler_of(16.0)
    scheduler = Constant("SGD", {"lr": 0.1}, model, accum_grad=4, grad_clip=None)
    scheduler.scaler = scaler
    ((inputs, target),) = batches([3])
    for _ in range(2):
        optimize({"loss": mse(model, inputs, target)}, [scheduler], 0, 3)
        assert close_windows([scheduler], 0) is True
    assert scaler.get_scale() == 32.0


# Steps by hand on the losses of one forward.


def two_steps(order: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    """The parameters after both have stepped on one loss, and where plain gradient descent leaves them."""
    both = parts()
    schedulers = [Constant("SGD", {"lr": 0.1}, part, grad_clip=None) for part in both]
    parameters = [parameter for part in both for parameter in part.parameters()]
    gradients = torch.autograd.grad(loss_of(*both), parameters)
    descended = [p.detach() - 0.1 * gradient for p, gradient in zip(parameters, gradients, strict=True)]
    loss = loss_of(*both)
    for index in order:
        schedulers[index].step(loss)
    return parameters, descended


def test_two_schedulers_step_one_after_the_other_on_the_loss_of_one_forward() -> None:
    parameters, descended = two_steps([0, 1])
    assert all(torch.equal(*pair) for pair in zip(parameters, descended, strict=True))


def test_a_step_through_weights_that_another_has_changed_is_torchs_error_with_the_remedy() -> None:
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
        two_steps([1, 0])
    assert caught.value.__notes__ == [
        "OptimSchedulers whose losses share a graph step at once: optimize(losses, [first, second])"
    ]


def test_optimize_takes_the_schedulers_of_a_phase_by_name_and_a_single_loss() -> None:
    both = parts()
    schedulers = {
        name: Constant("SGD", {"lr": 0.1}, part, grad_clip=None) for name, part in zip("ab", both, strict=True)
    }
    gradients = torch.autograd.grad(loss_of(*both), [both[0].weight, both[1].weight])
    descended = [part.weight.detach() - 0.1 * gradient for part, gradient in zip(both, gradients, strict=True)]
    assert optimize(loss_of(*both).view(1), schedulers) == (True, True)
    assert all(torch.equal(part.weight, weight) for part, weight in zip(both, descended, strict=True))


def test_what_a_brain_owns_whole_gets_the_gradients_of_a_loss_by_hand_alone() -> None:
    first, second = parts()
    for name, part in (("first", first), ("second", second)):
        brain, scheduler = Brain({"net": part}), Constant("SGD", {"lr": 0.1}, part)
        brain.bind(name, {"main": scheduler})
        scheduler.step(loss_of(first, second))
        assert [other.weight.grad for other in (first, second)] == [None, None]


@pytest.mark.parametrize(
    ("owns_all", "expectation"),
    [(False, nullcontext()), (True, pytest.raises(RuntimeError, match="through the graph a second time"))],
)
def test_a_step_leaves_the_graph_to_others_unless_its_scheduler_owns_all(owns_all: bool, expectation: Any) -> None:
    scheduler = Constant("SGD", {"lr": 0.1}, line())
    scheduler.owns_all = owns_all
    loss = torch.nn.functional.linear(torch.ones(4, 3, dtype=torch.double), *scheduler.parameters).square().mean()
    scheduler.step(loss)
    with expectation:
        loss.backward()


def test_optimize_notes_its_losses_without_their_graph_on_the_first_scheduler_and_fit_batch_notes_none() -> None:
    both = parts()
    schedulers = [Constant("SGD", {"lr": 0.1}, part) for part in both]
    loss = loss_of(*both)
    optimize({"loss": loss, "other": loss * 3}, schedulers)
    noted = schedulers[0].losses
    assert noted is not None
    assert schedulers[1].losses is None
    assert {name: (each.item(), each.requires_grad) for name, each in noted.items()} == {
        "loss": (loss.item(), False), "other": ((loss * 3).item(), False),
    }  # fmt: skip
    brain, scheduler = Line({"line": line()}), Constant("SGD", {"lr": 0.1}, line())
    brain.bind("line", {"main": scheduler})
    brain.fit_batch(batches([4])[0])
    assert scheduler.losses is None
