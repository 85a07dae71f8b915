"""The training state: models, optimizers, schedules and random states, captured and restored."""

from __future__ import annotations

import copy
import random
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Annotated, Any, Literal, Protocol

import torch
from loguru import logger
from pydantic import BaseModel, ConfigDict, Field, InstanceOf
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


class StateModel(BaseModel):
    """A part of the training state: an unknown key, a missing one or one of another type is an error."""

    model_config = ConfigDict(strict=True, extra="forbid", arbitrary_types_allowed=True, populate_by_name=True)

    def to_tree(self) -> dict[str, Any]:
        """The same as nested dicts and lists; what others load stays as it is."""
        fields = type(self).model_fields.items()
        return {field.alias or name: _tree(getattr(self, name)) for name, field in fields}


def _tree(value: Any) -> Any:
    if isinstance(value, StateModel):
        return value.to_tree()
    if type(value) is dict:
        return {key: _tree(item) for key, item in value.items()}
    return [_tree(item) for item in value] if type(value) is list else value


# What an object gives as its state, and takes again; only that object knows what is in it.
OwnState = InstanceOf[Mapping[str, Any]]

# Plugins may put other plain values beside the numbers.
Numbers = dict[str, bool | int | float | str | None]


class MeterState(StateModel):
    """The sums of a ``Meter``."""

    batches: int
    samples: int
    nonfinite: int
    first: tuple[int, float] | None
    total: float = Field(alias="_total")
    count: int = Field(alias="_count")
    recent_total: float = Field(alias="_recent_total")
    recent_count: int = Field(alias="_recent_count")


class PassState(StateModel):
    """Where a pass of training is.

    Attributes:
        step: the ``step`` of the Brain.
        taken: how many batches are done.
        data: the position in the data; None where ``taken`` says it all.
        began: the iteration before the pass.
        train_loss: the training loss so far.
        logged: what was logged so far, by name.
        discarded: of each optimizer, how many windows were discarded for their gradients, and the first parameter
            with such a gradient.
    """

    step: int
    taken: int
    data: OwnState | None
    began: int
    train_loss: MeterState
    logged: dict[str, MeterState]
    discarded: list[tuple[int, str]]


class BestState(StateModel):
    """The best number so far, the checkpoints that are kept for theirs, and which phase reports which number."""

    value: float
    iteration: int
    kept: list[Annotated[tuple[float, int], Field(strict=False)]]
    reported: dict[str, str]


class ValidationState(StateModel):
    """Phase -> the iteration in which it was last validated; whether a validation is not over; the best."""

    validated: dict[str, int]
    running: bool
    best: BestState | None


class EntryState(StateModel):
    """A call of ``epochs``, ``batches`` or ``validate``.

    Attributes:
        kind: which of them.
        phase: whose data; ``""`` for epochs.
        over: whether it is over.
        number: of the epoch, or of the pass over this phase.
        repeat: whether the pass begins again at its end.
        first: the epoch with which these epochs began.
        numbers: what it gave: numbers by name; of a validation of all phases, by phase.
        validated: whether the validation after the pass is done.
        state: of a pass that is open.
    """

    kind: Literal["epochs", "pass", "validate"]
    phase: str
    over: bool
    number: int
    repeat: bool
    first: int
    numbers: dict[str, bool | int | float | str | dict[str, Any] | None]
    validated: bool
    state: PassState | None

    @classmethod
    def begun(cls, kind: Literal["epochs", "pass", "validate"], phase: str, number: int, **more: Any) -> EntryState:
        """One that has just begun, but for ``more``."""
        fields = {"over": False, "repeat": False, "first": 0, "numbers": {}, "validated": False, "state": None}
        return cls(kind=kind, phase=phase, number=number, **{**fields, **more})


class LoopState(StateModel):
    """Where the loop is.

    Attributes:
        outer: the calls of the stage outside of epochs.
        inner: those of the running epoch; None between two epochs.
        leader: the place of the pass that leads in ``[*outer, *inner]``.
        passes: phase -> how many passes over it were begun.
        validation: of the runner.
        iterations: phase -> name -> the iteration that a number is of.
    """

    outer: list[EntryState]
    inner: list[EntryState] | None
    leader: int | None
    passes: dict[str, int]
    validation: ValidationState
    iterations: dict[str, dict[str, int]]


