"""The training state: models, optimizers, schedules and random states, captured and restored."""

from __future__ import annotations

import copy
import random
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NoReturn, Protocol

import torch
from loguru import logger
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from pipeline import workspaces
from pipeline.checkpoint import weights
from pipeline.checkpoint.comparison import differences
from pipeline.checkpoint.reader import LoadedCheckpoint
from pipeline.checkpoint.weights import Models, buffers_of, is_extra_state, module_of, unique_brains, unique_modules
from pipeline.context import Context
from pipeline.errors import CheckpointError


def random_state() -> dict[str, Any]:
    """The states of the generators of Python, torch, every GPU, and numpy if it is in use."""
    state = {
        "python": random.getstate(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }
    if numpy := sys.modules.get("numpy"):
        kind, keys, position, has_gauss, gauss = numpy.random.get_state()
        state["numpy"] = (kind, keys.tolist(), position, has_gauss, gauss)
    return state


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Restore the generators; those of missing GPUs are skipped."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    for device, each in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(each, device)
    if "numpy" in state and (numpy := sys.modules.get("numpy")):
        kind, keys, position, has_gauss, gauss = state["numpy"]
        numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), position, has_gauss, gauss))


CONFIGURED_OPTIONS = "configured"

"""Under which the state of an optimizer keeps it."""

Options = Sequence[Mapping[str, Any]]

"""The options of each parameter group."""

_NEEDED = {"amsgrad": "max_exp_avg_sq", "centered": "grad_avg", "momentum": "momentum_buffer"}

"""What torch's Adam and RMSprop make, of zeros, before their first step where an option asks for it, and only then."""


def options_of(optimizer: Optimizer) -> Options:
    """The options of each parameter group; for a new optimizer these are the configured ones."""
    return [
        copy.deepcopy({key: value for key, value in group.items() if key != "params"})
        for group in optimizer.param_groups
    ]


def optimizer_state_of(optimizer: Optimizer, configured: Options) -> Mapping[str, Any]:
    """The state of an optimizer for a checkpoint; it contains what torch loads."""
    state: Mapping[str, Any] = optimizer.state_dict()
    if not isinstance(state, Mapping):
        return state
    dtypes = [[str(each.dtype) for each in group["params"]] for group in optimizer.param_groups]
    return {**state, CONFIGURED_OPTIONS: configured, "dtypes": dtypes}


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
    for group, before, now in zip(groups, state.get(CONFIGURED_OPTIONS, configured), configured, strict=False):
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
    """Restore the types of tensors, which torch converts to the type of their parameter."""
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


_OTHERS = {*sys.stdlib_module_names, "torch", "pipeline", "pipeline_plugins", "loguru", "numpy"}

"""Packages whose objects are not looked into; the standard library is among them."""

_MOST = 100

"""Items of a list or dict that is looked through."""


def parts_of(models: Models) -> dict[str, Any]:
    """The parts by their place, such as ``phase.line.updater.optimizer``; without weights and schedulers, which are saved elsewhere."""
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


def part_states(parts: Mapping[str, Any], models: Models, configured: Mapping[str, Options]) -> dict[str, Any]:
    """The states of the parts; None for one without a state, or whose updater keeps it."""
    updaters = [entry["updater"].state_dict() for entry in models.values() if "updater" in entry]
    saved = {_memory(each) for each in _tensors(updaters)}
    states = {place: _part_state(each, configured.get(place)) for place, each in parts.items()}
    return {place: None if _covered(state, saved) else state or None for place, state in states.items()}


def restore_parts(
    parts: Mapping[str, Any], states: Mapping[str, Any], configured: Mapping[str, Options], where: str
) -> None:
    """Restore the states of the parts.

    Raises:
        CheckpointError: one is not there, or is another.
    """
    if missing := [place for place, state in states.items() if state and place not in parts]:
        what = f"{where}: has the state of {missing[0]}, and the run has none such"
        raise CheckpointError(f"{what}; make it in the constructor, or begin a new run with init_model_path")
    for place, each in parts.items():
        if place not in states and _part_state(each, None):
            logger.warning(f"{where}: knows nothing of {place}, which begins anew unless something else restores it")
        elif state := states.get(place):
            try:
                _load(each, state, configured.get(place))
            except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
                what = f"{where}: the state of {place} does not fit it ({error})"
                raise CheckpointError(f"{what}; make it as it was, or begin a new run with init_model_path") from error


def _known(entry: Mapping[str, Any]) -> Iterator[Any]:
    """The objects that are saved elsewhere."""
    yield from module_of(entry).modules()
    if "brain" in entry:
        yield from entry["brain"].modules.modules()
    for scheduler in (entry.get("optim_schedulers") or {}).values():
        yield from (scheduler, getattr(scheduler, "optimizer", None), getattr(scheduler, "scaler", None))


