"""What checkpoints keep of the models beside weights: optimizers, other parts, and what has changed since the beginning."""

from __future__ import annotations

import copy
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from loguru import logger
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from pipeline import workspaces
from pipeline.checkpoint.comparison import brief, differences
from pipeline.checkpoint.modes import Modes, names_in_evaluation_mode, restore_modes
from pipeline.checkpoint.weights import (
    Models,
    buffers_of,
    is_extra_state,
    load_module,
    module_of,
    tied_names,
    unique_modules,
)
from pipeline.errors import CheckpointError, printable


@contextmanager
def fitting(where: str, place: str, remedy: str) -> Iterator[None]:
    """Say which state of a checkpoint it is, where an object does not take it.

    Args:
        where: the checkpoint.
        place: of the state.
        remedy: what to do.

    Raises:
        CheckpointError: the block has raised what a wrong state leads to.
    """
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {place}: {error}") from error
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
        raise CheckpointError(f"{where}: the state of {place} does not fit it ({error}); {remedy}") from error


# Under which the state of an optimizer keeps the options that the config gave it.
CONFIG_OPTIONS = "configured"

# The options of each parameter group.
Options = Sequence[Mapping[str, Any]]

# What torch's Adam and RMSprop make, of zeros, before their first step where an option asks for it, and only then.
_NEEDED = {"amsgrad": "max_exp_avg_sq", "centered": "grad_avg", "momentum": "momentum_buffer"}


def options_of(optimizer: Optimizer) -> Options:
    """The options of each parameter group; for a new optimizer these are the configured ones."""
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return copy.deepcopy(groups)


def optimizer_state_of(optimizer: Optimizer, configured: Options) -> Mapping[str, Any]:
    """The state of an optimizer for a checkpoint; it contains what torch loads."""
    state: Mapping[str, Any] = optimizer.state_dict()
    if not isinstance(state, Mapping):
        return state
    warn_of_unsaved(optimizer, state)
    dtypes = [[str(parameter.dtype) for parameter in group["params"]] for group in optimizer.param_groups]
    return {**state, CONFIG_OPTIONS: configured, "dtypes": dtypes}


# The plain numbers in the attributes of optimizers, as they were before the first step.
_NUMBERS: WeakKeyDictionary[Optimizer, dict[str, float]] = WeakKeyDictionary()


def remember_numbers(optimizer: Optimizer) -> None:
    """Remember the plain numbers of a new optimizer: one that changes is state, such as a count of steps."""
    _NUMBERS.setdefault(optimizer, _numbers_of(optimizer))


def _numbers_of(optimizer: Optimizer) -> dict[str, float]:
    return {name: value for name, value in vars(optimizer).items() if type(value) in (int, float)}


# Optimizers of which a warning has said that a part of their state is not saved.
_WARNED: WeakSet[Optimizer] = WeakSet()


