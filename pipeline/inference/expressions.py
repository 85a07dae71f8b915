"""The value of an expression, and what reading it does to the account."""

from __future__ import annotations

import ast

from pipeline.inference.account import Account, Frame, place
from pipeline.inference.calls import Call
from pipeline.inference.flow import ANY
from pipeline.inference.names import look_up, of_object, resolve, unbound
from pipeline.inference.values import (
    Attribute,
    Builtin,
    Class,
    Const,
    Each,
    Entries,
    Function,
    Imported,
    Items,
    Object,
    Parent,
    Ref,
    Value,
    has_items,
)

Comprehension = ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp


def value_of(node: ast.expr, account: Account, frame: Frame) -> Value:  # noqa: PLR0911 - one return a kind of expression
    """What an expression is; None where nothing is known of it."""
    match node:
        case ast.Constant():
            return Const(frozenset({node.value}))
        case ast.Name():
            return look_up(node.id, frame)
        case ast.Attribute():
            return _attribute(node, account, frame)
        case ast.Subscript():
            return _item(node, account, frame)
        case ast.Call():
            return _call(node, account, frame)
        case ast.Tuple() | ast.List() | ast.Set():
            return _items(node, account, frame)
        case ast.Dict():
            return _entries(node, account, frame)
        case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
            return _comprehension(node, account, frame)
        case ast.Lambda():
            # Called later, if at all.
            function = Function(node, frame.module, outer=frame, home=frame.function.home if frame.function else None)
            account.escape(function, place(node, frame), frame)
            return function
    return _logic(node, account, frame)


def _logic(node: ast.expr, account: Account, frame: Frame) -> Value:
    match node:
        case ast.IfExp():
            return _choice(node, account, frame)
        case ast.BoolOp():
            return _bool_op(node, account, frame)
        case ast.UnaryOp(op=ast.Not()):
            known = truth(node.operand, account, frame)
            return None if known is None else Const(frozenset({not known}))
        case ast.Compare():
            return _compare(node, account, frame)
        case ast.NamedExpr():
            value = frame.names[node.target.id] = value_of(node.value, account, frame)
            return value
        case ast.JoinedStr():
            return _text(node, account, frame)
        case ast.BinOp(op=ast.Add()):
            return _sum(value_of(node.left, account, frame), value_of(node.right, account, frame))
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            value_of(child, account, frame)
    return None


def _sum(left: Value, right: Value) -> Value:
    one, other = (each.only if isinstance(each, Const) else None for each in (left, right))
    if isinstance(one, str) and isinstance(other, str):
        return Const(frozenset({one + other}))
    if isinstance(left, Items) and isinstance(right, Items):
        return Items([*left.values, *right.values], left.complete and right.complete)
    return None


def _text(node: ast.JoinedStr, account: Account, frame: Frame) -> Value:
    parts = [
        value_of(each.value if isinstance(each, ast.FormattedValue) else each, account, frame) for each in node.values
    ]
    known = [each.only for each in parts if isinstance(each, Const) and isinstance(each.only, str)]
    plain = all(not isinstance(each, ast.FormattedValue) or each.conversion < 0 for each in node.values)
    return Const(frozenset({"".join(map(str, known))})) if plain and len(known) == len(parts) else None


def _attribute(node: ast.Attribute, account: Account, frame: Frame) -> Value:
    base = value_of(node.value, account, frame)
    match base:
        case Imported():
            return Imported(base.module, f"{base.dotted}.{node.attr}")
        case Object():
            return of_object(base, node.attr)
        case Parent():
            return base.owner.method(node.attr, after=base.home)
        case Class():
            return unbound(base, node.attr)
    return Attribute(base, node.attr)


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        base = _dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return node.id if isinstance(node, ast.Name) else ""


def _item(node: ast.Subscript, account: Account, frame: Frame) -> Value:
    base, key = value_of(node.value, account, frame), resolve(value_of(node.slice, account, frame))
    if isinstance(base, Ref):
        found = base.below(key)
        if isinstance(node.ctx, ast.Load):
            account.use(found.path, "read", place(node, frame), needed=True)
        return found
    only = key.only if isinstance(key, Const) else None
    if isinstance(base, Entries) and isinstance(only, str):
        return base.values.get(only, base.values.get(ANY))
    if (
        isinstance(base, Items)
        and base.complete
        and isinstance(only, int)
        and -len(base.values) <= only < len(base.values)
    ):
        return base.values[only]
    return None


