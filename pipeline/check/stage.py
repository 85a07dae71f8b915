"""A stage class: its methods, and what a swap of it changes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from pipeline.check.data_flow import EXPERIMENT, TRAINER_KEYS, DataFlow, StageFlow, default_definition, own_verbs
from pipeline.check.inspection import Setting, place_of
from pipeline.context import STAGES, STATUSES
from pipeline.errors import nearest, one_of
from pipeline.user_code import classes, source
from pipeline.user_code.classes import supers
from pipeline.user_code.source import once

# A class and its bases, in the order in which Python looks for a method in them.
Classes: TypeAlias = Sequence[source.Definition]

# The methods of an experiment that are the user's; they are called without arguments.
STEPS = ("train_batch", "valid", "setup_dataloader", "setup_model")

# Methods that a stage may have without a base class having them, with their arguments.
_OPTIONAL: Mapping[str, Mapping[str, tuple[str, ...]]] = {"terminal": {"abort": ("context", "error")}}


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
    for name, argument in parameters.items():
        if name != argument and arguments[name].node:
            remedy = f"write `def __init__(self, {', '.join(parameters.values())}, {name}, …)`"
            arguments[name].fault(f"{definition.name}'s parameter '{name}' is given the {argument}; {remedy}")
            return
    arguments.check_call(definition, arguments.origin, list(parameters))


def stage_faults(definition: source.Definition, stage: str) -> Iterator[str]:
    """What makes a class unfit, each as a message."""
    arguments_of = {STAGES[stage]: ("context",), **_OPTIONAL.get(stage, {})}
    arguments_of |= dict.fromkeys(STEPS, ()) if classes.is_subclass(definition, EXPERIMENT) else {}
    arguments_of |= {verb: parameters for verb, (parameters, called) in own_verbs(definition, stage).items() if called}
    for base in classes.ancestry(definition)[0]:
        for node in base.node.body:
            match node:
                # ``reads = ("model")`` is no tuple: its comma is missing.
                case ast.Assign(targets=[ast.Name(id="reads" | "writes" as key)], value=ast.Constant(value=str(text))):
                    what = f"`{key}` is '{text}', a string; write {key} = (\"{text}\",)"
                    yield f"{base.name} ({base.module.file.name}:{node.lineno}): {what}"
        if not source.is_ours(base.module):
            yield from _paddle_uses(base)
    yield from _constructor(definition)
    for name, arguments in arguments_of.items():
        method, owner = classes.member(definition, name) or (None, definition)
        if isinstance(method, source.FunctionNode):
            yield from _method(method, place_of(owner, name, method), arguments)


def _paddle_uses(definition: source.Definition) -> Iterator[str]:
    """What a stage of PaddleRec's users still uses of paddle and of ``envs``, where nothing of that name is there."""
    for name, method in classes.methods(definition).items():
        nodes = list(ast.walk(method))
        own = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        own |= {node.arg for node in nodes if isinstance(node, ast.arg)}
        for node in nodes:
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id="envs" as root), attr="get_global_env")):
                    arguments = [*node.args, *(keyword.value for keyword in node.keywords)][:2]
                    call = f"context['config'].get({', '.join(map(ast.unparse, arguments))})"
                    what = f"calls envs.get_global_env, which is PaddleRec's; write {call}"
                case ast.Name(id="fluid" | "paddle" as root):
                    what = f"uses {root}, and paddle is not used here; write it with torch, or take the line out"
                case _:
                    continue
            if root not in own and _is_missing(root, definition.module):
                yield f"{place_of(definition, name, node)} {what}"


def _is_missing(name: str, module: source.Module) -> bool:
    """Whether a module certainly has no such name, or would import it from a package of PaddleRec's that is not there."""
    binding = module.bindings.get(name)
    if binding is None:
        return module.complete and not module.stars
    imported = re.match(r"(?:from|import) (paddle\w*)", ast.unparse(binding))
    return imported is not None and source.find_spec(imported[1]) is None


def _constructor(definition: source.Definition) -> Iterator[str]:
    """Check that the constructor takes its positional arguments."""
    node, base = classes.member(definition, "__init__") or (None, definition)
    arguments = positional_arguments(definition)
    if not isinstance(node, source.FunctionNode) or node.decorator_list or node.args.vararg:
        return
    if classes.count_positional(node.args) <= len(arguments):
        takes = f"takes ({ast.unparse(node.args)}), and is called with {' and '.join(arguments)}"
        yield f"{place_of(base, '__init__', node)} {takes}; write `def __init__(self, {', '.join(arguments)}, …)`"


