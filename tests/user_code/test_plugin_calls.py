"""What is around each call of a hook: its order, its result, its time."""

from __future__ import annotations

import random
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.utils.data import Dataset

from pipeline import Brain, Context, GeneralTrainer, hookimpl
from pipeline.errors import CheckpointError, PluginError
from pipeline.run import plugin_report
from pipeline.signals import StoppedError
from pipeline.testing import Workspace
from pipeline.user_code.plugin_calls import hook_or_none, register_plugins
from pipeline.user_code.plugins import Plugin, plugin_manager

Trained = Callable[..., Context]


@pytest.fixture
def trained(linear: Path) -> Trained:
    """Runs the linear config with a plugin of a class, its arguments, and these settings of the runner."""

    def run(cls: type, args: dict[str, Any] | None = None, *, resume: str = "never", **settings: Any) -> Context:
        config = yaml.safe_load(linear.read_text(encoding="utf-8"))
        config["runner"][0] |= settings
        plugins = [{"progress_bar": False}, {"metric_log": False}, {"class_path": cls, "args": args or {}}]
        config |= {"name": "line", "workspace": str(linear.parent), "plugins": plugins}
        return GeneralTrainer(config, resume=resume).run()

    return run


class Note:
    """Notes each call in the context."""

    def __init__(self, name: str) -> None:
        self.name = name

    @hookimpl
    def after_batch(self, context: Context) -> None:
        context["called"].append(self.name)


class First(Note):
    @hookimpl(tryfirst=True)
    def after_batch(self, context: Context) -> None:
        context["called"].append(self.name)


class Last(Note):
    @hookimpl(trylast=True)
    def after_batch(self, context: Context) -> None:
        context["called"].append(self.name)


class Around(Note):
    @hookimpl(wrapper=True)
    def after_batch(self, context: Context) -> Any:
        context["called"].append(f"{self.name} begins")
        yield
        context["called"].append(f"{self.name} ends")


class Before(Note):
    @hookimpl(hookwrapper=True)
    def after_batch(self, context: Context) -> Any:
        context["called"].append(f"{self.name} begins")
        yield
        context["called"].append(f"{self.name} ends")


def called(*classes: type, hot: bool) -> list[str]:
    """What these plugins note in one call of ``after_batch``, in the hot loop or by pluggy."""
    manager, context = plugin_manager(), Context(called=[])
    names = [f"{number} {cls.__name__}" for number, cls in enumerate(classes)]
    plugins = [Plugin(name, cls, {"name": name}) for name, cls in zip(names, classes, strict=True)]
    register_plugins(plugins, manager)
    hook = hook_or_none(manager.hook, "after_batch") if hot else manager.hook.after_batch
    assert hook
    hook(context=context, phase="line", batch=1, predictions=2, losses={})
    found: list[str] = context["called"]
    return found


@pytest.mark.parametrize(
    "classes",
    [
        [Note],
        [Note, Note],
        [Last, Note, First, Note],
        [First, First, Last],
        [Note, Around, First],
        [Before, Last, Note],
    ],
)
def test_in_the_hot_loop_plugins_are_called_in_the_order_that_pluggy_has(classes: list[type]) -> None:
    assert called(*classes, hot=True) == called(*classes, hot=False)


def test_tryfirst_and_trylast_come_before_the_order_of_the_config() -> None:
    assert called(Last, Note, First, Note, hot=True) == ["2 First", "1 Note", "3 Note", "0 Last"]


# What a hook returns


class Returning:
    """Returns something from a hook that takes nothing: of one batch, or of an epoch."""

    def __init__(self, hook: str, iteration: int = 0) -> None:
        self.hook, self.iteration = hook, iteration

    def value(self, hook: str, context: Context) -> Any:
        return 17.5 if hook == self.hook and context["train_state"]["iteration"] >= self.iteration else None

    @hookimpl
    def after_batch(self, context: Context) -> Any:
        return self.value("after_batch", context)

    @hookimpl
    def after_epoch(self, context: Context) -> Any:
        return self.value("after_epoch", context)


