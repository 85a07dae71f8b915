"""Mixed precision: autocast and the gradient scaler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.amp import GradScaler

from pipeline.errors import ConfigError

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def autocast(precision: str, device: torch.device, *, steps: bool = False) -> torch.autocast | None:
    """Return the autocast context of a forward pass; None in fp32.

    Args:
        precision: fp32, fp16 or bf16.
        device: the device of the model.
        steps: whether weights change inside the block; then no cast weights are cached.

    Raises:
        ConfigError: fp16 on a CPU, which has no useful kernels for it.
    """
    if precision == "fp32":
        return None
    if precision == "fp16" and device.type == "cpu":
        raise ConfigError("precision fp16 needs a GPU, and the device is cpu; use bf16 or fp32")
    return torch.autocast(device.type, dtype=DTYPES[precision], cache_enabled=False if steps else None)


def autocast_enabled(device: torch.device) -> bool:
    """Return whether autocast is active on a device."""
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


@contextmanager
def without_autocast(device: torch.device) -> Iterator[None]:
    """Switch autocast off until the block ends.

    Torch caches the weights that it has cast until the outermost autocast ends. The cache is
    cleared before the block, because an evaluation may have cached weights without gradients, and
    after it, because the block may have changed weights that it has cached.
    """
    torch.clear_autocast_cache()
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.clear_autocast_cache()


def make_scaler(precision: str, device: torch.device) -> GradScaler | None:
    """Return the scaler that keeps small gradients above zero in fp16 on a GPU; otherwise None."""
    return GradScaler(device.type) if precision == "fp16" and device.type != "cpu" else None
