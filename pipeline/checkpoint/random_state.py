"""The states of the random generators: of Python, torch, numpy and GPUs, and of single ones."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch


def cpu_random_state() -> dict[str, Any]:
    """The states of the generators of Python, torch's CPU, and numpy if it is in use, as plain data and a tensor."""
    of_numpy = None
    if numpy := sys.modules.get("numpy"):
        of_numpy = _plain(numpy.random.get_state())
    return {"python": random.getstate(), "torch": torch.get_rng_state(), "numpy": of_numpy}


def restore_cpu_random_state(state: Mapping[str, Any]) -> None:
    """Restore these generators; numpy's is left as it is where numpy is not in use."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if (of_numpy := state.get("numpy")) and (numpy := sys.modules.get("numpy")):
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


def generators_in(owner: object, **loaders: Iterable[Any]) -> dict[str, Any]:
    """The random generators in the attributes of an object, of Python's class, torch's or numpy's two, and those of loaders."""
    kinds: tuple[type, ...] = random.Random, torch.Generator
    if numpy := sys.modules.get("numpy.random"):
        kinds = *kinds, numpy.Generator, numpy.RandomState
    own = {name: value for name, value in vars(owner).items() if isinstance(value, kinds)}
    for loader, generators in loaders.items():
        own |= {f"{loader}.generator {number}": generator for number, generator in enumerate(generators)}
    # Which has no state.
    return {name: value for name, value in own.items() if not isinstance(value, random.SystemRandom)}


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


def _state_of(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    return _plain(generator.bit_generator.state if hasattr(generator, "bit_generator") else generator.get_state())


def _plain(state: Any) -> Any:
    """A state with lists in place of numpy's arrays, which numpy takes back."""
    if isinstance(state, Mapping):
        return {name: _plain(value) for name, value in state.items()}
    if isinstance(state, tuple):
        return tuple(map(_plain, state))
    return state.tolist() if hasattr(state, "tolist") and not isinstance(state, torch.Tensor) else state
