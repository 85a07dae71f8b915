"""A checkpoint is restored into a run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from operator import attrgetter
from typing import Any

from loguru import logger
from torch import Tensor, nn

from pipeline.checkpoint import weights
from pipeline.checkpoint.initial_models import InitialModels, restore_frozen
from pipeline.checkpoint.load_errors import fitting, loading
from pipeline.checkpoint.parts import restore_parts, trained_modules
from pipeline.checkpoint.random_state import restore_random_state
from pipeline.checkpoint.reader import LoadedCheckpoint
from pipeline.checkpoint.state import Recoverable, SchedulerState, TrainingState, classes_of
from pipeline.checkpoint.weights import Models, unique_brains, unique_modules
from pipeline.context import Context
from pipeline.errors import CheckpointError, printable

_REMEDY = "resume with the config that it was begun with, or begin a new run with init_model_path"


def restore_training(
    saved: LoadedCheckpoint, context: Context, recoverables: Mapping[str, Recoverable], initial: InitialModels
) -> None:
    """Restore a checkpoint into a run, once its models are built.

    Args:
        saved: the checkpoint.
        context: of the run.
        recoverables: name -> object whose state it keeps too.
        initial: the models of the context, as they are now.

    Raises:
        CheckpointError: the run has other phases, modules or optimizers than the one that saved it.
    """
    models: Models = context["model"]
    state, where = saved.state, str(saved.path)
    if models:
        phases = unique_modules(models).keys()
        # An experiment makes its model later, and goes on by itself.
        later = {"experiment"} if state and state.experiment else set()
        if phases | later != saved.weights.keys() | later:
            what = f"has weights of the phases {', '.join(saved.weights)}, and the run has {', '.join(sorted(phases))}"
            raise CheckpointError(f"{where}: {what}; {_REMEDY}")
    context["train_state"].update(saved.train_state)
    if state is None:
        restore_weights(saved, models)
        return
    context.restore_requests(context.stop_reason if state.stopped is None else state.stopped, state.requested)
    _check_phases(state, models, where)

    def restore_schedulers() -> None:
        for phase, entry in unique_brains(models).items():
            _load_schedulers(entry, state.optim_schedulers[phase], f"{where}: phase '{phase}'")

    if models:
        restore_models(saved, models, initial, restore_schedulers)
    for phase, entry in models.items():
        with loading(f"{where}: updaters.{phase}"):
            entry["updater"].set_state_dict(state.updaters[phase])
    restore_recoverables(recoverables, state, where)
    # An engine restores them when the code has arrived at the place.
    if state.engine is None:
        restore_generators(state, where)


def restore_models(
    saved: LoadedCheckpoint,
    models: Models,
    initial: InitialModels,
    restore_optimizers: Callable[[], None],
    only: Collection[str] | None = None,
) -> None:
    """Restore weights, which parameters are trained, optimizers, gradients, the parts and the modes of modules, in this order.

    Args:
        saved: a checkpoint with a training state.
        models: phase -> what the network stage built for it.
        initial: the same as they were before anything was restored.
        restore_optimizers: restores the optimizers.
        only: the phases that are restored; of the others, only the weights are. None restores all phases.

    Raises:
        CheckpointError: something does not fit.
    """
    state, where = saved.state, str(saved.path)
    assert state
    restore_weights(saved, models)
    models = {phase: entry for phase, entry in models.items() if only is None or phase in only}
    if state.frozen:
        restore_frozen(models, state.frozen.to_tree(), initial.frozen)
    restore_optimizers()
    parts = initial.parts(models)
    for name, module in trained_modules(models, parts).items():
        _restore_gradients(module, state.gradients.get(name, {}), f"{where}: gradients.{name}")
    # An experiment makes its parts later.
    states = {place: own for place, own in {**state.parts, **state.objects}.items() if initial.owns(place, models)}
    restore_parts(parts, states, initial.options, where)
    if state.modes:
        initial.restore_modes(models, state.modes.to_tree())


def restore_weights(saved: LoadedCheckpoint, models: Models) -> None:
    """Restore the weights, and buffers of whatever size they had."""
    weights.load_weights(saved.weights, models, str(saved.path), saved.resized)


def _check_phases(state: TrainingState, models: Models, where: str) -> None:
    """Raise if the state lacks a phase of the run, or has another."""
    brains, modules = unique_brains(models).keys(), unique_modules(models).keys()
    owners = {"updaters": models.keys(), "optim_schedulers": brains, "gradients": brains}
    owners |= {"frozen.begun": modules, "frozen.now": modules} if state.frozen else {}
    if models and (gone := state.updaters.keys() - models.keys()):
        raise CheckpointError(f"{where}: has the phase '{min(gone)}', and the run has none such; {_REMEDY}")
    for key, phases in owners.items():
        if missing := phases - attrgetter(key)(state).keys():
            raise CheckpointError(f"{where}: {key} has no phase '{min(missing)}', and the run has one; {_REMEDY}")


def _load_schedulers(entry: Mapping[str, Any], states: Mapping[str, SchedulerState], where: str) -> None:
    present = entry["optim_schedulers"]
    if present.keys() != states.keys():
        names = f"has the optim_schedulers {', '.join(states)}, and the run has {', '.join(present)}"
        raise CheckpointError(f"{where}: {names}; {_REMEDY}")
    for name, scheduler in present.items():
        saved, now = states[name], classes_of(scheduler)
        if saved.classes != now:
            raise CheckpointError(f"{where}: '{name}' was {saved.classes}, and is now {now}; {_REMEDY}")
        with fitting(where, f"'{name}'", _REMEDY):
            scheduler.load_state_dict(saved.state)


def _restore_gradients(module: nn.Module, gradients: Mapping[str, Tensor], where: str) -> None:
    """Restore gradients by the names of their parameters; no other parameter has one afterwards.

    Raises:
        CheckpointError: the module has no such parameter, or it has another shape.
    """
    for parameter in module.parameters():
        parameter.grad = None
    for name, gradient in gradients.items():
        with fitting(where, name, _REMEDY):
            owner = module.get_parameter(name)
            owner.grad = gradient.to(owner.device)


def restore_generators(state: TrainingState, where: str) -> None:
    """Restore the random generators.

    Raises:
        CheckpointError: they do not take these states.
    """
    with fitting(where, "random", "use another checkpoint"):
        restore_random_state(dict(state.random))


def restore_recoverables(recoverables: Mapping[str, Recoverable], state: TrainingState, where: str) -> None:
    """Restore the states of objects; ``where``: the checkpoint, for messages."""
    for name, recoverable in recoverables.items():
        if name in state.recoverables:
            restore_recoverable(name, recoverable, state, where)
        else:
            logger.warning(f"{where}: knows nothing of '{name}', which begins anew")
    for name in map(printable, state.recoverables.keys() - recoverables.keys()):
        # No warning: a runner stage adds its objects at the top of ``run``, which is yet to come.
        how = "its plugin in the config" if name.startswith("plugin:") else f"add_recoverable('{name}', …)"
        logger.info(f"{where}: has a state of '{name}': {how} restores it, or it is left out")


def restore_recoverable(name: str, recoverable: Recoverable, state: TrainingState, where: str) -> None:
    """Restore the state of one object."""
    saved = state.recoverables[name]
    with loading(f"{where}: recoverables.{name}"):
        if isinstance(recoverable, nn.Module) and isinstance(saved, Mapping):
            weights.load_module(recoverable, saved, "the module")
        else:
            recoverable.load_state_dict(saved)
