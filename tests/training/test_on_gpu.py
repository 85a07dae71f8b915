"""What is different on a GPU: nobody waits for it, and it may compute in 16 bits."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import Dataset

from pipeline import Brain, Context, Stage, hookimpl
from pipeline.compute.trainable import trainable_of
from pipeline.data.batch import to_device
from pipeline.errors import DivergedError, ExitCode
from pipeline.metrics.meters import Meter
from pipeline.optim.schedules import Constant
from pipeline.optim.stepping import close_windows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    # What the tests of waiting rest on; torch says so once.
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature:UserWarning"),
]

Make = Callable[[Any], Optimizer]
Batch = tuple[Tensor, Tensor, Tensor]

FUSED: dict[str, Make] = {
    "Adam": lambda parameters: Adam(parameters, 0.01, fused=True),
    "AdamW": lambda parameters: AdamW(parameters, 0.01, weight_decay=0.1, fused=True),
    "SGD": lambda parameters: SGD(parameters, 0.1, fused=True),
    "SGD with momentum": lambda parameters: SGD(parameters, 0.1, momentum=0.9, fused=True),
}
READ: dict[str, Make] = {
    "Adam": lambda parameters: Adam(parameters, 0.01),
    "SGD with momentum": lambda parameters: SGD(parameters, 0.1, momentum=0.9),
}


class Small(Brain):
    """A small network on the GPU. To its loss comes what the batch says, and, in the steps of ``roots``, a root at nought,
    whose slope is not finite."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
        super().__init__({"net": net}, run_opts={"device": "cuda", "noprogressbar": True, **options})
        self._place_modules()
        self.roots: tuple[int, ...] = ()

    def compute_forward(self, batch: Any, stage: Stage) -> Tensor:
        self.predicted: Tensor = self.modules.net(batch[0])
        return self.predicted

    def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> Tensor:
        loss = nn.functional.mse_loss(predictions.float(), batch[1]) + batch[2]
        return loss + (self.modules.net[2].weight * 0).sum().sqrt() if self.step in self.roots else loss


def batches(*added: float) -> list[Batch]:
    """Batches of 8 samples on the GPU, to whose losses these are added: nan and inf spoil the loss alone, not its slope."""
    random = torch.Generator().manual_seed(1)
    made = []
    for each in added:
        inputs = torch.randn(8, 4, generator=random)
        made.append((inputs.cuda(), inputs.sum(1, keepdim=True).sin().cuda(), torch.tensor(each).cuda()))
    return made


def spoiled(batch: Batch) -> Batch:
    """The same with inputs that spoil the loss and all of its slopes."""
    return batch[0] * math.nan, batch[1], batch[2]


def bound(make: Make, clip: float | None = None, patience: int | None = 100, **options: Any) -> tuple[Small, Constant]:
    brain = Small(**options)
    scheduler = Constant(make, {}, brain.modules, grad_clip=clip)
    brain.bind("small", {"main": scheduler}, patience=patience)
    trainable_of(brain).begin_pass()
    return brain, scheduler


def by_hand(make: Make, clip: float | None, used: list[Batch]) -> nn.Module:
    """The network after a loop of one's own over batches that are all finite."""
    net = Small().modules.net
    optimizer = make(net.parameters())
    for inputs, target, added in used:
        optimizer.zero_grad()
        (nn.functional.mse_loss(net(inputs), target) + added).backward()
        if clip:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
    return net


def snapshot(scheduler: Constant) -> list[Tensor]:
    """Weights and the optimizer's state, with its counters, copied."""
    states = [each for state in scheduler.optimizer.state.values() for each in state.values()]
    return [each.detach().clone() for each in (*scheduler.parameters, *states)]


def equal(ones: Any, others: Any) -> bool:
    """Bit for bit."""
    return all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


