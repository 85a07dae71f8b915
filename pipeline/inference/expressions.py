"""The value of an expression, and what evaluating it does to the account."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from pipeline.inference import calls, conditions, displays
from pipeline.inference.account import Account
from pipeline.inference.assignment import bind_name
from pipeline.inference.containers import Copy, Entries
from pipeline.inference.dicts import item
from pipeline.inference.frame import Frame
from pipeline.inference.functions import define
from pipeline.inference.items import at_index
from pipeline.inference.names import look_up, settled
from pipeline.inference.objects import attribute, of_class, of_parent
from pipeline.inference.values import Attribute, Class, Const, Imported, Object, Parent, Ref, Value


def value_of(node: ast.expr, account: Account, frame: Frame) -> Value:
    """What an expression is; None where nothing is known of it."""
    evaluate = _KINDS.get(type(node))
    if evaluate:
        return evaluate(node, account, frame)
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            account.escape(account.value_of(child, frame))
    return None


def _constant(node: ast.Constant, _account: Account, _frame: Frame) -> Value:
    return Const(frozenset({node.value}))


def _name(node: ast.Name, account: Account, frame: Frame) -> Value:
    return look_up(node.id, account, frame)


def _attribute(node: ast.Attribute, account: Account, frame: Frame) -> Value:
    base = account.value_of(node.value, frame)
    owner = settled(base, account)
    if isinstance(base, Imported) and not isinstance(owner, Class):
        return replace(base, dotted=f"{base.dotted}.{node.attr}")
    match owner:
        case Object():
            return attribute(owner, node.attr, account)
        case Parent():
            return of_parent(owner, node.attr, account)
        case Class():
            return of_class(owner, node.attr, account)
    return Attribute(base, node.attr)


def _item(node: ast.Subscript, account: Account, frame: Frame) -> Value:
    base, key = account.value_of(node.value, frame), settled(account.value_of(node.slice, frame), account)
    if isinstance(base, Copy) and base.complete:
        base = Ref()
    if isinstance(base, Ref):
        found = base.below(key)
        account.use(found.path, "read", needed=True)
        return found
    if isinstance(base, Entries):
        return item(base, key, account)
    return at_index(base, key, account)


def _unary(node: ast.UnaryOp, account: Account, frame: Frame) -> Value:
    if isinstance(node.op, ast.Not):
        return conditions.negation(node, account, frame)
    value = account.value_of(node.operand, frame)
    only = value.only if isinstance(value, Const) else None
    if isinstance(node.op, ast.USub) and isinstance(only, int):
        return Const(frozenset({-only}))
    account.escape(value)
    return None


def _binary(node: ast.BinOp, account: Account, frame: Frame) -> Value:
    left, right = account.value_of(node.left, frame), account.value_of(node.right, frame)
    found = displays.total(left, right) if isinstance(node.op, ast.Add) else None
    for each in (left, right) if found is None else ():
        if each == Ref():
            account.copied()
        else:
            account.escape(each)
    return found


def _walrus(node: ast.NamedExpr, account: Account, frame: Frame) -> Value:
    value = account.value_of(node.value, frame)
    name = node.target.id
    kept = value if account.firm or name not in frame.names else account.either(frame.names[name], value)
    bind_name(name, kept, account, frame)
    return value


_KINDS: Mapping[type[ast.expr], Callable[[Any, Account, Frame], Value]] = {
    ast.Constant: _constant,
    ast.Name: _name,
    ast.Attribute: _attribute,
    ast.Subscript: _item,
    ast.Call: calls.call,
    ast.Tuple: displays.items,
    ast.List: displays.items,
    ast.Set: displays.choices,
    ast.Dict: displays.entries,
    ast.ListComp: displays.comprehension,
    ast.SetComp: displays.comprehension,
    ast.GeneratorExp: displays.comprehension,
    ast.DictComp: displays.comprehension,
    ast.Lambda: define,
    ast.IfExp: conditions.choice,
    ast.BoolOp: conditions.bool_op,
    ast.UnaryOp: _unary,
    ast.BinOp: _binary,
    ast.Compare: conditions.comparison,
    ast.NamedExpr: _walrus,
    ast.JoinedStr: displays.text,
}
"""What evaluates an expression; of any other kind the parts are evaluated, and escape."""
