"""The order in which ``optimize`` gets its OptimSchedulers changes nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from pipeline import RunnerBase, hookimpl, optimize
from pipeline.context import Context
from pipeline.errors import ConfigError
from pipeline.optim.schedules import Constant

mse = nn.functional.mse_loss
Config = dict[str, Any]
Run = Callable[[Config], Context]


class ThreeLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 4)
        self.b = nn.Linear(4, 4)
        self.c = nn.Linear(4, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.c(self.b(self.a(inputs).tanh()).tanh())
        return scores


# Of each layer, after how many batches its optimizer steps.
WINDOWS = {"a": 1, "b": 2, "c": 3}


def constant(modules: str, accum_grad: int, **more: Any) -> Config:
    arguments = {"updated_modules": modules, "accum_grad": accum_grad, **more}
    return {
        "class": "constant",
        "args": {"optim_type": "SGD", "optim_conf": {"lr": 0.1}, **arguments},
    }


def three_layers_config(config: Callable[..., Config], make_table: Callable[[int], TensorDataset]) -> Config:
    """Batches of 8, 8 and 2 samples, and an optimizer for each layer."""
    chosen = config(epochs=2)
    del chosen["hyper_parameters"]
    chosen["dataset"][0] |= {"class_path": lambda: make_table(18), "batch_size": 8}
    schedulers = {name: constant(f"model.{name}", window) for name, window in WINDOWS.items()}
    chosen["phase"][0] |= {"model": ThreeLayers, "optim_schedulers": schedulers}
    return chosen


def custom_loop(order: tuple[str, ...]) -> type[RunnerBase]:
    class Runner(RunnerBase):
        def run(self, context: Context) -> None:
            phase = context["model"]["line"]
            for _ in context.epochs():
                for inputs, target in context.batches("line"):
                    optimize(
                        mse(phase.model(inputs), target),
                        [phase.optim_schedulers[name] for name in order],
                    )

    return Runner


def three_layers_by_hand(table: TensorDataset) -> nn.Module:
    """Each layer descends the mean over the samples of its window; the end of an epoch closes all windows."""
    torch.manual_seed(0)
    model = ThreeLayers()
    inputs, target = table.tensors
    batches = list(zip(inputs.split(8), target.split(8), strict=True))
    layers = {name: list(model.get_submodule(name).parameters()) for name in WINDOWS}
    for _ in range(2):
        samples = dict.fromkeys(WINDOWS, 0)
        for number, (x, y) in enumerate(batches, 1):
            (mse(model(x), y) * len(x)).backward()
            for name, window in WINDOWS.items():
                samples[name] += len(x)
                if number % window == 0 or number == len(batches):
                    descend(layers[name], 0.1 / samples[name])
                    samples[name] = 0
    return model


def descend(parameters: Iterable[Tensor], rate: float) -> None:
    with torch.no_grad():
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.sub_(rate * parameter.grad)
            parameter.grad = None


@pytest.mark.slow
def test_optimize_any_order_trains_as_the_default_runner(config: Any, run: Run, make_table: Any) -> None:
    """Only the schedulers that accumulate know how many samples a batch has, and they may come last."""
    by_default = run(three_layers_config(config, make_table))["model"]["line"].model
    torch.testing.assert_close(
        [*by_default.parameters()],
        [*three_layers_by_hand(make_table(18)).parameters()],
        rtol=1e-5,
        atol=1e-7,
    )
    for order in itertools.permutations(WINDOWS):
        chosen = three_layers_config(config, make_table)
        chosen["runner"][0]["runner_class_path"] = custom_loop(order)
        model = run(chosen)["model"]["line"].model
        pairs = zip(model.parameters(), by_default.parameters(), strict=True)
        assert all(torch.equal(*pair) for pair in pairs), order


class TwoPhases(RunnerBase):
    """Trains both phases by one call of ``optimize``, with a batch of each."""

    def __init__(self, context: Context, reverse: bool) -> None:
        super().__init__(context)
        self.reverse = reverse

    def run(self, context: Context) -> None:
        first, second = (context["model"][name] for name in ("line", "other"))
        schedulers = [first.optim_schedulers["main"], second.optim_schedulers["main"]]
        if self.reverse:
            schedulers.reverse()
        for _ in context.epochs():
            batches = zip(context.batches("line"), context.batches("other"), strict=False)
            for (x, y), (inputs, target) in batches:
                optimize(
                    {"first": mse(first.model(x), y), "second": mse(second.model(inputs), target)},
                    schedulers,
                )


def two_phases_config(config: Callable[..., Config], make_table: Callable[..., TensorDataset]) -> Config:
    """Batches of 4 and 4 samples for one phase, of 3 and 1 for the other, each in a window."""
    chosen = config(epochs=2)
    del chosen["hyper_parameters"]
    chosen["dataset"][0] |= {"class_path": lambda: make_table(8), "batch_size": 4}
    chosen["dataset"].append({"name": "more", "class_path": lambda: make_table(4, seed=2), "batch_size": 3})
    chosen["phase"].append({**chosen["phase"][0], "name": "other", "dataset_name": "more"})
    for phase, loss in zip(chosen["phase"], ("first", "second"), strict=True):
        phase["optim_schedulers"] = {"main": constant("model", 2, optim_loss=loss)}
    return chosen


@pytest.mark.parametrize("reverse", [False, True])
def test_optimize_two_phases_weighs_each_by_its_own_batch(
    reverse: bool, config: Any, run: Run, make_table: Any
) -> None:
    chosen = two_phases_config(config, make_table)
    chosen["runner"][0] |= {"runner_class_path": TwoPhases, "runner_args": {"reverse": reverse}}
    context = run(chosen)
    torch.manual_seed(0)
    models = {"line": nn.Linear(3, 1), "other": nn.Linear(3, 1)}
    for name, table in (("line", make_table(8)), ("other", make_table(4, seed=2))):
        optimizer = torch.optim.SGD(models[name].parameters(), 0.1)
        inputs, target = table.tensors
        for _ in range(2):
            optimizer.zero_grad()
            mse(models[name](inputs), target).backward()
            optimizer.step()
        trained = context["model"][name].model
        torch.testing.assert_close([*trained.parameters()], [*models[name].parameters()])
        assert "loss" in context["metrics"][name]


class Guided(RunnerBase):
    """Trains a phase that never has a batch of its own, on the batches of another."""

    def __init__(self, context: Context, reverse: bool) -> None:
        super().__init__(context)
        self.reverse = reverse

    def run(self, context: Context) -> None:
        first, second = (context["model"][name] for name in ("line", "other"))
        schedulers = [first.optim_schedulers["main"], second.optim_schedulers["main"]]
        if self.reverse:
            schedulers.reverse()
        for _ in context.epochs():
            for inputs, target in context.batches("line"):
                optimize(mse(first.model(inputs) + second.model(inputs), target), schedulers)


@pytest.mark.parametrize("reverse", [False, True])
def test_optimize_with_an_idle_phase_has_epoch_and_samples(
    reverse: bool, config: Any, run: Run, make_table: Any
) -> None:
    """The phase without a batch has neither an epoch nor a number of samples, so those of the other count."""
    chosen = two_phases_config(config, make_table)
    chosen["dataset"][0] |= {"class_path": lambda: make_table(10), "batch_size": 8}
    chosen["runner"][0] |= {"runner_class_path": Guided, "runner_args": {"reverse": reverse}}
    # The first steps at each batch, the second once in a window of two, at a rate that is halved after each epoch.
    chosen["phase"][0]["optim_schedulers"] = {"main": constant("model", 1)}
    halved = constant("model", 2, decay_factor=0.5)
    chosen["phase"][1]["optim_schedulers"] = {"main": {**halved, "class": "exponential_decay"}}
    context = run(chosen)
    torch.manual_seed(0)
    first, second = nn.Linear(3, 1), nn.Linear(3, 1)
    inputs, target = make_table(10).tensors
    for epoch in range(2):
        for x, y in zip(inputs.split(8), target.split(8), strict=True):
            (mse(first(x) + second(x), y) * len(x)).backward()
            descend(first.parameters(), 0.1 / len(x))
        descend(second.parameters(), 0.1 * 0.5**epoch / 10)
    for name, model in (("line", first), ("other", second)):
        torch.testing.assert_close([*context["model"][name].model.parameters()], [*model.parameters()])


def test_optimize_after_a_step_refuses_a_shared_parameter() -> None:
    """Whether a parameter is shared was only looked at before the first step of the first scheduler."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    whole = Constant("SGD", {"lr": 0.1}, model)
    part = Constant("SGD", {"lr": 0.1}, model, updated_modules="1")
    optimize(model(torch.ones(4, 3)).mean(), [whole])
    for order in ([whole, part], [part, whole]):
        with pytest.raises(ConfigError, match=r"two OptimSchedulers train '1\.weight'"):
            optimize(model(torch.ones(4, 3)).mean(), order)


class TwoCalls(RunnerBase):
    """Trains one layer by its own losses, and then both layers by another one."""

    def run(self, context: Context) -> None:
        phase = context["model"]["line"]
        first, second, _ = phase.optim_schedulers.values()
        for _ in context.epochs():
            for inputs, target in context.batches("line"):
                loss = mse(phase.model(inputs), target)
                optimize({"loss": loss, "doubled": 2 * loss}, [second])
                optimize(mse(phase.model(inputs), target), [first, second])


def test_two_calls_for_a_batch_report_the_losses_of_both(config: Any, run: Run, make_table: Any) -> None:
    """Plugins get each loss by its name; of two with the same name, they get the later one."""
    reported = []

    class Recorder:
        @hookimpl
        def after_batch(self, losses: Any) -> None:
            reported.append(losses)

    chosen = three_layers_config(config, make_table)
    for scheduler in chosen["phase"][0]["optim_schedulers"].values():
        scheduler["args"]["accum_grad"] = 1
    chosen["runner"][0]["runner_class_path"] = TwoCalls
    chosen["plugins"] = [*chosen["plugins"], Recorder]
    run(chosen)

    assert len(reported) == 6
    assert all(losses["doubled"] > 2 * losses["loss"] for losses in reported)
