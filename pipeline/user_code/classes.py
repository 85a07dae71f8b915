"""The bases, methods, parameters and annotations of a class whose source was read."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from pipeline.errors import one_of
from pipeline.user_code import source
from pipeline.user_code.source import once

_TYPES: dict[str, tuple[str, tuple[type, ...]]] = {
    "int": ("an integer", (int,)),
    "float": ("a number", (int, float)),
    "str": ("a string", (str,)),
    "bool": ("true or false", (int,)),
    "list": ("a list", (list,)),
    "dict": ("a mapping", (dict,)),
    "None": ("null", (type(None),)),
}
# Type -> how it is described, and of what types its values may be in a config.


class Annotation(NamedTuple):
    """The annotation of a parameter.

    Attributes:
        types: the plain types.
        text: the parameter as it is written, with its place.
    """

    types: tuple[str, ...]
    text: str

    def refuses(self, value: Any) -> str | None:
        """What is wrong with a value of a config; None if nothing is, or unknown."""
        unknown = isinstance(value, str) and "${" in value  # a reference to nothing, which is a fault of its own
        if unknown or _kind(value) not in _TYPES or any(_takes(name, value) for name in self.types):
            return None
        return f"is {describe_value(value)}; write {' or '.join(_TYPES[name][0] for name in self.types)} ({self.text})"


def _takes(name: str, value: Any) -> bool:
    # 1e3 is a float in YAML; who writes it for a size may get away with it.
    return isinstance(value, _TYPES[name][1]) or (name == "int" and isinstance(value, float) and value.is_integer())


def describe_value(value: Any) -> str:
    """A value of a config with its type: ``'two', a string``."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value!r}, {_TYPES.get(_kind(value), [_kind(value)])[0]}"


def _kind(value: Any) -> str:
    return "None" if value is None else type(value).__name__


def annotation(parameter: ast.arg, default: ast.expr | None, module: source.Module) -> Annotation | None:
    """The annotation of a parameter; None: unknown."""
    types: dict[str, None] = {}
    with suppress(RecursionError):
        types = _types(parameter.annotation, module) if parameter.annotation else {}
    if parameter.annotation is None or not types:
        return None
    # `size: int = None` takes null, whatever its annotation says.
    if isinstance(default, ast.Constant) and _kind(default.value) in _TYPES:
        types |= {} if any(_takes(name, default.value) for name in types) else {_kind(default.value): None}
    text = source.text_of(parameter.annotation).strip("'")
    return Annotation(tuple(types), f"{module.file.name}:{parameter.lineno}: {parameter.arg}: {text}")


def defaults(arguments: ast.arguments) -> dict[str, ast.expr]:
    """Parameter -> its default."""
    positional = [parameter.arg for parameter in (*arguments.posonlyargs, *arguments.args)]
    last = dict(zip(reversed(positional), reversed(arguments.defaults), strict=False))
    keywords = zip((parameter.arg for parameter in arguments.kwonlyargs), arguments.kw_defaults, strict=True)
    return {**last, **{name: value for name, value in keywords if value}}


def _types(node: ast.expr, module: source.Module) -> dict[str, None]:
    """The plain types of an annotation, in their order; none if it has any other."""
    parts: list[ast.expr] = []
    match node:
        case ast.Constant(value=None):
            return {"None": None}
        case ast.Constant(value=str(text)):
            with suppress(SyntaxError, ValueError, MemoryError, RecursionError):
                parts = [ast.parse(text, mode="eval").body]
        case ast.BinOp(op=ast.BitOr()):
            parts = [node.left, node.right]
        case ast.Subscript(value=generic) if (name := _name(generic, module)) in {"Optional", "Union"}:
            parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            parts = [*parts, ast.Constant(None)] if name == "Optional" else parts
        case _:
            name = _name(node.value if isinstance(node, ast.Subscript) else node, module)
            return {name: None} if name in _TYPES else {}
    types = [_types(part, module) for part in parts]
    return {name: None for part_types in types for name in part_types} if all(types) else {}


