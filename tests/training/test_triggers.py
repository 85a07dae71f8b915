"""When something is due."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

from pipeline import Context, ExperimentBase, GeneralTrainer, Trigger, hookimpl, make_loader
from pipeline.config.schema import Interval, RunnerSchema
from pipeline.engine.triggers import NEVER, IntervalTrigger, Schedule
from pipeline.errors import ConfigError, DataError
from tests.training.conftest import Kill, KilledError, linear_config, table


def at(iteration: int, update: int = 0) -> dict[str, int]:
    """Counters of a training."""
    return {"iteration": iteration, "update": update}


@pytest.mark.parametrize(("length", "start", "due"), [(3, 0, [3, 6, 9]), (3, 4, [6, 9]), (1, 8, [9, 10]), (11, 0, [])])
def test_an_interval_of_iterations_is_due_at_its_multiples(length: int, start: int, due: list[int]) -> None:
    trigger = IntervalTrigger([Interval(length, "iteration")], at(start))
    assert [iteration for iteration in range(start + 1, 11) if trigger.fires(at(iteration))] == due


def test_whoever_asks_only_when_told_to_look_misses_nothing() -> None:
    triggers = IntervalTrigger([Interval(4, "iteration"), Interval(6, "iteration")], at(0))
    looked, iteration = [], 0
    while (iteration := triggers.next_check(at(iteration))) <= 20:
        assert triggers.fires(at(iteration))
        looked.append(iteration)
    assert looked == [4, 6, 8, 12, 16, 18, 20]


def test_an_interval_of_epochs_is_due_after_them_and_never_at_an_iteration() -> None:
    trigger = IntervalTrigger([Interval(2, "epoch")], at(0))
    assert [epochs for epochs in range(1, 7) if trigger.fires_after(epochs)] == [2, 4, 6]
    assert trigger.next_check(at(1)) == NEVER
    assert not trigger.fires(at(2))


@pytest.mark.parametrize("unit", ["iteration", "update", "second", "minute", "hour"])
def test_no_other_interval_is_due_after_an_epoch(unit: str) -> None:
    assert not IntervalTrigger([Interval(1, unit)], at(0)).fires_after(1)


def test_an_interval_of_seconds_is_due_once_after_them() -> None:
    trigger = IntervalTrigger([Interval(1, "second")], at(0))
    assert not trigger.fires(at(1))
    time.sleep(1.01)
    assert trigger.fires(at(2))
    assert not trigger.fires(at(3))


def test_the_clock_is_looked_at_the_more_rarely_the_faster_iterations_are() -> None:
    fast, slow = IntervalTrigger([Interval(100, "second")], at(0)), IntervalTrigger([Interval(1, "second")], at(0))
    fast.fires(at(1))
    time.sleep(0.3)
    slow.fires(at(1))
    assert fast.next_check(at(1)) == 1 + 100
    assert slow.next_check(at(1)) == 1 + 1


def test_a_minute_is_sixty_seconds_and_an_hour_sixty_minutes() -> None:
    clocks = IntervalTrigger([Interval(2, "minute"), Interval(3, "hour")], at(0)).clocks
    assert [clock.seconds for clock in clocks] == [120, 3 * 3600]


@pytest.mark.parametrize("accum_grad", [1, 3])
def test_an_interval_of_updates_is_due_with_them_and_is_looked_for_ever_more_closely(accum_grad: int) -> None:
    trigger, due, looked, iteration = IntervalTrigger([Interval(4, "update")], at(0)), [], 0, 0
    while iteration < 20 * accum_grad:
        iteration = trigger.next_check(at(iteration, iteration // accum_grad))
        looked += 1
        if trigger.fires(at(iteration, iteration // accum_grad)):
            due.append(iteration // accum_grad)
    assert due == [4, 8, 12, 16, 20]
    assert looked <= (5 if accum_grad == 1 else 30)


def test_without_intervals_nothing_is_ever_due() -> None:
    triggers = IntervalTrigger([], at(0))
    assert triggers.next_check(at(1)) == NEVER
    assert not triggers.fires(at(1))
    assert not triggers.fires_after(1)


def test_each_of_several_intervals_keeps_its_own_count() -> None:
    triggers = IntervalTrigger([Interval(2, "iteration"), Interval(3, "iteration"), Interval(5, "epoch")], at(0))
    assert [iteration for iteration in range(1, 10) if triggers.fires(at(iteration))] == [2, 3, 4, 6, 8, 9]
    assert [epochs for epochs in range(1, 11) if triggers.fires_after(epochs)] == [5, 10]


def agenda(iteration: int = 0, **runner: Any) -> Schedule:
    """Of a runner that has nothing to do but what it is told."""
    idle = {"print_interval": None, "valid_interval": None, "save_interval": None}
    return Schedule.of_runner(
        RunnerSchema.model_validate({"name": "train", "class": "train", **idle, **runner}), at(iteration)
    )


def looks(what: Schedule, last: int, update_every: int = 1) -> dict[int, tuple[bool, ...]]:
    """Iteration -> what is due there, for those at which it asks to be looked at."""
    found, state = {}, {"iteration": 0, "update": 0, "epoch": 0}
    while (iteration := what.next_check(state)) <= last:
        state |= {"iteration": iteration, "update": iteration // update_every}
        found[iteration] = (*what.due(state), what.over(state))
        if what.over(state):
            break
    return found


def test_it_is_looked_at_only_where_something_is_due() -> None:
    intervals = {"print_interval": 4, "valid_interval": 6, "save_interval": [5, 12]}
    found = looks(agenda(**intervals, save_inference_interval="7 iteration"), 12)
    printing, validating, saving, exporting = [[at for at, due in found.items() if due[index]] for index in range(4)]
    assert list(found) == [4, 5, 6, 7, 8, 10, 12]
    assert (printing, validating, saving, exporting) == ([4, 8, 12], [6, 12], [5, 10, 12], [7])


def test_with_nothing_to_do_it_is_never_looked_at() -> None:
    assert agenda().next_check({"iteration": 5, "update": 5}) >= NEVER


def test_max_steps_ends_training_at_that_iteration() -> None:
    assert looks(agenda(max_steps=7), 100) == {7: (False, False, False, False, True)}


@pytest.mark.parametrize("update_every", [1, 3])
def test_a_limit_of_updates_ends_training_with_the_last_of_them_and_is_looked_for_ever_more_closely(
    update_every: int,
) -> None:
    found = looks(agenda(optimizer_step_limit=4), 100, update_every)
    assert [at for at, due in found.items() if due[-1]] == [4 * update_every]
    assert len(found) <= 2 * update_every


def test_intervals_of_iterations_go_on_where_training_went_on() -> None:
    assert agenda(iteration=10, print_interval=4).next_check({"iteration": 10, "update": 0}) == 12


def test_epochs_and_minutes_are_no_iterations() -> None:
    found = agenda(valid_interval="2 epoch", save_interval="3 epoch")
    assert found.next_check({"iteration": 0, "update": 0}) >= NEVER
    assert [epochs for epochs in range(1, 7) if found.validating.fires_after(epochs)] == [2, 4, 6]
    assert [epochs for epochs in range(1, 7) if found.saving.fires_after(epochs)] == [3, 6]


# The trigger of a plugin


def moment(iteration: int = 0, update: int = 0, epoch: int = 0, **metrics: dict[str, float]) -> Context:
    """What a hook gets then; ``metrics`` by phase."""
    counters = {"iteration": iteration, "update": update, "epoch": epoch}
    return Context(train_state=counters, metrics=metrics, phases=[{"name": phase} for phase in metrics])


def asked(trigger: Trigger, iterations: Sequence[int]) -> list[int]:
    """Those at which it fires, of the iterations at which it is asked."""
    return [iteration for iteration in iterations if trigger.fires(moment(iteration))]


def test_a_trigger_that_is_asked_rarely_fires_once_for_what_was_crossed_meanwhile() -> None:
    assert asked(Trigger("4 iteration"), [1, 3, 5, 5, 7, 8, 19, 20, 20]) == [5, 8, 19, 20]


@pytest.mark.parametrize(
    ("intervals", "fired"),
    [(3, [3, 6, 9]), ("3", [3, 6, 9]), ("3 iterations", [3, 6, 9]), ([2, "3 iteration"], [2, 3, 4, 6, 8, 9]),
     (["4 iteration", None], [4, 8]), (None, []), ([], [])],
)  # fmt: skip
def test_a_trigger_takes_intervals_as_the_keys_of_a_runner_do(intervals: Any, fired: list[int]) -> None:
    assert asked(Trigger(intervals), range(1, 10)) == fired


def test_a_trigger_counts_updates_and_epochs() -> None:
    updates, epochs = Trigger("2 update"), Trigger("2 epoch")
    counts = [(1, 0, 0), (2, 1, 0), (3, 1, 1), (4, 2, 1), (5, 2, 1), (6, 3, 2), (7, 3, 2), (8, 4, 2)]
    assert [iteration for iteration, *rest in counts if updates.fires(moment(iteration, *rest))] == [4, 8]
    assert [iteration for iteration, *rest in counts if epochs.fires(moment(iteration, *rest))] == [6]


def test_a_trigger_of_seconds_goes_on_with_those_that_were_counted() -> None:
    trigger, resumed, fresh = Trigger("1 second"), Trigger("1 second"), Trigger("1 second")
    time.sleep(0.6)
    assert not trigger.fires(moment(1))
    resumed.load_state_dict(trigger.state_dict())
    fresh.fires(moment(1))
    time.sleep(0.45)
    assert [each.fires(moment(2)) for each in (trigger, resumed, resumed, fresh)] == [True, True, False, True]
    resumed.load_state_dict(trigger.state_dict())
    assert not resumed.fires(moment(3))


@pytest.mark.parametrize(
    ("mode", "values", "fired"),
    [("min", [5, 5, 6, 4, 4.5, float("nan"), 3, 3], [0, 3, 6]), ("max", [-5, -6, float("nan"), 0, 7, 7, 1, 8], [0, 3, 4, 7])],
)  # fmt: skip
def test_a_trigger_of_a_number_fires_when_it_is_better_than_the_best_before(
    mode: str, values: list[float], fired: list[int]
) -> None:
    trigger = Trigger(improves="valid_loss", mode=mode)
    moments = [moment(a={"loss": 1.0, "valid_loss": value}) for value in values]
    assert [number for number, context in enumerate(moments) if trigger.fires(context)] == fired


def test_a_trigger_of_both_fires_for_each() -> None:
    trigger = Trigger("2 iteration", improves="loss")
    numbers = {1: 5.0, 2: 6.0, 3: 6.0, 4: 3.0, 5: 3.0}
    assert [at for at, loss in numbers.items() if trigger.fires(moment(at, a={"loss": loss}))] == [1, 2, 4]


def test_a_trigger_of_a_number_goes_on_with_the_best_so_far() -> None:
    trigger, resumed = Trigger(improves="valid_loss"), Trigger(improves="valid_loss")
    assert trigger.fires(moment(a={"valid_loss": 2.0}))
    resumed.load_state_dict(trigger.state_dict())
    assert not resumed.fires(moment(a={"valid_loss": 2.5}))
    assert resumed.fires(moment(a={"valid_loss": 1.5}))


def test_the_best_of_another_number_is_not_gone_on_with() -> None:
    trigger, resumed = Trigger(improves="valid_loss"), Trigger(improves="valid_accuracy", mode="max")
    assert trigger.fires(moment(a={"valid_loss": 0.1}))
    resumed.load_state_dict(trigger.state_dict())
    assert resumed.fires(moment(a={"valid_accuracy": 0.05}))


def test_a_trigger_watches_the_phase_that_is_named() -> None:
    trigger = Trigger(improves="b.valid_loss")
    numbers = [(3.0, 3.0), (2.0, 4.0), (5.0, 2.0)]
    fired = [trigger.fires(moment(a={"valid_loss": one}, b={"valid_loss": other})) for one, other in numbers]
    assert fired == [True, False, True]


def test_a_number_that_is_not_known_yet_fires_no_trigger() -> None:
    trigger = Trigger(improves="valid_loss")
    validated = {"name": "a", "valid_dataset_name": "data"}
    before = Context(train_state={"iteration": 0, "update": 0, "epoch": 0}, phases=[validated])
    assert not trigger.fires(before)
    assert not trigger.fires(Context({**before, "metrics": {"a": {"loss": 1.0}}}))


@pytest.mark.parametrize(
    ("improves", "message"),
    [("loss", "which several phases report; write a.loss or b.loss"),
     ("acuracy", "which no phase reports; did you mean 'accuracy'?"), ("c.f1", "which no phase reports; known: accuracy, loss")],
)  # fmt: skip
def test_a_number_that_no_phase_reports_or_several_do_is_an_error(improves: str, message: str) -> None:
    context = moment(a={"loss": 1.0}, b={"loss": 1.0, "accuracy": 1.0})
    with pytest.raises(DataError) as caught:
        Trigger(improves=improves).fires(context)
    assert str(caught.value) == f"Trigger watches '{improves}', {message}"


class Improving:
    """A plugin that notes where ``valid_loss`` became better; the runs of an experiment and an infer runner have it too."""

    fired: list[int] = []  # noqa: RUF012

    def __init__(self) -> None:
        self.trigger = Trigger(improves="valid_loss")

    @hookimpl
    def after_validation(self, context: Context) -> None:
        if self.trigger.fires(context):
            self.fired.append(context["train_state"]["iteration"])


class Scripted(ExperimentBase):
    """Reports one number after the other."""

    def setup_model(self) -> None:
        self.model = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def setup_dataloader(self) -> None:
        self.train_loader = self.valid_loader = make_loader([torch.zeros(1)], seed=0)

    def train_batch(self) -> None:
        self.read_batch()

    def valid(self) -> None:
        self.visualizer.add_scalar("valid_loss", [5.0, 4.0, 6.0, 3.0][self.iteration - 1], self.iteration)


def test_the_numbers_of_an_experiment_are_watched_as_it_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Improving, "fired", [])
    runner = {"name": "t", "class": "train", "device": "cpu", "max_steps": 4, "valid_interval": 1}
    GeneralTrainer({"plugins": [Improving], "runner": [{**runner, "runner_class_path": Scripted}]}).run()
    assert Improving.fired == [1, 2, 4]


def test_an_infer_runner_fires_no_trigger_of_a_number_that_the_training_reports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Improving, "fired", [])
    trained = GeneralTrainer(linear_config(epochs=1)).run()["run_dir"]
    config = linear_config(**{"class": "infer", "epochs": None, "init_model_path": str(trained)})
    GeneralTrainer({**config, "plugins": [Improving]}).run()
    assert Improving.fired == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"intervals": "2 parsecs"}, r"Trigger: is '2 parsecs'; write a positive number of iterations, or '5 update'"),
        ({"intervals": 0}, "Trigger: is 0; write a positive number"),
        ({"intervals": ["1 epoch", -3]}, "Trigger: is -3; write a positive number"),
        ({"improves": "loss", "mode": "lowest"}, "Trigger: mode is 'lowest'; write min or max"),
    ],
)
def test_a_wrong_argument_of_a_trigger_is_an_error_that_says_what_to_write(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Trigger(**arguments)


KINDS: dict[str, dict[str, Any]] = {
    "iterations": {"intervals": "4 iteration"},
    "updates": {"intervals": "3 update"},
    "epochs": {"intervals": "2 epoch"},
    "several": {"intervals": [5, "1 epoch"]},
    "better": {"improves": "valid_loss"},
    "worse": {"improves": "line.valid_loss", "mode": "max"},
}


class Asking:
    """A plugin that asks a trigger of each kind in several hooks; ``fired``: hook -> kind -> iterations."""

    def __init__(self) -> None:
        hooks = ("after_batch", "on_print_interval", "after_validation", "after_epoch")
        self.triggers = {hook: {kind: Trigger(**each) for kind, each in KINDS.items()} for hook in hooks}
        self.fired: dict[str, dict[str, list[int]]] = {hook: {kind: [] for kind in KINDS} for hook in hooks}
        self.valid_losses: dict[int, float] = {}

    def ask(self, hook: str, context: Context) -> None:
        for kind, trigger in self.triggers[hook].items():
            if trigger.fires(context):
                self.fired[hook][kind].append(context["train_state"]["iteration"])

    @hookimpl
    def after_batch(self, context: Context) -> None:
        self.ask("after_batch", context)

    @hookimpl
    def on_print_interval(self, context: Context) -> None:
        self.ask("on_print_interval", context)

    @hookimpl
    def after_validation(self, context: Context, metrics: dict[str, float]) -> None:
        self.valid_losses[context["train_state"]["iteration"]] = metrics["loss"]
        self.ask("after_validation", context)

    @hookimpl
    def after_epoch(self, context: Context) -> None:
        self.ask("after_epoch", context)

    @hookimpl
    def after_pipeline(self, context: Context) -> None:
        context["fired"], context["valid_losses"] = self.fired, self.valid_losses

    def state_dict(self) -> dict[str, Any]:
        states = {
            hook: {kind: own.state_dict() for kind, own in kinds.items()} for hook, kinds in self.triggers.items()
        }
        return {"triggers": states, "fired": self.fired, "valid_losses": self.valid_losses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.fired, self.valid_losses = state["fired"], state["valid_losses"]
        for hook, kinds in self.triggers.items():
            for kind, trigger in kinds.items():
                trigger.load_state_dict(state["triggers"][hook][kind])


def asking_config(**keys: Any) -> dict[str, Any]:
    """4 epochs of 3 batches and 2 updates, with a loss that swings."""
    intervals = {"print_interval": 2, "valid_interval": "2 iteration", "save_interval": "5 iteration"}
    config = linear_config(epochs=4, accum_grad=2, **intervals) | {"name": "asking", **keys}
    config["hyper_parameters"]["optimizer"] |= {"lr": 0.2, "momentum": 1.0}
    config["phase"][0]["valid_dataset_name"] = "data"
    config["plugins"].append(Asking)
    return config


def test_in_a_run_a_trigger_fires_once_for_each_crossing_whichever_hook_asks() -> None:
    fired = GeneralTrainer(asking_config()).run()["fired"]
    # Updates end with the iterations 2, 3, 5, 6, 8, 9, 11, 12; numbers are printed after every second iteration.
    expected = {
        "after_batch": ([4, 8, 12], [5, 9], [7], [4, 5, 7, 10]),
        "on_print_interval": ([4, 8, 12], [6, 10], [8], [4, 6, 8, 10]),
        "after_epoch": ([6, 9, 12], [6, 9], [6, 12], [3, 6, 9, 12]),
    }
    for hook, kinds in expected.items():
        assert tuple(fired[hook][kind] for kind in ("iterations", "updates", "epochs", "several")) == kinds


def test_in_a_run_the_number_of_a_validation_is_known_to_the_hooks_after_it() -> None:
    context = GeneralTrainer(asking_config()).run()
    losses = context["valid_losses"]
    for kind, best in (("better", min), ("worse", max)):
        best_yet = [at for at in losses if losses[at] == best(list(losses.values())[: [*losses].index(at) + 1])]
        assert context["fired"]["after_validation"][kind] == best_yet
        assert 1 < len(best_yet) < len(losses)


@pytest.mark.parametrize(
    "at",
    [
        pytest.param(at, marks=pytest.mark.slow if at in {5, 6, 11} else pytest.mark.release)
        for at in (2, 5, 6, 7, 9, 11)
    ],
)
def test_a_run_that_is_killed_and_resumed_fires_as_one_that_is_not(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    straight = GeneralTrainer(asking_config(output_dir="straight")).run()
    config = asking_config()
    config["plugins"].append(Kill)
    monkeypatch.setattr(Kill, "at", at)
    with pytest.raises(KilledError):
        GeneralTrainer(config, resume="auto").run()
    monkeypatch.setattr(Kill, "at", -1)
    killed = GeneralTrainer(config, resume="auto").run()
    assert (killed["fired"], killed["valid_losses"]) == (straight["fired"], straight["valid_losses"])


class Stream(IterableDataset[Any]):
    """3 batches in an epoch, which nobody knows before they are over: the last update of each ends the pass."""

    def __iter__(self) -> Iterator[Any]:
        return iter(table(12))


def updates_config() -> dict[str, Any]:
    """3 epochs of 3 batches and 2 updates each, validated after every third update."""
    config = linear_config(epochs=3, accum_grad=2, valid_interval="3 update", save_interval=2)
    config["dataset"][0]["class_path"] = Stream
    config["phase"][0]["valid_dataset_name"] = "data"
    config["plugins"] += [Validated, Kill]
    return config | {"name": "updates"}


class Validated:
    """A plugin that notes the updates after which a validation came."""

    def __init__(self) -> None:
        self.updates: list[int] = []

    @hookimpl
    def after_validation(self, context: Context) -> None:
        self.updates.append(context["train_state"]["update"])
        context["validated"] = self.updates

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates = [*state["updates"]]


@pytest.mark.parametrize(
    "killed_at",
    [pytest.param(at, marks=pytest.mark.slow if at in {1, 2, 3, 5, 8} else pytest.mark.release) for at in range(9)],
)
def test_an_interval_of_updates_fires_after_the_same_ones_in_a_run_that_is_killed_and_resumed(
    killed_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Kill, "at", killed_at)
    with pytest.raises(KilledError):
        GeneralTrainer(updates_config(), resume="auto").run()
    monkeypatch.setattr(Kill, "at", -1)
    assert GeneralTrainer(updates_config(), resume="auto").run()["validated"] == [3, 6]


@pytest.mark.parametrize("saved", ["1 update", "2 update"])
def test_a_checkpoint_of_the_moment_between_an_update_and_what_is_due_after_it_loses_neither(
    saved: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Kill, "at", 3)
    config = updates_config()
    config["runner"][0] |= {"save_interval": saved, "valid_interval": "2 update"}
    with pytest.raises(KilledError):
        GeneralTrainer(config, resume="auto").run()
    monkeypatch.setattr(Kill, "at", -1)
    assert GeneralTrainer(config, resume="auto").run()["validated"] == [2, 4, 6]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("accum_grad", [1, 2, 5])
def test_the_windows_of_an_update_move_nothing_that_is_counted_in_updates(
    accum_grad: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Kill, "at", -1)
    config = updates_config()
    config["dataset"][0]["class_path"] = lambda: table(40)
    config["runner"][0] |= {"epochs": None, "max_steps": "8 update", "accum_grad": accum_grad}
    context = GeneralTrainer(config).run()
    assert (context["validated"], context["train_state"]["update"]) == ([3, 6, 8], 8)
