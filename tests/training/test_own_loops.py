"""Loops of one's own by ``epochs``, ``batches``, ``validate`` and ``save`` of the context: interrupted anywhere and
resumed, they end as if nothing had happened; and they do what the default Runner does."""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline import Context, GeneralTrainer, NetworkBase, RunnerBase, hookimpl, optimize, stages
from pipeline.data.loader import make_loader
from pipeline.errors import CheckpointError, ConfigError, ContextError, DataError, StageError
from pipeline.signals import StoppedError

Config = Callable[..., dict[str, Any]]
Table = Callable[..., Any]
Body = Callable[[Any, Context], None]
mse = nn.functional.mse_loss


class KilledError(BaseException):
    """Stands for the end of the process."""


class Stops:
    """A plugin that ends the run after the first of the iterations ``at``; ``events`` are what it was called with."""

    at: list[int] = []  # noqa: RUF012
    by_signal = asked = False
    events: list[tuple[Any, ...]] = []  # noqa: RUF012

    @hookimpl
    def after_validation(self, context: Context, phase: str, metrics: dict[str, float]) -> None:
        self.events.append(("after_validation", context["train_state"]["iteration"], phase, str(metrics)))

    @hookimpl
    def after_batch(self, context: Context, batch: Any, losses: dict[str, Tensor]) -> None:
        iteration = context["train_state"]["iteration"]
        numbers = {name: loss.item() for name, loss in losses.items()}
        self.events.append(("after_batch", iteration, str(batch[0].tolist()), str(numbers)))
        if self.at and iteration >= self.at[0] and not self.asked:
            del self.at[0]
            Stops.asked = True
            if not self.by_signal:
                raise KilledError
            signal.raise_signal(signal.SIGTERM)


class Net(nn.Sequential):
    def __init__(self, width: int = 3) -> None:
        super().__init__(nn.Dropout(0.2), nn.Linear(width, 1))


def runner_of(body: Body) -> type[RunnerBase]:
    """A runner stage whose ``run`` is that."""
    return type(body.__name__, (RunnerBase,), {"run": body})


@pytest.fixture
def two(make_table: Table) -> Config:
    """Makes a config: phase ``a`` of 5 batches of 3 features, phase ``b`` of 3 batches of 2, validation of each."""

    def make(body: Body | type[RunnerBase], **runner: Any) -> dict[str, Any]:
        sizes = {"a": (14, 3, 3), "b": (6, 2, 2)}
        stage = body if isinstance(body, type) else runner_of(body)
        Stops.at, Stops.by_signal = [], False
        Stops.events.clear()
        settings = {"epochs": 2, "seed": 7, "print_interval": 4, "runner_class_path": stage}
        datasets = []
        for name, (samples, width, size) in sizes.items():
            data = {"class_path": make_table, "args": {"samples": samples, "features": width}, "batch_size": size}
            datasets += [{"name": name, "shuffle": True, **data}, {"name": f"valid_{name}", **data}]
        return {
            "name": "config",
            "plugins": [{"progress_bar": False}, Stops],
            "hyper_parameters": {"optimizer": {"class": "Adam", "lr": 0.05}},
            "dataset": datasets,
            "runner": [{"name": "t", "class": "train", "device": "cpu", **settings, **runner}],
            "phase": [
                {
                    "name": name,
                    "model": Net,
                    "model_args": {"width": width},
                    "loss": mse,
                    "dataset_name": name,
                    "valid_dataset_name": f"valid_{name}",
                }
                for name, (_, width, _) in sizes.items()
            ],
        }

    return make


def fit(context: Context, phase: str, batches: Iterable[Any]) -> None:
    """Train on each batch."""
    for batch in batches:
        context["model"][phase].brain.fit_batch(batch)


# Programs, each of which is interrupted. A name says what is unusual in it.


def phases_in_turn(self: Any, context: Context) -> None:
    for _ in context.epochs():
        for phase in ("a", "b"):
            fit(context, phase, context.batches(phase))


def one_of_b_after_three_of_a(self: Any, context: Context) -> None:
    a, b = (context["model"][name].brain for name in "ab")
    for _ in context.epochs():
        others, own = context.batches("b", repeat=True), context.batches("a")
        for batch in own:
            a.fit_batch(batch)
            if own.done % 3 == 2:
                b.fit_batch(next(others))


def repeat_outside_of_epochs(self: Any, context: Context) -> None:
    a, b = (context["model"][name].brain for name in "ab")
    others = context.batches("b", repeat=True)
    for _ in context.epochs():
        for batch in context.batches("a"):
            a.fit_batch(batch)
            b.fit_batch(next(others))


def zipped(self: Any, context: Context) -> None:
    a, b = (context["model"][name].brain for name in "ab")
    for _ in context.epochs():
        for one, other in zip(context.batches("a"), context.batches("b"), strict=False):
            a.fit_batch(one)
            b.fit_batch(other)


