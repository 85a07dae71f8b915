"""Sparse gradients: ``lazy_mode`` steps the rows that a batch has used, as the optimizer steps dense ones."""

from __future__ import annotations

import copy
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from loguru import logger
from torch import Tensor, nn

from pipeline import GeneralTrainer
from pipeline.errors import ConfigError, DataError
from pipeline.optim.optim_scheduler import OptimScheduler, optimize
from pipeline.optim.schedules import Constant, TorchSchedule
from tests.training.conftest import in_turn

USED = torch.tensor([7, 1, 4])


class Table(nn.Module):
    """A table of numbers, of which rows are summed up, and a layer."""

    def __init__(self, rows: int = 10, *, sparse: bool = True) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.words = nn.EmbeddingBag(rows, 4, mode="sum", sparse=sparse)
        self.head = nn.Linear(4, 1)

    def forward(self, ids: Tensor) -> Tensor:
        scores: Tensor = self.head(self.words(ids))
        return scores


def loss_of(model: nn.Module, ids: Tensor, seed: int) -> Tensor:
    targets = torch.randn(len(ids), 1, generator=torch.Generator().manual_seed(seed))
    return 0.2 * (model(ids) - targets).square().mean()


def batches(rows: int, count: int = 6, size: int = 5) -> list[Tensor]:
    """Each row is in each batch, and some more than once."""
    random = torch.Generator().manual_seed(0)
    drawn = [torch.randint(rows, (size, 3), generator=random) for _ in range(count)]
    for ids in drawn:
        ids.view(-1)[:rows] = torch.arange(rows)
    return drawn


def small(model: Table) -> Table:
    """A dense model whose table has the used rows alone."""
    dense = Table(len(USED), sparse=False)
    dense.words.weight.data.copy_(model.words.weight.data[USED])
    dense.head.load_state_dict(model.head.state_dict())
    return dense


KINDS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    ("Adam", {"lr": 0.1}),
    ("Adam", {"lr": 0.1, "amsgrad": True, "weight_decay": 0.1, "betas": (0.8, 0.9)}),
    ("Adam", {"lr": 0.1, "fused": True}),
    ("AdamW", {"lr": 0.1, "weight_decay": 0.3}),
    ("Adagrad", {"lr": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.2, "lr_decay": 0.1}),
    ("RMSprop", {"lr": 0.1, "centered": True, "momentum": 0.5}),
    ("Adadelta", {"lr": 0.1}),
    ("Adamax", {"lr": 0.1}),
    ("NAdam", {"lr": 0.1}),
    ("RAdam", {"lr": 0.1}),
]


@in_turn("clip", [{}, {"grad_clip": 0.05}, {"grad_clip_value": 0.01}])
@in_turn(("kind", "options"), KINDS)
def test_used_rows_get_what_the_optimizer_makes_of_a_dense_table_of_them(
    kind: str, options: dict[str, Any], clip: dict[str, float]
) -> None:
    model = Table()
    dense, before = small(model), model.words.weight.detach().clone()
    ours = Constant(kind, options, model, lazy_mode=True, **{"grad_clip": None, **clip})
    theirs = getattr(torch.optim, kind)(dense.parameters(), **options)
    for seed, ids in enumerate(batches(len(USED))):
        optimize(loss_of(model, USED[ids], seed), [ours])
        theirs.zero_grad()
        loss_of(dense, ids, seed).backward()
        if "grad_clip" in clip:
            assert nn.utils.clip_grad_norm_(dense.parameters(), clip["grad_clip"]) > clip["grad_clip"]
        if "grad_clip_value" in clip:
            assert max(own.grad.abs().max() for own in dense.parameters() if own.grad is not None) > 0.01
            nn.utils.clip_grad_value_(dense.parameters(), clip["grad_clip_value"])
        theirs.step()
    torch.testing.assert_close(model.words.weight[USED], dense.words.weight, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model.head.weight, dense.head.weight, rtol=1e-5, atol=1e-6)
    others = [row for row in range(10) if row not in USED]
    assert torch.equal(model.words.weight[others], before[others])
    assert not torch.equal(model.words.weight[USED], before[USED])


