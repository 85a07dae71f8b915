"""What is around each call of a hook: its order, its result, its time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline import Context, GeneralTrainer, hookimpl
from pipeline.errors import PluginError
from pipeline.user_code.plugin_calls import hook_or_none
from pipeline.user_code.plugins import Plugin, plugin_manager
from pipeline.user_code.registration import register_plugins

Trained = Callable[..., Context]


@pytest.fixture
def trained(linear: Path) -> Trained:
    """Runs the linear config with a plugin of a class, its arguments, and these settings of the runner."""

    def run(cls: type, args: dict[str, Any] | None = None, **settings: Any) -> Context:
        config = yaml.safe_load(linear.read_text(encoding="utf-8"))
        config["runner"][0] |= settings
        plugins = [{"progress_bar": False}, {"metric_log": False}, {"class_path": cls, "args": args or {}}]
        return GeneralTrainer({**config, "workspace": str(linear.parent), "plugins": plugins}).run()

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
    register_plugins(plugins, manager, context)
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
