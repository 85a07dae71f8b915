"""Methods of the original trainers that nothing calls here, so that a subclass's override would never run."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from pipeline.context import STAGES
from pipeline.user_code import classes, source

BRAIN = "pipeline.brain.brain:Brain"

TRAINER = "pipeline.trainer:GeneralTrainer"

STANDARD_UPDATER = "pipeline.updater.updater:StandardUpdater"

_LOOP, _SAVE = (
    "write a runner stage with a loop of your own, or a fit_batch",
    "set ckpt_interval_steps or ckpt_interval_minutes",
)

# Name of SpeechBrain's Brain -> what to do instead.
BRAIN_REMEDIES = {
    **dict.fromkeys(("_fit_train", "_optimizer_step_limit_exceeded"), _LOOP),
    "_fit_valid": "write on_stage_start, evaluate_batch and on_stage_end",
    **dict.fromkeys(("_should_save_intra_epoch_ckpt", "_save_intra_epoch_ckpt"), _SAVE),
    "_compile": "the options compile and jit say which modules are compiled, in fit and in a run",
    "_wrap_distributed": "several processes share the work where a launcher starts them; wrap nothing yourself",
    "_train_loader_specifics": "write make_dataloader",
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
    return _faults_of(below, base, remedies, modules)


def uncalled_faults_of_class(
    cls: type, base: type, remedies: Mapping[str, str], workspace: Path | None = None
) -> list[str]:
    """The same for a class that is loaded, whose bases are known even if its source names them under a condition.

    Args:
        cls: the class.
        base: what it derives from.
        remedies: method -> what to do instead.
        workspace: a folder with files that may call a method of it, if they are loaded.
    """
    below = cls.__mro__[: cls.__mro__.index(base)]
    definitions = [definition for each in below if (definition := source.class_definition(each))]
    name = f"{base.__module__}:{base.__qualname__}"
    faults = _faults_of(definitions, name, remedies, ())
    if faults and workspace:
        return _faults_of(definitions, name, remedies, source.loaded_modules(workspace))
    return faults


def _faults_of(
    below: Sequence[source.Definition], base: str, remedies: Mapping[str, str], modules: Iterable[source.Module]
) -> list[str]:
    """The messages for a class and its bases up to ``base``, in the order in which Python looks for a method."""
    own = [cls for cls in below if not cls.module.name.startswith("torch.")]
    methods = {name: (cls, node) for cls in reversed(own) for name, node in classes.methods(cls).items()}
    bodies = {name: set(_mentions(methods[name][1], ())) for name in remedies if name in methods}
    callers = (*modules, *(cls.module for cls in own)) if bodies else ()
    files = source.neighbours(*callers)
    mentioned = {name for file in files for node in file.body for name in _mentions(node, remedies)}
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
    for cls in own:
        used = sorted(absent & set(_mentions(cls.node, ())))
        faults += [f"{cls.name} ({cls.location}) uses {name}, which nobody has here; {remedies[name]}" for name in used]
    return faults


# Stands for every name, where code makes one up.
_ANY = "*"


def _mentions(node: ast.AST, apart: Iterable[str]) -> Iterator[str]:
    """The attribute names that code uses, except within functions of some names."""
    waiting = [node]
    while waiting:
        current = waiting.pop()
        match current:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) if name in apart:
                continue
            case ast.Attribute(attr=name):
                yield name
            case ast.Call(func=ast.Name(id="getattr"), args=[ast.Name(id="self"), key, *_]):
                yield str(key.value) if isinstance(key, ast.Constant) else _ANY
        waiting += ast.iter_child_nodes(current)