def _name(node: ast.expr, module: source.Module) -> str:
    """The name of a built-in type or one of ``typing``; empty if the module may redefine it."""
    name = source.text_of(node).removeprefix("typing.")
    binding = module.bindings.get(name)
    known = not module.stars if binding is None else isinstance(binding, ast.ImportFrom) and binding.module == "typing"
    return {"List": "list", "Dict": "dict"}.get(name, name) if known else ""


@dataclass(frozen=True)
class Parameters:
    """The keyword parameters of a callable; ``any_name``: it has ``**kwargs``.

    ``annotations`` has those whose annotation says which values of a config they take.
    """

    names: tuple[str, ...]
    required: tuple[str, ...]
    any_name: bool
    positional: int = 0
    annotations: Mapping[str, Annotation] = field(default_factory=dict)

    def argument_faults(self, arguments: Mapping[str, Any], what: str) -> dict[str, str]:
        """The faults of keyword arguments: argument -> message; missing ones are under ``""``.

        Args:
            arguments: the arguments as plain values of a config.
            what: who takes them, for the messages.
        """
        faults = {}
        for name, value in arguments.items():
            if name in self.annotations:
                if refused := self.annotations[name].refuses(value):
                    faults[name] = f"{what}'s argument {name} {refused}"
            elif name not in self.names and not self.any_name:
                accepted = one_of(name, self.names) if self.names else "; it takes no arguments"
                faults[name] = f"{what} has no argument '{name}'{accepted}"
        if missing := [name for name in self.required if name not in arguments]:
            listing = f"the argument{'s' if len(missing) > 1 else ''} {', '.join(missing)}"
            faults[""] = f"{what} needs {listing}; add {'them' if len(missing) > 1 else 'it'}"
        return faults

    def without(self, names: Sequence[str]) -> Parameters:
        """The same without parameters that the caller passes anyway."""
        others, required = ([name for name in kept if name not in names] for kept in (self.names, self.required))
        annotations = {name: hint for name, hint in self.annotations.items() if name not in names}
        return Parameters(tuple(others), tuple(required), self.any_name, annotations=annotations)

    def without_first(self) -> Parameters:
        """The same without the first parameter, which the caller passes by position."""
        return self.without(self.names[: min(self.positional, 1)])


# The bases of a class, and whether all of them are known.
Ancestry: TypeAlias = tuple[list[source.Definition], bool]


@once
def ancestry(definition: source.Definition) -> Ancestry:
    """The class and its bases in method resolution order, and whether all of them are known.

    What a function makes cannot be told.
    """
    # A class waits until all its bases are done. A chain of bases may be longer than Python's stack.
    done: dict[ast.AST, Ancestry] = {}
    waiting = [definition]
    open_nodes = {definition.node}
    while waiting:
        current = waiting[-1]
        parents, complete = _parents(current)
        missing = next((base for base in parents if base.node not in done and base.node not in open_nodes), None)
        if missing:
            waiting.append(missing)
            open_nodes.add(missing.node)
            continue
        # A base that is still open derives from this class itself, which Python refuses.
        above = [done[base.node] for base in parents if base.node in done]
        complete = complete and len(above) == len(parents) and all(whole for _, whole in above)
        done[current.node] = [current, *_merge_bases([order for order, _ in above])], complete
        open_nodes.remove(waiting.pop().node)
    return done[definition.node]


def _merge_bases(orders: list[list[source.Definition]]) -> list[source.Definition]:
    """Merge the orders of the bases of a class, given in the order in which it names them."""
    merged: list[list[source.Definition]] = []
    known: set[ast.AST] = set()
    for order in orders:
        # The order of an earlier base has all that a class from which that base derives would add.
        if order[0].node not in known:
            merged.append(order)
            known |= {each.node for each in order}
    if len(merged) < 2:
        return [each for order in merged for each in order]
    return _merge_orders([*merged, [order[0] for order in orders]])


