"""The plugins of a run are built and registered; and what is said of one that raises."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from traceback import walk_tb
from typing import Any

import pluggy

from pipeline.context import Context
from pipeline.user_code.plugin_calls import PluginCalls
from pipeline.user_code.plugins import HOOKS, Plugin

_STATE = ("state_dict", "load_state_dict")


def register_plugins(plugins: Sequence[Plugin], manager: pluggy.PluginManager, context: Context) -> PluginCalls:
    """Build loaded plugins, so that they are called in the given order."""
    instances = [_build(plugin) for plugin in plugins]
    # pluggy calls the one registered last first.
    for plugin, instance in reversed([*zip(plugins, instances, strict=True)]):
        manager.register(instance, plugin.name)
    calls, by_name = PluginCalls(context), {plugin.name: plugin for plugin in plugins}
    for hook in HOOKS:
        for implementation in getattr(manager.hook, hook).get_hookimpls():
            calls.add(by_name[implementation.plugin_name], hook, implementation)
    return calls


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
        if owner in names and code.co_name in (*HOOKS, *_STATE):
            method = code.co_name if code.co_name in _STATE else f"hook {code.co_name}"
            place = f"plugin '{names[owner]}', {method} ({Path(code.co_filename).name}:{line})"
    return place
