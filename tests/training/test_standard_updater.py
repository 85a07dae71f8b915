"""StandardUpdater beside PaddleSpeech's own, interrupted and gone on with, and as the updater of a phase.

The figures in ``paddlespeech.json`` are what ``trained(kind, case)`` gave with PaddleSpeech's StandardUpdater (t2s, 2024-03) on
torch's CPU: paddle's names stood for torch's, ``clear_gradient`` and ``update`` of its optimizer, which paddle does not have
either, for ``zero_grad`` and ``step``, and its reporter was asked for the losses. Ours gave the same in every bit.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from pipeline import GeneralTrainer, StandardUpdater, UpdaterState, make_loader
from pipeline.check.checker import check
from pipeline.errors import CheckpointError, DataError
from tests.training.conftest import KilledError, in_turn, with_release

FIGURES = json.loads(Path(__file__).with_name("paddlespeech.json").read_text(encoding="utf-8"))


class Model(nn.Module):
    """Computes its loss itself, one or several; its dropout draws from the generator that the order is drawn from, too."""

    def __init__(self, returns: str = "one") -> None:
        super().__init__()
        self.line, self.drop, self.norm, self.returns = nn.Linear(3, 2), nn.Dropout(0.3), nn.BatchNorm1d(3), returns

    def forward(self, inputs: Tensor, target: Tensor) -> Any:
        error = self.line(self.drop(self.norm(inputs))) - target
        losses = {"l1": error.abs().mean(), "l2": error.square().mean()}
        if self.returns == "main":
            return {**losses, "main": 0.5 * losses["l1"] + losses["l2"]}
        return losses if self.returns == "several" else losses["l2"]


def table(samples: int = 10) -> TensorDataset:
    values = torch.randn(samples, 5, generator=torch.Generator().manual_seed(7))
    return TensorDataset(values[:, :3], values[:, 3:])


class Endless:
    """A dataloader without a length."""

    def __iter__(self) -> Iterator[Any]:
        return iter([[inputs[None].repeat(2, 1), target[None].repeat(2, 1)] for inputs, target in table(4)])


LOADERS: dict[str, Callable[[], Any]] = {
    "in order": lambda: DataLoader(table(), batch_size=4),
    "shuffled": lambda: DataLoader(table(), batch_size=4, shuffle=True),
    "of a generator": lambda: DataLoader(table(), 4, shuffle=True, generator=torch.Generator().manual_seed(5)),
    "without a length": Endless,
}
OURS: dict[str, Callable[[], Any]] = {
    **LOADERS,
    "a list": lambda: [[table().tensors[0][:3], table().tensors[1][:3]]] * 3,
    "of ours": lambda: make_loader(table(), seed=3, batch_size=4, shuffle=True),
    "of workers": lambda: make_loader(table(), seed=3, batch_size=4, shuffle=True, num_workers=1),
}

# Name -> what the model returns, the optimizer, the dataloader.
CASES = {
    f"{returns}, {kind}, {loader}": (returns, kind, loader)
    for returns in ("one", "several", "main")
    for kind in ("SGD", "Adam")
    for loader in LOADERS
}


def made(kind: Any, case: tuple[str, str, str], patch: Callable[[Any], Any] = lambda optimizer: optimizer) -> Any:
    torch.manual_seed(0)
    random.seed(0)
    model = Model(case[0])
    optimizer = patch(getattr(torch.optim, case[1])(model.parameters(), lr=0.05))
    return kind(model, optimizer, OURS[case[2]]())


def run(updater: Any, updates: int) -> list[Any]:
    """The losses and counters of each update."""
    found = []
    for _ in range(updates):
        losses = {name: loss.item() for name, loss in sorted(updater.update().items())}
        found.append([losses, updater.state.iteration, updater.state.epoch])
    return found


def weights(updater: Any) -> list[float]:
    return [number for value in updater.model.state_dict().values() for number in value.flatten().tolist()]


def trained(kind: Any, case: str, *patch: Any) -> dict[str, Any]:
    updater = made(kind, CASES[case], *patch)
    return {"losses": run(updater, 8), "weights": weights(updater)}


@in_turn("case", CASES)
def test_by_hand_it_has_the_losses_counters_and_weights_of_paddlespeechs(case: str) -> None:
    found, expected = trained(StandardUpdater, case), FIGURES[case]
    for (losses, *counters), (theirs, *counted) in zip(found["losses"], expected["losses"], strict=True):
        assert losses == pytest.approx(theirs, rel=1e-5)
        assert counters == counted
    assert found["weights"] == pytest.approx(expected["weights"], rel=0, abs=1e-5)


class OwnEpochs(StandardUpdater):
    """Assigns the iterator itself, as PaddleSpeech's do."""

    def new_epoch(self) -> None:
        self.train_iterator = iter(self.dataloader)


