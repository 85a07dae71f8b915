"""Values that are put together in the source: tuples, lists, dicts, texts, sums, comprehensions."""

from __future__ import annotations

import ast

from pipeline.inference.account import Account
from pipeline.inference.assignment import bind
from pipeline.inference.containers import Each, Entries, Items
from pipeline.inference.dicts import put
from pipeline.inference.flow import ANY
from pipeline.inference.frame import Frame
from pipeline.inference.items import has_items, item_of, rounds
from pipeline.inference.values import Const, Ref, Value, text_of

Comprehension = ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp


def items(node: ast.Tuple | ast.List, account: Account, frame: Frame) -> Value:
    """``(a, b)`` and ``[a, *b]``."""
    found, incomplete = Items([]), False
    for each in node.elts:
        value = account.value_of(each.value if isinstance(each, ast.Starred) else each, frame)
        if not isinstance(each, ast.Starred):
            found.values.append(value)
        elif isinstance(value, Items) and value.whole and not value.views:
            found.values += value.values
        else:
            account.escape(value)
            incomplete = True
    if incomplete:
        account.escape(found)
    return found


def choices(node: ast.Set, account: Account, frame: Frame) -> Value:
    """``{a, b}``: in which order it is gone through, nobody knows."""
    values = [account.value_of(each, frame) for each in node.elts]
    return any_of(values, account)


def any_of(values: list[Value], account: Account) -> Each:
    """Something to loop over that has these values in whatever order."""
    if values and all(isinstance(each, Const) for each in values):
        kinds = [each.choices for each in values if isinstance(each, Const)]
        return Each(Const(frozenset().union(*kinds)), some=True)
    for each in values:
        account.escape(each)
    return Each(None)


def entries(node: ast.Dict, account: Account, frame: Frame) -> Value:
    """``{key: value, **more}``."""
    found, incomplete = Entries({}), False
    for key_node, value_node in zip(node.keys, node.values, strict=True):
        key = account.value_of(key_node, frame) if key_node else None
        value = account.value_of(value_node, frame)
        if key_node:
            put(found, text_of(key) or ANY, value, account)
        elif isinstance(value, Entries) and value.whole:
            found.values |= value.values
        else:
            account.escape(value)
            incomplete = True
    if incomplete:
        account.escape(found)
    # What stands in one display is there all at once.
    found.loose.clear()
    return found


def text(node: ast.JoinedStr, account: Account, frame: Frame) -> Value:
    """``f"{a}_b"``."""
    parts: list[str | None] = []
    for each in node.values:
        inner = each.value if isinstance(each, ast.FormattedValue) else each
        value = account.value_of(inner, frame)
        if not isinstance(value, Ref | Const):
            account.escape(value)
        formatted = isinstance(each, ast.FormattedValue) and (each.conversion >= 0 or each.format_spec is not None)
        parts.append(None if formatted else text_of(value))
    known = [each for each in parts if each is not None]
    return Const(frozenset({"".join(known)})) if len(known) == len(parts) else None


def total(left: Value, right: Value) -> Value:
    """``a + b``; None where it isn't known."""
    one, other = text_of(left), text_of(right)
    if one is not None and other is not None:
        return Const(frozenset({one + other}))
    if isinstance(left, Items) and isinstance(right, Items) and left.whole and right.whole:
        return Items([*left.values, *right.values])
    return None


def comprehension(node: Comprehension, account: Account, frame: Frame) -> Value:
    """``[a for b in c]``; its variables are its own."""
    names, sure = dict(frame.names), account.sure
    bound = {each.id for part in node.generators for each in ast.walk(part.target) if isinstance(each, ast.Name)}
    if isinstance(node, ast.GeneratorExp):
        # What asks for its items may stop at any.
        account.sure = False
    with account.way():
        value = _generated(node, node.generators, account, frame)
    account.sure = sure
    for name in bound:
        frame.names.pop(name, None)
        if name in names:
            frame.names[name] = names[name]
    return value


def _generated(node: Comprehension, generators: list[ast.comprehension], account: Account, frame: Frame) -> Value:
    """The items that the given generators make, the rest of them being bound."""
    if not generators:
        return _outcome(node, account, frame)
    first, *rest = generators
    source = account.value_of(first.iter, frame)
    if (each_round := rounds(source, account)) is not None:
        made = [_one(node, first, rest, each, account, frame) for each in each_round]
        plain = not (first.ifs or rest or isinstance(node, ast.SetComp | ast.DictComp))
        return Items(made) if plain else _mixed(node, made, account)
    account.sure = account.sure and has_items(source)
    value = _one(node, first, rest, item_of(source, account), account, frame)
    return _mixed(node, [value], account)


def _one(
    node: Comprehension,
    first: ast.comprehension,
    rest: list[ast.comprehension],
    item: Value,
    account: Account,
    frame: Frame,
) -> Value:
    account.step()
    sure = account.sure
    bind(first.target, item, account, frame)
    for test in first.ifs:
        account.value_of(test, frame)
        account.sure = False
    value = _generated(node, rest, account, frame)
    account.sure = sure
    return value


def _outcome(node: Comprehension, account: Account, frame: Frame) -> Value:
    if not isinstance(node, ast.DictComp):
        return account.value_of(node.elt, frame)
    key, value = account.value_of(node.key, frame), account.value_of(node.value, frame)
    return Entries({text_of(key) or ANY: value})


def _mixed(node: Comprehension, made: list[Value], account: Account) -> Value:
    """Something of which the items are known, but not which of them are there."""
    if not isinstance(node, ast.DictComp):
        each = made[0] if len(made) == 1 else any_of(made, account).value
        return Each(each)
    found = Entries({})
    for each in made:
        for key, value in each.values.items() if isinstance(each, Entries) else ():
            there = found.values.get(key, value)
            found.values[key] = account.either(there, value)
            found.loose.add(key)
    return found
