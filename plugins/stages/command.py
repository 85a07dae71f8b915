"""``pipeline stages``."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

import click
from rich.table import Table

from pipeline.check.data_flow import default_definition, flow_of_stage, keys_at
from pipeline.errors import one_of
from pipeline.stages.base import METHODS
from pipeline.user_code import class_path, classes, source

from .. import print_tables


@click.command("stages")
@click.argument("name", required=False)
def command(name: str | None) -> None:
    """List the stages: base classes, defaults, arguments, keys.

    From source alone: one stage in full, or a line for each.
    """
    if name is not None and name not in METHODS:
        raise click.UsageError(f"there is no stage '{name}'{one_of(name, METHODS)}")
    print_tables(_one(name) if name else [_all()])


def _all() -> Table:
    rows = []
    for stage, (base, method) in METHODS.items():
        default = default_definition(stage)
        facts = (_arguments(default), *_keys(default, stage))
        path = f"{default.module.name}:{default.name}"
        rows.append((stage, f"{base.__name__}.{method}(context)", path, *(fact or "-" for fact in facts)))
    return _table(("stage", "base class and method", "default", "arguments", "reads", "writes"), rows)


def _one(stage: str) -> Iterator[Table | str]:
    base, method = METHODS[stage]
    default = default_definition(stage)
    methods = _methods(default)
    reads, writes = _keys(default, stage)
    facts = {
        "stage": f"{stage}: {_first_line(base.__doc__)}",
        "base class": class_path.describe(base),
        "method": _signature(methods.pop(method)),
        "config keys": f"{stage}_class_path, {stage}_args",
        "default": f"{default.module.name}:{default.name}: {_first_line(ast.get_docstring(default.node))}",
        "arguments": _arguments(default) or "none",
        "reads": reads or "nothing",
        "writes": writes or "nothing",
    }
    yield _table(("", ""), facts.items())
    if methods:
        yield ""
        rows = [(_signature(node), _first_line(ast.get_docstring(node))) for node in methods.values()]
        yield _table(("methods to call or override", ""), rows)
    yield ""
    keys = [(key.name, key.type, key.writer, key.meaning) for key in keys_at(stage)]
    yield _table(("keys to rely on", "type", "written by", "meaning"), keys)


def _methods(default: source.Definition) -> dict[str, source.FunctionNode]:
    """The public methods of a default stage and its bases."""
    above, _ = classes.ancestry(default)
    methods = {name: node for cls in reversed(above) for name, node in classes.methods(cls).items()}
    return {name: node for name, node in methods.items() if not name.startswith("_") and not node.decorator_list}


def _first_line(text: str | None) -> str:
    return (text or "").partition("\n")[0]


def _arguments(default: source.Definition) -> str:
    """What ``<stage>_args`` may hold for a default stage."""
    parameters = classes.parameters(default)
    return ", ".join(parameters.without_first().names) if parameters else ""


def _keys(default: source.Definition, stage: str) -> tuple[str, str]:
    """The keys that a default stage reads, and those that it writes."""
    flow = flow_of_stage(default, stage)
    return ", ".join(flow.reads()), ", ".join(flow.writes())


def _table(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), show_header=any(columns))
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _signature(node: source.FunctionNode) -> str:
    """``load(context: Context) -> None``."""
    arguments = ast.unparse(node.args).removeprefix("self").removeprefix(", ")
    return f"{node.name}({arguments}) -> {ast.unparse(node.returns) if node.returns else ''}"