class OwnReading(StandardUpdater):
    """Reads two batches for one update."""

    def read_batch(self) -> Any:
        for _ in range(2):
            try:
                batch = next(self.train_iterator)
            except StopIteration:
                self.new_epoch()
                batch = next(self.train_iterator)
        return batch


class OwnConstructor(StandardUpdater):
    """Does not call the constructor that it replaces and reads at once, as PaddleSpeech's updaters of several models."""

    def __init__(self, model: Any, optimizer: Any, dataloader: Any) -> None:
        self.model, self.models, self.optimizers = model, {"generator": model}, {"generator": optimizer}
        self.dataloader, self.state = dataloader, UpdaterState(iteration=0, epoch=0)
        self.train_iterator = iter(self.dataloader)

    def update_core(self, batch: Any) -> Any:
        loss = self.model(*batch)
        self.log("mine", loss.detach())
        self.optimizers["generator"].zero_grad()
        loss.backward()
        self.optimizers["generator"].step()
        return {"loss": loss.detach()}


def gone_on(kind: Any, loader: str, cut: int, file: Path) -> tuple[Any, Any]:
    """(losses, weights) of 12 updates in one go, and of a part, saved and loaded."""
    whole = made(kind, ("one", "Adam", loader))
    losses = run(whole, 12)
    first = made(kind, ("one", "Adam", loader))
    before = run(first, cut)
    first.save(file)
    second = made(kind, ("one", "Adam", loader))
    torch.manual_seed(99)
    random.random()
    second.load(file)
    return (losses, weights(whole)), ([*before, *run(second, 12 - cut)], weights(second))


ENDS_AND_INSIDES = [*product(OURS, (3, 5)), *product(["shuffled"], (0, 1, 6))]
"""Each loader at the end of an epoch and inside one; one of them before the first update and in other places, too."""


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(("loader", "cut"), with_release(ENDS_AND_INSIDES, product(OURS, (0, 1, 3, 5, 6))))
def test_it_goes_on_from_its_file_bit_for_bit_after_an_epoch_and_within_one(
    tmp_path: Path, loader: str, cut: int
) -> None:
    whole, parts = gone_on(StandardUpdater, loader, cut, tmp_path / "updater")
    assert whole == parts


KINDS = [OwnEpochs, OwnReading, OwnConstructor]
READ_LOADERS = ["shuffled", "of a generator", "without a length", "of ours"]
CUTS = [*product(KINDS, READ_LOADERS, (2,)), *product(KINDS, ["shuffled", "of ours"], (3,))]
"""After two updates each kind is inside an epoch, after three at the end of one."""


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(("kind", "loader", "cut"), with_release(CUTS, product(KINDS, READ_LOADERS, (1, 2, 3, 4))))
def test_so_does_one_that_reads_in_its_own_way(tmp_path: Path, kind: Any, loader: str, cut: int) -> None:
    whole, parts = gone_on(kind, loader, cut, tmp_path / "updater")
    assert whole == parts


