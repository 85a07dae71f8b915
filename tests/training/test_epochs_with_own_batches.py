"""Runner stages that take epochs from ``context.epochs()`` and train on batches of their own in them."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipeline import Context, GeneralTrainer, RunnerBase, hookimpl
from pipeline.checkpoint.reader import read_checkpoint
from pipeline.signals import StoppedError
from tests.training.conftest import KilledError, linear_config, mse, table


def train_by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, epoch: int) -> None:
    """Two batches of the stage's own, in an order that depends on the epoch and on torch's generator."""
    x, y = table(8, seed=epoch).tensors
    for indices in torch.randperm(8).split(4):
        optimizer.zero_grad()
        mse(model(x[indices]), y[indices]).backward()
        optimizer.step()


class OwnBatches(RunnerBase):
    """Trains so in each epoch; ``killed_in`` is the epoch whose training is interrupted."""

    killed_in = -1

    def run(self, context: Context) -> None:
        phase = context["model"]["line"]
        for epoch in context.epochs():
            train_by_hand(phase.model, phase.optim_schedulers["main"].optimizer, epoch)
            if epoch == self.killed_in:
                raise KilledError


class Validating(OwnBatches):
    """Validates in each epoch."""

    def run(self, context: Context) -> None:
        phase = context["model"]["line"]
        for epoch in context.epochs():
            train_by_hand(phase.model, phase.optim_schedulers["main"].optimizer, epoch)
            context.validate("line")
            if epoch == self.killed_in:
                raise KilledError


class Saving(OwnBatches):
    """Saves in each epoch, in which the code cannot continue: the checkpoint is that of the end of the epoch."""

    def run(self, context: Context) -> None:
        phase = context["model"]["line"]
        for epoch in context.epochs():
            train_by_hand(phase.model, phase.optim_schedulers["main"].optimizer, epoch)
            context.validate("line")
            context.save()
            if epoch == self.killed_in:
                raise KilledError


class Mixed(RunnerBase):
    """Trains on the phase's data in even epochs, and on batches of its own in odd ones."""

    def run(self, context: Context) -> None:
        phase = context["model"]["line"]
        for epoch in context.epochs():
            if epoch % 2:
                train_by_hand(phase.model, phase.optim_schedulers["main"].optimizer, epoch)
            else:
                for batch in context.batches("line"):
                    phase.brain.fit_batch(batch)


def config(runner: Any, **keys: Any) -> dict[str, Any]:
    chosen = linear_config(**{"epochs": 4, "runner_class_path": runner, "keep_last": None, **keys})
    chosen["name"] = "own"
    chosen["hyper_parameters"]["optimizer"] = {"class": "Adam", "lr": 0.1}
    chosen["phase"][0]["valid_dataset_name"] = "data"
    return chosen


def steps(context: Context) -> list[int]:
    """The iterations of the checkpoints."""
    folder: Path = context["run_dir"] / "train" / "checkpoints"
    return sorted(int(path.name.removeprefix("step-")) for path in folder.iterdir() if path.name.startswith("step-"))


def counts(context: Context) -> list[int]:
    return [context["train_state"][name] for name in ("iteration", "update", "epoch")]


def test_epoch_with_own_batches_counts_as_one_iteration() -> None:
    """Each checkpoint has a name of its own."""
    context = GeneralTrainer(config(OwnBatches, save_interval="1 epoch")).run()
    assert counts(context) == [4, 4, 4]
    assert steps(context) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("keys", "ended", "saved"),
    [
        ({"max_steps": 3, "save_interval": 2}, [3, 3, 3], [2, 3]),
        ({"optimizer_step_limit": 2, "save_interval": "2 update"}, [2, 2, 2], [2]),
        ({"save_interval": 3}, [4, 4, 4], [3, 4]),
    ],
    ids=["max_steps", "optimizer_step_limit", "save_interval"],
)
def test_limits_and_intervals_count_epochs_with_own_batches(
    keys: dict[str, Any], ended: list[int], saved: list[int]
) -> None:
    context = GeneralTrainer(config(OwnBatches, **keys)).run()
    assert (counts(context), steps(context)) == (ended, saved)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("runner", [OwnBatches, Validating, Saving])
