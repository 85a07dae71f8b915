"""The weights of models by name: collected, loaded as a whole or in part, frozen."""

from __future__ import annotations

import copy
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from pipeline.checkpoint.comparison import differences
from pipeline.errors import CheckpointError, ConfigError, nearest, one_of, printable

_T = TypeVar("_T")


def match_names(patterns: Sequence[str], names: Iterable[str]) -> list[str]:
    """The names that match one of the patterns (``*.bias``), or belong to a module that does."""
    patterns = [form for pattern in patterns for form in (pattern, f"{pattern}.*")]
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def unmatched_pattern(patterns: Sequence[str], names: Iterable[str]) -> str | None:
    """The first pattern that matches no name."""
    names = list(names)
    return next((pattern for pattern in patterns if not match_names([pattern], names)), None)


def suggest_names(pattern: str, names: Iterable[str]) -> str:
    """The remedy for a pattern without a match: similar names at any depth, else the top-level modules."""
    parts = [name.split(".") for name in names]
    anything = {".".join(path[:depth]) for path in parts for depth in range(1, len(path) + 1)}
    return nearest(pattern, anything) or one_of(pattern, {path[0] for path in parts})


# Phase -> name -> tensor.
Weights = Mapping[str, Mapping[str, Tensor]]
PhaseWeights = dict[str, dict[str, Tensor]]

# Phase -> what the network stage built for it.
Models = Mapping[str, Mapping[str, Any]]


# What became of the tensors that were asked for -> their names; with several phases, ``phase.name``.
LoadReport = Mapping[str, Sequence[str]]

LOADED, NOT_SAVED, IN_NO_MODEL, RESHAPED = "loaded", "not saved", "in no model", "of another shape"


def summary(report: LoadReport) -> str:
    """One line for the log."""
    return "; ".join(f"{len(names)} {what} ({abbreviate(names)})" for what, names in report.items() if names)


