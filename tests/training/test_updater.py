"""How one batch trains the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline import Context, GeneralTrainer, Updater, UpdaterBase, UpdaterState, stages


def test_a_base_updater_says_what_to_define() -> None:
    class Mine(UpdaterBase):
        pass

    with pytest.raises(NotImplementedError, match=r"Mine does not define update\(batch\)"):
        Mine().update(None)


def test_the_counters_of_an_updater_go_from_one_to_another() -> None:
    one, other = UpdaterBase(UpdaterState(iteration=12, epoch=3)), UpdaterBase()
    assert other.state_dict() == {"epoch": 0, "iteration": 0}
    other.set_state_dict(one.state_dict())
    assert other.state == UpdaterState(iteration=12, epoch=3)


def test_the_default_updater_does_what_the_brain_does_and_returns_its_loss(
    config: Callable[..., dict[str, Any]], by_hand: Callable[..., dict[str, Tensor]]
) -> None:
    losses: list[Tensor] = []

    class Remembering(Updater):
        def update(self, batch: Any) -> Tensor:
            losses.append(super().update(batch))
            return losses[-1]

    context = GeneralTrainer(config(network_class_path=network_with(Remembering))).run()
    expected = by_hand(lambda parameters: torch.optim.SGD(parameters, 0.1))
    assert torch.equal(context["model"]["line"]["model"].weight, expected["weight"])
    assert len(losses) == 6
    assert not any(loss.requires_grad for loss in losses)


def test_an_updater_that_counts_itself_is_not_counted_twice(config: Callable[..., dict[str, Any]]) -> None:
    class Counting(Updater):
        def update(self, batch: Any) -> Tensor:
            loss = super().update(batch)
            self.state.iteration += 1
            return loss

    context = GeneralTrainer(config(network_class_path=network_with(Counting))).run()
    assert context["model"]["line"]["updater"].state == UpdaterState(iteration=6, epoch=2)


def test_an_updater_finds_its_counters_up_to_date_at_every_batch(config: Callable[..., dict[str, Any]]) -> None:
    seen: list[tuple[int, int]] = []

    class Looking(Updater):
        def update(self, batch: Any) -> Tensor:
            seen.append((self.state.epoch, self.state.iteration))
            return super().update(batch)

    GeneralTrainer(config(network_class_path=network_with(Looking))).run()
    assert seen == [(0, 0), (0, 1), (0, 2), (1, 3), (1, 4), (1, 5)]


def test_each_phase_counts_its_own_iterations_and_the_run_their_sum(config: Callable[..., dict[str, Any]]) -> None:
    two = config()
    two["dataset"].append({**two["dataset"][0], "name": "single", "batch_size": 1})
    two["phase"].append({**two["phase"][0], "name": "second", "dataset_name": "single"})
    context = GeneralTrainer(two).run()
    counts = {name: entry["updater"].state.iteration for name, entry in context["model"].items()}
    assert counts == {"line": 6, "second": 20}
    assert context["train_state"]["iteration"] == 26


def network_with(updater: type[Updater]) -> type[stages.Network]:
    """A network stage that is the default, but for the updater."""

    class Network(stages.Network):
        def build_network(self, context: Context) -> None:
            super().build_network(context)
            for entry in context["model"].values():
                entry["updater"] = updater(entry["brain"])

    return Network
