"""Which keys of the context a stage reads and writes: one visitor that follows the context through its source.

It knows the names and attributes that hold the context, and follows it through the stage's methods, ``super()``, functions
that are given it, and helper objects that keep it, in the files of the workspace. Where it goes anywhere else, or a key is
written whose name cannot be seen, the visitor *cannot tell*: from there on nothing is certain.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias

from pipeline.context import Context
from pipeline.user_code import classes, source
from pipeline.user_code.classes import defaults
from pipeline.user_code.context_flow import ANY, Action, Flow, Use

Scalar: TypeAlias = str | int | float | bool | None

FunctionNode: TypeAlias = source.FunctionNode | ast.Lambda


@dataclass(frozen=True)
class Ref:
    """The context, or what lies in it under some keys."""

    path: tuple[str, ...] = ()


@dataclass(frozen=True)
class Const:
    """A plain value that is known from the source."""

    value: Scalar


@dataclass(eq=False)
class Instance:
    """An object of a class that is followed; ``escaped``: other code has it too, and may call its methods."""

    definition: source.Definition
    attributes: dict[str, Value] = field(default_factory=dict)
    escaped: bool = False

    def mark_escaped(self) -> None:
        """Note that other code has it too."""
        self.escaped = True


@dataclass(eq=False)
class Function:
    """A function, or one call of it.

    Attributes:
        node: its source.
        module: where names are looked up that are not local.
        names: the local names, and those of functions around it.
        owner: the object whose method it is.
        home: the class whose method it is.
        return_values: what it may return.
    """

    node: FunctionNode
    module: source.Module
    names: dict[str, Value] = field(default_factory=dict)
    owner: Instance | None = None
    home: source.Definition | None = None
    return_values: list[Value] = field(default_factory=list)


@dataclass(frozen=True)
class Rounds:
    """The epochs or batches of the context's loop; ``counted``: the code says how many."""

    counted: bool


# What an expression holds; None: anything but the context.
Value: TypeAlias = Ref | Const | Instance | Function | Rounds | source.Definition | None


class Arguments(NamedTuple):
    """The arguments of a call."""

    values: Sequence[Value] = ()
    keywords: Mapping[str, Value] = {}

    def all(self) -> list[Value]:
        """Every argument."""
        return [*self.values, *self.keywords.values()]


# Functions of Python's that change nothing in what they are given.
_HARMLESS = {"bool", "dict", "isinstance", "len", "list", "print", "range", "sorted", "str", "sum", "type", "zip"}

# Names with which code is run that cannot be seen, or the program is ended.
_BY_CODE = {"exec", "eval", "globals", "locals", "vars", "exit", "quit", "SystemExit", "sys.exit", "os._exit"}

# Methods of a dict that change nothing in it.
_READ_ONLY = {"get", "items", "keys", "values", "copy"}

# Keys whose objects are ours: given the context, they don't change it.
_OURS = {"hooks", "checkpointer", "config", "resources"}

# What the loop of the runner stage reads and writes, as the default Runner declares it.
_LOOP = ("dataset", "model"), ("current_epoch", "metrics", "best")

# What the context has for a loop of one's own -> the keys that it reads, and those that it writes.
_KIT = {"epochs": ((), _LOOP[1]), "batches": _LOOP, "validate": _LOOP, "save": ((), ()), "resuming": ((), ())}

# What the context has besides, and what is no use of a key.
_STEERING = {"stop", "stop_reason", "request"}

# Context managers that let an error through.
_TRANSPARENT = {"open", "nullcontext", "closing", "no_grad", "inference_mode", "enable_grad", "autocast"}

# The special methods that a class may have and still be followed.
_PLAIN = {"__init__", "__repr__", "__str__"}

# Nodes that are visited as others are.
_SAME = {"SetComp": "ListComp", "DictComp": "ListComp", "GeneratorExp": "ListComp", "IfExp": "BoolOp"}

_SAME |= {"AsyncFunctionDef": "FunctionDef", "FormattedValue": "Expr"}

_NOTHING = ast.Lambda(ast.arguments([], [], None, [], [], None, []), ast.Constant(None))

_MOST_STEPS, _DEEPEST = 20_000, 15


