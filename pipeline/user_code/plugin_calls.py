"""The plugins of a run: how they are built and registered, how a hook is called, and what is said of one that raises."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from traceback import walk_tb
from typing import Any

import pluggy
from loguru import logger

from pipeline.config.schema import WARN
from pipeline.errors import PluginError
from pipeline.user_code.plugins import HOOKS, STATE, Plugin
from pipeline.user_code.tracebacks import user_traceback, with_traceback


class Current:
    """The call of a hook that is running; None: none is."""

    call: HookCall | None = None


CURRENT = Current()


def running_hook() -> str | None:
    """``plugin 'x', hook before_epoch (x.py:7)``, where one is running."""
    return CURRENT.call.where if CURRENT.call else None


class HookCall:
    """Calls a hook of a plugin, and knows how often.

    Args:
        plugin: the plugin.
        hook: the name of the hook.
        implementation: its method, as pluggy has registered it.

    Attributes:
        where: ``plugin 'x', hook before_epoch (x.py:7)``.
        arguments: which of the hook's arguments it takes, in order.
        wraps: whether it is a wrapper around other plugins.
        count: how often it was called.
        method: the method, as it is called in the hot loop; from ``due`` calls on, the next goes through ``watched`` there too.
        watched: the same, with what somebody has put around it to watch it.
    """

    def __init__(self, plugin: Plugin, hook: str, implementation: pluggy.HookImpl) -> None:
        self.plugin, self.hook, self.warns = plugin, hook, plugin.settings.on_error == WARN
        self.method: Callable[..., Any] = implementation.function
        self.watched = self.method
        code = inspect.unwrap(self.method).__code__
        self.where = f"plugin '{plugin.name}', hook {hook} ({Path(code.co_filename).name}:{code.co_firstlineno})"
        self.arguments = [*implementation.argnames, *implementation.kwargnames]
        self.wraps = implementation.wrapper or implementation.hookwrapper
        self.may_return = self.wraps or HOOKS[hook].return_annotation != "None"
        self.count = self.errors = 0
        self._unwatched = 0 if self.warns else float("inf")
        self.due = self._unwatched

    def watch(self, watched: Callable[..., Any], unwatched: int) -> None:
        """Replace the method by something that calls it and watches it.

        Args:
            watched: calls the method.
            unwatched: the number of calls in the hot loop between two that are watched. If the plugin only warns of errors,
                every call is watched.
        """
        self.watched = watched
        self._unwatched = 0 if self.warns else unwatched
        self.due = 0

    def __call__(self, *arguments: Any, **defaults: Any) -> Any:
        """Call the hook; an error is logged where the plugin is to warn."""
        self.count += 1
        # The first may have something to load.
        self.due = 0 if self.count == 1 else self.count + self._unwatched
        outer, CURRENT.call = CURRENT.call, self
        try:
            value = self.watched(*arguments, **defaults)
            if value is not None and not self.may_return:
                self.refuse(value)
        except Exception as error:
            if not self.warns:
                raise
            self.warn(error)
            return None
        finally:
            CURRENT.call = outer
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
            logger.warning(with_traceback(f"{what}; on_error is '{WARN}', so the run goes on", trace))


def hook_or_none(hooks: pluggy.HookRelay, name: str) -> Callable[..., Any] | None:
    """A hook for the hot loop: a plain function, or None if nobody implements it, which costs nothing.

    It makes one call of ours beside those of the plugins. Where one wraps others, it is pluggy's.
    """
    caller: pluggy.HookCaller = getattr(hooks, name)
    calls: list[Any] = [each.function for each in reversed(caller.get_hookimpls())]
    if any(call.wraps for call in calls):
        return caller

    def call_plugins(**arguments: Any) -> None:
        outer = CURRENT.call
        for call in calls:
            values = map(arguments.__getitem__, call.arguments)
            if call.count >= call.due:
                call(*values)
                continue
            call.count += 1
            CURRENT.call = call
            try:
                if (value := call.method(*values)) is not None:
                    call.refuse(value)
            finally:
                CURRENT.call = outer

    return call_plugins if calls else None


def each_answer(hook: pluggy.HookCaller, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Call the plugins of a hook one after another, the first in the config first: name of the plugin -> what it returned.

    Args:
        hook: the hook.
        values: its arguments by name; what is changed between two calls, the next plugin gets.
    """
    for each in reversed(hook.get_hookimpls()):
        yield each.plugin_name, each.function(*(values[argument] for argument in each.argnames))


def register_plugins(plugins: Sequence[Plugin], manager: pluggy.PluginManager) -> None:
    """Build loaded plugins, so that they are called in the given order."""
    by_name = {plugin.name: plugin for plugin in plugins}
    instances = {name: _build(plugin) for name, plugin in by_name.items()}
    # pluggy calls the one registered last first.
    for name, instance in reversed(instances.items()):
        manager.register(instance, name)
    for hook in HOOKS:
        for each in getattr(manager.hook, hook).get_hookimpls():
            each.function = HookCall(by_name[each.plugin_name], hook, each)


def _build(plugin: Plugin) -> Any:
    if plugin.instance is not None:
        return plugin.instance
    cls: Any = plugin.target
    if cls.__eq__ is not object.__eq__:
        # pluggy takes two objects that are equal, such as those of a dataclass, for one.
        cls = type(cls)(cls.__name__, (cls,), {"__eq__": object.__eq__, "__hash__": object.__hash__})
    instance = cls(**plugin.args)
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
