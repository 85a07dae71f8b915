"""Brain.fit and evaluate on two real processes, beside the same in one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from pipeline import Brain, Checkpointer, Context, Stage, hookimpl
from pipeline.compute.trainable import trainable_of
from pipeline.distributed.world import SINGLE, current_world
from pipeline.errors import ConfigError
from tests.distributed.ranks import Ranks


def data(count: int = 11, seed: int = 0) -> TensorDataset:
    random = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.rand(count, 3, generator=random), torch.rand(count, 1, generator=random))


class Line(Brain):
    """A smooth model; notes the mean loss of each pass."""

    losses: list[float]

    def compute_forward(self, batch: Any, stage: Stage) -> Tensor:
        prediction: Tensor = self.modules.net(batch[0])
        return prediction

    def compute_objectives(self, predictions: Tensor, batch: Any, stage: Stage) -> Tensor:
        return nn.functional.mse_loss(predictions, batch[1])

    def on_stage_end(self, stage: Stage, stage_loss: float, epoch: int | None = None) -> None:
        self.losses = [*getattr(self, "losses", []), stage_loss]


def brain(folder: Path | None = None, **options: Any) -> Line:
    torch.manual_seed(current_world().rank)  # of other weights on each rank: those of rank 0 count
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    checkpointer = Checkpointer(folder) if folder else None
    run_opts = {"device": "cpu", "max_grad_norm": 0.05, **options}
    return Line({"net": net}, lambda own: torch.optim.SGD(own, 0.5), run_opts=run_opts, checkpointer=checkpointer)


def fitted(folder: Path | None, epochs: int, **options: Any) -> tuple[list[float], list[float], float]:
    """Weights, mean losses of the passes and the test loss; batches are of 4 samples of all ranks together."""
    trained, show = brain(folder, **options), folder is None
    loader = {"batch_size": 4 // current_world().size, "shuffle": True}
    trained.fit(range(epochs), data(), data(7, seed=1), train_loader_kwargs=loader, progressbar=show)
    weights = torch.cat([own.flatten() for own in trained.modules.parameters()])
    return weights.tolist(), trained.losses, trained.evaluate(data(5, seed=2))


def test_two_ranks_come_to_what_one_process_comes_to(two_ranks: Ranks) -> None:
    expected, (first, second) = fitted(None, 3), two_ranks(fitted, None, 3)
    assert first == second
    for own, of_one in zip(first, expected, strict=True):
        assert own == pytest.approx(of_one, rel=1e-5)


def test_windows_are_those_of_one_process(two_ranks: Ranks) -> None:
    expected = fitted(None, 2, grad_accumulation_factor=2)
    first, second = two_ranks(fitted, None, 2, grad_accumulation_factor=2)
    assert first == second
    assert first[0] == pytest.approx(expected[0], rel=1e-5)


class Everywhere:
    """Counts batches on each rank; rank 1 stops the training."""

    every_rank = True

    def __init__(self) -> None:
        self.batches = 0

    @hookimpl
    def after_batch(self, context: Context) -> None:
        self.batches += 1
        if context["rank"] == 1 and context["train_state"]["iteration"] == 4:
            context.stop("that is enough")


class OnMain(Everywhere):
    """Counts batches on rank 0."""

    every_rank = False


def with_plugins(folder: Path) -> tuple[int, int, int, list[float]]:
    """The iterations, the batches that each plugin has counted, and the weights."""
    trained, plugins = brain(folder), (Everywhere(), OnMain())
    loader = {"batch_size": 4 // current_world().size, "shuffle": True}
    trained.fit(range(50), data(), data(7, seed=1), train_loader_kwargs=loader, plugins=plugins)
    weights = torch.cat([own.flatten() for own in trained.modules.parameters()]).tolist()
    return trainable_of(trained).counters["iteration"], plugins[0].batches, plugins[1].batches, weights


def test_plugins_are_on_each_rank_or_on_the_first_and_a_stop_counts_on_all(two_ranks: Ranks, tmp_path: Path) -> None:
    first, second = two_ranks(with_plugins, tmp_path)
    # The ranks look together some iterations later.
    assert 4 <= first[0] < 150
    assert first == (first[0], first[0], first[0], first[3])
    assert second == (first[0], first[0], 0, first[3])


def cut(folder: Path, name: str) -> Path:
    """A copy of the checkpoints up to the fifth iteration, which is in the second epoch."""
    copy = Path(shutil.copytree(folder, folder.with_name(name)))
    for checkpoint in copy.glob("step-*[6-9]"):
        shutil.rmtree(checkpoint)
    return copy


def test_a_fit_goes_on_on_as_many_ranks_bit_for_bit_and_on_one_nearly(two_ranks: Ranks, tmp_path: Path) -> None:
    folder = tmp_path / "whole"
    whole, _ = two_ranks(fitted, folder, 3, ckpt_interval_steps=1)
    assert (folder / "step-000000000005" / "rank-00001-of-00002.safetensors").is_file()
    resumed, second = two_ranks(fitted, cut(folder, "part"), 3)
    assert resumed == second
    assert resumed[0] == whole[0]
    assert resumed[1] == whole[1][-4:]
    on_one = fitted(cut(folder, "of_one"), 3)
    for own, of_two in zip(on_one, (whole[0], whole[1][-4:], whole[2]), strict=True):
        assert own == pytest.approx(of_two, rel=1e-5)


def debugged(folder: Path) -> tuple[bool, float]:
    own = brain(folder, debug=True)
    own.fit(range(2), data(), train_loader_kwargs={"batch_size": 2})
    return any(folder.iterdir()) if folder.exists() else False, own.evaluate(data())


def test_the_checkpoints_of_a_debug_run_are_in_the_folder_of_rank_0(two_ranks: Ranks, tmp_path: Path) -> None:
    (kept, loss), (_, other) = two_ranks(debugged, tmp_path / "kept")
    assert not kept
    assert loss == other


def refused() -> str:
    loader = DataLoader(data(), 2)
    with pytest.raises(ConfigError) as caught:
        brain().fit(range(1), loader)
    brain().fit(range(1), DataLoader(data(12), 2, sampler=DistributedSampler(data(12))))
    return str(caught.value)


def test_a_loader_that_gives_all_ranks_the_same_batches_is_refused(two_ranks: Ranks) -> None:
    message = (
        "train_set: a DataLoader that was not made for 2 ranks gives all the same batches; make it with make_loader"
    )
    assert [text.startswith(message) for text in two_ranks(refused)] == [True, True]


def test_a_fit_in_one_process_joins_nobody() -> None:
    fitted(None, 1)
    assert current_world() is SINGLE