@pytest.mark.parametrize(("hook", "iteration"), [("after_batch", 1), ("after_batch", 5), ("after_epoch", 1)])
def test_what_a_hook_returns_that_takes_nothing_is_an_error_that_names_it(
    trained: Trained, hook: str, iteration: int
) -> None:
    message = rf"plugin 'Returning', hook {hook} \(test_plugin_calls.py:\d+\) returned 17.5, a float; .* return nothing"
    with pytest.raises(PluginError, match=message):
        trained(Returning, {"hook": hook, "iteration": iteration})


class Empty:
    """Forgets that a hook is no generator."""

    @hookimpl
    def before_epoch(self) -> Any:
        yield 1


def test_a_hook_that_is_a_generator_is_an_error_for_nothing_of_it_would_run(trained: Trained) -> None:
    with pytest.raises(PluginError, match=r"hook before_epoch .* returned <generator .*, a generator"):
        trained(Empty)


# How long a hook takes


class Clock:
    """The clock of the report: it stands still until a hook moves it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.reads = 0

    def perf_counter(self) -> float:
        self.reads += 1
        return self.now

    def move(self, seconds: float) -> None:
        """Let time pass; the thread that watches the hooks looks before and after it."""
        self._wait_for_look()
        self.now += seconds
        self._wait_for_look()

    def _wait_for_look(self) -> None:
        # The thread reads the clock first. When it reads it again, it has done the rest.
        reads = self.reads
        while self.reads < reads + 2:
            time.sleep(0.0005)


CLOCK = Clock()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin_report, "time", CLOCK)


class Sleeping:
    """Takes long in some calls of a hook; where it is watched, the thread that watches sees it."""

    every_rank = True

    def __init__(self, hook: str, seconds: float, every: int = 1, *, watched: bool = False) -> None:
        self.hook, self.seconds, self.every = hook, seconds, every
        self.watched = watched
        self.calls = 0

    def sleep(self, hook: str) -> None:
        if hook != self.hook:
            return
        self.calls += 1
        if self.calls % self.every == 0:
            if self.watched:
                CLOCK.move(self.seconds)
            else:
                CLOCK.now += self.seconds

    @hookimpl
    def before_batch(self) -> None:
        self.sleep("before_batch")

    @hookimpl
    def after_epoch(self) -> None:
        self.sleep("after_epoch")


def seconds_of(log_lines: list[str], plugin: str) -> float:
    """What the log says that a plugin took, in the one line that says so."""
    [line] = [line for line in log_lines if "of these the plugins" in line]
    [seconds] = re.findall(rf"{plugin} ([\d.]+) s \([\d.]+%\)", line)
    return float(seconds)


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("hook", ["before_batch", "after_epoch"])
def test_the_log_says_how_long_each_plugin_took(trained: Trained, log_lines: list[str], hook: str) -> None:
    calls = {"before_batch": 12, "after_epoch": 2}[hook]
    trained(Sleeping, {"hook": hook, "seconds": 0.6 / calls})
    assert seconds_of(log_lines, "Sleeping") == 0.6


@pytest.mark.slow
@pytest.mark.usefixtures("clock")
def test_of_a_hook_per_batch_one_call_in_fifty_stands_for_the_others(trained: Trained, log_lines: list[str]) -> None:
    trained(Sleeping, {"hook": "before_batch", "seconds": 0.02, "every": 10}, epochs=100)
    # 60 of 600 calls.
    assert seconds_of(log_lines, "Sleeping") == pytest.approx(1.2, abs=0.4)


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(("hook", "every"), [("before_batch", 1), ("before_batch", 5), ("after_epoch", 2)])
def test_a_hook_that_takes_long_is_named_in_the_log(
    trained: Trained, log_lines: list[str], monkeypatch: pytest.MonkeyPatch, hook: str, every: int
) -> None:
    monkeypatch.setattr(plugin_report, "SLOW", 0.01)
    trained(Sleeping, {"hook": hook, "seconds": 0.15, "every": every, "watched": True})
    named = [
        line
        for line in log_lines
        if re.search(rf"plugin 'Sleeping', hook {hook} \(test_plugin_calls.py:\d+\) took 0", line)
    ]
    assert len(named) == {"before_batch": 12, "after_epoch": 2}[hook] // every


class Stopping:
    """Gets a signal in the middle of a hook."""

    @hookimpl
    def before_batch(self, context: Context) -> None:
        if context["train_state"]["iteration"] == 4:
            signal.raise_signal(signal.SIGTERM)


class Waiting:
    """Gets a signal in the middle of a hook, and goes on for a while."""

    @hookimpl
    def before_batch(self, context: Context) -> None:
        if context["train_state"]["iteration"] == 4:
            signal.raise_signal(signal.SIGTERM)
            CLOCK.move(0.5)


@pytest.mark.usefixtures("clock")
def test_a_slow_hook_for_which_a_signal_waits_is_named_before_it_returns(
    trained: Trained, log_lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin_report, "SLOW", 0.01)
    with pytest.raises(StoppedError):
        trained(Waiting)
    where = "plugin 'Waiting', hook before_batch (test_plugin_calls.py"
    said = [line.strip().partition(") ")[2] for line in log_lines if where in line]
    assert [re.sub(r"\d", "0", line) for line in said] == ["has run for 0 s, and SIGTERM waits for it", "took 0 s"]


# A plugin that was not called


class Printing:
    @hookimpl
    def on_print_interval(self) -> None:
        pass


class Validating:
    @hookimpl
    def before_validation(self) -> None:
        pass

    @hookimpl
    def after_validation(self) -> None:
        pass


class Saving:
    @hookimpl
    def after_checkpoint_saved(self) -> None:
        pass


class Beginning:
    @hookimpl
    def before_pass(self) -> None:
        pass


class Observing:
    @hookimpl
    def on_observe(self) -> None:
        pass


class Ending:
    @hookimpl
    def on_print_interval(self) -> None:
        pass

    @hookimpl
    def after_pipeline(self) -> None:
        pass


def uncalled(log_lines: list[str]) -> list[str]:
    """What the log says of plugins that were not called."""
    lines = [line.strip() for line in log_lines if "none of its hooks was called" in line]
    return [line.partition("in the first epoch: ")[2] for line in lines]


@pytest.mark.parametrize(
    ("plugin", "settings", "reason"),
    [
        (Printing, {"print_interval": 50}, "on_print_interval (print_interval is 50, and the epoch was over at iteration 6)"),
        (Printing, {"print_interval": None, "epochs": 1}, "on_print_interval (print_interval is null, and the epoch was over at iteration 6)"),
        (Validating, {"valid_interval": "3 epoch"}, "before_validation (valid_interval is 3 epoch, and the epoch was over at iteration 6); "
         "after_validation (valid_interval is 3 epoch, and the epoch was over at iteration 6)"),
        (Observing, {}, "on_observe (nothing has called observe)"),
        (Saving, {"save_interval": "2 epoch"}, "after_checkpoint_saved (save_interval is 2 epoch, and the epoch was over at iteration 6)"),
    ],
)  # fmt: skip
def test_a_plugin_that_the_first_epoch_has_not_called_is_reported_once_with_the_reason(
    trained: Trained, log_lines: list[str], plugin: type, settings: dict[str, Any], reason: str
) -> None:
    trained(plugin, **{"epochs": 3, **settings})
    assert uncalled(log_lines) == [reason]


@pytest.mark.parametrize(
    ("plugin", "settings"),
    [(Printing, {}), (Validating, {}), (Saving, {}), (Saving, {"epochs": 1, "save_interval": None}), (Ending, {"print_interval": 50})],
)  # fmt: skip
def test_a_plugin_that_was_called_or_comes_at_the_end_alone_is_not_reported(
    trained: Trained, log_lines: list[str], plugin: type, settings: dict[str, Any]
) -> None:
    trained(plugin, **{"epochs": 3, **settings})
    assert uncalled(log_lines) == []


def test_a_plugin_that_watches_validations_of_a_training_without_one_is_reported(
    linear: Path, trained: Trained, log_lines: list[str]
) -> None:
    linear.write_text(re.sub(r"\n *valid_dataset_name:.*", "", linear.read_text(encoding="utf-8")), encoding="utf-8")
    trained(Validating)
    reason = "(no phase has a valid_dataset_name)"
    assert uncalled(log_lines) == [f"before_validation {reason}; after_validation {reason}"]


def test_a_plugin_of_the_beginning_of_an_epoch_is_reported_where_the_run_was_resumed_after_it(
    trained: Trained, log_lines: list[str]
) -> None:
    with pytest.raises(StoppedError):
        trained(Stopping)
    trained(Beginning, epochs=3, resume="auto")
    assert uncalled(log_lines) == ["before_pass (the epoch had begun before the run was resumed)"]


# What a plugin changes, in a debug run


class Changing:
    """Does something in a hook that changes more than itself."""

    def __init__(self, what: str, hook: str = "after_batch") -> None:
        self.what, self.hook = what, hook

    def change(self, hook: str, context: Context, batch: Any = None) -> None:
        weight = context["model"]["line"]["model"].weight
        changes: dict[str, Callable[[], Any]] = {
            "weight": lambda: weight.data.add_(1),
            "torch": lambda: torch.rand(1),
            "python": random.random,
            "numpy": pytest.importorskip("numpy").random.rand,
            "batch": lambda: batch.__setitem__(0, batch[0].to("meta")),
            "nothing": lambda: weight.sum().item(),
        }
        if hook == self.hook:
            changes[self.what]()

    @hookimpl
    def after_batch(self, context: Context, batch: Any) -> None:
        self.change("after_batch", context, batch)

    @hookimpl
    def after_epoch(self, context: Context) -> None:
        self.change("after_epoch", context)


@pytest.mark.parametrize("hook", ["after_batch", "after_epoch"])
@pytest.mark.parametrize(
    ("what", "message"),
    [("weight", "has changed a weight: line.weight: 1 of 1 elements, largest difference 1"), ("torch", "has changed a random state: torch"),
     ("python", "has changed a random state: python"), ("numpy", "has changed a random state: numpy"), ("nothing", None)],
)  # fmt: skip
def test_a_debug_run_names_a_plugin_that_changes_a_weight_or_a_random_state_once(
    trained: Trained, log_lines: list[str], what: str, message: str | None, hook: str
) -> None:
    trained(Changing, {"what": what, "hook": hook}, debug=True)
    said = [line for line in log_lines if "has changed" in line]
    assert len(said) == (message is not None)
    assert all(message and message in line and f"plugin 'Changing', hook {hook} (test_plugin" in line for line in said)


class Own(Brain):
    """A Brain that fits a line."""

    def __init__(self) -> None:
        super().__init__({"net": torch.nn.Linear(1, 1)})

    def compute_forward(self, batch: Any, stage: Any) -> torch.Tensor:
        predictions: torch.Tensor = self.modules["net"](batch[0])
        return predictions

    def compute_objectives(self, predictions: Any, batch: Any, stage: Any) -> torch.Tensor:
        return torch.nn.functional.mse_loss(predictions, batch[1])


class Zeroing:
    @hookimpl
    def after_batch(self, context: Context) -> None:
        context["model"]["line"].brain.modules["net"].weight.data.zero_()


def test_a_debug_run_names_a_plugin_that_changes_a_weight_of_a_brain(tmp_path: Path, log_lines: list[str]) -> None:
    phase = {"name": "line", "model": Own, "loss": None, "dataset_name": "train_data"}
    Workspace(tmp_path).run("runner.train_runner.debug=true", plugins=[Zeroing], phase=[phase])
    [said] = [line for line in log_lines if "has changed" in line]
    assert "plugin 'Zeroing', hook after_batch (test_plugin" in said
    assert "has changed a weight: line.net.weight: 1 of 1 elements" in said


def test_a_debug_run_names_a_plugin_that_moves_a_batch(trained: Trained, log_lines: list[str]) -> None:
    trained(Changing, {"what": "batch"}, debug=True)
    [said] = [line for line in log_lines if "has changed" in line]
    assert "has changed the device of the batch: [0]: 'cpu' and 'meta'" in said


class Nested(Dataset[Any]):
    """Samples with a tensor in a mapping in a mapping."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return {"x": {"deep": torch.ones(1)}}