def warn_of_unsaved(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Warn once of attributes of an optimizer that its ``state_dict`` does not contain."""
    if optimizer in _WARNED or type(optimizer).__module__.partition(".")[0] == "torch":
        return
    if unsaved := unsaved_attributes(optimizer, state):
        _WARNED.add(optimizer)
        kind = type(optimizer).__name__
        what = f"{kind}: state_dict() does not contain {', '.join(unsaved)}, so a resumed run begins without that state"
        logger.warning(f"{what}; override state_dict and load_state_dict of {kind} to save it")


def unsaved_attributes(optimizer: Optimizer, state: Mapping[str, Any]) -> list[str]:
    """The attributes with tensors, or with numbers that have changed, that a ``state_dict`` does not contain.

    Args:
        optimizer: of a class that is not torch's; it may wrap another optimizer.
        state: what its ``state_dict`` has returned.

    Returns:
        The names, such as ``Lookahead.slow_weights``. Parameters and their gradients are no state of the optimizer.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    known = {_memory(tensor) for tensor in (*parameters, *gradients, *_tensors(state))}
    saved = list(_tensors(state))
    unsaved = []
    for name, value in vars(optimizer).items():
        if name in _OF_TORCH:
            continue
        inner = [own.state for _, own in _within(value, name, set()) if isinstance(own, Optimizer)]
        held = [*_tensors(value), *_tensors(inner)]
        if any(_memory(tensor) not in known and not _is_copied(tensor, saved) for tensor in held):
            unsaved.append(f"{type(optimizer).__name__}.{name}")
    before = _NUMBERS.get(optimizer, {})
    for name, number in _numbers_of(optimizer).items():
        has_changed = number != before.get(name, number)
        if has_changed and state.get(name) != number:
            unsaved.append(f"{type(optimizer).__name__}.{name}")
    return unsaved


# Attributes that torch itself saves, or sets for the time of a step.
_OF_TORCH = frozenset({"param_groups", "state", "defaults", "grad_scaler", "found_inf"})


def _is_copied(tensor: Tensor, saved: Sequence[Tensor]) -> bool:
    """Whether a state contains a copy of a tensor."""
    alike = (other for other in saved if other.shape == tensor.shape and other.dtype == tensor.dtype)
    return any(torch.equal(tensor, other.to(tensor.device)) for other in alike)


def load_optimizer(
    optimizer: Optimizer, state: Mapping[str, Any], configured: Options, *, scheduled: bool = False
) -> None:
    """Restore moments and steps, and the options that the config has not changed.

    Args:
        optimizer: takes it.
        state: what ``optimizer_state_of`` returned, or torch's ``state_dict``.
        configured: what this optimizer is configured with.
        scheduled: whether a schedule of ours sets the rate; of torch's the groups tell. What it has made of the old
            rate, it has made of the new.

    Raises:
        ValueError, KeyError: it is the state of another.
    """
    groups = [dict(group) for group in state["param_groups"]]
    # A group that was added later is configured nowhere.
    for group, before, now in zip(groups, state.get(CONFIG_OPTIONS, configured), configured, strict=False):
        for key, value in now.items():
            if key not in before or any(differences(before[key], value)):
                scales = key == "lr" and before["lr"] and (scheduled or "initial_lr" in now)
                share = group["lr"] / before["lr"] if scales else 1
                group[key] = copy.deepcopy(value) if share == 1 else value * share
    optimizer.load_state_dict({**state, "param_groups": groups})
    # Torch has converted tensors to the type of their parameter.
    for before, group, dtypes in zip(groups, optimizer.param_groups, state.get("dtypes", ()), strict=False):
        for number, parameter, dtype in zip(before["params"], group["params"], dtypes, strict=True):
            if number in state["state"] and str(parameter.dtype) == dtype:
                optimizer.state[parameter] = _with_types(optimizer.state[parameter], state["state"][number])
    for group in optimizer.param_groups:
        for needed in (name for option, name in _NEEDED.items() if group.get(option)):
            for parameter in group["params"]:
                if own := optimizer.state.get(parameter):
                    own.setdefault(needed, torch.zeros_like(parameter, memory_format=torch.preserve_format))


def _with_types(loaded: Any, saved: Any) -> Any:
    """What torch has loaded, with the types that were saved."""
    if isinstance(saved, Tensor):
        return loaded if loaded.dtype == saved.dtype else saved.to(loaded.device)
    if isinstance(saved, Mapping):
        return {key: _with_types(loaded[key], value) for key, value in saved.items()}
    if isinstance(saved, list | tuple):
        return type(saved)(_with_types(*pair) for pair in zip(loaded, saved, strict=True))
    return loaded


# Packages whose objects are not looked into; the standard library is among them.
_OTHERS = {*sys.stdlib_module_names, "torch", "pipeline", "pipeline_plugins", "loguru", "numpy"}

# Items of a list or dict that is looked through.
_MOST = 100

# Place -> an object with a state.
Parts = Mapping[str, Any]


def parts_of(models: Models) -> dict[str, Any]:
    """The parts by their place, such as ``phase.line.updater.optimizer``; without weights and schedulers, which are saved elsewhere."""
    elsewhere = {id(part) for entry in models.values() for part in _saved_elsewhere(entry)}
    storages = {_memory(value) for entry in models.values() for value in module_of(entry).state_dict().values()}
    parts: dict[str, Any] = {}
    for phase, entry in models.items():
        for role in ("brain", "updater"):
            for name, part in _attributes(entry.get(role)):
                if id(part) not in elsewhere and not (isinstance(part, nn.Module) and _shows(part, storages)):
                    elsewhere.add(id(part))
                    parts[f"phase.{phase}.{role}.{name}"] = part
    return parts


def part_states(parts: Parts, updaters: Mapping[str, Any], configured: Mapping[str, Options]) -> dict[str, Any]:
    """The states of the parts; None for one without a state, or that is in the state of an updater."""
    saved = {_memory(tensor) for tensor in _tensors(updaters)}
    states: dict[str, Any] = {}
    for place, part in parts.items():
        if isinstance(part, Optimizer):
            state: Any = optimizer_state_of(part, configured.get(place) or options_of(part))
        else:
            state = part.state_dict()
        memory = {_memory(tensor) for tensor in _tensors(state)}
        states[place] = None if memory and memory <= saved else state or None
    return states


def restore_parts(parts: Parts, states: Mapping[str, Any], configured: Mapping[str, Options], where: str) -> None:
    """Restore the states of the parts.

    Raises:
        CheckpointError: one is not there, or is another.
    """
    if missing := [place for place, state in states.items() if state and place not in parts]:
        what = f"{where}: has the state of {printable(missing[0])}, and the run has none such"
        raise CheckpointError(f"{what}; make it in the constructor, or begin a new run with init_model_path")
    for place, part in parts.items():
        if place not in states and part.state_dict():
            logger.warning(f"{where}: knows nothing of {place}, which begins anew unless something else restores it")
        elif state := states.get(place):
            with fitting(where, place, "make it as it was, or begin a new run with init_model_path"):
                _load(part, state, configured.get(place))


def _saved_elsewhere(entry: Mapping[str, Any]) -> Iterator[Any]:
    """The objects that are saved elsewhere."""
    yield from module_of(entry).modules()
    if "brain" in entry:
        yield from entry["brain"].modules.modules()
    for scheduler in (entry.get("optim_schedulers") or {}).values():
        yield from (scheduler, getattr(scheduler, "optimizer", None), getattr(scheduler, "scaler", None))


def _attributes(owner: Any) -> Iterator[tuple[str, Any]]:
    """The objects with a state in the attributes of an object, also within lists, dicts and the user's objects."""
    visited = {id(owner)}
    for name, value in getattr(owner, "__dict__", {}).items():
        yield from _within(value, name, visited)


def _within(value: Any, place: str, visited: set[int]) -> Iterator[tuple[str, Any]]:
    if _has_state(value):
        yield place, value
    elif id(value) not in visited:
        visited.add(id(value))
        for key, item in _items(value):
            yield from _within(item, f"{place}.{key}", visited)


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    """The items of a list, a dict or a user's object; data, which is long or iterable, is not searched."""
    kind = type(value)
    if isinstance(value, list | tuple):
        return () if _is_long(value) else enumerate(value)
    if kind in {dict, OrderedDict, defaultdict}:
        return () if _is_long(value.values()) else list(value.items())
    module = kind.__module__
    if module.partition(".")[0] in _OTHERS and not module.startswith(f"{workspaces.__name__}."):
        return vars(value).items() if kind is SimpleNamespace else ()
    if hasattr(kind, "__iter__") or hasattr(kind, "__getitem__"):
        return ()
    slots = [name for cls in kind.__mro__ for name in vars(cls).get("__slots__", ())]
    attributes = {name: getattr(value, name) for name in slots if isinstance(name, str) and hasattr(value, name)}
    return list({**attributes, **getattr(value, "__dict__", {})}.items())


def _is_long(values: Collection[Any]) -> bool:
    """Whether there are too many items to search."""
    return len(values) > _MOST and not _has_state(next(iter(values)))


def _has_state(value: Any) -> bool:
    """Whether an object of torch or an OptimScheduler has a state."""
    if isinstance(value, nn.Module | Optimizer | LRScheduler | GradScaler):
        # One that is disabled has none.
        return not isinstance(value, GradScaler) or value.is_enabled()
    return isinstance(getattr(value, "optimizer", None), Optimizer) and hasattr(value, "load_state_dict")


def _load(part: Any, state: Any, configured: Options | None) -> None:
    if isinstance(part, Optimizer):
        load_optimizer(part, state, configured or options_of(part))
    elif isinstance(part, LRScheduler) and "base_lrs" in state:
        # Those that are configured now, as the optimizer's options are.
        part.load_state_dict({**state, "base_lrs": part.base_lrs})
    elif isinstance(part, nn.Module):
        load_module(part, state, "the module")
    else:
        part.load_state_dict(state)


def _shows(module: nn.Module, storages: set[tuple[int, int]]) -> bool:
    """Whether everything in a module is among the weights, as for a wrapper around a part of the model."""
    if None in buffers_of(module).values():
        # It gets a state later.
        return False
    return storages.issuperset(map(_memory, module.state_dict().values()))


def _tensors(state: Any) -> Iterator[Tensor]:
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, Mapping | list | tuple):
        for value in state.values() if isinstance(state, Mapping) else state:
            yield from _tensors(value)