def test_a_loader_that_knows_its_place_does_not_read_what_was_taken_again(tmp_path: Path) -> None:
    class Counting(TensorDataset):
        reads = 0

        def __getitem__(self, index: Any) -> Any:
            Counting.reads += 1
            return super().__getitem__(index)

    def build() -> StandardUpdater:
        model = Model()
        loader = make_loader(Counting(*table().tensors), seed=3, batch_size=2, shuffle=True)
        return StandardUpdater(model, torch.optim.SGD(model.parameters(), 0.1), loader)

    first, second = build(), build()
    run(first, 3)
    first.save(tmp_path / "updater")
    second.load(tmp_path / "updater")
    Counting.reads = 0
    run(second, 1)
    assert Counting.reads == 2


def test_two_epochs_and_two_are_four(tmp_path: Path) -> None:
    def epochs(updater: Any, count: int) -> None:
        while updater.state.epoch < count:
            updater.update()

    whole, first, second = (made(StandardUpdater, ("one", "Adam", "shuffled")) for _ in range(3))
    torch.manual_seed(4)
    epochs(whole, 4)
    torch.manual_seed(4)
    epochs(first, 2)
    first.save(tmp_path / "updater")
    second.load(tmp_path / "updater")
    epochs(second, 4)
    assert weights(whole) == weights(second)
    assert second.state == UpdaterState(iteration=12, epoch=4)


def test_its_state_has_the_names_of_paddlespeechs_and_one_without_a_place_in_the_data_is_taken() -> None:
    first, second = made(StandardUpdater, ("one", "SGD", "in order")), made(StandardUpdater, ("one", "SGD", "in order"))
    run(first, 4)
    state = {key: first.state_dict()[key] for key in ("epoch", "iteration", "main_params", "main_optimizer")}
    run(second, 2)
    second.set_state_dict(state)
    assert second.state == UpdaterState(iteration=4, epoch=1)
    assert weights(first) == weights(second)
    assert torch.equal(second.read_batch()[0], table().tensors[0][:4])


def test_several_models_and_optimizers_are_in_its_state() -> None:
    class Two(StandardUpdater):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.models["other"], self.optimizers = nn.Linear(1, 1), {"main": self.optimizer}

    updater = made(Two, ("one", "SGD", "in order"))
    updater.models["other"].eval()
    updater.update()
    assert updater.models["other"].training
    assert updater.state_dict().keys() >= {"main_params", "other_params", "main_optimizer"}


def test_a_state_of_another_is_refused_with_what_it_lacks() -> None:
    updater = made(StandardUpdater, ("one", "SGD", "in order"))
    state = updater.state_dict()
    del state["main_optimizer"]
    with pytest.raises(
        CheckpointError, match=r"StandardUpdater\.set_state_dict: the state of main_optimizer does not fit"
    ):
        updater.set_state_dict(state)


def test_a_dataloader_without_a_batch_is_an_error() -> None:
    model = Model()
    updater = StandardUpdater(model, torch.optim.SGD(model.parameters(), 0.1), [])
    with pytest.raises(DataError, match="read_batch: the dataloader gave no batch in epoch 0; check the dataset"):
        updater.update()
    assert updater.updates_per_epoch == 0


def test_a_model_that_returns_no_loss_is_named() -> None:
    model = nn.Linear(3, 2)
    updater = StandardUpdater(model, torch.optim.SGD(model.parameters(), 0.1), [[torch.ones(4, 3)]])
    with pytest.raises(DataError, match=r"the loss 'loss' has shape \(4, 2\); return a scalar"):
        updater.update()


@pytest.mark.parametrize(
    "batch", [{"inputs": torch.ones(2, 3), "target": torch.ones(2, 2)}, [torch.ones(2, 3), torch.ones(2, 2)]]
)
def test_the_items_of_a_batch_go_to_the_model_by_name_or_in_order(batch: Any) -> None:
    model = Model()
    assert StandardUpdater(model, torch.optim.SGD(model.parameters(), 0.1), [batch]).update().keys() == {"loss"}


# As the updater of a phase.

