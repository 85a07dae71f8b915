"""Run by ``pipeline doctor`` in a process of its own: imports, and tells how that went by a line of JSON for each."""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import EntryPoint
from typing import Any


def attempt(value: str) -> dict[str, Any]:
    """Import a module, or what an entry point names; ``problem`` is why that fails, in one line, or ``""``."""
    try:
        EntryPoint("", value, "").load()
        return {"problem": "", **(_torch() if value == "torch" else {})}
    # An import may raise anything, also SystemExit.
    except BaseException as error:
        return {"problem": _one_line(error)}


def _torch() -> dict[str, Any]:
    """Its threads and devices, and why CUDA, where torch was built for it, is not there."""
    import torch  # noqa: PLC0415 - it may be what is broken

    devices, why = [], ""
    if torch.version.cuda or torch.version.hip:
        try:
            torch.cuda.current_device()
            for index in range(torch.cuda.device_count()):
                own = torch.cuda.get_device_properties(index)
                devices.append({"device": f"cuda:{index}", "name": own.name, "memory": own.total_memory})
        except Exception as error:  # whatever the driver says
            why = _one_line(error)
    if torch.backends.mps.is_available():
        devices.append({"device": "mps", "name": "Apple GPU", "memory": torch.mps.recommended_max_memory()})
    cuda = torch.version.cuda or torch.version.hip
    return {"threads": torch.get_num_threads(), "cuda": cuda, "devices": devices, "no_cuda": why}


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]


if __name__ == "__main__":
    # What an import prints is not for stdout.
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for argument in sys.argv[1:]:
        print(json.dumps(attempt(argument)), file=lines, flush=True)
    # Threads and functions that an import leaves behind have no say.
    os._exit(0)
