"""A run that an earlier version left in the middle of an epoch is resumed bit for bit as a loop by hand goes on.

``data/stopped_run`` is what was left of it, with ``{folder}`` for where it was. Commit a3bd680 made it by::

    STOP_AFTER=9 pipeline run workspace/config.yaml name=stopped_run

which sends SIGTERM after the third batch of the second epoch, in an open accumulation window. Then the checkpoint of the
first epoch, ``environment.json``, ``context.json``, and ``log.txt`` were deleted, and ``lock`` emptied. Never make it again: every
later version has to resume this one.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from pipeline import Context, GeneralTrainer
from pipeline.errors import DataError

STOPPED = Path(__file__).parent / "data" / "stopped_run"
CHECKPOINT = STOPPED / "run" / "train" / "checkpoints" / "step-000000000009"
SEED, BATCHES, EPOCHS = 3, 6, 3


def points(size: int) -> Tensor:
    return torch.linspace(-1, 1, 3 * size).reshape(size, 3)


def digest(*parts: int | str) -> bytes:
    return hashlib.sha256(":".join(map(str, parts)).encode()).digest()


def batches_of(epoch: int) -> list[tuple[Tensor, Tensor]]:
    """The order of an epoch is drawn from (seed, epoch), the noise of a batch from (seed, epoch, its first sample)."""
    shuffle = torch.Generator().manual_seed(int.from_bytes(digest(SEED, epoch)[:8], "big") >> 1)
    batches = []
    for number, indices in enumerate(torch.randperm(11, generator=shuffle).split(2)):
        seeds = digest(SEED, epoch, "batch", 2 * number)
        python = random.Random(int.from_bytes(seeds[:8], "big"))
        generator = torch.Generator().manual_seed(int.from_bytes(seeds[8:16], "big"))
        noise = torch.stack([0.1 * (torch.randn(3, generator=generator) + python.random()) for _ in indices])
        x = points(11)[indices]
        batches.append((x + noise, x.sum(1, keepdim=True)))
    return batches


def begin_loader() -> None:
    """A torch DataLoader draws the seed of its workers when it begins, although it has none here."""
    torch.empty((), dtype=torch.int64).random_()


def plain(value: Any, tensors: dict[str, Tensor]) -> Any:
    """What the header of ``training.safetensors`` says: JSON, with tensors, tuples and dicts under the names of their kinds."""
    if isinstance(value, list):
        return [plain(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    [(kind, content)] = value.items()
    if kind == "dict":
        return {key: plain(item, tensors) for key, item in content}
    return tensors[content] if kind == "tensor" else tuple(plain(content, tensors))


def state_of_checkpoint() -> Any:
    """Everything but the weights, as the safetensors library reads it."""
    with safe_open(CHECKPOINT / "training.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
        return plain(json.loads(file.metadata()["state"]), tensors)


class Loop:
    """The rest of the training as one would write it by hand, from the tensors of the checkpoint on."""

    def __init__(self) -> None:
        state = state_of_checkpoint()
        scheduler, train_loss = state["optim_schedulers"]["line"]["main"]["state"], state["loop"]["pass"]["train_loss"]
        weights = load_file(CHECKPOINT / "line.safetensors")
        self.model = nn.Linear(3, 1)
        self.model.load_state_dict({name.removeprefix("linear."): tensor for name, tensor in weights.items()})
        for name, gradient in state["gradients"]["line"].items():
            self.model.get_parameter(name.removeprefix("model.linear.")).grad = gradient
        self.optimizer = torch.optim.Adam(self.model.parameters())
        groups = [{**group, "params": [0, 1]} for group in scheduler["optimizer"]["param_groups"]]
        self.optimizer.load_state_dict({"state": scheduler["optimizer"]["state"], "param_groups": groups})
        self.windows, self.in_window = scheduler["window"]["real_step"], scheduler["window"]["samples"]
        self.epoch_loss, self.epoch_samples = train_loss["_total"], train_loss["_count"]
        self.recent_loss, self.recent_samples = train_loss["_recent_total"], train_loss["_recent_count"]
        self.samples = state["recoverables"]["plugin:plugin"]["samples"]
        self.iteration, self.lines = 9, list[str]()
        torch.set_rng_state(state["random"]["torch"])

    def run(self) -> None:
        for epoch in range(1, EPOCHS):
            left = batches_of(epoch)[self.iteration - BATCHES * epoch :]
            if len(left) == BATCHES:
                begin_loader()
                self.epoch_loss = self.recent_loss = 0.0
                self.epoch_samples = self.recent_samples = 0
            for x, y in left:
                self.train(x, y)
                if self.iteration % 4 == 0:
                    rate = self.optimizer.param_groups[0]["lr"]
                    self.line("train", epoch, loss=self.recent_loss / self.recent_samples, learning_rate=rate)
                    self.recent_loss, self.recent_samples = 0.0, 0
                if self.iteration % 5 == 0:
                    self.validate(epoch)
            numbers = {f"valid_{name}": number for name, number in self.validate(epoch).items()}
            self.line("epoch", epoch, loss=self.epoch_loss / self.epoch_samples, **numbers, samples=self.samples)

    def train(self, x: Tensor, y: Tensor) -> None:
        """One batch; two batches make a window, and so does the last of an epoch."""
        loss = nn.functional.mse_loss(self.model(nn.functional.dropout(x, 0.25)), y)
        (loss * len(x)).backward()
        self.in_window += len(x)
        self.iteration += 1
        if self.iteration % 2 == 0:
            self.windows += 1
            for parameter in self.model.parameters():
                assert parameter.grad is not None
                parameter.grad /= self.in_window
            self.optimizer.param_groups[0]["lr"] = 0.05 * 3**0.5 * min(self.windows**-0.5, self.windows * 3**-1.5)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.in_window = 0
        self.samples += len(x)
        self.epoch_loss, self.epoch_samples = self.epoch_loss + loss.item() * len(x), self.epoch_samples + len(x)
        self.recent_loss, self.recent_samples = self.recent_loss + loss.item() * len(x), self.recent_samples + len(x)

    def validate(self, epoch: int) -> dict[str, float]:
        """The numbers of the validation data; it draws no numbers of the training."""
        squares = distances = 0.0
        with torch.no_grad():
            for x in points(5).split(2):
                predictions, y = self.model(x), x.sum(1, keepdim=True)
                squares += nn.functional.mse_loss(predictions, y).item() * len(x)
                distances += (predictions.double() - y.double()).abs().sum().item()
        numbers = {"loss": squares / 5, "mae": distances / 5}
        self.line("validate", epoch, **numbers)
        return numbers

    def line(self, event: str, epoch: int, **numbers: float) -> None:
        where = {"event": event, "epoch": epoch, "iteration": self.iteration, "phase": "line"}
        self.lines.append(json.dumps({**where, **numbers}))


@pytest.fixture
def by_hand() -> Loop:
    loop = Loop()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    loop.run()
    torch.set_num_threads(threads)
    return loop


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The run, copied to another folder."""
    folder = tmp_path / "stopped_run"
    shutil.copytree(STOPPED, folder)
    shutil.copytree(folder / "run" / "workspace", folder / "workspace")
    shutil.move(folder / "config.yaml", folder / "workspace")
    for name in ("config.yaml", "command.txt"):
        file = folder / "run" / name
        file.write_text(file.read_text(encoding="utf-8").replace("{folder}", str(folder)), encoding="utf-8")
    return folder