def broken_out_of(self: Any, context: Context) -> None:
    a = context["model"]["a"].brain
    for _ in context.epochs():
        own = context.batches("a")
        for batch in own:
            a.fit_batch(batch)
            if own.done == 2:
                break
        del own
        fit(context, "b", context.batches("b"))


def broken_out_of_and_referred_to(self: Any, context: Context) -> None:
    a = context["model"]["a"].brain
    for _ in context.epochs():
        own = context.batches("a")
        for batch in own:
            a.fit_batch(batch)
            if own.done == 2:
                break
        fit(context, "b", context.batches("b"))


def closed_and_validated(self: Any, context: Context) -> None:
    for _ in context.epochs():
        for _ in range(4):
            own = context.batches("a", count=3)
            for batch in own:
                context["model"]["a"].brain.fit_batch(batch)
                break
            own.close()
        context.validate()


def everything_in_a_body(self: Any, context: Context) -> None:
    for _ in context.epochs():
        for batch in context.batches("a"):
            context["model"]["a"].brain.fit_batch(batch)
            for other in context.batches("b", count=1):
                context["model"]["b"].brain.fit_batch(other)
                context.validate("b")
            context.save()


def epochs_twice(self: Any, context: Context) -> None:
    for _ in context.epochs(1):
        fit(context, "a", context.batches("a"))
    for _ in context.epochs(2):
        fit(context, "b", context.batches("b"))


def validate_and_save_in_the_body(self: Any, context: Context) -> None:
    a = context["model"]["a"].brain
    for _ in context.epochs():
        own = context.batches("a")
        for batch in own:
            a.fit_batch(batch)
            if own.done == 2:
                context.validate("a")
            if own.done == 3:
                context.save()
        context.validate("b")


def whole_pass_in_a_body(self: Any, context: Context) -> None:
    a = context["model"]["a"].brain
    for _ in context.epochs():
        own = context.batches("a")
        for batch in own:
            a.fit_batch(batch)
            if own.done == 1:
                fit(context, "b", context.batches("b"))


def same_phase_twice(self: Any, context: Context) -> None:
    for _ in context.epochs():
        for _ in range(2):
            fit(context, "a", context.batches("a"))


def optimized_by_hand(self: Any, context: Context) -> None:
    phase = context["model"]["a"]
    for epoch in context.epochs():
        for inputs, target in context.batches(phase):
            optimize({"loss": mse(phase.model(inputs), target)}, list(phase.optim_schedulers.values()), epoch)


def without_epochs(self: Any, context: Context) -> None:
    fit(context, "a", context.batches("a", repeat=True, count=11))


def counted_by_done(self: Any, context: Context) -> None:
    a, b = (context["model"][name].brain for name in "ab")
    for _ in context.epochs():
        others, own = context.batches("b", repeat=True), context.batches("a")
        for batch in own:
            a.fit_batch(batch)
            while others.done < 2 * own.done + 2:
                b.fit_batch(next(others))


def epochs_left_by_break(self: Any, context: Context) -> None:
    for _ in context.epochs():
        fit(context, "a", context.batches("a"))
        break
    fit(context, "b", context.batches("b"))


def counted_in_rounds(self: Any, context: Context) -> None:
    for _ in context.epochs():
        for _ in range(2):
            fit(context, "b", context.batches("b", count=2))
            fit(context, "a", context.batches("a", count=3))


def led_from_outside_of_epochs(self: Any, context: Context) -> None:
    own = context.batches("a", repeat=True)
    for _ in context.epochs():
        for batch in own:
            context["model"]["a"].brain.fit_batch(batch)
            if own.done % 4 == 3:
                break
        fit(context, "b", context.batches("b", count=2))


def closed_before_the_pass_in_its_body(self: Any, context: Context) -> None:
    for _ in context.epochs():
        own, others = context.batches("a"), context.batches("b")
        for batch in own:
            context["model"]["a"].brain.fit_batch(batch)
            context["model"]["b"].brain.fit_batch(next(others))
            if own.done == 1:
                break
        own.close()
        context.validate("b")
        fit(context, "b", others)


PROGRAMS: dict[str, Body] = {
    body.__name__: body
    for body in (
        phases_in_turn,
        one_of_b_after_three_of_a,
        repeat_outside_of_epochs,
        zipped,
        broken_out_of,
        broken_out_of_and_referred_to,
        closed_and_validated,
        everything_in_a_body,
        epochs_twice,
        validate_and_save_in_the_body,
        whole_pass_in_a_body,
        same_phase_twice,
        optimized_by_hand,
        without_epochs,
        counted_by_done,
        epochs_left_by_break,
        counted_in_rounds,
        led_from_outside_of_epochs,
        closed_before_the_pass_in_its_body,
    )
}
SAVED_EACH_TIME = {"phases_in_turn", "zipped", "everything_in_a_body", "same_phase_twice", "epochs_left_by_break"}