class OfNested(Own):
    """Fits a one to it."""

    def compute_forward(self, batch: Any, stage: Any) -> torch.Tensor:
        return super().compute_forward([batch["x"]["deep"]], stage)

    def compute_objectives(self, predictions: Any, batch: Any, stage: Any) -> torch.Tensor:
        loss: torch.Tensor = (predictions - 1).square().mean()
        return loss


class Moving:
    @hookimpl
    def after_batch(self, batch: Any) -> None:
        batch["x"]["deep"] = batch["x"]["deep"].to("meta")


def test_a_debug_run_looks_at_every_part_of_a_batch(tmp_path: Path, log_lines: list[str]) -> None:
    data = {"name": "train_data", "class_path": Nested, "batch_size": 4}
    phase = {"name": "line", "model": OfNested, "loss": None, "dataset_name": "train_data"}
    Workspace(tmp_path).run("runner.train_runner.debug=true", plugins=[Moving], dataset=[data], phase=[phase])
    [said] = [line for line in log_lines if "has changed" in line]
    assert "has changed the device of the batch: x.deep: 'cpu' and 'meta'" in said


def test_another_run_does_not_look_at_what_a_plugin_changes(trained: Trained, log_lines: list[str]) -> None:
    trained(Changing, {"what": "weight"})
    assert not any("has changed" in line for line in log_lines)


