"""The small changes of a source file that tests should notice, as ``mutants.py`` makes them.

Each change is inside a function, and of one of these kinds:

- comparison: ``<`` becomes ``>=``, ``==`` becomes ``!=``, ``in`` becomes ``not in``, and so on
- boolean: ``and`` and ``or`` are exchanged, ``not`` is left out, a condition is negated
- constant: a number is one more, ``True`` is ``False``, and a string that is a key, or is compared, is another
- call: a statement that only calls something becomes ``pass``
- return: a returned value becomes ``None``

What a ``raise`` says, other texts, annotations and debug logs stay as they are.
"""

from __future__ import annotations

import ast
import re
from typing import NamedTuple

OPPOSITES: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", ">="),
    ast.LtE: ("<=", ">"),
    ast.Gt: (">", "<="),
    ast.GtE: (">=", "<"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}


class Change(NamedTuple):
    """A change of one place in a source.

    Attributes:
        kind: comparison, boolean, constant, call or return.
        line: the line of the place, from 1.
        statement: the first line of the statement that it is in.
        start: where it begins, in bytes.
        end: where it ends, in bytes.
        after: what stands there afterwards.
    """

    kind: str
    line: int
    statement: int
    start: int
    end: int
    after: str

    def apply(self, source: bytes) -> bytes:
        """Return the changed source."""
        return source[: self.start] + self.after.encode() + source[self.end :]

    def describe(self, source: bytes) -> str:
        """Return what becomes of what, on one line."""
        before = " ".join(source[self.start : self.end].decode().split())
        return f"{self.kind}: {before} -> {self.after or '(nothing)'}"


def changes(source: bytes) -> list[Change]:
    """Return all changes of a source that can be parsed, in order of their places."""
    finder = _Finder(source)
    finder.visit(ast.parse(source))
    return sorted(finder.found, key=lambda change: (change.start, change.end))


class _Finder(ast.NodeVisitor):
    """Collects the changes in ``found``."""

    def __init__(self, source: bytes) -> None:
        self.found: list[Change] = []
        self._source = source
        # Where each line begins, in bytes.
        self._lines = [0, *(match.end() for match in re.finditer(rb"\n", source))]
        self._depth = 0
        self._statement = 0

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.stmt):
            self._statement = node.lineno
        super().visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        # Only the body: decorators, defaults and annotations are evaluated on import.
        self._depth += 1
        for statement in node.body:
            self.visit(statement)
        self._depth -= 1

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Raise(self, node: ast.Raise) -> None:
        """Leave out what an error says."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Leave out texts."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value:
            self.visit(node.value)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call) and not _is_debug_log(node.value):
            self._add("call", node, "pass")
            self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value and not _is_none(node.value):
            self._add("return", node.value, "None")
        self.generic_visit(node)

    def visit_If(self, node: ast.If | ast.While | ast.IfExp) -> None:
        if not isinstance(node.test, ast.Compare | ast.UnaryOp):
            start, end = self._place(node.test)
            text = self._source[start:end].decode()
            self._add("boolean", node.test, f"not ({text})")
        self.generic_visit(node)

    visit_While = visit_If
    visit_IfExp = visit_If

    def visit_Compare(self, node: ast.Compare) -> None:
        before, after = OPPOSITES[type(node.ops[0])]
        self._replace_between("comparison", node.left, node.comparators[0], before, after)
        for operand in (node.left, *node.comparators):
            self._change_string(operand)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        before, after = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        self._replace_between("boolean", node.values[0], node.values[1], before, after)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            start, _ = self._place(node)
            self._append("boolean", node, start, start + len("not"), "")
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self._change_string(node.slice)
        self.generic_visit(node)

    def visit_Dict(self, node: ast.Dict) -> None:
        for key in node.keys:
            self._change_string(key)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._add("constant", node, str(not node.value))
        elif isinstance(node.value, int | float):
            self._add("constant", node, repr(node.value + 1))

    def _change_string(self, node: ast.AST | None) -> None:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            self._add("constant", node, repr(node.value + "_"))

    def _replace_between(self, kind: str, left: ast.AST, right: ast.AST, before: str, after: str) -> None:
        """Replace the operator that stands between two operands, beside which there may be brackets."""
        _, start = self._place(left)
        end, _ = self._place(right)
        words = r"\s+".join(re.escape(word) for word in before.split()).encode()
        match = re.search(words, self._source[start:end])
        if match:
            self._append(kind, left, start + match.start(), start + match.end(), after)

    def _add(self, kind: str, node: ast.AST, after: str) -> None:
        self._append(kind, node, *self._place(node), after)

    def _append(self, kind: str, node: ast.AST, start: int, end: int, after: str) -> None:
        if self._depth:
            line = self._source.count(b"\n", 0, start) + 1
            self.found.append(Change(kind, line, self._statement, start, end, after))

    def _place(self, node: ast.AST) -> tuple[int, int]:
        assert isinstance(node, ast.expr | ast.stmt)
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self._lines[node.lineno - 1] + node.col_offset
        return start, self._lines[node.end_lineno - 1] + node.end_col_offset


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _is_debug_log(call: ast.Call) -> bool:
    function = call.func
    return isinstance(function, ast.Attribute) and ast.unparse(function) in ("logger.debug", "logger.trace")
