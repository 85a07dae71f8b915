"""The values that are followed through a stage's source. Of anything else nothing is known, which is None."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from pipeline import classes, source
from pipeline.inference.flow import ANY, Path

if TYPE_CHECKING:
    import ast

    from pipeline.inference.account import Frame


@dataclass(frozen=True)
class Ref:
    """The context (the path is empty) or what lies in it at ``path``."""

    path: Path = ()

    def below(self, keys: Value) -> Ref:
        """What lies at a key of it."""
        name = keys.only if isinstance(keys, Const) else None
        return Ref((*self.path, name if isinstance(name, str) else ANY))


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
    """A tuple or list; ``complete`` as long as nobody may have changed it."""

    values: list[Value]
    complete: bool = True


@dataclass(eq=False)
class Entries:
    """A dict; ``complete`` as long as nobody may have changed it. A key that isn't known is ``*``."""

    values: dict[str, Value]
    complete: bool = True


@dataclass(frozen=True)
class Each:
    """Something to loop over whose items are all of one kind; ``some`` where there certainly is one."""

    value: Value
    some: bool = False


@dataclass(eq=False)
class Object:
    """An instance of a class that can be read; ``self`` above all."""

    definition: source.Definition
    attributes: dict[str, Value] = field(default_factory=dict)

    def method(self, name: str, after: source.Definition | None = None) -> Function | None:
        """The method of this name, as Python would find it; ``after`` as ``super()`` in that class would."""
        above, _ = classes.ancestry(self.definition)
        keys = [(each.module.file, each.name) for each in above]
        start = keys.index((after.module.file, after.name)) + 1 if after else 0
        for each in above[start:]:
            node = classes.methods(each).get(name)
            if node:
                return Function(node, each.module, owner=self, home=each)
        return None


@dataclass(frozen=True, eq=False)
class Function:
    """A function, method or lambda that can be followed.

    Attributes:
        node, module: its source.
        owner: the object that it is bound to.
        home: the class that defines it.
        outer: the call in which it was defined, for a function within a function.
    """

    node: source.FunctionNode | ast.Lambda
    module: source.Module
    owner: Object | None = None
    home: source.Definition | None = None
    outer: Frame | None = None


@dataclass(frozen=True)
class Class:
    """A class that can be read."""

    definition: source.Definition


@dataclass(frozen=True)
class Parent:
    """``super()`` of an object, in a method of the class ``home``."""

    owner: Object
    home: source.Definition


@dataclass(frozen=True, eq=False)
class Attribute:
    """An attribute, and so perhaps a method, of a value."""

    of: Value
    name: str


@dataclass(frozen=True)
class Imported:
    """What an installed package has at ``dotted`` in the module; looked up only where it matters."""

    module: source.Module
    dotted: str


@dataclass(frozen=True)
class Builtin:
    """A function of Python's own."""

    name: str


Value: TypeAlias = (
    Ref | Const | Items | Entries | Each | Object | Function | Class | Parent | Attribute | Imported | Builtin | None
)


def inside(value: Value) -> Iterable[Value]:
    """The values that a container holds."""
    if isinstance(value, Items):
        return value.values
    if isinstance(value, Entries | Object):
        return (value.values if isinstance(value, Entries) else value.attributes).values()
    return [value.value] if isinstance(value, Each) else []


def carries(value: Value, *, whole: bool = False, depth: int = 0) -> bool:
    """Whether something in the context can be reached from a value; ``whole``: the context itself."""
    if isinstance(value, Ref):
        return not (whole and value.path)
    if isinstance(value, Attribute):
        return carries(value.of, whole=whole, depth=depth + 1)
    return depth < 8 and any(carries(each, whole=whole, depth=depth + 1) for each in inside(value))


def merge(one: Value, other: Value) -> Value:
    """What is known of a value that is one of two."""
    if one is other or one == other:
        return one
    if isinstance(one, Const) and isinstance(other, Const):
        return Const(one.choices | other.choices)
    if isinstance(one, Ref) and isinstance(other, Ref) and len(one.path) == len(other.path):
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


def has_items(value: Value) -> bool:
    """Whether a loop over a value certainly comes to an item: a loader without a batch is an error of its own."""
    if isinstance(value, Each):
        return value.some
    if isinstance(value, Ref):
        return len(value.path) > 1 and value.path[0] == "dataset"
    return isinstance(value, Object) and value.definition.name.endswith("Loader")
