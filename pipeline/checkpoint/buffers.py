"""Memory that is used again for every snapshot: taking new memory costs more than the copy into it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor


class Buffers:
    """One buffer for each file; on a machine with CUDA its memory is pinned, so that a GPU copies into it by itself."""

    def __init__(self) -> None:
        self._memory: dict[str, Tensor] = {}

    def named(self, name: str) -> Callable[[int], Tensor]:
        """What gives the buffer of a file for a size in bytes; its last content must no longer be needed."""
        return partial(self._of_size, name)

    def _of_size(self, name: str, size: int) -> Tensor:
        memory = self._memory.get(name)
        if memory is None or memory.numel() < size:
            memory = torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
            self._memory[name] = memory
        return memory
