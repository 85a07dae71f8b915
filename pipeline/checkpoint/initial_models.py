"""InitialModels: the models before a restore. Each checkpoint is compared with them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from pipeline.checkpoint.comparison import brief
from pipeline.checkpoint.modes import Modes, names_in_evaluation_mode, restore_modes
from pipeline.checkpoint.optimizer_state import remember_numbers
from pipeline.checkpoint.parts import Parts, options_of_parts, owners_of, part_states, parts_of, split_states
from pipeline.checkpoint.weights import Models, buffers_of, is_extra_state, tied_names, unique_modules
from pipeline.errors import CheckpointError

# Phase -> the names of the parameters that are not trained.
Frozen = dict[str, list[str]]


class InitialModels:
    """The models before a restore. Each checkpoint is compared with them.

    Args:
        models: phase -> what the network stage built for it; nothing was restored yet.
        owners: objects besides Brains and updaters that hold parts, by place.
        apart: the places of parts whose states the owner saves and restores itself.

    Attributes:
        frozen: phase -> the parameters that are not trained.
        modes: model -> its modules in evaluation mode.
        options: place -> the options of a part.
    """

    def __init__(self, models: Models, owners: Mapping[str, Any] | None = None, apart: Collection[str] = ()) -> None:
        self._owners = owners or {}
        self._apart = apart
        parts = self.parts(models)
        self.frozen = _frozen(models)
        self.modes = _modes(models, parts)
        self.options = options_of_parts(parts)
        for part in parts.values():
            if isinstance(part, Optimizer):
                remember_numbers(part)
        modules = unique_modules(models)
        self._tensors = {phase: _described(module) for phase, module in modules.items()}
        self._buffers = {phase: set(buffers_of(module)) for phase, module in modules.items()}
        self._groups = _groups(models)
        self._sharing = {phase: _sharing(module) for phase, module in modules.items()}
        self._tied = {phase: _tied_parameters(module) for phase, module in modules.items()}

    def parts(self, models: Models) -> dict[str, Any]:
        """Return the parts of the models and of the other owners, by place."""
        found = parts_of(models, {**owners_of(models), **self._owners})
        return {place: part for place, part in found.items() if place not in self._apart}

    def owns(self, place: str, models: Models) -> bool:
        """Return whether a part at this place belongs to a Brain or updater of these models, or to one of the other owners."""
        return place.startswith(tuple(f"{owner}." for owner in [*owners_of(models), *self._owners]))

    def changes(self, models: Models, states: Any, recoverables: Mapping[str, Any]) -> dict[str, Any]:
        """Return what checkpoints keep of the models, in addition to weights, schedulers and other states.

        Args:
            models: phase -> what the network stage built for it.
            states: the other states, such as the states of updaters.
            recoverables: the objects that are saved by name.

        Raises:
            CheckpointError: there is something to which a resumed run could not be led.
        """
        parts = self.parts(models)
        shared, own = split_states(parts, part_states(parts, self.options, states, recoverables))
        for place, sizes in _groups(models).items():
            if sizes != self._groups.get(place, sizes):
                was = f"had parameter groups of {self._groups[place]} when the training began, and has of {sizes}"
                raise CheckpointError(_unlike(place, was))
        for phase, module in unique_modules(models).items():
            self._check_shapes(phase, module)
        return {
            "parts": shared,
            "objects": own,
            "frozen": {"begun": self.frozen, "now": _frozen(models)},
            "modes": {"begun": self.modes, "now": _modes(models, parts)},
        }

    def restore_modes(self, models: Models, saved: Mapping[str, Modes]) -> None:
        """Restore the modes of all modules, unless config or code have changed them.

        Args:
            models: phase -> what the network stage built for it.
            saved: ``modes`` of a training state.
        """
        modules = _with_modes(models, self.parts(models))
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