def outcome(config: dict[str, Any]) -> dict[str, Any]:
    """What a run ends with, each time gone on with until it is done."""
    trainer = GeneralTrainer(config)
    while True:
        Stops.asked = False
        try:
            context = trainer.run()
        except (KilledError, StoppedError):
            trainer = GeneralTrainer(config, resume="auto")
            continue
        models = context["model"]
        return {
            "weights": {
                f"{phase}.{name}": value.tolist()
                for phase in models
                for name, value in models[phase].model.state_dict().items()
            },
            "counters": dict(context["train_state"]),
            "metrics": context["metrics"],
            "lines": (context["run_dir"] / "t" / "metrics.jsonl").read_text(),
            "generator": torch.get_rng_state().tolist(),
        }


INTERVALS = {"valid_interval": ["5 iteration", "1 epoch"], "save_interval": ["1 iteration", "1 epoch"]}


@pytest.fixture
def unlike(two: Config) -> Callable[..., list[str]]:
    """What differs between an unbroken run of a program and interrupted ones.

    Of these there is one, interrupted three times, or one for each second iteration after which it may be interrupted;
    with ``few`` they are an iteration in the midst, the last but one, and the last.
    """

    def compare(
        name: str, at: list[int] | None = None, *, by_signal: bool, few: bool = False, **runner: Any
    ) -> list[str]:
        def make() -> dict[str, Any]:
            return two(PROGRAMS[name], **INTERVALS | runner)

        whole = outcome(make())
        events, found = list(Stops.events), []
        last = whole["counters"]["iteration"]
        singly = [last // 2, last - 1, last] if few else range(1 + len(name) % 2, last + 1, 2)
        for iterations in [at] if at else [[each] for each in singly]:
            config = make()
            Stops.at, Stops.by_signal = list(iterations), by_signal
            ours = outcome(config)
            # Before a signal ends the run a checkpoint is saved, so that no batch comes twice.
            same = Stops.events == events if by_signal else set(Stops.events) == set(events)
            unlike = [key for key in whole if ours[key] != whole[key]] + ["plugins"] * (not same)
            found += [f"{iterations}: {unlike}"] if unlike or Stops.at else []
        return found

    return compare


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_loop_that_fails_three_times_ends_as_one_that_never_does(unlike: Callable[..., list[str]], name: str) -> None:
    assert unlike(name, [2, 5, 7], by_signal=False) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_loop_that_signals_stop_three_times_ends_as_one_that_none_stops(
    unlike: Callable[..., list[str]], name: str
) -> None:
    assert unlike(name, [1, 4, 6], by_signal=True, save_interval="1 epoch") == []


EVERYWHERE = [(name, *how, False) for name in PROGRAMS for how in ((False, 4), (True, 100))]
EVERYWHERE += [(name, False, 1, False) for name in sorted(SAVED_EACH_TIME)]
IN_FEW_PLACES = [(name, at % 2 == 0, 100 if at % 2 == 0 else 4, True) for at, name in enumerate(PROGRAMS)]


@pytest.mark.parametrize(
    ("name", "by_signal", "save", "few"),
    [pytest.param(*case, marks=pytest.mark.slow) for case in IN_FEW_PLACES]
    + [pytest.param(*case, marks=pytest.mark.release) for case in EVERYWHERE],
)
def test_a_loop_that_is_interrupted_after_an_iteration_ends_as_one_that_is_not(
    unlike: Callable[..., list[str]], name: str, by_signal: bool, save: int, few: bool
) -> None:
    assert unlike(name, by_signal=by_signal, few=few, save_interval=[f"{save} iteration", "1 epoch"]) == []


def test_a_signal_at_the_end_of_an_epoch_left_by_break_does_not_begin_the_epoch_again(two: Config) -> None:
    class StopsOnce:
        sent = True

        @hookimpl
        def after_epoch(self) -> None:
            if not StopsOnce.sent:
                StopsOnce.sent = True
                signal.raise_signal(signal.SIGTERM)

    def run() -> dict[str, Any]:
        config = two(epochs_left_by_break, **INTERVALS)
        config["plugins"].append(StopsOnce)
        return outcome(config)

    whole, StopsOnce.sent = run(), False
    assert run() == whole
    assert StopsOnce.sent


# Beside the default Runner.


def by_fit_batch(self: Any, context: Context) -> None:
    for _ in context.epochs():
        fit(context, "line", context.batches("line"))


def by_the_updater(self: Any, context: Context) -> None:
    for _ in context.epochs():
        for batch in context.batches("line"):
            context["model"]["line"].updater.update(batch)


def by_optimize(self: Any, context: Context) -> None:
    phase = context["model"]["line"]
    for epoch in context.epochs():
        for inputs, target in context.batches("line"):
            optimize({"loss": mse(phase.model(inputs), target)}, list(phase.optim_schedulers.values()), epoch)


def by_step(self: Any, context: Context) -> None:
    phase = context["model"]["line"]
    for _ in context.epochs():
        for inputs, target in context.batches(phase):
            phase.optim_schedulers["main"].step(mse(phase.model(inputs), target))


INTERVALS_OF_TWO = {"valid_interval": 2, "save_interval": 2}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("body", "runner"),
    [
        (by_fit_batch, {}),
        (by_fit_batch, {"max_steps": 4}),
        (by_fit_batch, INTERVALS_OF_TWO),
        (by_the_updater, INTERVALS_OF_TWO),
        (by_optimize, {"max_steps": 4}),
        (by_step, INTERVALS_OF_TWO),
    ],
)
def test_a_loop_of_ones_own_is_the_default_runner_bit_for_bit(
    config: Config, recorder: Any, body: Body, runner: dict[str, Any]
) -> None:
    def result(stage: type[RunnerBase]) -> tuple[Any, ...]:
        chosen = config(runner_class_path=stage, print_interval=2, seed=3, **runner)
        chosen["dataset"][0]["shuffle"] = True
        chosen["phase"][0] |= {"model": Net, "valid_dataset_name": "data"}
        chosen["plugins"] = [{"progress_bar": False}, recorder]
        recorder.calls.clear()
        context = GeneralTrainer(chosen).run()
        hooks = [event[:2] for event in recorder.calls if event[0] != "after_checkpoint_saved"]
        weights = [value.tolist() for value in context["model"]["line"].model.state_dict().values()]
        lines = (context["run_dir"] / "train" / "metrics.jsonl").read_text()
        saved = [path.name for path in context["checkpointer"].all()]
        return weights, dict(context["train_state"]), hooks, lines, saved, torch.get_rng_state().tolist()

    assert result(runner_of(body)) == result(stages.Runner)


