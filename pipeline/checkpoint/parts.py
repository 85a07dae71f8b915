"""Parts: the objects with a state that a Brain, an updater or an experiment holds in its attributes.

Checkpoints keep the states of the parts, besides the weights and the schedulers of the phases. A part is directly in an
attribute, or in a list, tuple, dict or SimpleNamespace that is an attribute. It is one of torch's modules, optimizers,
schedules and gradient scalers, or any object whose class defines ``state_dict`` and ``load_state_dict``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from loguru import logger
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from pipeline.checkpoint.load_errors import fitting, loading
from pipeline.checkpoint.optimizer_state import Options, load_optimizer, optimizer_state_of, options_of
from pipeline.checkpoint.tensors import memory_of, tensors_in
from pipeline.checkpoint.user_objects import DEPTH, MOST_ITEMS, contents_of, direct_items, is_framework
from pipeline.checkpoint.weights import Models, buffers_of, load_module, module_of, unique_brains
from pipeline.errors import CheckpointError, printable

# Place -> part.
Parts = Mapping[str, Any]

# Place -> the options of an optimizer when the training began. Any other part has none.
PartOptions = Mapping[str, Options]

# Where a tensor is in memory.
_Memory = tuple[int, int]


class StandIn:
    """A recoverable that saves and loads the state of another object.

    Attributes:
        target: the object.
    """

    target: Any


def owners_of(models: Models) -> dict[str, Any]:
    """Return the Brain and the updater of each phase by their place, such as ``phase.line.updater``."""
    return {
        f"phase.{phase}.{role}": entry[role]
        for phase, entry in models.items()
        for role in ("brain", "updater")
        if entry.get(role) is not None
    }


def parts_of(models: Models, owners: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the parts by their place, such as ``phase.line.updater.optimizer``.

    Args:
        models: phase -> what the network stage built for it. Their weights and schedulers are not parts.
        owners: the objects whose attributes are searched, by place. None: the Brains and updaters.
    """
    owners = owners_of(models) if owners is None else owners
    known = {id(each) for each in (*_saved_elsewhere(models), *owners.values())}
    found = [(place, value) for place, value in _held(owners) if id(value) not in known and has_state(value)]
    has_module = any(isinstance(value, nn.Module) for _, value in found)
    weights = _weights_of(models) if has_module else set()
    parts: dict[str, Any] = {}
    for place, value in found:
        if id(value) not in known and not _is_view(value, weights):
            known.add(id(value))
            parts[place] = value
    return parts


def has_state(value: Any) -> bool:
    """Return whether checkpoints keep the state of an object that stands in an attribute.

    Data is not kept: its place is part of the position in the data. An object of the framework is kept by what uses it,
    except an OptimScheduler.
    """
    if isinstance(value, nn.Module | Optimizer | LRScheduler):
        return True
    if isinstance(value, GradScaler):
        return value.is_enabled()
    # Of the class, since an instance may compute its attributes.
    kind = type(value)
    if not hasattr(kind, "state_dict") or not hasattr(kind, "load_state_dict"):
        return False
    if isinstance(value, Dataset) or hasattr(kind, "__iter__"):
        return False
    return is_of_user(value) or isinstance(getattr(value, "optimizer", None), Optimizer)


def is_of_user(part: Any) -> bool:
    """Return whether the user's code loads the state of a part, and not torch's or the framework's."""
    if isinstance(part, nn.Module | Optimizer | LRScheduler | GradScaler):
        return False
    load = getattr(type(part), "load_state_dict", None)
    return not is_framework(getattr(load, "__module__", None) or "")


def options_of_parts(parts: Parts) -> dict[str, Options]:
    """Return the options of the optimizers among the parts; any other part has none."""
    return {place: options_of(part) if isinstance(part, Optimizer) else () for place, part in parts.items()}


