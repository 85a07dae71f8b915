"""Conditions, and expressions of which only a part is evaluated."""

from __future__ import annotations

import ast

from pipeline.inference.account import Account
from pipeline.inference.containers import Entries, Items
from pipeline.inference.end import End
from pipeline.inference.frame import Frame
from pipeline.inference.names import settled
from pipeline.inference.values import Const, Ref, Value


def truth(test: ast.expr, account: Account, frame: Frame) -> bool | None:
    """Whether a condition holds; None: cannot tell."""
    if isinstance(test, ast.Name) and test.id == "TYPE_CHECKING":
        return False
    return _holds(account.value_of(test, frame), account)


def _holds(value: Value, account: Account) -> bool | None:
    if isinstance(value, Ref):
        fact = account.fact(value.path)
        return None if fact is None else bool(fact)
    if isinstance(value, Const) and len({bool(each) for each in value.choices}) == 1:
        return bool(next(iter(value.choices)))
    if not isinstance(value, Items | Entries):
        # Asked whether it is true, it may run code of its own.
        account.escape(value)
    return None


def guard(test: ast.expr, account: Account, frame: Frame) -> tuple[str, bool]:
    """The key that ``"a" in context`` asks for, and whether the condition holds without it; ``""`` where it asks for none."""
    match test:
        case ast.Compare(
            left=ast.Constant(value=str() as key), ops=[ast.In() | ast.NotIn() as operator], comparators=[held]
        ):
            asked = account.value_of(held, frame) == Ref() and key not in account.written
            return key if asked else "", isinstance(operator, ast.NotIn)
    return "", False


def negation(node: ast.UnaryOp, account: Account, frame: Frame) -> Value:
    """``not a``."""
    known = truth(node.operand, account, frame)
    return None if known is None else Const(frozenset({not known}))


def choice(node: ast.IfExp, account: Account, frame: Frame) -> Value:
    """``a if condition else b``."""
    known = truth(node.test, account, frame)
    if known is not None:
        return account.value_of(node.body if known else node.orelse, frame)
    values: list[Value] = []

    def way(branch: ast.expr) -> End:
        values.append(account.value_of(branch, frame))
        return End.ON

    account.one_of([lambda: way(node.body), lambda: way(node.orelse)], frame)
    return account.either(values[0], values[1])


def bool_op(node: ast.BoolOp, account: Account, frame: Frame) -> Value:
    """``a and b``, ``a or b``: what comes after the first may not be looked at."""
    stops, before = isinstance(node.op, ast.Or), account.sure
    found: list[Value] = []
    for each in node.values:
        value = account.value_of(each, frame)
        known = _holds(value, account)
        if known is (not stops) and each is not node.values[-1]:
            continue
        found.append(value)
        if known is stops:
            break
        account.sure = False
    account.sure = before
    value = found[0]
    for other in found[1:]:
        value = account.either(value, other)
    return value


def comparison(node: ast.Compare, account: Account, frame: Frame) -> Value:
    """``a == b``, ``a in b``; known only where the values are."""
    left = settled(account.value_of(node.left, frame), account)
    values = [settled(account.value_of(each, frame), account) for each in node.comparators]
    for each in (left, *values):
        if not isinstance(each, Ref | Const | Items):
            account.escape(each)
    if len(values) != 1:
        return None
    (operator,), (right,) = node.ops, values
    if isinstance(operator, ast.In | ast.NotIn):
        return _membership(left, right, node, account)
    one, other = (_plain(each, account) for each in (left, right))
    if one is None or other is None or not isinstance(operator, ast.Eq | ast.NotEq | ast.Is | ast.IsNot):
        return None
    alike = one.only is other.only if isinstance(operator, ast.Is | ast.IsNot) else one.only == other.only
    return Const(frozenset({alike is isinstance(operator, ast.Eq | ast.Is)}))


def _membership(left: Value, right: Value, node: ast.Compare, account: Account) -> Value:
    negated = isinstance(node.ops[0], ast.NotIn)
    if isinstance(right, Ref):
        account.use(right.below(left).path, "read", needed=False)
    one = _plain(left, account)
    if one is None or not isinstance(right, Items) or not right.whole or right.views:
        return None
    choices = [_plain(each, account) for each in right.values]
    if any(each is not None and each.only == one.only for each in choices):
        return Const(frozenset({not negated}))
    return None if None in choices else Const(frozenset({negated}))


def _plain(value: Value, account: Account) -> Const | None:
    """The one plain value that a value certainly is."""
    if isinstance(value, Ref) and (fact := account.fact(value.path)) is not None:
        return Const(frozenset({fact}))
    return value if isinstance(value, Const) and len(value.choices) == 1 else None
