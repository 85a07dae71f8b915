"""How one batch trains the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from pipeline import Brain, Context, GeneralTrainer, OptimScheduler, Stage, Updater, UpdaterBase, UpdaterState, stages
from pipeline.brain.module_brain import ModuleBrain
from pipeline.checkpoint.pytree import save_state
from pipeline.compute.trainable import trainable_of
from pipeline.errors import CheckpointError, DataError, DivergedError


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


Config = Callable[..., dict[str, Any]]
Run = Callable[[dict[str, Any]], Context]
mse = nn.functional.mse_loss


class Plain(UpdaterBase):
    """Steps an optimizer of its own, which nobody else knows; returns what ``returned`` makes of the loss."""

    def __init__(self, model: nn.Module, returned: Any = None) -> None:
        super().__init__()
        self.model, self.returned = model, returned
        self.optimizer = SGD(model.parameters(), 0.1)

    def update(self, batch: Any) -> Any:
        self.optimizer.zero_grad()
        loss = mse(self.model(batch[0]), batch[1])
        torch.autograd.backward(loss)
        self.optimizer.step()
        self.log("size", len(batch[0]))
        return self.returned(loss) if self.returned else loss


class Through(UpdaterBase):
    """Leaves the batch to the Brain."""

    def __init__(self, brain: Brain) -> None:
        super().__init__()
        self.brain, self.numbers = brain, []  # type: ignore[var-annotated] # int

    def update(self, batch: Any) -> Tensor:
        self.numbers.append(self.brain.step)
        return self.brain.fit_batch(batch)


class Scheduled(UpdaterBase):
    """Steps the schedulers of the config; nothing in every ``idle``-th batch."""

    def __init__(self, model: nn.Module, optim_schedulers: dict[str, Any], idle: int = 0) -> None:
        super().__init__()
        self.model, self.optim_schedulers, self.idle, self.calls = model, optim_schedulers, idle, 0

    def update(self, batch: Any) -> Any:
        self.calls += 1
        if self.idle and self.calls % self.idle == 0:
            return None
        loss = mse(self.model(batch[0]), batch[1])
        for scheduler in self.optim_schedulers.values():
            scheduler.step({"loss": loss})
        return loss


def updating(config: Config, updater: Any, args: dict[str, Any] | None = None, **runner: Any) -> dict[str, Any]:
    """The config of a run (10 samples in batches of 4, 2 epochs) with an updater."""
    chosen = config(**runner)
    chosen["phase"][0]["updater"] = {"class_path": updater, "args": args or {}}
    return chosen


def counters(context: Context) -> tuple[int, ...]:
    state = context["train_state"]
    return state["iteration"], state["update"], state["epoch"], state["samples"]


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("updater", "args", "runner", "expected"),
    [
        (Plain, {}, {}, (6, 6, 2, 20)),
        (Plain, {"returned": lambda loss: None}, {}, (6, 6, 2, 20)),
        (Through, {}, {}, (6, 6, 2, 20)),
        (Through, {}, {"accum_grad": 2}, (6, 4, 2, 20)),
        (Scheduled, {}, {}, (6, 6, 2, 20)),
        (Scheduled, {}, {"accum_grad": 2}, (6, 4, 2, 20)),
        (Scheduled, {}, {"accum_grad": 9}, (6, 2, 2, 20)),
        (Scheduled, {"idle": 3}, {}, (6, 4, 2, 20)),
    ],
)
def test_iterations_updates_epochs_and_samples_are_counted_whatever_an_updater_does(
    config: Config, run: Run, updater: Any, args: dict[str, Any], runner: dict[str, Any], expected: tuple[int, ...]
) -> None:
    context = run(updating(config, updater, args, **runner))
    assert counters(context) == expected
    state = context["model"]["line"]["updater"].state
    assert (state.iteration, state.epoch) == (6, 2)


def test_an_updater_that_counts_its_iterations_itself_is_not_counted_twice(config: Config, run: Run) -> None:
    class Counting(Plain):
        def update(self, batch: Any) -> Any:
            self.state.iteration += 1
            return super().update(batch)

    context = run(updating(config, Counting))
    assert context["model"]["line"]["updater"].state.iteration == 6
    assert context["train_state"]["iteration"] == 6


@pytest.mark.parametrize("updater", [Plain, Through, Scheduled])
def test_the_loss_that_an_updater_returns_is_reported_as_that_of_the_brain_would_be(
    config: Config, run: Run, updater: Any
) -> None:
    expected = run(config())["metrics"]["line"]["loss"]
    assert run(updating(config, updater))["metrics"]["line"]["loss"] == pytest.approx(expected, rel=1e-6)


def test_several_losses_are_each_reported_and_what_an_updater_logs_too(config: Config, run: Run) -> None:
    returned = {"returned": lambda loss: {"main": loss, "other": loss * 0 + 2}}
    numbers = run(updating(config, Plain, returned))["metrics"]["line"]
    assert numbers["loss"] == pytest.approx(numbers["main"] + 2)
    assert numbers["other"] == pytest.approx(2)
    assert numbers["size"] == pytest.approx((4 * 4 + 4 * 4 + 2 * 2) / 10)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda loss: 1.5, "phase.line: Plain.update returned a float; return a scalar tensor, or a dict of them"),
        (lambda loss: loss.expand(2), r"Plain.update: the loss 'loss' has shape \(2,\); return a scalar"),
        (lambda loss: {"a": 1}, r"Plain.update returned a dict of 1; return a scalar tensor"),
    ],
)
def test_what_is_no_loss_is_refused(config: Config, run: Run, returned: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        run(updating(config, Plain, {"returned": returned}))


def test_losses_of_an_updater_that_are_not_finite_end_the_training(config: Config, run: Run) -> None:
    chosen = updating(config, Plain, {"returned": lambda loss: loss * float("nan")}, nonfinite_patience=2)
    with pytest.raises(DivergedError, match=r"phase.line: 'loss' is nan: 3 of its losses .* the first in iteration 1;"):
        run(chosen)


@pytest.mark.parametrize("updater", [Plain, Through, Scheduled])
def test_plugins_are_told_of_each_batch_once(config: Config, run: Run, recorder: Any, updater: Any) -> None:
    chosen = updating(config, updater, epochs=1)
    chosen["plugins"].append(recorder)
    run(chosen)
    told = [(hook, at) for hook, at, _ in recorder.calls if hook in ("before_batch", "after_batch")]
    assert told == [each for at in range(3) for each in (("before_batch", at), ("after_batch", at + 1))]
    after = [values for hook, _, values in recorder.calls if hook == "after_batch"]
    # The Brain computes them where the update goes through its fit_batch.
    assert [values["predictions"] is not None for values in after] == [updater is Through] * 3
    assert all(
        [(name, loss.requires_grad) for name, loss in values["losses"].items()] == [("loss", False)] for values in after
    )


def test_the_brain_knows_the_number_of_the_batch_and_which_is_the_last_within_an_updater(
    config: Config, run: Run
) -> None:
    class Announcing(Brain):
        def __init__(self) -> None:
            super().__init__({"net": nn.Linear(3, 1)})
            self.told: list[tuple[int, bool]] = []

        def compute_forward(self, batch: Any, stage: Stage) -> Any:
            return self.modules.net(batch[0])

        def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> Tensor:
            return mse(predictions, batch[1])

        def on_fit_batch_start(self, batch: Any, should_step: bool) -> None:
            self.told.append((self.step, should_step))

    chosen = updating(config, Through, accum_grad=9)
    chosen["phase"][0] |= {"model": Announcing, "loss": None}
    entry = run(chosen)["model"]["line"]
    assert entry["brain"].told == [(1, False), (2, False), (3, True)] * 2
    assert entry["updater"].numbers == [1, 2, 3] * 2


def test_a_fit_batch_of_its_own_that_uses_the_one_it_replaces_is_counted_once() -> None:
    class Own(ModuleBrain):
        def fit_batch(self, batch: Any) -> Tensor:
            return super().fit_batch(batch)

    brain = Own(nn.Linear(3, 1), mse)
    brain.opt_class = lambda parameters: SGD(parameters, 0.1)
    brain.fit(range(2), [(torch.ones(3), torch.ones(1))] * 5, train_loader_kwargs={"batch_size": 2})
    assert trainable_of(brain).counters == {"iteration": 6, "update": 6, "epoch": 2, "samples": 10, "phase_index": 0}
    assert trainable_of(brain).numbers.loss.batches == brain.step == 3


class ByHand(UpdaterBase):
    """Computes with the Brain, and steps by itself; it says nothing of samples, epochs or precision."""

    def __init__(self, brain: Brain, optim_schedulers: dict[str, OptimScheduler]) -> None:
        super().__init__()
        self.brain, self.scheduler = brain, optim_schedulers["main"]
        self.types: set[torch.dtype] = set()

    def update(self, batch: Any) -> Tensor:
        predictions = self.brain.compute_forward(batch, Stage.TRAIN)
        self.types.add(predictions.dtype)
        loss = self.brain.compute_objectives(predictions, batch, Stage.TRAIN)
        assert isinstance(loss, Tensor)
        self.scheduler.step({"loss": loss})
        return loss


def by_hand(
    config: Callable[..., dict[str, Any]], schedule: dict[str, Any], updater: Any, **runner: Any
) -> dict[str, Any]:
    """What a run leaves for its phase, with the updater or (None) the Brain's own."""
    chosen = config(**runner)
    del chosen["hyper_parameters"]["optimizer"]
    chosen["phase"][0]["optim_schedulers"] = {"main": schedule}
    if updater:
        chosen["phase"][0]["updater"] = {"class_path": updater}
    entry: dict[str, Any] = GeneralTrainer(chosen).run()["model"]["line"]
    return entry


@pytest.mark.parametrize(
    ("name", "more"), [("constant", {"accum_grad": 3}), ("exponential_decay", {"decay_factor": 0.5})]
)
def test_steps_by_hand_count_samples_and_epochs_as_the_brain_does(
    config: Callable[..., dict[str, Any]], name: str, more: dict[str, Any]
) -> None:
    schedule = {"class": name, "args": {"optim_type": "SGD", "optim_conf": {"lr": 0.1}, **more}}
    own, brains = (by_hand(config, schedule, updater, epochs=3) for updater in (ByHand, None))
    assert torch.equal(own["model"].weight, brains["model"].weight)
    assert own["optim_schedulers"]["main"].get_lr() == brains["optim_schedulers"]["main"].get_lr()


def test_an_updater_of_ones_own_computes_in_the_precision_of_the_run(config: Callable[..., dict[str, Any]]) -> None:
    schedule = {"class": "constant", "args": {"optim_type": "SGD", "optim_conf": {"lr": 0.1}}}
    assert by_hand(config, schedule, ByHand, precision="bf16")["updater"].types == {torch.bfloat16}
    assert by_hand(config, schedule, ByHand)["updater"].types == {torch.float32}