def _memory(value: Any) -> tuple[int, int]:
    """The memory address of a tensor; for anything else a unique value."""
    own = isinstance(value, Tensor) and value.layout is torch.strided and not is_lazy(value) and value.numel()
    return (value.data_ptr(), value.numel()) if own else (id(value), -1)


# Phase -> the names of the parameters that are not trained.
Frozen = dict[str, list[str]]


class InitialModels:
    """The models before anything was restored, with which a checkpoint is compared.

    Args:
        models: phase -> what the network stage built for it; nothing was restored yet.
    """

    def __init__(self, models: Models) -> None:
        parts = parts_of(models)
        self.parts = set(parts)
        self.frozen = _frozen(models)
        self.modes = _modes(models, parts)
        optimizers = {place: part for place, part in parts.items() if isinstance(part, Optimizer)}
        self.options = {place: options_of(optimizer) for place, optimizer in optimizers.items()}
        for optimizer in optimizers.values():
            remember_numbers(optimizer)
        modules = unique_modules(models)
        self._tensors = {phase: _described(module) for phase, module in modules.items()}
        self._buffers = {phase: set(buffers_of(module)) for phase, module in modules.items()}
        self._groups = _groups(models)
        self._sharing = {phase: _sharing(module) for phase, module in modules.items()}
        self._tied = {phase: _tied_parameters(module) for phase, module in modules.items()}

    def changes(self, models: Models, updaters: Mapping[str, Any]) -> dict[str, Any]:
        """What checkpoints keep of the models beside weights, schedulers and the states of their updaters.

        Raises:
            CheckpointError: there is something to which a resumed run could not be led.
        """
        parts = parts_of(models)
        states = part_states(parts, updaters, self.options)
        if late := [place for place, state in states.items() if state and place not in self.parts]:
            raise CheckpointError(_unlike(late[0], "was made after the training had begun"))
        for place, sizes in _groups(models).items():
            if sizes != self._groups.get(place, sizes):
                was = f"had parameter groups of {self._groups[place]} when the training began, and has of {sizes}"
                raise CheckpointError(_unlike(place, was))
        for phase, module in unique_modules(models).items():
            self._check_shapes(phase, module)
        return {
            "parts": states,
            "frozen": {"begun": self.frozen, "now": _frozen(models)},
            "modes": {"begun": self.modes, "now": _modes(models, parts)},
        }

    def restore_modes(self, models: Models, saved: Mapping[str, Modes]) -> None:
        """Restore the modes of all modules, unless config or code have changed them.

        Args:
            models: phase -> what the network stage built for it.
            saved: ``modes`` of a training state.
        """
        modules = _with_modes(models, parts_of(models))
        restore_modes(modules, saved["begun"], saved["now"], self.modes)

    def resized_buffers(self, models: Models) -> dict[str, list[str]]:
        """Return the buffers of each phase whose shape, type or memory a new model does not have."""
        modules = unique_modules(models)
        return {phase: self._resized(phase, module) for phase, module in modules.items()}

    def _resized(self, phase: str, module: nn.Module) -> list[str]:
        """Return the buffers that have another shape or type than before, or shared memory."""
        was = self._tensors.get(phase)
        if was is None:
            return []
        now = _described(module)
        sharing = _sharing(module)
        buffers = self._buffers[phase] & buffers_of(module).keys()
        names = []
        for name in {**was, **now}:
            reshaped = was.get(name) != now.get(name) and was.get(name) != _ANY
            others = self._sharing[phase].get(name, frozenset())
            parted = bool(others - sharing.get(name, frozenset()))
            if name in buffers and (reshaped or parted):
                names.append(name)
        return names

    def _check_shapes(self, phase: str, module: nn.Module) -> None:
        """Raise if something other than a buffer has changed in a way that no new model has."""
        was = self._tensors.get(phase)
        if was is None:
            return
        now = _described(module)
        buffers = self._buffers[phase] & buffers_of(module).keys()
        for name in {**was, **now}:
            differs = was.get(name) != now.get(name) and was.get(name) != _ANY
            if differs and name not in buffers:
                what = f"was {was.get(name, 'not there')} when the training began, and is {now.get(name, 'not there')}"
                raise CheckpointError(_unlike(f"phase '{phase}': '{name}'", what))
        tied = tied_names({phase: module})
        for names in self._tied.get(phase, ()):
            if not any(names <= {name for _, name in places} for places in tied):
                what = "were one parameter when the training began, and are several now"
                raise CheckpointError(_unlike(f"phase '{phase}': {', '.join(sorted(names))}", what))


