"""How one batch trains the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline import Context, GeneralTrainer, Updater, UpdaterBase, UpdaterState, stages
from pipeline.checkpoint.pytree import save_state
from pipeline.errors import CheckpointError


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


def test_saved_counters_are_loaded_by_another_updater(tmp_path: Path) -> None:
    UpdaterBase(UpdaterState(iteration=12, epoch=3)).save(tmp_path / "updater")
    other = UpdaterBase()
    other.load(tmp_path / "updater")
    assert other.state == UpdaterState(iteration=12, epoch=3)


class Own(UpdaterBase):
    """An updater in PaddleSpeech's manner, which keeps its model and optimizer itself."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
        self.optimizer = torch.optim.Adam(self.model.parameters())

    def update(self, batch: Any) -> Tensor:
        self.optimizer.zero_grad()
        loss: Tensor = self.model(batch).square().mean()
        loss.backward()
        self.optimizer.step()
        self.state.iteration += 1
        return loss.detach()

    def state_dict(self) -> dict[str, Any]:
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return {**super().state_dict(), **state}

    def set_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().set_state_dict(state_dict)
        self.model.load_state_dict(state_dict["model"])
        self.optimizer.load_state_dict(state_dict["optimizer"])


def test_an_updater_with_a_model_of_its_own_goes_on_from_a_file_bit_for_bit(tmp_path: Path) -> None:
    batches = torch.randn(4, 5, 2, generator=torch.Generator().manual_seed(3))
    one, other = Own(seed=0), Own(seed=1)
    for batch in batches[:2]:
        one.update(batch)
    one.save(str(tmp_path / "updater"))
    other.load(str(tmp_path / "updater"))
    losses = [[each.update(batch).item() for batch in batches[2:]] for each in (one, other)]
    assert losses[0] == losses[1]
    assert other.state == UpdaterState(iteration=4, epoch=0)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"epoch": 1}, r"Own.set_state_dict: there is no 'iteration'; give it what state_dict\(\) of a Own returned"),
        ({"epoch": "1", "iteration": 1}, "Own.set_state_dict: 'epoch' is '1'; give it"),
        ({"epoch": 1, "iteration": -1}, "Own.set_state_dict: 'iteration' is -1; give it"),
        ([1], "updater: holds a list, not the state of an updater; use another"),
    ],
)
def test_a_file_with_something_else_is_refused_and_changes_nothing(tmp_path: Path, state: Any, message: str) -> None:
    save_state(tmp_path / "updater", state)
    updater = Own(seed=0)
    with pytest.raises(CheckpointError, match=message):
        updater.load(tmp_path / "updater")
    assert updater.state == UpdaterState()


def test_an_updater_that_keeps_what_no_file_can_hold_is_told_where_it_is(tmp_path: Path) -> None:
    class Keeping(UpdaterBase):
        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "loader": [iter(())]}

    with pytest.raises(CheckpointError, match=r"state\['loader'\]\[0\]: is a tuple_iterator, which cannot be saved"):
        Keeping().save(tmp_path / "updater")


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
