"""An experiment on two real processes, beside the same in one."""

from __future__ import annotations

import json
import shutil
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from pipeline import ExperimentBase, make_loader
from pipeline.distributed.world import current_world
from pipeline.errors import ConfigError
from pipeline.optim.schedules import Constant
from tests.distributed.ranks import Ranks


def data(count: int, seed: int) -> TensorDataset:
    random = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.rand(count, 3, generator=random), torch.rand(count, 1, generator=random))


class Line(ExperimentBase):
    """Calls a method of its model, clips, and has a part that no loss depends on."""

    def setup_dataloader(self) -> None:
        size = {"batch_size": 4 // current_world().size}
        self.train_loader = make_loader(data(9, seed=0), seed=0, shuffle=True, **size)
        self.valid_loader = make_loader(data(5, seed=1), seed=0, **size)

    def setup_model(self) -> None:
        torch.manual_seed(current_world().rank)  # of other weights on each rank: those of rank 0 count
        parts = {"net": nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), "unused": nn.Linear(2, 2)}
        self.model = nn.ModuleDict(parts)
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=0.5, momentum=0.9)

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.mse_loss(self.model["net"](batch[0]), batch[1])

    def train_batch(self) -> None:
        loss = self.loss(self.read_batch())
        self.optimizer.zero_grad()
        torch.autograd.backward(loss)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 0.05)
        self.optimizer.step()
        self.visualizer.add_scalar("norm", norm, self.iteration)

    def valid(self) -> None:
        losses = [self.loss(batch) * len(batch[0]) for batch in self.valid_loader]
        self.visualizer.add_scalar("valid_loss", torch.stack(losses).sum() / 5, self.iteration)


class Scheduled(Line):
    """Trains through an OptimScheduler, and another part of its model with an optimizer of torch."""

    def setup_model(self) -> None:
        super().setup_model()
        body, head = self.model["net"][0], self.model["net"][2]
        conf = {"optim_type": "SGD", "optim_conf": {"lr": 0.5}, "grad_clip": 0.05}
        self.head = torch.optim.SGD(head.parameters(), lr=0.1)
        self.optimizer = Constant(model=body, **conf)

    def train_batch(self) -> None:
        batch = self.read_batch()
        self.optimizer.step({"loss": self.loss(batch)})
        self.head.zero_grad()
        loss = self.loss(batch)
        torch.autograd.backward(loss, inputs=[*self.model["net"][2].parameters()])
        self.head.step()
        self.visualizer.add_scalar("loss", loss, self.iteration)


class Numbers(IterableDataset[Any]):
    """Five samples for rank 0, three for rank 1; eight for one that is alone."""

    def __iter__(self) -> Iterator[Any]:
        yield from data(8, seed=0)

    def shard(self, rank: int, count: int) -> Iterator[Any]:
        samples = list(data(8, seed=0))
        return iter(samples if count == 1 else samples[:5] if rank == 0 else samples[5:])


class Streamed(Line):
    """A stream that ends earlier on rank 1."""

    def setup_dataloader(self) -> None:
        self.train_loader = make_loader(Numbers(), seed=0, batch_size=2)
        self.valid_loader = make_loader(data(5, seed=1), seed=0)


class Uncut(Line):
    """All ranks would train on the same batches."""

    def setup_dataloader(self) -> None:
        self.train_loader = DataLoader(data(8, seed=0), 2)


def trained(folder: Path, steps: int = 6, kind: type[Line] = Line, *, valid: Any = 2, **args: Any) -> list[float]:
    """The weights after so many steps; three are an epoch, of 9 samples."""
    training = Namespace(max_iteration=steps, valid_interval=valid, save_interval=1)
    given = {"device": "cpu", "nprocs": current_world().size, "output": str(folder), "checkpoint_path": None, **args}
    experiment = kind(Namespace(training=training), Namespace(**given))
    experiment.setup()
    experiment.run()
    if kind.__name__ != "Streamed":
        assert experiment.train_state["samples"] == {4: 13, 6: 18}[steps]
    assert experiment.epoch == {4: 2, 6: 2}[steps]
    return torch.cat([own.detach().flatten() for own in experiment.model.parameters()]).tolist()