def test_the_hooks_of_a_batch_in_the_body_of_another_come_within_its_own(config: Config, recorder: Any) -> None:
    def pairs(self: Any, context: Context) -> None:
        others = context.batches("line", repeat=True)
        for _ in context.epochs():
            for batch in context.batches("twin"):
                context["model"]["twin"].brain.fit_batch(batch)
                context["model"]["line"].brain.fit_batch(next(others))

    chosen = config(runner_class_path=runner_of(pairs), epochs=1)
    chosen["phase"].append(chosen["phase"][0] | {"name": "twin"})
    chosen["dataset"][0] |= {"batch_size": 5}
    chosen["plugins"].append(recorder)
    GeneralTrainer(chosen).run()
    order = [event[:2] for event in recorder.calls if event[0] != "after_checkpoint_saved"]
    # The batch that was given out last is counted first.
    pair = [("before_batch", 0), ("before_batch", 0), ("after_batch", 1), ("after_batch", 2)]
    later = [(hook, iteration + 2) for hook, iteration in pair]
    assert order == [("before_epoch", 0), *pair, *later, ("after_epoch", 4)]
    twin, own = (recorder.calls[index][2]["batch"] for index in (1, 2))
    assert [event[2]["batch"] is batch for event, batch in zip(recorder.calls[3:5], (own, twin), strict=True)] == [
        True,
        True,
    ]


# What is refused.


def second_pass_of_a_brain(self: Any, context: Context) -> None:
    for _ in context.batches("line"):
        next(context.batches("line"))


def epochs_in_an_epoch(self: Any, context: Context) -> None:
    for _ in context.epochs():
        context.epochs()


def epochs_in_a_body(self: Any, context: Context) -> None:
    for _ in context.batches("line"):
        context.epochs()


class OwnNetwork(NetworkBase):
    """Leaves a module where the loop looks for phases."""

    def build_network(self, context: Context) -> None:
        context["dataset"], context["model"] = {}, nn.Linear(1, 1)


def test_a_model_that_is_no_dict_of_phases_is_named_with_what_to_write(tmp_path: Path) -> None:
    classes = {"network_class_path": OwnNetwork, "runner_class_path": runner_of(epochs_in_an_epoch)}
    runner = {"name": "t", "class": "train", "device": "cpu", "epochs": 1, **classes}
    trainer = GeneralTrainer({"output_dir": str(tmp_path), "runner": [runner]})
    with pytest.raises(ContextError, match=r"context\['model'\] is a Linear, .*; write \{phase: \{model, brain"):
        trainer.run()


def unknown_phase(self: Any, context: Context) -> None:
    context.batches("lime")


def validation_without_data(self: Any, context: Context) -> None:
    context.validate("line")


def validation_of_all_without_data(self: Any, context: Context) -> None:
    context.validate()


