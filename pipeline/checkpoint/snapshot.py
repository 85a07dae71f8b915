"""What a run needs, beside its weights and counters, to go on as if it had not been interrupted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from pipeline.checkpoint.random_state import random_state

Models = Mapping[str, Mapping[str, Any]]


def snapshot(models: Models, **more: Any) -> dict[str, Any]:
    """The state of everything that trains, at the boundary of two steps.

    Args:
        models: phase -> what the network stage built for it; of phases that share a model, the first speaks for all.
        more: what the loop itself needs.
    """
    return {
        "phases": {name: _phase(entry) for name, entry in models.items()},
        "optim_schedulers": {
            name: {each: scheduler.state_dict() for each, scheduler in entry["optim_schedulers"].items()}
            for name, entry in owners(models).items()
        },
        "gradients": {name: _gradients(entry) for name, entry in owners(models).items()},
        "random": random_state(),
        **more,
    }


def restore(models: Models, state: Mapping[str, Any]) -> None:
    """Give everything that trains the state of a snapshot; the weights are there already.

    The random generators are left to whoever begins to draw from them.
    """
    for name, entry in owners(models).items():
        for each, scheduler in entry["optim_schedulers"].items():
            scheduler.load_state_dict(state["optim_schedulers"][name][each])
        for parameter, gradient in state["gradients"][name].items():
            owner: Tensor = entry["brain"].modules.get_parameter(parameter)
            owner.grad = gradient.to(owner.device)
    for name, entry in models.items():
        entry["updater"].set_state_dict(state["phases"][name]["updater"])


def owners(models: Models) -> dict[str, Mapping[str, Any]]:
    """The phases that have a Brain of their own, or were the first to have it."""
    first: dict[int, str] = {}
    for name, entry in models.items():
        first.setdefault(id(entry["brain"]), name)
    return {name: models[name] for name in first.values()}


def _phase(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {"updater": entry["updater"].state_dict()}


def _gradients(entry: Mapping[str, Any]) -> dict[str, Tensor]:
    """Those of accumulation windows that are not closed yet."""
    return {name: each.grad for name, each in entry["brain"].modules.named_parameters() if each.grad is not None}
