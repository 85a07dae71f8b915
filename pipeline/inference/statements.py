"""The statements of a function, in the order in which Python would run them."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from pipeline.inference.account import Account
from pipeline.inference.assignment import augmented, bind, delete
from pipeline.inference.branches import if_else, match_case, try_except, with_block
from pipeline.inference.end import End
from pipeline.inference.frame import Frame
from pipeline.inference.functions import define, define_class
from pipeline.inference.loops import for_loop, while_loop
from pipeline.inference.names import imported

_STOPS = {"SystemExit", "KeyboardInterrupt", "GeneratorExit"}


def block(body: Sequence[ast.stmt], account: Account, frame: Frame) -> End:
    """Follow statements until one of them ends the block for certain."""
    for node in body:
        account.step()
        account.at = (node, frame)
        exits = frame.exits
        end = _statement(node, account, frame)
        if end is not End.ON:
            return end
        # After a way out, the rest may not be reached.
        account.sure = account.sure and frame.exits == exits
    return End.ON


def _statement(node: ast.stmt, account: Account, frame: Frame) -> End:
    match node:
        case ast.If():
            return if_else(node, account, frame)
        case ast.For() | ast.AsyncFor():
            return for_loop(node, account, frame)
        case ast.While():
            return while_loop(node, account, frame)
        case ast.Try() | ast.TryStar():
            return try_except(node, account, frame)
        case ast.With() | ast.AsyncWith():
            return with_block(node, account, frame)
        case ast.Match():
            return match_case(node, account, frame)
        case ast.Return() | ast.Raise() | ast.Break() | ast.Continue():
            return _leaving(node, account, frame)
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            frame.names[node.name] = define(node, account, frame)
        case ast.ClassDef():
            define_class(node, account, frame)
        case _:
            _simple(node, account, frame)
    return End.ON


def _leaving(node: ast.Return | ast.Raise | ast.Break | ast.Continue, account: Account, frame: Frame) -> End:
    match node:
        case ast.Return():
            frame.exits = (frame.exits[0] + 1, frame.exits[1])
            frame.returned.append(account.value_of(node.value or ast.Constant(None), frame))
            return End.RETURN
        case ast.Raise():
            for each in (node.exc, node.cause):
                if each:
                    account.escape(account.value_of(each, frame))
                    if any(isinstance(part, ast.Name) and part.id in _STOPS for part in ast.walk(each)):
                        account.leave()
            return End.RAISE
    frame.left.append(dict(frame.names))
    frame.exits = (frame.exits[0], frame.exits[1] + 1)
    return End.LOOP


def _simple(node: ast.stmt, account: Account, frame: Frame) -> None:
    match node:
        case ast.Assign():
            value = account.value_of(node.value, frame)
            for target in node.targets:
                bind(target, value, account, frame)
        case ast.AnnAssign():
            if node.value:
                bind(node.target, account.value_of(node.value, frame), account, frame)
        case ast.AugAssign():
            augmented(node, account, frame)
        case ast.Delete():
            for target in node.targets:
                delete(target, account, frame)
        case ast.Expr() | ast.Assert():
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.expr):
                    account.value_of(child, frame)
        case ast.Import() | ast.ImportFrom():
            frame.names |= imported(node, frame.module)
