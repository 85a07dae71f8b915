"""Which objects in the attributes of a Brain or updater are saved, and which are named because they are not."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from pipeline import Brain, StandardUpdater, Updater, UpdaterBase
from pipeline.brain.checkpointer import Checkpointer
from pipeline.checkpoint.parts import (
    hidden_parts,
    options_of_parts,
    owners_of,
    part_states,
    parts_of,
    restore_parts,
)
from pipeline.data.loader import make_loader
from pipeline.errors import CheckpointError
from pipeline.experiment.experiment_config import Settings
from pipeline.metrics.auc import AUC
from pipeline.metrics.meters import Meters
from pipeline.optim.schedules import Noam


class Counter:
    """An object of the user with a state."""

    def __init__(self, state: Any = 0) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


class Holder:
    """An object of the user without a state of its own."""

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


class SlotHolder:
    """The same, with slots."""

    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held


def optimizer() -> SGD:
    return SGD([nn.Parameter(torch.zeros(2))], 0.1, momentum=0.9)


def models(**attributes: Any) -> dict[str, Any]:
    """A phase ``p`` whose updater has these attributes."""
    brain = Brain({"net": nn.Linear(2, 1)})
    updater = Updater(brain)
    vars(updater).update(attributes)
    return {"p": {"model": brain, "brain": brain, "updater": updater}}


def found(phases: dict[str, Any]) -> dict[str, Any]:
    """The parts by the rest of their place."""
    return {place.removeprefix("phase.p.updater."): part for place, part in parts_of(phases).items()}


def hidden(phases: dict[str, Any], **recoverables: Any) -> list[str]:
    places = hidden_parts(phases, owners_of(phases), recoverables)
    return [place.removeprefix("phase.p.updater.") for place in places]


KINDS: dict[str, Callable[[], Any]] = {
    "module": lambda: nn.Linear(2, 1),
    "optimizer": optimizer,
    "schedule": lambda: StepLR(optimizer(), 1),
    "scaler": lambda: torch.amp.GradScaler("cpu"),
    "OptimScheduler": lambda: Noam("SGD", {"lr": 0.1}, nn.Linear(2, 1), warmup_steps=2),
    "object": Counter,
}


@pytest.mark.parametrize("kind", KINDS)
def test_object_with_state_is_found_in_attributes_and_their_items(kind: str) -> None:
    make = KINDS[kind]
    own = [make() for _ in range(5)]
    held = {
        "one": own[0],
        "listed": ["text", own[1]],
        "pair": (own[2], None),
        "named": {"first": own[3]},
        "space": SimpleNamespace(first=own[4]),
    }

    parts = found(models(**held))

    places = ["one", "listed.1", "pair.0", "named.first", "space.first"]
    assert [part for place in places if (part := parts.get(place)) is not None] == own
    assert parts.keys() == {*places}


def test_object_in_several_places_is_found_once() -> None:
    own = Counter()
    assert [*found(models(first=own, second=[own]))] == ["first"]


def test_long_list_is_searched_if_its_first_item_has_state() -> None:
    assert len(found(models(many=[Counter() for _ in range(150)], data=[0.0] * 150))) == 150


class StatefulLoader(DataLoader[Any], Counter):
    """A loader that keeps its place, as torchdata's StatefulDataLoader."""

    def __init__(self) -> None:
        DataLoader.__init__(self, [1, 2])


class Rows(Dataset[Any], Counter):
    """A dataset with a state."""


class Stream(IterableDataset[Any], Counter):
    """A stream with a state."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())


class Order(Sampler[int], Counter):
    """A sampler with a state."""

    def __iter__(self) -> Iterator[int]:
        return iter(())


class Batches(Counter):
    """A loader of the user's own that keeps its place."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())


class Teacher(Brain):
    """A Brain of the user that trains nothing."""


NOT_PARTS: dict[str, Callable[[], Any]] = {
    "loader of torch": StatefulLoader,
    "loader of ours": lambda: make_loader(torch.zeros(4), seed=0, batch_size=2),
    "loader of the user": Batches,
    "dataset": Rows,
    "stream": Stream,
    "sampler": Order,
    "meters": Meters,
    "metric": AUC,
    "checkpointer": lambda: Checkpointer("checkpoints"),
    "Brain": lambda: Teacher({"net": nn.Linear(2, 1)}),
    "updater": UpdaterBase,
    "class": lambda: SGD,
    "class of the user": lambda: Counter,
    "disabled scaler": lambda: torch.amp.GradScaler("cpu", enabled=False),
    "settings": lambda: Settings({"state_dict": 1, "load_state_dict": 2}, "config"),
}


@pytest.mark.parametrize("kind", NOT_PARTS)
def test_data_and_objects_of_the_framework_are_no_parts(kind: str, tmp_path: Any) -> None:
    assert not found(models(held=NOT_PARTS[kind]()))


def test_weights_schedulers_and_owners_are_no_parts() -> None:
    class Saving(UpdaterBase):
        """An updater that a checkpoint would take for a part if it were none of a phase."""

        def load_state_dict(self, state: Any) -> None:
            self.set_state_dict(state)

    phases = models()
    brain = phases["p"]["brain"]
    scheduler = Noam("SGD", {"lr": 0.1}, brain.modules, warmup_steps=2)
    updater = StandardUpdater(brain.modules["net"], scheduler.optimizer, Batches())
    phases["q"] = {"model": brain, "brain": brain, "updater": Saving()}
    phases["p"] |= {"optim_schedulers": {"main": scheduler}, "updater": updater}
    updater.view = nn.Sequential(brain.modules["net"])  # type: ignore[attr-defined]
    updater.other = phases["q"]["updater"]  # type: ignore[attr-defined]

    assert not parts_of(phases)


