"""A Brain that steps by itself, with SpeechBrain's names: its own ``fit_batch``, or methods that ours calls; against plain loops."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from loguru import logger
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.utils.data import TensorDataset

from pipeline import Brain, Context, GeneralTrainer, Stage, hookimpl
from pipeline.brain.checkpointer import Checkpointer
from pipeline.compute.trainable import trainable_of
from pipeline.errors import ConfigError, DivergedError
from tests.training.conftest import Kill, KilledError, mse, table

Table = Callable[..., TensorDataset]
Batch = tuple[Tensor, Tensor]


def batches(samples: int = 12, size: int = 2) -> list[Batch]:
    x, y = table(samples).tensors
    return list(zip(x.split(size), y.split(size), strict=True))


def net(features: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(features, 4), nn.Tanh(), nn.Linear(4, 1))


class Plain(Brain):
    """A network of its own, trained by Adam."""

    def __init__(self, **keywords: Any) -> None:
        keywords.setdefault("opt_class", lambda parameters: Adam(parameters, 0.1))
        super().__init__({"net": net()}, **keywords)
        self.seen: list[Any] = []

    def compute_forward(self, batch: Any, stage: Stage) -> Any:
        return self.modules.net(batch[0])

    def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> Any:
        return mse(predictions, batch[1])


def weights(model: nn.Module) -> list[float]:
    return [value for parameter in model.parameters() for value in parameter.flatten().tolist()]


def by_hand(epochs: int = 1, accum: int = 1, clip: float = 5.0, data: list[Batch] | None = None) -> nn.Module:
    """The network after a plain loop, in which what is left of a window at the end of an epoch is dropped."""
    model = net()
    optimizer = Adam(model.parameters(), 0.1)
    for _ in range(epochs):
        for step, (inputs, target) in enumerate(data or batches(), 1):
            (mse(model(inputs), target) / accum).backward()
            if step % accum == 0:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
        optimizer.zero_grad()
    return model


# A fit_batch of one's own.


class OwnFitBatch(Plain):
    """As recipes write it: accumulation, scaler, autocast, and one's own hook at the end."""

    def fit_batch(self, batch: Any) -> Tensor:
        should_step = self.step % self.grad_accumulation_factor == 0
        with self.no_sync(not should_step):
            with self.training_ctx:
                outputs = self.compute_forward(batch, Stage.TRAIN)
                loss = self.compute_objectives(outputs, batch, Stage.TRAIN)
            self.check_loss_isfinite(loss)
            self.scaler.scale(loss / self.grad_accumulation_factor).backward()
        if should_step:
            self.optimizers_step()
        self.seen.append((self.optimizer_step, self.avg_train_loss))
        return loss.detach()


