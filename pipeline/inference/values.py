"""The values that are followed through a stage's source.

Of anything else nothing is known, which is None: something that is certainly neither the context nor anything in it,
because whatever is no longer followed has escaped first (:meth:`pipeline.inference.account.Account.escape`).
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from pipeline import source
from pipeline.inference.flow import ANY, Path

if TYPE_CHECKING:
    from pipeline.inference.frame import Frame

_MOST_CHOICES = 16


@dataclass(frozen=True)
class Ref:
    """The context (the path is empty) or what lies in it at ``path``."""

    path: Path = ()

    def below(self, key: Value) -> Ref:
        """What lies at a key of it."""
        return Ref((*self.path, text_of(key) or ANY))


@dataclass(frozen=True)
class Const:
    """A number, string, truth value or None that is one of ``choices``."""

    choices: frozenset[object]

    @property
    def only(self) -> object:
        """The one that it is; None where there are several."""
        return next(iter(self.choices)) if len(self.choices) == 1 else None


@dataclass(eq=False)
class Items:
    """A tuple or list, or what goes through some.

    Attributes:
        values: the items in their order.
        complete: as long as nobody may have changed it.
        views: those that it goes through, once.
    """

    values: list[Value]
    complete: bool = True
    views: tuple[Items, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether it has exactly these items."""
        return self.complete and all(each.whole for each in self.views)


@dataclass(eq=False)
class Entries:
    """A dict that stands in the source.

    Attributes:
        values: its values by key; a key that isn't known is ``*``.
        complete: as long as nobody may have changed it.
        loose: the keys that may not be there.
        at: where in the context it lies too.
    """

    values: dict[str, Value]
    complete: bool = True
    loose: set[str] = field(default_factory=set)
    at: set[Path] = field(default_factory=set)

    @property
    def whole(self) -> bool:
        """Whether it has exactly these keys."""
        return self.complete and not self.loose and ANY not in self.values


@dataclass(frozen=True)
class Each:
    """Something to loop over whose items are all of one kind; ``some`` where there certainly is one."""

    value: Value
    some: bool = False


@dataclass(eq=False)
class Object:
    """An instance of a class that can be read; ``self`` above all.

    Attributes:
        definition: its class.
        attributes: those that were assigned.
        shared: whether code that cannot be followed, or runs later, may assign them too.
        untold: whether some are assigned of which not even the name is known.
    """

    definition: source.Definition
    attributes: dict[str, Value] = field(default_factory=dict)
    shared: bool = False
    untold: bool = False


@dataclass(frozen=True)
class Function:
    """A function, method or lambda that can be followed.

    Attributes:
        node, module: its source.
        owner: the object or class that it is bound to.
        home: the class that defines it.
        outer: the call in which it was defined, for a function within a function.
    """

    node: source.FunctionNode | ast.Lambda
    module: source.Module
    owner: Object | Class | None = None
    home: source.Definition | None = None
    outer: Frame | None = None


@dataclass(frozen=True)
class Class:
    """A class that can be read."""

    definition: source.Definition


@dataclass(frozen=True)
class Parent:
    """``super()`` of an object, in a method of the class ``home``."""

    owner: Object | Class
    home: source.Definition


@dataclass(frozen=True)
class Attribute:
    """An attribute, and so perhaps a method, of a value."""

    of: Value
    name: str


@dataclass(frozen=True)
class Imported:
    """What a module imports under ``dotted``; looked up only where it matters."""

    module: source.Module
    dotted: str


@dataclass(frozen=True)
class Builtin:
    """A function of Python's own."""

    name: str


Value: TypeAlias = (
    Ref | Const | Items | Entries | Each | Object | Function | Class | Parent | Attribute | Imported | Builtin | None
)
NOTHING = Const(frozenset({None}))
"""Python's None."""


def text_of(value: Value) -> str | None:
    """The string that a value certainly is."""
    only = value.only if isinstance(value, Const) else None
    return only if isinstance(only, str) else None


def inside(value: Value) -> Iterable[Value]:
    """The values that can be reached from another."""
    match value:
        case Items():
            return value.values
        case Entries():
            return list(value.values.values())
        case Object():
            return list(value.attributes.values())
        case Each():
            return [value.value]
        case Attribute():
            return [value.of]
        case Parent() | Function():
            return [value.owner]
    return []


def carries(value: Value) -> bool:
    """Whether something in the context can be reached from a value."""
    return any(isinstance(each, Ref) for each in reachable(value))


def matters(value: Value) -> bool:
    """Whether a value brings the context itself along, or a method or function within a function, that may."""
    return any(
        each == Ref() or (isinstance(each, Function) and (each.owner or each.outer)) for each in reachable(value)
    )


def reachable(value: Value) -> Iterable[Value]:
    """A value and all that can be reached from it."""
    waiting, seen = [value], set[int]()
    while waiting:
        each = waiting.pop()
        if id(each) not in seen:
            seen.add(id(each))
            yield each
            waiting += inside(each)


def merge(one: Value, other: Value) -> Value:
    """What is known of a value that is one of two."""
    if one is other or one == other:
        return one
    if isinstance(one, Const) and isinstance(other, Const):
        choices = one.choices | other.choices
        return Const(choices) if len(choices) <= _MOST_CHOICES else None
    if isinstance(one, Ref) and isinstance(other, Ref) and one.path and len(one.path) == len(other.path):
        return Ref(tuple(a if a == b else ANY for a, b in zip(one.path, other.path, strict=True)))
    return None


def literal(value: object) -> Value:
    """A plain value, such as an argument that the config gives."""
    if isinstance(value, str | int | float | bool | None):
        return Const(frozenset({value}))
    if isinstance(value, list | tuple):
        return Items([literal(each) for each in value])
    if isinstance(value, Mapping):
        return Entries({str(name): literal(each) for name, each in value.items()})
    return None


def constant(node: ast.expr | None) -> Value:
    """A plain value that stands in the source and that nobody can change."""
    try:
        value = ast.literal_eval(node) if node else ...
    except (ValueError, TypeError, SyntaxError, RecursionError):
        return None
    return literal(value) if _is_fixed(value) else None


def _is_fixed(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_fixed, value))
    return isinstance(value, str | int | float | bool | None)


def has_items(value: Value) -> bool:
    """Whether a loop over a value certainly comes to an item: a loader without a batch is an error of its own."""
    match value:
        case Each():
            return value.some
        case Items():
            return value.whole and bool(value.values)
        case Ref():
            return len(value.path) > 1 and value.path[0] == "dataset"
    return False
