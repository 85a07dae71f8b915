"""Methods of the original trainers that nothing calls here, so that a subclass's override would never run."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping

from pipeline.context import STAGES
from pipeline.user_code import classes, source

BRAIN = "pipeline.training.brain:Brain"

TRAINER = "pipeline.trainer:GeneralTrainer"

STANDARD_UPDATER = "pipeline.training.updater:StandardUpdater"

# Method -> what to do instead; in a Brain, be it alone or in a config.
BRAIN_REMEDIES = {
    "freeze_optimizers": "call requires_grad_(False) on what is to rest, in on_stage_start or on_fit_batch_start",
    "zero_grad": "gradients are forgotten after each optimizer step; what else it does belongs into on_fit_batch_end",
    "optimizers_step": "write what comes after a step into on_fit_batch_end, where should_step is true, or a whole fit_batch",
    "check_gradients": "set check_gradients: true for the runner, or the run option skip_nonfinite_grads",
    "check_loss_isfinite": "nonfinite_patience says how many losses may not be finite; look at them in compute_objectives",
    "update_average": "count_samples says by what losses are averaged; report other numbers with self.log",
}

# The same in a config, where the phase says what trains the Brain.
CONFIG_REMEDIES = {
    **BRAIN_REMEDIES,
    "init_optimizers": "name the optimizers under optim_schedulers of the phase; an updater of your own may make its own",
}

# The same in a StandardUpdater of a config; by hand it calls them.
UPDATER_REMEDIES = {
    "read_batch": "the run reads the batches; change them in update_core, or with a collate_fn of the dataset",
    "new_epoch": "the run begins the epochs; write a plugin with before_epoch, or a dataset or sampler with set_epoch",
}

_STATUSES = "write statuses = {**GeneralTrainer.statuses, 'my_pass': 'my_method'} in the class"

# The same in a subclass of GeneralTrainer.
TRAINER_REMEDIES = {
    **{stage: f"write a class for the stage, and name it as {stage}_class_path of the runner" for stage in STAGES},
    **dict.fromkeys(("processor_register", "regist_context_processor", "context_process"), _STATUSES),
    "other_status_processor": f"an unknown status is an error at once; {_STATUSES}",
    "reload_train_context": "write a plugin with before_stage, which is called before each stage",
    "handle_processor_exception": "write a plugin with on_stage_error, or abort(context, error) of the terminal stage",
}


def uncalled_faults(
    definition: source.Definition | None, base: str, remedies: Mapping[str, str], modules: Iterable[source.Module] = ()
) -> list[str]:
    """The messages for such methods in the source of a class, and for calls of those that nobody has, with place and remedy.

    Args:
        definition: the class; None where its source cannot be read.
        base: ``module:Name`` of what it derives from; where that is not certain, there is nothing to say.
        remedies: method -> what to do instead.
        modules: whatever else may call a method of it.
    """
    above = classes.ancestry(definition)[0] if definition else []
    order = [f"{cls.module.name}:{cls.name}" for cls in above]
    below = above[: order.index(base)] if base in order else []
    own = [cls for cls in below if not cls.module.name.startswith("torch.")]
    methods = {name: (cls, node) for cls in reversed(own) for name, node in classes.methods(cls).items()}
    bodies = {name: set(_mentions(methods[name][1], ())) for name in remedies if name in methods}
    callers = (*modules, *(cls.module for cls in own)) if bodies else ()
    files = {near.file: near for module in callers for near in source.neighbours(module)}
    mentioned = {name for file in files.values() for node in file.body for name in _mentions(node, remedies)}
    # What only an uncalled method calls is called by nobody either.
    while more := {name for method in mentioned & set(bodies) for name in bodies[method]} - mentioned:
        mentioned |= more
    faults = [
        f"{cls.name}.{name} ({cls.module.file.name}:{node.lineno}) is called by nobody; {remedies[name]}"
        for name, (cls, node) in methods.items()
        if name in bodies and not mentioned & {name, _ANY}
    ]
    # A trainer has no attribute of such a name; its stages' names are too common to tell.
    absent = remedies.keys() - {*STAGES, *methods} if base == TRAINER else set()
    for cls in own if absent else ():
        used = sorted(absent & set(_mentions(cls.node, ())))
        faults += [f"{cls.name} ({cls.location}) uses {name}, which nobody has here; {remedies[name]}" for name in used]
    return faults


# Stands for every name, where code makes one up.
_ANY = "*"


def _mentions(node: ast.AST, apart: Iterable[str]) -> Iterator[str]:
    """The attribute names that code uses, except within functions of some names."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) if name in apart:
            return
        case ast.Attribute(attr=name):
            yield name
        case ast.Call(func=ast.Name(id="getattr"), args=[ast.Name(id="self"), key, *_]):
            yield str(key.value) if isinstance(key, ast.Constant) else _ANY
    for child in ast.iter_child_nodes(node):
        yield from _mentions(child, apart)
