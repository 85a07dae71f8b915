"""The tensors of a nested state, and where they are in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy


def tensors_in(state: Any) -> Iterator[Tensor]:
    """Return the tensors of a state, at any depth of its mappings, lists and tuples."""
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, Mapping | list | tuple):
        for value in state.values() if isinstance(state, Mapping) else state:
            yield from tensors_in(value)


def memory_of(value: Any) -> tuple[int, int]:
    """Return where the memory of a tensor is; for anything else a unique value."""
    own = isinstance(value, Tensor) and value.layout is torch.strided and not is_lazy(value) and value.numel()
    return (value.data_ptr(), value.numel()) if own else (id(value), -1)