def part_states(
    parts: Parts,
    configured: PartOptions,
    states: Any = None,
    recoverables: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the states of the parts, by place; None for one without a state, or whose state is saved elsewhere.

    Args:
        parts: the parts now.
        configured: what ``options_of_parts`` returned when the training began.
        states: other states that are saved, such as the states of updaters. They may contain the state of an optimizer.
        recoverables: the objects that are saved by name.

    Raises:
        CheckpointError: a part was made after the training had started.
    """
    saved = {memory_of(tensor) for tensor in tensors_in(states)}
    named = _targets(recoverables)
    own: dict[str, Any] = {}
    for place, part in parts.items():
        state = None if id(part) in named else _state_of(part, configured.get(place, ()))
        memory = {memory_of(tensor) for tensor in tensors_in(state)}
        is_saved = bool(memory) and memory <= saved and not is_of_user(part)
        own[place] = None if is_saved else state
        if place not in configured and not _is_empty(own[place]):
            what = f"{place} was made after the training had begun: a resumed run could not be led there"
            raise CheckpointError(f"{what}; make it in the constructor, in on_fit_start or in setup_model")
    return own


def trained_modules(models: Models, parts: Parts) -> dict[str, nn.Module]:
    """Return the modules whose parameters may have gradients: the modules of each phase, and the parts that are modules.

    Of phases that share a Brain, the first has its modules.
    """
    with_brain = {phase: entry for phase, entry in models.items() if entry.get("brain") is not None}
    modules = {phase: entry["brain"].modules for phase, entry in unique_brains(with_brain).items()}
    modules |= {phase: module_of(entry) for phase, entry in models.items() if phase not in with_brain}
    return modules | {place: part for place, part in parts.items() if isinstance(part, nn.Module)}


def split_states(parts: Parts, states: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the states that are alike on all ranks, and those of the user's objects, of which each rank has its own."""
    own = {place: state for place, state in states.items() if is_of_user(parts[place])}
    return {place: state for place, state in states.items() if place not in own}, own


def restore_parts(parts: Parts, states: Mapping[str, Any], configured: PartOptions, where: str) -> None:
    """Restore the states of the parts.

    Raises:
        CheckpointError: one is not there, or is another.
    """
    missing = [place for place, state in states.items() if place not in parts and not _is_empty(state)]
    if missing:
        what = f"{where}: has the state of {printable(missing[0])}, and the run has none such"
        raise CheckpointError(f"{what}; make it in the constructor, or begin a new run with init_model_path")
    for place, part in parts.items():
        state = states.get(place)
        if state is not None:
            _load(part, state, configured.get(place, ()), where, place)
        elif place not in states and not _is_empty(part.state_dict()):
            logger.warning(f"{where}: knows nothing of {place}, which begins anew unless something else restores it")


def hidden_parts(models: Models, owners: Mapping[str, Any], recoverables: Mapping[str, Any]) -> dict[str, Any]:
    """Return, by place, the objects with a state that are too deep in the attributes of the owners to be parts.

    They are looked for once, since the objects of a user may be many.

    Args:
        models: phase -> what the network stage built for it.
        owners: the objects whose attributes are searched, by place.
        recoverables: the objects that are saved by name; what these hold is their own affair.
    """
    parts = parts_of(models, owners)
    visited = {id(each) for each in (*_saved_elsewhere(models), *owners.values(), *parts.values())}
    visited |= _targets(recoverables)
    modules = [part for part in parts.values() if isinstance(part, nn.Module)]
    weights = _weights_of(models).union(*(map(memory_of, module.state_dict().values()) for module in modules))
    hidden: dict[str, Any] = {}
    level = list(_held(owners))
    for _ in range(DEPTH):
        below: list[tuple[str, Any]] = []
        for place, value in level:
            if id(value) in visited:
                continue
            visited.add(id(value))
            if not has_state(value):
                below += [(f"{place}.{name}", item) for name, item in contents_of(value)]
            elif not _is_view(value, weights):
                hidden[place] = value
        level = below
    return hidden


def warn_of_hidden(hidden: Parts) -> None:
    """Log one warning that names the objects whose states checkpoints do not find, and says what to do."""
    if hidden:
        names = ", ".join(f"{place} ({type(part).__name__})" for place, part in hidden.items())
        what = f"checkpoints do not find the state of {printable(names)} inside other objects"
        move = "make it an attribute of the Brain, updater or experiment, or an item of a list or dict that is one"
        define = "give the class that holds it state_dict() and load_state_dict(state)"
        register = "register it with the checkpointer: add_recoverable(name, object)"
        logger.warning(f"{what}; {move}, {define}, or {register}")


def _held(owners: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The attributes of the owners by place, and the items of the containers among them."""
    for place, owner in owners.items():
        for name, value in list(getattr(owner, "__dict__", {}).items()):
            yield f"{place}.{name}", value
            if not _is_data(value):
                for key, item in list(direct_items(value)):
                    yield f"{place}.{name}.{key}", item


def _is_data(value: Any) -> bool:
    """Whether a list or dict has too many items to search. The first one tells what they are."""
    if not isinstance(value, list | tuple | dict) or len(value) <= MOST_ITEMS:
        return False
    items: Iterable[Any] = value.values() if isinstance(value, dict) else value
    return not has_state(next(iter(items)))


def _saved_elsewhere(models: Models) -> Iterator[Any]:
    """The modules, schedulers, Brains and updaters of the phases."""
    for entry in models.values():
        yield from module_of(entry).modules()
        yield from (entry.get("brain"), entry.get("updater"))
        if "brain" in entry:
            yield from entry["brain"].modules.modules()
        for scheduler in (entry.get("optim_schedulers") or {}).values():
            yield from (scheduler, getattr(scheduler, "optimizer", None), getattr(scheduler, "scaler", None))


def _weights_of(models: Models) -> set[_Memory]:
    """Where the weights of the phases are in memory."""
    return {memory_of(value) for entry in models.values() for value in module_of(entry).state_dict().values()}


def _is_view(part: Any, weights: Collection[_Memory]) -> bool:
    """Whether a part is a module with nothing but weights in it, such as a wrapper around a part of the model."""
    if not isinstance(part, nn.Module) or None in buffers_of(part).values():
        # A buffer that is None gets a state later.
        return False
    return all(memory_of(value) in weights for value in part.state_dict().values())


def _targets(recoverables: Mapping[str, Any] | None) -> set[int]:
    """The ids of the objects whose states are saved by name."""
    objects = (recoverables or {}).values()
    return {id(each.target if isinstance(each, StandIn) else each) for each in objects}


def _state_of(part: Any, configured: Options) -> Any:
    """The state of a part; None if there is none. An object of the user may have an empty one."""
    if isinstance(part, Optimizer):
        return optimizer_state_of(part, configured or options_of(part))
    state = part.state_dict()
    return state if is_of_user(part) else state or None


def _is_empty(state: Any) -> bool:
    return state is None or (isinstance(state, Mapping | list | tuple) and not state)


def _load(part: Any, state: Any, configured: Options, where: str, place: str) -> None:
    """Have a part take its state."""
    if is_of_user(part):
        with loading(f"{where}: {place}"):
            part.load_state_dict(state)
        return
    with fitting(where, place, "make it as it was, or begin a new run with init_model_path"):
        if isinstance(part, Optimizer):
            load_optimizer(part, state, configured or options_of(part))
        elif isinstance(part, LRScheduler) and "base_lrs" in state:
            # Those that are configured now, as the optimizer's options are.
            part.load_state_dict({**state, "base_lrs": part.base_lrs})
        elif isinstance(part, nn.Module):
            load_module(part, state, "the module")
        else:
            part.load_state_dict(state)
