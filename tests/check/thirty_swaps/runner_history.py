"""Keeps every validation in a file, and the state of it in the checkpoints."""

import json
from typing import Any

from pipeline import Context, stages


class History:
    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows = state["rows"]


class Runner(stages.Runner):
    def run(self, context: Context) -> None:
        self.history = History()
        context["checkpointer"].add_recoverable("history", self.history)
        super().run(context)
        context["history"] = self.history.rows
        (context["run_dir"] / "history.json").write_text(json.dumps(context["history"]))

    def validate(self, context: Context, phase: Any) -> Any:
        numbers = super().validate(context, phase)
        self.history.rows.append({**numbers, "epoch": context["current_epoch"]})
        return numbers
