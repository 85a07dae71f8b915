"""The default terminal stage."""

from __future__ import annotations

from pathlib import Path

from pipeline.checkpoint.storage import finite, write_json
from pipeline.context import Context
from pipeline.stages.base import TerminalBase


class Terminal(TerminalBase):
    """Writes the last numbers to ``results.json``."""

    def terminal(self, context: Context) -> None:
        """Finish the runner."""
        folder: Path = context["run_dir"] / context["runner_name"]
        metrics, best = finite(context.get("metrics") or {}), finite(context.get("best"))
        results = {"metrics": metrics, "train_state": context["train_state"], "best": best}
        results["checkpoint"] = self.newest(context)
        if context["is_infer"]:
            checkpoints = context["checkpoints"]
            results["checkpoints"] = {path.name: finite(numbers) for path, numbers in checkpoints.items() if numbers}
        if context["world"].is_main:
            write_json(folder / "results.json", results)

    def newest(self, context: Context) -> str | None:
        """The newest checkpoint of this runner, relative to the run directory."""
        path = context["checkpointer"].newest()
        return str(path.relative_to(context["run_dir"])) if path else None
