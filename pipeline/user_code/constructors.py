"""Constructors that do not call the constructor of their base although it is needed, found from source alone."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import takewhile

from pipeline.context import STAGES
from pipeline.user_code import classes, source

_FIRST = "call it first: super().__init__()"

# A base that never works without its constructor -> what a subclass has to do.
REMEDIES: Mapping[str, str] = {
    "pipeline.brain.brain:Brain": "call it first, with the modules: super().__init__({'net': net})",
    "pipeline.optim.optim_scheduler:OptimScheduler": "pass on its arguments: super().__init__(*args, **kwargs)",
    "pipeline.experiment.experiment:ExperimentBase": "call it first: super().__init__(config, args)",
    "pipeline.trainer:GeneralTrainer": "pass on its arguments: super().__init__(*args, **kwargs)",
    "torch.nn.modules.module:Module": _FIRST,
    "torch.optim.optimizer:Optimizer": "call it: super().__init__(params, defaults)",
    "torch.optim.lr_scheduler:LRScheduler": "call it last: super().__init__(optimizer, last_epoch)",
}

# A class that wraps another object of its kind takes this over from it, and needs no constructor.
_WRAPPED = {
    "torch.optim.optimizer:Optimizer": "param_groups",
    "torch.optim.lr_scheduler:LRScheduler": "base_lrs",
}

# What a class is for, as ``find_class`` has it -> the methods that are called on its objects.
CALLED: Mapping[str, tuple[str, ...]] = {
    **{stage.capitalize(): (method,) for stage, method in STAGES.items()},
    "Dataset": ("__getitem__", "__getitems__", "__iter__", "__len__"),
    "Sampler": ("__iter__", "__len__"),
    "Updater": ("update", "state_dict"),
    "Metric": ("update", "compute", "reset"),
    "collate": ("__call__",),
}

# Functions of Python's that call nothing of the object that they are given.
_HARMLESS = {
    "getattr",
    "hasattr",
    "id",
    "isinstance",
    "len",
    "print",
    "repr",
    "setattr",
    "str",
    "super",
    "type",
}

# With one of these, an object gets the attributes of another.
_COPIED = {"__dict__", "__setstate__"}

# With one of these, an object may be made in another way.
_MAKERS = {"__new__", "__init_subclass__", "__post_init__", "__getattr__", "__getattribute__"}


@source.once
def constructor_fault(definition: source.Definition, methods: tuple[str, ...]) -> str | None:
    """Return the message for a constructor that leaves out one that its class needs; None if there is none.

    Args:
        definition: the class.
        methods: those that are called on its objects.
    """
    above, complete = classes.ancestry(definition)
    below = list(takewhile(lambda cls: _key(cls) not in REMEDIES, above))
    # An unknown base may make the object in its own way.
    if not complete or any(map(_is_made_otherwise, below)) or _is_replaced(below):
        return None
    for index, cls in enumerate(below):
        constructor = classes.methods(cls).get("__init__")
        if constructor is None:
            continue
        called = _called_constructor(definition, cls, constructor)
        if called == "next":
            continue
        remedy = None if called else _remedy(definition, above, index + 1, methods)
        where = f"{cls.name}.__init__ ({cls.module.file.name}:{constructor.lineno})"
        return remedy and f"{where} does not call super().__init__(); {remedy}"
    return None


def _key(definition: source.Definition) -> str:
    return f"{definition.module.name}:{definition.name}"


def _is_made_otherwise(cls: source.Definition) -> bool:
    """Whether other code than a plain constructor may make the objects of a class."""
    is_decorated = isinstance(cls.node, ast.ClassDef) and bool(cls.node.decorator_list)
    constructor = classes.methods(cls).get("__init__")
    is_bound = "__init__" in classes.own_names(cls)
    is_plain = not is_bound if constructor is None else not constructor.decorator_list
    return is_decorated or not is_plain or not _MAKERS.isdisjoint(classes.own_names(cls))


def _is_replaced(below: Sequence[source.Definition]) -> bool:
    """Whether code outside of the classes may replace a constructor: ``Model.__init__ = …``."""
    modules = dict.fromkeys(cls.module for cls in below)
    own = [module for module in modules if not (source.is_ours(module) or module.name.startswith("torch."))]
    return "__init__" in classes.assigned_attributes(*own)


def _called_constructor(definition: source.Definition, cls: source.Definition, constructor: source.FunctionNode) -> str:
    """Return ``next`` if a constructor may call that of the next class, ``other`` if another, else ``""``."""
    waiting: list[tuple[source.FunctionNode, source.Definition]] = [(constructor, cls)]
    visited = {id(constructor)}
    called = ""
    while waiting:
        function, home = waiting.pop()
        this = _first_parameter(function)
        nodes = list(ast.walk(function))
        # ``super().__init__`` without brackets calls nothing.
        uncalled = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            match node:
                case ast.Attribute(attr="__init__") if id(node) not in uncalled:
                    if not _is_super_of(node.value, home):
                        return "other"
                    called = "next"
                case ast.Attribute(attr=name) if name in _COPIED:
                    return "other"
                case ast.Constant(value="__init__"):
                    return "other"
        if _is_given_away(nodes, this):
            return "other"
        for name in _own_attributes(nodes, this):
            method, owner = classes.member(definition, name) or (None, cls)
            if isinstance(method, source.FunctionNode) and id(method) not in visited:
                visited.add(id(method))
                waiting.append((method, owner))
    return called


def _is_given_away(nodes: Collection[ast.AST], this: str) -> bool:
    """Whether other code gets the object, and may call a constructor of it."""
    kept: set[int] = set()
    for node in nodes:
        match node:
            case ast.Attribute(value=value):
                kept.add(id(value))
            case ast.Call(func=function, args=arguments) if source.dotted_name(function) in _HARMLESS:
                kept.update(map(id, arguments))
    return any(_is_name(node, this) and id(node) not in kept for node in nodes)


def _first_parameter(function: source.FunctionNode) -> str:
    positional = [*function.args.posonlyargs, *function.args.args]
    return positional[0].arg if positional else ""


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _is_super_of(node: ast.expr, home: source.Definition) -> bool:
    """Whether an expression is the ``super()`` of a class."""
    if not isinstance(node, ast.Call) or not _is_name(node.func, "super"):
        return False
    return not node.args or source.dotted_name(node.args[0]) in (home.name, "__class__")


def _own_attributes(nodes: Collection[ast.AST], this: str) -> Iterator[str]:
    """The attributes of the object that are read."""
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and _is_name(node.value, this):
            yield node.attr


def _remedy(
    definition: source.Definition, above: Sequence[source.Definition], first: int, methods: Sequence[str]
) -> str | None:
    """Return what to do about constructors that are not called; None if they are not needed for certain.

    Args:
        definition: the class.
        above: the class and its bases.
        first: the index of the first base whose constructor is not called.
        methods: those that are called on its objects.
    """
    left_out = above[first:]
    for cls in left_out:
        if remedy := REMEDIES.get(_key(cls)):
            part = _WRAPPED.get(_key(cls))
            return None if part and _has(above[: above.index(cls)], part) else remedy
    for cls in left_out:
        if constructor := classes.methods(cls).get("__init__"):
            missing = _assigned(constructor) & _read(definition, methods)
            lacking = sorted(name for name in missing if not _is_set_elsewhere(definition, name, left_out))
            if lacking:
                return f"{cls.name}.__init__ sets self.{lacking[0]}, which is read later; call it"
            return None
    return None


def _has(some: Sequence[source.Definition], name: str) -> bool:
    """Whether one of some classes has an attribute, or assigns it to its objects."""
    nodes = [node for cls in some for node in ast.walk(cls.node) if isinstance(node, ast.Attribute)]
    is_assigned = any(node.attr == name and isinstance(node.ctx, ast.Store) for node in nodes)
    return is_assigned or any(name in classes.own_names(cls) for cls in some)


def _assigned(constructor: source.FunctionNode) -> set[str]:
    """The attributes of the object that a constructor assigns."""
    this = _first_parameter(constructor)
    stores = [node for node in ast.walk(constructor) if isinstance(node, ast.Attribute)]
    return {node.attr for node in stores if isinstance(node.ctx, ast.Store) and _is_name(node.value, this)}


def _read(definition: source.Definition, methods: Sequence[str]) -> set[str]:
    """The attributes of the object that some of its methods read, or methods that these call, ``super()`` included."""
    names: set[str] = set()
    waiting = [
        (method, cls) for name in methods if (found := classes.member(definition, name)) for method, cls in [found]
    ]
    visited = {id(method) for method, _ in waiting}
    while waiting:
        method, home = waiting.pop()
        if not isinstance(method, source.FunctionNode):
            continue
        nodes = list(classes.certain_nodes(method))
        read = set(_own_attributes(nodes, _first_parameter(method)))
        names |= read
        called = [classes.member(definition, name) for name in sorted(read)]
        called += [classes.member(definition, call.attr, home) for call in classes.supers(method, home)]
        for pair in filter(None, called):
            if id(pair[0]) not in visited:
                visited.add(id(pair[0]))
                waiting.append(pair)
    return names


def _is_set_elsewhere(definition: source.Definition, name: str, left_out: Sequence[source.Definition]) -> bool:
    """Whether anything but the constructors that are left out may set an attribute."""
    above = classes.ancestry(definition)[0]
    if any(name in classes.own_names(cls) for cls in above):
        return True
    skipped = {id(constructor) for cls in left_out if (constructor := classes.methods(cls).get("__init__"))}
    files = source.neighbours(*(cls.module for cls in above))
    return any(name in _assigned_outside(module, skipped) for module in files)


def _assigned_outside(module: source.Module, skipped: Collection[int]) -> set[str]:
    """The attributes, and words of strings, by which a module may set attributes outside of some functions."""
    names: set[str] = set()
    waiting: list[ast.AST] = list(module.body)
    while waiting:
        node = waiting.pop()
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
        waiting += ast.iter_child_nodes(node)
    return names
