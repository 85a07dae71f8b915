"""The models as they are before the first step, which a resumed run makes anew, and what has become of them since."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from pipeline.checkpoint import optimizer_state, parts
from pipeline.checkpoint.weights import Models, buffers_of, is_extra, kept_of, module_of
from pipeline.errors import CheckpointError

Frozen = dict[str, list[str]]
"""Phase -> the names of the parameters that are not trained."""


class InitialModels:
    """What a checkpoint is compared with.

    Args:
        models: phase -> what the network stage built for it; nothing was restored yet.
    """

    def __init__(self, models: Models) -> None:
        found = parts.parts_of(models)
        self.parts = set(found)
        self.frozen = _frozen(models)
        self.options = {
            place: optimizer_state.options_of(each) for place, each in found.items() if isinstance(each, Optimizer)
        }
        self._tensors = {phase: _described(module_of(entry)) for phase, entry in kept_of(models).items()}
        self._buffers = {phase: set(buffers_of(module_of(entry))) for phase, entry in kept_of(models).items()}
        self._groups = _groups(models)

    def changes(self, models: Models) -> dict[str, Any]:
        """What checkpoints keep of them beside their weights and schedulers.

        Raises:
            CheckpointError: there is something to which a resumed run could not be led.
        """
        found = parts.parts_of(models)
        states = parts.states_of(found, models, self.options)
        if late := [place for place, state in states.items() if state and place not in self.parts]:
            raise CheckpointError(_unlike(late[0], "was made after the training had begun"))
        for place, sizes in _groups(models).items():
            if sizes != self._groups.get(place, sizes):
                was = f"had parameter groups of {self._groups[place]} when the training began, and has of {sizes}"
                raise CheckpointError(_unlike(place, was))
        return {
            "parts": states,
            "frozen": {"begun": self.frozen, "now": _frozen(models)},
            "buffers": {phase: self._changed(phase, module_of(entry)) for phase, entry in kept_of(models).items()},
        }

    def _changed(self, phase: str, module: nn.Module) -> list[str]:
        """The buffers that are of another size or type, or that were none."""
        was, now = self._tensors.get(phase), _described(module)
        if was is None:
            return []
        buffers = self._buffers[phase] & buffers_of(module).keys()
        differing = [name for name in {**was, **now} if was.get(name) != now.get(name) and was.get(name) != _ANY]
        for name in differing:
            if name not in buffers:
                told = f"was {was.get(name, 'not there')} when the training began, and is {now.get(name, 'not there')}"
                raise CheckpointError(_unlike(f"phase '{phase}': '{name}'", told))
        return differing


_ANY = "of any shape"


def restore_frozen(models: Models, saved: Mapping[str, Frozen], initial: Frozen) -> None:
    """Train again what was trained, where config and code have not changed that: else they win."""
    for phase, entry in kept_of(models).items():
        was, now = set(saved["begun"].get(phase, ())), set(saved["now"].get(phase, ()))
        fresh = set(initial.get(phase, was))
        for name, each in module_of(entry).named_parameters():
            if (name in was) == (name in fresh):
                each.requires_grad_(name not in now)


def _frozen(models: Models) -> Frozen:
    return {
        phase: [name for name, each in module_of(entry).named_parameters() if not each.requires_grad]
        for phase, entry in kept_of(models).items()
    }


def _described(module: nn.Module) -> dict[str, str]:
    """Name -> type and shape, of what has them."""
    return {name: _ANY if is_extra(name) else _describe(each) for name, each in module.state_dict().items()}


def _describe(value: Any) -> str:
    plain = isinstance(value, Tensor) and not is_lazy(value)
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}" if plain else _ANY


def _groups(models: Models) -> dict[str, list[int]]:
    """How many parameters each group of each optimizer has."""
    return {
        f"phase.{phase}.optim_schedulers.{name}": [len(group["params"]) for group in each.optimizer.param_groups]
        for phase, entry in models.items()
        for name, each in (entry.get("optim_schedulers") or {}).items()
        if isinstance(getattr(each, "optimizer", None), Optimizer)
    }


def _unlike(place: str, what: str) -> str:
    return f"{place} {what}: a resumed run could not be led there; do that in a constructor, or in on_fit_start"
