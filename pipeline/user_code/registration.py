"""The plugins of a run are built and registered; and what is said of one that raises."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from itertools import count
from pathlib import Path
from traceback import walk_tb
from typing import Any

import pluggy
from loguru import logger

from pipeline.config.schema import WARN
from pipeline.user_code.plugins import HOOKS, Plugin
from pipeline.user_code.tracebacks import user_traceback

_STATE = ("state_dict", "load_state_dict")


def register_plugins(plugins: Sequence[Plugin], into: pluggy.PluginManager) -> None:
    """Build loaded plugins, so that they are called in the given order."""
    instances = [(_build(plugin, into), plugin.name) for plugin in plugins]
    # pluggy calls the one registered last first.
    for instance, name in reversed(instances):
        into.register(instance, name)


def _build(plugin: Plugin, manager: pluggy.PluginManager) -> Any:
    assert isinstance(plugin.target, type)
    instance: Any = plugin.target(**plugin.args)
    if hasattr(instance, "plugin_name"):
        instance.plugin_name = plugin.name
    for hook in HOOKS if plugin.settings.on_error == WARN else ():
        if hasattr(instance, hook):
            setattr(instance, hook, _warning(getattr(instance, hook), manager))
    return instance


def _warning(hook: Callable[..., Any], manager: pluggy.PluginManager) -> Callable[..., Any]:
    """The hook of a plugin that may fail: of its errors the 1st, 10th, 100th … are logged."""
    errors = count(1)

    @wraps(hook)
    def call(*arguments: Any) -> Any:
        try:
            return hook(*arguments)
        except Exception as error:
            number = next(errors)
            if str(number).strip("0") == "1":
                times = f" for the {number}th time" if number > 1 else ""
                what = f"{failing_plugin(manager, error)} failed{times}: {type(error).__name__}: {error}"
                trace = error.with_traceback(user_traceback(error.__traceback__))
                logger.opt(exception=trace).warning(f"{what}; on_error is '{WARN}', so the run goes on")
            return None

    return call


def failing_plugin(manager: pluggy.PluginManager, error: BaseException) -> str | None:
    """``plugin 'x', hook before_epoch (x.py:7)``, for the plugin in whose code an error was raised; None if it was none's."""
    place, names = None, {id(instance): name for name, instance in manager.list_name_plugin()}
    for frame, line in walk_tb(error.__traceback__):
        code, values = frame.f_code, frame.f_locals
        if code is _build.__code__:
            return f"plugin '{values['plugin'].name}' ({values['plugin'].origin}), when it was built,"
        owner = id(values.get(code.co_varnames[0])) if code.co_argcount else None
        if owner in names and code.co_name in (*HOOKS, *_STATE):
            method = code.co_name if code.co_name in _STATE else f"hook {code.co_name}"
            place = f"plugin '{names[owner]}', {method} ({Path(code.co_filename).name}:{line})"
    return place