def _call(node: ast.Call, account: Account, frame: Frame) -> Value:
    if isinstance(node.func, ast.Name) and node.func.id == "super" and frame.function:
        owner, home = frame.function.owner, frame.function.home
        return Parent(owner, home) if owner and home else None
    callee = value_of(node.func, account, frame)
    given: list[Value] = []
    named: dict[str, Value] = {}
    for each in node.args:
        value = value_of(each.value if isinstance(each, ast.Starred) else each, account, frame)
        if not isinstance(each, ast.Starred):
            given.append(value)
        elif isinstance(value, Items) and value.complete:
            given += value.values
        else:
            account.escape(value, place(node, frame), frame)
    for keyword in node.keywords:
        value = value_of(keyword.value, account, frame)
        if keyword.arg:
            named[keyword.arg] = value
        elif isinstance(value, Entries) and value.complete:
            named |= value.values
        else:
            account.escape(value, place(node, frame), frame)
    if isinstance(callee, Builtin) and callee.name == "getattr" and len(given) > 1:
        return _by_name(given[0], given[1])
    return Call(node, account, frame, given, named).of(callee)


def _by_name(owner: Value, name: Value) -> Value:
    only = name.only if isinstance(name, Const) else None
    if not isinstance(only, str):
        return Attribute(owner, ANY)
    return of_object(owner, only) if isinstance(owner, Object) else Attribute(owner, only)


def _items(node: ast.Tuple | ast.List | ast.Set, account: Account, frame: Frame) -> Value:
    values = [value_of(each, account, frame) for each in node.elts if not isinstance(each, ast.Starred)]
    starred = [value_of(each.value, account, frame) for each in node.elts if isinstance(each, ast.Starred)]
    return Items([*values, *starred], complete=not starred)


def _entries(node: ast.Dict, account: Account, frame: Frame) -> Value:
    entries = Entries({})
    for key_node, value_node in zip(node.keys, node.values, strict=True):
        value = value_of(value_node, account, frame)
        key = value_of(key_node, account, frame) if key_node else None
        only = key.only if isinstance(key, Const) else None
        if key_node is None and isinstance(value, Entries):
            entries.values |= value.values
            entries.complete = entries.complete and value.complete
        elif key_node is None:
            entries.complete = False
        else:
            entries.values[only if isinstance(only, str) else ANY] = value
    return entries


def _comprehension(node: Comprehension, account: Account, frame: Frame) -> Value:
    before = account.sure
    for generator in node.generators:
        items = value_of(generator.iter, account, frame)
        if not has_items(items) or isinstance(node, ast.GeneratorExp):
            account.sure = False
        bind(generator.target, item_of(items), account, frame)
        for test in generator.ifs:
            value_of(test, account, frame)
            account.sure = False
    if isinstance(node, ast.DictComp):
        value_of(node.key, account, frame)
        value: Value = Entries({ANY: value_of(node.value, account, frame)})
    else:
        value = Each(value_of(node.elt, account, frame))
    account.sure = before
    return value


def item_of(items: Value) -> Value:
    """What a loop over something binds, as far as all items are alike."""
    if isinstance(items, Each):
        return items.value
    if isinstance(items, Items) and items.values and all(each == items.values[0] for each in items.values):
        return items.values[0]
    if isinstance(items, Items):
        consts = [each for each in items.values if isinstance(each, Const)]
        alike = items.complete and len(consts) == len(items.values)
        return Const(frozenset().union(*(each.choices for each in consts))) if alike else None
    return None


def bind(target: ast.expr, value: Value, account: Account, frame: Frame) -> None:
    """Assign a value to a target: a name, an attribute, an item, or several."""
    match target:
        case ast.Name():
            frame.names[target.id] = value
        case ast.Tuple() | ast.List():
            parts = value.values if isinstance(value, Items) and len(value.values) == len(target.elts) else None
            for index, each in enumerate(target.elts):
                below = parts[index] if parts else None
                bind(each.value if isinstance(each, ast.Starred) else each, below, account, frame)
            if parts is None:
                account.escape(value, place(target, frame), frame)
        case ast.Attribute():
            _bind_attribute(value_of(target.value, account, frame), target, value, account, frame)
        case ast.Subscript():
            _bind_item(target, value, account, frame)