def test_adam_by_hand_leaves_rows_and_moments_alone_that_a_batch_has_not_used() -> None:
    model = Table()
    ours = Constant("Adam", {"lr": 0.1}, model, grad_clip=None, lazy_mode=True)
    weight = model.words.weight.detach().clone().double()
    first, second = torch.zeros_like(weight), torch.zeros_like(weight)
    random = torch.Generator().manual_seed(1)
    for step in range(1, 9):
        ids = torch.randint(10, (2, 2), generator=random)
        loss = loss_of(model, ids, step)
        [sparse] = torch.autograd.grad(loss, [model.words.weight], retain_graph=True)
        gradient = sparse.to_dense().double()
        for row in ids.unique():
            first[row] = 0.9 * first[row] + 0.1 * gradient[row]
            second[row] = 0.999 * second[row] + 0.001 * gradient[row] ** 2
            mean, square = first[row] / (1 - 0.9**step), second[row] / (1 - 0.999**step)
            weight[row] -= 0.1 * mean / (square.sqrt() + 1e-8)
        optimize(loss, [ours])
    torch.testing.assert_close(model.words.weight.double(), weight, rtol=1e-5, atol=1e-6)
    state = ours.optimizer.state[model.words.weight]
    torch.testing.assert_close(state["exp_avg"].double(), first, rtol=1e-5, atol=1e-6)
    assert (state["step"], state["exp_avg_sq"].shape) == (8, (10, 4))


