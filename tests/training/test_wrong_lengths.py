"""Trainings whose data end after other batches than announced, against plain loops."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

from pipeline import Context, ExperimentBase, GeneralTrainer, hookimpl
from pipeline.data.loader import make_loader

Config = dict[str, Any]

SAMPLES = 12
X = torch.linspace(-1, 1, SAMPLES).unsqueeze(1)
Y = 3 * X - 1
EPOCHS = 4


class Claiming(IterableDataset[Any]):
    """All samples as a stream, which claims to have others."""

    def __init__(self, claimed: int) -> None:
        self.claimed = claimed

    def __len__(self) -> int:
        return self.claimed

    def __iter__(self) -> Iterator[Any]:
        return iter(zip(X, Y, strict=True))


class Shrinking:
    """A batch sampler with one batch less in each epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 6 - self.epoch

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[2 * number, 2 * number + 1] for number in range(len(self))])


class Lying(Shrinking):
    """A batch sampler that always claims four batches, and has six."""

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[2 * number, 2 * number + 1] for number in range(6)])


class Rates:
    """A plugin that records the rate of each update."""

    rates: ClassVar[list[float]] = []

    @hookimpl
    def after_batch(self, context: Context, phase: str) -> None:
        scheduler = context["model"][phase].optim_schedulers["main"]
        self.rates.append(scheduler.optimizer.param_groups[0]["lr"])


class Stopping:
    """A plugin that stops the training in the first batch."""

    @hookimpl
    def after_batch(self, context: Context) -> None:
        context.stop("enough")


class Ending:
    """A plugin that ends the run at iteration 8, as a signal does."""

    @hookimpl
    def after_batch(self, context: Context) -> None:
        if context["train_state"]["iteration"] == 8:
            context["is_exit"] = True


def model() -> nn.Linear:
    made = nn.Linear(1, 1)
    nn.init.zeros_(made.weight)
    nn.init.zeros_(made.bias)
    return made


def config(dataset: Config, **runner: Any) -> Config:
    own = {"name": "train", "class": "train", "device": "cpu", "epochs": EPOCHS}
    linear = {"optim_type": "SGD", "optim_conf": {"lr": 1.0}}
    return {
        "plugins": [{"progress_bar": False}],
        "dataset": [{"name": "data", **dataset}],
        "runner": [{**own, **runner}],
        "phase": [
            {
                "name": "line",
                "model": model,
                "loss": nn.functional.mse_loss,
                "dataset_name": "data",
                "optim_schedulers": {"main": {"class": "warmup_linear", "args": linear}},
            }
        ],
    }


STREAM = {"class_path": lambda: Claiming(2 * SAMPLES), "batch_size": 4}
SHRINKING = {
    "class_path": lambda: TensorDataset(X, Y),
    "batch_sampler": {"class_path": Shrinking},
}


