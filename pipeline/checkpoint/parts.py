"""What checkpoints keep of the models besides weights: the objects with a state in attributes of Brains and updaters."""

from __future__ import annotations

import sys
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from loguru import logger
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from pipeline import workspaces
from pipeline.checkpoint.optimizer_state import Options, load_optimizer, optimizer_state_of, options_of
from pipeline.checkpoint.tensors import memory_of, tensors_in
from pipeline.checkpoint.weights import Models, buffers_of, load_module, module_of
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


# Packages whose objects are not looked into; the standard library is among them.
_OTHERS = {*sys.stdlib_module_names, "torch", "pipeline", "pipeline_plugins", "loguru", "numpy"}

# Items of a list or dict that is looked through.
_MOST = 100

# Place -> an object with a state.
Parts = Mapping[str, Any]


def parts_of(models: Models) -> dict[str, Any]:
    """The parts by their place, such as ``phase.line.updater.optimizer``; without weights and schedulers, which are saved elsewhere."""
    elsewhere = {id(part) for entry in models.values() for part in _saved_elsewhere(entry)}
    storages = {memory_of(value) for entry in models.values() for value in module_of(entry).state_dict().values()}
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
    saved = {memory_of(tensor) for tensor in tensors_in(updaters)}
    states: dict[str, Any] = {}
    for place, part in parts.items():
        if isinstance(part, Optimizer):
            state: Any = optimizer_state_of(part, configured.get(place) or options_of(part))
        else:
            state = part.state_dict()
        memory = {memory_of(tensor) for tensor in tensors_in(state)}
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
    return storages.issuperset(map(memory_of, module.state_dict().values()))
