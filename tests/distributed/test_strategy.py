"""Gradients and numbers of a batch on several ranks are those of one process, by a plain torch loop."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

from pipeline import Brain, Stage
from pipeline.compute.trainable import trainable_of
from pipeline.data.batch import EmptySlice
from pipeline.distributed.strategy import broadcast_tensors
from pipeline.distributed.world import PeerError, current_world
from pipeline.engine.phase import begin_on_ranks
from pipeline.errors import DivergedError, ExitCode, PipelineError
from pipeline.optim.schedules import Constant
from tests.distributed.ranks import Ranks

Batch = tuple[Tensor, Tensor]

# Of global batches; the last ones leave ranks without a sample.
SIZES = [8, 8, 7, 8, 6, 5, 8, 2, 1, 3]


def batches(sizes: list[int], bad: int | None = None) -> Iterator[Batch]:
    """Random batches; the last sample of the one with this number is not finite."""
    generator = torch.Generator().manual_seed(1)
    for number, size in enumerate(sizes):
        inputs = torch.randn(size, 6, generator=generator)
        if number == bad:
            inputs[-1, 0] = math.nan
        yield inputs, torch.randint(4, (size,), generator=generator)


class Slices:
    """The slices of global batches that this rank has."""

    def __init__(self, sizes: list[int], bad: int | None = None) -> None:
        self.sizes, self.bad = sizes, bad

    @property
    def num_replicas(self) -> int:
        return current_world().size

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Iterator[Any]:
        world = current_world()
        for inputs, target in batches(self.sizes, self.bad):
            own = inputs.tensor_split(world.size)[world.rank], target.tensor_split(world.size)[world.rank]
            yield own if len(own[0]) else EmptySlice((inputs[:1], target[:1]))


class Streams:
    """Batches of streams, one for each rank, which has a number of its own; nobody knows which."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    @property
    def num_replicas(self) -> int:
        return current_world().size

    def __iter__(self) -> Iterator[Any]:
        return self.of(current_world().rank)

    def of(self, rank: int) -> Iterator[Batch]:
        for inputs, target in batches([4, 3, 5, 2, 6][: self.lengths[rank]]):
            yield inputs + rank, target