def pass_without_a_batch(self: Any, context: Context) -> None:
    context["dataset"]["data"] = []
    next(context.batches("line"), None)


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        (
            second_pass_of_a_brain,
            StageError,
            r"phase.line: a pass starts while one of phase 'line' is open, .* same Brain",
        ),
        (epochs_in_an_epoch, StageError, r"context.epochs: an epoch is running; .*repeat=True"),
        (epochs_in_a_body, StageError, r"context.epochs: a batch of the pass over 'line' is active; end .* close"),
        (unknown_phase, ContextError, r"the runner 'train' has no phase 'lime'; did you mean 'line'\?"),
        (validation_without_data, ConfigError, r"phase.line.valid_dataset_name: is not set.*; name a dataset there"),
        (validation_of_all_without_data, ConfigError, r"valid_dataset_name: is not set.*; name a dataset there"),
        (pass_without_a_batch, DataError, r"phase.line: 'data' gave no batch in epoch 0; check the dataset"),
    ],
)
def test_what_makes_no_sense_is_refused(config: Config, body: Body, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        GeneralTrainer(config(runner_class_path=runner_of(body))).run()


CALLS: list[tuple[str, Callable[[Context], Any]]] = [
    ("epochs", lambda context: context.epochs()),
    ("batches", lambda context: context.batches("line")),
    ("validate", lambda context: context.validate()),
    ("save", lambda context: context.save()),
]


@pytest.mark.parametrize(("name", "call"), CALLS)
def test_outside_of_a_runner_stage_there_is_no_loop(config: Config, name: str, call: Callable[[Context], Any]) -> None:
    class Early(stages.Startup):
        def startup(self, context: Context) -> None:
            assert not context.resuming
            call(context)

    with pytest.raises(StageError, match=rf"context.{name} was called by startup, and only a runner stage that trains"):
        GeneralTrainer(config(startup_class_path=Early)).run()


@pytest.mark.parametrize(("name", "call"), CALLS)
def test_an_infer_runner_has_no_loop(config: Config, name: str, call: Callable[[Context], Any]) -> None:
    chosen = config(epochs=1)
    settings = {"class": "infer", "runner_class_path": runner_of(lambda self, context: call(context))}
    chosen["runner"].append({"name": "infer", "device": "cpu", **settings})
    with pytest.raises(StageError, match=rf"context.{name} was called by runner, and only a runner stage that trains"):
        GeneralTrainer(chosen).run()


# Resumed by code that calls something else.


def b_first(self: Any, context: Context) -> None:
    for _ in context.epochs():
        fit(context, "b", context.batches("b"))


def no_validation(self: Any, context: Context) -> None:
    for _ in context.epochs():
        fit(context, "a", context.batches("a"))
        fit(context, "b", context.batches("b"))


def no_epoch(self: Any, context: Context) -> None:
    fit(context, "a", context.batches("a"))


def shorter(self: Any, context: Context) -> None:
    for _ in context.epochs():
        fit(context, "a", context.batches("a"))


def nothing(self: Any, context: Context) -> None:
    context.save()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("body", "called", "before"),
    [
        (b_first, "batches('b')", "batches('a')"),
        (no_validation, "batches('b')", "validate('a')"),
        (no_epoch, "batches('a')", "epochs()"),
        (shorter, "the epoch ended", "validate('a')"),
        (nothing, "the runner stage ended", "batches('a')"),
    ],
)
def test_a_run_that_is_resumed_by_other_calls_is_refused_with_the_call(
    two: Config, body: Body, called: str, before: str
) -> None:
    def saves(self: Any, context: Context) -> None:
        for _ in context.epochs():
            fit(context, "a", context.batches("a"))
            context.validate("a")
            context.save()
            raise KilledError

    with pytest.raises(KilledError):
        GeneralTrainer(two(saves)).run()
    wrong = re.escape(f"step-000000000005: {called}, where the run that saved it had {before} next; a resumed stage")
    with pytest.raises(CheckpointError, match=wrong):
        GeneralTrainer(two(body), resume="auto").run()


# The order of the data, and what is counted.


def orders(config: Config, body: Body, **runner: Any) -> list[list[float]]:
    """The first number of each sample of each batch that a program gives to its list."""
    seen: list[list[float]] = []
    chosen = config(runner_class_path=runner_of(lambda self, context: body(seen, context)), seed=3, **runner)
    chosen["dataset"][0]["shuffle"] = True
    GeneralTrainer(chosen).run()
    return seen


def by_loader(make_table: Table, rounds: int) -> list[list[float]]:
    """The same of so many passes of a loader."""
    loader = make_loader(make_table(10), seed=3, shuffle=True, batch_size=4)
    seen = []
    for number in range(rounds):
        loader.set_epoch(number)
        seen += [batch[0][:, 0].tolist() for batch in loader]
    return seen


def test_each_round_of_repeat_has_the_order_of_one_more_pass_over_the_loader(config: Config, make_table: Table) -> None:
    def body(seen: list[list[float]], context: Context) -> None:
        seen += [batch[0][:, 0].tolist() for batch in context.batches("line", repeat=True, count=8)]

    assert orders(config, body) == by_loader(make_table, 3)[:8]