@once
def _parents(definition: source.Definition) -> Ancestry:
    """The bases that a class names and whose source is known, and whether these are all."""
    node = definition.node
    if not isinstance(node, ast.ClassDef):
        return [], False
    names = [name for name in map(source.base_name, node.bases) if not _adds_nothing(definition.module, name)]
    found = [source.find(definition.module, name) for name in names]
    parents = [parent for parent in found if parent and isinstance(parent.node, ast.ClassDef)]
    return parents, len(parents) == len(names) and not (node.decorator_list or node.keywords)


def _merge_orders(orders: list[list[source.Definition]]) -> list[source.Definition]:
    """Merge the orders of several bases into one, as Python's method resolution does."""
    definitions = {each.node: each for order in orders for each in order}
    # Nodes are compared by identity, which costs no call.
    waiting = [[each.node for each in order] for order in orders]
    linearization: list[source.ClassNode | source.FunctionNode] = []
    while len(waiting) > 1:
        # Where none can be first, Python refuses the class.
        first = next(
            (order[0] for order in waiting if not any(order[0] in other[1:] for other in waiting)), waiting[0][0]
        )
        linearization.append(first)
        others = [[node for node in order if node is not first] for order in waiting]
        waiting = [order for order in others if order]
    linearization += [node for order in waiting for node in order]
    return [definitions[node] for node in linearization]


def _adds_nothing(module: source.Module, name: str) -> bool:
    binding = module.bindings.get(name.partition(".")[0])
    if isinstance(binding, ast.ImportFrom):
        return name in {"ABC", "Generic", "Protocol"} and binding.module in {"abc", "typing", "typing_extensions"}
    return name == "object" if binding is None else name == "abc.ABC" and isinstance(binding, ast.Import)


def is_subclass(definition: source.Definition, base: str) -> bool | None:
    """Whether a class derives from ``module:Name``; None: unknown, as for a function."""
    above, complete = ancestry(definition)
    derives = any(f"{cls.module.name}:{cls.name}" == base for cls in above)
    return derives or (False if complete else None)


@once
def methods(definition: source.Definition) -> dict[str, source.FunctionNode]:
    """The methods that the class itself defines."""
    return {node.name: node for node in definition.node.body if isinstance(node, source.FunctionNode)}


@once
def own_names(definition: source.Definition) -> frozenset[str]:
    """The names that the class itself defines in any way."""
    return frozenset(_own_bindings(definition))


@once
def _own_bindings(definition: source.Definition) -> dict[str, ast.stmt]:
    """What the class itself binds each name to at last; a ``pass`` where that depends on a condition."""
    bindings: dict[str, ast.stmt] = {}
    for statement, sometimes in source.top_level(definition.node.body):
        bindings |= dict.fromkeys(source.bound_names(statement), ast.Pass() if sometimes else statement)
    return bindings


# The statement that binds a name in a class, and the class.
Member: TypeAlias = tuple[ast.stmt, source.Definition]


def member(definition: source.Definition, name: str, after: source.Definition | None = None) -> Member | None:
    """What a class has under a name, its bases looked through as Python does; ``after``: as ``super()`` there would.

    Where that depends on a condition, the statement is a ``pass``.
    """
    above, _ = ancestry(definition)
    nodes = [cls.node for cls in above]
    start = nodes.index(after.node) + 1 if after and after.node in nodes else 0
    for cls in above[start:]:
        if statement := _own_bindings(cls).get(name):
            return statement, cls
    return None


def declared_keys(definition: source.Definition, attribute: str, method: str) -> tuple[str, ...]:
    """The literal ``reads`` or ``writes`` of a class, or of a base whose method it does not override."""
    declaration, home = member(definition, attribute), member(definition, method)
    above = ancestry(definition)[0]
    applies = declaration and home and above.index(declaration[1]) <= above.index(home[1])
    return own_declaration(declaration[1], attribute) if declaration and applies else ()