class Net(nn.Module):
    """Smooth; of a part nobody makes anything, another has a part in some batches alone."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 16), nn.Linear(16, 4)
        self.odd, self.idle = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

    def forward(self, inputs: Tensor, *, odd: bool) -> Tensor:
        scores: Tensor = self.head(torch.tanh(self.body(inputs)))
        return scores + self.odd if odd else scores


class Classifier(Brain):
    """Logs a number of each batch, and on rank 1 another."""

    some_unused = False

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(current_world().rank)
        net = Net()
        if not self.some_unused:
            del net.idle, net.odd
        super().__init__(
            {"net": net},
            lambda own: torch.optim.SGD(own, lr=0.5, weight_decay=0.01),
            run_opts={"device": "cpu", **options},
        )
        self.means: dict[str, float] = {}
        self.hooked = 0

    def compute_forward(self, batch: Batch, stage: Stage) -> Tensor:
        scores: Tensor = self.modules.net(batch[0], odd=self.some_unused and len(batch[0]) % 2 == 1)
        return scores

    def compute_objectives(self, predictions: Tensor, batch: Batch, stage: Stage) -> Tensor:
        self.log("mean", batch[0].mean())
        if current_world().rank == 1:
            self.log("second", batch[0].mean())
        return nn.functional.cross_entropy(predictions, batch[1])

    def on_fit_batch_start(self, batch: Batch, should_step: bool) -> None:
        self.hooked += 1

    def on_stage_end(self, stage: Stage, stage_loss: float, epoch: int | None = None) -> None:
        self.means = {"loss": stage_loss, **trainable_of(self).numbers.logged.means()}


class SomeUnused(Classifier):
    some_unused = True


class Stepping(Classifier):
    """Its own fit_batch, around ours."""

    def fit_batch(self, batch: Batch) -> Tensor:
        return super().fit_batch(batch)


class SteppingUnused(Stepping):
    some_unused = True


class TwoOptimizers(Classifier):
    def init_optimizers(self) -> None:
        for name in ("body", "head"):
            own = getattr(self.modules.net, name).parameters()
            self.optimizers_dict[name] = torch.optim.SGD(own, lr=0.5, weight_decay=0.01)


class Sparse(Brain):
    """Embeddings whose gradients are sparse."""

    def __init__(self) -> None:
        torch.manual_seed(current_world().rank)
        modules = {"table": nn.EmbeddingBag(20, 4, mode="sum", sparse=True), "head": nn.Linear(4, 1)}
        optimizer = torch.optim.SGD
        super().__init__(
            modules, lambda own: optimizer(own, lr=0.002), run_opts={"device": "cpu", "max_grad_norm": None}
        )

    def compute_forward(self, batch: Batch, stage: Stage) -> Tensor:
        scores: Tensor = self.modules.head(self.modules.table(batch[0].abs().mul(5).long()))
        return scores.squeeze(1)

    def compute_objectives(self, predictions: Tensor, batch: Batch, stage: Stage) -> Tensor:
        return (predictions - batch[1]).square().mean()


class ByItself(Classifier):
    """Goes backward by itself, and steps an optimizer that nothing of ours knows."""

    def init_optimizers(self) -> None:
        self.own = torch.optim.SGD(self.modules.parameters(), lr=0.5, weight_decay=0.01)

    def fit_batch(self, batch: Batch) -> Tensor:
        with self.no_sync(self.step % self.grad_accumulation_factor > 0):
            loss = self.compute_objectives(self.compute_forward(batch, Stage.TRAIN), batch, Stage.TRAIN)
            self.backward(loss / self.grad_accumulation_factor)
        if self.step % self.grad_accumulation_factor == 0:
            self.apply()
        return loss.detach()

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def apply(self) -> None:
        nn.utils.clip_grad_norm_(self.modules.parameters(), self.max_grad_norm)
        self.own.step()
        self.own.zero_grad()


class ByScaler(ByItself):
    """Steps the optimizer that ours has made, through a scaler of its own."""

    def init_optimizers(self) -> None:
        Classifier.init_optimizers(self)
        self.scaler = torch.GradScaler("cpu", init_scale=1024.0, growth_interval=4)

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()

    def apply(self) -> None:
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.modules.parameters(), self.max_grad_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


class ByOptimizersStep(ByItself):
    """Has ours end a window."""

    init_optimizers = Classifier.init_optimizers

    def apply(self) -> None:
        self.optimizers_step()


class ByTurns(ByOptimizersStep):
    """Every other batch is trained on by ours."""

    def fit_batch(self, batch: Batch) -> Tensor:
        return Classifier.fit_batch(self, batch) if self.step % 2 else super().fit_batch(batch)


class WithoutBackward(ByItself):
    """Gradients of which nothing of ours knows."""

    def backward(self, loss: Tensor) -> None:
        parameters = list(self.modules.parameters())
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = gradient


BY_THEMSELVES = [ByItself, ByScaler, ByOptimizersStep]
KINDS = {
    kind.__name__: kind
    for kind in (
        Classifier,
        SomeUnused,
        Stepping,
        SteppingUnused,
        TwoOptimizers,
        *BY_THEMSELVES,
        ByTurns,
        WithoutBackward,
    )
}


def fitted(kind: str, data: Any, **options: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The weights after a fit, on each rank; and its numbers."""
    brain = KINDS[kind](**options)
    begin_on_ranks([brain.modules], 0)
    brain.fit(range(2), data, progressbar=False)
    numbers = {
        **brain.means,
        **trainable_of(brain).counters,
        "hooked": brain.hooked,
        "bad": trainable_of(brain).numbers.loss.nonfinite,
    }
    assert trainable_of(brain).strategy
    return brain.modules.state_dict(), {**numbers, "reason": trainable_of(brain).strategy.reason}


