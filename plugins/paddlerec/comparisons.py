"""Comparisons of what the framework keeps in the context with texts that it never is, as PaddleRec's ``"CPU"``."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from pipeline.check.data_flow import DataFlow
from pipeline.check.inspection import place_of
from pipeline.context import EngineMode
from pipeline.user_code import classes, source
from pipeline.user_code.context_flow import ANY

# The keys whose values are no texts, or few.
_KEYS = {"device", "engine", "fleet_mode", "is_infer", "is_fleet"}

# Name -> the key of which it is the value, and what was made of that: ``upper``, ``lower``, ``type`` or nothing.
Values = Mapping[str, tuple[str, str]]


def keys_of_framework(flow: DataFlow) -> set[str]:
    """The keys that nobody else writes in a runner; none where that cannot be told."""
    flows = [*(stage and stage.flow for stage in flow.stages.values()), *flow.plugins]
    known = [own for own in flows if own and not own.unknown]
    written = {key for own in known for key in own.writes()}
    return _KEYS - written if len(known) == len(flows) and ANY not in written else set()


def _remedy(key: str, form: str, text: str) -> str:
    """What to write where the value of a key, or what was made of it, is compared with a text; ``""`` where it may be that."""
    if key == "device":
        name = {"gpu": "cuda"}.get(text.lower(), text.lower())
        right = form == "type" and (text == name or name not in ("cpu", "cuda"))
        return "" if right else f"it is a torch.device; write context['device'].type == '{name}'"
    if key == "engine":
        member = text.upper() if text.upper() in EngineMode.__members__ else "SINGLE"
        return f"it is an EngineMode; write context['engine'] == EngineMode.{member}"
    if key == "fleet_mode":
        right = text in ("", "COLLECTIVE" if form == "upper" else "collective")
        return "" if right else "it is 'collective' where several processes train together, else ''; write that"
    return f"it is True or False; write context['{key}']"


def never_equal(definition: source.Definition, keys: set[str]) -> Iterator[str]:
    """The comparisons of values of the framework with texts that they never are."""
    for name, method in classes.methods(definition).items():
        values = _aliases(method)
        for node in (node for node in ast.walk(method) if isinstance(node, ast.Compare)):
            for expression, texts in _compared(node):
                key, form = _value(expression, values) or ("", "")
                remedies = [_remedy(key, form, text) for text in texts] if key in keys else []
                if remedies and all(remedies):
                    what = f"compares context['{key}'] with {', '.join(map(repr, texts))}, which it never is"
                    yield f"{place_of(definition, name, node)} {what}: {remedies[0]}"


def _compared(node: ast.Compare) -> Iterator[tuple[ast.expr, list[str]]]:
    """What is compared with a text, or looked for in a list of texts."""
    operands = [node.left, *node.comparators]
    for operator, left, right in zip(node.ops, operands, operands[1:], strict=False):
        match operator, left, right:
            case ast.Eq() | ast.NotEq(), _, ast.Constant(value=str(text)):
                yield left, [text]
            case ast.Eq() | ast.NotEq(), ast.Constant(value=str(text)), _:
                yield right, [text]
            case ast.In() | ast.NotIn(), _, ast.Tuple(elts=items) | ast.List(elts=items) | ast.Set(elts=items):
                texts = [item.value for item in items if isinstance(item, ast.Constant) and isinstance(item.value, str)]
                if len(texts) == len(items):
                    yield left, texts


def _value(node: ast.expr, values: Values) -> tuple[str, str] | None:
    """The key of the context of which an expression is the value, and what is made of it."""
    match node:
        case ast.Subscript(value=owner, slice=ast.Constant(value=str(key))) if _is_context(owner):
            return key, ""
        case ast.Call(func=ast.Attribute(value=owner, attr="get"), args=[ast.Constant(value=str(key)), *_]) if (
            _is_context(owner)
        ):
            return key, ""
        case ast.Call(func=ast.Attribute(value=inner, attr="upper" | "lower" as form), args=[]):
            value = _value(inner, values)
            return (value[0], form) if value else None
        case ast.Attribute(value=inner, attr="type"):
            value = _value(inner, values)
            return (value[0], "type") if value else None
        case ast.Name(id=name):
            return values.get(name)
    return None


def _is_context(node: ast.expr) -> bool:
    return (isinstance(node, ast.Name) and node.id == "context") or (
        isinstance(node, ast.Attribute) and node.attr in ("context", "_context")
    )


def _aliases(method: source.FunctionNode) -> dict[str, tuple[str, str]]:
    """The names that a method gives to values of the context, and to nothing else."""
    nodes = list(ast.walk(method))
    stores = [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    found = {}
    for node in nodes:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if stores.count(name) == 1:
                found[name] = _value(value, {})
    return {name: value for name, value in found.items() if value}