def test_its_state_is_that_of_dense_gradients_and_goes_on_with_them() -> None:
    lazy, dense = Table(), Table(sparse=False)
    ours = Constant("Adam", {"lr": 0.1}, lazy, grad_clip=None, lazy_mode=True)
    theirs = Constant("Adam", {"lr": 0.1}, dense, grad_clip=None)
    for seed, ids in enumerate(batches(10)):
        optimize(loss_of(lazy, ids, seed), [ours])
    dense.load_state_dict(lazy.state_dict())
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
    # All rows are in it.
    ids = batches(10, 1)[0]
    for model, scheduler in ((lazy, ours), (dense, theirs)):
        optimize(loss_of(model, ids, 9), [scheduler])
    torch.testing.assert_close(lazy.words.weight, dense.words.weight, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", ["Adam", "SparseAdam"])
def test_a_window_of_batches_steps_once_with_the_mean_over_their_samples(kind: str) -> None:
    model = Table()
    dense = small(model)
    own = [model.words.weight] if kind == "SparseAdam" else [*model.parameters()]
    [parameter.requires_grad_(False) for parameter in model.parameters() if parameter is not own[0] and len(own) == 1]
    ours = Constant(kind, {"lr": 0.1}, model, grad_clip=0.5, accum_grad=3, lazy_mode=kind == "Adam")
    theirs = torch.optim.Adam(dense.parameters() if len(own) > 1 else [dense.words.weight], lr=0.1, eps=1e-8)
    sizes = (5, 2, 3)
    for window in range(4):
        theirs.zero_grad()
        for number, size in enumerate(sizes):
            ids = torch.randint(3, (size, 3), generator=torch.Generator().manual_seed(10 * window + number))
            ids.view(-1)[:3] = torch.arange(3)
            optimize(loss_of(model, USED[ids], number), [ours], samples=size)
            (loss_of(dense, ids, number) * size / sum(sizes)).backward()
        clipped = [each for each in dense.parameters() if len(own) > 1 or each is dense.words.weight]
        nn.utils.clip_grad_norm_(clipped, 0.5)
        theirs.step()
    # SparseAdam adds eps before it corrects the moments.
    tolerance = 1e-4 if kind == "SparseAdam" else 1e-5
    torch.testing.assert_close(model.words.weight[USED], dense.words.weight, rtol=tolerance, atol=1e-5)


def test_a_schedule_of_torch_sets_its_rate() -> None:
    model, dense = Table(), Table(sparse=False)
    options: dict[str, Any] = {"schedule": "StepLR", "args": {"step_size": 2, "gamma": 0.1}, "grad_clip": None}
    ours = TorchSchedule("SGD", {"lr": 0.1}, model, lazy_mode=True, **options)
    theirs = TorchSchedule("SGD", {"lr": 0.1}, dense, **options)
    for seed, ids in enumerate(batches(10)):
        for each, scheduler in ((model, ours), (dense, theirs)):
            optimize(loss_of(each, ids, seed), [scheduler])
    assert ours.get_lr() == theirs.get_lr() < 0.01
    torch.testing.assert_close(model.words.weight, dense.words.weight)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")  # by torch's Adagrad
@pytest.mark.parametrize(
    ("kind", "lazily", "clip"),
    [("Adam", True, 1.0), ("SGD", False, 1.0), ("Adam", True, None), ("Adagrad", False, None)],
)
def test_a_gradient_that_is_not_finite_discards_the_window_and_is_named(
    kind: str, lazily: bool, clip: float | None
) -> None:
    model = Table()
    ours = Constant(kind, {"lr": 0.1}, model, grad_clip=clip, lazy_mode=lazily)
    ours.check_gradients = True
    optimize(loss_of(model, USED[None], 0), [ours])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    # Finite itself, with a gradient that is not.
    loss = model.words(USED[None]).square().sum() + 0 * model.head.weight.sum()
    model.words.weight.register_hook(lambda gradient: gradient * math.inf)
    optimize(loss, [ours])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert (ours.guard.read(), ours.guard.parameter) == (1, "words.weight")


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("fused", [True, False])
def test_a_batch_without_an_id_steps_the_rest_alone(fused: bool, norm_type: float) -> None:
    model = Table()
    options = {"lr": 0.1, "fused": fused}
    ours = Constant("Adam", options, model, grad_clip=0.01, grad_norm_type=norm_type, lazy_mode=True)
    for ids in (USED, USED[:0], USED):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        rows = model.words(ids, torch.zeros(1, dtype=torch.int64))
        assert optimize((model.head(rows) - 1).square().mean(), [ours]) == (True, True)
        assert torch.equal(model.words.weight, before["words.weight"]) == (ids.numel() == 0)
        assert not torch.equal(model.head.bias, before["head.bias"])
    assert ours.optimizer.state[model.words.weight]["step"] == 3


def test_what_cannot_step_single_rows_says_so_before_the_first_step() -> None:
    without = (
        "Adam takes no sparse gradients, and 'words.weight' gets some; set lazy_mode: true, which steps only the rows"
    )
    with pytest.raises(ConfigError, match=without):
        Constant("Adam", {"lr": 0.1}, Table())
    with pytest.raises(ConfigError, match="Adagrad with weight_decay takes no sparse gradients"):
        Constant("Adagrad", {"lr": 0.1, "weight_decay": 0.1}, Table())
    for kind, options in (("ASGD", {"lr": 0.1}), ("LBFGS", {}), ("SparseAdam", {})):
        with pytest.raises(
            ConfigError, match=f"lazy_mode: {kind} cannot step single rows; leave it out, or use .*Adam, "
        ):
            Constant(kind, options, Table(), lazy_mode=True)


class OwnAdam(torch.optim.Adam):
    """Knows what to do with sparse gradients."""


class Gate(nn.Module):
    """Has an attribute of that name, and dense gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.sparse = nn.Parameter(torch.ones(3)), True


def test_what_may_well_take_its_gradients_is_not_refused() -> None:
    Constant(OwnAdam, {"lr": 0.1}, Table())
    Constant("Adam", {"lr": 0.1}, Gate())
    groups = [{"params": "words.*", "weight_decay": 0}]
    Constant("SGD", {"lr": 0.1, "weight_decay": 0.1}, Table(), groups=groups)
    with pytest.raises(
        ConfigError, match=r"SGD with weight_decay takes no sparse gradients, and 'words.weight' gets some"
    ):
        Constant("SGD", {"lr": 0.1}, Table(), groups=[{"params": "words.*", "weight_decay": 0.1}])


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
def test_the_optimizers_that_take_sparse_gradients_themselves_need_no_lazy_mode() -> None:
    for kind in ("SGD", "Adagrad"):
        model, dense = Table(), Table(sparse=False)
        pairs = [(each, Constant(kind, {"lr": 0.1}, each, grad_clip=0.3)) for each in (model, dense)]
        for seed, ids in enumerate(batches(10)):
            for each, scheduler in pairs:
                optimize(loss_of(each, ids, seed), [scheduler])
        torch.testing.assert_close(model.words.weight, dense.words.weight)


def test_lazy_mode_without_sparse_gradients_is_warned_of_and_changes_nothing() -> None:
    said: list[str] = []
    number = logger.add(lambda message: said.append(message.record["message"]), level="WARNING")
    pairs: list[tuple[Table, OptimScheduler]] = []
    for lazily in (True, False):
        model = Table(sparse=False)
        pairs.append((model, Constant("Adam", {"lr": 0.1}, model, lazy_mode=lazily)))
        for seed, ids in enumerate(batches(10)):
            optimize(loss_of(model, ids, seed), [pairs[-1][1]])
    logger.remove(number)
    assert said == ["lazy_mode is for sparse gradients, and no module has any: write nn.Embedding(…, sparse=True)"]
    assert torch.equal(pairs[0][0].words.weight, pairs[1][0].words.weight)


def test_a_gradient_that_is_sparse_within_its_rows_is_refused() -> None:
    weight = nn.Parameter(torch.ones(3, 3))
    module = nn.ParameterDict({"own": weight})
    ours = Constant("Adam", {"lr": 0.1}, module, grad_clip=None, lazy_mode=True)
    weight.grad = torch.eye(3).to_sparse()
    with pytest.raises(
        DataError, match=r"sparse in 2 dimensions, of a parameter of shape \(3, 3\); only rows may be left"
    ):
        ours.apply(0)
    assert ours.optimizer.param_groups[0]["params"] == [weight]


CONFIG = """
runner:
  - {name: train_runner, class: train, max_steps: 6, phases: [p], threads: 1}
hyper_parameters:
  optimizer: {class: AdamW, learning_rate: 0.1, weight_decay: 0.1, fused: auto, lazy_mode: true}
dataset:
  - {name: d, class_path: "{workspace}/parts.py:Words", batch_size: 4}
phase:
  - {name: p, model: "{workspace}/parts.py:Net", dataset_name: d, loss: torch.nn.functional.mse_loss}
plugins: [{progress_bar: false}]
"""

PARTS = """
import torch
from torch import nn
from torch.utils.data import Dataset

class Words(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.tensor([index % 5, 2 * index % 7]), torch.tensor([index / 10])

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.EmbeddingBag(9, 4, mode="sum", sparse=True), nn.Linear(4, 1)

    def forward(self, ids):
        return self.head(self.words(ids))
"""


def test_the_short_form_of_a_config_steps_rows(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG, encoding="utf-8")
    (tmp_path / "parts.py").write_text(PARTS, encoding="utf-8")
    context = GeneralTrainer(tmp_path / "config.yaml", [f"output_dir={tmp_path}"]).run()
    entry = context["model"]["p"]
    [group] = entry["optim_schedulers"]["main"].optimizer.param_groups
    assert (group["fused"], group["weight_decay"]) == (True, 0.1)
    ours, parts = entry["model"], sys.modules[type(entry["model"]).__module__]
    by_hand, data = parts.Net(), parts.Words()
    by_hand.words.sparse = False
    # Rows 7 and 8 are in no batch.
    optimizer = torch.optim.AdamW(by_hand.parameters(), lr=0.1, weight_decay=0.1)
    table, untouched = by_hand.words.weight, by_hand.words.weight.detach().clone()
    moments = torch.zeros_like(table), torch.zeros_like(table)
    for begin in range(0, 24, 4):
        ids, targets = map(torch.stack, zip(*(data[begin + index] for index in range(4)), strict=True))
        optimizer.zero_grad()
        nn.functional.mse_loss(by_hand(ids), targets).backward()
        before, state = table.detach().clone(), optimizer.state[table]
        optimizer.step()
        others = [row for row in range(9) if row not in ids]
        table.data[others] = before[others]
        for own, name in zip(moments, ("exp_avg", "exp_avg_sq"), strict=True):
            state[name][others] = own[others]
            own.copy_(state[name])
    torch.testing.assert_close(ours.words.weight, table, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.head.weight, by_hand.head.weight, rtol=1e-5, atol=1e-6)
    assert torch.equal(ours.words.weight[7:], untouched[7:])