@pytest.mark.parametrize("killed_in", [1, 3])
def test_own_batches_of_killed_run_resume_bit_exactly(
    runner: type[OwnBatches], killed_in: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The expected weights are those of the same loop in plain PyTorch."""
    keys = {"save_interval": 1, "keep_best": {"metric": "valid_loss", "mode": "min"}, "seed": 5}
    torch.manual_seed(5)
    by_hand = nn.Linear(3, 1)
    optimizer = torch.optim.Adam(by_hand.parameters(), 0.1)
    for epoch in range(4):
        train_by_hand(by_hand, optimizer, epoch)
    straight = GeneralTrainer({**config(runner, **keys), "name": "straight"}).run()
    monkeypatch.setattr(runner, "killed_in", killed_in)
    with pytest.raises(KilledError):
        GeneralTrainer(config(runner, **keys)).run()
    monkeypatch.setattr(runner, "killed_in", -1)
    resumed = GeneralTrainer(config(runner, **keys), resume="auto").run()
    for context in (straight, resumed):
        for name, weight in context["model"]["line"].model.state_dict().items():
            assert torch.equal(weight, by_hand.state_dict()[name])
    assert counts(resumed) == counts(straight) == [4, 4, 4]
    assert resumed["metrics"] == straight["metrics"]
    assert resumed["best"] == straight["best"]


class Signalled(OwnBatches):
    """Receives a signal in an epoch, which interrupts a validation elsewhere."""

    def run(self, context: Context) -> None:
        phase = context["model"]["line"]
        for epoch in context.epochs():
            train_by_hand(phase.model, phase.optim_schedulers["main"].optimizer, epoch)
            if epoch == self.killed_in:
                signal.raise_signal(signal.SIGTERM)


def test_own_batches_of_signalled_run_are_not_trained_on_again(monkeypatch: pytest.MonkeyPatch) -> None:
    straight = GeneralTrainer({**config(Signalled, seed=5), "name": "straight"}).run()
    monkeypatch.setattr(Signalled, "killed_in", 1)
    with pytest.raises(StoppedError):
        GeneralTrainer(config(Signalled, seed=5)).run()
    monkeypatch.setattr(Signalled, "killed_in", -1)
    resumed = GeneralTrainer(config(Signalled, seed=5), resume="auto").run()
    weights, expected = (context["model"]["line"].model.state_dict() for context in (resumed, straight))
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


class SignalAfterFirstPhase:
    """Sends a signal between the validations of two phases at the end of the last epoch."""

    @hookimpl
    def after_validation(self, context: Context, phase: str) -> None:
        if (phase, context["train_state"]["epoch"]) == ("line", 4):
            signal.raise_signal(signal.SIGTERM)


def test_validations_after_a_signal_are_made_on_resume() -> None:
    """The numbers of the second phase are those of a run without a signal."""
    data = config(OwnBatches, valid_interval=1, seed=5)
    data["phase"].append({**data["phase"][0], "name": "other"})
    expected = GeneralTrainer({**data, "name": "straight"}).run()["metrics"]
    signalled = {**data, "plugins": [*data["plugins"], SignalAfterFirstPhase]}

    with pytest.raises(StoppedError):
        GeneralTrainer(signalled).run()
    resumed = GeneralTrainer(data, resume="auto").run()

    assert expected.keys() == {"line", "other"}
    assert resumed["metrics"] == expected


@pytest.mark.parametrize("runner", [OwnBatches, Validating])
def test_best_of_own_batches_is_the_checkpoint_with_its_weights(runner: type[OwnBatches]) -> None:
    """The loss of the best checkpoint, computed by hand, is the best number."""
    keep = {"metric": "valid_loss", "mode": "min"}
    context = GeneralTrainer(config(runner, save_interval=None, keep_best=keep)).run()
    best = context["best"]
    checkpoint = read_checkpoint(context["run_dir"] / "train" / "checkpoints" / f"step-{best['iteration']:012d}")
    model = nn.Linear(3, 1)
    model.load_state_dict({name.removeprefix("model."): own for name, own in checkpoint.weights["line"].items()})
    x, y = table(10).tensors
    assert mse(model(x), y).item() == pytest.approx(best["value"], rel=1e-6)
    assert checkpoint.metrics["line"]["valid_loss"] == best["value"]


def test_epochs_with_and_without_own_batches_count_both() -> None:
    """Three batches in the epochs 0 and 2, one iteration in each other."""
    context = GeneralTrainer(config(Mixed, save_interval="1 epoch")).run()
    assert counts(context) == [8, 8, 4]
    assert steps(context) == [3, 4, 7, 8]
