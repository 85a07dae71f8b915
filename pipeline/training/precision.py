"""In which number format a pass computes; the weights themselves stay in float32."""

from __future__ import annotations

import torch
from torch.amp import GradScaler

from pipeline.errors import ConfigError

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def autocast(precision: str, device: torch.device) -> torch.autocast | None:
    """What a forward pass is wrapped in: nothing at fp32.

    Raises:
        ConfigError: fp16 on a CPU, which has no kernels for it that would be worth it.
    """
    if precision == "fp32":
        return None
    if precision == "fp16" and device.type == "cpu":
        raise ConfigError("precision fp16 needs a GPU, and the device is cpu; use bf16 or fp32")
    return torch.autocast(device.type, dtype=DTYPES[precision])


def scaler(precision: str, device: torch.device) -> GradScaler | None:
    """What keeps small gradients above zero in fp16; nothing elsewhere."""
    return GradScaler(device.type) if precision == "fp16" and device.type != "cpu" else None
