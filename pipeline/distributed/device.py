"""Where a runner computes, and torch's deterministic mode."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pipeline.distributed.world import SINGLE, World
from pipeline.errors import ConfigError


def resolve_device(name: str, world: World = SINGLE) -> torch.device:
    """The device that a runner's ``device`` means: ``auto`` and ``gpu`` take the first GPU, ``auto`` else the CPU.

    Of several processes on a host, each takes the GPU with its local rank.

    Raises:
        ConfigError: the machine has no such device.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    device = torch.device("cuda" if name in {"auto", "gpu"} else name)
    if device.index is None and world.size > 1:
        device = torch.device("cuda", world.local_rank)
    elif world.local_size > 1:
        raise ConfigError(f"is '{name}', one GPU for {world.local_size} processes of this machine; write cuda")
    count = torch.cuda.device_count()
    if (device.index or 0) >= count:
        gpus = f"{count} GPU{'' if count == 1 else 's'}"
        several = f" for {world.local_size} processes; start fewer, or write cpu" if world.local_size > 1 else ""
        raise ConfigError(f"is '{name}', and this machine has {gpus}{several or '; write cpu or auto'}")
    return device


def describe_hardware() -> dict[str, Any]:
    """The hardware, for ``environment.json``."""
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {"torch_threads": torch.get_num_threads(), "gpus": gpus, "cuda": torch.version.cuda}


# cuBLAS repeats itself only with buffers of a fixed size, and reads their size when it is first used.
CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


@contextmanager
def deterministic() -> Iterator[None]:
    """Until the block ends, torch uses only deterministic operations, or raises.

    cuDNN neither chooses by what was faster. Afterwards all is as it was before.
    """
    enabled = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    workspace = os.environ.get(CUBLAS)
    os.environ.setdefault(CUBLAS, ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warns)
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = cudnn
        if workspace is None:
            os.environ.pop(CUBLAS, None)
