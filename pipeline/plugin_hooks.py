"""What makes the methods of a plugin hooks, whether they are read from its source or from its class."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline import hookspecs
from pipeline.errors import one_of
from pipeline.source_code import classes, source

HOOKS = {name: inspect.signature(spec) for name, spec in vars(hookspecs).items() if hasattr(spec, "pipeline_spec")}
"""Hook -> its arguments, in calling order."""


@dataclass(frozen=True)
class _Method:
    """A method of a plugin.

    Attributes:
        name: its name.
        where: ``Plugin.name (file.py:7)``.
        arguments: those after ``self``.
        marked: whether ``@hookimpl`` stands above it.
    """

    name: str
    where: str
    arguments: Sequence[str]
    marked: bool

    def faults(self) -> list[str]:
        """What makes it no hook although it should be one."""
        if not self.marked:
            unmarked = f"{self.where} is named like a hook but not marked; write @hookimpl above it"
            return [unmarked] if self.name in HOOKS else []
        if self.name not in HOOKS:
            return [f"{self.where}: there is no hook '{self.name}'{one_of(self.name, HOOKS)}"]
        known = HOOKS[self.name].parameters
        wrong = [argument for argument in self.arguments if argument not in known]
        return [f"{self.where}: the hook has no argument '{each}'{one_of(each, known)}" for each in wrong]


def faults_of_source(definition: source.Definition) -> list[str]:
    """What is certainly wrong with the hooks of a plugin, from its source."""
    if not isinstance(definition.node, source.ClassNode):
        return [f"{definition.name} ({definition.place}) is a function, not a class; name a class with hooks"]
    above, complete = classes.ancestry(definition)
    methods = {name: node for each in reversed(above) for name, node in classes.methods(each).items()}
    found = []
    for name, node in methods.items():
        marked = any("hookimpl" in ast.unparse(mark) for mark in node.decorator_list)
        if node.decorator_list and not marked:
            # Another decorator may mark it: that shows when it is loaded.
            complete = False
            continue
        where = f"{definition.name}.{name} ({definition.module.file.name}:{node.lineno})"
        found.append(_Method(name, where, [argument.arg for argument in node.args.args[1:]], marked))
    return _faults(found, f"{definition.name} ({definition.place})", complete=complete)


def faults_of_class(cls: type) -> list[str]:
    """What is wrong with the hooks of a plugin that was imported."""
    found = []
    for name, function in inspect.getmembers(cls, inspect.isfunction):
        file, line = Path(function.__code__.co_filename).name, function.__code__.co_firstlineno
        arguments = list(inspect.signature(function).parameters)[1:]
        found.append(
            _Method(name, f"{cls.__name__}.{name} ({file}:{line})", arguments, hasattr(function, "pipeline_impl"))
        )
    return _faults(found, cls.__name__, complete=True)


def _faults(methods: Sequence[_Method], who: str, *, complete: bool) -> list[str]:
    messages = [message for each in methods for message in each.faults()]
    if complete and not messages and not any(each.marked for each in methods):
        return [f"{who} has no hook; mark a method such as before_epoch with @hookimpl (from pipeline import hookimpl)"]
    return messages
