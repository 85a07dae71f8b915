"""The plugins of a run: how they are built and registered, how a hook is called, and what is said of one that raises."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from traceback import walk_tb
from typing import Any

import pluggy
from loguru import logger

from pipeline.config.schema import WARN
from pipeline.errors import PluginError
from pipeline.user_code.plugins import HOOKS, STATE, Plugin
from pipeline.user_code.tracebacks import user_traceback


class Clock:
    """The call that runs, and since when; and the time, where somebody looks at it now and then: to read it is no call."""

    running: tuple[HookCall | None, float] = None, 0.0
    now = 0.0


CLOCK = Clock()


def running_hook() -> str | None:
    """``plugin 'x', hook before_epoch (x.py:7)``, where one is running."""
    call, _ = CLOCK.running
    return call.where if call else None


class HookCall:
    """Calls a hook of a plugin, and knows how often, and how long that took.

    Args:
        plugin: the plugin.
        hook: the name of the hook.
        implementation: its method, as pluggy has registered it.

    Attributes:
        where: ``plugin 'x', hook before_epoch (x.py:7)``.
        arguments: which of the hook's arguments it takes, in order.
        wraps: whether it is a wrapper around other plugins.
        count: how often it was called.
        due: once it was called so often, the next call in the hot loop is timed.
        took: called with the seconds of each call that was timed, and True; with those that the clock has moved on in
            another call, and False.
    """

    def __init__(self, plugin: Plugin, hook: str, implementation: pluggy.HookImpl) -> None:
        self.plugin, self.hook, self.warns = plugin, hook, plugin.settings.on_error == WARN
        self.method: Callable[..., Any] = implementation.function
        code = inspect.unwrap(self.method).__code__
        self.where = f"plugin '{plugin.name}', hook {hook} ({Path(code.co_filename).name}:{code.co_firstlineno})"
        self.arguments = [*implementation.argnames, *implementation.kwargnames]
        self.wraps = implementation.wrapper or implementation.hookwrapper
        self.may_return = self.wraps or HOOKS[hook].return_annotation != "None"
        self.count = self.errors = 0
        self.due = 0 if self.warns else float("inf")
        self.took: Callable[[float, bool], None] = _nothing

    def __call__(self, *arguments: Any, **defaults: Any) -> Any:
        """Call the hook, and time it."""
        self.count += 1
        outer, began = CLOCK.running, time.perf_counter()
        CLOCK.running = self, began
        try:
            value = self.method(*arguments, **defaults)
            if value is not None and not self.may_return:
                self.refuse(value)
        except Exception as error:
            if not self.warns:
                raise
            self.warn(error)
            return None
        finally:
            CLOCK.running = outer
            self.took(time.perf_counter() - began, True)
        return value

    def refuse(self, value: Any) -> None:
        """Refuse what a hook has returned that takes nothing.

        Raises:
            PluginError: always.
        """
        what = f"returned {value!r:.80}, a {type(value).__name__}"
        raise PluginError(f"{self.where} {what}; nothing is done with it, so return nothing")

    def warn(self, error: Exception) -> None:
        """Log an error of a plugin that may fail: of a hook's errors the 1st, 10th, 100th …."""
        self.errors += 1
        if str(self.errors).strip("0") == "1":
            times = f" for the {self.errors}th time" if self.errors > 1 else ""
            what = f"{self.where} failed{times}: {type(error).__name__}: {error}"
            trace = error.with_traceback(user_traceback(error.__traceback__))
            logger.opt(exception=trace).warning(f"{what}; on_error is '{WARN}', so the run goes on")


def _nothing(*_: object) -> None:
    """Nobody asks how long a call took."""


def hook_or_none(hooks: pluggy.HookRelay, name: str) -> Callable[..., Any] | None:
    """A hook for the hot loop: a plain function, or None if nobody implements it, which costs nothing.

    It makes one call of ours beside those of the plugins. Where one wraps others, it is pluggy's.
    """
    caller: pluggy.HookCaller = getattr(hooks, name)
    implementations = caller.get_hookimpls()
    if any(each.wrapper or each.hookwrapper for each in implementations):
        return caller
    calls: list[Any] = [each.function for each in reversed(implementations)]

    def call_plugins(**arguments: Any) -> None:
        outer = CLOCK.running
        for call in calls:
            values = map(arguments.__getitem__, call.arguments)
            if call.count >= call.due:
                call(*values)
                continue
            call.count += 1
            began = CLOCK.now
            CLOCK.running = call, began
            try:
                if (value := call.method(*values)) is not None:
                    call.refuse(value)
            finally:
                CLOCK.running = outer
            if began != CLOCK.now:
                call.took(CLOCK.now - began, False)

    return call_plugins if calls else None


def register_plugins(plugins: Sequence[Plugin], manager: pluggy.PluginManager) -> None:
    """Build loaded plugins, so that they are called in the given order."""
    instances = [_build(plugin) for plugin in plugins]
    # pluggy calls the one registered last first.
    for plugin, instance in reversed([*zip(plugins, instances, strict=True)]):
        manager.register(instance, plugin.name)
    by_name = {plugin.name: plugin for plugin in plugins}
    for hook in HOOKS:
        implementations: list[Any] = getattr(manager.hook, hook).get_hookimpls()
        for each in implementations:
            each.function = HookCall(by_name[each.plugin_name], hook, each)


def _build(plugin: Plugin) -> Any:
    assert isinstance(plugin.target, type)
    instance: Any = plugin.target(**plugin.args)
    if hasattr(instance, "plugin_name"):
        instance.plugin_name = plugin.name
    return instance


def failing_plugin(manager: pluggy.PluginManager, error: BaseException) -> str | None:
    """``plugin 'x', hook before_epoch (x.py:7)``, for the plugin in whose code an error was raised; None if it was none's."""
    place, names = None, {id(instance): name for name, instance in manager.list_name_plugin()}
    for frame, line in walk_tb(error.__traceback__):
        code, values = frame.f_code, frame.f_locals
        if code is _build.__code__:
            return f"plugin '{values['plugin'].name}' ({values['plugin'].origin}), when it was built,"
        owner = id(values.get(code.co_varnames[0])) if code.co_argcount else None
        if owner in names and code.co_name in (*HOOKS, *STATE):
            method = code.co_name if code.co_name in STATE else f"hook {code.co_name}"
            place = f"plugin '{names[owner]}', {method} ({Path(code.co_filename).name}:{line})"
    return place