def _method(node: source.FunctionNode, place: str, arguments: tuple[str, ...]) -> Iterator[str]:
    """Check that a method can be called with its arguments, and does something."""
    name, call = node.name, f"{node.name}({', '.join(arguments)})"
    marks = [ast.unparse(mark) for mark in node.decorator_list]
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
        single = "with the context alone" if last else "without arguments"
        with_what = f"with {', '.join(others)} and {last}" if others else single
        yield f"{place} takes ({ast.unparse(node.args)}), and is called {with_what}; write {signature}"


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
        yield from _wrong_supers(ancestry, users)
        yield from _misspelt_attributes(ancestry, users)
        yield from _uncalled_methods(ancestry, users, stage, files) if files is not None else ()


def _wrong_supers(ancestry: Classes, users: Classes) -> Iterator[str]:
    """Each ``super().m`` that is certainly reached, of a method that no class after it in the order of bases has."""
    for index, base in enumerate(ancestry):
        inherited_names = set(dir(object)).union(*map(classes.own_names, ancestry[index + 1 :]))
        for name, method in classes.methods(base).items() if base in users else ():
            # A class below may override it without calling ``super()``.
            below = [node for lower in ancestry[:index] if (node := classes.methods(lower).get(name))]
            if classes.decoration(method) == "?" or any("super" not in ast.unparse(node) for node in below):
                continue
            for call in supers(method, base):
                if call.attr not in inherited_names:
                    method_names = {name for other in ancestry[index + 1 :] for name in classes.methods(other)}
                    hint = one_of(call.attr, (name for name in method_names if not name.startswith("_")))
                    yield f"{place_of(base, name, call)} calls super().{call.attr}, which no class after it has{hint}"


# Names with which an object gets attributes that its source does not show, or is asked for those that it may not have.
_ASKING = {"setattr", "hasattr", "AttributeError", "Exception", "*"}


def _misspelt_attributes(ancestry: Classes, users: Classes) -> Iterator[str]:
    """Each ``self.m`` that no class and no assignment defines, where there is a name like it."""
    own = set().union(*map(classes.own_names, users))
    others = (classes.own_names(base) | classes.assigned_attributes(base.module) for base in ancestry)
    names = own.union(dir(object), *others)
    for base in users if not any(_ASKING & _words(base.module) for base in users) else ():
        for name, method in classes.methods(base).items():
            for node in source.own_nodes(method):
                match node:
                    case ast.Attribute(ast.Name("self"), attr) if attr not in names:
                        if hint := nearest(attr, own) or nearest(attr, names):
                            yield f"{place_of(base, name, node)} uses self.{attr}, which {ancestry[0].name} does not have{hint}"


def _uncalled_methods(ancestry: Classes, users: Classes, stage: str, files: Iterable[source.Module]) -> Iterator[str]:
    """The methods with almost the name of one of the stage's methods that certainly nothing calls."""
    modules = {near for module in (*files, *(base.module for base in users)) for near in source.neighbours(module)}
    known_names = {*_OPTIONAL.get(stage, {})}.union(*(classes.methods(base) for base in ancestry if base not in users))
    public = [name for name in known_names.difference(*map(classes.methods, users)) if not name.startswith("_")]
    words = {name for module in modules for name in _words(module)}
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
def _words(module: source.Module) -> frozenset[str]:
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


def swap_report(flows: Mapping[str, DataFlow]) -> str:
    """What the stages that are not the default change; ``""`` where all are."""
    # Several runners may have the same swap.
    runners: dict[str, list[str]] = {}
    for runner, flow in flows.items():
        for name, stage in flow.stages.items():
            if stage is None:
                text = f"{name} is not the default, and what it is cannot be told from its source"
                runners.setdefault(text, []).append(runner)
            elif stage.custom:
                own = f"{stage.definition.module.file.name}:{stage.definition.name}"
                headline = f"{name} is {own}, in the place of stages.{default_definition(name).name}"
                runners.setdefault("\n  ".join([headline, *_changes(stage, flow)]), []).append(runner)
    return "".join(f"{', '.join(names)}: {text}\n" for text, names in runners.items())


