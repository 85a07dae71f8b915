"""What the tests of training share: runs of small models on tensors, and the loop that one would write by hand."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from pipeline import GeneralTrainer, hookimpl, testing
from pipeline.context import Context
from pipeline.data.loader import EpochSampler

mse = nn.functional.mse_loss


Test = Callable[..., None]


def in_turn(names: str | tuple[str, ...], cases: Iterable[Any]) -> Callable[[Test], Test]:
    """Run a test on each case, as ``pytest.mark.parametrize`` does, but as one test.

    Use it for cases that compute for less than a millisecond. The cases share the fixtures, and a note of a failure
    names its case. A name that is not a parameter of the test appears only in that note.
    """
    own = (names,) if isinstance(names, str) else names
    listed = [dict(zip(own, (case,) if isinstance(names, str) else case, strict=True)) for case in cases]

    def decorate(test: Test) -> Test:
        signature = inspect.signature(test)

        def run(**fixtures: Any) -> None:
            for case in listed:
                try:
                    test(**{name: case[name] for name in own if name in signature.parameters}, **fixtures)
                except BaseException as error:
                    error.add_note(f"case: {case}")
                    raise

        rest = [parameter for name, parameter in signature.parameters.items() if name not in own]
        run.__signature__ = signature.replace(parameters=rest)  # type: ignore[attr-defined]
        run.__doc__ = test.__doc__
        return run

    return decorate


def with_release(chosen: Iterable[tuple[Any, ...]], every: Iterable[tuple[Any, ...]], *marks: Any) -> list[Any]:
    """Give the chosen cases these marks, and the other cases the mark ``release``."""
    chosen = list(chosen)
    others = [case for case in every if case not in chosen]
    return [
        *(pytest.param(*case, marks=marks) for case in chosen),
        *(pytest.param(*case, marks=pytest.mark.release) for case in others),
    ]


class KilledError(BaseException):
    """Stands for the end of the process."""


class Kill:
    """A plugin that ends the run before a batch."""

    at = 5

    @hookimpl
    def before_batch(self, context: Context) -> None:
        if context["train_state"]["iteration"] == self.at:
            raise KilledError


def table(samples: int, *, seed: int = 1, features: int = 3) -> TensorDataset:
    """Random inputs [samples, features], and targets [samples, 1] that depend on them."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, features, generator=random)
    return TensorDataset(x, x.sum(1, keepdim=True).sin())


def linear_config(**runner: Any) -> dict[str, Any]:
    """A train runner named ``train`` with one phase ``line``: a linear model, 10 samples in batches of 4, without plugins."""
    return {
        "plugins": [{"progress_bar": False}, {"metric_log": False}],
        "hyper_parameters": {"optimizer": {"class": "SGD", "lr": 0.1}},
        "dataset": [{"name": "data", "class_path": lambda: table(10), "batch_size": 4}],
        "runner": [{"name": "train", "class": "train", "device": "cpu", "epochs": 2, **runner}],
        "phase": [{"name": "line", "model": lambda: nn.Linear(3, 1), "loss": mse, "dataset_name": "data"}],
    }


@pytest.fixture
def config() -> Callable[..., dict[str, Any]]:
    return linear_config


@pytest.fixture
def run() -> Callable[[dict[str, Any]], Context]:
    """Runs a config and returns the context of its last runner."""
    return lambda config: GeneralTrainer(config).run()


@pytest.fixture
def make_table() -> Callable[..., TensorDataset]:
    return table


@pytest.fixture
def by_hand() -> Callable[..., dict[str, Tensor]]:
    """The weights that the loop of a torch tutorial ends with; the model is made after seeding with 0."""

    def loop(
        optimizer_of: Callable[..., torch.optim.Optimizer],
        *,
        model: Callable[[], nn.Module] = lambda: nn.Linear(3, 1),
        samples: int = 10,
        epochs: int = 2,
        shuffle: bool = False,
        clip: float | None = None,
        steps: int = 10**9,
    ) -> dict[str, Tensor]:
        torch.manual_seed(0)
        network, (x, y) = model(), table(samples).tensors
        optimizer = optimizer_of(network.parameters())
        order = EpochSampler(range(samples), shuffle=shuffle, seed=0)
        for epoch in range(epochs):
            order.set_epoch(epoch)
            for indices in torch.tensor(list(order)).split(4):
                if not steps:
                    break
                steps -= 1
                optimizer.zero_grad()
                mse(network(x[indices]), y[indices]).backward()
                if clip:
                    nn.utils.clip_grad_norm_(network.parameters(), clip)
                optimizer.step()
        return network.state_dict()

    return loop


RECORDED = (
    "before_epoch", "before_batch", "after_batch", "on_print_interval",
    "before_validation", "after_validation", "after_checkpoint_saved", "after_epoch",
)  # fmt: skip


@pytest.fixture
def recorder() -> Any:
    """A plugin class whose ``calls`` are (hook, iteration, arguments) in order."""
    return testing.recorder(*RECORDED)
