"""``pipeline plugins``."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import click
from rich import box
from rich.table import Table
from rich.text import Text

from pipeline.check.checker import inspect
from pipeline.check.hooks import definition_of
from pipeline.cli.options import config_and_overrides
from pipeline.config.load import ConfigBuilder
from pipeline.config.schema import DEFAULT_PLUGINS
from pipeline.config.yaml_tree import DEFAULT
from pipeline.errors import ConfigError, printable
from pipeline.user_code import classes
from pipeline.user_code.plugins import HOOKS, SIDES, Plugin, configured_plugins

from .. import print_tables

# In the order in which pluggy calls them; what is marked with none of these comes before the last.
_RANKS = {"hookwrapper": 0, "wrapper": 0, "tryfirst": 1, "": 2, "trylast": 3}


@dataclass(frozen=True)
class Call:
    """A plugin's method for a hook.

    Attributes:
        plugin: the name of the plugin.
        method: ``my_plugin.py:7``.
        why: why it is called at its place: where the config names the plugin, and what changes that order.
        mark: ``tryfirst`` and the like; ``""``: none.
    """

    plugin: str
    method: str
    why: Sequence[str]
    mark: str


@click.command("plugins")
@config_and_overrides
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def command(path: str, overrides: Sequence[str], as_json: bool) -> None:
    """Print for each hook which plugins are called, in order.

    From source alone, with the reason of each place. Faults go to stderr; what can be told is printed all the same.
    """
    draft = ConfigBuilder(path, overrides)
    if draft.tree is None:
        raise ConfigError(draft.faults)
    plugins, _ = configured_plugins(draft.tree, draft.workspace)
    calls = calls_by_hook(plugins)
    if as_json:
        plain = {
            hook: [{"plugin": c.plugin, "method": c.method, "why": [*c.why]} for c in own]
            for hook, own in calls.items()
        }
        click.echo(json.dumps(plain, indent=2))
    else:
        _print(calls)
    if faults := inspect(path, overrides).faults:
        raise ConfigError(faults)


def calls_by_hook(plugins: Sequence[Plugin]) -> dict[str, list[Call]]:
    """Hook -> its calls in order, for every hook; ``plugins`` are in calling order."""
    calls: dict[str, list[Call]] = {hook: [] for hook in HOOKS}
    for plugin in plugins:
        for hook, call in _calls_of(plugin):
            calls[hook].append(call)
    for own in calls.values():
        # Of several marked trylast, pluggy calls the one registered first last, which is the last of the config.
        last = [call for call in own if call.mark == "trylast"]
        own[:] = [
            *sorted((call for call in own if call.mark != "trylast"), key=lambda c: _RANKS[c.mark]),
            *reversed(last),
        ]
    return calls


def _calls_of(plugin: Plugin) -> Iterator[tuple[str, Call]]:
    definition = definition_of(plugin)
    if definition is None:
        return
    why = tuple(_reasons(plugin))
    homes = {
        name: (node, cls)
        for cls in reversed(classes.ancestry(definition)[0])
        for name, node in classes.methods(cls).items()
    }
    for hook, (node, home) in homes.items():
        marks = [mark for mark in node.decorator_list if "hookimpl" in classes.decorator_name(mark)]
        if hook in HOOKS and marks:
            mark = _mark(marks[0])
            place = f"{home.module.file.name}:{node.lineno}"
            yield hook, Call(plugin.name, place, (*why, mark) if mark else why, mark)


def _reasons(plugin: Plugin) -> Iterator[str]:
    """Where its place comes from: the config, and the names in ``before`` and ``after``."""
    if plugin.name in DEFAULT_PLUGINS:
        yield "default"
    if plugin.origin is not DEFAULT:
        yield str(plugin.origin)
    for side in SIDES:
        said_by = "class" if getattr(plugin.settings, side) is None else "config"
        if names := plugin.neighbours(side):
            yield f"{side} {', '.join(names)} ({said_by})"


def _mark(mark: ast.expr) -> str:
    """What a ``@hookimpl(tryfirst=True)`` says of the order; ``""``: nothing."""
    keywords = mark.keywords if isinstance(mark, ast.Call) else []
    names = [word.arg for word in keywords if isinstance(word.value, ast.Constant) and word.value.value]
    return next((name for name in _RANKS if name in names), "")


def _print(calls: Mapping[str, Iterable[Call]]) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("hook", "plugin", "method", "why there"):
        table.add_column(title, overflow="fold")
    for hook, own in calls.items():
        for index, call in enumerate(own):
            cells = ("" if index else hook, call.plugin, call.method, "; ".join(call.why))
            table.add_row(*(Text(printable(cell)) for cell in cells))
    print_tables([table])
    click.echo(f"no plugin: {', '.join(hook for hook, own in calls.items() if not own) or 'none'}")
