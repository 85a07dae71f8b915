"""The values that are followed through a stage's source.

Of anything else nothing is known, which is None: something that is certainly neither the context nor anything in it,
because whatever is no longer followed has escaped first (:meth:`pipeline.inference.account.Account.escape`).
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from pipeline.inference.containers import Copy, Each, Entries, Items, now
from pipeline.inference.flow import ANY, Path
from pipeline.user_code import source

if TYPE_CHECKING:
    from pipeline.inference.frame import Frame


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
class Object:
    """An instance of a class that can be read; ``self`` above all.

    Attributes:
        definition: its class.
        attributes: those that were assigned.
        shared: whether code that cannot be followed, or runs later, may assign them too.
        untold: whether some are assigned of which not even the name is known.
        born: when it came into being.
    """

    definition: source.Definition
    attributes: dict[str, Value] = field(default_factory=dict)
    shared: bool = False
    untold: bool = False
    born: int = field(default_factory=now, repr=False)


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
    """What a module imports; looked up only where it matters.

    Attributes:
        module: the module.
        dotted: its name there, with the attributes that were asked for.
        binding: the import statement.
    """

    module: source.Module
    dotted: str
    binding: ast.Import | ast.ImportFrom

    @property
    def package(self) -> str:
        """The package that has it; ``""`` for a relative import."""
        return self.home.partition(".")[0]

    @property
    def home(self) -> str:
        """Its full name: ``sys.exit``, however it was imported; it begins with a dot for a relative import."""
        first, _, rest = self.dotted.partition(".")
        alias = next(
            (each for each in self.binding.names if (each.asname or each.name.partition(".")[0]) == first), None
        )
        name = alias.name if alias and (alias.asname or isinstance(self.binding, ast.ImportFrom)) else first
        above = (
            f"{'.' * self.binding.level}{self.binding.module or ''}."
            if isinstance(self.binding, ast.ImportFrom)
            else ""
        )
        return f"{above}{name}.{rest}".rstrip(".")


@dataclass(frozen=True)
class Builtin:
    """A function of Python's own."""

    name: str


Value: TypeAlias = (
    Ref
    | Copy
    | Const
    | Items
    | Entries
    | Each
    | Object
    | Function
    | Class
    | Parent
    | Attribute
    | Imported
    | Builtin
    | None
)
NOTHING = Const(frozenset({None}))
"""Python's None."""


def text_of(value: Value) -> str | None:
    """The string that a value certainly is."""
    only = value.only if isinstance(value, Const) else None
    return only if isinstance(only, str) else None