def planned_rates(steps: int, total: int) -> list[float]:
    """The rates of a plain loop with a LambdaLR that falls to 0 at ``total`` updates."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - (step + 1) / total)
    rates = []
    for _ in range(steps):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return rates


def warnings_in(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("WARNING") and "announced" in line]


@pytest.mark.parametrize(
    ("dataset", "announced", "counts"),
    [(STREAM, 6, [3, 3, 3, 3]), (SHRINKING, 6, [6, 5, 4, 3])],
    ids=["stream", "shrinking"],
)
def test_a_schedule_for_other_updates_is_named(
    dataset: Config, announced: int, counts: list[int], log_lines: list[str]
) -> None:
    Rates.rates.clear()
    data = config(dataset)
    data["plugins"].append(f"{__name__}:Rates")

    GeneralTrainer(data).run()

    total = announced * EPOCHS
    first = next(count for count in counts if count != announced)
    planned = f"the learning rate schedule was planned for {total} updates"
    [warning] = warnings_in(log_lines)
    assert f"announced {announced} batches, got {first}; {planned}" in warning
    assert Rates.rates == pytest.approx(planned_rates(sum(counts), total))
    assert Rates.rates[-1] > 0


def test_a_schedule_of_epochs_was_not_planned_for_updates(log_lines: list[str]) -> None:
    data = config(STREAM)
    schedule = {"schedule": "CosineAnnealingLR", "per": "epoch"}
    data["phase"][0]["optim_schedulers"]["main"] = {
        "class": "TorchSchedule",
        "args": {"optim_type": "SGD", "optim_conf": {"lr": 1.0}, **schedule},
    }

    GeneralTrainer(data).run()

    [warning] = warnings_in(log_lines)
    assert warning.rstrip().endswith("announced 6 batches, got 3")


def test_more_batches_than_announced_are_named(log_lines: list[str]) -> None:
    GeneralTrainer(config({**STREAM, "class_path": lambda: Claiming(4)})).run()

    [warning] = warnings_in(log_lines)
    assert "announced 1 batches, got 3; the learning rate schedule was planned for 4" in warning


@pytest.mark.parametrize(
    "runner", [{"max_steps": 2}, {"optimizer_step_limit": 2}, {"limit_batches": 2}, {"debug": True}]
)
def test_a_pass_that_a_limit_ends_is_not_named(runner: Config, log_lines: list[str]) -> None:
    GeneralTrainer(config(STREAM, **runner)).run()

    assert warnings_in(log_lines) == []


def test_a_stop_within_the_first_pass_is_not_named(log_lines: list[str]) -> None:
    data = config(STREAM)
    data["plugins"].append(f"{__name__}:Stopping")

    GeneralTrainer(data).run()

    assert warnings_in(log_lines) == []


def test_true_lengths_are_not_named(log_lines: list[str]) -> None:
    GeneralTrainer(config({**STREAM, "class_path": lambda: Claiming(SAMPLES)})).run()

    assert warnings_in(log_lines) == []


def test_lengths_of_epochs_without_a_plan_are_not_named(log_lines: list[str]) -> None:
    """Each pass of this batch sampler has as many batches as it says when it begins."""
    data = config(SHRINKING)
    data["phase"][0].pop("optim_schedulers")
    data["hyper_parameters"] = {"optimizer": {"class": "SGD", "lr": 0.1}}

    GeneralTrainer(data).run()

    assert warnings_in(log_lines) == []


def accumulated(batches: list[list[int]], accum: int) -> Tensor:
    """The weight of a plain loop that does not know how many batches there are."""
    line = model()
    optimizer = torch.optim.SGD(line.parameters(), 0.1)
    for _ in range(2):
        windows = [batches[first : first + accum] for first in range(0, len(batches), accum)]
        for window in windows:
            samples = list(chain.from_iterable(window))
            optimizer.zero_grad()
            nn.functional.mse_loss(line(X[samples]), Y[samples]).backward()
            optimizer.step()
    return line.weight.detach()


STREAMED = [list(range(first, first + 4)) for first in range(0, SAMPLES, 4)]
PAIRS = [[2 * number, 2 * number + 1] for number in range(6)]


@pytest.mark.parametrize(
    ("dataset", "batches", "accum"),
    [
        ({**STREAM, "class_path": lambda: Claiming(4)}, STREAMED, 2),
        ({**STREAM, "class_path": lambda: Claiming(SAMPLES)}, STREAMED, 2),
        (STREAM, STREAMED, 2),
        ({**SHRINKING, "batch_sampler": {"class_path": Lying}}, PAIRS, 3),
    ],
    ids=["too_few", "right", "too_many", "batch_sampler"],
)
def test_windows_are_those_of_a_loop_without_a_length(dataset: Config, batches: list[list[int]], accum: int) -> None:
    """A wrong length would close a window in the middle of the pass."""
    data = config(dataset, epochs=2, accum_grad=accum)
    data["phase"][0].pop("optim_schedulers")
    data["hyper_parameters"] = {"optimizer": {"class": "SGD", "lr": 0.1}}

    weight = GeneralTrainer(data).run()["model"]["line"].model.weight

    assert torch.allclose(weight, accumulated(batches, accum), rtol=1e-6, atol=0)


def test_log_has_the_count_of_the_current_pass(log_lines: list[str]) -> None:
    """The batch sampler is asked after ``set_epoch``; a stream is counted in the first pass."""
    for dataset in (SHRINKING, STREAM):
        data = config(dataset, epochs=2, print_interval=1)
        data["plugins"] = [{"progress_bar": {"live": False}}]
        GeneralTrainer(data).run()

    text = "".join(log_lines)
    assert "epoch 0  batch 6/6" in text
    assert "epoch 1  batch 5/5" in text
    assert "epoch 0  batch 3/6" in text
    assert "epoch 1  batch 3/3" in text


def test_a_resumed_epoch_has_the_count_of_its_pass(log_lines: list[str]) -> None:
    data = config(SHRINKING, epochs=2, print_interval=1)
    data["plugins"] = [{"progress_bar": {"live": False}}, f"{__name__}:Ending"]
    run_dir = GeneralTrainer(data).run()["run_dir"]
    log_lines.clear()

    GeneralTrainer(data, resume=str(run_dir)).run()

    text = "".join(log_lines)
    assert "epoch 1  batch 5/5" in text
    assert "/6" not in text.replace(str(run_dir), "")


class Reading(ExperimentBase):
    """Counts what it reads; its loader announces four batches, and has six."""

    def setup_dataloader(self) -> None:
        sampler = Lying()
        self.train_loader = make_loader(TensorDataset(X, Y), seed=0, batch_sampler=sampler)
        self.read: list[float] = []

    def setup_model(self) -> None:
        self.model = model()

    def train_batch(self) -> None:
        inputs, _ = self.read_batch()
        self.read.append(inputs[0].item())

    def valid(self) -> None:
        """Nothing is validated."""


def test_an_experiment_reads_what_was_not_announced(log_lines: list[str]) -> None:
    """With ``epochs: 2`` the run has 8 iterations, which are more than an epoch."""
    runner = {"name": "train", "class": "train", "device": "cpu", "epochs": 2}
    experiments: list[Reading] = []

    class Kept(Reading):
        def setup_model(self) -> None:
            super().setup_model()
            experiments.append(self)

    runner |= {"runner_class_path": Kept, "valid_interval": None}
    GeneralTrainer({"plugins": [{"progress_bar": False}], "runner": [runner]}).run()

    expected = [X[2 * number].item() for number in range(6)]
    assert experiments[0].read == (expected + expected)[:8]
    [warning] = warnings_in(log_lines)
    assert "announced 4 batches, got 6" in warning