def _attributes(owner: Any) -> Iterator[tuple[str, Any]]:
    """The objects with a state in the attributes of an object, also within lists, dicts and the user's objects."""
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
    held = {name: getattr(value, name) for name in slots if isinstance(name, str) and hasattr(value, name)}
    return list({**held, **getattr(value, "__dict__", {})}.items())


def _is_long(values: Collection[Any]) -> bool:
    """Whether there are too many items to search."""
    return len(values) > _MOST and not _has_state(next(iter(values)))


def _has_state(value: Any) -> bool:
    """Whether an object of torch or an OptimScheduler has a state."""
    if isinstance(value, nn.Module | Optimizer | LRScheduler | GradScaler):
        return True
    return isinstance(getattr(value, "optimizer", None), Optimizer) and hasattr(value, "load_state_dict")


def _part_state(part: Any, configured: Options | None) -> Any:
    if isinstance(part, Optimizer):
        return optimizer_state_of(part, configured or options_of(part))
    return part.state_dict()


def _load(part: Any, state: Any, configured: Options | None) -> None:
    if isinstance(part, Optimizer):
        load_optimizer(part, state, configured or options_of(part))
    elif isinstance(part, LRScheduler) and "base_lrs" in state:
        # Those that are configured now, as the optimizer's options are.
        part.load_state_dict({**state, "base_lrs": part.base_lrs})
    else:
        part.load_state_dict(state)


def _shows(module: nn.Module, shown: set[tuple[int, int]]) -> bool:
    """Whether everything in a module is among the weights, as for a wrapper around a part of the model."""
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
    """The memory address of a tensor; for anything else a unique value."""
    own = isinstance(value, Tensor) and value.layout is torch.strided and not is_lazy(value) and value.numel()
    return (value.data_ptr(), value.numel()) if own else (id(value), -1)


Frozen = dict[str, list[str]]

"""Phase -> the names of the parameters that are not trained."""


class InitialModels:
    """The models before anything was restored, with which a checkpoint is compared.

    Args:
        models: phase -> what the network stage built for it; nothing was restored yet.
    """

    def __init__(self, models: Models) -> None:
        found = parts_of(models)
        self.parts = set(found)
        self.frozen = _frozen(models)
        self.options = {place: options_of(each) for place, each in found.items() if isinstance(each, Optimizer)}
        self._tensors = {phase: _described(module_of(entry)) for phase, entry in unique_modules(models).items()}
        self._buffers = {phase: set(buffers_of(module_of(entry))) for phase, entry in unique_modules(models).items()}
        self._groups = _groups(models)

    def changes(self, models: Models) -> dict[str, Any]:
        """What checkpoints keep of the models beside weights and schedulers.

        Raises:
            CheckpointError: there is something to which a resumed run could not be led.
        """
        found = parts_of(models)
        states = part_states(found, models, self.options)
        if late := [place for place, state in states.items() if state and place not in self.parts]:
            raise CheckpointError(_unlike(late[0], "was made after the training had begun"))
        for place, sizes in _groups(models).items():
            if sizes != self._groups.get(place, sizes):
                was = f"had parameter groups of {self._groups[place]} when the training began, and has of {sizes}"
                raise CheckpointError(_unlike(place, was))
        return {
            "parts": states,
            "frozen": {"begun": self.frozen, "now": _frozen(models)},
            "buffers": {
                phase: self._changed(phase, module_of(entry)) for phase, entry in unique_modules(models).items()
            },
        }

    def _changed(self, phase: str, module: nn.Module) -> list[str]:
        """The buffers that have another size or type than before, or were None."""
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
    """Restore which parameters are trained, unless config or code have changed it."""
    for phase, entry in unique_modules(models).items():
        was, now = set(saved["begun"].get(phase, ())), set(saved["now"].get(phase, ()))
        fresh = set(initial.get(phase, was))
        for name, each in module_of(entry).named_parameters():
            if (name in was) == (name in fresh):
                each.requires_grad_(name not in now)


def _frozen(models: Models) -> Frozen:
    return {
        phase: [name for name, each in module_of(entry).named_parameters() if not each.requires_grad]
        for phase, entry in unique_modules(models).items()
    }


def _described(module: nn.Module) -> dict[str, str]:
    """Name -> type and shape."""
    return {name: _ANY if is_extra_state(name) else _describe(each) for name, each in module.state_dict().items()}


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


_REMEDY = "resume with the config that it was begun with, or begin a new run with init_model_path"


class Recoverable(Protocol):
    """Something with a state of its own that checkpoints keep."""

    def state_dict(self) -> Any:
        """Plain data and tensors."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Continue from it."""