@contextmanager
def nobody_waits() -> Iterator[None]:
    """An error where the host waits for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextmanager
def waits_counted() -> Iterator[list[str]]:
    """The warnings of torch that the host waits for the GPU."""
    waits: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits += [str(each.message) for each in caught if "called a synchronizing" in str(each.message)]


# Fused optimizers, which are told by the GPU.


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("make", FUSED.values(), ids=FUSED)
def test_with_a_fused_optimizer_no_step_waits_and_bad_losses_are_as_if_they_had_not_been(
    make: Make, clip: float | None
) -> None:
    brain, _ = bound(make, clip)
    first, *others = batches(0.0, 0.0, math.nan, 1.0, math.inf, -math.inf, 0.0)
    others.insert(2, spoiled(first))
    brain.fit_batch(first)
    with nobody_waits():
        for batch in others:
            brain.fit_batch(batch)
    good = [first, others[0], others[3], others[6]]
    assert equal(brain.modules.net.parameters(), by_hand(make, clip, good).parameters())


@pytest.mark.parametrize("spoil", [False, True])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("make", FUSED.values(), ids=FUSED)
def test_a_bad_loss_leaves_weights_state_and_counters_of_a_fused_optimizer_as_they_were(
    make: Make, clip: float | None, spoil: bool
) -> None:
    brain, scheduler = bound(make, clip)
    good, bad = batches(0.0, 0.0 if spoil else math.nan)
    brain.fit_batch(good)
    before = snapshot(scheduler)
    loss = brain.fit_batch(spoiled(bad) if spoil else bad)
    assert equal(snapshot(scheduler), before)
    assert not loss.isfinite().item()
    assert scheduler.optimizer.found_inf is None  # type: ignore[attr-defined]
    assert all(each.grad is None for each in scheduler.parameters)


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("make", FUSED.values(), ids=FUSED)
def test_a_bad_first_loss_changes_nothing_of_what_follows(make: Make, clip: float | None) -> None:
    brain, scheduler = bound(make, clip)
    bad, *good = batches(math.nan, 0.0, 0.0)
    before = copy.deepcopy(brain.modules.state_dict())
    brain.fit_batch(bad)
    assert equal(brain.modules.state_dict().values(), before.values())
    for batch in good:
        brain.fit_batch(batch)
    assert equal(brain.modules.net.parameters(), by_hand(make, clip, good).parameters())
    assert all(each.isfinite().all() for each in snapshot(scheduler))


@pytest.mark.parametrize("make", FUSED.values(), ids=FUSED)
def test_accumulation_waits_for_nothing_and_a_bad_loss_discards_its_window(make: Make) -> None:
    brain = Small()
    scheduler = Constant(make, {}, brain.modules, accum_grad=2, grad_clip=None)
    brain.bind("small", {"main": scheduler}, patience=100)
    trainable_of(brain).begin_pass()
    used = batches(*[0.0] * 4, math.nan, 0.0, 0.0, 0.0)
    for batch in used[:2]:
        brain.fit_batch(batch)
    with nobody_waits():
        for batch in used[2:]:
            brain.fit_batch(batch)
    windows = [(used[0], used[1]), (used[2], used[3]), (used[6], used[7])]
    pairs = [(torch.cat([one[0], two[0]]), torch.cat([one[1], two[1]]), one[2]) for one, two in windows]
    theirs = by_hand(make, None, pairs)
    torch.testing.assert_close([*brain.modules.net.parameters()], [*theirs.parameters()], rtol=1e-3, atol=1e-5)
    assert scheduler.real_step == 4


@pytest.mark.parametrize("make", FUSED.values(), ids=FUSED)
def test_bad_gradients_of_a_finite_loss_are_discarded_and_counted_without_a_wait(make: Make) -> None:
    brain, scheduler = bound(make, clip=0.5)
    used = batches(*[0.0] * 5)
    brain.roots = (3, 5)
    brain.fit_batch(used[0])
    with nobody_waits():
        for batch in used[1:]:
            brain.fit_batch(batch)
    assert (scheduler.guard.read(), scheduler.guard.parameter) == (2, "net.2.weight")
    theirs = by_hand(make, 0.5, [used[0], used[1], used[3]])
    assert equal(brain.modules.net.parameters(), theirs.parameters())


def test_where_nobody_looks_at_losses_clipping_still_discards_and_the_next_window_is_not_judged_by_it() -> None:
    brain, scheduler = bound(FUSED["Adam"], clip=0.5, patience=None)
    used = batches(0.0, 0.0, 0.0)
    brain.roots = (2,)
    for batch in used:
        brain.fit_batch(batch)
        assert scheduler.optimizer.found_inf is None  # type: ignore[attr-defined]
    theirs = by_hand(FUSED["Adam"], 0.5, [used[0], used[2]])
    assert equal(brain.modules.net.parameters(), theirs.parameters())


# Optimizers that cannot skip a step by themselves.


@pytest.mark.parametrize("accum", [1, 2])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("make", READ.values(), ids=READ)
def test_with_another_optimizer_there_is_one_wait_a_window(make: Make, clip: float | None, accum: int) -> None:
    brain = Small()
    brain.bind("small", {"main": Constant(make, {}, brain.modules, grad_clip=clip, accum_grad=accum)}, patience=100)
    trainable_of(brain).begin_pass()
    used = batches(*[0.0] * 4, math.nan, 0.0)
    for batch in used[:2]:
        brain.fit_batch(batch)
    with waits_counted() as waits:
        for batch in used[2:]:
            brain.fit_batch(batch)
    assert len(waits) == 4 // accum


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("make", READ.values(), ids=READ)
def test_a_bad_loss_leaves_weights_and_state_of_another_optimizer_as_they_were(make: Make, bad: float) -> None:
    brain, scheduler = bound(make)
    used = batches(0.0, bad, 0.0)
    brain.fit_batch(used[0])
    before = snapshot(scheduler)
    brain.fit_batch(used[1])
    assert equal(snapshot(scheduler), before)
    brain.fit_batch(used[2])
    assert equal(brain.modules.net.parameters(), by_hand(make, None, [used[0], used[2]]).parameters())


# What is counted, and when.


@pytest.mark.parametrize("make", [FUSED["Adam"], READ["Adam"]])
def test_bad_losses_are_noticed_when_the_numbers_are_read_with_the_iteration_of_the_first(make: Make) -> None:
    brain, scheduler = bound(make, clip=0.5, patience=1)
    for batch in batches(0.0, math.nan, 0.0, math.inf, 0.0):
        brain.fit_batch(batch)
    with pytest.raises(
        DivergedError, match=r"phase.small: 'loss' is nan: 2 of its .* the first in iteration 2"
    ) as caught:
        trainable_of(brain).check_divergence()
    assert caught.value.exit_code == ExitCode.DIVERGED == 5
    assert (trainable_of(brain).numbers.loss.nonfinite, scheduler.guard.read()) == (2, 0)


@pytest.mark.parametrize("make", [FUSED["Adam"], READ["Adam"]])
def test_bad_gradients_are_noticed_with_their_first_parameter(make: Make) -> None:
    brain, _ = bound(make, clip=0.5, patience=1)
    brain.roots = (2, 4)
    for batch in batches(*[0.0] * 5):
        brain.fit_batch(batch)
    message = r"2 of its gradients .* up to iteration 5, the first that of 'net.2.weight'"
    with pytest.raises(DivergedError, match=message):
        trainable_of(brain).check_divergence()


def test_the_mean_is_that_of_the_finite_losses() -> None:
    brain, _ = bound(FUSED["Adam"])
    losses = [brain.fit_batch(batch).item() for batch in batches(0.0, math.nan, 0.0, math.inf, 3.0)]
    finite = [each for each in losses if math.isfinite(each)]
    assert len(finite) == 3
    assert trainable_of(brain).numbers.loss.mean() == pytest.approx(sum(finite) / 3, rel=1e-12)


def test_numbers_of_two_devices_have_one_mean() -> None:
    average = Meter()
    for number in (torch.tensor(1.0).cuda(), torch.tensor(2.0), torch.tensor(6.0).cuda()):
        average.add(number, 1)
    assert average.mean() == 3.0


def test_the_state_of_an_open_window_knows_of_its_bad_loss() -> None:
    brain = Small()
    scheduler = Constant(FUSED["Adam"], {}, brain.modules, accum_grad=3)
    brain.bind("small", {"main": scheduler})
    trainable_of(brain).begin_pass()
    good, bad = batches(0.0, math.nan)
    brain.fit_batch(good)
    assert scheduler.state_dict()["window"]["discards"] is False
    brain.fit_batch(bad)
    assert scheduler.state_dict()["window"]["discards"] is True


# 16 bits.

PRECISIONS = [("fp16", torch.float16), ("bf16", torch.bfloat16)]


@pytest.mark.parametrize("make", [FUSED["Adam"], READ["Adam"]], ids=["fused", "not fused"])
@pytest.mark.parametrize(("precision", "dtype"), PRECISIONS)
def test_in_16_bits_the_loss_falls_and_the_weights_stay_in_float32(
    precision: str, dtype: torch.dtype, make: Make
) -> None:
    brain, scheduler = bound(make, clip=1.0, precision=precision)
    losses = []
    for _ in range(60):
        losses += [brain.fit_batch(batch).item() for batch in batches(0.0, 0.0, 0.0)]
    assert brain.predicted.dtype == dtype
    assert (scheduler.scaler is not None) == (precision == "fp16")
    assert {each.dtype for each in snapshot(scheduler)} == {torch.float32}
    assert sum(losses[-3:]) < 0.5 * sum(losses[:3])


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_in_16_bits_a_step_of_a_fused_optimizer_waits_for_nothing(precision: str) -> None:
    brain, _ = bound(FUSED["Adam"], clip=1.0, precision=precision)
    used = batches(0.0, 0.0, math.nan, 0.0)
    brain.fit_batch(used[0])
    with nobody_waits():
        for batch in used[1:]:
            brain.fit_batch(batch)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("make", [FUSED["Adam"], READ["Adam"], FUSED["SGD"]])
def test_in_fp16_a_bad_loss_with_finite_slopes_is_skipped(make: Make, bad: float) -> None:
    brain, scheduler = bound(make, precision="fp16")
    good, spoiling = batches(0.0, bad)
    first = snapshot(scheduler)
    # So often that the scaler has found its scale.
    for _ in range(9):
        brain.fit_batch(good)
    before = snapshot(scheduler)
    assert not torch.equal(before[0], first[0])
    brain.fit_batch(spoiling)
    assert equal(snapshot(scheduler), before)


def test_in_fp16_the_scaler_adapts_to_slopes_that_are_too_large() -> None:
    brain, scheduler = bound(READ["Adam"], precision="fp16")
    scheduler.scaler = torch.amp.GradScaler("cuda", init_scale=2.0**40)
    (batch,) = batches(0.0)
    before = snapshot(scheduler)
    brain.fit_batch(batch)
    assert equal(snapshot(scheduler), before)
    assert scheduler.scaler.get_scale() == 2.0**39


@pytest.mark.parametrize("factors", [(1, 1), (1, 2)])
def test_in_fp16_schedulers_that_share_a_loss_share_a_scaler_where_their_windows_are_the_same(
    factors: tuple[int, int],
) -> None:
    brain = Small(precision="fp16")
    made = {
        part: Constant(READ["Adam"], {}, brain.modules, updated_modules=part, accum_grad=accum)
        for part, accum in zip(("net.0", "net.2"), factors, strict=True)
    }
    brain.bind("small", made)
    trainable_of(brain).begin_pass()
    losses = []
    for _ in range(60):
        losses += [brain.fit_batch(batch).item() for batch in batches(0.0, 0.0)]
    close_windows(trainable_of(brain).schedulers, 0)
    trainable_of(brain).check_divergence()
    assert (made["net.0"].scaler is made["net.2"].scaler) == (factors[0] == factors[1])
    assert sum(losses[-2:]) < 0.5 * sum(losses[:2])


# Whole runs.


def on_gpu(config: Any, **runner: Any) -> dict[str, Any]:
    chosen: dict[str, Any] = config(device="cuda", **runner)
    chosen["phase"][0] |= {"valid_dataset_name": "data"}
    return chosen


def test_a_run_on_a_gpu_is_that_on_a_cpu(config: Any, run: Any) -> None:
    chosen = [on_gpu(config, accum_grad=2, grad_clip=1.0) for _ in range(2)]
    chosen[1]["runner"][0]["device"] = "cpu"
    ours, theirs = map(run, chosen)
    weights, others = (each["model"]["line"]["model"].state_dict() for each in (ours, theirs))
    assert {each.device.type for each in weights.values()} == {"cuda"}
    for name, each in weights.items():
        torch.testing.assert_close(each.cpu(), others[name], rtol=1e-4, atol=1e-6)
    for name in ("loss", "valid_loss"):
        assert ours["metrics"]["line"][name] == pytest.approx(theirs["metrics"]["line"][name], rel=1e-4)
    assert ours["train_state"]["update"] == theirs["train_state"]["update"] == 4


class Named(Dataset[dict[str, Tensor]]):
    """Mappings, as many datasets give them."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        inputs = torch.full((3,), index / 12)
        return {"input": inputs, "target": inputs.sum().view(1)}


