"""``pipeline explain``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from pipeline.cli.options import config_options, split
from pipeline.config import aliases, keys, plugin_list, yaml_tree
from pipeline.config.interpolation import REFERENCE
from pipeline.config.load import ConfigBuilder
from pipeline.config.yaml_tree import DEFAULT, Node
from pipeline.errors import ConfigError, nearest

from ..shared.json_schema import properties
from .usages import usages


@click.command("explain")
@partial(config_options, words="[CONFIG] [KEY=VALUE]… ADDRESS")
def command(config: str | None, words: Sequence[str], options: Sequence[str], **swaps: Sequence[str]) -> None:
    """Say what a config value means, and what set it.

    The last word without `=` is the address; the config may have faults, if only it can be read.
    """
    arguments = [word for word in words if "=" not in word]
    is_config = len(arguments) == 1 and arguments[0].endswith((".yaml", ".yml"))
    if not arguments or (is_config and not config):
        example = "pipeline explain config.yaml runner.train_runner.epochs"
        raise click.UsageError(f"name an address, e.g. {example}")
    address, settings = arguments.pop(), [word for word in words if "=" in word]
    path, overrides = split(config, [*arguments, *settings], options, swaps)
    draft = ConfigBuilder(path, overrides)
    if draft.tree is None:
        raise ConfigError(draft.faults)
    address = plugin_list.full_address(address)
    names = aliases.names_of(address)
    canonical = ".".join([*address.split(".")[:-1], names[0]])
    node = keys.find_key(draft.tree, canonical) if keys.key_of(canonical) else None
    node = node or _unlisted_plugin(draft, canonical)
    if node is None:
        hint = nearest(address, sorted(keys.addresses_of(draft.tree))) or f"; `pipeline show {path}` has all there are"
        raise click.UsageError(f"{path}: there is no '{address}'{hint}")
    if draft.faults:
        click.echo(f"{path} has faults; `pipeline check` names them", err=True)
    click.echo(canonical)
    rows = {
        **_schema(canonical),
        "same as": [", ".join(names[1:])] if names[1:] else [],
        "value": [_value(node)],
        "set by": list(_places(draft.tree, node, {canonical})),
        "used by": usages(draft.tree, draft.workspace, canonical),
        "plugins": list(_plugins(draft)) if canonical == plugin_list.SECTION else [],
        "groups": _groups(path, overrides, draft.tree, canonical),
    }
    for title, lines in rows.items():
        for index, line in enumerate(lines):
            click.echo(f"  {'' if index else title:<8} {line}".rstrip())


def _schema(address: str) -> dict[str, list[str]]:
    """Type, default and meaning, as the schema has them."""
    key = keys.key_of(address)
    if key is None:
        return {}
    if key.inside:
        return {"type": ["free"], "means": [f"part of {key.name}: {key.info.description}"]}
    default = keys.default_of(address)
    return {
        "type": [_in_words(properties(key.model)[key.name])],
        "default": ["none: it is required"] if default is None else [yaml_tree.one_line(default.plain())],
        "means": [key.info.description or ""],
    }


# An optimizer, a key in it that divides its parameters, and whatever is below.
_OPTIMIZER = re.compile(
    r"((?:hyper_parameters\.optimizer|phase\.[^.]+\.optim_schedulers\.[^.]+(?:\.args)?))(\.(groups|remove_vector_weight_decay)\b.*)?"
)


def _groups(path: str | Path, overrides: Sequence[str], tree: Node, address: str) -> list[str]:
    """The parameter groups that a config makes; none where it makes none."""
    match = _OPTIMIZER.fullmatch(address)
    optimizer = tree.find(match[1]) if match else None
    options = (optimizer.child("args") or optimizer) if optimizer else None
    if not options or not (options.child("groups") or options.child("remove_vector_weight_decay")):
        return []
    from pipeline.check.checker import check_or_raise  # noqa: PLC0415 - with torch, what follows takes seconds

    from .groups import groups  # noqa: PLC0415 - likewise

    try:
        return list(groups(check_or_raise(path, overrides), address))
    except Exception as error:  # also what the user's own constructors raise
        what = str(error).splitlines()[0] if isinstance(error, ConfigError) else repr(error)
        return [f"cannot tell: {what}; `pipeline check --build {path}` says more"]


def _value(node: Node) -> str:
    whole = node.plain(expanded=False)
    return yaml_tree.brief(whole) if isinstance(whole, dict | list) else yaml_tree.one_line(whole)


def _places(tree: Node, node: Node, followed: set[str]) -> Iterator[str]:
    """Each place that set a value, in order, and under it what its references mean, each followed once."""
    places = {place.origin: place for place in (*node.earlier, node)}
    for place in places.values():
        counts = "   <- this one counts" if place is node and len(places) > 1 else ""
        what = place.written or yaml_tree.brief(place.plain(expanded=False))
        yield str(place.origin) if place.origin is DEFAULT else f"{place.origin}: {what}{counts}"
        for target in REFERENCE.findall(what):
            source = None if target in followed else keys.find_key(tree, target)
            followed.add(target)
            for line in _places(tree, source, followed) if source else ():
                yield f"    {line}" if line.startswith(" ") else f"    ${{{target}}}: {line}"


def _unlisted_plugin(draft: ConfigBuilder, address: str) -> Node | None:
    """A plugin that the resolved list does not have: a default one, or one that was removed."""
    section, _, name = address.partition(".")
    if section != plugin_list.SECTION or draft.tree is None:
        return None
    removed = [plugin for plugin in draft.removed_plugins if plugin.name == name]
    if removed:
        return removed[0]
    is_default = name in plugin_list.default_plugins(draft.tree)
    return yaml_tree.from_plain({"name": name, "args": {}}, DEFAULT) if is_default else None


def _plugins(draft: ConfigBuilder) -> Iterator[str]:
    """List the plugins of a config, removed ones included, each with the places that set it."""
    section = draft.tree.child(plugin_list.SECTION) if draft.tree else None
    items = section.value if section and isinstance(section.value, list) else []
    named = [item.name for item in items]
    if draft.tree:
        defaults = plugin_list.default_plugins(draft.tree)
        yield from (f"{name}: {DEFAULT}" for name in defaults if name not in named)
    for item in [*items, *draft.removed_plugins]:
        title = item.name or yaml_tree.brief(item.plain(expanded=False))
        removed = " (removed)" if plugin_list.is_removed(item) else ""
        nodes = [item, *(node for _, node in item.walk())]
        history = [*item.earlier, *(place for node in nodes for place in (*node.earlier, node))]
        places = dict.fromkeys(str(place.origin) for place in history)
        yield f"{title}{removed}: {', '.join(places)}"


def _in_words(schema: dict[str, Any]) -> str:
    """What a value may be: ``integer above 0, or null``."""
    if "title" in schema:
        return str(schema["title"])
    if "anyOf" in schema:
        kinds = [_in_words(choice) for choice in schema["anyOf"]]
        return ", or ".join(kinds)
    if "enum" in schema:
        return " or ".join(", ".join(schema["enum"]).rsplit(", ", 1))
    kind = {"object": "mapping", "array": "list", "boolean": "true or false"}.get(schema["type"], schema["type"])
    if "items" in schema and "properties" not in schema["items"]:
        kind += f" of {_in_words(schema['items'])}s"
    words = {"exclusiveMinimum": "above", "minimum": "from", "exclusiveMaximum": "below"}
    return " ".join([kind, *(f"{word} {schema[bound]}" for bound, word in words.items() if bound in schema)])