_ANY = "of any shape"


def restore_frozen(models: Models, saved: Mapping[str, Frozen], initial: Frozen) -> None:
    """Restore which parameters are trained, unless config or code have changed it."""
    for phase, module in unique_modules(models).items():
        was, now = set(saved["begun"].get(phase, ())), set(saved["now"].get(phase, ()))
        fresh = set(initial.get(phase, was))
        for name, parameter in module.named_parameters():
            if (name in was) == (name in fresh):
                parameter.requires_grad_(name not in now)


def _with_modes(models: Models, parts: Parts) -> dict[str, nn.Module]:
    """The models by phase, and the modules among the other parts by place."""
    modules = {place: part for place, part in parts.items() if isinstance(part, nn.Module)}
    return {**unique_modules(models), **modules}


def _modes(models: Models, parts: Parts) -> Modes:
    modules = _with_modes(models, parts)
    return {name: names_in_evaluation_mode(module) for name, module in modules.items()}


def _frozen(models: Models) -> Frozen:
    modules = unique_modules(models).items()
    return {phase: [name for name, own in part.named_parameters() if not own.requires_grad] for phase, part in modules}


def _described(module: nn.Module) -> dict[str, str]:
    """Name -> type and shape."""
    return {
        name: brief(value) if isinstance(value, Tensor) and not (is_lazy(value) or is_extra_state(name)) else _ANY
        for name, value in module.state_dict().items()
    }


