"""A stage class and its methods."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from pipeline.check.data_flow import EXPERIMENT, StageFlow, own_verbs
from pipeline.check.inspection import Setting, place_of
from pipeline.context import STAGES
from pipeline.errors import nearest, one_of
from pipeline.user_code import classes, source
from pipeline.user_code.classes import supers
from pipeline.user_code.source import once

# A class and its bases, in the order in which Python looks for a method in them.
Classes: TypeAlias = Sequence[source.Definition]

# The methods of an experiment that are the user's; they are called without arguments.
STEPS = ("train_batch", "valid", "setup_dataloader", "setup_model")

# Methods that a stage may have without a base class having them, with their arguments.
OPTIONAL: Mapping[str, Mapping[str, tuple[str, ...]]] = {"terminal": {"abort": ("context", "error")}}


def positional_arguments(definition: source.Definition) -> tuple[str, ...]:
    """The positional arguments of a stage's constructor; an experiment is not built as other stages are."""
    return ("config", "args") if classes.is_subclass(definition, EXPERIMENT) else ("context",)


def positional_parameters(definition: source.Definition) -> dict[str, str]:
    """The parameters of a stage's constructor that get positional arguments, and which."""
    parameters, arguments = classes.parameters(definition), positional_arguments(definition)
    return dict(zip(parameters.names[: parameters.positional], arguments, strict=False)) if parameters else {}


def check_arguments(definition: source.Definition, arguments: Setting) -> None:
    """Check the keyword arguments of a stage's constructor."""
    parameters = positional_parameters(definition)
    if misnamed_parameter(definition):
        # That is reported with the constructor.
        return
    for name, argument in parameters.items():
        if name != argument and arguments[name].node:
            remedy = f"write `def __init__(self, {', '.join(parameters.values())}, {name}, …)`"
            arguments[name].fault(f"{definition.name}'s parameter '{name}' is given the {argument}; {remedy}")
            return
    arguments.check_call(definition, arguments.origin, list(parameters))


def stage_faults(definition: source.Definition, stage: str) -> Iterator[str]:
    """What makes a class unfit, each as a message."""
    arguments_of = {STAGES[stage]: ("context",), **OPTIONAL.get(stage, {})}
    arguments_of |= dict.fromkeys(STEPS, ()) if classes.is_subclass(definition, EXPERIMENT) else {}
    arguments_of |= {verb: parameters for verb, (parameters, called) in own_verbs(definition, stage).items() if called}
    for base in classes.ancestry(definition)[0]:
        for node in base.node.body:
            match node:
                # ``reads = ("model")`` is no tuple: its comma is missing.
                case ast.Assign(targets=[ast.Name(id="reads" | "writes" as key)], value=ast.Constant(value=str(text))):
                    what = f"`{key}` is '{text}', a string; write {key} = (\"{text}\",)"
                    yield f"{base.name} ({base.module.file.name}:{node.lineno}): {what}"
    yield from _constructor(definition)
    for name, arguments in arguments_of.items():
        method, owner = classes.member(definition, name) or (None, definition)
        if isinstance(method, source.FunctionNode):
            yield from call_faults(method, place_of(owner, name, method), arguments)


def misnamed_parameter(definition: source.Definition) -> ast.arg | None:
    """The parameter of a stage's constructor that is given the context, or another argument, and expects something else."""
    constructor, home = classes.member(definition, "__init__") or (None, definition)
    if not isinstance(constructor, source.FunctionNode) or constructor.decorator_list or source.is_ours(home.module):
        return None
    positional = [*constructor.args.posonlyargs, *constructor.args.args][1:]
    defaults = classes.defaults(constructor.args)
    others = {parameter.arg for parameter in (*positional, *constructor.args.kwonlyargs)}
    for parameter, argument in zip(positional, positional_arguments(definition), strict=False):
        if _may_get(parameter, argument, constructor):
            continue
        is_plain = classes.annotation(parameter, defaults.get(parameter.arg), home.module) is not None
        if is_plain or parameter.arg in defaults or argument in others:
            return parameter
    return None


# How else a constructor may call the context, or the config of an experiment.
_SHORT_NAMES = ("c", "cx", "ctxt", "cfg", "conf", "unused")

# Types that a context, a config or parsed arguments may have.
_WIDE_TYPES = ("Any", "Context", "Mapping", "MutableMapping", "Namespace", "dict", "object")


