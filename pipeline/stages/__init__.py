"""The default stages, to subclass: ``from pipeline import stages; class Startup(stages.Startup)``. Imported lazily."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.stages.instance import Instance as Instance
    from pipeline.stages.network import Network as Network
    from pipeline.stages.runner import Runner as Runner
    from pipeline.stages.startup import Startup as Startup
    from pipeline.stages.terminal import Terminal as Terminal

_HOMES = {name: f"pipeline.stages.{name.lower()}" for name in ("Instance", "Network", "Startup", "Runner", "Terminal")}
__all__ = list(_HOMES)

if not TYPE_CHECKING:  # it would accept any misspelt name

    def __getattr__(name: str) -> type:
        if name not in _HOMES:
            raise AttributeError(f"module 'pipeline.stages' has no attribute '{name}'; it has {', '.join(_HOMES)}")
        stage: type = getattr(import_module(_HOMES[name]), name)
        return stage
