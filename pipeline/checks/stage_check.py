"""Whether a class can stand as a stage: how its method is called, and what it declares; from source alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from pipeline.checks.inspection import Setting
from pipeline.context import STAGES
from pipeline.source_code import classes, source

EXPERIMENT = "pipeline.training.experiment:ExperimentBase"
STEPS = ("train_batch", "valid", "setup_dataloader", "setup_model")
"""The methods of an experiment that are the user's; they are called without arguments."""


def is_experiment(definition: source.Definition) -> bool:
    """Whether a class certainly is an experiment, which is not built as other stages are."""
    return classes.is_subclass(definition, EXPERIMENT) is True


def given_first(definition: source.Definition) -> tuple[str, ...]:
    """What the constructor of a stage is given by position."""
    return ("config", "args") if is_experiment(definition) else ("context",)


def parameters_given(definition: source.Definition) -> dict[str, str]:
    """The parameters of a stage's constructor that are given by position, and what each is given."""
    taken, given = classes.parameters(definition), given_first(definition)
    return dict(zip(taken.names[: taken.positional], given, strict=False)) if taken else {}


def check_arguments(definition: source.Definition, arguments: Setting) -> None:
    """The arguments of a stage's constructor, beside those that it is given by position."""
    first = parameters_given(definition)
    for name, what in first.items():
        if name != what and arguments[name].node:
            message = f"{definition.name}'s parameter '{name}' is given the {what}"
            remedy = f"write `def __init__(self, {', '.join(first.values())}, {name}, …)`"
            arguments[name].fault(f"{message}; {remedy}")
            return
    taken = classes.parameters(definition)
    arguments.check_arguments(taken and taken.without(list(first)), definition.name)


def faults_of(definition: source.Definition, stage: str) -> Iterator[str]:
    """What makes a class unfit, each as a message."""
    called = {STAGES[stage]: ("context",)} | (dict.fromkeys(STEPS, ()) if is_experiment(definition) else {})
    above = classes.ancestry(definition)[0]
    for each in above:
        for node in each.node.body:
            yield from _declaration(node, each)
    yield from _constructor(definition)
    for name, given in called.items():
        home = next((each for each in above if name in classes.methods(each)), None)
        if home:
            found = classes.methods(home)[name]
            yield from _method(found, f"{home.name}.{name} ({home.module.file.name}:{found.lineno})", given)


def _constructor(definition: source.Definition) -> Iterator[str]:
    """It has to take what it is given by position."""
    for each in classes.ancestry(definition)[0]:
        if node := classes.methods(each).get("__init__"):
            given = given_first(definition)
            if not node.decorator_list and not node.args.vararg and _positional(node.args) <= len(given):
                place = f"{each.name}.__init__ ({each.module.file.name}:{node.lineno})"
                takes = f"takes ({ast.unparse(node.args)}), and is called with {' and '.join(given)}"
                yield f"{place} {takes}; write `def __init__(self, {', '.join(given)}, …)`"
            return


def _declaration(node: ast.stmt, definition: source.Definition) -> Iterator[str]:
    """``reads = ("model")`` is no tuple: its comma is missing."""
    match node:
        case ast.Assign(targets=[ast.Name(id="reads" | "writes" as name)], value=ast.Constant(value=str(text))):
            place = f"{definition.name} ({definition.module.file.name}:{node.lineno})"
            yield f"{place}: `{name}` is '{text}', a string; write {name} = (\"{text}\",)"


def _method(node: source.FunctionNode, place: str, given: tuple[str, ...]) -> Iterator[str]:
    """Whether a method can be called with what it is given, and does something then."""
    name, call = node.name, f"{node.name}({', '.join(given)})"
    marks = [ast.unparse(mark) for mark in node.decorator_list]
    own = () if (static := marks == ["staticmethod"]) else ("self",)
    signature = f"`def {name}({', '.join((*own, *given))})`"
    if "property" in marks:
        caller = "the trainer calls" if given else "it is called as"
        yield f"{place} is a property; take @property away: {caller} {call} on the stage"
    elif isinstance(node, ast.AsyncFunctionDef):
        yield f"{place} is async, and nobody would await it: it would do nothing; write {signature}"
    elif not marks and _yields(node):
        yield f"{place} has a yield: called, it would do nothing; take the yield out"
    elif (static or not marks) and not _takes(node.args, len(own) + len(given)):
        with_what = "with the context alone" if given else "without arguments"
        yield f"{place} takes ({ast.unparse(node.args)}), and is called {with_what}; write {signature}"


def _positional(arguments: ast.arguments) -> int:
    return len(arguments.posonlyargs) + len(arguments.args)


def _takes(arguments: ast.arguments, count: int) -> bool:
    """Whether a function can be called with so many arguments, by position."""
    positional = _positional(arguments)
    required = positional - len(arguments.defaults)
    if any(default is None for default in arguments.kw_defaults):
        return False
    return required <= count and (positional >= count or arguments.vararg is not None)


def _yields(node: ast.AST) -> bool:
    """Whether a function is a generator; what it defines within is another function."""
    inner = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef
    below = [child for child in ast.iter_child_nodes(node) if not isinstance(child, inner)]
    return any(isinstance(child, ast.Yield | ast.YieldFrom) or _yields(child) for child in below)
