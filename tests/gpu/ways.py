"""One small training in three ways: by hand, by ``Brain.fit`` and by a run of a config. Each starts from the same weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, Dataset, TensorDataset

from pipeline import Brain, GeneralTrainer, Stage
from pipeline.context import Context

CLIP = 5.0
"""The largest norm of the gradients: what ``Brain.fit`` clips to by default."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
mse = nn.functional.mse_loss


class SmallModel(nn.Module):
    """A network of three layers. ``nn.Module.compile`` does nothing to an ``nn.Sequential`` that is not in another module."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        predictions: Tensor = self.layers(inputs)
        return predictions


def small_data(batches: int) -> TensorDataset:
    """Return samples for so many batches of 32."""
    random = torch.Generator().manual_seed(1)
    inputs = torch.randn(32 * batches, 16, generator=random)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())


def plain_sgd(parameters: Iterable[Tensor]) -> Optimizer:
    """Make the optimizer of most rows."""
    return SGD(parameters, lr=0.05, momentum=0.9)


PLAIN_SGD = {"class": "SGD", "lr": 0.05, "momentum": 0.9, "fused": False}
"""The same for a config."""


@dataclass
class Job:
    """What is trained, on which batches, and how.

    Attributes:
        device: where it is trained.
        data: the samples, in order.
        valid: samples for one validation after the training; None: there is none.
        precision: ``fp32``, ``bf16`` or ``fp16``.
        optimizer: makes the optimizer, by hand and for ``Brain.fit``.
        settings: the same optimizer for a config.
        model: makes the model. It is called once for each way, after seeding torch.
        batch_size: samples in a batch.
    """

    device: torch.device
    data: Dataset[Any]
    valid: Dataset[Any] | None = None
    precision: str = "fp32"
    optimizer: Callable[[Any], Optimizer] = plain_sgd
    settings: dict[str, Any] = field(default_factory=lambda: dict(PLAIN_SGD))
    model: Callable[[], nn.Module] = SmallModel
    batch_size: int = 32

    def new_model(self) -> nn.Module:
        """Make the model with the first weights, which are the same each time."""
        torch.manual_seed(0)
        return self.model()

    def loader(self, data: Any) -> DataLoader[Any]:
        """Return torch's own loader, with pinned batches if the device is a GPU."""
        return DataLoader(data, batch_size=self.batch_size, pin_memory=self.device.type == "cuda")


def train_by_hand(job: Job) -> nn.Module:
    """Train as a tutorial of torch does, and return the model."""
    device = job.device
    dtype = DTYPES[job.precision]
    model = job.new_model().to(device)
    optimizer = job.optimizer(model.parameters())
    scaler = torch.amp.GradScaler(device.type, enabled=job.precision == "fp16")
    for batch in job.loader(job.data):
        inputs, target = (part.to(device, non_blocking=True) for part in batch)
        with torch.autocast(device.type, dtype=dtype, enabled=job.precision != "fp32"):
            loss = mse(model(inputs), target)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    if job.valid is not None:
        model.eval()
        with torch.no_grad():
            for batch in job.loader(job.valid):
                inputs, target = (part.to(device, non_blocking=True) for part in batch)
                loss = mse(model(inputs), target)
    return model


class SmallBrain(Brain):
    """A Brain that trains a model with the mean squared error.

    Attributes:
        dtypes: those of the predictions.
    """

    def __init__(self, job: Job, **options: Any) -> None:
        options = {"device": str(job.device), "precision": job.precision, "noprogressbar": True, **options}
        super().__init__({"net": job.new_model()}, job.optimizer, run_opts=options)
        self.dtypes: set[torch.dtype] = set()

    def compute_forward(self, batch: Any, stage: Stage) -> Tensor:
        """Compute the predictions."""
        predictions: Tensor = self.modules.net(batch[0])
        self.dtypes.add(predictions.dtype)
        return predictions

    def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> Tensor:
        """Compute the loss."""
        return mse(predictions, batch[1])


class WatchedBrain(SmallBrain):
    """Notes for each batch whether it has changed a weight.

    Attributes:
        changed: one entry for each batch.
    """

    def __init__(self, job: Job, **options: Any) -> None:
        super().__init__(job, **options)
        self.changed: list[bool] = []

    def on_fit_batch_start(self, batch: Any, should_step: bool) -> None:
        """Copy the weights."""
        self.weights = [weight.detach().clone() for weight in self.modules.parameters()]

    def on_fit_batch_end(self, batch: Any, outputs: Any, loss: Tensor, should_step: bool) -> None:
        """Compare them."""
        self.changed.append(not all(map(torch.equal, self.weights, self.modules.parameters())))


def train_by_fit(job: Job, kind: type[SmallBrain] = SmallBrain, **options: Any) -> SmallBrain:
    """Train with ``Brain.fit`` and its defaults.

    Args:
        job: what to train.
        kind: the class of the Brain.
        options: run options.

    Returns:
        The Brain; the model is ``modules.net``.
    """
    brain = kind(job, **options)
    valid = None if job.valid is None else job.loader(job.valid)
    brain.fit(range(1), job.loader(job.data), valid)
    return brain


def train_by_run(job: Job, dataset: dict[str, Any] | None = None, **runner: Any) -> Context:
    """Run a config with the defaults, but for clipping, which is that of ``Brain.fit``.

    Args:
        job: what to train.
        dataset: keys of the dataset, over those that say what the job does.
        runner: keys of the runner.

    Returns:
        The context; the model is ``context["model"]["small"]["model"]``.
    """
    kinds = {"train": job.data, "valid": job.valid}
    datasets = [
        {"name": name, "class_path": lambda own=own: own, "batch_size": job.batch_size, **(dataset or {})}
        for name, own in kinds.items()
        if own is not None
    ]
    phase: dict[str, Any] = {"name": "small", "model": job.new_model, "loss": mse, "dataset_name": "train"}
    if job.valid is not None:
        phase["valid_dataset_name"] = "valid"
    settings = {"device": str(job.device), "precision": job.precision, "grad_clip": CLIP, "epochs": 1, **runner}
    with TemporaryDirectory() as folder:
        config = {
            "output_dir": folder,
            "hyper_parameters": {"optimizer": dict(job.settings)},
            "dataset": datasets,
            "runner": [{"name": "train", "class": "train", **settings}],
            "phase": [phase],
        }
        return GeneralTrainer(config).run()


def trained_model(context: Context) -> nn.Module:
    """Return the model of a run."""
    model: nn.Module = context["model"]["small"]["model"]
    return model


def largest_difference(ours: nn.Module, theirs: nn.Module) -> float:
    """Return the largest absolute difference between two models' weights; nan if a weight is not finite."""
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    return torch.stack([(one.detach().cpu() - other.detach().cpu()).abs().max() for one, other in pairs]).max().item()


def distance_trained(model: nn.Module, job: Job) -> float:
    """Return how far the training has moved the weights."""
    return largest_difference(model, job.new_model())


def with_bad_batches(data: TensorDataset, bad: Sequence[int]) -> TensorDataset:
    """Return the samples with batches that cannot be trained on: inputs and targets that are infinite, in turn."""
    inputs, target = (part.clone() for part in data.tensors)
    for number, batch in enumerate(bad):
        spoiled = (inputs, target)[number % 2]
        spoiled[32 * batch] = torch.inf
    return TensorDataset(inputs, target)
