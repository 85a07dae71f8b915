"""Mixed precision: autocast and the gradient scaler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.amp import GradScaler

from pipeline.errors import ConfigError

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def autocast(precision: str, device: torch.device, *, steps: bool = False) -> torch.autocast | None:
    """The autocast context of a forward pass; nothing in fp32.

    Args:
        precision: fp32, fp16 or bf16.
        device: where it computes.
        steps: whether weights change inside of the block; then no cast weights are cached.

    Raises:
        ConfigError: fp16 on a CPU, which has no kernels for it that would be worth it.
    """
    if precision == "fp32":
        return None
    if precision == "fp16" and device.type == "cpu":
        raise ConfigError("precision fp16 needs a GPU, and the device is cpu; use bf16 or fp32")
    return torch.autocast(device.type, dtype=DTYPES[precision], cache_enabled=False if steps else None)


def autocast_enabled(device: torch.device) -> bool:
    """Whether autocast is active."""
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


@contextmanager
def without_autocast(device: torch.device) -> Iterator[None]:
    """Switch autocast off until the block ends.

    An autocast inside of another keeps the weights that it has cast until the outer one is left: here they are forgotten,
    those that an evaluation has cast without gradients before, and those that the block has cast before it changes them.
    """
    torch.clear_autocast_cache()
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.clear_autocast_cache()


def make_scaler(precision: str, device: torch.device) -> GradScaler | None:
    """The scaler that keeps small gradients above zero in fp16; elsewhere None."""
    return GradScaler(device.type) if precision == "fp16" and device.type != "cpu" else None