@pytest.mark.parametrize("accum", [1, 2, 4])
def test_a_fit_batch_that_calls_optimizers_step_trains_as_a_plain_loop(accum: int) -> None:
    brain = OwnFitBatch(run_opts={"grad_accumulation_factor": accum, "max_grad_norm": 0.1})
    brain.fit(range(2), batches())
    assert weights(brain.modules.net) == weights(by_hand(2, accum, clip=0.1))
    assert trainable_of(brain).counters["update"] == brain.optimizer_step == 2 * (6 // accum)
    assert [step for step, _ in brain.seen][:6] == [number // accum for number in range(1, 7)]
    assert trainable_of(brain).counters["iteration"] == 12


def test_the_average_of_the_pass_so_far_is_there_in_each_batch() -> None:
    class Noting(OwnFitBatch):
        def fit_batch(self, batch: Any) -> Tensor:
            loss = super().fit_batch(batch)
            self.losses.append(loss.item())
            return loss

    brain = Noting()
    brain.losses = []
    brain.fit(range(1), batches())
    # Two samples in each.
    expected = [0.0, *(math.fsum(brain.losses[:count]) / count for count in range(1, 6))]
    assert [mean for _, mean in brain.seen] == pytest.approx(expected, rel=1e-12)


class ByScaler(Plain):
    """Steps its optimizer by itself, through a scaler, as separation recipes do; counts what it leaves out."""

    def fit_batch(self, batch: Any) -> Tensor:
        with self.training_ctx:
            loss = self.compute_objectives(self.compute_forward(batch, Stage.TRAIN), batch, Stage.TRAIN)
        if loss < 5:
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.modules.parameters(), 0.1)
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.nonfinite_count += 1
            loss.data = torch.tensor(0.0)
        self.optimizer.zero_grad()
        return loss.detach()

    def on_stage_end(self, stage: Stage, stage_loss: float, epoch: int | None = None) -> None:
        self.seen.append((stage_loss, self.nonfinite_count))


def test_a_fit_batch_that_steps_by_itself_trains_as_a_plain_loop_and_counts_by_itself() -> None:
    data = batches()
    data[2] = (data[2][0], data[2][1] + 100)
    brain = ByScaler()
    brain.fit(range(1), data)
    kept = [pair for number, pair in enumerate(data) if number != 2]
    assert weights(brain.modules.net) == weights(by_hand(1, clip=0.1, data=kept))
    assert [count for _, count in brain.seen] == [1]
    assert not brain.scaler.is_enabled()
    brain.fit(range(1), batches())
    assert [count for _, count in brain.seen] == [1, 0]


def test_a_scaler_of_the_users_own_scales_and_steps_by_itself_and_its_state_goes_on(tmp_path: Path) -> None:
    class Scaling(ByScaler):
        def __init__(self, **keywords: Any) -> None:
            super().__init__(**keywords)
            self.scaler = torch.GradScaler("cpu", init_scale=1024.0, growth_interval=4)

    brain = Scaling()
    brain.fit(range(2), batches())
    # A power of two changes no digit.
    assert weights(brain.modules.net) == weights(by_hand(2, clip=0.1))
    assert brain.scaler.get_scale() == 1024.0 * 2 ** (12 // 4)
    Scaling(checkpointer=Checkpointer(tmp_path)).fit(range(1), batches())
    again = Scaling(checkpointer=Checkpointer(tmp_path))
    again.fit(range(2), batches())
    assert again.scaler.state_dict() == brain.scaler.state_dict()
    assert weights(again.modules.net) == weights(brain.modules.net)


def test_under_bf16_training_ctx_may_be_entered_again_and_again_between_steps() -> None:
    class Twice(Plain):
        def fit_batch(self, batch: Any) -> Tensor:
            for _ in range(2):
                with self.training_ctx:
                    loss = self.compute_objectives(self.compute_forward(batch, Stage.TRAIN), batch, Stage.TRAIN)
                loss.backward()
                self.optimizers_step()
            return loss.detach()

    brain = Twice(run_opts={"precision": "bf16", "max_grad_norm": None})
    brain.fit(range(1), batches())
    model = net()
    optimizer = Adam(model.parameters(), 0.1)
    for inputs, target in batches():
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                loss = mse(model(inputs), target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert weights(brain.modules.net) == weights(model)
    assert brain.optimizer_step == 12


def test_evaluation_ctx_computes_in_the_precision_of_an_evaluation() -> None:
    class Evaluating(Plain):
        def evaluate_batch(self, batch: Any, stage: Stage) -> Tensor:
            with self.evaluation_ctx:
                self.seen.append(self.modules.net(batch[0]).dtype)
            return super().evaluate_batch(batch, stage)

    brain = Evaluating(run_opts={"eval_precision": "bf16"})
    brain.evaluate(batches())
    assert set(brain.seen) == {torch.bfloat16}


class GAN(Brain):
    """Two optimizers in attributes of their own, as SpeechBrain's enhance_GAN example."""

    def __init__(self, **keywords: Any) -> None:
        torch.manual_seed(0)
        super().__init__({"generator": nn.Linear(3, 1), "discriminator": nn.Linear(1, 1)}, **keywords)

    def compute_forward(self, batch: Any, stage: Stage) -> Any:
        return self.modules.generator(batch[0])

    def compute_objectives(self, predictions: Any, batch: Any, stage: Stage, optim_name: str = "") -> Any:
        real, simulated = self.modules.discriminator(batch[1]), self.modules.discriminator(predictions)
        loss = mse(predictions, batch[1])
        if optim_name == "generator":
            return loss + mse(simulated, torch.ones_like(simulated))
        if optim_name == "discriminator":
            return loss + mse(real, torch.ones_like(real)) + mse(simulated, torch.zeros_like(simulated))
        return loss

    def fit_batch(self, batch: Any) -> Tensor:
        total = torch.tensor(0.0)
        for name, optimizer in (("generator", self.g_optimizer), ("discriminator", self.d_optimizer)):
            optimizer.zero_grad()
            loss = self.compute_objectives(self.compute_forward(batch, Stage.TRAIN), batch, Stage.TRAIN, name)
            loss.backward()
            optimizer.step()
            total += loss.detach()
        return total

    def init_optimizers(self) -> None:
        self.g_optimizer = Adam(self.modules.generator.parameters(), 0.04)
        self.d_optimizer = SGD(self.modules.discriminator.parameters(), 0.1, momentum=0.9)

    def zero_grad(self, set_to_none: bool = False) -> None:
        self.g_optimizer.zero_grad(set_to_none)
        self.d_optimizer.zero_grad(set_to_none)


def gan_by_hand(epochs: int, data: list[Batch]) -> list[float]:
    """The weights after a plain loop."""
    torch.manual_seed(0)
    generator, critic = nn.Linear(3, 1), nn.Linear(1, 1)
    first = Adam(generator.parameters(), 0.04)
    second = SGD(critic.parameters(), 0.1, momentum=0.9)
    for _ in range(epochs):
        generator.zero_grad()
        critic.zero_grad()
        for inputs, target in data:
            first.zero_grad()
            made = generator(inputs)
            (mse(made, target) + (critic(made) - 1).square().mean()).backward()
            first.step()
            second.zero_grad()
            made = generator(inputs)
            judged = (critic(target) - 1).square().mean() + critic(made).square().mean()
            (mse(made, target) + judged).backward()
            second.step()
    return weights(generator) + weights(critic)


def test_a_gan_with_two_optimizers_of_its_own_trains_as_a_plain_loop() -> None:
    brain = GAN()
    brain.fit(range(3), batches())
    assert weights(brain.modules) == pytest.approx(gan_by_hand(3, batches()), rel=1e-5)
    assert brain.optimizers_dict == {}


def test_a_gan_that_is_interrupted_by_the_end_of_a_fit_goes_on_bit_for_bit(tmp_path: Path) -> None:
    unbroken = GAN()
    unbroken.fit(range(4), batches())
    GAN(checkpointer=Checkpointer(tmp_path)).fit(range(2), batches())
    again = GAN(checkpointer=Checkpointer(tmp_path))
    again.fit(range(4), batches())
    assert weights(again.modules) == weights(unbroken.modules)


# Methods that the default fit_batch calls where they are overridden.


class Freezing(Plain):
    """Two optimizers, of which one steps from the third update on, as recipes with a pretrained encoder."""

    from_update = 2

    def init_optimizers(self) -> None:
        self.first, self.second = (SGD(self.modules.net[number].parameters(), 0.1) for number in (0, 2))
        self.optimizers_dict = {"first": self.first, "second": self.second}

    def freeze_optimizers(self, optimizers: dict[str, Optimizer]) -> dict[str, Optimizer]:
        if self.optimizer_step >= self.from_update:
            return optimizers
        return {"second": optimizers["second"]}


@pytest.mark.parametrize("own_fit_batch", [False, True])
def test_an_optimizer_that_is_frozen_does_not_step_and_its_gradients_wait(own_fit_batch: bool) -> None:
    kind = type("Both", (Freezing, OwnFitBatch), {}) if own_fit_batch else Freezing
    brain = kind(run_opts={"max_grad_norm": 1.0})
    brain.fit(range(2), batches())
    model = net()
    first, second = (SGD(model[number].parameters(), 0.1) for number in (0, 2))
    for updates, (inputs, target) in enumerate(batches() * 2):
        mse(model(inputs), target).backward()
        for optimizer in (first, second) if updates >= 2 else (second,):
            nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert weights(brain.modules.net) == weights(model)
    assert brain.optimizer_step == 12


def test_an_optimizer_that_is_always_frozen_stays_so_at_the_end_of_a_pass_whose_length_nobody_knows() -> None:
    class Stream:
        def __iter__(self) -> Any:
            return iter(batches(10))

    class Never(Freezing):
        from_update = 10**6

    brain = Never(run_opts={"grad_accumulation_factor": 2})
    before = weights(brain.modules.net[0])
    brain.fit(range(1), Stream())
    assert weights(brain.modules.net[0]) == before
    assert brain.optimizer_step == 3


class Counting(Plain):
    """Notes each call that SpeechBrain's ``fit_batch`` makes."""

    def optimizers_step(self) -> None:
        self.seen.append(("step", self.optimizer_step))
        super().optimizers_step()
        self.seen.append(("stepped", self.optimizer_step))

    def check_loss_isfinite(self, loss: Tensor) -> None:
        self.seen.append(("loss", self.step))
        super().check_loss_isfinite(loss)

    def check_gradients(self) -> None:
        self.seen.append(("gradients", self.step))
        super().check_gradients()

    def on_fit_batch_start(self, batch: Any, should_step: bool) -> None:
        self.seen.append(("start", should_step))

    def on_fit_batch_end(self, batch: Any, outputs: Any, loss: Tensor, should_step: bool) -> None:
        self.seen.append(("end", self.optimizer_step))


def test_each_overridden_method_is_called_where_the_original_calls_it() -> None:
    brain = Counting(run_opts={"grad_accumulation_factor": 2, "skip_nonfinite_grads": True})
    brain.fit(range(1), batches(8))
    first = [("start", False), ("loss", 1), ("end", 0)]
    closing = [("start", True), ("loss", 2), ("step", 0), ("gradients", 2), ("stepped", 1), ("end", 1)]
    assert brain.seen[:9] == first + closing
    assert len(brain.seen) == 18
    plain = Plain(run_opts={"grad_accumulation_factor": 2, "skip_nonfinite_grads": True})
    plain.fit(range(1), batches(8))
    assert weights(brain.modules.net) == weights(plain.modules.net)


class OwnStep(Plain):
    """Steps by itself, and does not call ours."""

    def optimizers_step(self) -> None:
        nn.utils.clip_grad_value_(self.modules.parameters(), 0.05)
        for optimizer in self.optimizers_dict.values():
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("accum", [1, 3])
def test_an_optimizers_step_that_steps_by_itself_has_the_gradients_of_the_mean(accum: int) -> None:
    brain = OwnStep(run_opts={"grad_accumulation_factor": accum})
    brain.fit(range(2), batches())
    model = net()
    optimizer = Adam(model.parameters(), 0.1)
    for step, (inputs, target) in enumerate(batches() * 2, 1):
        (mse(model(inputs), target) / accum).backward()
        if step % accum == 0:
            nn.utils.clip_grad_value_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
    assert weights(brain.modules.net) == pytest.approx(weights(model), rel=1e-5)
    assert brain.optimizer_step == 12 // accum


def test_an_overridden_step_keeps_to_the_schedule_and_the_plugins_of_a_run() -> None:
    class Rates:
        every_rank = True

        def __init__(self) -> None:
            rates.clear()

        @hookimpl
        def after_update(self, optim_scheduler: Any) -> None:
            rates.append(optim_scheduler.get_lr())

    rates: list[float] = []
    noam = {"class": "noam", "args": {"optim_type": "SGD", "optim_conf": {"lr": 0.5}, "warmup_steps": 2}}
    trained = []
    for kind in (Counting, Plain):
        brain = run(kind, optim_schedulers={"main": noam}, plugins=[Rates])["model"]["p"]["brain"]
        trained.append((weights(brain.modules.net), [*rates]))
    assert trained[0] == trained[1]
    assert len(rates) == 6


def test_gradients_that_are_not_finite_are_left_out_by_name_and_the_others_step() -> None:
    class Broken(Plain):
        def check_gradients(self) -> None:
            self.modules.net[0].bias.grad.fill_(math.nan)
            super().check_gradients()

    lines: list[str] = []
    sink = logger.add(lambda line: lines.append(str(line)), level="WARNING", format="{message}")
    brain = Broken(run_opts={"skip_nonfinite_grads": True})
    before = [parameter.clone() for parameter in brain.modules.parameters()]
    try:
        brain.fit(range(1), batches(2))
    finally:
        logger.remove(sink)
    changed = [not torch.equal(*pair) for pair in zip(before, brain.modules.parameters(), strict=True)]
    assert changed == [True, False, True, True]
    assert lines == ["the gradient of 'net.0.bias' is not finite, and is left out\n"]


def test_a_loss_that_is_not_finite_is_counted_once_and_too_many_end_the_training() -> None:
    data = batches()
    data[1] = data[3] = (data[1][0] * math.nan, data[1][1])
    brain = OwnFitBatch(run_opts={"nonfinite_patience": 1})
    with pytest.raises(DivergedError, match=r"^2 losses of this epoch were not finite; lower the learning rate"):
        brain.fit(range(1), data)
    assert (brain.step, brain.nonfinite_count) == (4, 2)
    brain = OwnFitBatch(run_opts={"nonfinite_patience": None})
    brain.fit(range(1), data)
    assert brain.nonfinite_count == 2
    # None of them reached the weights: those of clipping are looked at.
    assert not any(map(math.isnan, weights(brain.modules.net)))


class AroundOurs(Plain):
    """Calls ours, and checks the loss that it has returned once more."""

    def fit_batch(self, batch: Batch) -> Tensor:
        loss = super().fit_batch(batch)
        self.check_loss_isfinite(loss)
        return loss


class BeforeOurs(Plain):
    """Checks a loss, before ours computes it again."""

    def fit_batch(self, batch: Batch) -> Tensor:
        self.check_loss_isfinite(self.compute_objectives(self.compute_forward(batch, Stage.TRAIN), batch, Stage.TRAIN))
        return super().fit_batch(batch)


class Checking(Plain):
    """Has gradients left out before the window ends."""

    def fit_batch(self, batch: Batch) -> Tensor:
        loss = self.compute_objectives(self.compute_forward(batch, Stage.TRAIN), batch, Stage.TRAIN)
        self.check_loss_isfinite(loss)
        loss.backward()
        self.check_gradients()
        self.optimizers_step()
        return loss.detach()


class CheckingWithTwo(Freezing, OwnFitBatch):
    """Two optimizers, which both have gradients of the loss."""

    from_update = 0


@pytest.mark.parametrize("kind", [OwnFitBatch, AroundOurs, BeforeOurs, Checking, CheckingWithTwo])
def test_two_losses_that_are_not_finite_are_two_whoever_looks_at_them(kind: type[Plain]) -> None:
    data = batches()
    data[1] = data[3] = (data[1][0], data[1][1] * math.nan)
    brain = kind(run_opts={"nonfinite_patience": 2})
    brain.fit(range(1), data)
    assert brain.nonfinite_count == 2
    assert not any(map(math.isnan, weights(brain.modules.net)))
    with pytest.raises(DivergedError, match=r"\b2 (of its )?losses"):
        kind(run_opts={"nonfinite_patience": 1}).fit(range(1), data)


def test_gradients_that_are_not_finite_without_such_a_loss_end_a_fit_batch_of_its_own_too() -> None:
    class Rooted(OwnFitBatch):
        def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> Any:
            return (predictions - predictions.detach()).abs().sqrt().mean()

    brain = Rooted(run_opts={"nonfinite_patience": 5})
    with pytest.raises(DivergedError, match="the loss is finite, but 6 of its gradients in this epoch were not finite"):
        brain.fit(range(1), batches())
    assert brain.nonfinite_count == 0
    assert not any(map(math.isnan, weights(brain.modules.net)))


class OwnAverage(Plain):
    """The loss of a pass is that of its last batch."""

    def update_average(self, loss: Tensor, avg_loss: float) -> float:
        self.seen.append((self.step, loss.requires_grad, avg_loss))
        return loss.item()

    def on_stage_end(self, stage: Stage, stage_loss: float, epoch: int | None = None) -> None:
        self.seen.append((stage.name, stage_loss))


class OwnAverageAndFitBatch(OwnAverage, OwnFitBatch):
    """Likewise, with a ``fit_batch`` of its own."""


@pytest.mark.parametrize("kind", [OwnAverage, OwnAverageAndFitBatch])
def test_an_average_of_its_own_is_the_loss_of_each_pass(kind: type[OwnAverage]) -> None:
    brain = kind()
    brain.fit(range(1), batches(6), batches(4))
    tested = brain.evaluate(batches(4))
    calls = [entry for entry in brain.seen if entry[0] in (1, 2, 3) and isinstance(entry[1], bool)]
    assert [step for step, _, _ in calls] == [1, 2, 3, 1, 2, 1, 2]
    assert [before for _, _, before in calls][::2][0] == 0.0
    ends = dict(entry for entry in brain.seen if entry[0] in Stage.__members__)
    last = mse(brain.modules.net(batches(4)[-1][0]), batches(4)[-1][1]).item()
    assert ends == {"TRAIN": brain.avg_train_loss, "VALID": last, "TEST": last}
    assert tested == last


def test_the_default_average_is_that_of_batches_alike() -> None:
    class Calling(OwnAverage):
        def update_average(self, loss: Tensor, avg_loss: float) -> float:
            self.losses = [*vars(self).get("losses", ()), loss.item()]
            return Plain.update_average(self, loss, avg_loss)

    brain = Calling()
    brain.fit(range(1), [*batches(6), *batches(3, 3)])
    assert brain.seen == [("TRAIN", pytest.approx(sum(brain.losses) / 4, rel=1e-12))]


# What a Brain has beside.


def test_zero_grad_and_train_sampler_are_called_as_a_pass_begins() -> None:
    class Sampler:
        def set_epoch(self, epoch: int) -> None:
            seen.append(("epoch", epoch))

    class Passing(Plain):
        def zero_grad(self, set_to_none: bool = False) -> None:
            seen.append(("zero_grad", set_to_none))
            super().zero_grad(set_to_none)

        def on_stage_start(self, stage: Stage, epoch: int | None = None) -> None:
            seen.append((stage.name, epoch))

        def on_stage_end(self, stage: Stage, stage_loss: float, epoch: int | None = None) -> None:
            seen.append(("end", epoch))

    seen: list[Any] = []
    brain = Passing()
    assert brain.train_sampler is None
    brain.train_sampler = Sampler()
    brain.fit(range(1, 3), batches(4))
    assert seen[:5] == [("TRAIN", 1), ("zero_grad", False), ("epoch", 1), ("zero_grad", True), ("end", 1)]
    assert seen[5:] == [
        (name, value + 1 if value is not False and value is not True else value) for name, value in seen[:5]
    ]


def test_what_is_left_of_a_window_is_dropped_and_what_zero_grad_leaves_are_zeros() -> None:
    brain = OwnFitBatch(run_opts={"grad_accumulation_factor": 4})
    brain.fit(range(1), batches())
    assert {parameter.grad for parameter in brain.modules.parameters()} == {None}
    brain.modules.net(torch.ones(1, 3)).sum().backward()
    brain.zero_grad()
    assert all(torch.equal(own.grad, torch.zeros_like(own)) for own in brain.modules.parameters())


def test_the_names_of_the_device_and_of_what_is_trained() -> None:
    lines: list[str] = []
    sink = logger.add(lambda line: lines.append(str(line)), format="{message}")
    brain = Plain()
    brain.modules.net[0].requires_grad_(False)
    try:
        brain.print_trainable_parameters()
    finally:
        logger.remove(sink)
    assert lines == ["Plain trains 5 of 21 parameters (23.81%)\n"]
    assert (brain.device_type, brain.raw_modules, brain.optimizers_dict) == ("cpu", brain.modules, None)
    assert brain.avg_train_loss == brain.optimizer_step == brain.nonfinite_count == 0
    brain.zero_grad()
    brain.optimizers_step()
    assert brain.optimizer_step == 0


def test_one_that_tells_of_the_parameters_itself_is_called_when_it_is_made() -> None:
    class Telling(Plain):
        told = 0

        def print_trainable_parameters(self) -> None:
            self.told = sum(parameter.numel() for parameter in self.modules.parameters())

    assert Telling().told == 21


@pytest.mark.parametrize("launched", [False, True])
def test_distributed_launch_says_whether_a_launcher_has_started_it(
    launched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0") if launched else monkeypatch.delenv(name, raising=False)
    assert Plain().distributed_launch is launched


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("_compile", "the options compile and jit"),
        ("_wrap_distributed", "launcher"),
        ("profiler", "profile_training"),
        ("tqdm_barcolor", "noprogressbar"),
        ("data_parallel_count", "torchrun"),
    ],
)
def test_a_name_that_ours_does_not_have_says_what_does_it_here(name: str, remedy: str) -> None:
    with pytest.raises(AttributeError, match=f"'Plain' object has no attribute '{name}'; .*{remedy}"):
        getattr(Plain(), name)


# In a config.


def run(model: Any, resume: str = "", **keys: Any) -> Context:
    """A run of a phase ``p`` over six batches, without an optimizer in the config."""
    plugins, optimizer = keys.pop("plugins", []), keys.pop("optimizer", None)
    runner = keys.pop("runner", {"epochs": 1})
    config = {
        "name": "own",
        "plugins": [{"progress_bar": False}, {"metric_log": False}, *plugins],
        "hyper_parameters": {"optimizer": optimizer} if optimizer else {},
        "dataset": [{"name": "d", "class_path": lambda: table(12), "batch_size": 2}],
        "runner": [{"name": "t", "class": "train", "device": "cpu", "grad_clip": 5.0, **runner}],
        "phase": [{"name": "p", "model": model, "dataset_name": "d", "model_args": {"opt_class": None}, **keys}],
    }
    return GeneralTrainer(config, **({"resume": resume} if resume else {})).run()


class Making(Plain):
    """Makes its optimizer by itself."""

    def init_optimizers(self) -> None:
        self.optimizer = Adam(self.modules.parameters(), 0.1)


class MakingByHand(Making, OwnFitBatch):
    """And steps by itself."""


@pytest.mark.parametrize("kind", [Making, MakingByHand])
def test_in_a_config_without_an_optimizer_that_of_the_brain_trains_as_a_plain_loop(kind: type[Making]) -> None:
    context = run(kind, runner={"epochs": 2})
    brain = context["model"]["p"]["brain"]
    assert weights(brain.modules.net) == weights(by_hand(2))
    [scheduler] = context["model"]["p"]["optim_schedulers"].values()
    assert brain.optimizers_dict == {"optimizer": brain.optimizer}
    assert scheduler.optimizer is brain.optimizer
    assert (brain.optimizer_step, context["train_state"]["update"]) == (12, 12)


def test_in_a_config_with_an_optimizer_it_has_the_same_names() -> None:
    context = run(Plain, optimizer={"class": "Adam", "lr": 0.1})
    brain = context["model"]["p"]["brain"]
    assert brain.optimizers_dict == {"main": brain.optimizer}
    assert weights(brain.modules.net) == weights(by_hand())
    several = {name: {"class": "constant", "args": {"optim_type": "SGD", "optim_conf": {"lr": 0.1}, "updated_modules": part}}
               for name, part in (("a", "net.0"), ("b", "net.2"))}  # fmt: skip
    brain = run(Plain, optim_schedulers=several)["model"]["p"]["brain"]
    assert [*brain.optimizers_dict] == ["a", "b"]
    assert not hasattr(brain, "optimizer")


def test_an_optimizer_that_a_brain_keeps_for_itself_stays_in_a_config() -> None:
    class Keeping(Plain):
        def __init__(self, **keywords: Any) -> None:
            super().__init__(**keywords)
            self.optimizer = self.kept = SGD(self.modules.parameters(), 0.1)

    brain = run(Keeping, optimizer={"class": "Adam", "lr": 0.1})["model"]["p"]["brain"]
    assert brain.optimizer is brain.kept


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("kind", "at"),
    [
        (Making, 4),
        (MakingByHand, 4),
        (GAN, 9),
        pytest.param(Making, 9, marks=pytest.mark.slow),
        pytest.param(MakingByHand, 9, marks=pytest.mark.slow),
        pytest.param(GAN, 4, marks=pytest.mark.slow),
    ],
)
def test_optimizers_that_a_brain_makes_in_a_config_go_on_bit_for_bit(
    kind: type[Brain], at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = {"epochs": 2, "save_interval": 3, "accum_grad": 2}
    monkeypatch.setattr(Kill, "at", -1)
    unbroken = run(kind, plugins=[Kill], runner=runner)
    monkeypatch.setattr(Kill, "at", at)
    with pytest.raises(KilledError):
        run(kind, plugins=[Kill], runner=runner)
    monkeypatch.setattr(Kill, "at", -1)
    resumed = run(kind, plugins=[Kill], runner=runner, resume="auto")
    both = [context["model"]["p"]["brain"] for context in (unbroken, resumed)]
    assert weights(both[0].modules) == weights(both[1].modules)
    names = ["g_optimizer", "d_optimizer"] if kind is GAN else ["optimizer"]
    moments = [[getattr(brain, name).state_dict() for name in names] for brain in both]
    assert str(moments[0]) == str(moments[1])
    assert unbroken["train_state"] == resumed["train_state"]


@pytest.mark.parametrize("keys", [
    {"optimizer": {"class": "SGD", "lr": 0.1}},
    {"optim_schedulers": {"main": {"class": "constant", "args": {"optim_type": "SGD", "optim_conf": {"lr": 0.1}}}}},
])  # fmt: skip
def test_in_a_config_with_an_optimizer_that_of_a_brain_is_refused(keys: dict[str, Any]) -> None:
    where = "hyper_parameters.optimizer" if "optimizer" in keys else "phase.p.optim_schedulers"
    with pytest.raises(ConfigError, match=f"{where}: Making.init_optimizers makes those of phase 'p'; remove one or"):
        run(Making, **keys)