def abbreviate(names: Sequence[str], separator: str = ", ") -> str:
    """The first few, and how many there are besides."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{printable(separator.join(names[:5]))}{more}"


def module_of(entry: Mapping[str, Any]) -> nn.Module:
    """The module of a phase that is saved: the one that the config names, or all modules of its Brain."""
    model = entry["model"]
    return model if isinstance(model, nn.Module) else entry["brain"].modules


def is_entry(entry: Any) -> bool:
    """Whether an entry of the context has a module whose weights are saved."""
    entry = entry if isinstance(entry, Mapping) else {}
    modules = entry.get("model"), getattr(entry.get("brain"), "modules", None)
    return any(isinstance(module, nn.Module) for module in modules)


def unique_modules(models: Models) -> dict[str, nn.Module]:
    """Phase -> the module whose weights are saved; of phases that share one, the first."""
    return _unique({phase: module_of(entry) for phase, entry in models.items()})


def unique_brains(models: Models) -> Models:
    """The phases that have a Brain of their own, or are the first to have it."""
    return {phase: models[phase] for phase in _unique({phase: entry["brain"] for phase, entry in models.items()})}


def _unique(owned: Mapping[str, _T]) -> dict[str, _T]:
    first: dict[int, str] = {}
    for phase, item in owned.items():
        first.setdefault(id(item), phase)
    return {phase: owned[phase] for phase in first.values()}


def load_weights(
    weights: Weights,
    models: Models,
    where: str,
    resized: Mapping[str, Collection[str]] | None = None,
) -> None:
    """Load the weights of every phase by its name; if both sides have just one, the names may differ.

    Of a tensor that has several names in the models, one name is enough.

    Args:
        weights: what was saved.
        models: what takes them.
        where: what messages name.
        resized: phase -> the buffers that take any shape and type, or none at all.

    Raises:
        CheckpointError: they do not fit, or two names of one tensor have different values. Then no
            model has changed.
    """
    modules = unique_modules(models)
    weights = _by_phase(weights, modules)
    resized = _by_phase(resized or {}, modules)
    for phase in modules:
        if phase not in weights:
            what = f"{where}: has no weights for phase '{phase}', but for {', '.join(weights)}"
            raise CheckpointError(f"{what}; name the phase as it was when trained")
    weights = fill_tied_names(weights, modules, where, resized)
    free = {phase: resized.get(phase, ()) for phase in modules}
    for phase, module in modules.items():
        _check(module, weights[phase], free[phase], f"{where}: phase '{phase}'")
    for phase, module in modules.items():
        _load(module, weights[phase], free[phase])


def load_module(module: nn.Module, weights: Mapping[str, Any], where: str) -> None:
    """Load the state that a module had earlier in the same training. Its buffers take any shape and type.

    Raises:
        CheckpointError: it does not fit; then the module has not changed.
    """
    _check(module, weights, buffers_of(module), where)
    _load(module, weights, buffers_of(module))


def load_part(
    weights: Weights,
    models: Models,
    where: str,
    only: Sequence[str] = ("*",),
    resized: Mapping[str, Collection[str]] | None = None,
) -> LoadReport:
    """Load the weights that the patterns name, that were saved, and that have the right shape.

    Args:
        weights: what was saved.
        models: what takes them.
        where: what messages name.
        only: module names (``encoder``), or patterns (``*.bias``), of what is asked for; with several phases
            ``phase.name`` too.
        resized: as in ``load_weights``.

    Raises:
        CheckpointError: something in ``only`` names nothing, or nothing that can be loaded; or two names of one tensor
            have different values. Then no model has changed.
    """
    modules = unique_modules(models)
    several = len(modules) > 1
    resized = _by_phase(resized or {}, modules)
    filled = fill_tied_names(_by_phase(weights, modules), modules, where, resized, only)
    saved = _joined(filled, several)
    states: dict[str, dict[str, Any]] = {}
    for phase, module in modules.items():
        values = filled.get(phase, {})
        adapted = _adaptable(module, values, resized.get(phase, ())) & values.keys()
        states[phase] = {**module.state_dict(), **{name: values[name] for name in adapted}}
    own = _joined(states, several)
    known = [*own, *(name for name in saved if name not in own)]
    if wrong := unmatched_pattern(only, known):
        raise CheckpointError(f"{where}: '{wrong}' names nothing in it or in the models{suggest_names(wrong, known)}")
    report = _compared(match_names(only, known), saved, own)
    if wrong := unmatched_pattern(only, report[LOADED]):
        what = f"{where}: nothing that '{wrong}' names can be loaded ({summary(report)})"
        raise CheckpointError(f"{what}; it holds {abbreviate([*saved])}; name what both have, or `rename` what it has")
    loaded = set(report[LOADED])
    for phase, module in modules.items():
        prefix = f"{phase}." if several else ""
        part = {name: saved[prefix + name] for name in states[phase] if prefix + name in loaded}
        free = [name for name in resized.get(phase, ()) if name in part]
        _load(module, part, free, strict=False)
    return report


def fill_tied_names(
    weights: Weights,
    modules: Mapping[str, nn.Module],
    where: str,
    resized: Mapping[str, Collection[str]],
    only: Sequence[str] = ("*",),
) -> PhaseWeights:
    """Return the weights with a value under each name of a tied tensor.

    A tied tensor has several names in the modules. Programs that write it once choose one of the names.

    Args:
        weights: phase -> name -> what was saved.
        modules: phase -> the module that takes it.
        where: what messages begin with.
        resized: phase -> the buffers that get memory of their own.
        only: the patterns of ``load_part``. A tensor that they do not name is left as it is.

    Raises:
        CheckpointError: two names of one tensor have different values.
    """
    several = len(modules) > 1
    filled = {phase: dict(tensors) for phase, tensors in weights.items()}
    for shared in tied_names(modules):
        places = [(phase, name) for phase, name in shared if name not in resized.get(phase, ())]
        labels = {place: ".".join(place) if several else place[1] for place in places}
        saved = [(phase, name) for phase, name in places if name in weights.get(phase, ())]
        if not saved or not match_names(only, labels.values()):
            continue
        first_phase, first_name = saved[0]
        value = weights[first_phase][first_name]
        for phase, name in saved[1:]:
            difference = next(differences(value, weights[phase][name]), None)
            if difference:
                names = f"'{labels[saved[0]]}' and '{labels[phase, name]}'"
                what = f"{names} are one tensor of the model, and differ here ({difference})"
                raise CheckpointError(f"{where}: {what}; save the same under both, or leave one out")
        for phase, name in places:
            filled.setdefault(phase, {}).setdefault(name, value)
    return filled


def tied_names(modules: Mapping[str, nn.Module]) -> list[list[tuple[str, str]]]:
    """Return the phase and name of each place of a tensor, for tensors that are in several places.

    This includes parameters and buffers that are assigned twice, modules that are registered twice,
    and tensors that show exactly the same memory.
    """
    # All states stay alive until the end, so that no id is used twice.
    states = {phase: module.state_dict(keep_vars=True) for phase, module in modules.items()}
    places: dict[Hashable, list[tuple[str, str]]] = {}
    for phase, module in modules.items():
        keys: dict[str, Hashable] = dict(_buffer_slots(module))
        for name, value in states[phase].items():
            # A buffer without elements gets its memory when it is loaded.
            has_memory = isinstance(value, Tensor) and (is_lazy(value) or value.numel())
            if has_memory and not is_extra_state(name):
                keys[name] = _identity(value)
        for name, key in keys.items():
            places.setdefault(key, []).append((phase, name))
    return [names for names in places.values() if len(names) > 1]


def _buffer_slots(module: nn.Module) -> dict[str, Hashable]:
    """Return the name of each saved buffer with the module object and the attribute that hold it."""
    slots: dict[str, Hashable] = {}
    for name in buffers_of(module):
        place, _, attribute = name.rpartition(".")
        slots[name] = (id(module.get_submodule(place)), attribute)
    return slots


def _identity(tensor: Tensor) -> Hashable:
    """Return a key that two tensors share if a write to one is a write to all of the other."""
    if tensor.layout is not torch.strided or is_lazy(tensor) or 0 in tensor.stride():
        return id(tensor)
    address = tensor.data_ptr()
    return (address, tensor.dtype, tensor.shape, tensor.stride()) if address else id(tensor)


def rename(weights: PhaseWeights, prefixes: Mapping[str, str], where: str) -> PhaseWeights:
    """The same under other names: in turn, each of the prefixes is replaced in the names that then begin with it.

    Raises:
        CheckpointError: no name begins with one of them, or two tensors of a phase get the same name.
    """
    for prefix, other in prefixes.items():
        names = [name for tensors in weights.values() for name in tensors]
        new = {name: f"{other}{name.removeprefix(prefix)}" for name in names if name.startswith(prefix)}
        if not new:
            what = f"{where}: rename: no name begins with '{prefix}', only {abbreviate(names)}"
            raise CheckpointError(f"{what}; write the prefix that they have, or take it out")
        if any(len({new.get(name, name) for name in tensors}) < len(tensors) for tensors in weights.values()):
            what = f"{where}: rename: with '{prefix}' -> '{other}' two tensors get the same name"
            raise CheckpointError(f"{what}; write a longer prefix, or another name")
        weights = {phase: {new.get(name, name): own[name] for name in own} for phase, own in weights.items()}
    return weights


def renamed(name: str, prefixes: Mapping[str, str]) -> str:
    """Return what ``rename`` makes of one name."""
    for prefix, other in prefixes.items():
        if name.startswith(prefix):
            name = f"{other}{name.removeprefix(prefix)}"
    return name


def freeze(models: Models, patterns: Sequence[str], where: str, layers: Sequence[str] = ()) -> list[str]:
    """Freeze parameters: no gradient, and so no step, no decay and no part in a norm.

    Args:
        models: phase -> what the network stage built for it.
        patterns: module names or patterns, as those of ``load_part``.
        where: what messages name.
        layers: what ``freeze_statistics`` returned; a pattern may name one of these that has no parameter.

    Returns:
        The names of the parameters.

    Raises:
        ConfigError: a pattern names no parameter, or nothing is left to an OptimScheduler; then no model has changed.
    """
    modules = unique_modules(models)
    by_phase = {phase: dict(module.named_parameters(remove_duplicate=False)) for phase, module in modules.items()}
    parameters = _joined(by_phase, len(modules) > 1)
    if wrong := unmatched_pattern(patterns, [*parameters, *map(_mean_of, layers)]):
        raise ConfigError(f"{where}: '{wrong}' names no parameter of the models{suggest_names(wrong, parameters)}")
    names = match_names(patterns, parameters)
    frozen = {parameters[name] for name in names}
    for phase in modules if frozen else ():
        for name, scheduler in (models[phase].get("optim_schedulers") or {}).items():
            if not any(parameter.requires_grad and parameter not in frozen for parameter in scheduler.parameters):
                raise ConfigError(f"{where}: leaves nothing for '{name}' of phase '{phase}' to train; freeze less")
    for parameter in frozen:
        parameter.requires_grad_(False)
    return names


def freeze_statistics(models: Models, patterns: Sequence[str], where: str) -> list[str]:
    """Keep the running statistics of layers: these layers stay in evaluation mode.

    Args:
        models: phase -> what the network stage built for it.
        patterns: those of ``freeze``; a layer is meant where one of them matches its ``running_mean``.
        where: what messages name.

    Returns:
        The names of the layers: each BatchNorm and InstanceNorm with ``track_running_stats``.

    Raises:
        ConfigError: the patterns name no such layer; then no model has changed.
    """
    modules = unique_modules(models)
    layers: dict[str, nn.Module] = {}
    for phase, module in modules.items():
        prefix = f"{phase}." if len(modules) > 1 else ""
        layers |= {f"{prefix}{name}": part for name, part in _with_statistics(module).items()}
    names = [name for name in layers if match_names(patterns, [_mean_of(name)])]
    if not names:
        named = ", ".join(patterns)
        what = f"{where}.statistics: is true, but no layer in {named} has running statistics"
        raise ConfigError(f"{what}{one_of(patterns[0], layers)}")
    frozen = {layers[name] for name in names}
    for layer in frozen:
        layer.eval()
    for brain in {id(entry["brain"]): entry["brain"] for entry in models.values() if "brain" in entry}.values():
        brain._trainable.freeze_statistics(frozen)
    return names


def _with_statistics(module: nn.Module) -> dict[str, nn.Module]:
    """The layers that have running statistics, by name."""
    return {
        name: part for name, part in module.named_modules() if isinstance(part, _NormBase) and part.track_running_stats
    }


def _mean_of(layer: str) -> str:
    """The name of the running mean of a layer; a model may be such a layer itself."""
    return f"{layer}.running_mean".removeprefix(".")


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """The buffers that are saved, by name, including those that are None."""
    return {
        f"{place}.{name}".lstrip("."): value
        for place, part in module.named_modules(remove_duplicate=False)
        for name, value in part._buffers.items()
        if name not in part._non_persistent_buffers_set
    }


def _compared(names: list[str], saved: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> LoadReport:
    """Which of the named tensors can be loaded, and why the others cannot."""
    report: dict[str, list[str]] = {what: [] for what in (LOADED, NOT_SAVED, IN_NO_MODEL, RESHAPED)}
    for name in names:
        if name not in saved:
            report[NOT_SAVED].append(name)
        elif name not in own:
            report[IN_NO_MODEL].append(name)
        elif not _fits(name, saved[name], own[name]):
            shapes = f"'{name}' has shape {_shape(saved[name])}, the model's has {_shape(own[name])}"
            report[RESHAPED].append(shapes)
        else:
            report[LOADED].append(name)
    return report


def _joined(tensors: Weights, several: bool) -> dict[str, Tensor]:
    """The tensors of all phases by name; with several phases, ``phase.name``."""
    return {f"{phase}.{name}" if several else name: own[name] for phase, own in tensors.items() for name in own}


def _by_phase(weights: Mapping[str, _T], modules: Mapping[str, nn.Module]) -> Mapping[str, _T]:
    """What belongs to the weights by the phases of the modules: if both sides have just one, the names may differ."""
    return {next(iter(modules)): next(iter(weights.values()))} if len(weights) == len(modules) == 1 else weights


def _check(
    module: nn.Module,
    weights: Mapping[str, Any],
    resized: Collection[str],
    where: str,
) -> None:
    """Raise unless a module can load the weights."""
    own = module.state_dict()
    names = (own.keys() | weights.keys()) - _adaptable(module, weights, resized)
    report = _compared(sorted(names), weights, own)
    missing = [f"has no '{name}'" for name in report[NOT_SAVED]]
    others = [f"has '{name}', which the model does not" for name in report[IN_NO_MODEL]]
    if faults := [abbreviate(names, "; ") for names in (others, missing, report[RESHAPED]) if names]:
        remedy = ", or `rename` the prefixes of its names" if missing and others else ""
        what = f"{where}: does not fit the model: {'; '.join(faults)}"
        raise CheckpointError(f"{what}; load it into the model that it was saved from{remedy}")


def _load(
    module: nn.Module,
    weights: Mapping[str, Any],
    resized: Collection[str],
    *,
    strict: bool = True,
) -> None:
    """Load weights that fit; buffers get the shape and memory that tensors can be copied into."""
    own = module.state_dict(keep_vars=True)
    tensors = [value for value in own.values() if isinstance(value, Tensor)]
    device = tensors[0].device if tensors else torch.device("cpu")
    for name in _room(module) | (set(resized) & buffers_of(module).keys()):
        value = weights.get(name)
        buffer = None
        if isinstance(value, Tensor):
            before = own.get(name)
            place = before.device if isinstance(before, Tensor) else device
            buffer = torch.empty_like(value, device=place)
        elif name not in resized:
            continue
        owner, _, attribute = name.rpartition(".")
        module.get_submodule(owner)._buffers[attribute] = buffer
    for tensor in tensors:
        if not is_lazy(tensor) and tensor.layout is torch.strided and 0 in tensor.stride():
            tensor.data = tensor.data.clone(memory_format=torch.contiguous_format)
    with torch.no_grad():
        module.load_state_dict(weights, strict=strict)


def _adaptable(module: nn.Module, weights: Mapping[str, Any], resized: Collection[str]) -> set[str]:
    """Return the names for which a module takes what was saved, whatever it has now.

    These are the buffers in ``resized``, buffers that are None or empty, and what the loading code
    of a module accepts, as that of torch's observers does.
    """
    own = module.state_dict()
    buffers = buffers_of(module)
    names = {name for name in resized if name in buffers}
    for name in _room(module):
        never_there = buffers[name] is None and name not in weights
        if never_there or isinstance(weights.get(name), Tensor):
            names.add(name)
    modules = dict(module.named_modules(remove_duplicate=False))
    tried: dict[str, bool] = {}
    for name in sorted((own.keys() | weights.keys()) - names):
        fits = name in own and name in weights and _fits(name, weights[name], own[name])
        if not fits and _accepts(modules, weights, name, tried):
            names.add(name)
    return names


def _accepts(
    modules: Mapping[str, nn.Module],
    weights: Mapping[str, Any],
    name: str,
    tried: dict[str, bool],
) -> bool:
    """Return whether a module around a name has loading code that accepts all values below it.

    The code runs on a copy of that module. ``tried`` keeps the outcome by the name of the module.
    """
    parts = name.split(".")
    for depth in range(len(parts) - 1, -1, -1):
        place = ".".join(parts[:depth])
        part = modules.get(place)
        if part is None or not _has_loading_code(part):
            continue
        if place not in tried:
            prefix = f"{place}." if place else ""
            below = [name for name in weights if name.startswith(prefix)]
            values = {name.removeprefix(prefix): weights[name] for name in below}
            try:
                copy.deepcopy(part).load_state_dict(values)
            except Exception:  # whatever the code raises for values that it does not take
                tried[place] = False
            else:
                tried[place] = True
        if tried[place]:
            return True
    return False


def _has_loading_code(module: nn.Module) -> bool:
    """Return whether a class or a hook changes how torch loads the tensors of a module."""
    is_changed = type(module)._load_from_state_dict is not nn.Module._load_from_state_dict
    hooks = (module._load_state_dict_pre_hooks, module._load_state_dict_post_hooks)
    return is_changed or any(hooks)


def is_extra_state(name: str) -> bool:
    """Whether a name is that of a module's extra state."""
    return name.rpartition(".")[2] == "_extra_state"


def _fits(name: str, saved: Any, own: Any) -> bool:
    """Whether a value fits a module; extra state, and a buffer without a shape yet, take any."""
    if is_extra_state(name):
        return True
    if not isinstance(saved, Tensor) or not isinstance(own, Tensor):
        return False
    return is_lazy(own) or (own.shape == saved.shape and own.layout is saved.layout)


def _shape(value: Any) -> Any:
    """The shape of a tensor; the type of anything else."""
    return tuple(value.shape) if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _room(module: nn.Module) -> set[str]:
    """The buffers that take a tensor of any shape, since they are None or empty."""
    buffers = buffers_of(module).items()
    return {name for name, value in buffers if value is None or (not is_lazy(value) and not value.numel())}