def test_each_pass_over_a_phase_has_the_order_of_one_more_in_an_epoch_too(config: Config, make_table: Table) -> None:
    def body(seen: list[list[float]], context: Context) -> None:
        for _ in context.epochs():
            for count in (1, None):
                seen += [batch[0][:, 0].tolist() for batch in context.batches("line", count=count)]

    first, second, third, fourth = (by_loader(make_table, 4)[start : start + 3] for start in range(0, 12, 3))
    assert orders(config, body, epochs=2) == [first[0], *second, third[0], *fourth]


def test_the_numbers_of_a_second_pass_over_a_phase_replace_those_of_the_first(config: Config) -> None:
    def twice(self: Any, context: Context) -> None:
        for _ in context.epochs():
            for _ in range(2):
                own = context.batches("line")
                fit(context, "line", own)
                passes.append(own.numbers["loss"])
                assert context["metrics"]["line"] == own.numbers

    passes: list[float] = []
    metrics = GeneralTrainer(config(runner_class_path=runner_of(twice), epochs=1)).run()["metrics"]
    assert metrics == {"line": {"loss": passes[1]}}
    assert passes[0] != passes[1]


def test_numbers_of_a_pass_are_empty_until_it_is_over_and_done_counts_its_batches(config: Config) -> None:
    def telling(self: Any, context: Context) -> None:
        own = context.batches("line")
        for batch in own:
            context["model"]["line"].brain.fit_batch(batch)
            told.append((own.done, own.numbers, context["train_state"]["iteration"]))
        assert (own.done, list(own.numbers)) == (3, ["loss"])

    told: list[Any] = []
    GeneralTrainer(config(runner_class_path=runner_of(telling))).run()
    assert told == [(0, {}, 0), (1, {}, 1), (2, {}, 2)]


def test_a_body_that_raises_counts_nothing(config: Config) -> None:
    def raises(self: Any, context: Context) -> None:
        counters.append(context["train_state"])
        for batch in context.batches("line"):
            context["model"]["line"].brain.fit_batch(batch)
            if context["train_state"]["iteration"] == 1:
                raise KilledError

    counters: list[dict[str, int]] = []
    with pytest.raises(KilledError):
        GeneralTrainer(config(runner_class_path=runner_of(raises))).run()
    assert counters[0]["iteration"] == 1


@pytest.mark.parametrize("at_once", [True, False])
def test_several_steps_by_hand_on_a_batch_count_once(config: Config, at_once: bool) -> None:
    def several(self: Any, context: Context) -> None:
        phase = context["model"]["line"]
        for _ in context.epochs():
            for inputs, target in context.batches("line"):
                for _ in range(3):
                    loss = mse(phase.model(inputs), target)
                    if at_once:
                        optimize({"loss": loss}, list(phase.optim_schedulers.values()))
                    else:
                        phase.optim_schedulers["main"].step(loss)

    state = GeneralTrainer(config(runner_class_path=runner_of(several))).run()["train_state"]
    assert (state["iteration"], state["update"], state["samples"]) == (6, 6, 20)


@pytest.mark.parametrize(("trains", "counters"), [(0, (6, 6, 20)), (1, (6, 6, 20)), (2, (6, 12, 40))])
def test_a_batch_counts_once_and_its_updates_and_samples_as_often_as_fit_batch_is_called(
    config: Config, trains: int, counters: tuple[int, int, int]
) -> None:
    def several(self: Any, context: Context) -> None:
        for _ in context.epochs():
            for batch in context.batches("line"):
                for _ in range(trains):
                    context["model"]["line"].brain.fit_batch(batch)

    state = GeneralTrainer(config(runner_class_path=runner_of(several))).run()["train_state"]
    assert (state["iteration"], state["update"], state["samples"]) == counters


def test_a_loop_that_trains_on_nothing_has_no_loss(config: Config) -> None:
    def only_looks(self: Any, context: Context) -> None:
        for _ in context.epochs():
            for _ in context.batches("line"):
                pass

    metrics = GeneralTrainer(config(runner_class_path=runner_of(only_looks))).run()["metrics"]
    assert math.isnan(metrics["line"]["loss"])


def test_epochs_may_be_counted_and_end_at_the_limits_of_the_runner(config: Config) -> None:
    def counted(self: Any, context: Context) -> None:
        for count in (1, 2, None):
            for epoch in context.epochs(count):
                fit(context, "line", context.batches("line"))
                parts.append((count, epoch))

    parts: list[tuple[int | None, int]] = []
    context = GeneralTrainer(config(runner_class_path=runner_of(counted), epochs=5)).run()
    assert (parts, context["train_state"]["epoch"]) == ([(1, 0), (2, 1), (2, 2), (None, 3), (None, 4)], 5)