def own_declaration(definition: source.Definition, attribute: str) -> tuple[str, ...]:
    """The literal ``reads`` or ``writes`` of the class itself; empty where there is none to see."""
    statement, home = member(definition, attribute) or (None, None)
    value = statement.value if isinstance(statement, ast.Assign | ast.AnnAssign) and home == definition else None
    with suppress(ValueError, TypeError, SyntaxError, RecursionError):
        keys = ast.literal_eval(value) if value else ()
        return tuple(map(str, keys)) if isinstance(keys, tuple | list) else ()
    return ()


# Decorators that leave a method as it is.
_MARKS = {"abstractmethod", "wraps", "override", "final", "hookimpl", "no_grad", "inference_mode", "enable_grad"}


def decoration(node: source.FunctionNode) -> str:
    """What decorators make of a function: ``""``, ``property``, ``staticmethod``, ``classmethod``, or ``?`` for anything else."""
    names = [decorator_name(decorator).rpartition(".")[2] for decorator in node.decorator_list]
    kinds = ["property" if name == "cached_property" else name for name in names if name not in _MARKS]
    is_plain = bool(kinds) and "." not in decorator_name(node.decorator_list[-1]).removeprefix("functools.")
    if len(kinds) == 1 and kinds[0] in {"property", "staticmethod", "classmethod"} and is_plain:
        return kinds[0]
    return "?" if kinds else ""


def decorator_name(decorator: ast.expr) -> str:
    """Return the name of a decorator without its arguments, such as ``functools.wraps``; ``""`` if it has none."""
    return source.dotted_name(decorator.func if isinstance(decorator, ast.Call) else decorator)


@once
def assigned_attributes(*modules: source.Module) -> frozenset[str]:
    """The names of attributes that modules, or those that they import relatively, assign to whatever object."""
    return frozenset().union(*map(_own_assigned_attributes, source.neighbours(*modules)))


@once
def _own_assigned_attributes(module: source.Module) -> frozenset[str]:
    """The names of attributes that the file itself assigns to whatever object."""
    nodes = (node for statement in module.body for node in ast.walk(statement))
    return frozenset(node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))


def abstract_methods(definition: source.Definition) -> list[str]:
    """The abstract methods without an implementation; empty if unknown."""
    above, complete = ancestry(definition)
    if not complete:
        return []
    last: dict[str, source.FunctionNode | None] = {}
    for cls in reversed(above):
        last |= methods(cls) | dict.fromkeys(own_names(cls) - methods(cls).keys())
    marks = {name: map(decorator_name, node.decorator_list) for name, node in last.items() if node}
    return [name for name, texts in marks.items() if any("abstractmethod" in text for text in texts)]


def undefined_methods(definition: source.Definition, names: Sequence[str], base: str = "") -> list[str]:
    """The methods that certainly neither a class nor its bases define; ``base``'s, ``module:Name``, don't count."""
    above, complete = ancestry(definition)
    if not complete:
        return []
    inherited = {up for cls in above if f"{cls.module.name}:{cls.name}" == base for up in ancestry(cls)[0]}
    own = [cls for cls in above if cls not in inherited]
    files = dict.fromkeys(cls.module.file for cls in own)
    text = "".join(file.read_text(encoding="utf-8", errors="replace") for file in files)
    if re.search(r"setattr|__getattr|__dict__|vars\(", text):
        return []
    missing = [name for name in names if not any(name in own_names(cls) for cls in own)]
    # `self.compute = …` defines it as well.
    return [name for name in missing if not re.search(rf"\.{name}\b(?!\s*\()", text)]


def count_positional(arguments: ast.arguments) -> int:
    """How many parameters may be given by position."""
    return len(arguments.posonlyargs) + len(arguments.args)


