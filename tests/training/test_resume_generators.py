"""Generators that datasets, Brains and experiments hold: a resumed run draws what an uninterrupted one draws."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset

from pipeline import (
    Brain,
    Checkpointer,
    Context,
    ExperimentBase,
    GeneralTrainer,
    RunnerBase,
    StandardUpdater,
    hookimpl,
    stages,
)
from pipeline.compute.trainable import trainable_of
from pipeline.data.loader import make_loader
from tests.training.conftest import linear_config, mse, table

Weights = Mapping[str, Tensor]
WITHOUT = [{"progress_bar": False}, {"metric_log": False}]


class KilledError(BaseException):
    """Stands for the end of the process."""


class Kill:
    """A plugin that ends the run before a batch; ``resumed_at`` is the iteration after which a run was resumed."""

    at: int | None = None
    resumed_at = 0

    @hookimpl
    def before_batch(self, context: Context) -> None:
        if context["train_state"]["iteration"] == Kill.at:
            raise KilledError

    @hookimpl
    def on_resume(self, context: Context) -> None:
        Kill.resumed_at = context["train_state"]["iteration"]


class Noise:
    """A transform that holds a generator of each library."""

    def __init__(self) -> None:
        self.torch = torch.Generator().manual_seed(1)
        self.of = {"numpy": np.random.default_rng(2), "legacy": np.random.RandomState(3), "python": random.Random(4)}

    def __call__(self, x: Tensor) -> Tensor:
        drawn = self.of["numpy"].random() + self.of["legacy"].rand() + self.of["python"].random()
        return x + torch.randn(3, generator=self.torch) + drawn


class Augmented(Dataset[Any]):
    """Ten samples with noise."""

    def __init__(self) -> None:
        self.table = table(10)
        self.transforms = [Noise()]

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        x, y = self.table[index]
        return self.transforms[0](x), y


class Lazy(Augmented):
    """Makes its generator with the first sample, as is usual in workers."""

    def __init__(self) -> None:
        super().__init__()
        self.transforms = []

    def __getitem__(self, index: int) -> Any:
        self.transforms = self.transforms or [Noise()]
        return super().__getitem__(index)


class Flow(IterableDataset[Any]):
    """The same as a stream."""

    def __init__(self) -> None:
        self.data = Augmented()

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Any:
        return (self.data[index] for index in range(10))


def wrapped() -> Dataset[Any]:
    return Subset(ConcatDataset([Augmented(), Augmented()]), range(3, 13))


def add_noise(samples: list[Any], generator: torch.Generator) -> list[Tensor]:
    x = torch.stack([sample[0] for sample in samples])
    return [x + torch.randn(3, generator=generator), torch.stack([sample[1] for sample in samples])]


def config(dataset: Callable[[], Any], **keys: Any) -> dict[str, Any]:
    made = linear_config(save_interval=["1 epoch", 2], epochs=3, valid_interval=None)
    made["plugins"] = [*WITHOUT, Kill]
    made["dataset"][0] |= {"class_path": dataset, **keys}
    return made


def weights(config: dict[str, Any], **keys: Any) -> Weights:
    state: Weights = GeneralTrainer(config, **keys).run()["model"]["line"]["model"].state_dict()
    return state


def interrupted(config: dict[str, Any], at: int, folder: Path) -> Weights:
    """The weights of a run that is killed before a batch, and resumed."""
    config = {**config, "output_dir": str(folder), "name": "test"}
    Kill.at, Kill.resumed_at = at, 0
    with pytest.raises(KilledError):
        GeneralTrainer(config).run()
    Kill.at = None
    state = weights(config, resume="auto")
    assert Kill.resumed_at == (3 if at == 3 else 4)
    return state


def equal(one: Weights, other: Weights) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


class PlainNetwork(stages.Network):
    """Builds torch's own loaders, which seed nothing."""

    def build_dataset(self, settings: Any, runner: Any, context: Context) -> Any:
        return DataLoader(Augmented(), batch_size=4)


CASES = {
    "map style": config(Augmented),
    "wrapped": config(wrapped),
    "made late": config(Lazy),
    "stream": config(Flow, resume="reread"),
    "without a seed": config(Augmented),
    "collate": config(lambda: table(10), collate_fn=partial(add_noise, generator=torch.Generator())),
    "torch's loader": config(Augmented),
}
CASES["without a seed"]["runner"][0]["seed"] = None
CASES["without a seed"]["phase"][0]["model"] = lambda: torch.manual_seed(0) and nn.Linear(3, 1)
CASES["torch's loader"]["runner"][0]["network_class_path"] = PlainNetwork


QUICK = [("map style", 3), ("stream", 5), ("without a seed", 3), ("collate", 5), ("torch's loader", 5)]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("case", "at"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in product(CASES, (3, 5))],
)
def test_resume_restores_generators_of_the_data(case: str, at: int, tmp_path: Path) -> None:
    """Before batch 3 the checkpoint is that of the end of an epoch, before batch 5 one inside an epoch."""
    whole = weights(CASES[case])

    assert equal(interrupted(CASES[case], at, tmp_path), whole)


@pytest.mark.parametrize("dataset", [Augmented, Lazy, Flow])
def test_own_generators_draw_alike_with_any_workers(dataset: type[Any]) -> None:
    """A batch is a function of seed, epoch and place. A stream's batches depend on how it is shared out."""
    alone = list(make_loader(dataset(), seed=3, batch_size=4))
    workers = 1 if dataset is Flow else 2

    shared = list(make_loader(dataset(), seed=3, batch_size=4, num_workers=workers))

    assert all(torch.equal(one[0], other[0]) for one, other in zip(alone, shared, strict=True))
    loader = make_loader(dataset(), seed=3, batch_size=4)
    loader.set_epoch(1)
    assert not torch.equal(next(iter(loader))[0], alone[0][0])


