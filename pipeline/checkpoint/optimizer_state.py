"""The state of an optimizer: torch's own, and beside it what it was configured with, so that another config wins."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from pipeline.checkpoint.comparison import differences

CONFIGURED = "configured"
"""Under which the state of an optimizer keeps it."""
Options = Sequence[Mapping[str, Any]]
"""The options of each parameter group."""
_NEEDED = {"amsgrad": "max_exp_avg_sq", "centered": "grad_avg", "momentum": "momentum_buffer"}
"""What torch's Adam and RMSprop make, of zeros, before their first step where an option asks for it, and only then."""


def options_of(optimizer: Optimizer) -> Options:
    """What each group is trained with; of an optimizer that was just made, what it is configured with."""
    return [
        copy.deepcopy({key: value for key, value in group.items() if key != "params"})
        for group in optimizer.param_groups
    ]


def state_of(optimizer: Optimizer, configured: Options) -> Mapping[str, Any]:
    """What a checkpoint keeps of an optimizer; without the rest, it is what torch loads."""
    state: Mapping[str, Any] = optimizer.state_dict()
    if not isinstance(state, Mapping):
        return state
    dtypes = [[str(each.dtype) for each in group["params"]] for group in optimizer.param_groups]
    return {**state, CONFIGURED: configured, "dtypes": dtypes}


def load(optimizer: Optimizer, state: Mapping[str, Any], configured: Options, *, scheduled: bool = False) -> None:
    """Go on from a state: moments and steps as they were, options as they were where the config says the same.

    Args:
        optimizer: takes it.
        state: what ``state_of`` gave, or torch's ``state_dict``.
        configured: what this optimizer is configured with.
        scheduled: whether a schedule of ours sets the rate; of torch's the groups tell. What it has made of the old
            rate, it has made of the new.

    Raises:
        ValueError, KeyError: it is the state of another.
    """
    groups = [dict(group) for group in state["param_groups"]]
    # A group that was added later is configured nowhere.
    for group, before, now in zip(groups, state.get(CONFIGURED, configured), configured, strict=False):
        for key, value in now.items():
            if key not in before or any(differences(before[key], value)):
                scales = key == "lr" and before["lr"] and (scheduled or "initial_lr" in now)
                share = group["lr"] / before["lr"] if scales else 1
                group[key] = copy.deepcopy(value) if share == 1 else value * share
    optimizer.load_state_dict({**state, "param_groups": groups})
    _restore_types(optimizer, state)
    for group in optimizer.param_groups:
        for needed in (name for option, name in _NEEDED.items() if group.get(option)):
            for parameter in group["params"]:
                if own := optimizer.state.get(parameter):
                    own.setdefault(needed, torch.zeros_like(parameter, memory_format=torch.preserve_format))


def _restore_types(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Give tensors back the type that they had: torch makes all of them of their parameter's, and rounds them so."""
    for saved, group, dtypes in zip(
        state["param_groups"], optimizer.param_groups, state.get("dtypes", ()), strict=False
    ):
        for number, parameter, dtype in zip(saved["params"], group["params"], dtypes, strict=True):
            if number in state["state"] and str(parameter.dtype) == dtype:
                optimizer.state[parameter] = _as_saved(optimizer.state[parameter], state["state"][number])


def _as_saved(loaded: Any, saved: Any) -> Any:
    if isinstance(saved, Tensor):
        return loaded if loaded.dtype == saved.dtype else saved.to(loaded.device)
    if isinstance(saved, Mapping):
        return {key: _as_saved(loaded[key], value) for key, value in saved.items()}
    if isinstance(saved, list | tuple):
        return type(saved)(_as_saved(*each) for each in zip(loaded, saved, strict=True))
    return loaded
