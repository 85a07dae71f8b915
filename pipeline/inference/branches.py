"""Statements of which only a part may run: ``if``, ``match``, ``try``, ``with``."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from dataclasses import replace

from pipeline.inference.account import Account
from pipeline.inference.assignment import bind
from pipeline.inference.calls import value as called
from pipeline.inference.conditions import guard, truth
from pipeline.inference.end import End
from pipeline.inference.flow import Use
from pipeline.inference.frame import Frame
from pipeline.inference.given import Given
from pipeline.inference.members import member
from pipeline.inference.objects import bound
from pipeline.inference.scopes import stored
from pipeline.inference.values import Attribute, Builtin, Const, Imported, Object, Value

_LETS_THROUGH = {
    "torch", "numpy", "io", "os", "pathlib", "tempfile", "warnings", "threading", "multiprocessing", "concurrent", "tqdm",
    "rich", "gzip", "bz2", "lzma", "zipfile", "tarfile", "h5py", "sqlite3", "logging", "loguru", "tensorboard",
    "tensorboardX", "wandb", "mlflow",
}  # fmt: skip
"""Packages whose context managers let exceptions through."""
_TRANSPARENT = {
    f"contextlib.{name}" for name in ("chdir", "closing", "nullcontext", "redirect_stderr", "redirect_stdout")
}
"""Functions whose context managers do: contextlib has suppress as well."""


def if_else(node: ast.If, account: Account, frame: Frame) -> End:
    """``if``."""
    known = truth(node.test, account, frame)
    if known is not None:
        return account.block(node.body if known else node.orelse, frame)
    key, without = guard(node.test, account, frame)
    certain: set[Use] = set()
    start = len(account.uses)

    def way(body: Sequence[ast.stmt], holds: bool) -> End:
        end = account.block(body, frame)
        if key and holds is without:
            certain.update(use for use in account.uses[start:] if use.sure)
        return end

    ends = account.one_of([lambda: way(node.body, True), lambda: way(node.orelse, False)], frame)
    for index, use in enumerate(account.uses[start:], start):
        if replace(use, sure=True) in certain and not use.sure:
            account.uses[index] = replace(use, unless=key)
    return _joined(ends)


def match_case(node: ast.Match, account: Account, frame: Frame) -> End:
    """``match``."""
    account.escape(account.value_of(node.subject, frame))

    def way(case: ast.match_case) -> End:
        for name in stored((case.pattern,)):
            frame.names[name] = None
        if case.guard:
            account.value_of(case.guard, frame)
        return account.block(case.body, frame)

    # No case may fit, and what a pattern looks at is not sure to be looked at.
    with account.perhaps():
        ends = account.one_of([*(lambda case=each: way(case) for each in node.cases), lambda: End.ON], frame)
    return _joined(ends)


def _joined(ends: Sequence[End]) -> End:
    """How ways end of which one is taken."""
    return next((end for end in (End.ON, End.LOOP, End.RETURN) if end in ends), End.RAISE)


def try_except(node: ast.Try | ast.TryStar, account: Account, frame: Frame) -> End:
    """``try``."""
    # What leaves `finally` otherwise than at its end swallows what was raised.
    left = any(isinstance(each, ast.Return | ast.Break | ast.Continue) for each in _parts(node.finalbody))
    handlers: list[ast.ExceptHandler | None] = [*node.handlers, *([None] if left else [])]
    end, anywhere = _guarded(node.body, node.orelse, handlers, account, frame)
    if not node.finalbody:
        return end
    after = frame.names
    frame.names = account.merged([after, anywhere])
    last = account.block(node.finalbody, frame)
    # What follows is reached only where nothing was raised.
    frame.names = after | {name: frame.names.get(name) for name in stored(tuple(node.finalbody))}
    return last if last is not End.ON else end


def _parts(body: Sequence[ast.stmt]) -> Iterable[ast.AST]:
    return (part for each in body for part in ast.walk(each))


def _guarded(
    body: Sequence[ast.stmt],
    orelse: Sequence[ast.stmt],
    handlers: Sequence[ast.ExceptHandler | None],
    account: Account,
    frame: Frame,
) -> tuple[End, dict[str, Value]]:
    """A block that may be left anywhere, and what is done then; None lets it be. Also the names wherever it is left."""
    sure, before = account.sure, dict(frame.names)
    # A name that is bound twice may hold either.
    twice = {name for name, times in stored(tuple(body)).items() if times > 1}
    with frame.exposing(twice):
        account.sure = sure and not handlers
        end = account.block(body, frame)
        if end is End.ON:
            end = account.block(orelse, frame)
    after = frame.names
    account.sure = False
    anywhere = {name: value for name, value in {**before, **after}.items() if before.get(name, value) == value}
    for name in {*before, *after} - set(anywhere):
        anywhere[name] = account.either(before[name], after.get(name))
    anywhere |= dict.fromkeys(twice)
    ends, going = [end], [after] if end is End.ON else []
    for handler in handlers:
        frame.names = dict(anywhere)
        if handler and handler.name:
            frame.names[handler.name] = None
        ends.append(account.block(handler.body, frame) if handler else End.ON)
        going += [frame.names] if ends[-1] is End.ON else []
    frame.names = account.merged(going) if going else anywhere
    account.sure = sure
    return (_joined(ends) if handlers else end), anywhere


def with_block(node: ast.With | ast.AsyncWith, account: Account, frame: Frame) -> End:
    """``with``."""
    first, *rest = node.items
    manager = account.value_of(first.context_expr, frame)
    entered = _special(manager, "__enter__", account)
    lets_through = _lets_through(first.context_expr, manager, account, frame)
    if first.optional_vars:
        bind(first.optional_vars, entered, account, frame)
    # Several are one within the other.
    body = [ast.copy_location(ast.With(rest, node.body), node)] if rest else node.body
    end = account.block(body, frame) if lets_through else _guarded(body, (), [None], account, frame)[0]
    _special(manager, "__exit__", account)
    return end


def _special(manager: Value, name: str, account: Account) -> Value:
    """Call ``__enter__`` or ``__exit__``."""
    if not isinstance(manager, Object):
        account.escape(manager)
        return None
    found = member(manager.definition, name)
    method = bound(found, manager, account) if found else None
    if method is None:
        account.escape(manager)
    return called(method, Given([None] * (3 if name == "__exit__" else 0), {}), account)


def _lets_through(node: ast.expr, manager: Value, account: Account, frame: Frame) -> bool:
    """Whether a context manager certainly lets exceptions through."""
    if isinstance(manager, Object):
        found = member(manager.definition, "__exit__")
        method = bound(found, manager, account) if found else None
        given = Given([None, None, None], {})
        with account.perhaps():
            answer = called(method, given, account) if method else None
        return isinstance(answer, Const) and not any(answer.choices)
    if not isinstance(node, ast.Call):
        return False
    callee = account.value_of(node.func, frame)
    if isinstance(callee, Imported):
        return callee.package in _LETS_THROUGH or callee.home in _TRANSPARENT
    return callee == Builtin("open") or (isinstance(callee, Attribute) and callee.name == "open" and callee.of is None)
