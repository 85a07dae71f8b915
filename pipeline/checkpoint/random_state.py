"""The states of the random generators: of Python, torch, numpy and GPUs, and of single ones."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.checkpoint.user_objects import DEPTH, attributes_of, contents_of, items_of

# Values that contain no generator.
_LEAVES = (type(None), str, bytes, int, float, Tensor, type, FunctionType)


def cpu_random_state() -> dict[str, Any]:
    """The states of the generators of Python, torch's CPU, and numpy if it is in use, as plain data and a tensor."""
    of_numpy = None
    if numpy := sys.modules.get("numpy"):
        of_numpy = plain_state(numpy.random.get_state())
    return {"python": random.getstate(), "torch": torch.get_rng_state(), "numpy": of_numpy}


def restore_cpu_random_state(state: Mapping[str, Any]) -> None:
    """Restore these generators; numpy's is left as it is where numpy is not in use."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if (of_numpy := state["numpy"]) and (numpy := sys.modules.get("numpy")):
        kind, keys, *others = of_numpy
        numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), *others))


def random_state(own: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The states of the same generators, of every GPU's, and of some of one's own, by name."""
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {**cpu_random_state(), "cuda": gpus, **({"own": states_of(own)} if own else {})}


def restore_random_state(state: Mapping[str, Any], own: Mapping[str, Any] | None = None) -> None:
    """Restore the generators; those of missing GPUs are skipped."""
    restore_cpu_random_state(state)
    for device, generator_state in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(generator_state, device)
    restore_states(own or {}, state.get("own", {}))


def generators_in(owner: object) -> dict[str, Any]:
    """Find the random generators that an object holds: of ``random``, torch or numpy.

    Its attributes are searched, and from there lists, dicts, modules, partial functions, bound methods, torch's
    datasets such as ``Subset``, and objects of the user's classes. A generator is found if at most ``DEPTH`` attributes
    and items lead to it, each in a container of at most ``MOST_ITEMS`` items. Submodules do not count.

    Args:
        owner: a Brain, an updater, a dataset, a collate function or a sampler.

    Returns:
        The path of each generator, such as ``transform.generator``, and the generator.
    """
    found: dict[str, Any] = {}
    visited = {id(owner)}
    if isinstance(owner, nn.Module):
        _search_module(owner, "", 0, visited, found)
    else:
        contents = items_of(owner)
        _search(attributes_of(owner) if contents is None else contents, "", 0, visited, found)
    return found


def _search(
    contents: Iterable[tuple[Any, Any]], place: str, depth: int, visited: set[int], found: dict[str, Any]
) -> None:
    """Add the generators among attributes or items to ``found``, and those that these lead to."""
    for name, value in contents:
        if isinstance(value, _LEAVES) or id(value) in visited:
            continue
        visited.add(id(value))
        path = f"{place}.{name}" if place else str(name)
        if isinstance(value, _kinds()):
            # SystemRandom has no state.
            if not isinstance(value, random.SystemRandom):
                found[path] = value
        elif isinstance(value, nn.Module):
            _search_module(value, path, depth, visited, found)
        elif depth + 1 < DEPTH:
            _search(contents_of(value), path, depth + 1, visited, found)


def _search_module(module: nn.Module, place: str, depth: int, visited: set[int], found: dict[str, Any]) -> None:
    """The same for the attributes of a module and of its submodules."""
    for name, part in module.named_modules(prefix=place):
        visited.add(id(part))
        attributes = [(key, value) for key, value in vars(part).items() if key not in _OF_MODULES]
        _search(attributes, name, depth + 1, visited, found)


def _kinds() -> tuple[type, ...]:
    """The classes of random generators."""
    numpy = sys.modules.get("numpy.random")
    of_numpy = (numpy.Generator, numpy.RandomState) if numpy else ()
    return (random.Random, torch.Generator, *of_numpy)


# Attributes of a module that hold tensors, submodules and hooks.
_OF_MODULES = frozenset(vars(nn.Module()))


def seed_generator(generator: Any, seed: int) -> None:
    """Seed a single generator.

    Args:
        generator: of ``random``, torch or numpy.
        seed: at least 0, and less than 2**63.
    """
    if isinstance(generator, random.Random):
        generator.seed(seed)
    elif isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = type(generator.bit_generator)(seed).state
    else:
        kind = generator.get_state(legacy=False)["bit_generator"]
        generator.set_state(getattr(sys.modules["numpy.random"], kind)(seed).state)


def states_of(generators: Mapping[str, Any]) -> dict[str, Any]:
    """The states of such generators, as plain data and tensors."""
    return {name: _state_of(generator) for name, generator in generators.items()}


def restore_states(generators: Mapping[str, Any], states: Mapping[str, Any]) -> None:
    """Restore those of the generators that have a state of their name."""
    for name in generators.keys() & states.keys():
        generator, state = generators[name], states[name]
        if isinstance(generator, random.Random):
            generator.setstate(state)
        elif hasattr(generator, "bit_generator"):
            generator.bit_generator.state = state
        else:
            generator.set_state(state)


def lacking(generators: Mapping[str, Any], states: Mapping[str, Any]) -> list[str]:
    """The names of the states that belong to none of the generators."""
    return sorted(name for name in states.keys() - generators.keys() if states[name] is not None)


def _state_of(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    return plain_state(generator.bit_generator.state if hasattr(generator, "bit_generator") else generator.get_state())


def plain_state(state: Any) -> Any:
    """Return a state with lists in place of numpy's arrays; numpy accepts it."""
    if isinstance(state, Mapping):
        return {name: plain_state(value) for name, value in state.items()}
    if isinstance(state, tuple):
        return tuple(map(plain_state, state))
    return state.tolist() if hasattr(state, "tolist") and not isinstance(state, torch.Tensor) else state
