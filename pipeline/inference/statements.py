"""The statements of a function, in the order in which Python would run them."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from enum import Enum, auto

from pipeline.inference.account import MOST_CALLS, Account, Frame, place
from pipeline.inference.expressions import bind, item_of, truth, value_of
from pipeline.inference.values import Const, Entries, Function, Items, Object, Ref, Value, has_items

_PLAIN_MARKS = (
    "staticmethod",
    "classmethod",
    "override",
    "hookimpl",
    "no_grad",
    "inference_mode",
    "abstractmethod",
    "final",
)
_MOST_ITEMS = 32


class End(Enum):
    """How a block ends: it goes on, leaves the loop, returns, or raises."""

    ON = auto()
    LOOP = auto()
    RETURN = auto()
    RAISE = auto()


def follow(
    account: Account, function: Function, given: Sequence[Value], named: Mapping[str, Value], caller: Frame
) -> Value:
    """Call a function."""
    node = function.node
    account.calls += 1
    if node in account.active or len(account.active) > 30:
        return None
    if account.calls > MOST_CALLS:
        account.give_up(place(node, caller), caller)
        return None
    names = _arguments(function, given, named)
    frame = Frame(function.module, names, function, _is_trusted(function, caller))
    if isinstance(node, ast.Lambda):
        return value_of(node.body, account, frame)
    sure = account.sure
    wrapped = [
        mark for mark in node.decorator_list if not ast.unparse(mark).rpartition(".")[2].startswith(_PLAIN_MARKS)
    ]
    if wrapped:
        for value in names.values():
            account.escape(value, place(node, frame), frame)
    generator = any(isinstance(each, ast.Yield | ast.YieldFrom) for each in ast.walk(node))
    account.sure = sure and not wrapped and not generator
    account.active.append(node)
    block(node.body, account, frame)
    account.active.pop()
    account.sure = sure
    value = frame.returned[0] if frame.returned else Const(frozenset({None}))
    for other in frame.returned[1:]:
        value = account.either(value, other, frame)
    return value if frame.returned and not generator else None


def _is_trusted(function: Function, caller: Frame) -> bool:
    """Whether the author said what the function does: in the class's own ``writes``."""
    if not function.home:
        return caller.trusted
    assigned = [node for node in function.home.node.body if isinstance(node, ast.Assign | ast.AnnAssign)]
    return any("writes" in set(map(ast.unparse, _targets(node))) for node in assigned)


def _targets(node: ast.Assign | ast.AnnAssign) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [node.target]


def _arguments(function: Function, given: Sequence[Value], named: Mapping[str, Value]) -> dict[str, Value]:
    """The names that a call binds."""
    takes = function.node.args
    positional = [each.arg for each in (*takes.posonlyargs, *takes.args)]
    static = isinstance(function.node, ast.FunctionDef) and "staticmethod" in map(
        ast.unparse, function.node.decorator_list
    )
    values = [function.owner, *given] if function.owner and not static else list(given)
    names: dict[str, Value] = dict(zip(positional, values, strict=False))
    names |= {name: value for name, value in named.items() if name in positional}
    names |= {each.arg: named.get(each.arg) for each in takes.kwonlyargs}
    if takes.vararg:
        names[takes.vararg.arg] = Items(list(values[len(positional) :]))
    if takes.kwarg:
        names[takes.kwarg.arg] = Entries({name: value for name, value in named.items() if name not in names})
    return dict.fromkeys(positional) | names


def block(body: Sequence[ast.stmt], account: Account, frame: Frame) -> End:
    """Follow statements until one of them ends the block for certain."""
    for node in body:
        end = _statement(node, account, frame)
        if end is not End.ON:
            return end
    return End.ON


def _statement(node: ast.stmt, account: Account, frame: Frame) -> End:
    match node:
        case ast.If():
            return _if(node, account, frame)
        case ast.For() | ast.AsyncFor():
            _for(node, account, frame)
        case ast.While():
            _while(node, account, frame)
        case ast.Try() | ast.TryStar():
            return _try(node, account, frame)
        case ast.With() | ast.AsyncWith():
            return _with(node, account, frame)
        case ast.Match():
            _match(node, account, frame)
        case ast.Return():
            frame.may_return = True
            frame.returned.append(value_of(node.value, account, frame) if node.value else None)
            return End.RETURN
        case ast.Raise():
            _expressions(node, account, frame)
            return End.RAISE
        case ast.Break() | ast.Continue():
            return End.LOOP
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            home = frame.function.home if frame.function else None
            function = Function(node, frame.module, outer=frame, home=home)
            frame.names[node.name] = function
            account.escape(function, place(node, frame), frame)
        case _:
            return _simple(node, account, frame)
    return End.ON


def _simple(node: ast.stmt, account: Account, frame: Frame) -> End:
    match node:
        case ast.Assign():
            value = value_of(node.value, account, frame)
            for target in node.targets:
                bind(target, value, account, frame)
        case ast.AnnAssign():
            if node.value:
                bind(node.target, value_of(node.value, account, frame), account, frame)
        case ast.AugAssign():
            _augmented(node, account, frame)
        case ast.Delete():
            for target in node.targets:
                _delete(target, account, frame)
        case ast.Global() | ast.Nonlocal():
            # What such a name holds from here on, others may change.
            frame.names.update(dict.fromkeys(node.names))
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr="exit"))):
            return End.RAISE
        case _:
            _expressions(node, account, frame)
    return End.ON