Config = Callable[..., dict[str, Any]]


def phase(
    config: Config, updater: Any, *, returns: str = "one", schedulers: Mapping[str, Any] | None = None, **runner: Any
) -> dict[str, Any]:
    chosen = config(**runner)
    chosen["dataset"] = [{"name": "data", "class_path": table, "batch_size": 4, "shuffle": True}]
    own = {"optim_schedulers": schedulers} if schedulers else {}
    settings = {
        "name": "line",
        "model": Model,
        "model_args": {"returns": returns},
        "dataset_name": "data",
        "updater": updater,
    }
    chosen["phase"] = [{**settings, **own}]
    if schedulers:
        del chosen["hyper_parameters"]
    return chosen


def by_hand(epochs: int, returns: str, *, read_at_once: bool = False) -> dict[str, Tensor]:
    """The loop of a tutorial over the same batches; to begin to read draws a number."""
    torch.manual_seed(0)
    model = Model(returns)
    optimizer, loader = (
        torch.optim.SGD(model.parameters(), 0.1),
        make_loader(table(), seed=0, batch_size=4, shuffle=True),
    )
    if read_at_once:
        iter(loader)
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        for batch in loader:
            losses = model(*batch)
            loss = losses["l1"] + losses["l2"] if returns == "several" else losses
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.state_dict()


class OwnStep(StandardUpdater):
    """In PaddleSpeech's manner: a constructor and a step of its own."""

    def __init__(
        self, model: Any, optimizer: Any, dataloader: Any, init_state: Any = None, weight: float = 1.0
    ) -> None:
        super().__init__(model, optimizer, dataloader, init_state)
        self.weight = weight

    def update_core(self, batch: Any) -> None:
        loss = self.weight * self.model(*batch)
        self.log("mine", loss.detach())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


@pytest.mark.parametrize(
    ("updater", "returns", "numbers"),
    [
        ({"class_path": "pipeline.StandardUpdater"}, "one", {"loss"}),
        ({"class_path": StandardUpdater}, "several", {"loss", "l1", "l2"}),
        ({"class_path": OwnStep, "args": {"weight": 1.0}}, "one", {"loss", "mine"}),
        ({"class_path": OwnConstructor}, "one", {"loss", "mine"}),
    ],
)
def test_as_the_updater_of_a_phase_it_trains_as_a_loop_by_hand(
    config: Config, updater: Any, returns: str, numbers: set[str]
) -> None:
    context = GeneralTrainer(phase(config, updater, returns=returns, epochs=2)).run()
    expected = by_hand(2, returns, read_at_once=updater["class_path"] is OwnConstructor)
    state = context["model"]["line"]["model"].state_dict()
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    assert context["metrics"]["line"].keys() == numbers
    assert context["model"]["line"]["updater"].state == UpdaterState(iteration=6, epoch=2)


def test_a_schedule_with_windows_sets_its_rates(config: Config) -> None:
    conf = {"optim_type": "SGD", "optim_conf": {"lr": 0.1}, "warmup_steps": 4, "accum_grad": 3}
    chosen = phase(config, {"class_path": StandardUpdater}, schedulers={"a": {"class": "noam", "args": conf}}, epochs=3)
    context = GeneralTrainer(chosen).run()
    scheduler = context["model"]["line"]["optim_schedulers"]["a"]
    assert (scheduler.real_step, scheduler.get_lr()) == (3, pytest.approx(0.1 * 3 / 4))
    assert context["train_state"]["update"] == 3


def test_its_validation_is_what_the_model_returns_in_evaluation_mode(config: Config) -> None:
    chosen = phase(config, {"class_path": StandardUpdater}, returns="several", epochs=1)
    chosen["phase"][0]["valid_dataset_name"] = "data"
    context = GeneralTrainer(chosen).run()
    model = context["model"]["line"]["model"].eval()
    with torch.no_grad():
        losses = model(*table().tensors)
    metrics = context["metrics"]["line"]
    assert metrics["valid_l1"] == pytest.approx(losses["l1"].item(), rel=1e-5)
    assert metrics["valid_loss"] == pytest.approx((losses["l1"] + losses["l2"]).item(), rel=1e-5)