def test_max_steps_ends_passes_and_epochs_and_no_other_begins(config: Config) -> None:
    def on_and_on(self: Any, context: Context) -> None:
        for _ in context.epochs():
            fit(context, "line", context.batches("line", repeat=True))
        fit(context, "line", context.batches("line"))

    state = GeneralTrainer(config(runner_class_path=runner_of(on_and_on), max_steps=7)).run()["train_state"]
    assert (state["iteration"], state["epoch"]) == (7, 0)


# Saving, validation and signals in a body.


def test_a_signal_in_a_body_waits_for_its_end_and_so_does_the_validation_in_it(two: Config) -> None:
    def stopping(self: Any, context: Context) -> None:
        for _ in context.epochs():
            for batch in context.batches("a"):
                context["model"]["a"].brain.fit_batch(batch)
                if context["train_state"]["iteration"] == 1:
                    signal.raise_signal(signal.SIGTERM)
                    numbers.append(context.validate("a")["valid_loss"])
                    numbers.append(context["train_state"]["iteration"])

    numbers: list[float] = []
    with pytest.raises(StoppedError):
        GeneralTrainer(two(stopping, save_interval=None)).run()
    assert math.isfinite(numbers[0])
    assert numbers[1:] == [2]
    assert [path.name for path in Path("runs").glob("*/2*/t/checkpoints/*")] == ["step-000000000002"]


def test_a_save_in_a_body_is_made_when_the_next_batch_is_asked_for_and_else_at_once(config: Config) -> None:
    def saving(self: Any, context: Context) -> None:
        context.save()
        saved.append(len(context["checkpointer"].all()))
        own = context.batches("line")
        for batch in own:
            context["model"]["line"].brain.fit_batch(batch)
            saved.append(len(context["checkpointer"].all()))
            if own.done == 0:
                context.save()

    saved: list[int] = []
    context = GeneralTrainer(config(runner_class_path=runner_of(saving), save_interval=None)).run()
    assert saved == [1, 1, 2, 2]
    assert [int(path.name[5:]) for path in context["checkpointer"].all()] == [0, 1, 3]


def test_what_stays_due_for_a_thousand_iterations_is_warned_of_with_the_pass_that_leads(
    two: Config, log_lines: list[str]
) -> None:
    def waiting(self: Any, context: Context) -> None:
        for _ in context.batches("b", count=1):
            context.save()
            for _ in context.batches("a", repeat=True, count=1001):
                pass

    GeneralTrainer(two(waiting, save_interval=None, print_interval=None)).run()
    warned = [line for line in log_lines if line.startswith("WARNING for 1000 iterations something is scheduled")]
    assert len(warned) == 1
    assert "waits until the pass over 'b' is asked for a batch" in warned[0]


# Going on.


def test_resuming_is_true_until_the_code_is_where_the_checkpoint_was_saved(two: Config) -> None:
    def telling(self: Any, context: Context) -> None:
        told.append(("top", context.resuming))
        for epoch in context.epochs():
            told.append((epoch, context.resuming))
            own = context.batches("a")
            for _ in own:
                told.append((own.done, context.resuming))
                if (epoch, own.done, before) == (1, 2, 0):
                    raise KilledError

    told: list[tuple[Any, bool]] = []
    before = 0
    with pytest.raises(KilledError):
        GeneralTrainer(two(telling, save_interval=1)).run()
    assert not any(resuming for _, resuming in told)
    before = len(told)
    GeneralTrainer(two(telling, save_interval=1), resume="auto").run()
    # Epoch 0 is over, and no batch that is done comes again.
    assert told[before:] == [("top", True), (1, True), (2, False), (3, False), (4, False)]


def test_validate_gives_its_saved_numbers_and_calls_no_plugin_where_it_was_made_before(two: Config) -> None:
    def telling(self: Any, context: Context) -> None:
        for _ in context.epochs():
            numbers.append(context.validate())
            context.save()
            batches = context.batches("a")
            if len(numbers) == 1:
                # The checkpoint is saved when the pass begins.
                next(batches)
                raise KilledError
            fit(context, "a", batches)

    numbers: list[dict[str, dict[str, float]]] = []
    with pytest.raises(KilledError):
        GeneralTrainer(two(telling, epochs=1)).run()
    before = [event for event in Stops.events if event[0] == "after_validation"]
    GeneralTrainer(two(telling, epochs=1), resume="auto").run()
    assert len(before) == 2
    assert numbers[0] == numbers[1]
    # That of the phase that was trained, at the end of the epoch.
    assert [event[1:3] for event in Stops.events if event[0] == "after_validation"] == [(5, "a")]


def test_done_is_right_where_a_local_count_is_not(two: Config) -> None:
    def counting(self: Any, context: Context) -> None:
        for _ in context.epochs():
            own = context.batches("a")
            for number, _ in enumerate(own):
                counts.append((number, own.done))
                if len(counts) == 3:
                    raise KilledError

    counts: list[tuple[int, int]] = []
    with pytest.raises(KilledError):
        GeneralTrainer(two(counting, epochs=1, save_interval=1)).run()
    GeneralTrainer(two(counting, epochs=1, save_interval=1), resume="auto").run()
    assert counts == [(0, 0), (1, 1), (2, 2), (0, 2), (1, 3), (2, 4)]


