"""Methods of the original trainers that nothing calls here, so that a subclass's override would never run."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable, Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any

from pipeline.user_code import classes, source

BRAIN = "pipeline.training.brain:Brain"

TRAINER = "pipeline.trainer:GeneralTrainer"

OF_A_BRAIN = {
    "freeze_optimizers": "call requires_grad_(False) on what is to rest, in on_stage_start or on_fit_batch_start",
    "zero_grad": "gradients are forgotten after each optimizer step; what else it does belongs into on_fit_batch_end",
    "optimizers_step": "write what comes after a step into on_fit_batch_end, where should_step is true, or a whole fit_batch",
    "check_gradients": "set check_gradients: true for the runner, or the run option skip_nonfinite_grads",
    "check_loss_isfinite": "nonfinite_patience says how many losses may not be finite; look at them in compute_objectives",
    "update_average": "count_samples says by what losses are averaged; report other numbers with self.log",
}
"""Method -> what to do instead; in a Brain, be it alone or in a config."""

IN_A_CONFIG = {
    **OF_A_BRAIN,
    "init_optimizers": "name the optimizers under optim_schedulers of the phase; an updater of your own may make its own",
}
"""The same in a config, where the phase says what trains the Brain."""

OF_A_TRAINER = {
    **{
        stage: f"write a class for the stage, and name it as {stage}_class_path of the runner"
        for stage in ("instance", "network", "startup", "runner", "terminal")
    },
    "processor_register": "write statuses = {**GeneralTrainer.statuses, 'my_pass': 'my_method'} in the class",
    "reload_train_context": "write a plugin with before_stage, which is called before each stage",
    "handle_processor_exception": "write a plugin with on_stage_error, or abort(context, error) of the terminal stage",
}
"""The same in a subclass of GeneralTrainer."""


def in_source(
    definition: source.Definition, base: str, remedies: Mapping[str, str], modules: Iterable[source.Module]
) -> list[str]:
    """The messages for such methods in the source of a class, with place and remedy.

    Args:
        definition: the class.
        base: ``module:Name`` of what it derives from; where that is not certain, there is nothing to say.
        remedies: method -> what to do instead.
        modules: whatever else may call a method of it.
    """
    above, _ = classes.ancestry(definition)
    order = [f"{each.module.name}:{each.name}" for each in above]
    if base not in order:
        return []
    own = [each for each in above[: order.index(base)] if not each.module.name.startswith("torch.")]
    found = {name: (each, classes.methods(each)[name]) for each in reversed(own) for name in classes.methods(each)}
    bodies = {name: set(_mentions(found[name][1], ())) for name in remedies if name in found}
    if not bodies:
        return []
    files = {
        each.file: each for module in (*modules, *(each.module for each in own)) for each in source.neighbours(module)
    }
    elsewhere = {name for each in files.values() for node in each.body for name in _mentions(node, remedies)}
    return [
        f"{each.name}.{name} ({each.module.file.name}:{node.lineno}) is called by nobody; {remedies[name]}"
        for name, (each, node) in found.items()
        if name in _left(bodies, elsewhere)
    ]


def in_class(cls: type, base: str, remedies: Mapping[str, str]) -> list[str]:
    """The same for an imported class, whose source may be missing."""
    order = [f"{each.__module__}:{each.__qualname__}" for each in cls.__mro__]
    if base not in order:
        return []
    own = [each for each in cls.__mro__[: order.index(base)] if not each.__module__.startswith("torch.")]
    found = {name: (each, vars(each)[name]) for each in reversed(own) for name in vars(each)}
    bodies = {name: set(_names(found[name][1])) for name in remedies if name in found}
    if not bodies:
        return []
    functions = [each for _, each in found.values() if isinstance(each, FunctionType)]
    # A script imports this package's classes, and what these call is not what it calls.
    there = [each for function in functions for each in function.__globals__.values()]
    beside = [each for each in there if each not in own and not _is_of_the_package(each)]
    others = [each for name, (_, each) in found.items() if name not in bodies]
    elsewhere = {name for each in (*others, *beside) for name in _names(each)}
    return [
        f"{found[name][0].__name__}.{name} is called by nobody; {remedies[name]}" for name in _left(bodies, elsewhere)
    ]


def _is_of_the_package(thing: Any) -> bool:
    module = f"{getattr(thing, '__module__', '')}."
    return module.startswith("pipeline.") and not module.startswith("pipeline.workspaces.")


_ANY = "*"
"""Stands for every name, where code makes one up."""


def _left(bodies: Mapping[str, set[str]], elsewhere: set[str]) -> list[str]:
    """The methods that no reachable code mentions."""
    if _ANY in elsewhere:
        return []
    waiting, reached = [name for name in bodies if name in elsewhere], set[str]()
    while waiting:
        name = waiting.pop()
        reached.add(name)
        waiting += (bodies[name] & set(bodies)) - reached
    return [name for name in bodies if name not in reached]


def _mentions(node: ast.AST, apart: Iterable[str]) -> Iterator[str]:
    """The attribute names that code uses, except within functions of some names."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) if name in apart:
            return
        case ast.Attribute(attr=name):
            yield name
        case ast.Call(func=ast.Name(id="getattr"), args=[ast.Name(id="self"), key, *_]):
            yield str(key.value) if isinstance(key, ast.Constant) else _ANY
    for each in ast.iter_child_nodes(node):
        yield from _mentions(each, apart)


def _names(thing: Any) -> Iterator[str]:
    """The same for a function or class, from its bytecode; with global names."""
    for each in vars(thing).values() if isinstance(thing, type) else ():
        yield from _names(each) if not isinstance(each, type) else ()
    thing = getattr(thing, "fget", getattr(thing, "__func__", thing))
    code = thing if isinstance(thing, CodeType) else getattr(inspect.unwrap(thing), "__code__", None)
    if isinstance(code, CodeType):
        # The body of a class names what it defines.
        yield from code.co_names if code.co_flags & inspect.CO_OPTIMIZED else ()
        for each in code.co_consts:
            if isinstance(each, CodeType):
                yield from _names(each)
            elif isinstance(each, str) and "getattr" in code.co_names:
                yield each
