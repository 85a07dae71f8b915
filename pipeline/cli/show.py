"""``pipeline show``."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import click

from pipeline.check import checked
from pipeline.class_path import describe
from pipeline.cli import COMMANDS
from pipeline.cli.arguments import config_and_overrides, refuse, split
from pipeline.config import yaml_text
from pipeline.config.tree import Node
from pipeline.errors import ConfigError


@click.command("show", help=COMMANDS["show"])
@config_and_overrides
def command(config: str | None, words: Sequence[str], options: Sequence[str]) -> None:
    """The whole config as YAML on stdout; the comments say where each value was set."""
    path, overrides = split(config, words, options)
    try:
        resolved = checked(path, overrides)
    except ConfigError as error:
        sys.exit(refuse(error))
    lines = list(_lines(resolved.tree, 0))
    width = min(max(len(text) for text, _ in lines), 80)
    for text, origin in lines:
        click.echo(f"{text:<{width}}  # {origin}" if origin else text)


def _lines(node: Node, depth: int) -> Iterator[tuple[str, str]]:
    indent = "  " * depth
    if isinstance(node.value, dict):
        for name, child in node.value.items():
            yield from _entry(f"{indent}{_scalar(name)}:", child, depth + 1)
    else:
        for child in node.value:
            below = (
                list(_lines(child, depth + 1)) if _is_block(child) else [(f"{indent}  {_value(child)}", _place(child))]
            )
            text, origin = below[0]
            yield f"{indent}- {text.strip()}", origin
            yield from below[1:]


def _entry(key: str, node: Node, depth: int) -> Iterator[tuple[str, str]]:
    if _is_block(node):
        yield key, ""
        yield from _lines(node, depth)
    else:
        yield f"{key} {_value(node)}", _place(node)


def _place(node: Node) -> str:
    return " ".join(str(node.origin).splitlines())


def _is_block(node: Node) -> bool:
    return isinstance(node.value, dict | list) and bool(node.value)


def _value(node: Node) -> str:
    return _scalar(node.plain(expanded=False))


def _scalar(value: Any) -> str:
    plain = describe(value) if isinstance(value, type) else value
    return yaml_text.one_line(plain)
