"""The default terminal stage."""

from __future__ import annotations

import json
import math
from pathlib import Path

from loguru import logger

from pipeline.context import Context
from pipeline.stages.base import TerminalBase


class Terminal(TerminalBase):
    """Writes the last numbers to ``results.json`` and says where everything is."""

    def terminal(self, context: Context) -> None:
        """Finish the runner."""
        folder: Path = context["run_dir"] / context["runner_name"]
        metrics = context.get("metrics") or {}
        results = {
            "metrics": _finite(metrics),
            "train_state": context["train_state"],
            "checkpoint": self.newest(context),
        }
        (folder / "results.json").write_text(json.dumps(results, indent=2, default=str) + "\n", encoding="utf-8")
        logger.info(f"{context['runner_name']} done; results in {folder}")

    def newest(self, context: Context) -> str | None:
        """The newest checkpoint of this runner, relative to the run directory."""
        path = context["checkpointer"].newest()
        return str(path.relative_to(context["run_dir"])) if path else None


def _finite(metrics: object) -> object:
    """JSON has no nan and no inf: those become null."""
    if isinstance(metrics, dict):
        return {name: _finite(value) for name, value in metrics.items()}
    return None if isinstance(metrics, float) and not math.isfinite(metrics) else metrics
