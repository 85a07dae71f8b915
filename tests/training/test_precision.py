"""In which number format training and evaluation compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader

from pipeline import Brain, GeneralTrainer, OptimScheduler, Stage, UpdaterBase
from pipeline.context import Context
from pipeline.errors import ConfigError
from pipeline.optim.precision import autocast, make_scaler
from pipeline.optim.schedules import Constant

Config = Callable[..., dict[str, Any]]
Run = Callable[[dict[str, Any]], Context]
CPU = torch.device("cpu")
BF16, FP32 = torch.bfloat16, torch.float32
mse = nn.functional.mse_loss


class Watching(Brain):
    """A linear model that notes the pass, the format of its output, and whether autocast is on."""

    def __init__(self, **keywords: Any) -> None:
        torch.manual_seed(0)
        super().__init__({"net": nn.Linear(3, 1)}, **keywords)
        self.seen: list[tuple[str, Any, bool]] = []
        self.gradients: set[Any] = set()

    def compute_forward(self, batch: Any, stage: Stage) -> Any:
        predictions = self.modules.net(batch[0])
        self.seen.append((stage.name, predictions.dtype, torch.is_autocast_enabled("cpu")))
        return predictions

    def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> Tensor:
        for parameter in self.modules.parameters():
            if stage is Stage.TRAIN and not parameter._backward_hooks:
                parameter.register_hook(lambda gradient: self.gradients.add(gradient.dtype))
        return mse(predictions, batch[1])


def fitted(loader: Any, **options: Any) -> Watching:
    brain = Watching(opt_class=lambda parameters: SGD(parameters, 0.1), run_opts={"max_grad_norm": None, **options})
    brain.fit(range(2), loader, loader)
    brain.evaluate(loader)
    return brain


@pytest.mark.parametrize(
    ("options", "train", "evaluated"),
    [
        ({}, FP32, FP32),
        ({"precision": "bf16"}, BF16, FP32),
        ({"eval_precision": "bf16"}, FP32, BF16),
        ({"precision": "bf16", "eval_precision": "bf16"}, BF16, BF16),
        ({"bfloat16_mix_prec": True}, BF16, FP32),
    ],
)
def test_training_and_evaluation_compute_each_in_its_own_precision(
    make_table: Any, options: dict[str, Any], train: torch.dtype, evaluated: torch.dtype
) -> None:
    brain = fitted(DataLoader(make_table(4), batch_size=4), **options)
    kinds = {"TRAIN": train, "VALID": evaluated, "TEST": evaluated}
    passes = ["TRAIN", "VALID", "TRAIN", "VALID", "TEST"]
    assert brain.seen == [(name, kinds[name], kinds[name] is BF16) for name in passes]


def test_weights_gradients_and_what_is_saved_stay_in_float32(make_table: Any) -> None:
    brain = fitted(DataLoader(make_table(4), batch_size=4), precision="bf16")
    assert {each.dtype for each in brain.modules.state_dict().values()} == {FP32}
    assert brain.gradients == {FP32}


def by_hand(loader: Any, epochs: int) -> nn.Module:
    """The loop of torch's documentation of autocast."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = SGD(model.parameters(), 0.1)
    for inputs, target in list(loader) * epochs:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = mse(model(inputs), target)
        loss.backward()
        optimizer.step()
    return model


def test_fit_in_bf16_is_a_loop_by_hand_under_autocast_bit_for_bit(make_table: Any) -> None:
    loader = DataLoader(make_table(10), batch_size=4)
    brain, model = fitted(loader, precision="bf16"), by_hand(loader, 2)
    assert all(map(torch.equal, brain.modules.net.parameters(), model.parameters()))
    assert not torch.equal(model.weight, fitted(loader).modules.net.weight)


def test_a_run_in_bf16_is_a_loop_by_hand_under_autocast_bit_for_bit(config: Config, run: Run, make_table: Any) -> None:
    model = by_hand(DataLoader(make_table(10), batch_size=4), 2)
    ours = run(config(precision="bf16"))["model"]["line"]["model"]
    assert all(map(torch.equal, ours.parameters(), model.parameters()))
    assert {each.dtype for each in ours.parameters()} == {FP32}


def test_a_run_validates_in_its_eval_precision(config: Config, run: Run) -> None:
    chosen = config(eval_precision="bf16", epochs=1)
    chosen["phase"] = [{"name": "line", "model": Watching, "dataset_name": "data", "valid_dataset_name": "data"}]
    brain = run(chosen)["model"]["line"]["brain"]
    assert brain.seen == [("TRAIN", FP32, False)] * 3 + [("VALID", BF16, True)] * 3