# What is said of a plugin that fails; two of one kind


class Failing:
    """Fails in one of its methods."""

    def __init__(self, method: str) -> None:
        self.method = method

    def fail(self, method: str) -> None:
        if method == self.method:
            raise ZeroDivisionError

    @hookimpl
    def after_epoch(self) -> None:
        self.fail("hook after_epoch")

    def state_dict(self) -> dict[str, Any]:
        self.fail("state_dict")
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.fail("load_state_dict")


@pytest.mark.parametrize("method", ["hook after_epoch", "state_dict", "load_state_dict"])
def test_a_plugin_that_fails_is_named_with_its_method_and_file(
    trained: Trained, log_lines: list[str], method: str
) -> None:
    if method == "load_state_dict":
        trained(Failing, {"method": "nothing"}, epochs=1)
        next(Path("runs").rglob("done.json")).unlink()
    with pytest.raises(ZeroDivisionError):
        trained(Failing, {"method": method}, resume="auto" if method == "load_state_dict" else "never")
    assert any(f"plugin 'Failing', {method} (test_plugin_calls.py:" in line for line in log_lines)


@dataclass
class Equal:
    """Two with the same arguments are equal."""

    seconds: float = 0.0

    @hookimpl
    def after_epoch(self, context: Context) -> None:
        context.setdefault("called", []).append(id(self))


def test_two_equal_plugins_of_one_class_do_not_collide(linear: Path) -> None:
    config = yaml.safe_load(linear.read_text(encoding="utf-8"))
    plugins = [{"name": "one", "class_path": Equal}, {"name": "other", "class_path": Equal}]
    context = GeneralTrainer({**config, "workspace": str(linear.parent), "plugins": plugins}).run()
    assert [context["called"].count(each) for each in context["called"]] == [2, 2, 2, 2]


def test_a_state_dict_that_returns_nothing_is_an_error_of_the_first_checkpoint(trained: Trained) -> None:
    class Forgetful:
        @hookimpl
        def after_batch(self) -> None: ...

        def state_dict(self) -> None: ...

        def load_state_dict(self, state: Any) -> None: ...

    with pytest.raises(
        CheckpointError, match=r"^plugin:Forgetful: state_dict returned None, from which no run could go"
    ):
        trained(Forgetful)