def by_hand(
    kind: str, whole: list[Batch], accum: int = 1, clip: float = 5.0, epochs: int = 2
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The same by a plain loop, of one process."""
    brain = KINDS[kind]()
    net, optimizer = brain.modules["net"], torch.optim.SGD(brain.modules.parameters(), lr=0.5, weight_decay=0.01)
    for _ in range(epochs):
        window, losses, samples, finite = 0, 0.0, 0, True
        for number, batch in enumerate(whole, 1):
            size = len(batch[1])
            loss = nn.functional.cross_entropy(net(batch[0], odd=brain.some_unused and bool(size % 2)), batch[1])
            (loss * size).backward()
            window += size
            finite = finite and bool(loss.isfinite())
            if loss.isfinite():
                losses, samples = losses + loss.item() * size, samples + size
            if number % accum == 0 or number == len(whole):
                for parameter in net.parameters():
                    if parameter.grad is not None:
                        parameter.grad /= window
                nn.utils.clip_grad_norm_(net.parameters(), clip)
                if finite:
                    optimizer.step()
                optimizer.zero_grad()
                window, finite = 0, True
    return brain.modules.state_dict(), {"loss": losses / samples}


def assert_same(found: tuple[dict[str, Tensor], dict[str, Any]], expected: tuple[dict[str, Tensor], Any]) -> None:
    """Within 1e-6 of the largest of each tensor; and numbers within 1e-6."""
    assert found[0].keys() == expected[0].keys()
    for name, own in found[0].items():
        assert (own - expected[0][name]).abs().max() <= 1e-6 * expected[0][name].abs().max(), name
    assert found[1]["loss"] == pytest.approx(expected[1]["loss"], rel=1e-6)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("accum", "clip"), [(1, 0.05), (3, 5.0)])
@pytest.mark.parametrize("kind", ["Classifier", "Stepping", "TwoOptimizers"])
def test_weights_are_those_of_one_process(
    two_ranks: Ranks, three_ranks: Ranks, kind: str, accum: int, clip: float
) -> None:
    if kind == "TwoOptimizers" and clip < 1:
        pytest.skip("each of its optimizers clips its own gradients")
    expected = by_hand(kind, list(batches(SIZES)), accum, clip)
    for ranks in (two_ranks, three_ranks):
        results = ranks(fitted, kind, Slices(SIZES), grad_accumulation_factor=accum, max_grad_norm=clip)
        for result in results:
            assert_same(result, expected)
            assert all(torch.equal(own, results[0][0][name]) for name, own in result[0].items())
            assert result[1]["samples"] == 2 * sum(SIZES)
            assert result[1]["update"] == 2 * math.ceil(len(SIZES) / accum)
            assert result[1]["mean"] == pytest.approx(results[0][1]["mean"])
        assert [bool(numbers["reason"]) for _, numbers in results] == [kind != "Classifier"] * ranks.size


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("kind", [kind.__name__ for kind in (*BY_THEMSELVES, ByTurns)])
def test_a_fit_batch_that_steps_by_itself_has_the_gradients_of_all_ranks(
    two_ranks: Ranks, three_ranks: Ranks, kind: str
) -> None:
    expected = by_hand(kind, list(batches(SIZES)), clip=0.05)
    for ranks in (two_ranks, three_ranks):
        results = ranks(fitted, kind, Slices(SIZES), max_grad_norm=0.05)
        for result in results:
            assert_same(result, expected)
            assert all(torch.equal(own, results[0][0][name]) for name, own in result[0].items())
            assert (result[1]["samples"], result[1]["update"]) == (2 * sum(SIZES), 2 * len(SIZES))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("kind", [kind.__name__ for kind in BY_THEMSELVES])
def test_a_fit_batch_that_accumulates_by_itself_has_the_gradients_of_all_ranks(three_ranks: Ranks, kind: str) -> None:
    expected = by_hand(kind, list(batches([8] * 6)), accum=3)
    for result in three_ranks(fitted, kind, Slices([8] * 6), grad_accumulation_factor=3):
        assert_same(result, expected)
        assert result[1]["update"] == 4


def test_two_equal_fits_come_to_the_same_bits(three_ranks: Ranks) -> None:
    first, second = (three_ranks(fitted, "Classifier", Slices(SIZES), grad_accumulation_factor=2) for _ in range(2))
    for (ours, numbers), (theirs, others) in zip(first, second, strict=True):
        assert all(torch.equal(own, theirs[name]) for name, own in ours.items())
        assert numbers == others


def test_a_rank_without_samples_has_no_hook_and_no_number_of_the_batch(three_ranks: Ranks) -> None:
    results = three_ranks(fitted, "Classifier", Slices([6, 1, 2]))
    assert [numbers["hooked"] for _, numbers in results] == [6, 4, 2]
    whole = list(batches([6, 1, 2]))
    assert results[0][1]["mean"] == pytest.approx(torch.cat([inputs for inputs, _ in whole]).mean().item())
    own = torch.cat([whole[0][0][2:4], whole[2][0][1:2]]).mean().item()
    # Only rank 1 has logged it; all report it.
    assert [numbers["second"] for _, numbers in results] == pytest.approx([own] * 3)


@pytest.mark.parametrize("kind", ["SomeUnused", "SteppingUnused"])
def test_a_parameter_without_a_gradient_has_none_on_all_ranks(three_ranks: Ranks, kind: str) -> None:
    # Of 2, no rank has an odd slice, or rank 0 and 1 have; weight decay would show a gradient of zeros.
    results = three_ranks(fitted, kind, Slices([6, 2, 7]), find_unused_parameters=True, max_grad_norm=None)
    for weights, _ in results:
        assert torch.equal(weights["net.idle"], torch.ones(4))
        assert torch.equal(weights["net.odd"], results[0][0]["net.odd"])
    # As one process computes slices, one after the other.
    brain = KINDS[kind]()
    net, optimizer = brain.modules["net"], torch.optim.SGD(brain.modules.parameters(), lr=0.5, weight_decay=0.01)
    for inputs, target in [*batches([6, 2, 7])] * 2:
        for part, labels in zip(inputs.tensor_split(3), target.tensor_split(3), strict=True):
            if len(labels):
                loss = nn.functional.cross_entropy(net(part, odd=len(labels) % 2 == 1), labels)
                (loss * len(labels) / len(target)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, own in brain.modules.state_dict().items():
        assert (own - results[0][0][name]).abs().max() <= 1e-6 * own.abs().max(), name


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("accum", [1, 2])
@pytest.mark.parametrize("kind", ["Classifier", "Stepping"])
@pytest.mark.parametrize("lengths", [[2, 5, 0], [3, 1, 1]])
def test_streams_go_on_until_all_have_ended(three_ranks: Ranks, kind: str, lengths: list[int], accum: int) -> None:
    streams = Streams(lengths)
    of_ranks = [list(streams.of(rank)) for rank in range(3)]
    whole = []
    for number in range(max(lengths)):
        parts = [own[number] for own in of_ranks if number < len(own)]
        whole.append((torch.cat([inputs for inputs, _ in parts]), torch.cat([target for _, target in parts])))
    expected = by_hand(kind, whole, accum)
    for result in three_ranks(fitted, kind, streams, grad_accumulation_factor=accum):
        assert_same(result, expected)
        assert result[1]["samples"] == 2 * sum(len(target) for _, target in whole)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("kind", "accum"),
    [("Classifier", 1), ("Classifier", 2), ("Stepping", 1), ("Stepping", 2), ("ByOptimizersStep", 1), ("ByScaler", 1)],
)
def test_a_loss_that_is_not_finite_on_one_rank_is_discarded_by_all(two_ranks: Ranks, kind: str, accum: int) -> None:
    expected = by_hand(kind, list(batches(SIZES, bad=3)), accum)
    for result in two_ranks(fitted, kind, Slices(SIZES, bad=3), grad_accumulation_factor=accum):
        assert_same(result, expected)
        assert result[1]["bad"] == 1


def diverging(kind: str) -> str:
    """What is raised on this rank, where every batch has a sample that is not finite."""
    brain = KINDS[kind](nonfinite_patience=1)
    begin_on_ranks([brain.modules], 0)
    data = Slices([4] * 6)
    generator = iter(data)
    bad = [(inputs * (math.nan if current_world().rank else 1), target) for inputs, target in generator]
    try:
        brain.fit(range(1), Given(bad), progressbar=False)
    except DivergedError as error:
        return str(error)
    return ""


class Given(Slices):
    """These batches."""

    def __init__(self, given: list[Batch]) -> None:
        super().__init__([0] * len(given))
        self.given = given

    def __iter__(self) -> Iterator[Any]:
        return iter(self.given)


@pytest.mark.parametrize("kind", ["Classifier", "Stepping"])
def test_training_that_diverges_on_one_rank_ends_all_alike(two_ranks: Ranks, kind: str) -> None:
    messages = two_ranks(diverging, kind)
    assert messages[0] == messages[1]
    assert "'loss' is nan: 2 of its losses in this epoch were not finite, the first in iteration 1" in messages[0]


def found_by_the_fingerprint(kind: str) -> str:
    """What is raised on this rank."""
    try:
        fitted(kind, Slices([4, 4]))
    except PipelineError as error:
        return str(error)
    return ""


def test_a_step_with_gradients_of_one_rank_is_found_after_the_first_update() -> None:
    ranks = Ranks(2)
    messages = ranks(found_by_the_fingerprint, "WithoutBackward")
    ranks.stop()
    assert all(
        "rank 1 on" in message and "net.body" in message and "through optimize" in message for message in messages
    )


class Lazy(Sparse):
    """Its table gets what Adam makes of the rows of a batch; the momenta of the others stay."""

    def on_fit_start(self) -> None:
        super().on_fit_start()
        options = {"lr": 0.002, "eps": 1e-3, "weight_decay": 0.1}
        self.bind("", {"main": Constant("Adam", options, self.modules, grad_clip=0.5, lazy_mode=True)})


class WithSparseAdam(Sparse):
    """Torch's own class, which takes no dense gradients, with clipping."""

    def init_optimizers(self) -> None:
        own = self.modules.table.parameters()
        self.optimizers_dict["table"] = torch.optim.SparseAdam(own, lr=0.002, eps=1e-3)
        self.optimizers_dict["head"] = torch.optim.SGD(self.modules.head.parameters(), lr=0.002)


class SteppingSparse(WithSparseAdam):
    """Goes backward by itself, and steps one by itself."""

    def fit_batch(self, batch: Batch) -> Tensor:
        loss = self.compute_objectives(self.compute_forward(batch, Stage.TRAIN), batch, Stage.TRAIN)
        loss.backward()
        self.optimizers_dict["table"].step()
        self.optimizers_dict["table"].zero_grad()
        self.optimizers_step()
        return loss.detach()


SPARSE = {kind.__name__: kind for kind in (Sparse, Lazy, WithSparseAdam, SteppingSparse)}


def fitted_sparse(kind: str) -> dict[str, Tensor]:
    brain = SPARSE[kind]()
    begin_on_ranks([brain.modules], 0)
    brain.fit(range(3), Slices([6, 5, 1]), progressbar=False)
    return brain.modules.state_dict()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("kind", SPARSE)
def test_sparse_gradients_are_summed(three_ranks: Ranks, kind: str) -> None:
    # Of the last batch of each epoch, two ranks have no sample.
    alone, before = fitted_sparse(kind), SPARSE[kind]().modules.state_dict()
    for weights in three_ranks(fitted_sparse, kind):
        for name, own in weights.items():
            assert (own - alone[name]).abs().max() <= 1e-6 * alone[name].abs().max(), name
            assert not torch.equal(own, before[name])


def drawn() -> tuple[float, float]:
    """What each generator draws next."""
    torch.manual_seed(5)
    random.seed(5)
    begin_on_ranks([Classifier().modules], 5)
    return torch.rand(()).item(), random.random()


def test_rank_0_draws_as_one_process_and_each_other_by_itself(three_ranks: Ranks) -> None:
    results, again = three_ranks(drawn), three_ranks(drawn)
    assert results == again
    assert len(set(results)) == 3
    assert results[0] == drawn()


def buffers_of() -> Tensor:
    brain = Classifier()
    brain.modules["norm"] = nn.BatchNorm1d(2)
    brain.modules["norm"].running_mean.fill_(current_world().rank)
    broadcast_tensors(brain.modules.buffers(), current_world())
    mean: Tensor = brain.modules["norm"].running_mean
    return mean


def test_buffers_of_rank_0_go_to_all(two_ranks: Ranks) -> None:
    assert all(torch.equal(mean, torch.zeros(2)) for mean in two_ranks(buffers_of))


def weights_of_a_rank_that_has_failed() -> str:
    """What rank 1 hears where rank 0 has left before it gave its weights."""
    world = current_world()
    if world.is_main:
        world.report_failure(ValueError(), ExitCode.DIVERGED, "the loss is nan")
        distributed.destroy_process_group()
        return ""
    try:
        broadcast_tensors([torch.zeros(4)], world)
    except PeerError as error:
        return str(error)
    return "no error"


def test_an_exchange_of_weights_that_breaks_names_the_rank_that_failed() -> None:
    ranks = Ranks(2)
    assert ranks(weights_of_a_rank_that_has_failed) == ["", "rank 0 failed: the loss is nan"]
    ranks.stop()
