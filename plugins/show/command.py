"""``pipeline show``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import click

from pipeline.check.checker import check_or_raise
from pipeline.cli.options import config_and_overrides
from pipeline.config import yaml_tree
from pipeline.config.yaml_tree import Node
from pipeline.user_code.class_path import describe


@click.command("show")
@config_and_overrides
def command(path: str, overrides: Sequence[str]) -> None:
    """Print the resolved config, each value with where it came from.

    The whole config as YAML on stdout; the comments say where each value was set.
    """
    lines = list(_lines(check_or_raise(path, overrides).tree, 0))
    width = min(max(len(text) for text, _ in lines), 80)
    for text, origin in lines:
        click.echo(f"{text:<{width}}  # {origin}" if origin else text)


def _lines(node: Node, depth: int) -> Iterator[tuple[str, str]]:
    indent = "  " * depth
    if isinstance(node.value, dict):
        for name, child in node.value.items():
            key = f"{indent}{_scalar(name)}:"
            block = _block(child, depth + 1)
            yield from [(key, ""), *block] if block else [_line(key, child)]
    else:
        for child in node.value:
            lines = _block(child, depth + 1) or [_line(indent, child)]
            text, origin = lines[0]
            yield f"{indent}- {text.strip()}", origin
            yield from lines[1:]


def _block(node: Node, depth: int) -> list[tuple[str, str]]:
    """The lines of a mapping or list; none if it fits on one line."""
    return list(_lines(node, depth)) if isinstance(node.value, dict | list) else []


def _line(before: str, node: Node) -> tuple[str, str]:
    return f"{before} {_scalar(node.plain(expanded=False))}", " ".join(str(node.origin).splitlines())


def _scalar(value: Any) -> str:
    plain = describe(value) if isinstance(value, type) else value
    return yaml_tree.one_line(plain)
