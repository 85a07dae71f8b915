"""The state of an optimizer as checkpoints keep it, with the options that the config gave it."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from loguru import logger
from torch import Tensor
from torch.optim import Optimizer

from pipeline.checkpoint.comparison import differences
from pipeline.checkpoint.tensors import memory_of, tensors_in
from pipeline.checkpoint.user_objects import direct_items

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


# The optimizers that `warn_of_unsaved` has warned of.
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
        The names, such as ``Lookahead.slow_weights``. Parameters and their gradients do not count.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    known = {memory_of(tensor) for tensor in (*parameters, *gradients, *tensors_in(state))}
    saved = list(tensors_in(state))
    unsaved = []
    for name, value in vars(optimizer).items():
        if name in _OF_TORCH:
            continue
        candidates = [value, *(item for _, item in direct_items(value))]
        inner = [candidate.state for candidate in candidates if isinstance(candidate, Optimizer)]
        held = [*tensors_in(value), *tensors_in(inner)]
        if any(memory_of(tensor) not in known and not _is_copied(tensor, saved) for tensor in held):
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
        scheduled: whether an OptimScheduler sets the learning rate. If one does, or a schedule of torch, a new rate is
            scaled as the schedule has scaled the old one.

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
