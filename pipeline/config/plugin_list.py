"""The list ``plugins`` of a config: its long form, the names of plugins, and their addresses.

A plugin may be written as ``ema``, ``{ema: {decay: 0.9}}``, ``{ema: false}`` or in the long form.
All become the long form ``{name, class_path, args, …}``, so that plugins merge by name.
``args: false`` removes a plugin.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from pipeline.config.schema import DEFAULT_PLUGINS, PluginSettings, is_long_form
from pipeline.config.yaml_tree import Node, Origin, unique_nodes
from pipeline.errors import ConfigError, one_of

SECTION = "plugins"

# A mark of the config, and no plugin.
_MARK = "_delete_"

_INSTALLED = re.compile(r"[\w-]+")
_NAME = re.compile(r"[A-Za-z0-9_-]{1,200}")


def plugin_name(class_path: Any) -> str:
    """Return the name of a plugin without a ``name``.

    It is that of an installed plugin, the stem of the file, or the name of the class.
    """
    if not isinstance(class_path, str):
        return str(getattr(class_path, "__name__", class_path))
    last = class_path.rpartition("/")[2]
    file, _, name = last.partition(":")
    if not file.endswith(".py"):
        return name or file.rpartition(".")[2]
    return file.removesuffix(".py") if name in ("", "Plugin") else name


def use_long_form(plugins: Node | None) -> None:
    """Write each item of ``plugins`` in the long form; an item that has no known form stays."""
    if plugins is not None and isinstance(plugins.value, list):
        plugins.value[:] = [plugin for item in plugins.value for plugin in _in_long_form(item)]


def _in_long_form(item: Node) -> Iterator[Node]:
    """Yield the plugins of an item: several for a mapping with several class paths."""
    if isinstance(item.value, str | type):
        yield _plugin(item.value, Node({}, item.origin), item.origin)
    elif not isinstance(item.value, dict) or item.value.keys() <= {_MARK}:
        yield item
    elif is_long_form(item.value):
        path = item.value.get("class_path")
        if path is not None and "name" not in item.value:
            item = replace(item, value={**_name(path.value, path.origin), **item.value})
        item.value.setdefault("args", Node({}, item.origin))
        yield item
    else:
        mark = item.value.pop(_MARK, None)
        for class_path, args in item.value.items():
            plugin = _plugin(class_path, args, args.key or args.origin)
            if mark is not None:
                plugin.value[_MARK] = mark
            yield plugin


def _plugin(class_path: str | type, args: Node, origin: Origin) -> Node:
    """The long form of a plugin; an installed one needs its name alone."""
    if args.value is None or args.value is True:
        args = Node({}, args.origin, args.key)
    value = _name(class_path, origin)
    if not value or not _is_installed(class_path):
        value["class_path"] = Node(class_path, origin)
    value["args"] = args
    return Node(value, origin)


def _name(class_path: Any, origin: Origin) -> dict[str, Node]:
    """The key ``name``; none if a reference or another character leaves the name unknown."""
    name = plugin_name(class_path)
    is_known = _NAME.fullmatch(name) and "${" not in str(class_path)
    return {"name": Node(name, origin)} if is_known else {}


def _is_installed(class_path: Any) -> bool:
    return isinstance(class_path, str) and bool(_INSTALLED.fullmatch(class_path))


def is_removed(plugin: Node) -> bool:
    """Return whether an item of ``plugins`` takes a plugin away."""
    args = plugin.child("args") if isinstance(plugin.value, dict) else None
    return args is not None and args.value is False


def default_plugins(tree: Node) -> list[str]:
    """Return the names of the plugins that a config has without naming them."""
    runners = [runner.child("profile_training") for runner in tree.section("runner").values()]
    profiles = any(key is not None and key.value is True for key in runners)
    return [*DEFAULT_PLUGINS, *["profiler"] * profiles]


def drop_removed(tree: Node) -> list[Node]:
    """Drop and return the items that have removed a plugin of a base or of the config.

    An item that removes a default plugin stays, and so does one that names no plugin: a fault.
    """
    plugins = tree.child(SECTION)
    if plugins is None or not isinstance(plugins.value, list):
        return []
    defaults = default_plugins(tree)
    dropped: list[Node] = []
    kept: list[Node] = []
    for item in plugins.value:
        was_there = any(not is_removed(earlier) for earlier in item.earlier)
        is_over = is_removed(item) and was_there and item.name not in defaults
        (dropped if is_over else kept).append(item)
    plugins.value[:] = kept
    return dropped


def full_address(address: str) -> str:
    """Return ``plugins.ema.args.decay`` for ``plugins.ema.decay``; any other address as it is."""
    section, _, inside = address.partition(".")
    name, _, key = inside.partition(".")
    if section != SECTION or not key or key.partition(".")[0] in PluginSettings.model_fields:
        return address
    return f"{SECTION}.{name}.args.{key}"


def prepare_override(tree: Node, address: str, value: Node, *, adds: bool) -> str:
    """Prepare the config for an override such as ``plugins.ema.decay=0.9``.

    Args:
        tree: the config. A default plugin that it does not name is added, any other if ``adds``.
        address: ``plugins.ema`` or ``plugins.ema.decay``.
        value: the value of the override.
        adds: whether the override begins with ``+``.

    Returns:
        The address to set in the long form; ``""`` if a plugin was switched on or off.

    Raises:
        ConfigError: the config has no such plugin.
    """
    _, name, *keys = full_address(address).split(".")
    origin = value.origin
    plugins = tree.value.setdefault(SECTION, Node([], origin, origin))
    if not isinstance(plugins.value, list):
        return address
    is_switch = not keys and isinstance(value.value, bool)
    removes = is_switch and value.value is False
    present = plugins.child(name)
    is_there = present is not None and (removes or not is_removed(present))
    if not is_there:
        _refuse_unknown(tree, address, name, origin, adds=adds and not removes)
    if removes or not is_there:
        args = value if removes else Node({}, origin)
        plugin = Node({"name": Node(name, origin), "args": args}, origin)
        if present is None:
            plugins.value.append(plugin)
        else:
            plugins.value[plugins.value.index(present)] = plugin.take_place_of(present)
    return "" if is_switch else ".".join([SECTION, name, *(keys or ["args"])])


def _refuse_unknown(tree: Node, address: str, name: str, origin: Origin, *, adds: bool) -> None:
    """Raise if the config has no plugin of this name and the override may not add it."""
    defaults = default_plugins(tree)
    if adds or name in defaults:
        return
    known = {part for part, plugin in tree.value[SECTION].children() if not is_removed(plugin)}
    what = f"there is no plugin '{name}'{one_of(name, {*known, *defaults})}"
    raise ConfigError([origin.fault(address, f"{what}; to add a plugin, write +{SECTION}=[NAME]")])


def replace_list(present: Node, plugins: Node) -> Node:
    """Return a list of plugins that replaces another one; its plugins have no earlier values."""
    return replace(plugins, earlier=unique_nodes(*present.earlier, present))


def losses(tree: Node, plugins: Node) -> list[str]:
    """Return what a config loses if a list replaces its plugins.

    Each loss has its place: ``ema (config.yaml:3)``, ``ema.decay (config.yaml:3)``.
    """
    present = tree.child(SECTION) or Node([], plugins.origin)
    if not isinstance(present.value, list) or not isinstance(plugins.value, list):
        return []
    lost: list[str] = []
    defaults = default_plugins(tree)
    for name, plugin in present.children():
        replacement = plugins.child(name)
        if is_removed(plugin):
            if replacement is None and name in defaults:
                lost.append(f"{name}: false ({plugin.origin})")
            continue
        if replacement is None:
            lost.append(f"{name} ({plugin.origin})")
            continue
        arguments = plugin.child("args")
        kept = replacement.child("args")
        for key, argument in arguments.children() if arguments else ():
            if kept is None or kept.child(key) is None:
                lost.append(f"{name}.{key} ({argument.origin})")
    return lost