def numbers(folder: Path) -> list[tuple[str, int, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["name"], line["step"], line["value"]) for line in lines]


def test_two_ranks_come_to_what_one_process_comes_to(two_ranks: Ranks, tmp_path: Path) -> None:
    valid = ["start", 2]
    expected = trained(tmp_path / "one", valid=valid)
    first, second = two_ranks(trained, tmp_path / "two", valid=valid)
    assert first == second
    assert first == pytest.approx(expected, rel=1e-5)
    for own, of_one in zip(numbers(tmp_path / "two"), numbers(tmp_path / "one"), strict=True):
        assert own[:2] == of_one[:2]
        assert own[2] == pytest.approx(of_one[2], rel=1e-5)
    names = {path.name for path in (tmp_path / "two").iterdir()}
    assert names == {"checkpoints", "config.yaml", "metrics.jsonl", "worker_0.log", "worker_1.log"}
    weights = (tmp_path / "two" / "checkpoints" / "step-000000000006" / "experiment.safetensors").read_bytes()
    assert b"net.0.weight" in weights
    assert b"module." not in weights


def test_an_optim_scheduler_and_an_optimizer_of_torch_train_side_by_side(two_ranks: Ranks, tmp_path: Path) -> None:
    expected = trained(tmp_path / "one", kind=Scheduled)
    first, second = two_ranks(trained, tmp_path / "two", 6, Scheduled)
    assert first == second
    assert first == pytest.approx(expected, rel=1e-5)


def test_two_ranks_go_on_bit_for_bit_and_one_goes_on_from_them(two_ranks: Ranks, tmp_path: Path) -> None:
    whole, _ = two_ranks(trained, tmp_path / "whole")
    two_ranks(trained, tmp_path / "part", 4)
    shutil.copytree(tmp_path / "part", tmp_path / "of_one")
    assert two_ranks(trained, tmp_path / "part") == [whole, whole]
    assert numbers(tmp_path / "part") == numbers(tmp_path / "whole")
    assert trained(tmp_path / "of_one") == pytest.approx(whole, rel=1e-5)


def streamed_by_hand() -> list[float]:
    """Two epochs of three iterations, each on the batches of two ranks together, in a plain loop."""
    torch.manual_seed(0)
    net, rest = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    x, y = data(8, seed=0).tensors
    for _ in range(2):
        for rows in ([0, 1, 5, 6], [2, 3, 7], [4]):
            optimizer.zero_grad()
            torch.autograd.backward(nn.functional.mse_loss(net(x[rows]), y[rows]))
            nn.utils.clip_grad_norm_(net.parameters(), 0.05)
            optimizer.step()
    return torch.cat([own.detach().flatten() for own in (*net.parameters(), *rest.parameters())]).tolist()


@pytest.mark.slow
def test_a_stream_that_ends_earlier_on_a_rank_takes_part_with_no_weight(two_ranks: Ranks, tmp_path: Path) -> None:
    first, second = two_ranks(trained, tmp_path / "two", 6, Streamed)
    assert first == second
    assert first == pytest.approx(streamed_by_hand(), rel=1e-5)
    two_ranks(trained, tmp_path / "part", 4, Streamed)
    assert two_ranks(trained, tmp_path / "part", 6, Streamed) == [first, first]


def refusal(folder: Path, kind: type[Line] = Line, **args: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        trained(folder, kind=kind, **args)
    return str(caught.value)


def test_processes_that_were_not_asked_for_are_refused(two_ranks: Ranks, tmp_path: Path) -> None:
    message = (
        "args.nprocs: is 1, and a launcher has started 2 of them; start the script with torchrun --nproc-per-node 1"
    )
    assert two_ranks(refusal, tmp_path, nprocs=1) == [message] * 2


def test_a_loader_that_gives_all_ranks_the_same_batches_is_refused(two_ranks: Ranks, tmp_path: Path) -> None:
    for text in two_ranks(refusal, tmp_path, Uncut):
        assert "a DataLoader that was not made for 2 ranks gives all the same batches; make it with make_loader" in text
