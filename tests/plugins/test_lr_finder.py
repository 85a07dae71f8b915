"""``lr_finder``: what it suggests, and that a run with it is bit for bit that without it."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from pipeline_plugins.lr_finder import LrFinder
from pipeline_plugins.shared.differences import checkpoint_differences
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from pipeline import (
    Brain,
    Context,
    GeneralTrainer,
    RunnerBase,
    Stage,
    UpdaterBase,
    hookimpl,
    make_loader,
    observe,
    stages,
)
from pipeline.checkpoint.reader import read_checkpoint
from pipeline.errors import ConfigError
from pipeline.signals import StoppedError
from tests.training.conftest import Kill, KilledError, linear_config, mse, table

FINDER = {"lr_finder": {"steps": 20}}


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))


def config(**runner: Any) -> dict[str, Any]:
    """Two epochs of 3 shuffled batches, each validated; the phase ``line``, trained by Adam."""
    made = linear_config(**runner)
    made["hyper_parameters"]["optimizer"] = {"class": "Adam", "lr": 0.01}
    made["dataset"][0]["shuffle"] = True
    made["phase"][0] |= {"model": network, "valid_dataset_name": "data"}
    return made


class Calls:
    """A plugin that keeps the calls of the hooks of a training."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    @hookimpl
    def before_pipeline(self, context: Context) -> None:
        context["calls"] = self.calls

    @hookimpl
    def before_batch(self, context: Context, batch: Any) -> None:
        self.calls.append(("before_batch", dict(context["train_state"]), batch[0].sum().item()))

    @hookimpl
    def after_backward(self, losses: dict[str, Tensor]) -> None:
        self.calls.append(("after_backward", losses["loss"].item()))

    @hookimpl
    def before_update(self, optim_scheduler: Any) -> None:
        self.calls.append(("before_update", optim_scheduler.get_lr()))

    @hookimpl
    def after_update(self, name: str) -> None:
        self.calls.append(("after_update", name))

    @hookimpl
    def on_observe(self, value: Tensor) -> None:
        self.calls.append(("on_observe", value.sum().item()))


def run(made: dict[str, Any], *plugins: Any, **more: Any) -> Context:
    return GeneralTrainer({**made, "plugins": [{"progress_bar": False}, *plugins], **more}).run()


def differences(one: Context, other: Context) -> list[str]:
    """Where two runs differ: calls of hooks, numbers, and all that their last checkpoints hold but the length of timings."""
    saved = [read_checkpoint(context["checkpointer"].newest()) for context in (one, other)]
    found = [str(difference) for difference in checkpoint_differences(*saved) if "timing" not in difference.place]
    files = [context["run_dir"] / "train" / "metrics.jsonl" for context in (one, other)]
    found += ["metrics.jsonl"] * (files[0].read_bytes() != files[1].read_bytes())
    return found + ["calls"] * (one.get("calls") != other.get("calls"))


def scheduled(made: dict[str, Any]) -> None:
    arguments = {"optim_type": "SGD", "optim_conf": {"lr": 0.1, "momentum": 0.9}, "warmup_steps": 2, "total_steps": 9}
    made["phase"][0]["optim_schedulers"] = {"main": {"class": "warmup_cosine", "args": {**arguments, "accum_grad": 2}}}
    del made["hyper_parameters"]
    made["runner"][0] |= {"grad_clip": 1.0, "seed": 3}


def of_torch(made: dict[str, Any]) -> None:
    arguments = {"optim_type": "AdamW", "optim_conf": {"lr": 0.1}, "schedule": "LinearLR", "args": {"total_iters": 4}}
    made["phase"][0]["optim_schedulers"] = {"main": {"class": "torch_schedule", "args": arguments}}
    del made["hyper_parameters"]


