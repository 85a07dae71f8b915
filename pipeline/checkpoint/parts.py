"""What Brains and updaters keep in their attributes that has a state: a loss, optimizers, schedules, other modules."""

from __future__ import annotations

import sys
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from loguru import logger
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from pipeline import workspaces
from pipeline.checkpoint import optimizer_state
from pipeline.checkpoint.optimizer_state import Options
from pipeline.checkpoint.weights import Models, module_of
from pipeline.errors import CheckpointError

_OTHERS = {*sys.stdlib_module_names, "torch", "pipeline", "pipeline_plugins", "loguru", "numpy"}
"""Packages whose objects are not looked into; the standard library is among them."""
_MOST = 100
"""Items of a list or dict that is looked through."""


def parts_of(models: Models) -> dict[str, Any]:
    """The parts by their place, ``phase.line.updater.optimizer``; those that are saved as weights or schedulers are none."""
    known = {id(each) for entry in models.values() for each in _known(entry)}
    shown = {_memory(each) for entry in models.values() for each in module_of(entry).state_dict().values()}
    found: dict[str, Any] = {}
    for phase, entry in models.items():
        for role in ("brain", "updater"):
            for name, each in _attributes(entry.get(role)):
                if id(each) not in known and not (isinstance(each, nn.Module) and _shows(each, shown)):
                    known.add(id(each))
                    found[f"phase.{phase}.{role}.{name}"] = each
    return found


def states_of(parts: Mapping[str, Any], models: Models, configured: Mapping[str, Options]) -> dict[str, Any]:
    """What a checkpoint keeps of them: None of what has no state, or is in that of an updater."""
    updaters = [entry["updater"].state_dict() for entry in models.values() if "updater" in entry]
    saved = {_memory(each) for each in _tensors(updaters)}
    states = {place: _state(each, configured.get(place)) for place, each in parts.items()}
    return {place: None if _covered(state, saved) else state or None for place, state in states.items()}


def restore(parts: Mapping[str, Any], states: Mapping[str, Any], configured: Mapping[str, Options], where: str) -> None:
    """Give them their states back.

    Raises:
        CheckpointError: one is not there, or is another.
    """
    if missing := [place for place, state in states.items() if state and place not in parts]:
        what = f"{where}: has the state of {missing[0]}, and the run has none such"
        raise CheckpointError(f"{what}; make it in the constructor, or begin a new run with init_model_path")
    for place, each in parts.items():
        if place not in states and _state(each, None):
            logger.warning(f"{where}: knows nothing of {place}, which begins anew unless something else restores it")
        elif state := states.get(place):
            try:
                _load(each, state, configured.get(place))
            except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
                what = f"{where}: the state of {place} does not fit it ({error})"
                raise CheckpointError(f"{what}; make it as it was, or begin a new run with init_model_path") from error


def _known(entry: Mapping[str, Any]) -> Iterator[Any]:
    """What is saved otherwise."""
    yield from module_of(entry).modules()
    if "brain" in entry:
        yield from entry["brain"].modules.modules()
    for scheduler in (entry.get("optim_schedulers") or {}).values():
        yield from (scheduler, getattr(scheduler, "optimizer", None), getattr(scheduler, "scaler", None))


def _attributes(owner: Any) -> Iterator[tuple[str, Any]]:
    """What has a state in the attributes of an object, and in the lists, dicts and objects of the user's own in these."""
    seen = {id(owner)}
    for name, value in getattr(owner, "__dict__", {}).items():
        yield from _within(value, name, seen)


def _within(value: Any, place: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    if _has_state(value):
        yield place, value
    elif id(value) not in seen:
        seen.add(id(value))
        for key, each in _items(value):
            yield from _within(each, f"{place}.{key}", seen)


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    """What a list, a dict or an object of the user's own holds; nobody looks through data, which is long or iterable."""
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
    held = {name: getattr(value, name) for name in slots if isinstance(name, str) and hasattr(value, name)}
    return list({**held, **getattr(value, "__dict__", {})}.items())


def _is_long(values: Collection[Any]) -> bool:
    """Whether there are many, unless they are what is looked for."""
    return len(values) > _MOST and not _has_state(next(iter(values)))


def _has_state(value: Any) -> bool:
    """Whether it is of torch, or one of our OptimSchedulers."""
    if isinstance(value, nn.Module | Optimizer | LRScheduler | GradScaler):
        return True
    return isinstance(getattr(value, "optimizer", None), Optimizer) and hasattr(value, "load_state_dict")


def _state(part: Any, configured: Options | None) -> Any:
    if isinstance(part, Optimizer):
        return optimizer_state.state_of(part, configured or optimizer_state.options_of(part))
    return part.state_dict()


def _load(part: Any, state: Any, configured: Options | None) -> None:
    if isinstance(part, Optimizer):
        optimizer_state.load(part, state, configured or optimizer_state.options_of(part))
    elif isinstance(part, LRScheduler) and "base_lrs" in state:
        # Those that are configured now, as the optimizer's options are.
        part.load_state_dict({**state, "base_lrs": part.base_lrs})
    else:
        part.load_state_dict(state)


def _shows(module: nn.Module, shown: set[tuple[int, int]]) -> bool:
    """Whether all that a module holds is in the weights, as of one that is put around a part of the model."""
    return all(_memory(each) in shown for each in module.state_dict().values())


def _covered(state: Any, saved: set[tuple[int, int]]) -> bool:
    found = [_memory(each) for each in _tensors(state)]
    return bool(found) and saved.issuperset(found)


def _tensors(state: Any) -> Iterator[Tensor]:
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, Mapping | list | tuple):
        for each in state.values() if isinstance(state, Mapping) else state:
            yield from _tensors(each)


def _memory(value: Any) -> tuple[int, int]:
    """Where the numbers of a tensor are; of anything else, and of one without numbers, what no other has."""
    own = isinstance(value, Tensor) and value.layout is torch.strided and not is_lazy(value) and value.numel()
    return (value.data_ptr(), value.numel()) if own else (id(value), -1)