def _may_get(parameter: ast.arg, argument: str, constructor: source.FunctionNode) -> bool:
    """Return whether a parameter with another name than ``argument`` may be meant for it."""
    name = parameter.arg.lower()
    if argument in name or "ctx" in name or name.startswith("_") or name in _SHORT_NAMES:
        return True
    if parameter.annotation and any(source.mentions(parameter.annotation, wide) for wide in _WIDE_TYPES):
        return True
    for node in ast.walk(constructor):
        match node:
            # It is used as a mapping.
            case ast.Subscript(value=ast.Name(id=used), slice=ast.Constant(value=str())) if used == parameter.arg:
                return True
            # The constructor of the base gets it.
            case ast.Call() if source.mentions(node.func, "__init__"):
                values = [*node.args, *(keyword.value for keyword in node.keywords)]
                if any(isinstance(value, ast.Name) and value.id == parameter.arg for value in values):
                    return True
    return False


def _constructor(definition: source.Definition) -> Iterator[str]:
    """Check that the constructor takes its positional arguments."""
    node, base = classes.member(definition, "__init__") or (None, definition)
    arguments = positional_arguments(definition)
    if not isinstance(node, source.FunctionNode) or node.decorator_list:
        return
    if wrong := misnamed_parameter(definition):
        positional = [*node.args.posonlyargs, *node.args.args][1:]
        argument = dict(zip([each.arg for each in positional], arguments, strict=False))[wrong.arg]
        others = [each.arg for each in (*positional, *node.args.kwonlyargs) if each.arg not in arguments]
        remedy = f"write `def __init__(self, {', '.join([*arguments, *others])}, …)`"
        yield f"{place_of(base, '__init__', node)} gets the {argument} as its parameter '{wrong.arg}'; {remedy}"
    elif not node.args.vararg and classes.count_positional(node.args) <= len(arguments):
        takes = f"takes ({source.text_of(node.args)}), and is called with {' and '.join(arguments)}"
        yield f"{place_of(base, '__init__', node)} {takes}; write `def __init__(self, {', '.join(arguments)}, …)`"


def call_faults(node: source.FunctionNode, place: str, arguments: tuple[str, ...]) -> Iterator[str]:
    """Check that a method can be called with its arguments, and does something."""
    name, call = node.name, f"{node.name}({', '.join(arguments)})"
    marks = [source.text_of(mark) for mark in node.decorator_list]
    own = () if (static := marks == ["staticmethod"]) else ("self",)
    signature = f"`def {name}({', '.join((*own, *arguments))})`"
    if "property" in marks:
        yield f"{place} is a property, and is called as {call}; take @property away"
    elif isinstance(node, ast.AsyncFunctionDef):
        yield f"{place} is async, and nobody would await it: it would do nothing; write {signature}"
    elif not marks and source.is_generator(node):
        yield f"{place} has a yield: called, it would do nothing; take the yield out"
    elif (static or not marks) and not classes.takes(node.args, len(own) + len(arguments)):
        *others, last = arguments or ("",)
        single = f"with {'the context' if last == 'context' else last} alone" if last else "without arguments"
        with_what = f"with {', '.join(others)} and {last}" if others else single
        yield f"{place} takes ({source.text_of(node.args)}), and is called {with_what}; write {signature}"


# Ways to reach methods that the source does not name.
_BY_NAME = re.compile(r"getattr|__(dict|class|mro|bases|subclasses)__|methodcaller|attrgetter|\b(vars|dir)\(|inspect")


def method_faults(definition: source.Definition, stage: str, files: Iterable[source.Module] | None) -> Iterator[str]:
    """What is wrong with the methods of a class in the place of a stage.

    Args:
        definition: the class.
        stage: which of the five it is.
        files: the files of the workspace; None where a trainer of the user's own may call any of its methods.
    """
    ancestry, complete = classes.ancestry(definition)
    users = [base for base in ancestry if not source.is_ours(base.module)]
    if complete:
        yield from _wrong_supers(ancestry)
        yield from _misspelt_attributes(ancestry, users)
        yield from _uncalled_methods(ancestry, users, stage, files) if files is not None else ()


def _wrong_supers(ancestry: Classes) -> Iterator[str]:
    """Each ``super().m`` that is certainly reached, of a method that no class after it in the order of bases has."""
    # How many of the classes that follow have a name.
    inherited_names = Counter(name for base in ancestry for name in classes.own_names(base))
    # The methods that a class below overrides without calling ``super()``.
    unreached = set[str]()
    for index, base in enumerate(ancestry):
        inherited_names.subtract(classes.own_names(base))
        methods = classes.methods(base) if not source.is_ours(base.module) else {}
        for name, method in methods.items():
            if name in unreached or classes.decoration(method) == "?":
                continue
            for call in supers(method, base):
                if not inherited_names[call.attr] and not hasattr(object, call.attr):
                    method_names = {name for other in ancestry[index + 1 :] for name in classes.methods(other)}
                    hint = one_of(call.attr, (name for name in method_names if not name.startswith("_")))
                    yield f"{place_of(base, name, call)} calls super().{call.attr}, which no class after it has{hint}"
        unreached |= {name for name, node in methods.items() if not source.mentions(node, "super")}