class ContextVisitor(ast.NodeVisitor):
    """Follows the context from where a stage or a plugin gets it; each ``visit`` returns what its expression holds.

    Args:
        definition: the class.
        method: the method that the trainer calls on a stage.
        facts: keys of the context whose value is known before anything runs.

    Attributes:
        sure: whether what is visited certainly runs.
        flow: everything that was noted.
        counting: whether what is visited stands in a loop over a known number of rounds.
    """

    def __init__(self, definition: source.Definition, method: str, facts: Mapping[str, Scalar]) -> None:
        self.definition, self.method, self.facts = definition, method, facts
        self.owner = Instance(definition)
        self.frame = Function(_NOTHING, definition.module)
        self.sure, self.counting, self.steps = True, False, 0
        self.flow = Flow(unknown="" if self.is_plain(definition) else definition.location)
        self.active: list[FunctionNode] = []

    # What is noted

    def mark_unknown(self, node: ast.AST) -> None:
        """From here on everything is unknown; our own code does only what its classes declare."""
        if not source.is_ours(self.frame.module):
            self.flow.mark_unknown(self.location(node))

    def location(self, node: ast.AST) -> str:
        """``file.py:14``."""
        return f"{self.frame.module.file.name}:{getattr(node, 'lineno', 0)}"

    def note(self, action: Action, key: str, node: ast.AST, *, item: str = "", sure: bool = True) -> None:
        """Note a use of a key; the lack of one that the stage itself may have written before is not certain."""
        written = any(use.key == key and use.action == "write" for use in self.flow.uses)
        sure = sure and self.sure and not self.flow.unknown and not (action == "read" and written)
        self.flow.uses.setdefault(Use(key, action, self.location(node), sure, item))

    def note_declaration(self, home: source.Definition) -> None:
        """What a class declares, whose method runs."""
        self.flow.declared_writes.update(dict.fromkeys(classes.own_declaration(home, "writes")))
        actions: tuple[Action, ...] = ("read", "write")
        for action in actions if source.is_ours(home.module) else ():
            for key in classes.own_declaration(home, f"{action}s"):
                self.note(action, key, home.node)

    @contextmanager
    def uncertain_block(self, *, unless: bool = False) -> Iterator[None]:
        """A block of which it isn't certain that it runs to its end; ``unless``: it is."""
        before, self.sure = self.sure, unless
        yield
        self.sure = before

    def escape(self, node: ast.AST, *values: Value) -> None:
        """Values go where they cannot be followed; what has a function may call it."""
        for value in values:
            match value:
                case Ref(()):
                    self.mark_unknown(node)
                case Ref((key,)) if not source.is_ours(self.frame.module):
                    self.flow.opaque.add(key)
                case Instance(escaped=False):
                    value.mark_escaped()
                    self.escape(node, *value.attributes.values())
                case Function():
                    self.escape(node, value.owner)
                    with self.uncertain_block():
                        self.follow(value, Arguments(), node)

    def call(self, name: str, arguments: Arguments) -> None:
        """Call a method of the object itself, if its class has one; where it is too much to follow, nothing is certain."""
        node = self.definition.node
        binding = classes.member(self.definition, name)
        try:
            method = self.member(self.owner, binding, node)
            if isinstance(method, Function):
                self.follow(method, arguments, node)
            elif binding:
                self.mark_unknown(node)
        except RecursionError:
            self.flow = replace(self.flow, unknown=self.definition.location)

    # Statements

    def visit(self, node: ast.AST) -> Value:
        """Visit a node.

        Raises:
            RecursionError: there were too many.
        """
        self.steps += 1
        if self.steps > _MOST_STEPS:
            raise RecursionError
        kind = type(node).__name__
        method: Callable[..., Value] = getattr(self, f"visit_{_SAME.get(kind, kind)}", self.generic_visit)
        return method(node)

    def generic_visit(self, node: ast.AST) -> None:
        """What no other method knows may do anything with the values of its parts."""
        self.escape(node, *map(self.visit, ast.iter_child_nodes(node)))

    def block(self, body: Sequence[ast.stmt]) -> None:
        """Statements in their order; behind one that may leave the block, nothing is sure."""
        for statement in body:
            self.visit(statement)
            if isinstance(statement, ast.Return | ast.Raise | ast.Break | ast.Continue):
                break
            self.sure = self.sure and not _leaves(statement)

    def branch(self, body: Sequence[ast.stmt]) -> None:
        """Statements that may not run."""
        with self.uncertain_block():
            self.block(body)

    def visit_Expr(self, node: ast.Expr | ast.FormattedValue) -> Value:
        """A call, mostly; and a part of an f-string."""
        return self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        """``context["a"] = self.b = value``."""
        for target in node.targets:
            self.assign(target, node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """``value: int = 1``."""
        if node.value:
            self.assign(node.target, node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        """``context["a"] += 1`` and ``context |= {"a": 1}``."""
        if self.visit(node.target) == Ref():
            self.write_all(node.value, node)
        else:
            self.escape(node, self.visit(node.value))
            self.bind(node.target, None)

    def visit_Delete(self, node: ast.Delete) -> None:
        """``del context["a"]``."""
        for target in [target for target in node.targets if isinstance(target, ast.Subscript)]:
            self.remove(self.visit(target.value), self.visit(target.slice), node)

    def assign(self, target: ast.expr, value: ast.expr) -> None:
        """An assignment, pair by pair where both sides are tuples."""
        parts, values = getattr(target, "elts", []), getattr(value, "elts", [])
        starred = any(isinstance(element, ast.Starred) for element in (*parts, *values))
        if parts and len(parts) == len(values) and not starred:
            for part, element in zip(parts, values, strict=True):
                self.assign(part, element)
        else:
            self.bind(target, self.visit(value))

    def bind(self, target: ast.AST, value: Value) -> None:
        """Let a target hold a value."""
        match target:
            case ast.Name(id=name):
                self.keep(self.frame.names, name, value, target)
            case ast.Attribute(value=inner, attr=name):
                self.bind_attribute(self.visit(inner), name, value, target)
            case ast.Subscript(value=inner, slice=index):
                self.write(self.visit(inner), self.visit(index), value, target)
            case _:
                self.escape(target, value)
                for part in ast.iter_child_nodes(target):
                    self.bind(part, None)

    def keep(self, names: dict[str, Value], name: str, value: Value, node: ast.AST) -> None:
        """Let a name hold a value; what it held before, it may still hold where this isn't sure."""
        if not self.sure and names.get(name, value) != value:
            self.escape(node, names[name], value)
            value = None
        names[name] = value

    def bind_attribute(self, owner: Value, name: str, value: Value, node: ast.AST) -> None:
        """``self.context = context``; what a class defines under that name, but for plain values, may be called then."""
        if isinstance(owner, Instance):
            member = classes.member(owner.definition, name)
            if member and not isinstance(member[0], ast.Assign | ast.AnnAssign):
                self.escape(node, owner)
            self.keep(owner.attributes, name, value, node)
        if not isinstance(owner, Instance) or owner.escaped:
            self.escape(node, value)

    def write(self, owner: Value, key: Value, value: Value, node: ast.AST) -> None:
        """``context[key] = value``."""
        self.escape(node, value)
        name = _text(key)
        if owner != Ref() or name is None:
            self.escape(node, owner)
            return
        self.note("write", name, node)
        if name in {"status", "is_exit"}:
            status = _text(value) if name == "status" else "terminal_pass" if value == Const(True) else None
            self.flow.note_status(status or ANY, sure=self.sure)

    def remove(self, owner: Value, key: Value, node: ast.AST, *, required: bool = True) -> None:
        """``del context[key]`` and ``context.pop(key)``."""
        name = _text(key)
        if owner != Ref() or name is None:
            self.escape(node, owner)
        else:
            self.note("read", name, node, sure=required)
            self.note("delete", name, node)

    # Branches and loops

    def visit_If(self, node: ast.If) -> None:
        """Both branches may run, unless the condition is known."""
        first = node
        outer = self.sure
        known = self.visit(node.test)
        # A chain of `elif` is nested as deeply as it has branches.
        while not isinstance(known, Const) and len(node.orelse) == 1 and isinstance(node.orelse[0], ast.If):
            self.branch(node.body)
            self.sure = False
            node = node.orelse[0]
            known = self.visit(node.test)
        if isinstance(known, Const):
            self.block(node.body if known.value else node.orelse)
        else:
            self.branch(node.body)
            self.branch(node.orelse)
        if node is not first:
            self.sure = outer

    def visit_BinOp(self, node: ast.BinOp) -> None:
        """``a + b + c``, which is nested as deeply as it has terms."""
        operations = [node]
        while isinstance(node.left, ast.BinOp):
            node = node.left
            operations.append(node)
        value = self.visit(node.left)
        for operation in reversed(operations):
            self.escape(operation, value, self.visit(operation.right))
            value = None

    def visit_BoolOp(self, node: ast.BoolOp | ast.IfExp) -> None:
        """``a and b``, ``a if b else c``: only the first part certainly runs."""
        first, *others = [part for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)]
        self.escape(node, self.visit(first))
        with self.uncertain_block():
            self.escape(node, *map(self.visit, others))

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Value:
        """``not context["is_infer"]``."""
        known = self.visit(node.operand)
        return Const(not known.value) if isinstance(node.op, ast.Not) and isinstance(known, Const) else None

    def visit_Compare(self, node: ast.Compare) -> None:
        """``"a" in context``."""
        left, right, *_ = map(self.visit, (node.left, *node.comparators))
        with self.uncertain_block():
            self.read(right if right == Ref() else None, left, node)

    def visit_For(self, node: ast.For) -> None:
        """Round by round over what is written out; else what one round leaves, a next one finds."""
        before, rounds = self.sure, self.rounds(node.iter)
        certain = before and bool(rounds) and not any(map(_leaves, node.body))
        if not rounds:
            value = self.visit(node.iter)
            is_range = isinstance(node.iter, ast.Call) and source.dotted_name(node.iter.func) == "range"
            is_some = is_range and any("epoch" in word for word in source.words([node.target, node.iter]))
            self.sure = before and (is_some or (isinstance(value, Rounds) and not value.counted))
        counting, self.counting = self.counting, self.counting or self.is_counted(node.iter)
        for element in rounds or [ast.Constant(...)] * 2:
            self.assign(node.target, element)
            self.block(node.body)
            self.sure = certain
        self.sure, self.counting = before, counting
        self.branch(node.orelse)

    def is_counted(self, node: ast.expr) -> bool:
        """Whether a loop goes over a ``range`` whose ends are written out, or stand in the config."""
        ends = node.args if isinstance(node, ast.Call) and source.dotted_name(node.func) == "range" else []
        return bool(ends) and all(isinstance(self.visit(end), Const | Ref) for end in ends)

    def rounds(self, node: ast.expr) -> Sequence[ast.expr]:
        """The elements over which a loop goes, where they are written out."""
        elements: Sequence[ast.expr] = []
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Dict() as mapping, attr="items")):
                elements = [ast.Tuple([key, value]) for key, value in _pairs(mapping) or () if key]
            case ast.Tuple(elts=elements) | ast.List(elts=elements):
                pass
            case ast.Name(id=name) if name not in self.frame.names:
                literal = source.literal(self.frame.module, name)
                elements = literal.elts if isinstance(literal, ast.Tuple) else []
        return [] if any(isinstance(element, ast.Starred) for element in elements) else elements

    def visit_While(self, node: ast.While) -> None:
        """What one round leaves, the next one finds."""
        self.visit(node.test)
        for body in (node.body, node.body, node.orelse):
            self.branch(body)

    def visit_ListComp(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> None:
        """A comprehension may have no round; a generator may never run."""
        outer, self.frame.names = self.frame.names, dict(self.frame.names)
        (first, *others), before = node.generators, self.sure
        rounds = [] if others or first.ifs or isinstance(node, ast.GeneratorExp) else self.rounds(first.iter)
        self.visit(first.iter)
        self.sure = before and bool(rounds)
        counting, self.counting = self.counting, self.counting or self.is_counted(first.iter)
        for element in rounds or [ast.Constant(...)]:
            self.assign(first.target, element)
            parts = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
            self.escape(node, *map(self.visit, (*first.ifs, *others, *parts)))
        self.frame.names, self.sure, self.counting = outer, before, counting

    def visit_comprehension(self, node: ast.comprehension) -> None:
        """One of several loops."""
        self.visit(node.iter)
        self.bind(node.target, None)
        self.escape(node, *map(self.visit, node.ifs))

    def visit_Try(self, node: ast.Try) -> None:
        """Of what may be caught, nothing is sure."""
        (self.branch if node.handlers else self.block)(node.body)
        for body in (*(handler.body for handler in node.handlers), node.orelse):
            self.branch(body)
        self.block(node.finalbody)

    def visit_With(self, node: ast.With) -> None:
        """A context manager may swallow an error, but for some that are known."""
        calls = [item.context_expr for item in node.items]
        self.escape(node, *map(self.visit, calls))
        self.bind(ast.Tuple([item.optional_vars for item in node.items if item.optional_vars]), None)
        names = {classes.decorator_name(call).rpartition(".")[2] for call in calls}
        (self.block if names <= _TRANSPARENT else self.branch)(node.body)

    def visit_match_case(self, node: ast.match_case) -> None:
        """Any of the cases may be the one."""
        with self.uncertain_block():
            self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        """The caller continues with the value."""
        self.frame.return_values.append(self.visit(node.value) if node.value else Const(None))

    def visit_Global(self, node: ast.Global) -> None:
        """Other code sees what such a name holds."""
        self.mark_unknown(node)

    # Definitions

    def visit_FunctionDef(self, node: source.FunctionNode) -> None:
        """A function within a function is followed where it is called, or goes elsewhere."""
        function = self.frame.names[node.name] = self.visit_Lambda(node)
        if node.decorator_list:
            self.escape(node, function)
            self.frame.names[node.name] = None

    def visit_Lambda(self, node: FunctionNode) -> Value:
        """It sees the names around it, as they are when it is called."""
        self.escape(node, *map(self.visit, defaults(node.args).values()))
        return Function(node, self.frame.module, self.frame.names)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """A class within a function is not followed."""
        self.escape(node, *(self.visit(part) for part in ast.walk(node) if isinstance(part, ast.Name)))

    # Expressions

    def visit_Constant(self, node: ast.Constant) -> Value:
        """``"key"``."""
        return Const(node.value) if isinstance(node.value, Scalar) else None

    def visit_JoinedStr(self, node: ast.JoinedStr) -> Value:
        """``f"{name}_loader"``."""
        parts = [_text(self.visit(value)) for value in node.values]
        return None if None in parts else Const("".join(map(str, parts)))

    def visit_Name(self, node: ast.Name) -> Value:
        """A local name, or one of the module."""
        return self.frame.names[node.id] if node.id in self.frame.names else self.module_value(node.id, node)

    def visit_Attribute(self, node: ast.Attribute) -> Value:
        """``self.context``, ``super().run``, ``Keys.MODEL``, ``neighbour.function``."""
        owner, home = self.frame.owner, self.frame.home
        if owner and home and _is_super(node):
            return self.member(owner, classes.member(owner.definition, node.attr, home), node)
        return self.attribute(self.visit(node.value), node)

    def attribute(self, owner: Value, node: ast.Attribute) -> Value:
        """What an object, a class, or a module has under a name."""
        match owner:
            case Instance(attributes=attributes) if node.attr in attributes:
                return None if owner.escaped and isinstance(attributes[node.attr], Const) else attributes[node.attr]
            case Instance(definition=definition):
                return self.member(owner, classes.member(definition, node.attr), node)
            case source.Definition() if self.is_plain(owner):
                return self.member(None, classes.member(owner, node.attr), node)
            case Ref(()) if node.attr in _KIT:
                return self.use_kit(node.attr, node, Arguments())
            case Ref(("runner",)):
                return self.read(owner, Const(f".{node.attr}"), node)
            case Ref(()) if node.attr in _STEERING:
                return None
            case None if isinstance(node.value, ast.Name | ast.Attribute):
                return self.module_value(source.dotted_name(node), node)
        self.escape(node, owner)
        return None

    def visit_Subscript(self, node: ast.Subscript) -> Value:
        """``context["a"]``."""
        return self.read(self.visit(node.value), self.visit(node.slice), node)

    def read(self, owner: Value, key: Value, node: ast.AST) -> Value:
        """What lies under a key of the context; of a key below it, the first is noted."""
        if not isinstance(owner, Ref):
            self.escape(node, owner)
            return None
        path = (*owner.path, _text(key) or ANY)
        if ANY not in path and len(path) <= 2:
            self.note("read", path[0], node, item="".join(path[1:]))
        return Const(self.facts[path[0]]) if len(path) == 1 and path[0] in self.facts else Ref(path)

    # Calls

    def visit_Call(self, node: ast.Call) -> Value:
        """A method of the context, or a function that is followed with its arguments."""
        function = node.func
        if isinstance(function, ast.Attribute) and not _is_super(function):
            owner = self.visit(function.value)
            if owner == Ref() and function.attr in _KIT:
                return self.use_kit(function.attr, node, self.arguments(node))
            if isinstance(owner, Ref) and owner.path != ("runner",):
                name = f"call_{function.attr.strip('_')}" if owner == Ref() or function.attr == "get" else "call_other"
                method: Callable[..., Value] = getattr(self, name, self.call_other)
                return method(owner, node)
            callee = self.attribute(owner, function)
        else:
            callee = self.visit(function)
        arguments = self.arguments(node)
        if isinstance(callee, Function):
            return self.follow(callee, arguments, node)
        if isinstance(callee, source.Definition):
            return self.construct(callee, arguments, node)
        match function, arguments.values:
            case ast.Name("iter"), [Rounds() as rounds]:
                return rounds
            case ast.Name("next"), [Rounds(counted=False), *_] if self.counting:
                self.flow.inexact[self.location(node)] = None
        if source.dotted_name(function) not in _HARMLESS:
            self.escape(node, callee, *arguments.all())
        return None

    def arguments(self, node: ast.Call) -> Arguments:
        """The arguments of a call; those of one with stars are not followed."""
        values = [self.visit(argument) for argument in node.args]
        keywords = {keyword.arg or ANY: self.visit(keyword.value) for keyword in node.keywords}
        if ANY not in keywords and not any(isinstance(argument, ast.Starred) for argument in node.args):
            return Arguments(values, keywords)
        self.escape(node, *values, *keywords.values())
        return Arguments()

    def use_kit(self, name: str, node: ast.AST, arguments: Arguments) -> Value:
        """``context.batches("ctr", count=6)``, or the method alone."""
        reads, writes = _KIT[name]
        self.flow.ours[name] = False
        for key in reads:
            self.note("read", key, node)
        if reads and isinstance(phase := next(iter(arguments.all()), None), Const):
            self.read(Ref(("model",)), phase, node)
        for key in writes:
            self.note("write", key, node)
        counted = "count" in arguments.keywords or (name == "epochs" and bool(arguments.values))
        return Rounds(counted) if name in {"epochs", "batches"} else None

    def call_other(self, owner: Ref, node: ast.Call) -> None:
        """Any other method of the context, or of what lies in it."""
        name, arguments = getattr(node.func, "attr", ""), self.arguments(node)
        if not (owner.path or hasattr(Context, name) or name in classes.assigned_attributes(self.frame.module)):
            self.flow.misnamed[self.location(node.func)] = name
        ours = not owner.path or owner.path[0] in _OURS or name == "bind"
        if ours and Ref() in arguments.all():
            self.flow.ours[name] = False
        self.escape(node, *(value for value in arguments.all() if not (ours and value == Ref())))
        if name not in _READ_ONLY and hasattr(dict, name):
            self.escape(node, owner)

    def call_get(self, owner: Ref, node: ast.Call) -> Value:
        """``context.get("a")``, and ``context["a"].get("b")``."""
        key, *default = [*self.arguments(node).values, None]
        if len(default) > 1 and not owner.path:
            self.flow.optional.add(_text(key) or "")
        with self.uncertain_block():
            return self.read(owner, key, node)

    def call_pop(self, owner: Ref, node: ast.Call) -> None:
        """``context.pop("a", None)``."""
        key, *default = [*self.arguments(node).values, None]
        self.remove(owner, key, node, required=len(default) == 1)

    def call_setdefault(self, owner: Ref, node: ast.Call) -> None:
        """``context.setdefault("a", [])``, and ``context.__setitem__("a", [])``."""
        key, value, *_ = [*self.arguments(node).values, None, None]
        with self.uncertain_block():
            self.read(owner, key, node)
        self.write(owner, key, value, node)

    call_setitem = call_setdefault

    def call_update(self, _: Ref, node: ast.Call) -> None:
        """``context.update({"a": 1}, b=2)``."""
        for value in (*node.args, ast.Call(ast.Name("dict"), [], node.keywords)):
            self.write_all(value, node)

    def write_all(self, values: ast.expr, node: ast.AST) -> None:
        """Write the keys of a dict, or of a list of pairs, that is written out."""
        pairs = _pairs(_written_out(values, self.frame.node))
        for key, value in pairs or ():
            self.write(Ref(), self.visit(key) if key else None, self.visit(value), node)
        if pairs is None:
            self.escape(node, Ref(), self.visit(values))

    # What is followed

    def is_followed(self, module: str) -> bool:
        """Return whether the source of a module is followed: it is in the stage's own package, or in one of our stages."""
        own = source.package(self.definition.module.name)
        return source.package(module) in {own, "pipeline.stages", "pipeline.experiment"}

    def is_plain(self, definition: source.Definition) -> bool:
        """Whether the objects of a class are made, and their attributes found, as usual."""
        above, complete = classes.ancestry(definition)
        names = {name for cls in above if not source.is_ours(cls.module) for name in classes.own_names(cls)}
        special = {name for name in names if name.startswith("__") or name == "from_context"}
        return complete and special <= _PLAIN and all(self.is_followed(cls.module.name) for cls in above)

    def module_value(self, dotted: str, node: ast.AST) -> Value:
        """What a name of the module is: a class, a function, a plain value; ``neighbour.name`` too."""
        module, first = self.frame.module, dotted.partition(".")[0]
        if dotted in _BY_CODE:
            self.mark_unknown(node)
        binding = module.bindings.get(first)
        home = module.absolute(binding) if isinstance(binding, ast.ImportFrom) else module.name
        # What of ours is not followed does nothing to the context; the user's code has to be told that it is ours.
        is_known = self.is_followed(home) or (home.startswith("pipeline") and not source.is_ours(module))
        if first in self.frame.names or isinstance(binding, ast.Import) or not is_known:
            return None
        if target := source.find(module, dotted):
            return target if isinstance(target.node, ast.ClassDef) else Function(target.node, target.module)
        return self.plain_value(source.literal(module, dotted), dotted, module)

    def plain_value(self, written: ast.expr | None, dotted: str, module: source.Module) -> Value:
        """The value of a name or an attribute to which no file assigns another."""
        name = dotted.rpartition(".")[2]
        is_constant = isinstance(written, ast.Constant) and name not in classes.assigned_attributes(module)
        return self.visit(written) if written and is_constant else None

    def member(self, owner: Instance | None, binding: classes.Member | None, node: ast.AST) -> Value:
        """A method, bound to its object if there is one; what a property returns; a plain value."""
        statement, home = binding or (None, None)
        if home and isinstance(statement, ast.Assign | ast.AnnAssign):
            return self.plain_value(statement.value, getattr(node, "attr", ""), home.module)
        if home and isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            kind = classes.decoration(statement)
            method = Function(statement, home.module, {}, None if kind == "staticmethod" else owner, home)
            if kind != "?":
                return self.follow(method, Arguments(), node) if kind == "property" else method
        self.escape(node, owner if statement else None)
        return None

    def construct(self, definition: source.Definition, arguments: Arguments, node: ast.AST) -> Value:
        """An object of a class that can be followed, its constructor called."""
        followed = self.is_followed(definition.module.name) and self.is_plain(definition)
        instance = Instance(definition) if followed else None
        constructor = self.member(instance, classes.member(definition, "__init__"), node) if instance else None
        if isinstance(constructor, Function):
            self.follow(constructor, arguments, node)
        else:
            self.hand_over(arguments, definition.module, node)
        return instance

    def hand_over(self, arguments: Arguments, module: source.Module, node: ast.AST) -> None:
        """Give values to code that is not followed; ours does nothing to the context."""
        ours = source.is_ours(module)
        if ours and Ref() in arguments.all():
            self.flow.ours[module.name] = False
        self.escape(node, *(value for value in arguments.all() if not (isinstance(value, Ref) and ours)))

    def follow(self, function: Function, arguments: Arguments, node: ast.AST) -> Value:
        """Call a function."""
        arguments = arguments._replace(values=[function.owner, *arguments.values]) if function.owner else arguments
        if not self.is_followed(function.module.name) or function.node in self.active or len(self.active) == _DEEPEST:
            self.hand_over(arguments, function.module, node)
            return None
        owner = next((value for value in arguments.values[:1] if isinstance(value, Instance) and function.home), None)
        names = {**function.names, **self.parameters(function.node.args, arguments, node)}
        outer, before = self.frame, self.sure
        self.frame = replace(function, names=names, owner=owner, return_values=[])
        self.active.append(function.node)
        value = self.run(function.node)
        self.active.pop()
        self.frame, self.sure = outer, before
        return value

    def parameters(self, signature: ast.arguments, arguments: Arguments, node: ast.AST) -> dict[str, Value]:
        """What each parameter holds; what goes into ``*args`` or ``**kwargs`` is not followed."""
        positional = [parameter.arg for parameter in (*signature.posonlyargs, *signature.args)]
        values: dict[str, Value] = {part.arg: None for part in ast.walk(signature) if isinstance(part, ast.arg)}
        for name, default in defaults(signature).items():
            if isinstance(default, ast.Constant):
                values[name] = self.visit(default)
        others = [value for name, value in arguments.keywords.items() if name not in values]
        self.escape(node, *arguments.values[len(positional) :], *others)
        values |= zip(positional, arguments.values, strict=False)
        return values | {name: value for name, value in arguments.keywords.items() if name in values}

    def run(self, body: FunctionNode) -> Value:
        """The statements of a function; the value is what it returns, one of several."""
        if isinstance(body, ast.Lambda):
            return self.visit(body.body)
        self.sure = self.sure and not (source.is_generator(body) or isinstance(body, ast.AsyncFunctionDef))
        if source.is_ours(self.frame.module) and body.name != "__init__":
            self.flow.ours[body.name] = (self.sure and not self.flow.unknown) or self.flow.ours.get(body.name, False)
        if self.frame.home and body.name == self.method:
            self.note_declaration(self.frame.home)
        self.block(body.body)
        return_values = self.frame.return_values
        if len(return_values) == 1 and isinstance(body.body[-1], ast.Return):
            return return_values[0]
        self.escape(body, *return_values)
        return None


def _text(value: Value) -> str | None:
    return value.value if isinstance(value, Const) and isinstance(value.value, str) else None


def _written_out(node: ast.expr, function: ast.AST) -> ast.expr:
    """An expression; for a name that is used just for this, what it holds."""
    if not isinstance(node, ast.Name):
        return node
    names = [name for name in ast.walk(function) if isinstance(name, ast.Name) and name.id == node.id]
    for statement in ast.walk(function) if len(names) == 2 else ():
        if isinstance(statement, ast.Assign) and statement.targets == names[:1]:
            return statement.value
    return node


def _pairs(node: ast.expr) -> Sequence[tuple[ast.expr | None, ast.expr]] | None:
    """The keys and values of a dict, or of a list of pairs, that is written out."""
    match node:
        case ast.Dict(keys=keys, values=values):
            return list(zip(keys, values, strict=True))
        case ast.Call(func=ast.Name("dict"), args=[], keywords=keywords):
            return [(ast.Constant(keyword.arg), keyword.value) for keyword in keywords]
        case ast.List(elts=elements) if all(isinstance(pair, ast.Tuple) for pair in elements):
            return [(pair.elts[0], pair.elts[-1]) for pair in elements if isinstance(pair, ast.Tuple)]
    return None


def _is_super(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Call) and source.dotted_name(node.value.func) == "super"


def _leaves(statement: ast.stmt) -> bool:
    """Whether a statement may leave its function or its round of a loop."""
    block = ast.Module([statement], [])
    returns = any(isinstance(node, ast.Return) for node in source.own_nodes(block))
    jumps = source.own_nodes(block, beyond=(ast.For, ast.While))
    return returns or any(isinstance(node, ast.Break | ast.Continue) for node in jumps)