FUSED_OPTIONS: list[tuple[dict[str, Any], bool]] = [
    ({}, True), ({"fused": "auto"}, True), ({"fused": False}, False), ({"foreach": True}, False), ({"foreach": None}, False),
    ({"groups": [{"params": "bias", "fused": False}]}, False), ({"groups": [{"params": "bias", "lr": "0.1x"}]}, True),
]  # fmt: skip


@pytest.mark.parametrize(("options", "fused"), FUSED_OPTIONS)
@pytest.mark.parametrize("long", [False, True])
def test_an_optimizer_of_a_config_is_fused_unless_it_says_otherwise(
    config: Any, run: Any, log_lines: list[str], options: dict[str, Any], fused: bool, long: bool
) -> None:
    chosen = config(device="cuda")
    groups = {key: value for key, value in options.items() if key == "groups"}
    conf = {"lr": 0.01, **{key: value for key, value in options.items() if key != "groups"}}
    if long:
        del chosen["hyper_parameters"]["optimizer"]
        scheduler = {"class": "constant", "args": {"optim_type": "Adam", "optim_conf": conf, **groups}}
        chosen["phase"][0]["optim_schedulers"] = {"main": scheduler}
    else:
        chosen["hyper_parameters"]["optimizer"] = {"class": "Adam", **conf, **groups}
    scheduler = run(chosen)["model"]["line"]["optim_schedulers"]["main"]
    assert bool(scheduler.optimizer.defaults["fused"]) is fused
    assert any("Adam is torch's fused one on cuda" in line for line in log_lines) is fused