def _sharing(module: nn.Module) -> dict[str, frozenset[str]]:
    """Return, for each tensor that shares its memory, the names of the others in that memory."""
    state = module.state_dict(keep_vars=True)
    by_memory: dict[int, set[str]] = {}
    for name, value in state.items():
        if isinstance(value, Tensor) and value.layout is torch.strided and not is_lazy(value):
            address = value.untyped_storage().data_ptr()
            if address:
                by_memory.setdefault(address, set()).add(name)
    shared = [names for names in by_memory.values() if len(names) > 1]
    return {name: frozenset(names - {name}) for names in shared for name in names}


def _tied_parameters(module: nn.Module) -> list[set[str]]:
    """Return the names of each parameter that has several."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    tied = [{name for _, name in places} for places in tied_names({"": module})]
    return [names for names in tied if names <= parameters.keys()]


def _groups(models: Models) -> dict[str, list[int]]:
    """How many parameters each group of each optimizer has."""
    return {
        f"phase.{phase}.optim_schedulers.{name}": [len(group["params"]) for group in scheduler.optimizer.param_groups]
        for phase, entry in models.items()
        for name, scheduler in (entry.get("optim_schedulers") or {}).items()
        if isinstance(getattr(scheduler, "optimizer", None), Optimizer)
    }


def _unlike(place: str, what: str) -> str:
    return f"{place} {what}: a resumed run could not be led there; do that in a constructor, or in on_fit_start"
