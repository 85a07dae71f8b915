"""The plugins that come with the framework, each one optional behaviour; installed as ``pipeline_plugins``."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any


def print_tables(tables: Iterable[Any]) -> None:
    """Print rich tables, and what else rich can print, on stdout."""
    # Most commands print no table.
    from rich.console import Console  # noqa: PLC0415

    from pipeline.run.log import is_terminal  # noqa: PLC0415

    # Elsewhere than in a terminal a line is as long as it has to be.
    console = Console(width=None if is_terminal(sys.stdout) else 1000, markup=False, highlight=False, emoji=False)
    for table in tables:
        console.print(table)


def size_in_words(size: float) -> str:
    """``1.2 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