class Own(Brain):
    """Counts in attributes and in a buffer that is not saved, and draws with all generators."""

    def __init__(self) -> None:
        super().__init__({"net": network()})
        self.seen = 0
        self.modules.net.register_buffer("scale", torch.ones(1), persistent=False)

    def compute_forward(self, batch: Any, stage: Stage) -> Tensor:
        self.seen += stage is Stage.TRAIN
        self.modules.net.scale *= 1.01
        output: Tensor = self.modules.net(batch[0] + torch.randn(3)) * self.modules.net.scale
        return observe("output", output)

    def compute_objectives(self, predictions: Tensor, batch: Any, stage: Stage) -> Tensor:
        self.log("seen", float(self.seen))
        return mse(predictions, batch[1])


class Twice(UpdaterBase):
    """Makes two steps on a batch, and has a counter."""

    def __init__(self, brain: Brain) -> None:
        super().__init__()
        self.brain, self.count = brain, 0

    def update(self, batch: Any) -> Tensor:
        self.count += 1
        self.log("count", float(self.count))
        self.brain.fit_batch(batch)
        return self.brain.fit_batch(batch)


def of_its_own(made: dict[str, Any]) -> None:
    made["phase"][0] |= {"model": Own, "updater": {"class_path": Twice}}
    del made["phase"][0]["loss"]


def shared(made: dict[str, Any]) -> None:
    made["phase"] += [
        {"name": "again", "model_of": "line", "dataset_name": "data"},
        {**made["phase"][0], "name": "other"},
    ]