def test_an_evaluate_batch_of_its_own_computes_in_the_eval_precision_too(make_table: Any) -> None:
    class Own(Watching):
        def evaluate_batch(self, batch: Any, stage: Stage) -> Tensor:
            return super().evaluate_batch(batch, stage) + mse(self.compute_forward(batch, stage), batch[1])

    brain = Own(run_opts={"eval_precision": "bf16"})
    brain.evaluate(DataLoader(make_table(4), batch_size=2))
    assert brain.seen == [("TEST", BF16, True)] * 4
    assert not torch.is_autocast_enabled("cpu")


def test_an_infer_runner_computes_in_its_eval_precision(config: Config, run: Run) -> None:
    chosen = config()
    chosen["runner"] += [{"name": "infer", "class": "infer", "device": "cpu", "eval_precision": "bf16"}]
    chosen["phase"] = [{"name": "line", "model": Watching, "dataset_name": "data"}]
    assert run(chosen)["model"]["line"]["brain"].seen == [("TEST", BF16, True)] * 3


def test_at_fp32_there_is_no_autocast_at_all(
    config: Config, run: Run, make_table: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refused:
        def __init__(self, *_: Any, **__: Any) -> None:
            raise AssertionError("an autocast was made")

    monkeypatch.setattr(torch, "autocast", Refused)
    fitted(DataLoader(make_table(4), batch_size=4))
    run(config())
    with pytest.raises(AssertionError, match="an autocast was made"):
        fitted(DataLoader(make_table(4), batch_size=4), precision="bf16")


@pytest.mark.parametrize("name", ["precision", "eval_precision"])
def test_fp16_on_a_cpu_is_refused_when_a_brain_is_made(name: str) -> None:
    message = f"run options: {name} is fp16, which needs a GPU, and device is cpu; use bf16 or fp32"
    with pytest.raises(ConfigError, match=message):
        Watching(run_opts={name: "fp16", "device": "cpu"})


@pytest.mark.parametrize("name", ["precision", "eval_precision"])
def test_fp16_on_a_cpu_is_refused_in_a_config_before_anything_runs(config: Config, run: Run, name: str) -> None:
    made: list[int] = []
    chosen = config(**{name: "fp16"})
    chosen["dataset"][0]["class_path"] = lambda: made.append(1)
    with pytest.raises(ConfigError, match=f"runner.train.{name}: is 'fp16', and device is 'cpu': .*; use bf16 or fp32"):
        run(chosen)
    assert made == []


def test_fp16_on_a_cpu_that_was_found_is_refused_before_anything_is_trained(config: Config, run: Run) -> None:
    if torch.cuda.is_available():
        pytest.skip("auto is a GPU here")
    forwards: list[int] = []
    chosen = config(precision="fp16", device="auto")
    chosen["phase"][0]["loss"] = lambda predictions, target: forwards.append(1)
    with pytest.raises(ConfigError, match=r"runner.train: .*precision is fp16, which needs a GPU.*; use bf16 or fp32"):
        run(chosen)
    assert forwards == []


@pytest.mark.parametrize(("precision", "device"), [("fp32", "cpu"), ("fp32", "cuda"), ("bf16", "cpu")])
def test_gradients_are_scaled_in_fp16_alone(precision: str, device: str) -> None:
    assert make_scaler(precision, torch.device(device)) is None


def test_autocast_is_of_the_device_and_the_format() -> None:
    assert autocast("fp32", CPU) is None
    made = autocast("bf16", CPU)
    assert made is not None
    assert (made.device, made.fast_dtype) == ("cpu", torch.bfloat16)
    with pytest.raises(ConfigError, match="precision fp16 needs a GPU, and the device is cpu; use bf16 or fp32"):
        autocast("fp16", CPU)


class Model(Brain):
    """A linear model that notes, as (moment, whether autocast is on, dtype), what happens around it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__({"net": nn.Linear(3, 1)})
        self.seen: list[tuple[str, bool, torch.dtype]] = []
        self.losses: list[float] = []

    def note(self, moment: str, dtype: torch.dtype = FP32) -> None:
        self.seen.append((moment, torch.is_autocast_enabled("cpu"), dtype))

    def compute_forward(self, batch: Any, stage: Stage) -> Tensor:
        predictions: Tensor = self.modules.net(batch[0])
        self.note("forward", predictions.dtype)
        if predictions.requires_grad:
            predictions.register_hook(lambda gradient: self.note("backward", gradient.dtype))
        return predictions

    def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> Tensor:
        loss = mse(predictions, batch[1])
        self.losses.append(loss.item())
        return loss

    def on_fit_batch_start(self, batch: Any, should_step: bool) -> None:
        self.note("start")

    def on_fit_batch_end(self, batch: Any, outputs: Any, loss: Tensor, should_step: bool) -> None:
        self.note("end")


class Watched(SGD):
    """An optimizer that notes whether autocast is on at its step."""

    on: ClassVar[list[bool]] = []

    def step(self, *arguments: Any) -> Any:
        self.on.append(torch.is_autocast_enabled("cpu"))
        return super().step(*arguments)


class Repeated(UpdaterBase):
    """Takes several steps on a batch: by the Brain, by a scheduler (its own, or the phase's), or with an optimizer."""

    def __init__(self, brain: Model, optim_schedulers: dict[str, OptimScheduler], way: str, times: int) -> None:
        super().__init__()
        self.brain, self.times = brain, times
        self.optimizer = Watched(brain.modules.parameters(), 0.1)
        own = Constant(Watched, {"lr": 0.1}, brain.modules)
        self.scheduler = own if way == "own scheduler" else optim_schedulers["main"]
        self.step = {"brain": brain.fit_batch, "optimizer": self.by_optimizer}.get(way, self.by_scheduler)

    def update(self, batch: Any) -> None:
        for _ in range(self.times):
            self.step(batch)

    def loss(self, batch: Any) -> Tensor:
        return self.brain.compute_objectives(self.brain.compute_forward(batch, Stage.TRAIN), batch, Stage.TRAIN)

    def by_scheduler(self, batch: Any) -> Any:
        self.scheduler.step({"loss": self.loss(batch)})

    def by_optimizer(self, batch: Any) -> Any:
        self.optimizer.zero_grad()
        torch.autograd.backward(self.loss(batch))
        self.optimizer.step()


class Twice(Model):
    """Takes two steps on a batch in a fit_batch of its own."""

    def fit_batch(self, batch: Any) -> Tensor:
        super().fit_batch(batch)
        with torch.no_grad():
            self.evaluate_batch(batch, Stage.VALID)
        return super().fit_batch(batch)


def repeated(config: Config, way: str, times: int, precision: str) -> Model:
    """A model that was trained with ``times`` steps on each of 10 samples' 3 batches, in 2 epochs."""
    Watched.on.clear()
    chosen = config(precision=precision, grad_clip=1.0)
    chosen["hyper_parameters"]["optimizer"]["class"] = Watched
    chosen["phase"] = [{"name": "line", "model": Model, "dataset_name": "data"}]
    chosen["phase"][0]["updater"] = {"class_path": Repeated, "args": {"way": way, "times": times}}
    brain: Model = GeneralTrainer(chosen).run()["model"]["line"]["brain"]
    return brain


def steps_by_hand(loader: Any, times: int, precision: str, clip: float) -> tuple[nn.Linear, list[float]]:
    """The model and the loss at each step of torch's own loop, in 2 epochs with ``times`` steps on each batch."""
    torch.manual_seed(0)
    model, losses = nn.Linear(3, 1), []
    optimizer = SGD(model.parameters(), 0.1)
    for inputs, target in [batch for batch in list(loader) * 2 for _ in range(times)]:
        optimizer.zero_grad()
        with torch.autocast("cpu", BF16, enabled=precision == "bf16"):
            loss = mse(model(inputs), target)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    return model, losses


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("way", ["brain", "scheduler", "own scheduler", "optimizer"])
def test_each_step_on_a_batch_sees_the_weights_of_the_one_before(
    config: Config, make_table: Any, way: str, times: int, precision: str
) -> None:
    brain = repeated(config, way, times, precision)
    clip = 1e9 if way == "optimizer" else 1.0
    model, losses = steps_by_hand(DataLoader(make_table(10), batch_size=4), times, precision, clip)
    assert brain.losses == losses
    assert all(map(torch.equal, brain.modules.net.parameters(), model.parameters()))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_fit_batch_of_its_own_that_takes_two_steps_sees_the_weights_of_the_first(
    config: Config, run: Run, make_table: Any, precision: str
) -> None:
    chosen = config(precision=precision, eval_precision=precision)
    data = {"dataset_name": "data", "valid_dataset_name": "data"}
    chosen["phase"] = [{"name": "line", "model": Twice, **data}]
    brain = run(chosen)["model"]["line"]["brain"]
    model, losses = steps_by_hand(DataLoader(make_table(10), batch_size=4), 2, precision, 1e9)
    trained = brain.losses[:9] + brain.losses[12:21]
    assert [loss for number, loss in enumerate(trained) if number % 3 != 1] == losses
    assert all(map(torch.equal, brain.modules.net.parameters(), model.parameters()))


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", FP32), ("bf16", BF16)])
@pytest.mark.parametrize("way", ["brain", "scheduler", "own scheduler"])
def test_autocast_is_around_what_is_computed_and_around_nothing_else(
    config: Config, way: str, precision: str, dtype: torch.dtype
) -> None:
    brain = repeated(config, way, 2, precision)
    computed = [("forward", dtype is BF16, dtype), ("backward", False, dtype)]
    told = [("start", False, FP32), *computed, ("end", False, FP32)]
    assert brain.seen == (told if way == "brain" else computed) * 12
    assert Watched.on == [False] * 12
