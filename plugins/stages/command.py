"""``pipeline stages``."""

from __future__ import annotations

import ast
import copy
import re
import shutil
from collections.abc import Iterable, Iterator
from importlib import resources

import click

import pipeline
from pipeline.check.data_flow import TRAINER_KEYS, default_definition, flow_of_stage
from pipeline.context import FIRST_KEYS, KEYS, OTHER_KEYS, STAGES, ContextKey
from pipeline.errors import one_of
from pipeline.stages.base import METHODS
from pipeline.user_code import class_path, classes, source

_EXAMPLES = resources.files(__package__) / "examples"


@click.command("stages")
@click.argument("name", required=False)
def command(name: str | None) -> None:
    """List the stages: base classes, defaults, methods, keys.

    From source alone: one stage in full with an example, or a line for each.
    """
    if name is not None and name not in METHODS:
        raise click.UsageError(f"there is no stage '{name}'{one_of(name, METHODS)}")
    page = click.HelpFormatter(width=shutil.get_terminal_size().columns)
    if name:
        _write_one(page, name)
    else:
        _write_all(page)
    click.echo(page.getvalue(), nl=False)


def _write_all(page: click.HelpFormatter) -> None:
    defaults = {stage: default_definition(stage) for stage in METHODS}
    page.write_dl(
        [(f"{stage:8}  stages.{default.name}", _purpose(default.node)) for stage, default in defaults.items()]
    )
    page.write_paragraph()
    page.write_text("`pipeline stages NAME` says which methods and keys a stage has, with an example.")


def _write_one(page: click.HelpFormatter, stage: str) -> None:
    base, method = METHODS[stage]
    default = default_definition(stage)
    flow = flow_of_stage(default, stage)
    page.write_text(f"{stage}: {_first_line(base.__doc__)}")
    page.write_paragraph()
    page.write_dl(
        [
            ("base class", f"pipeline.{base.__name__}; the trainer calls its method {method}"),
            ("default", f"pipeline.stages.{default.name}: {_purpose(default.node)}"),
            ("config keys", f"{stage}_class_path, {stage}_args"),
            ("reads", ", ".join(flow.reads()) or "nothing"),
            ("writes", ", ".join(flow.writes()) or "nothing"),
            ("runs", "on every rank; write files if context['world'].is_main only"),
        ]
    )
    _write_methods(page, "Methods to call or override", _methods(default))
    if own := list(_context_methods(stage)):
        _write_methods(page, "Methods of the context in this stage", own)
    _write_keys(page, "Keys to rely on", (key for key in keys_at(stage) if key in FIRST_KEYS))
    _write_keys(
        page, "Keys that few stages need, or PaddleRec's code", (key for key in keys_at(stage) if key in OTHER_KEYS)
    )
    with page.section("Example"):
        for line in (_EXAMPLES / f"{stage}.py").read_text(encoding="utf-8").splitlines():
            page.write(f"{'':{page.current_indent}}{line}".rstrip() + "\n")


def keys_at(stage: str) -> list[ContextKey]:
    """The context keys that the trainer and the default stages have written when ``stage`` begins."""
    earlier = list(STAGES)[: list(STAGES).index(stage)]
    return [key for key in KEYS if key.name in TRAINER_KEYS or key.writer in earlier]


def _write_keys(page: click.HelpFormatter, title: str, keys: Iterable[ContextKey]) -> None:
    with page.section(title):
        page.write_dl([(f"{key.name} ({key.type})", key.meaning) for key in keys], col_max=page.width // 2 - 4)


def _write_methods(page: click.HelpFormatter, title: str, methods: Iterable[tuple[str, str]]) -> None:
    with page.section(title):
        for signature, purpose in methods:
            indent = " " * page.current_indent
            for text, further in ((signature, " " * 6), (f"  {purpose}", "  ")):
                page.write(click.wrap_text(text, page.width, indent, indent + further) + "\n")


def _methods(default: source.Definition) -> Iterator[tuple[str, str]]:
    """Signature and purpose of the methods of a default stage and its bases that are for users."""
    ancestry, _ = classes.ancestry(default)
    homes = {name: cls for cls in reversed(ancestry) for name in classes.methods(cls)}
    for cls in ancestry:
        for name, node in classes.methods(cls).items():
            if homes[name] is cls and _is_for_users(node, of_base=cls is not default):
                yield _signature(node, cls.module), _purpose(node)


def _is_for_users(node: source.FunctionNode, *, of_base: bool) -> bool:
    """Of those with an underscore, the ones that a base class documents: they have PaddleRec's names."""
    documented = of_base and not node.name.startswith("__") and ast.get_docstring(node)
    return not node.decorator_list and bool(documented or not node.name.startswith("_"))


def _context_methods(stage: str) -> Iterator[tuple[str, str]]:
    """The methods of the context whose first line says that they are for this stage."""
    context = class_path.define(class_path.parse("pipeline.context:Context"))
    assert context, "our own context stands in a file that can be read"
    for node in classes.methods(context).values():
        place, _, purpose = _purpose(node).partition(": ")
        if place == f"In the {stage} stage":
            yield f"context.{_signature(node, context.module)}", purpose


def _purpose(node: source.FunctionNode | ast.ClassDef) -> str:
    return _first_line(ast.get_docstring(node))


def _first_line(text: str | None) -> str:
    return (text or "").partition("\n")[0].replace("``", "`")


def _signature(node: source.FunctionNode, module: source.Module) -> str:
    """``load(context, is_fleet: bool = False) -> None``; a type that is not for users is left out."""
    arguments = copy.deepcopy(node.args)
    arguments.args = arguments.args[1:]
    for parameter in (*arguments.args, *arguments.kwonlyargs):
        if not _is_public(parameter.annotation, module):
            parameter.annotation = None
    text = re.sub(r"(: [^,=]+)=", r"\1 = ", ast.unparse(arguments))
    returns = f" -> {ast.unparse(node.returns)}" if node.returns and _is_public(node.returns, module) else ""
    return f"{node.name}({text}){returns}"


def _is_public(annotation: ast.expr | None, module: source.Module) -> bool:
    """Whether a user may import each type of an annotation from `pipeline`, or from elsewhere.

    Any says nothing, and of a Context its name does.
    """
    if annotation is None or ast.unparse(annotation) in {"Any", "Context"}:
        return False
    for name in (each.id for each in ast.walk(annotation) if isinstance(each, ast.Name)):
        definition = source.find(module, name)
        if definition and source.is_ours(definition.module) and name not in pipeline.__all__:
            return False
    return True
