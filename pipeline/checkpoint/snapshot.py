"""What a run needs, beside its weights and counters, to go on as if it had not been interrupted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn, Protocol

from loguru import logger
from torch import Tensor, nn

from pipeline.checkpoint import kept_config, parts, weights
from pipeline.checkpoint.initial_models import InitialModels, restore_frozen
from pipeline.checkpoint.random_state import random_state, restore_random_state
from pipeline.checkpoint.saved import Saved
from pipeline.checkpoint.weights import Models, module_of
from pipeline.context import Context
from pipeline.errors import CheckpointError

_REMEDY = "resume with the config that it was begun with, or begin a new run with init_model_path"


class Recoverable(Protocol):
    """Something with a state of its own that checkpoints keep."""

    def state_dict(self) -> Any:
        """Plain data and tensors."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Go on from it."""


def snapshot(models: Models, **more: Any) -> dict[str, Any]:
    """The state of everything that trains, at the boundary of two steps.

    Args:
        models: phase -> what the network stage built for it; of phases that share a model, the first speaks for all.
        more: what the loop itself needs.
    """
    return {
        "updaters": {name: _state(entry["updater"], f"phase.{name}") for name, entry in models.items()},
        "optim_schedulers": {name: _schedulers(entry, f"phase.{name}") for name, entry in owners(models).items()},
        "gradients": {name: gradients_of(entry["brain"].modules) for name, entry in owners(models).items()},
        "random": random_state(),
        **more,
    }


def restore(
    saved: Saved, context: Context, recoverables: Mapping[str, Recoverable], initial: InitialModels | None = None
) -> None:
    """Give a run the state of a checkpoint, once its models are built.

    Args:
        saved: the checkpoint.
        context: of the run.
        recoverables: name -> object whose state it keeps too.
        initial: of the models, as they are now; None: they are no part of the context yet.

    Raises:
        CheckpointError: the run has other phases, modules or optimizers than the one that saved it.
    """
    models: Models = context["model"]
    kept = weights.kept_of(models)
    # An experiment makes its model later, and goes on by itself.
    later = {"experiment"} if "in_epoch" in (saved.training or {}) else set()
    if models and kept.keys() | later != saved.weights.keys() | later:
        phases = f"has weights of the phases {', '.join(saved.weights)}, and the run has {', '.join(sorted(kept))}"
        raise CheckpointError(f"{saved.path}: {phases}; {_REMEDY}")
    if models:
        for name, buffers in (saved.training or {}).get("buffers", {}).items():
            if name in models:
                weights.forget(module_of(models[name]), buffers)
        weights.load(saved.weights, models, str(saved.path))
    context["train_state"].update(saved.train_state)
    if saved.training is None:
        return
    for name, entry in owners(models).items():
        states = saved.training["optim_schedulers"].get(name, {})
        kept_config.add_configured(states, entry["optim_schedulers"], name, saved.path, context)
        _load_schedulers(entry, states, f"{saved.path}: phase '{name}'")
        restore_gradients(entry["brain"].modules, saved.training["gradients"].get(name, {}))
    if initial:
        parts.restore(parts.parts_of(models), saved.training.get("parts", {}), initial.options, f"{saved.path}")
        if "frozen" in saved.training:
            restore_frozen(models, saved.training["frozen"], initial.frozen)
    for name, entry in models.items():
        entry["updater"].set_state_dict(saved.training["updaters"][name])
    recover(recoverables, saved.training["recoverables"], f"{saved.path}")
    # Last: whatever was built or loaded before may have drawn from them.
    restore_random_state(saved.training["random"])


def owners(models: Models) -> dict[str, Mapping[str, Any]]:
    """The phases that have a Brain of their own, or were the first to have it."""
    first: dict[int, str] = {}
    for name, entry in models.items():
        first.setdefault(id(entry["brain"]), name)
    return {name: models[name] for name in first.values()}


def _schedulers(entry: Mapping[str, Any], where: str) -> dict[str, Any]:
    found = {}
    for name, scheduler in entry["optim_schedulers"].items():
        state = _state(scheduler, where)
        if not isinstance(state.get("optimizer", {}), Mapping):
            _refuse(scheduler.optimizer, state["optimizer"], where)
        found[name] = {"class": _kind(scheduler), "state": state}
    return found


def _state(owner: Any, where: str) -> Mapping[str, Any]:
    """The state of something that has to be given it back."""
    state: Mapping[str, Any] = owner.state_dict()
    if not isinstance(state, Mapping):
        _refuse(owner, state, where)
    return state


def _refuse(owner: Any, state: object, where: str) -> NoReturn:
    what = f"{where}: {type(owner).__name__}.state_dict returned a {type(state).__name__}"
    raise CheckpointError(f"{what}, from which no run could go on; return a dict")


def _kind(scheduler: Any) -> str:
    """``Noam of AdamW``."""
    return f"{type(scheduler).__name__} of {type(scheduler.optimizer).__name__}"


def _load_schedulers(entry: Mapping[str, Any], states: Mapping[str, Any], where: str) -> None:
    present = entry["optim_schedulers"]
    if present.keys() != states.keys():
        names = f"has the optim_schedulers {', '.join(states)}, and the run has {', '.join(present)}"
        raise CheckpointError(f"{where}: {names}; {_REMEDY}")
    for name, scheduler in present.items():
        saved = states[name]
        if saved["class"] != _kind(scheduler):
            raise CheckpointError(f"{where}: '{name}' was {saved['class']}, and is now {_kind(scheduler)}; {_REMEDY}")
        try:
            scheduler.load_state_dict(saved["state"])
        except (ValueError, KeyError) as error:
            raise CheckpointError(f"{where}: the state of '{name}' does not fit it ({error}); {_REMEDY}") from error


def gradients_of(module: nn.Module) -> dict[str, Tensor]:
    """Those of accumulation windows that are not closed yet."""
    return {name: each.grad for name, each in module.named_parameters() if each.grad is not None}


def restore_gradients(module: nn.Module, gradients: Mapping[str, Tensor]) -> None:
    """Give them back to the parameters of these names."""
    for name, gradient in gradients.items():
        owner = module.get_parameter(name)
        owner.grad = gradient.to(owner.device)


def recover(recoverables: Mapping[str, Recoverable], states: Mapping[str, Any], where: str) -> None:
    """Give objects their states back; ``where`` they are from."""
    for name, each in recoverables.items():
        if name in states:
            each.load_state_dict(states[name])
        else:
            logger.warning(f"{where}: knows nothing of '{name}', which begins anew")
    for name in states.keys() - recoverables.keys():
        logger.warning(
            f"{where}: has a state of '{name}', which is not there; it is left out unless add_recoverable names it yet"
        )