class LoopState1(StateModel):
    """Where the loop is, as version 1 had it; the counters say in which epoch, and in which phase of it."""

    running: PassState | None = Field(alias="pass")
    trained: bool
    validation: ValidationState
    iterations: dict[str, dict[str, int]]

    def upgrade(self, epoch: int, index: int, phases: Sequence[str], metrics: Mapping[str, Numbers]) -> LoopState:
        """The same as it is now.

        Args:
            epoch: the epochs that are over.
            index: of the phase whose turn it is.
            phases: their names, in order.
            metrics: phase -> the numbers of the running epoch.
        """
        over = [
            EntryState.begun(
                "pass", phase, epoch, over=True, validated=number < index, numbers={**metrics.get(phase, {})}
            )
            for number, phase in enumerate(phases[: index + self.trained])
        ]
        leader = [EntryState.begun("pass", phases[index], epoch, state=self.running)] if self.running else []
        inner = [*over, *leader]
        begun = {entry.phase for entry in inner}
        return LoopState(
            outer=[EntryState.begun("epochs", "", epoch)],
            inner=inner or None,
            leader=len(inner) if leader else None,
            passes={phase: epoch + (phase in begun) for phase in phases},
            validation=self.validation,
            iterations=self.iterations,
        )


def cpu_random_state() -> dict[str, Any]:
    """The states of the generators of Python, torch's CPU, and numpy if it is in use, as plain data and a tensor."""
    of_numpy = None
    if numpy := sys.modules.get("numpy"):
        kind, keys, *others = numpy.random.get_state()
        of_numpy = (kind, keys.tolist(), *others)
    return {"python": random.getstate(), "torch": torch.get_rng_state(), "numpy": of_numpy}