def snapshot(models: Models, **more: Any) -> dict[str, Any]:
    """The state of everything that trains, between two steps.

    Args:
        models: phase -> what the network stage built for it; of phases that share a model, the first speaks for all.
        more: what the loop itself needs.
    """
    return {
        "updaters": {name: _state(entry["updater"], f"phase.{name}") for name, entry in models.items()},
        "optim_schedulers": {
            name: _schedulers(entry, f"phase.{name}") for name, entry in unique_brains(models).items()
        },
        "gradients": {name: gradients_of(entry["brain"].modules) for name, entry in unique_brains(models).items()},
        "random": random_state(),
        **more,
    }


def restore_training(
    saved: LoadedCheckpoint,
    context: Context,
    recoverables: Mapping[str, Recoverable],
    initial: InitialModels | None = None,
) -> None:
    """Restore a checkpoint into a run, once its models are built.

    Args:
        saved: the checkpoint.
        context: of the run.
        recoverables: name -> object whose state it keeps too.
        initial: of the models, as they are now; None: they are no part of the context yet.

    Raises:
        CheckpointError: the run has other phases, modules or optimizers than the one that saved it.
    """
    models: Models = context["model"]
    kept = weights.unique_modules(models)
    # An experiment makes its model later, and goes on by itself.
    later = {"experiment"} if "in_epoch" in (saved.training or {}) else set()
    if models and kept.keys() | later != saved.weights.keys() | later:
        phases = f"has weights of the phases {', '.join(saved.weights)}, and the run has {', '.join(sorted(kept))}"
        raise CheckpointError(f"{saved.path}: {phases}; {_REMEDY}")
    if models:
        for name, buffers in (saved.training or {}).get("buffers", {}).items():
            if name in models:
                weights.clear_buffers(module_of(models[name]), buffers)
        weights.load_weights(saved.weights, models, str(saved.path))
    context["train_state"].update(saved.train_state)
    if saved.training is None:
        return
    for name, entry in unique_brains(models).items():
        states = saved.training["optim_schedulers"].get(name, {})
        _load_schedulers(entry, states, f"{saved.path}: phase '{name}'")
        restore_gradients(entry["brain"].modules, saved.training["gradients"].get(name, {}))
    if initial:
        restore_parts(parts_of(models), saved.training.get("parts", {}), initial.options, f"{saved.path}")
        if "frozen" in saved.training:
            restore_frozen(models, saved.training["frozen"], initial.frozen)
    for name, entry in models.items():
        entry["updater"].set_state_dict(saved.training["updaters"][name])
    restore_recoverables(recoverables, saved.training["recoverables"], f"{saved.path}")
    # Last: whatever was built or loaded before may have drawn from them.
    restore_random_state(saved.training["random"])


def _schedulers(entry: Mapping[str, Any], where: str) -> dict[str, Any]:
    found = {}
    for name, scheduler in entry["optim_schedulers"].items():
        state = _state(scheduler, where)
        if not isinstance(state.get("optimizer", {}), Mapping):
            _refuse(scheduler.optimizer, state["optimizer"], where)
        found[name] = {"class": _kind(scheduler), "state": state}
    return found


def _state(owner: Any, where: str) -> Mapping[str, Any]:
    """The state of an object, checked to be a dict."""
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
        if CONFIGURED_OPTIONS not in saved["state"].get("optimizer", {CONFIGURED_OPTIONS: None}):
            what = "was saved without what the config said of it"
            logger.warning(
                f"{where}: '{name}' {what}; its options stay as they were saved, whatever the config says now"
            )
        try:
            scheduler.load_state_dict(saved["state"])
        except (ValueError, KeyError) as error:
            raise CheckpointError(f"{where}: the state of '{name}' does not fit it ({error}); {_REMEDY}") from error


def gradients_of(module: nn.Module) -> dict[str, Tensor]:
    """The gradients of open accumulation windows."""
    return {name: each.grad for name, each in module.named_parameters() if each.grad is not None}


def restore_gradients(module: nn.Module, gradients: Mapping[str, Tensor]) -> None:
    """Restore gradients by the names of their parameters."""
    for name, gradient in gradients.items():
        owner = module.get_parameter(name)
        owner.grad = gradient.to(owner.device)


def restore_recoverables(recoverables: Mapping[str, Recoverable], states: Mapping[str, Any], where: str) -> None:
    """Restore the states of objects; ``where``: the checkpoint, for messages."""
    for name, each in recoverables.items():
        if name in states:
            each.load_state_dict(states[name])
        else:
            logger.warning(f"{where}: knows nothing of '{name}', which begins anew")
    for name in states.keys() - recoverables.keys():
        logger.warning(
            f"{where}: has a state of '{name}', which is not there; it is left out unless add_recoverable names it yet"
        )
