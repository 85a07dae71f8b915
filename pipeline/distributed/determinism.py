"""Computing so that the same input gives the same bits."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
"""cuBLAS repeats itself only with buffers of a fixed size, and reads their size when it is first used."""


@contextmanager
def deterministic() -> Iterator[None]:
    """Until the block ends, torch takes only operations whose result is the same each time, or raises.

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