class NoisyNet(nn.Module):
    """Draws from a generator of a submodule in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(3, 1)
        self.noise = nn.Sequential(nn.Identity())
        self.noise[0].generator = torch.Generator().manual_seed(1)

    def forward(self, x: Tensor) -> Any:
        return self.line(x + torch.randn(3, generator=self.noise[0].generator))  # type: ignore[arg-type]


def test_resume_restores_a_generator_of_the_model(tmp_path: Path) -> None:
    made = config(lambda: table(10))
    made["phase"][0]["model"] = NoisyNet

    assert equal(interrupted(made, 5, tmp_path), weights(made))


class Fitted(Brain):
    """A linear Brain that can be killed."""

    def compute_forward(self, batch: Any, stage: Any) -> Any:
        return self.modules.net(batch[0])

    def compute_objectives(self, predictions: Any, batch: Any, stage: Any) -> Any:
        return mse(predictions, batch[1])

    def on_fit_batch_start(self, batch: Any, should_step: bool) -> None:
        if trainable_of(self).counters["iteration"] == Kill.at:
            raise KilledError


@pytest.mark.parametrize("make", [partial(DataLoader, batch_size=4), partial(make_loader, seed=0, batch_size=4)])
def test_fit_restores_generators_of_its_datasets(make: Callable[..., Any], tmp_path: Path) -> None:
    def fit(folder: Path) -> Weights:
        torch.manual_seed(0)
        options = {"ckpt_interval_steps": 2, "ckpt_interval_minutes": 0}
        saver = Checkpointer(folder)
        brain = Fitted({"net": nn.Linear(3, 1)}, torch.optim.Adam, run_opts=options, checkpointer=saver)
        brain.fit(range(3), make(Augmented()), make(Augmented()), progressbar=False)
        return brain.modules.state_dict()

    Kill.at = None
    whole = fit(tmp_path / "whole")
    for at in (3, 5):
        Kill.at = at
        with pytest.raises(KilledError):
            fit(tmp_path / f"{at}")
        Kill.at = None

        assert equal(fit(tmp_path / f"{at}"), whole)


class Experiment(ExperimentBase):
    """An experiment on torch's own loader."""

    def setup_dataloader(self) -> None:
        self.train_loader = DataLoader(Augmented(), batch_size=4)

    def setup_model(self) -> None:
        self.model = NoisyNet()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)

    def train_batch(self) -> None:
        x, y = self.read_batch()
        loss = mse(self.model(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def valid(self) -> None:
        pass


def test_an_experiment_restores_generators_of_its_data(tmp_path: Path) -> None:
    keys = {"class": "train", "device": "cpu", "epochs": 3, "save_interval": ["1 epoch", 2]}
    runner = {"name": "train", "runner_class_path": Experiment, **keys}
    made = {"name": "test", "plugins": [*WITHOUT, Kill], "runner": [runner]}

    def run(**keys: Any) -> Weights:
        state: Weights = (
            GeneralTrainer({**made, **keys}, resume="auto").run()["model"]["experiment"]["model"].state_dict()
        )
        return state

    Kill.at = None
    whole = run(output_dir=str(tmp_path / "whole"))
    for at in (3, 5):
        Kill.at = at
        with pytest.raises(KilledError):
            run(output_dir=str(tmp_path / f"{at}"))
        Kill.at = None

        assert equal(run(output_dir=str(tmp_path / f"{at}")), whole)


@pytest.mark.parametrize("done", [3, 5])
def test_an_updater_by_hand_restores_generators_of_its_data(done: int) -> None:
    def updater() -> StandardUpdater:
        torch.manual_seed(0)
        model = NoisyNet()
        loader = DataLoader(Augmented(), batch_size=4)
        return StandardUpdater(Criterion(model), torch.optim.SGD(model.parameters(), 0.1), loader)

    whole, before, after = updater(), updater(), updater()
    for _ in range(8):
        whole.update()
    for _ in range(done):
        before.update()

    after.set_state_dict(before.state_dict())
    for _ in range(8 - done):
        after.update()

    assert equal(after.model.state_dict(), whole.model.state_dict())


class Criterion(nn.Module):
    """A model that returns its loss."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return mse(self.net(x), y)


class DrawsBeforeItsLoop(RunnerBase):
    """A loop whose step depends on numbers that were sampled before it, and in it."""

    def run(self, context: Context) -> None:
        before = random.random() + np.random.rand() + torch.rand(()).item()
        context["before"] = before
        for _ in context.epochs():
            for batch in context.batches("line"):
                x, y = batch
                factor = before * (1 + random.random())
                context["model"]["line"]["brain"].fit_batch((x * factor, y))


@pytest.mark.parametrize("at", [1, 2, 4, 5])
def test_what_a_stage_samples_before_its_loop_is_the_same_after_a_resume(
    at: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = {
        **linear_config(save_interval=1, runner_class_path=DrawsBeforeItsLoop),
        "plugins": [*WITHOUT, Kill],
        "output_dir": str(tmp_path),
    }
    monkeypatch.setattr(Kill, "at", None)
    whole = GeneralTrainer({**config, "name": "whole"}).run()
    monkeypatch.setattr(Kill, "at", at)
    with pytest.raises(KilledError):
        GeneralTrainer({**config, "name": "killed"}).run()
    monkeypatch.setattr(Kill, "at", None)
    resumed = GeneralTrainer({**config, "name": "killed"}, resume="auto").run()
    assert Kill.resumed_at == at
    assert resumed["before"] == whole["before"]
    weights = [run["model"]["line"]["model"].weight for run in (whole, resumed)]
    assert torch.equal(*weights)