CHANGES: dict[str, Callable[[dict[str, Any]], None]] = {
    "Adam": lambda made: None,
    "a schedule and accumulation": scheduled,
    "a schedule of torch": of_torch,
    "a Brain and an updater": of_its_own,
    "several phases": shared,
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("change", CHANGES)
def test_a_run_ends_with_the_same_bits_as_one_without_it(change: str) -> None:
    made = config()
    CHANGES[change](made)
    found = run(made, Calls, FINDER)
    assert differences(found, run(made, Calls)) == []
    curve = json.loads((found["run_dir"] / "train" / "lr_finder.json").read_text(encoding="utf-8"))
    assert len(curve["losses"]) > 10


def test_the_averages_of_ema_are_those_of_the_training() -> None:
    assert differences(run(config(), FINDER, {"ema": {"decay": 0.9}}), run(config(), {"ema": {"decay": 0.9}})) == []


class Noisy(Dataset[Any]):
    """Samples with noise, drawn when they are fetched."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.randn(3) + index, torch.rand(1)


class Persistent(stages.Network):
    """Has workers that stay from pass to pass."""

    def build_dataset(self, *arguments: Any) -> Any:
        return make_loader(Noisy(), seed=1, shuffle=True, batch_size=4, num_workers=2, persistent_workers=True)


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
def test_it_ends_with_the_same_bits_where_workers_read_the_data(persistent: bool) -> None:
    made = config(**({"network_class_path": Persistent} if persistent else {}))
    made["dataset"][0] |= {"class_path": Noisy, "num_workers": 2}
    assert differences(run(made, Calls, FINDER), run(made, Calls)) == []


class Drawn(stages.Network):
    """Has a DataLoader whose order a generator of its own draws."""

    def build_dataset(self, *arguments: Any) -> Any:
        generator = torch.Generator().manual_seed(5)
        return DataLoader(table(10), batch_size=4, shuffle=True, generator=generator)


class Stream(IterableDataset[Any]):
    """Samples with noise, one after the other."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(10):
            yield torch.randn(3), torch.rand(1)


DATA: list[dict[str, Any]] = [{"network_class_path": Drawn}, {"limit_batches": 2}, {"overfit_batches": 2}, {}]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("keys", DATA)
def test_it_ends_with_the_same_bits_whatever_gives_the_batches(keys: dict[str, Any]) -> None:
    made = config(**keys)
    if not keys:
        made["dataset"][0] = {"name": "data", "class_path": Stream, "batch_size": 4}
    assert differences(run(made, Calls, FINDER), run(made, Calls)) == []


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("at", [1, 4])
def test_a_resumed_run_does_not_search(at: int, monkeypatch: pytest.MonkeyPatch, log_lines: list[str]) -> None:
    made = config(save_interval="1 iteration")
    monkeypatch.setattr(Kill, "at", at)
    with pytest.raises(KilledError):
        run(made, FINDER, Kill, name="killed")
    monkeypatch.setattr(Kill, "at", -1)
    trainer = GeneralTrainer(
        {**made, "plugins": [{"progress_bar": False}, FINDER, Kill], "name": "killed"}, resume="auto"
    )
    resumed = trainer.run()
    assert differences(resumed, run(made, FINDER, Kill)) == []
    assert sum("lr_finder suggests" in line for line in log_lines) == 2


class Bowl(nn.Module):
    """A quadratic: half the curvature times the square of its weight."""

    def __init__(self, curvature: float) -> None:
        super().__init__()
        self.curvature, self.weight = curvature, nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.curvature / 2 * self.weight.square().expand(len(x))


def mean(predictions: Tensor, target: Tensor) -> Tensor:
    return predictions.mean()


def bowl(curvature: float = 1.0, **runner: Any) -> dict[str, Any]:
    made = linear_config(epochs=1, **runner)
    made["phase"][0] |= {"model": lambda: Bowl(curvature), "loss": mean}
    return made


def curve_of(context: Context) -> dict[str, Any]:
    curve: dict[str, Any] = json.loads((context["run_dir"] / "train" / "lr_finder.json").read_text(encoding="utf-8"))
    return curve


@pytest.mark.parametrize("curvature", [2, 10, 300])
def test_of_a_quadratic_it_suggests_a_rate_that_converges_and_not_slowly(curvature: float) -> None:
    context = run(bowl(curvature), "lr_finder")
    curve = curve_of(context)
    # Gradient descent converges with rates below 2 / curvature, and fastest with 1 / curvature.
    assert 0.02 / curvature < curve["suggestion"] < 1.5 / curvature
    assert "diverges" in curve["end"]
    assert curve["learning_rates"][-1] > 2 / curvature


def test_the_losses_are_those_of_a_loop_by_hand() -> None:
    curve, weight, losses = curve_of(run(bowl(), {"lr_finder": {"start": 0.01, "end": 0.5, "steps": 12}})), 1.0, []
    for rate in curve["learning_rates"]:
        losses.append(weight**2 / 2)
        weight -= rate * weight
    # There are 3 batches to an epoch: they come again.
    assert curve["learning_rates"] == pytest.approx([0.01 * 50 ** (step / 11) for step in range(12)])
    assert curve["losses"] == pytest.approx(losses)
    assert curve["end"] == "all rates were tried"


class Cliff(Bowl):
    """Is no number once the weight is small."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.weight.item() > 0.5 else self.weight.expand(len(x)) * torch.nan


@pytest.mark.parametrize("patience", [0, 3, None])
def test_a_loss_that_is_no_number_ends_the_search_and_not_the_run(patience: int | None) -> None:
    made = bowl(nonfinite_patience=patience)
    made["phase"][0]["model"] = lambda: Cliff(1.0)
    context = run(made, {"lr_finder": {"end": 1.0}})
    assert "is no number at" in curve_of(context)["end"]
    assert context["train_state"]["iteration"] == 3
    assert context["model"]["line"].model.weight.item() == pytest.approx(0.9**3)


def test_of_a_loss_that_never_falls_it_suggests_nothing(log_lines: list[str]) -> None:
    assert curve_of(run(bowl(0.0), "lr_finder"))["suggestion"] is None
    assert any("lr_finder suggests no learning rate: the loss never falls" in line for line in log_lines)


class Alone(UpdaterBase):
    """Steps an optimizer that no OptimScheduler has."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.optimizer = model, torch.optim.SGD(model.parameters(), lr=0.1)

    def update(self, batch: Any) -> Tensor:
        self.optimizer.zero_grad()
        loss = mse(self.model(batch[0]), batch[1])
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def test_the_search_ends_where_no_rate_reaches_an_update() -> None:
    made = config()
    made["phase"][0]["updater"] = {"class_path": Alone}
    found = run(made, FINDER)
    assert differences(found, run(made)) == []
    assert curve_of(found)["end"] == "10 batches made no update through an OptimScheduler"


def test_it_may_end_the_training_before_its_first_step() -> None:
    context = run(bowl(), {"lr_finder": {"stop": True}})
    assert context["train_state"]["iteration"] == 0
    assert context["model"]["line"].model.weight.item() == 1.0
    status = json.loads((context["run_dir"] / "status.json").read_text(encoding="utf-8"))
    assert status["state"] == "done"
    assert status["reason"].startswith("lr_finder has suggested the learning rate 0.")


class OwnLoop(RunnerBase):
    """Has no epochs."""

    def run(self, context: Context) -> None:
        for batch in context.batches("line"):
            context["model"]["line"].brain.fit_batch(batch)


def test_a_loop_without_epochs_is_searched_before_its_first_pass() -> None:
    made = config(runner_class_path=OwnLoop)
    found = run(made, Calls, FINDER)
    assert differences(found, run(made, Calls)) == []
    assert len(curve_of(found)["losses"]) > 10


def test_two_of_them_search_two_phases() -> None:
    made = config()
    made["phase"].append({**made["phase"][0], "name": "other"})
    other = {"name": "second", "class_path": "lr_finder", "args": {"steps": 20, "phase": "other"}}
    found = run(made, FINDER, other)
    assert differences(found, run(made)) == []
    assert curve_of(found)["phase"] == "line"
    assert json.loads((found["run_dir"] / "train" / "second.json").read_text(encoding="utf-8"))["phase"] == "other"


class Once(stages.Network):
    """Has batches that can be read once."""

    def build_dataset(self, *arguments: Any) -> Iterator[Any]:
        return iter([[torch.ones(4, 3), torch.ones(4, 1)]])


def test_batches_that_can_be_read_only_once_are_refused() -> None:
    with pytest.raises(ConfigError, match="the list_iterator of dataset 'data' can be read only once"):
        run(linear_config(network_class_path=Once), FINDER)


def test_a_model_without_shapes_is_refused() -> None:
    made = config()
    made["phase"][0]["model"] = lambda: nn.LazyLinear(1)
    with pytest.raises(ConfigError, match=r"phase\.line: 'model\.weight' has no shape before the first batch"):
        run(made, FINDER)


class Signals(TensorDataset):
    """Sends a signal when a sample is read, once."""

    signalled = False

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        if not Signals.signalled:
            Signals.signalled = True
            signal.raise_signal(signal.SIGTERM)
        return super().__getitem__(index)


def test_a_signal_ends_the_search_and_a_resumed_run_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made = {**config(), "name": "signalled", "plugins": [{"progress_bar": False}, FINDER]}
    made["dataset"][0] |= {"class_path": lambda: Signals(*table(10).tensors), "collate_fn": stacked}
    monkeypatch.setattr(Signals, "signalled", False)
    with pytest.raises(StoppedError):
        GeneralTrainer(made).run()
    assert differences(GeneralTrainer(made, resume="auto").run(), run(made)) == []


def stacked(samples: list[tuple[Tensor, ...]]) -> list[Tensor]:
    return [torch.stack(column) for column in zip(*samples, strict=True)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"start": 1.0, "end": 0.1}, "start is 1.0 and end 0.1; write 0 < start < end"),
     ({"start": 0.0}, "start is 0.0 and end 10.0"), ({"steps": 1}, "steps is 1; write 2 or more"),
     ({"diverges": 1.0}, "diverges is 1.0; write a number above 1")],
)  # fmt: skip
def test_an_argument_out_of_range_is_an_error(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"lr_finder: {message}"):
        LrFinder(**arguments)


def test_a_phase_that_the_runner_does_not_have_is_an_error() -> None:
    with pytest.raises(ConfigError, match="lr_finder: phase is 'lime', and train has none such; did you mean 'line'"):
        run(config(), {"lr_finder": {"phase": "lime"}})