def takes(arguments: ast.arguments, count: int) -> bool:
    """Whether a function can be called with so many arguments, by position."""
    positional = count_positional(arguments)
    fits = positional - len(arguments.defaults) <= count and (positional >= count or arguments.vararg is not None)
    return fits and None not in arguments.kw_defaults


def parameters(definition: source.Definition) -> Parameters | None:
    """The parameters of the class or function; None: unknown."""
    if not isinstance(definition.node, ast.ClassDef):
        return None if definition.node.decorator_list else _parameters(definition.node, definition.module, skip=0)
    above, complete = ancestry(definition)
    for cls in above:
        node = cls.node
        if isinstance(node, ast.ClassDef) and (node.decorator_list or node.keywords or "__new__" in methods(cls)):
            return None
        if constructor := methods(cls).get("__init__"):
            return None if constructor.decorator_list else _parameters(constructor, cls.module, skip=1)
        # Of several bases, one that cannot be read may come before the next.
        single = isinstance(node, ast.ClassDef) and len(node.bases) == 1
        if "__init__" in own_names(cls) or not (complete or single):
            return None
    return Parameters((), (), any_name=False) if complete else None


def method_parameters(definition: source.Definition, name: str) -> Parameters | None:
    """The parameters of a method; None: unknown."""
    method, home = member(definition, name) or (None, definition)
    if isinstance(method, source.FunctionNode) and not method.decorator_list and ancestry(definition)[1]:
        return _parameters(method, home.module, skip=1)
    return None


def _parameters(node: source.FunctionNode, module: source.Module, skip: int) -> Parameters:
    positional = [*node.args.posonlyargs, *node.args.args][skip:]
    every, optional = [*positional, *node.args.kwonlyargs], defaults(node.args)
    names = tuple(parameter.arg for parameter in every)
    required = tuple(name for name in names if name not in optional)
    annotations = {part.arg: hint for part in every if (hint := annotation(part, optional.get(part.arg), module))}
    return Parameters(names, required, node.args.kwarg is not None, len(positional), annotations)


_PERHAPS = (
    ast.If, ast.While, ast.Try, ast.Match, ast.IfExp, ast.BoolOp, ast.Lambda, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef,
    ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp,
)  # fmt: skip
# Nodes whose parts may not be evaluated.


def supers(node: ast.AST, home: source.Definition) -> Iterator[ast.Attribute]:
    """Each ``super().m`` that is evaluated whenever a method of the class ``home`` runs, at least where its loops run."""
    for current in certain_nodes(node):
        match current:
            case ast.Attribute(value=ast.Call(func=ast.Name("super"), args=arguments), ctx=ast.Load()):
                own = not arguments or (len(arguments) == 2 and source.dotted_name(arguments[0]) == home.name)
                if own and "super" not in home.module.bindings:
                    yield current


def certain_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Each node that is evaluated whenever a function runs, at least where its loops run."""
    # None stands for the end of a statement behind which nothing is certain.
    waiting: list[ast.AST | None] = [node]
    while waiting and (current := waiting.pop()):
        yield current
        if isinstance(current, _LEAVING):
            waiting.append(None)
        if current is node or not _may_be_left_out(current):
            waiting += reversed(list(ast.iter_child_nodes(current)))
        elif any(isinstance(below, _LEAVING) for below in ast.walk(current)):
            return


_LEAVING = (ast.Return, ast.Raise, ast.Break, ast.Continue)


def _may_be_left_out(node: ast.AST) -> bool:
    """Whether parts of a node may not be evaluated, or an error in them may be swallowed."""
    if isinstance(node, ast.With | ast.AsyncWith):
        return any(source.mentions(item, "suppress") for item in node.items)
    return isinstance(node, _PERHAPS)


def calls_super(definition: source.Definition, method: str) -> bool:
    """Whether a method of a class certainly calls the same method of its bases."""
    node = methods(definition).get(method)
    return node is not None and any(call.attr == method for call in supers(node, definition))
