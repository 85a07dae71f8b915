"""Loaders with ``persistent_workers``: a resumed run starts their workers again, and draws no number for it."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler

from pipeline import Brain, Checkpointer, Context, ExperimentBase, GeneralTrainer, RunnerBase, hookimpl, stages
from pipeline.compute.trainable import trainable_of
from pipeline.data.loader import end_workers
from pipeline.signals import StoppedError
from tests.training.conftest import linear_config, mse, table

Weights = Mapping[str, Tensor]
WITHOUT = [{"progress_bar": False}, {"metric_log": False}]
KEPT = {"num_workers": 1, "persistent_workers": True}

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


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


@pytest.fixture(autouse=True)
def _no_worker_outlives_its_run() -> Iterator[None]:
    before = multiprocessing.active_children()
    yield
    assert {*multiprocessing.active_children()} <= {*before}


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1))


def config(**runner: Any) -> dict[str, Any]:
    """Three epochs of three batches, whose training and validation data keep a worker."""
    made = linear_config(save_interval=["1 epoch", 1], epochs=3, **runner)
    made["plugins"] = [*WITHOUT, Kill]
    made["dataset"][0] |= {"shuffle": True, **KEPT}
    made["dataset"].append({"name": "valid_data", "class_path": lambda: table(6, seed=2), "batch_size": 4, **KEPT})
    made["phase"][0] |= {"model": net, "valid_dataset_name": "valid_data"}
    return made


def weights(config: dict[str, Any], phase: str = "line", **keys: Any) -> Weights:
    state: Weights = GeneralTrainer(config, **keys).run()["model"][phase]["model"].state_dict()
    return state


def interrupted(config: dict[str, Any], at: int, folder: Path, phase: str = "line") -> Weights:
    """The weights of a run that is killed before a batch, and resumed."""
    config = {**config, "output_dir": str(folder), "name": "test"}
    Kill.at, Kill.resumed_at = at, 0
    with pytest.raises(KilledError):
        GeneralTrainer(config).run()
    Kill.at = None
    state = weights(config, phase, resume="auto")
    # An order that torch draws is resumed at the end of an epoch.
    assert Kill.resumed_at in {at, 3}
    return state


def equal(one: Weights, other: Weights) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


class PlainNetwork(stages.Network):
    """Builds torch's own loaders, of which that of the training data draws its order."""

    def build_dataset(self, settings: Any, runner: Any, context: Context) -> Any:
        return DataLoader(table(10), batch_size=4, shuffle=settings.name == "data", **KEPT)


class Body(RunnerBase):
    """A loop of its own, whose passes go over the data twice."""

    def run(self, context: Context) -> None:
        for _ in context.epochs():
            for batch in context.batches("line", count=6, repeat=True):
                context["model"]["line"].brain.fit_batch(batch)
                context.validate("line")


RUNNERS = {
    "default": {"valid_interval": 2},
    "without validation": {"valid_interval": None},
    "torch's loaders": {"valid_interval": "1 epoch", "network_class_path": PlainNetwork},
    "custom loop": {"valid_interval": None, "runner_class_path": Body},
}


QUICK_RUNNERS = [("default", 5), ("torch's loaders", 3)]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("runner", "at"),
    [pytest.param(*case, marks=() if case in QUICK_RUNNERS else pytest.mark.slow) for case in product(RUNNERS, (3, 5))],
)
def test_resume_draws_no_seed_for_kept_workers_again(runner: str, at: int, tmp_path: Path) -> None:
    """Killed before batch 3, the run resumes from the end of an epoch; before batch 5, from the middle of one."""
    made = config(**RUNNERS[runner])

    assert equal(interrupted(made, at, tmp_path), weights(made))


class InOrder(stages.Network):
    """Builds a loader of torch that does not shuffle."""

    loader: type[DataLoader[Any]] = DataLoader

    def build_dataset(self, settings: Any, runner: Any, context: Context) -> Any:
        return self.loader(table(10), batch_size=4, **KEPT)  # type: ignore[arg-type]


class DerivedLoader(DataLoader[Any]):
    """A loader such as those of libraries for graphs."""


class Derived(InOrder):
    loader = DerivedLoader


NETWORKS = {
    "ours": {},
    "torch": {"network_class_path": InOrder},
    "derived": {"network_class_path": Derived},
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "keys",
    [pytest.param(keys, id=name, marks=pytest.mark.slow if name == "torch" else ()) for name, keys in NETWORKS.items()],
)
def test_validation_of_training_data_keeps_the_pass(keys: dict[str, Any]) -> None:
    """To iterate over a loader with kept workers ends the pass over it that is open."""
    trained = []
    for interval in (None, ["start", 1]):
        made = config(valid_interval=interval, **keys)
        del made["dataset"][0]["shuffle"]
        del made["dataset"][1]
        made["phase"][0]["valid_dataset_name"] = "data"
        trained.append(weights(made))

    never, always = trained

    assert equal(always, never)


class Interrupting:
    """A plugin that sends SIGTERM in the first validation."""

    armed = False

    @hookimpl
    def after_validation(self) -> None:
        if self.armed:
            Interrupting.armed = False
            signal.raise_signal(signal.SIGTERM)