def test_search_asks_no_instance_for_attributes() -> None:
    """A view of a config composes the nearest names where it lacks an attribute."""
    asked = []

    class Computing:
        def __getattr__(self, name: str) -> Any:
            asked.append(name)
            raise AttributeError(name)

    parts_of(models(config=Computing(), listed=[Computing()]))

    assert not asked


def test_cost_does_not_depend_on_the_objects_below() -> None:
    def calls(count: int) -> int:
        tree = Holder(children=[Holder(name="x", data={"a": [1, 2]}) for _ in range(count)])
        phases = models(tree=tree)
        made = []
        sys.setprofile(lambda frame, event, argument: made.append(event) if event.endswith("call") else None)
        try:
            parts_of(phases)
        finally:
            sys.setprofile(None)
        return len(made)

    assert calls(1_000) == calls(10)


def states(phases: dict[str, Any], **recoverables: Any) -> dict[str, Any]:
    """The states of the parts by the rest of their place."""
    parts = parts_of(phases)
    kept = part_states(parts, options_of_parts(parts), {}, recoverables)
    return {place.removeprefix("phase.p.updater."): state for place, state in kept.items()}


@pytest.mark.parametrize("state", [0, {}, [], False, "", torch.zeros(3)])
def test_state_of_a_users_object_is_kept_as_it_is(state: Any) -> None:
    """A count that has come to zero, and a list that was cleared, are states too."""
    phases = models(count=Counter(state))
    kept = states(phases)["count"]

    phases["p"]["updater"].count.state = "other"
    parts = parts_of(phases)
    restore_parts(parts, {"phase.p.updater.count": kept}, options_of_parts(parts), "here")

    assert phases["p"]["updater"].count.state is state


def test_object_without_state_is_left_out() -> None:
    phases = models(none=Counter(None))
    assert states(phases) == {"none": None}

    parts = parts_of(phases)
    restore_parts(parts, {"phase.p.updater.none": None}, options_of_parts(parts), "here")
    assert phases["p"]["updater"].none.state is None


def test_recoverable_is_saved_under_its_name_alone(tmp_path: Any) -> None:
    by_itself, by_functions, other = Counter(1), Counter(2), Counter(3)
    checkpointer = Checkpointer(tmp_path, {"one": by_itself})
    checkpointer.add_recoverable("two", by_functions, lambda *_: None, lambda *_: None)

    kept = states(models(one=by_itself, two=by_functions, three=other), **checkpointer.recoverables)

    assert kept == {"one": None, "two": None, "three": 3}


@pytest.mark.parametrize("made", [Counter(1), optimizer()])
def test_part_that_is_made_late_is_refused(made: Any) -> None:
    phases = models()
    configured = options_of_parts(parts_of(phases))
    phases["p"]["updater"].late = [made]

    with pytest.raises(CheckpointError, match=r"phase\.p\.updater\.late\.0 was made after the training had begun"):
        part_states(parts_of(phases), configured)
    assert part_states(parts_of(phases), configured, {}, {"late": made}) == {"phase.p.updater.late.0": None}


def test_error_of_a_users_object_that_loads_keeps_its_type() -> None:
    class Failing(Counter):
        def load_state_dict(self, state: Any) -> None:
            raise ValueError(state)

    parts = parts_of(models(own=Failing()))
    with pytest.raises(ValueError, match="1") as caught:
        restore_parts(parts, {"phase.p.updater.own": 1}, options_of_parts(parts), "here")
    assert "phase.p.updater.own" in caught.value.__notes__[0]


def test_deeper_objects_are_hidden() -> None:
    phases = models(
        helper=Holder(optimizer=optimizer()),
        slotted=SlotHolder([Counter()]),
        groups={"a": [optimizer()]},
        teacher=Teacher({"net": nn.Linear(2, 1)}),
    )

    assert not found(phases)
    assert sorted(hidden(phases)) == ["groups.a.0", "helper.optimizer", "slotted.held.0", "teacher.modules"]


def test_objects_that_are_kept_are_not_hidden() -> None:
    class Saving(Holder, Counter):
        """Keeps what it holds by itself."""

    module, registered = nn.Linear(2, 1), optimizer()
    phases = models(
        own=Saving(state=0, optimizer=optimizer()),
        module=module,
        views=Holder(layer=module, empty=nn.Identity()),
        named=Holder(optimizer=registered),
        loader=StatefulLoader(),
        kind=Holder(optimizer=SGD),
    )
    phases["p"]["updater"].views.weights = phases["p"]["brain"].modules["net"]

    assert not hidden(phases, registered=registered)


def test_long_chain_of_objects_is_searched() -> None:
    """Each object is visited once, and only so many attributes and items lead to one."""
    chain = Holder(optimizer=optimizer())
    for _ in range(3_000):
        chain = Holder(following=chain)
    chain.itself = chain

    assert not hidden(models(chain=chain))