def _changes(stage: StageFlow, flow: DataFlow) -> Iterator[str]:
    default, own = stage.default_flow, stage.flow
    yield from _methods(stage)
    if arguments := _arguments(stage.definition):
        yield f"arguments: {arguments}"
    known_keys = {*TRAINER_KEYS, *default.reads(), *own.writes()}
    if new_reads := [key for key in own.reads() if key not in known_keys]:
        yield f"also reads: {', '.join(new_reads)}"
    uncertain = ", as far as can be told" if own.unknown else ""
    perhaps = set() if own.unknown else default.certain_writes() - own.certain_writes()
    changes = {
        "also writes": [key for key in own.writes() if key not in default.writes()],
        f"no longer writes{uncertain}": [key for key in default.writes() if key not in own.writes()],
        "may no longer write": [key for key in own.writes() if key in perhaps],
    }
    for change, keys in changes.items():
        if keys:
            yield f"{change}: {', '.join(f'{key} ({_readers(key, stage, flow)})' for key in keys)}"
    if own.unknown:
        yield f"may do more to the context: {own.unknown} cannot be followed"


def _readers(key: str, stage: StageFlow, flow: DataFlow) -> str:
    targets = [STATUSES.get(status, "") for status in sorted(stage.flow.statuses)]
    if key == "status" and targets and all(targets):
        return f"{'leads' if key in stage.flow.certain_writes() else 'may lead'} to {' or '.join(targets)}"
    order = list(flow.stages)
    after = [reader for name in order[order.index(stage.stage) + 1 :] if (reader := flow.stages[name])]
    needing = [reader.stage for reader in after if any(use.key == key for use in reader.flow.demands())]
    reading = [reader.stage for reader in after if key in reader.flow.reads() and reader.stage not in needing]
    reading += ["plugins"] if any(plugin and key in plugin.reads() for plugin in flow.plugins) else []
    users = {"needed": needing, "may be read": reading}
    descriptions = [f"{how} by {' and '.join(stages)}" for how, stages in users.items() if stages]
    return ", ".join(descriptions) or f"read by {'the trainer' if key in TRAINER_KEYS else 'nobody after it'}"


def _arguments(definition: source.Definition) -> str:
    parameters = classes.parameters(definition)
    if parameters is None:
        return ""
    free = parameters.without(list(positional_parameters(definition)))
    names = [name if name in free.required else f"{name} (optional)" for name in free.names]
    return ", ".join([*names, *(["any other"] if free.any_name else [])])


def _methods(stage: StageFlow) -> Iterator[str]:
    """Whose methods are left out, and which are overridden, with or without ``super()``."""
    default, ancestry = default_definition(stage.stage), classes.ancestry(stage.definition)[0]
    inherits = classes.is_subclass(stage.definition, f"{default.module.name}:{default.name}")
    ours = [base for base in ancestry if source.is_ours(base.module)]
    words = {word for module in source.neighbours(stage.definition.module) for word in _words(module)}
    # A stage that does not derive from the default may make one and call that.
    if inherits is False and ours and default.name not in words:
        yield f"derives from {ours[0].name}: no method of stages.{default.name} runs"
    inherited = set().union(*map(classes.methods, ours)).difference(*map(classes.abstract_methods, ours[:1]))
    users = [base for base in ancestry if base not in ours]
    names = dict.fromkeys(name for base in users for name in classes.methods(base))
    overridden = (name for name in names if name in inherited and not name.startswith("__"))
    overrides = [f"{name} ({_super_use(stage, name, users)})" for name in overridden]
    if overrides or inherits:
        yield f"overrides: {', '.join(overrides) or 'nothing'}"
    if added := _OPTIONAL.get(stage.stage, {}).keys() & names.keys():
        yield f"adds: {', '.join(added)}"


def _super_use(stage: StageFlow, name: str, users: Classes) -> str:
    """How those of the user's classes that override a method call what they override, each with ``super()``."""
    bases = [base for base in users if name in classes.methods(base)]
    called = stage.flow.ours.get(name) if name == STAGES[stage.stage] else None
    if called or all(classes.calls_super(base, name) for base in bases):
        return "with super()"
    texts = [ast.unparse(classes.methods(base)[name]) for base in bases]
    mentioned = all(re.search(rf"(super\(.*\)|\b[A-Z]\w*)\.{name}\b", text) for text in texts)
    return "without super()" if called is None and not mentioned else "sometimes without super()"