def test_what_has_no_fused_implementation_runs_on_a_gpu_as_before(config: Any, run: Any) -> None:
    for kind in ("RMSprop", "Rprop"):
        chosen = config(device="cuda")
        chosen["hyper_parameters"]["optimizer"] = {"class": kind, "lr": 0.01}
        assert "fused" not in run(chosen)["model"]["line"]["optim_schedulers"]["main"].optimizer.defaults


def test_a_model_with_sparse_gradients_is_trained_on_a_gpu_by_what_takes_them(config: Any, run: Any) -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(4, 3, sparse=True), nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            predictions: Tensor = self.head(self.table((x[:, 0] > 0).long()))
            return predictions

    chosen = config(device="cuda")
    chosen["phase"][0]["model"] = Sparse
    assert not run(chosen)["model"]["line"]["optim_schedulers"]["main"].optimizer.defaults["fused"]


def test_a_default_run_on_a_gpu_waits_for_nothing_in_its_steps(config: Any, run: Any) -> None:
    class Steps:
        """An error where the third step waits: the first ones make what is made once."""

        @hookimpl
        def before_batch(self, context: Context) -> None:
            torch.cuda.set_sync_debug_mode("error" if context["train_state"]["iteration"] == 2 else "default")

        @hookimpl
        def after_batch(self, context: Context) -> None:
            torch.cuda.set_sync_debug_mode("default")

    chosen = config(device="cuda")
    chosen["hyper_parameters"]["optimizer"] = {"class": "Adam", "lr": 0.01}
    chosen["plugins"] = [*chosen["plugins"], Steps]
    assert run(chosen)["train_state"]["iteration"] == 6


