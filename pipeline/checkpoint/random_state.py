"""The states of the random generators: of Python, torch, numpy and GPUs."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch


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