def restore_cpu_random_state(state: Mapping[str, Any]) -> None:
    """Restore these generators; numpy's is left as it is where numpy is not in use."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if (of_numpy := state.get("numpy")) and (numpy := sys.modules.get("numpy")):
        kind, keys, *others = of_numpy
        numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), *others))


def random_state() -> dict[str, Any]:
    """The states of the same generators, and of every GPU's."""
    return {**cpu_random_state(), "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []}


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Restore the generators; those of missing GPUs are skipped."""
    restore_cpu_random_state(state)
    for device, generator_state in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(generator_state, device)


# Under which the state of an optimizer keeps the options that the config gave it.
CONFIG_OPTIONS = "configured"

# The options of each parameter group.
Options = Sequence[Mapping[str, Any]]

# What torch's Adam and RMSprop make, of zeros, before their first step where an option asks for it, and only then.
_NEEDED = {"amsgrad": "max_exp_avg_sq", "centered": "grad_avg", "momentum": "momentum_buffer"}


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
    dtypes = [[str(parameter.dtype) for parameter in group["params"]] for group in optimizer.param_groups]
    return {**state, CONFIG_OPTIONS: configured, "dtypes": dtypes}


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


def part_states(parts: Mapping[str, Any], models: Models, configured: Mapping[str, Options]) -> dict[str, Any]:
    """The states of the parts; None for one without a state, or whose updater keeps it."""
    updaters = [entry["updater"].state_dict() for entry in models.values() if "updater" in entry]
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
    for place, part in parts.items():
        if place not in states and part.state_dict():
            logger.warning(f"{where}: knows nothing of {place}, which begins anew unless something else restores it")
        elif state := states.get(place):
            try:
                _load(part, state, configured.get(place))
            except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
                what = f"{where}: the state of {place} does not fit it ({error})"
                raise CheckpointError(f"{what}; make it as it was, or begin a new run with init_model_path") from error


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
        return True
    return isinstance(getattr(value, "optimizer", None), Optimizer) and hasattr(value, "load_state_dict")


def _load(part: Any, state: Any, configured: Options | None) -> None:
    if isinstance(part, Optimizer):
        load_optimizer(part, state, configured or options_of(part))
    elif isinstance(part, LRScheduler) and "base_lrs" in state:
        # Those that are configured now, as the optimizer's options are.
        part.load_state_dict({**state, "base_lrs": part.base_lrs})
    else:
        part.load_state_dict(state)


def _shows(module: nn.Module, storages: set[tuple[int, int]]) -> bool:
    """Whether everything in a module is among the weights, as for a wrapper around a part of the model."""
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
        self.options = {place: options_of(part) for place, part in parts.items() if isinstance(part, Optimizer)}
        self._tensors = {phase: _described(module_of(entry)) for phase, entry in unique_modules(models).items()}
        self._buffers = {phase: set(buffers_of(module_of(entry))) for phase, entry in unique_modules(models).items()}
        self._groups = _groups(models)

    def changes(self, models: Models) -> dict[str, Any]:
        """What checkpoints keep of the models beside weights and schedulers.

        Raises:
            CheckpointError: there is something to which a resumed run could not be led.
        """
        states = part_states(parts_of(models), models, self.options)
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
                what = f"was {was.get(name, 'not there')} when the training began, and is {now.get(name, 'not there')}"
                raise CheckpointError(_unlike(f"phase '{phase}': '{name}'", what))
        return differing


_ANY = "of any shape"


def restore_frozen(models: Models, saved: Mapping[str, Frozen], initial: Frozen) -> None:
    """Restore which parameters are trained, unless config or code have changed it."""
    for phase, entry in unique_modules(models).items():
        was, now = set(saved["begun"].get(phase, ())), set(saved["now"].get(phase, ()))
        fresh = set(initial.get(phase, was))
        for name, parameter in module_of(entry).named_parameters():
            if (name in was) == (name in fresh):
                parameter.requires_grad_(name not in now)


def _frozen(models: Models) -> Frozen:
    return {
        phase: [name for name, parameter in module_of(entry).named_parameters() if not parameter.requires_grad]
        for phase, entry in unique_modules(models).items()
    }


def _described(module: nn.Module) -> dict[str, str]:
    """Name -> type and shape."""
    return {name: _ANY if is_extra_state(name) else _describe(value) for name, value in module.state_dict().items()}


def _describe(value: Any) -> str:
    plain = isinstance(value, Tensor) and not is_lazy(value)
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}" if plain else _ANY


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
    brains = unique_brains(models)
    return {
        "updaters": {
            phase: _mapping(entry["updater"], entry["updater"].state_dict(), phase) for phase, entry in models.items()
        },
        "optim_schedulers": {phase: _schedulers(entry, phase) for phase, entry in brains.items()},
        "gradients": {phase: gradients_of(entry["brain"].modules) for phase, entry in brains.items()},
        "random": random_state(),
        **more,
    }


def restore_training(
    saved: LoadedCheckpoint,
    context: Context,
    recoverables: Mapping[str, Recoverable],
    initial: InitialModels | None,
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
    training, where = saved.training or {}, str(saved.path)
    if models:
        phases = unique_modules(models).keys()
        # An experiment makes its model later, and goes on by itself.
        later = {"experiment"} if "in_epoch" in training else set()
        if phases | later != saved.weights.keys() | later:
            what = f"has weights of the phases {', '.join(saved.weights)}, and the run has {', '.join(sorted(phases))}"
            raise CheckpointError(f"{where}: {what}; {_REMEDY}")
        for phase, buffers in training.get("buffers", {}).items():
            if phase in models:
                weights.clear_buffers(module_of(models[phase]), buffers)
        weights.load_weights(saved.weights, models, where)
    context["train_state"].update(saved.train_state)
    if not training:
        return
    for phase, entry in unique_brains(models).items():
        _load_schedulers(entry, training["optim_schedulers"].get(phase, {}), f"{where}: phase '{phase}'")
        restore_gradients(entry["brain"].modules, training["gradients"].get(phase, {}))
    if initial:
        restore_parts(parts_of(models), training.get("parts", {}), initial.options, where)
        if "frozen" in training:
            restore_frozen(models, training["frozen"], initial.frozen)
    for phase, entry in models.items():
        entry["updater"].set_state_dict(training["updaters"][phase])
    restore_recoverables(recoverables, training["recoverables"], where)
    # Last: whatever was built or loaded before may have drawn from them.
    restore_random_state(training["random"])


def _schedulers(entry: Mapping[str, Any], phase: str) -> dict[str, Any]:
    states = {}
    for name, scheduler in entry["optim_schedulers"].items():
        state = _mapping(scheduler, scheduler.state_dict(), phase)
        if "optimizer" in state:
            _mapping(scheduler.optimizer, state["optimizer"], phase)
        states[name] = {"class": _kind(scheduler), "state": state}
    return states


def _mapping(owner: Any, state: Any, phase: str) -> Mapping[str, Any]:
    """The state that an object has returned, if it is a dict."""
    if isinstance(state, Mapping):
        return state
    what = f"phase.{phase}: {type(owner).__name__}.state_dict returned a {type(state).__name__}"
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
        if "optimizer" in saved["state"] and CONFIG_OPTIONS not in saved["state"]["optimizer"]:
            what = f"{where}: '{name}' was saved without what the config said of it"
            logger.warning(f"{what}; its options stay as they were saved, whatever the config says now")
        try:
            scheduler.load_state_dict(saved["state"])
        except (ValueError, KeyError) as error:
            raise CheckpointError(f"{where}: the state of '{name}' does not fit it ({error}); {_REMEDY}") from error


def gradients_of(module: nn.Module) -> dict[str, Tensor]:
    """The gradients of open accumulation windows."""
    return {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}


def restore_gradients(module: nn.Module, gradients: Mapping[str, Tensor]) -> None:
    """Restore gradients by the names of their parameters."""
    for name, gradient in gradients.items():
        owner = module.get_parameter(name)
        owner.grad = gradient.to(owner.device)


def restore_recoverables(recoverables: Mapping[str, Recoverable], states: Mapping[str, Any], where: str) -> None:
    """Restore the states of objects; ``where``: the checkpoint, for messages."""
    for name, recoverable in recoverables.items():
        if name in states:
            recoverable.load_state_dict(states[name])
        else:
            logger.warning(f"{where}: knows nothing of '{name}', which begins anew")
    for name in states.keys() - recoverables.keys():
        what = f"{where}: has a state of '{name}', which is not there"
        logger.warning(f"{what}; it is left out unless add_recoverable names it yet")
