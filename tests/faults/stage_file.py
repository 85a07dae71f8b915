"""A file that defines one stage, as it grows."""

from __future__ import annotations

import textwrap
from random import Random
from typing import TypeAlias

Lines: TypeAlias = list[str]


def indented(lines: Lines) -> Lines:
    """The lines, one level deeper."""
    return textwrap.indent("\n".join(lines), "    ").splitlines()


class StageFile:
    """A file that defines one stage, as it grows.

    Attributes:
        stage: instance, network, startup, runner or terminal.
        context: what the method calls its parameter.
        where: where the next lines stand: in the class of the ``stage``, elsewhere in its ``file``, or in a ``neighbour``.
        neighbour: the lines of a file beside it, which every stage of the workspace may import from.
    """

    def __init__(self, stage: str, base: str, method: str, random: Random, neighbour: list[str]) -> None:
        self.stage, self.base, self.method, self.random, self.neighbour = stage, base, method, random, neighbour
        self.context = random.choice(["context"] * 6 + ["ctx"])
        self.imports: list[str] = []
        self.top: list[str] = []
        self.attributes: list[str] = []
        self.init: list[str] = []
        self.methods: list[str] = []
        self.body: list[str] = []
        self.keeps_context = False
        self.where = "stage"
        self.bases = [base]
        self.names = 0

    def fresh(self, word: str) -> str:
        """A name that nothing else in the workspace has."""
        self.names += 1
        return f"{word}_{self.stage}_{self.names}"

    def keep_context(self) -> None:
        """``self.context``, set in the constructor."""
        self.keeps_context = True

    def source(self) -> str:
        """The text of the file."""
        lines = [
            *dict.fromkeys(self.imports),
            "",
            *self.top,
            "",
            f"class {self.stage.capitalize()}({', '.join(self.bases)}):",
        ]
        inner = list(self.attributes)
        if self.keeps_context or self.init:
            keep = ["self.context = context"] if self.keeps_context else []
            inner += ["def __init__(self, context):", *indented(["super().__init__(context)", *keep, *self.init])]
        inner += [f"def {self.method}(self, {self.context}):", *indented(self.body or ["pass"]), *self.methods]
        return "\n".join([*lines, *indented(inner), ""])