def _bind_attribute(owner: Value, target: ast.Attribute, value: Value, account: Account, frame: Frame) -> None:
    if isinstance(owner, Object):
        there = owner.attributes.get(target.attr, value)
        owner.attributes[target.attr] = value if account.sure else account.either(there, value, frame)
    else:
        account.escape(value, place(target, frame), frame)


def _bind_item(target: ast.Subscript, value: Value, account: Account, frame: Frame) -> None:
    base, key = value_of(target.value, account, frame), resolve(value_of(target.slice, account, frame))
    only = key.only if isinstance(key, Const) else None
    if isinstance(base, Ref):
        keys = key.choices if isinstance(key, Const) else {ANY}
        for each in keys:
            account.write((*base.path, each if isinstance(each, str) else ANY), value, place(target, frame), frame)
    elif isinstance(base, Entries):
        base.values[only if isinstance(only, str) else ANY] = value
    else:
        if isinstance(base, Items):
            base.complete = False
        account.escape(value, place(target, frame), frame)


def _choice(node: ast.IfExp, account: Account, frame: Frame) -> Value:
    known = truth(node.test, account, frame)
    if known is not None:
        return value_of(node.body if known else node.orelse, account, frame)
    values: list[Value] = []

    def way(branch: ast.expr) -> bool:
        values.append(value_of(branch, account, frame))
        return True

    account.one_of([lambda: way(node.body), lambda: way(node.orelse)], frame)
    return account.either(values[0], values[1], frame)


def _bool_op(node: ast.BoolOp, account: Account, frame: Frame) -> Value:
    """``a and b``, ``a or b``: what comes after the first may not be looked at."""
    stops = isinstance(node.op, ast.Or)
    found: list[bool | None] = []
    before = account.sure
    value: Value = None
    for each in node.values:
        value = value_of(each, account, frame)
        found.append(_holds(each, value, account))
        if found[-1] is stops:
            break
        account.sure = account.sure and found[-1] is not None
    account.sure = before
    if found[-1] is stops and None not in found[:-1]:
        return Const(frozenset({stops}))
    if None not in found:
        return Const(frozenset({not stops}))
    return value if len(found) == 1 else None


def _compare(node: ast.Compare, account: Account, frame: Frame) -> Value:
    left = value_of(node.left, account, frame)
    values = [value_of(each, account, frame) for each in node.comparators]
    if len(values) != 1:
        return None
    (operator,), (right,) = node.ops, values
    if isinstance(operator, ast.In | ast.NotIn) and isinstance(right, Ref):
        account.use(right.below(left).path, "read", place(node, frame), needed=False)
        return None
    if isinstance(operator, ast.Eq | ast.NotEq | ast.Is | ast.IsNot) and isinstance(left, Ref):
        fact = account.facts.get(left.path[0]) if len(left.path) == 1 else None
        other = right.only if isinstance(right, Const) else _dotted(node.comparators[0]).rpartition(".")[2] or None
        if fact is not None and other is not None:
            return Const(frozenset({(fact == other) is isinstance(operator, ast.Eq | ast.Is)}))
    return None


def truth(test: ast.expr, account: Account, frame: Frame) -> bool | None:
    """Whether a condition holds; None: cannot tell."""
    return _holds(test, value_of(test, account, frame), account)


def _holds(test: ast.expr, value: Value, account: Account) -> bool | None:
    if isinstance(value, Ref):
        fact = account.facts.get(value.path[0]) if len(value.path) == 1 else None
        return None if fact is None else bool(fact)
    # What a variable holds may be another value the next time.
    variable = isinstance(test, ast.Name | ast.Attribute | ast.Subscript | ast.Call)
    if isinstance(value, Const) and len(value.choices) == 1 and not variable:
        return bool(value.only)
    return False if isinstance(test, ast.Name) and test.id == "TYPE_CHECKING" else None
