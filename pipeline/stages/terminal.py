"""The default terminal stage."""

from __future__ import annotations

import json
from pathlib import Path

from loguru import logger

from pipeline.context import Context
from pipeline.run_directory import finite
from pipeline.stages.base import TerminalBase


class Terminal(TerminalBase):
    """Writes the last numbers to ``results.json`` and says where everything is."""

    def terminal(self, context: Context) -> None:
        """Finish the runner."""
        folder: Path = context["run_dir"] / context["runner_name"]
        metrics = context.get("metrics") or {}
        results = {
            "metrics": finite(metrics),
            "train_state": context["train_state"],
            "best": finite(context.get("best")),
            "checkpoint": self.newest(context),
        }
        (folder / "results.json").write_text(json.dumps(results, indent=2, default=str) + "\n", encoding="utf-8")
        logger.info(f"{context['runner_name']} done; results in {folder}")

    def newest(self, context: Context) -> str | None:
        """The newest checkpoint of this runner, relative to the run directory."""
        path = context["checkpointer"].newest()
        return str(path.relative_to(context["run_dir"])) if path else None