def resume(folder: Path, *overrides: str) -> Context:
    """Resume it to its end."""
    config = folder / "workspace" / "config.yaml"
    return GeneralTrainer(config, ["name=stopped_run", *overrides], resume=folder / "run").run()


@pytest.mark.parametrize(
    ("key", "change"), [("batch_size=3", "batch_size: 2 -> 3"), ("shuffle=false", "shuffle: true")]
)
def test_a_run_that_an_earlier_version_left_goes_on_with_the_same_data_alone(
    key: str, change: str, folder: Path
) -> None:
    with pytest.raises(DataError, match=f"dataset.train_data.{change}.* has changed in the middle of an epoch"):
        resume(folder, f"dataset.train_data.{key}")


def test_a_run_that_an_earlier_version_left_goes_on_as_a_loop_by_hand(by_hand: Loop, folder: Path) -> None:
    resumed = resume(folder)
    weights = resumed["model"]["line"]["model"].linear.state_dict()
    optimizer = resumed["model"]["line"]["optim_schedulers"]["main"].optimizer.state_dict()
    lines = (resumed["run_dir"] / "train" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    expected = by_hand.optimizer.state_dict()
    assert (
        lines == (STOPPED / "run" / "train" / "metrics.jsonl").read_text(encoding="utf-8").splitlines() + by_hand.lines
    )
    assert all(torch.equal(weights[name], tensor) for name, tensor in by_hand.model.state_dict().items())
    assert optimizer["param_groups"] == expected["param_groups"]
    assert all(
        torch.equal(optimizer["state"][index][name], expected["state"][index][name])
        for index in (0, 1)
        for name in ("step", "exp_avg", "exp_avg_sq")
    )
    assert resumed["train_state"] == {"iteration": 18, "update": 9, "epoch": 3, "samples": 33, "phase_index": 0}
