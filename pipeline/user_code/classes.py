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
    if parameter.annotation is None or not (types := _types(parameter.annotation, module)):
        return None
    # `size: int = None` takes null, whatever its annotation says.
    if isinstance(default, ast.Constant) and _kind(default.value) in _TYPES:
        types |= {} if any(_takes(name, default.value) for name in types) else {_kind(default.value): None}
    text = ast.unparse(parameter.annotation).strip("'")
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
            with suppress(SyntaxError):
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
    name = ast.unparse(node).removeprefix("typing.")
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


def ancestry(definition: source.Definition, below: Sequence[source.Definition] = ()) -> Ancestry:
    """The class and its bases in method resolution order, and whether all of them are known.

    What a function makes cannot be told.
    """
    node = definition.node
    if not isinstance(node, ast.ClassDef):
        return [definition], False
    orders = list[list[source.Definition]]()
    complete = not (node.decorator_list or node.keywords)
    names = [name for name in map(source.base_name, node.bases) if not _adds_nothing(definition.module, name)]
    for name in names:
        parent = source.find(definition.module, name)
        if parent is None or not isinstance(parent.node, ast.ClassDef) or parent in (*below, definition):
            complete = False
            continue
        above, whole = ancestry(parent, (*below, definition))
        complete = complete and whole
        orders.append(above)
    return [definition, *_merge_orders([*orders, [order[0] for order in orders]])], complete


# The bases of a class, and whether all of them are known.
Ancestry: TypeAlias = tuple[list[source.Definition], bool]


def _merge_orders(orders: list[list[source.Definition]]) -> list[source.Definition]:
    """Merge the orders of several bases into one, as Python's method resolution does."""
    linearization: list[source.Definition] = []
    while orders := [order for order in orders if order]:
        # Where none can be first, Python refuses the class.
        first = next((order[0] for order in orders if not any(order[0] in other[1:] for other in orders)), orders[0][0])
        linearization.append(first)
        orders = [[definition for definition in order if definition != first] for order in orders]
    return linearization


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


def methods(definition: source.Definition) -> dict[str, source.FunctionNode]:
    """The methods that the class itself defines."""
    return {node.name: node for node in definition.node.body if isinstance(node, source.FunctionNode)}


def own_names(definition: source.Definition) -> set[str]:
    """The names that the class itself defines in any way."""
    return {name for statement, _ in source.top_level(definition.node.body) for name in source.bound_names(statement)}


# The statement that binds a name in a class, and the class.
Member: TypeAlias = tuple[ast.stmt, source.Definition]


def member(definition: source.Definition, name: str, after: source.Definition | None = None) -> Member | None:
    """What a class has under a name, its bases looked through as Python does; ``after``: as ``super()`` there would.

    Where that depends on a condition, the statement is a ``pass``.
    """
    above, _ = ancestry(definition)
    for cls in above[above.index(after) + 1 if after in above else 0 :]:
        if bindings := [pair for pair in source.top_level(cls.node.body) if name in source.bound_names(pair[0])]:
            statement, sometimes = bindings[-1]
            return ast.Pass() if sometimes else statement, cls
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
    names = [ast.unparse(decorator).partition("(")[0].rpartition(".")[2] for decorator in node.decorator_list]
    kinds = ["property" if name == "cached_property" else name for name in names if name not in _MARKS]
    is_plain = bool(kinds) and "." not in ast.unparse(node.decorator_list[-1]).replace("functools.", "")
    if len(kinds) == 1 and kinds[0] in {"property", "staticmethod", "classmethod"} and is_plain:
        return kinds[0]
    return "?" if kinds else ""


@once
def assigned_attributes(module: source.Module) -> frozenset[str]:
    """The names of attributes that a module, or one that it imports relatively, assigns to whatever object."""
    statements = (statement for neighbour in source.neighbours(module) for statement in neighbour.body)
    nodes = (node for statement in statements for node in ast.walk(statement))
    return frozenset(node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))


def abstract_methods(definition: source.Definition) -> list[str]:
    """The abstract methods without an implementation; empty if unknown."""
    above, complete = ancestry(definition)
    if not complete:
        return []
    last: dict[str, source.FunctionNode | None] = {}
    for cls in reversed(above):
        last |= methods(cls) | dict.fromkeys(own_names(cls) - methods(cls).keys())
    marks = {name: map(ast.unparse, node.decorator_list) for name, node in last.items() if node}
    return [name for name, texts in marks.items() if any("abstractmethod" in text for text in texts)]


def undefined_methods(definition: source.Definition, names: Sequence[str], base: str = "") -> list[str]:
    """The methods that certainly neither a class nor its bases define; ``base``'s, ``module:Name``, don't count."""
    above, complete = ancestry(definition)
    if not complete:
        return []
    inherited = [up for cls in above if f"{cls.module.name}:{cls.name}" == base for up in ancestry(cls)[0]]
    own = [cls for cls in above if cls not in inherited]
    text = "".join(cls.module.file.read_text(encoding="utf-8", errors="replace") for cls in own)
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
    match node:
        case ast.Attribute(value=ast.Call(func=ast.Name("super"), args=arguments), ctx=ast.Load()):
            own = not arguments or (len(arguments) == 2 and ast.unparse(arguments[0]) == home.name)
            if own and "super" not in home.module.bindings:
                yield node
    for child in ast.iter_child_nodes(node):
        swallowed = isinstance(child, ast.With) and "suppress" in ast.unparse(child)
        if not isinstance(child, _PERHAPS) and not swallowed:
            yield from supers(child, home)
        if any(isinstance(below, ast.Return | ast.Raise | ast.Break | ast.Continue) for below in ast.walk(child)):
            return


def calls_super(definition: source.Definition, method: str) -> bool:
    """Whether a method of a class certainly calls the same method of its bases."""
    node = methods(definition).get(method)
    return node is not None and any(call.attr == method for call in supers(node, definition))