def test_a_checkpoint_of_a_run_has_its_counters_alone_beside_the_weights(config: Config) -> None:
    context = GeneralTrainer(phase(config, {"class_path": StandardUpdater}, epochs=1)).run()
    updater = context["model"]["line"]["updater"]
    assert updater.state_dict() == {"epoch": 1, "iteration": 3}
    updater.set_state_dict({"epoch": 4, "iteration": 12})
    assert updater.state == UpdaterState(iteration=12, epoch=4)


class Killing(StandardUpdater):
    """Dies in an update."""

    at = 0

    def update_core(self, batch: Any) -> Any:
        if self.state.iteration == Killing.at:
            raise KilledError
        return super().update_core(batch)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("at", [2, 4])
def test_a_run_that_was_killed_within_an_epoch_goes_on_bit_for_bit(config: Config, at: int) -> None:
    conf = {"optim_type": "Adam", "optim_conf": {"lr": 0.1}, "accum_grad": 2}
    schedulers = {"main": {"class": "noam", "args": {**conf, "warmup_steps": 3}}}
    Killing.at = -1
    chosen = phase(config, {"class_path": Killing}, schedulers=schedulers, epochs=3, save_interval=1)
    whole = GeneralTrainer(chosen).run()
    Killing.at = at
    chosen = {**chosen, "name": f"killed-{at}"}
    with pytest.raises(KilledError):
        GeneralTrainer(chosen).run()
    Killing.at = -1
    resumed = GeneralTrainer(chosen, resume="auto").run()
    states = [context["model"]["line"]["model"].state_dict() for context in (whole, resumed)]
    assert resumed["model"]["line"]["updater"].state == UpdaterState(iteration=9, epoch=3)
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


UNCALLED = """from pipeline import StandardUpdater


class Reading(StandardUpdater):
    def read_batch(self):
        return super().read_batch()

    def new_epoch(self):
        self.train_iterator = iter(self.dataloader)
"""
CALLED = """
    def update(self, batch=None):
        return self.update_core(self.read_batch())
"""


@pytest.mark.parametrize(
    ("source", "methods"),
    [
        (
            UNCALLED,
            {"read_batch": "the run reads the batches", "new_epoch": "the run begins the epochs; write a plugin"},
        ),
        # Where its own update calls one, that is the user's affair.
        (UNCALLED + CALLED, {"new_epoch": "the run begins the epochs"}),
    ],
)
def test_what_a_run_does_itself_is_a_fault_in_an_updater(
    config: Config, tmp_path: Path, source: str, methods: dict[str, str]
) -> None:
    (tmp_path / "own.py").write_text(source, encoding="utf-8")
    faults = check(phase(config, {"class_path": f"{tmp_path}/own.py:Reading"}))
    found = {fault.message.partition(" ")[0]: fault.message for fault in faults}
    assert found.keys() == {f"Reading.{name}" for name in methods}
    assert all(f"is called by nobody; {remedy}" in found[f"Reading.{name}"] for name, remedy in methods.items())


def test_a_phase_with_several_optimizers_says_that_it_takes_one(config: Config) -> None:
    scheduler = {"class": "constant", "args": {"optim_type": "SGD", "optim_conf": {"lr": 0.1}}}
    faults = check(
        phase(config, {"class_path": "pipeline.StandardUpdater"}, schedulers={"a": scheduler, "b": scheduler})
    )
    assert [fault.message for fault in faults] == [
        "takes one optimizer, and the phase has a, b; let it take optim_schedulers, by name"
    ]


def test_the_counters_with_which_it_begins_may_be_a_mapping_as_a_config_has_them() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    updater = StandardUpdater(model, optimizer, [], {"iteration": 3})
    assert updater.state == UpdaterState(3, 0)
