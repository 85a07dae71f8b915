"""Loops: round by round where the items are known, else until another round tells nothing new."""

from __future__ import annotations

import ast
from collections.abc import Callable

from pipeline.inference.account import Account, End
from pipeline.inference.assignment import bind
from pipeline.inference.conditions import truth
from pipeline.inference.frame import Frame
from pipeline.inference.items import has_items, item_of, rounds
from pipeline.inference.scopes import stored
from pipeline.inference.values import Items, Value

_MOST_ROUNDS = 6


def for_loop(node: ast.For | ast.AsyncFor, account: Account, frame: Frame) -> End:
    """``for``."""
    sure = account.sure
    items = account.value_of(node.iter, frame)
    known = rounds(items, account)
    with frame.looping(frozenset(stored((node,)))):
        if known is not None:
            changed = _round_by_round(node, known, items, account, frame)
        if known is None or changed:
            certain = known is None and has_items(items)
            account.sure = account.sure and certain

            def one_round() -> None:
                bind(node.target, item_of(items, account), account, frame)
                account.block(node.body, frame)

            _rounds(node, one_round, account, frame)
    return _after(node, sure, account, frame)


def _round_by_round(
    node: ast.For | ast.AsyncFor, known: list[Value], items: Value, account: Account, frame: Frame
) -> bool:
    """Go through known items; whether their list was changed on the way, so that there may be more."""
    for each in known:
        bind(node.target, each, account, frame)
        end = account.block(node.body, frame)
        if end is End.LOOP:
            account.sure = False
        elif end is not End.ON:
            break
    assert isinstance(items, Items)
    return not all(each.whole for each in items.views or (items,))


def while_loop(node: ast.While, account: Account, frame: Frame) -> End:
    """``while``."""
    sure = account.sure

    def one_round() -> None:
        known = truth(node.test, account, frame)
        account.sure = account.sure and known is True
        if known is not False:
            account.block(node.body, frame)

    with frame.looping(frozenset(stored((node,)))):
        _rounds(node, one_round, account, frame)
    return _after(node, sure, account, frame)


def _rounds(node: ast.stmt, one_round: Callable[[], None], account: Account, frame: Frame) -> None:
    """Go round until objects and containers hold nothing new; what names hold is not known from round to round."""
    for _ in range(_MOST_ROUNDS):
        with account.round() as this:
            _forget(node, account, frame)
            one_round()
        if not this.told_news:
            break
        # The next may not happen.
        account.sure = False
    else:
        account.give_up()
    _forget(node, account, frame)


def _forget(node: ast.stmt, account: Account, frame: Frame) -> None:
    for name in stored((node,)):
        if name in frame.names:
            value, frame.names[name] = frame.names[name], None
            account.escape(value)


def _after(node: ast.For | ast.AsyncFor | ast.While, sure: bool, account: Account, frame: Frame) -> End:
    """What follows a loop is reached unless it was left for good."""
    account.sure = sure and not frame.may_return
    account.one_of([lambda: account.block(node.orelse, frame), lambda: End.ON], frame)
    if any(isinstance(each, ast.Break | ast.Continue) for each in ast.walk(node)):
        _forget(node, account, frame)
    account.sure = sure and not frame.may_return
    return End.ON