# Names with which an object gets attributes that its source does not show, or is asked for those that it may not have.
_ASKING = {"setattr", "hasattr", "AttributeError", "Exception", "*"}


def _misspelt_attributes(ancestry: Classes, users: Classes) -> Iterator[str]:
    """Each ``self.m`` that no class and no assignment defines, where there is a name like it."""
    own = set().union(*map(classes.own_names, users))
    modules = dict.fromkeys(base.module for base in ancestry)
    assigned = classes.assigned_attributes(*modules)
    names = own.union(dir(object), assigned, *map(classes.own_names, ancestry))
    asked = any(_ASKING & module_words(module) for module in modules if not source.is_ours(module))
    for base in users if not asked else ():
        for name, method in classes.methods(base).items():
            for node in source.own_nodes(method):
                match node:
                    case ast.Attribute(ast.Name("self"), attr) if attr not in names:
                        if hint := nearest(attr, own) or nearest(attr, names):
                            yield f"{place_of(base, name, node)} uses self.{attr}, which {ancestry[0].name} does not have{hint}"


def _uncalled_methods(ancestry: Classes, users: Classes, stage: str, files: Iterable[source.Module]) -> Iterator[str]:
    """The methods with almost the name of one of the stage's methods that certainly nothing calls."""
    modules = set(source.neighbours(*files, *(base.module for base in users)))
    ours = [base for base in ancestry if source.is_ours(base.module)]
    known_names = {*OPTIONAL.get(stage, {})}.union(*map(classes.methods, ours))
    public = [name for name in known_names.difference(*map(classes.methods, users)) if not name.startswith("_")]
    words = {name for module in modules for name in module_words(module)}
    # Code elsewhere may have other users.
    for base in (base for base in users if base.module.file.parent == ancestry[0].module.file.parent):
        for name, method in classes.methods(base).items():
            # What other trainers call.
            foreign = stage == "runner" and nearest(name, ["train"])
            hint = nearest(name, public) or ("; the trainer calls run(context)" if foreign else "")
            plain = not name.startswith("_") and not method.decorator_list and name not in known_names
            if hint and plain and not words & {name, "*"}:
                yield f"{place_of(base, name, method)} is called by nobody{hint}"


@once
def module_words(module: source.Module) -> frozenset[str]:
    """The words of a module: a method may be looked up by name; ``*``: any method."""
    by_name = _BY_NAME.search(module.file.read_text(encoding="utf-8", errors="replace")) or not module.complete
    return frozenset([*source.words(module.body), *(["*"] if by_name else [])])


def stage_notes(stage: StageFlow) -> Iterator[str]:
    """What is no fault of a stage, but perhaps not meant: nothing of the default runs, from which it derives."""
    if stage.stage == "runner":
        yield from _runner_notes(stage)
        return
    name, base = STAGES[stage.stage], f"{stage.stage.capitalize()}Base"
    method, home = classes.member(stage.definition, name) or (None, stage.definition)
    followed = source.is_ours(home.module) or stage.flow.ours or stage.flow.unknown
    if method and stage.derives and not followed:
        what = f"{place_of(home, name, method)} does not call super().{name}(context)"
        yield f"{what}, and nothing of stages.{base[:-4]} runs; call it, or derive from {base} if that is meant"


def _runner_notes(stage: StageFlow) -> Iterator[str]:
    """What is no fault of a Runner, but costs it what the default has."""
    flow, cls = stage.flow, stage.definition
    if not (flow.ours or flow.unknown or "checkpointer" in flow.reads()):
        what = f"{cls.name} ({cls.location}) heeds no limit, saves nothing, calls no hook: not resumable"
        other = "call super().run(context)" if stage.derives else "override verbs of stages.Runner"
        yield f"{what}; take its batches from context.batches(phase), or {other}"
    for place in flow.inexact:
        what = f"{place}: a resumed run counts this loop from its start again, so that next() takes other batches"
        yield f"{what}; take them from context.batches(phase, count=N), or derive the count from `.done` of the pass"