class Norms(TorchDispatchMode):
    """Counts how often the norms of gradients are computed."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._foreach_norm.Scalar
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("make", [FUSED["Adam"], READ["Adam"]])
def test_the_norms_of_the_gradients_are_computed_once_a_step(make: Make) -> None:
    brain, _ = bound(make, clip=0.5)
    used = batches(0.0, 0.0, 0.0)
    brain.fit_batch(used[0])
    with Norms() as norms:
        for batch in used[1:]:
            brain.fit_batch(batch)
    assert norms.count == 2


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_of_mappings_come_to_the_gpu_through_pinned_memory(config: Any, run: Any, workers: int) -> None:
    seen: list[tuple[str, str]] = []

    class Watching(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's own name
            seen.append((input.device.type, self.weight.device.type))
            return super().forward(input)

    chosen = on_gpu(config)
    chosen["dataset"][0] = {"name": "data", "class_path": Named, "batch_size": 4, "num_workers": workers}
    chosen["phase"][0]["model"] = lambda: Watching(3, 1)
    context: Context = run(chosen)
    assert set(seen) == {("cuda", "cuda")}
    batch = next(iter(context["dataset"]["data"]))
    assert all(each.is_pinned() for each in batch.values())
    moved = to_device(batch, context["device"])
    assert all(torch.equal(moved[name].cpu(), each) for name, each in batch.items())


def test_a_deterministic_run_ends_twice_with_the_same_weights_bit_for_bit(config: Any, run: Any) -> None:
    ends = []
    for _ in range(2):
        chosen = on_gpu(config, deterministic=True, epochs=5, precision="bf16")
        chosen["dataset"][0]["shuffle"] = True
        chosen["phase"][0]["model"] = lambda: nn.Sequential(nn.Linear(3, 64), nn.Dropout(), nn.ReLU(), nn.Linear(64, 1))
        ends.append([each.clone() for each in run(chosen)["model"]["line"]["model"].parameters()])
    assert equal(*ends)


def test_a_run_that_diverges_on_a_gpu_ends_with_exit_code_5_and_leaves_the_weights(config: Any, run: Any) -> None:
    class Breaking(nn.Linear):
        calls = 0

        def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's own name
            type(self).calls += 1
            return super().forward(input) * (math.nan if self.calls > 1 else 1)

    chosen = on_gpu(config, nonfinite_patience=1)
    chosen["hyper_parameters"]["optimizer"] = {"class": "Adam", "lr": 0.1, "fused": True}
    chosen["phase"][0]["model"] = lambda: Breaking(3, 1)
    with pytest.raises(DivergedError, match=r"phase.line: 'loss' is nan: 2 of .* the first in iteration 2") as caught:
        run(chosen)
    assert caught.value.exit_code == ExitCode.DIVERGED == 5
