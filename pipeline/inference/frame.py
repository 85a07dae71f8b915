"""One call of a function: where its names are looked up, and what they hold."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from pipeline.inference.scopes import Scope
from pipeline.inference.values import Function, Value
from pipeline.user_code import source


@dataclass(eq=False)
class Frame:
    """One call of a function.

    Attributes:
        module: where the names in it are looked up.
        names: its local names.
        function: what is called.
        scope: the names that the function binds.
        exposed: the names whose values code sees that runs at another time: whatever they are bound to escapes.
        pending: the names that a function within uses before they are bound.
        left: the names as they were where the loop around, or its round, was left.
        returned: the values that it may return.
        exits: how many returns were met, and how many places at which the loop around, or its round, may be left.
    """

    module: source.Module
    names: dict[str, Value] = field(default_factory=dict)
    function: Function | None = None
    scope: Scope = field(default_factory=Scope)
    exposed: set[str] = field(default_factory=set)
    pending: set[str] = field(default_factory=set)
    left: list[dict[str, Value]] = field(default_factory=list)
    returned: list[Value] = field(default_factory=list)
    exits: tuple[int, int] = (0, 0)

    @property
    def trusted(self) -> bool:
        """Whether the code is ours: it changes nothing in the context but what its classes declare in ``writes``."""
        return is_ours(self.module)

    @property
    def outer(self) -> Frame | None:
        """The call in which the function was defined."""
        return self.function.outer if self.function else None

    @contextmanager
    def exposing(self, names: set[str]) -> Iterator[None]:
        """Within, whatever these names are bound to escapes."""
        before, self.exposed = self.exposed, self.exposed | names
        try:
            yield
        finally:
            self.exposed = before

    @contextmanager
    def looping(self) -> Iterator[list[dict[str, Value]]]:
        """Within is one round of a loop; the names wherever it is left."""
        before, self.left, (_, exits) = self.left, [], self.exits
        try:
            yield self.left
        finally:
            self.left, self.exits = before, (self.exits[0], exits)


def is_ours(module: source.Module) -> bool:
    """Whether a module belongs to this package or its plugins, and not to a workspace."""
    return module.name.startswith(("pipeline.", "pipeline_plugins.")) and not module.name.startswith(
        "pipeline.workspaces."
    )


def place(node: ast.AST, frame: Frame) -> str:
    """``file.py:14``."""
    return f"{frame.module.file.name}:{getattr(node, 'lineno', 0)}"