@pytest.mark.slow
def test_resume_draws_the_seed_of_workers_that_had_not_started(tmp_path: Path) -> None:
    """A signal interrupts the validation before the first step: only its workers had started."""
    made = config(valid_interval="start")
    made |= {"plugins": [*WITHOUT, Interrupting], "output_dir": str(tmp_path), "name": "test"}
    whole = weights(made)
    Interrupting.armed = True
    with pytest.raises(StoppedError):
        GeneralTrainer(made).run()

    assert equal(weights(made, resume="auto"), whole)


class TwoGenerators(stages.Network):
    """Builds loaders whose seeds and whose order come from two generators."""

    def build_dataset(self, settings: Any, runner: Any, context: Context) -> Any:
        data = table(10)
        sampler = RandomSampler(data, generator=torch.Generator().manual_seed(1))
        generator = torch.Generator().manual_seed(2)
        return DataLoader(data, batch_size=4, sampler=sampler, generator=generator, **KEPT)  # type: ignore[arg-type]


@pytest.mark.slow
def test_resume_keeps_the_generators_of_a_loader_apart(tmp_path: Path) -> None:
    """The generator from which the seed of the workers was drawn is not needed again."""
    made = config(network_class_path=TwoGenerators)
    del made["dataset"][0]["shuffle"]

    assert equal(interrupted(made, 4, tmp_path), weights(made))


class Fitted(Brain):
    """A Brain with dropout that can be killed."""

    def compute_forward(self, batch: Any, stage: Any) -> Any:
        return self.modules.net(batch[0])

    def compute_objectives(self, predictions: Any, batch: Any, stage: Any) -> Any:
        return mse(predictions, batch[1])

    def on_fit_batch_start(self, batch: Any, should_step: bool) -> None:
        if trainable_of(self).counters["iteration"] == Kill.at:
            raise KilledError


@pytest.mark.quick_cases(0)
@pytest.mark.parametrize(
    ("plain", "at"),
    [(False, 5), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((False, 3), (True, 3), (True, 5)))],
)
def test_fit_draws_no_seed_for_kept_workers_again(plain: bool, at: int, tmp_path: Path) -> None:
    """Its validations use numbers; the workers of the validation data draw theirs once too."""

    def fit(folder: Path) -> Weights:
        torch.manual_seed(0)
        options = {"ckpt_interval_steps": 1, "ckpt_interval_minutes": 0}
        brain = Fitted({"net": net()}, torch.optim.Adam, run_opts=options, checkpointer=Checkpointer(folder))
        keywords = {"batch_size": 4, **KEPT}
        data: list[Any] = [table(10), table(6, seed=2)]
        if plain:
            data = [DataLoader(each, **keywords) for each in data]  # type: ignore[arg-type]
        more: dict[str, Any] = {} if plain else {"train_loader_kwargs": keywords, "valid_loader_kwargs": keywords}
        try:
            brain.fit(range(3), *data, progressbar=False, **more)
        finally:
            # Those of the caller's loaders; the Brain ends those of its own.
            for loader in data if plain else ():
                end_workers(loader)
        return brain.modules.state_dict()

    Kill.at = None
    whole = fit(tmp_path / "whole")
    Kill.at = at
    with pytest.raises(KilledError):
        fit(tmp_path / "killed")
    Kill.at = None

    assert equal(fit(tmp_path / "killed"), whole)


class Experiment(ExperimentBase):
    """An experiment with loaders of its own; ``assigns``: it iterates over the training data itself."""

    assigns = False

    def setup_dataloader(self) -> None:
        self.train_loader = DataLoader(table(10), batch_size=4, **KEPT)  # type: ignore[arg-type]
        self.valid_loader = DataLoader(table(6), batch_size=4, **KEPT)  # type: ignore[arg-type]

    def setup_model(self) -> None:
        self.model = net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)

    def train_batch(self) -> None:
        x, y = self.read_batch()
        loss = mse(self.model(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def valid(self) -> None:
        for x, _ in self.valid_loader:
            self.model(x)


class Assigning(Experiment):
    """The same, which iterates over the training data itself."""

    def new_epoch(self) -> None:
        self.epoch += 1
        self.iterator = iter(self.train_loader)


@pytest.mark.quick_cases(0)
@pytest.mark.parametrize(
    ("kind", "at"),
    [
        (Experiment, 5),
        pytest.param(Experiment, 3, marks=pytest.mark.slow),
        pytest.param(Assigning, 3, marks=pytest.mark.slow),
        pytest.param(Assigning, 5, marks=pytest.mark.slow),
    ],
)
def test_an_experiment_draws_no_seed_for_kept_workers(kind: type[Experiment], at: int, tmp_path: Path) -> None:
    keys = {"class": "train", "device": "cpu", "epochs": 3, "save_interval": 1, "valid_interval": 2}
    made = {"plugins": [*WITHOUT, Kill], "runner": [{"name": "train", "runner_class_path": kind, **keys}]}

    assert equal(interrupted(made, at, tmp_path, "experiment"), weights(made, "experiment"))
