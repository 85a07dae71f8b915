import os
import signal
from typing import Any

from pipeline import hookimpl


class Plugin:
    """Counts the samples of the run; STOP_AFTER is the iteration after which a signal stops it."""

    def __init__(self) -> None:
        self.samples = 0

    @hookimpl
    def after_batch(self, context: Any, batch: Any) -> None:
        self.samples += len(batch[0])
        if context["train_state"]["iteration"] == int(os.environ.get("STOP_AFTER", "0")):
            os.kill(os.getpid(), signal.SIGTERM)

    @hookimpl(tryfirst=True)
    def after_epoch(self, context: Any) -> None:
        context["metrics"]["line"]["samples"] = self.samples

    def state_dict(self) -> dict[str, int]:
        return {"samples": self.samples}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.samples = state["samples"]
