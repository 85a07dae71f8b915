"""Where the random generators are, as plain data and tensors, and back."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch


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
    """Put the generators where they were; those of GPUs that are not there are left out."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    for device, each in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(each, device)
    if "numpy" in state and (numpy := sys.modules.get("numpy")):
        kind, keys, position, has_gauss, gauss = state["numpy"]
        numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), position, has_gauss, gauss))