def _expressions(node: ast.stmt, account: Account, frame: Frame) -> None:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            value_of(child, account, frame)


def _augmented(node: ast.AugAssign, account: Account, frame: Frame) -> None:
    value = value_of(node.value, account, frame)
    before: Value = None
    if isinstance(node.target, ast.Name):
        before = frame.names.get(node.target.id)
    elif isinstance(node.target, ast.Subscript):
        loaded = ast.copy_location(ast.Subscript(node.target.value, node.target.slice, ast.Load()), node.target)
        value_of(loaded, account, frame)
    if isinstance(before, Ref) and isinstance(node.op, ast.BitOr):
        if isinstance(value, Entries) and value.complete:
            for name, each in value.values.items():
                account.write((*before.path, name), each, place(node, frame), frame)
        else:
            account.escape(before, place(node, frame), frame)
        return
    account.escape(before, place(node, frame), frame)
    account.escape(value, place(node, frame), frame)
    bind(node.target, None, account, frame)


def _delete(target: ast.expr, account: Account, frame: Frame) -> None:
    if isinstance(target, ast.Subscript):
        base, key = value_of(target.value, account, frame), value_of(target.slice, account, frame)
        if isinstance(base, Ref):
            path = base.below(key).path
            account.use(path, "read", place(target, frame), needed=True)
            account.use(path, "delete", place(target, frame), needed=True)
        elif isinstance(base, Items | Entries):
            base.complete = False
    elif isinstance(target, ast.Name):
        frame.names.pop(target.id, None)


def _if(node: ast.If, account: Account, frame: Frame) -> End:
    known = truth(node.test, account, frame)
    if known is not None:
        return block(node.body if known else node.orelse, account, frame)
    ends: list[End] = []

    def way(body: Sequence[ast.stmt]) -> bool:
        ends.append(block(body, account, frame))
        return ends[-1] is not End.RAISE

    account.one_of([lambda: way(node.body), lambda: way(node.orelse)], frame)
    return _joined(ends, account)


def _joined(ends: Sequence[End], account: Account) -> End:
    """How ways end of which one is taken: after one that leaves, the rest may not be reached."""
    if End.ON not in ends:
        return next((end for end in (End.LOOP, End.RETURN) if end in ends), End.RAISE)
    if End.LOOP in ends or End.RETURN in ends:
        account.sure = False
    return End.ON


def _for(node: ast.For | ast.AsyncFor, account: Account, frame: Frame) -> None:
    items = value_of(node.iter, account, frame)
    sure = account.sure
    if isinstance(items, Items) and items.complete and 0 < len(items.values) <= _MOST_ITEMS:
        for each in items.values:
            bind(node.target, each, account, frame)
            block(node.body, account, frame)
    else:
        account.sure = sure and has_items(items)
        _forget_changing(node, frame)
        bind(node.target, item_of(items), account, frame)
        block(node.body, account, frame)
    account.sure = sure and not frame.may_return
    with account.perhaps():
        block(node.orelse, account, frame)


def _while(node: ast.While, account: Account, frame: Frame) -> None:
    _forget_changing(node, frame)
    known = truth(node.test, account, frame)
    sure = account.sure
    account.sure = sure and known is True
    block(node.body, account, frame)
    account.sure = sure and not frame.may_return
    with account.perhaps():
        block(node.orelse, account, frame)


def _forget_changing(loop: ast.stmt, frame: Frame) -> None:
    """What a loop assigns is another value in the next round."""
    for node in ast.walk(loop):
        if (
            isinstance(node, ast.Name)
            and isinstance(node.ctx, ast.Store)
            and isinstance(frame.names.get(node.id), Const)
        ):
            frame.names[node.id] = None
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
            owner = frame.names.get(node.value.id)
            if isinstance(owner, Object) and isinstance(owner.attributes.get(node.attr), Const):
                owner.attributes[node.attr] = None


def _try(node: ast.Try | ast.TryStar, account: Account, frame: Frame) -> End:
    sure = account.sure
    account.sure = sure and not node.handlers
    end = block(node.body, account, frame)
    if end is End.ON:
        end = block(node.orelse, account, frame)
    account.sure = False
    ends = [end, *(block(handler.body, account, frame) for handler in node.handlers)]
    # A way that returned is no longer sure to be followed by the rest.
    account.sure = sure
    if not node.handlers:
        last = block(node.finalbody, account, frame)
        return last if last is not End.ON else end
    last = block(node.finalbody, account, frame)
    return last if last is not End.ON else _joined(ends, account)


def _with(node: ast.With | ast.AsyncWith, account: Account, frame: Frame) -> End:
    sure = account.sure
    for item in node.items:
        value = value_of(item.context_expr, account, frame)
        if "suppress" in ast.unparse(item.context_expr):
            account.sure = False
        if item.optional_vars:
            bind(item.optional_vars, value if isinstance(value, Object) else None, account, frame)
    swallows = account.sure is not sure
    end = block(node.body, account, frame)
    if swallows:
        account.sure = sure and not frame.may_return
        return End.ON
    return end


def _match(node: ast.Match, account: Account, frame: Frame) -> None:
    value_of(node.subject, account, frame)
    with account.perhaps():
        for case in node.cases:
            for each in ast.walk(case.pattern):
                if isinstance(each, ast.MatchAs | ast.MatchStar) and each.name:
                    frame.names[each.name] = None
            block(case.body, account, frame)
    account.sure = account.sure and not frame.may_return