@pytest.mark.parametrize("repeat", [False, True])
def test_count_has_the_batches_before_a_resume_too(two: Config, repeat: bool) -> None:
    def counted(self: Any, context: Context) -> None:
        for _ in context.batches("b", count=7 if repeat else 2, repeat=repeat):
            counts.append(context["train_state"]["iteration"])
            if len(counts) == 2:
                raise KilledError

    counts: list[int] = []
    with pytest.raises(KilledError):
        GeneralTrainer(two(counted, save_interval=1)).run()
    GeneralTrainer(two(counted, save_interval=1), resume="auto").run()
    assert counts == ([0, 1, 1, 2, 3, 4, 5, 6] if repeat else [0, 1, 1])


def test_an_object_that_is_registered_at_the_top_of_run_has_its_state_back(two: Config, log_lines: list[str]) -> None:
    class Pool:
        def __init__(self) -> None:
            self.items: list[float] = []

        def state_dict(self) -> dict[str, Any]:
            return {"items": self.items}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.items = list(state["items"])

    def collecting(self: Any, context: Context) -> None:
        context["checkpointer"].add_recoverable("pool", pool := Pool())
        for inputs, _ in context.batches("a", count=5):
            lengths.append(len(pool.items))
            pool.items.append(float(inputs[0, 0]))
            if len(lengths) == 3:
                raise KilledError

    lengths: list[int] = []
    with pytest.raises(KilledError):
        GeneralTrainer(two(collecting, save_interval=1)).run()
    GeneralTrainer(two(collecting, save_interval=1), resume="auto").run()
    assert lengths == [0, 1, 2, 2, 3, 4]
    assert not [line for line in log_lines if line.startswith("WARNING") and "'pool'" in line]


def test_what_stands_under_not_resuming_is_done_once_even_before_the_first_call(two: Config) -> None:
    def once(self: Any, context: Context) -> None:
        if not context.resuming:
            onces.append(1)
        context.save()
        fit(context, "a", context.batches("a", count=1))
        raise KilledError

    onces: list[int] = []
    for resume in ("never", "auto"):
        with pytest.raises(KilledError):
            GeneralTrainer(two(once, save_interval=None), resume=resume).run()
    assert onces == [1]


# A runner stage that takes nothing of the loop.


class TrainsAlone(RunnerBase):
    def run(self, context: Context) -> None:
        phase = context["model"]["line"]
        for batch in context["dataset"]["data"]:
            phase.brain.fit_batch(batch)


def test_a_runner_that_takes_nothing_of_the_loop_is_told_what_it_lacks(config: Config, log_lines: list[str]) -> None:
    context = GeneralTrainer(config(runner_class_path=TrainsAlone)).run()
    assert context["checkpointer"].all() == []
    (line,) = (line for line in log_lines if line.startswith("WARNING runner (test_own_loops.TrainsAlone, dict)"))
    assert "has called neither epochs() nor batches() of the context: nothing was saved, no plugin was called" in line


def test_one_that_counts_its_iterations_by_itself_is_not_warned(config: Config, log_lines: list[str]) -> None:
    class Counts(TrainsAlone):
        def run(self, context: Context) -> None:
            super().run(context)
            context["train_state"]["iteration"] += 3

    GeneralTrainer(config(runner_class_path=Counts)).run()
    assert not any("has called neither" in line for line in log_lines)


@pytest.mark.slow
def test_behind_the_epochs_that_the_limits_ended_a_resumed_stage_begins_no_other(two: Config) -> None:
    def validating(self: Any, context: Context) -> None:
        for _ in context.epochs():
            fit(context, "a", context.batches("a"))
        numbers.append(context.validate("a"))
        context.save()
        if len(numbers) == 1:
            raise KilledError

    numbers: list[dict[str, float]] = []
    with pytest.raises(KilledError):
        GeneralTrainer(two(validating)).run()
    state = GeneralTrainer(two(validating), resume="auto").run()["train_state"]
    assert numbers[0] == numbers[1]
    assert (state["iteration"], state["epoch"]) == (10, 2)


@pytest.mark.slow
@pytest.mark.parametrize("at", [2, 5, 9, 10])
def test_a_runner_stage_that_is_entered_again_takes_nothing_of_the_checkpoint_again(two: Config, at: int) -> None:
    class Again(stages.Runner):
        def run(self, context: Context) -> None:
            super().run(context)
            if "again" not in context:
                context.update(again=True, status="train_pass")

    expected = outcome(two(Again, save_interval=1))
    chosen = two(Again, save_interval=1)
    Stops.at = [at]
    ours = outcome(chosen)
    assert [key for key in expected if ours[key] != expected[key]] == []
