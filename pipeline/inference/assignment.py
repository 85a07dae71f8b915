"""What an assignment or a deletion does: to a name, an attribute, an item."""

from __future__ import annotations

import ast

from pipeline.inference.account import Account
from pipeline.inference.containers import Entries, Items
from pipeline.inference.dicts import put
from pipeline.inference.flow import ANY
from pipeline.inference.frame import Frame
from pipeline.inference.items import rounds
from pipeline.inference.names import settled
from pipeline.inference.objects import assign
from pipeline.inference.values import Const, Object, Ref, Value, text_of


def bind(target: ast.expr, value: Value, account: Account, frame: Frame) -> None:
    """Assign a value to a target: a name, an attribute, an item, or several."""
    match target:
        case ast.Name():
            bind_name(target.id, value, account, frame)
        case ast.Tuple() | ast.List():
            _bind_several(target, value, account, frame)
        case ast.Starred():
            bind(target.value, value, account, frame)
        case ast.Attribute():
            set_attribute(account.value_of(target.value, frame), target.attr, value, account)
        case ast.Subscript():
            base, key = account.value_of(target.value, frame), account.value_of(target.slice, frame)
            _set_item(base, settled(key, account), value, account)


def bind_name(name: str, value: Value, account: Account, frame: Frame) -> None:
    """Assign a value to a name; it escapes where other code sees the name."""
    if name in frame.exposed | frame.pending | frame.scope.unsettled:
        account.escape(value)
    frame.names[name] = value


def _bind_several(target: ast.Tuple | ast.List, value: Value, account: Account, frame: Frame) -> None:
    parts = rounds(value, account)
    starred = any(isinstance(each, ast.Starred) for each in target.elts)
    if parts is None or starred or len(parts) != len(target.elts):
        parts = [None] * len(target.elts)
        account.escape(value)
    for each, part in zip(target.elts, parts, strict=True):
        bind(each, part, account, frame)


def set_attribute(owner: Value, name: str, value: Value, account: Account) -> None:
    """``owner.name = value``."""
    if isinstance(owner, Object):
        assign(owner, name, value, account)
    else:
        account.escape(value)


def _set_item(base: Value, key: Value, value: Value, account: Account) -> None:
    if isinstance(base, Ref):
        for each in key.choices if isinstance(key, Const) else (ANY,):
            account.write((*base.path, each if isinstance(each, str) else ANY), value)
    elif isinstance(base, Entries):
        put(base, text_of(key) or ANY, value, account)
    else:
        account.escape(base)
        account.escape(value)


def augmented(node: ast.AugAssign, account: Account, frame: Frame) -> None:
    """``target += value``."""
    before = account.value_of(_loaded(node.target), frame)
    value = account.value_of(node.value, frame)
    if isinstance(before, Ref) and isinstance(node.op, ast.BitOr) and isinstance(value, Entries) and value.complete:
        for name, each in list(value.values.items()):
            account.write((*before.path, name), each)
        bind(node.target, before, account, frame)
        return
    account.escape(before)
    account.escape(value)
    bind(node.target, None, account, frame)


def _loaded(target: ast.Name | ast.Attribute | ast.Subscript) -> ast.expr:
    """The target as an expression, to know what it holds before."""
    match target:
        case ast.Name():
            read: ast.expr = ast.Name(target.id, ast.Load())
        case ast.Attribute():
            read = ast.Attribute(target.value, target.attr, ast.Load())
        case _:
            read = ast.Subscript(target.value, target.slice, ast.Load())
    return ast.copy_location(read, target)


def delete(target: ast.expr, account: Account, frame: Frame) -> None:
    """``del target``."""
    match target:
        case ast.Tuple() | ast.List():
            for each in target.elts:
                delete(each, account, frame)
        case ast.Name():
            frame.names.pop(target.id, None)
        case ast.Attribute():
            account.escape(account.value_of(target.value, frame))
        case ast.Subscript():
            base, key = (
                account.value_of(target.value, frame),
                settled(account.value_of(target.slice, frame), account),
            )
            if isinstance(base, Ref):
                path = base.below(key).path
                account.use(path, "read", needed=True)
                account.use(path, "delete", needed=True)
            elif isinstance(base, Items | Entries):
                account.spoil(base)
            else:
                account.escape(base)
