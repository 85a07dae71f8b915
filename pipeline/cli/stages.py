"""``pipeline stages``."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import click
from rich.table import Table

from pipeline import class_path, contracts
from pipeline.checks.data_flow import GIVEN, default_definition
from pipeline.cli import COMMANDS
from pipeline.cli.arguments import print_tables
from pipeline.context import KEYS, ContextKey
from pipeline.errors import one_of
from pipeline.source_code import classes, source
from pipeline.stages.base import METHODS


@click.command("stages", help=COMMANDS["stages"])
@click.argument("name", required=False)
def command(name: str | None) -> None:
    """On stdout, from source alone: one stage in full, or a line for each."""
    if name is not None and name not in METHODS:
        raise click.UsageError(no_stage(name))
    print_tables(_one(Stage(name)) if name else [_all()])


def no_stage(name: str) -> str:
    """The message for a name that no stage has."""
    return f"there is no stage '{name}'{one_of(name, METHODS)}"


def keys_at(stage: str) -> list[ContextKey]:
    """The context keys that the trainer and the default stages have written when ``stage`` begins."""
    earlier = list(METHODS)[: list(METHODS).index(stage)]
    return [key for key in KEYS if key.name in GIVEN or key.writer in earlier]


@dataclass(frozen=True)
class Stage:
    """One of the five, as its source describes it."""

    name: str

    @cached_property
    def default(self) -> source.Definition:
        """The class that is shipped."""
        return default_definition(self.name)

    @property
    def path(self) -> str:
        """Its class path."""
        return f"{self.default.module.name}:{self.default.name}"

    @property
    def base(self) -> type:
        """The base class."""
        return METHODS[self.name][0]

    @property
    def method(self) -> str:
        """The method that the trainer calls."""
        return METHODS[self.name][1]

    def methods(self) -> dict[str, source.FunctionNode]:
        """The public methods of the default and its bases."""
        above, _ = classes.ancestry(self.default)
        found = {name: node for each in reversed(above) for name, node in classes.methods(each).items()}
        return {name: node for name, node in found.items() if not name.startswith("_") and not node.decorator_list}

    def arguments(self) -> str:
        """What ``<stage>_args`` may give the default."""
        taken = classes.parameters(self.default)
        return ", ".join(taken.without_first().names) if taken else ""

    def keys(self) -> tuple[str, str]:
        """The keys that the default reads, and those that it writes."""
        flow = contracts.flow_of_stage(self.default, self.name)
        return ", ".join(flow.reads()), ", ".join(flow.writes())


def _all() -> Table:
    rows = []
    for stage in map(Stage, METHODS):
        method = _signature(stage.methods()[stage.method], typed=False)
        facts = (stage.arguments(), *stage.keys())
        rows.append((stage.name, f"{stage.base.__name__}.{method}", stage.path, *(each or "-" for each in facts)))
    return _table(("stage", "base class and method", "default", "arguments", "reads", "writes"), rows)


def _one(stage: Stage) -> Iterator[Table | str]:
    methods = stage.methods()
    reads, writes = stage.keys()
    facts = {
        "stage": f"{stage.name}: {_first_line(stage.base.__doc__)}",
        "base class": class_path.describe(stage.base),
        "method": _signature(methods.pop(stage.method)),
        "config keys": f"{stage.name}_class_path, {stage.name}_args",
        "default": f"{stage.path}: {_first_line(ast.get_docstring(stage.default.node))}",
        "arguments": stage.arguments() or "none",
        "reads": reads or "nothing",
        "writes": writes or "nothing",
    }
    yield _table(("", ""), facts.items())
    if methods:
        yield ""
        rows = [(_signature(node), _first_line(ast.get_docstring(node))) for node in methods.values()]
        yield _table(("methods to call or override", ""), rows)
    yield ""
    keys = [(key.name, key.type, key.writer, key.meaning) for key in keys_at(stage.name)]
    yield _table(("keys to rely on", "type", "written by", "meaning"), keys)


def _table(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), show_header=any(columns))
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _signature(node: source.FunctionNode, *, typed: bool = True) -> str:
    """``load(context: Context) -> None``, or ``load(context)``."""
    if not typed:
        return f"{node.name}({', '.join(each.arg for each in node.args.args[1:])})"
    arguments = ast.unparse(node.args).removeprefix("self").removeprefix(", ")
    return f"{node.name}({arguments}) -> {ast.unparse(node.returns) if node.returns else ''}"


def _first_line(text: str | None) -> str:
    return (text or "").partition("\n")[0]
