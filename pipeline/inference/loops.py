"""Loops: round by round where the items are known, else until another round tells nothing new."""

from __future__ import annotations

import ast
from collections.abc import Callable

from pipeline.inference.account import Account
from pipeline.inference.assignment import bind
from pipeline.inference.conditions import truth
from pipeline.inference.containers import Items
from pipeline.inference.end import End
from pipeline.inference.frame import Frame
from pipeline.inference.items import has_items, item_of, rounds
from pipeline.inference.values import Value

_MOST_ROUNDS = 6


def for_loop(node: ast.For | ast.AsyncFor, account: Account, frame: Frame) -> End:
    """``for``."""
    sure = account.sure
    items = account.value_of(node.iter, frame)
    known = rounds(items, account)
    if known is None or _round_by_round(node, known, items, account, frame):
        account.sure = account.sure and known is None and has_items(items)

        def one_round() -> None:
            bind(node.target, item_of(items, account), account, frame)
            account.block(node.body, frame)

        _rounds(one_round, account, frame)
    return _after(node, sure, account, frame)


def _round_by_round(
    node: ast.For | ast.AsyncFor, known: list[Value], items: Value, account: Account, frame: Frame
) -> bool:
    """Go through known items; whether their list was changed on the way, so that there may be more."""
    gone: list[dict[str, Value]] = []
    for each in known:
        with frame.looping() as left:
            bind(node.target, each, account, frame)
            end = account.block(node.body, frame)
        frame.names = account.merged([frame.names, *left])
        gone += left
        if end is End.LOOP:
            account.sure = False
        elif end is not End.ON:
            break
    frame.names = account.merged([frame.names, *gone])
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

    _rounds(one_round, account, frame)
    return _after(node, sure, account, frame)


def _rounds(one_round: Callable[[], None], account: Account, frame: Frame) -> None:
    """Go round until another round would find nothing new: in names, objects, containers."""
    for _ in range(_MOST_ROUNDS):
        before = dict(frame.names)
        with account.round() as this, frame.looping() as left:
            one_round()
        frame.names = account.merged([before, frame.names, *left])
        if not this.told_news and frame.names == before:
            return
        # The next may not happen.
        account.sure = False
    account.give_up()


def _after(node: ast.For | ast.AsyncFor | ast.While, sure: bool, account: Account, frame: Frame) -> End:
    """``else``, where there is one: it may run."""
    account.sure = sure
    account.one_of([lambda: account.block(node.orelse, frame), lambda: End.ON], frame)
    return End.ON
