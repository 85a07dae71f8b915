"""The plugin that notes each batch and its losses, and kills the process at a certain iteration."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from torch import Tensor

from pipeline.checkpoint.checkpointer import Checkpointer
from pipeline.context import Context
from pipeline.hookspecs import hookimpl
from pipeline.resume_trial.digest import digest
from pipeline.run_directory import MADE_BY

ORDERS = "PIPELINE_RESUME_TEST"
"""The environment variable that says, as JSON, what a process is to do: the plugin itself is the same in all of them."""


class Orders(NamedTuple):
    """What one process is to do.

    Attributes:
        record: the file for the notes, a JSON object a line.
        runner: the runner in which it is killed; None: in none.
        at: after which iteration.
    """

    record: str
    runner: str | None = None
    at: int = 0


class Witness:
    """Looks at what a run does, and changes nothing of it."""

    def __init__(self) -> None:
        self.orders = Orders(**json.loads(os.environ[ORDERS]))
        self.file: TextIO
        self.name = ""

    @hookimpl
    def before_pipeline(self, context: Context) -> None:
        """Open the file, have the counters of the run watched, and mark the run as one that nobody else goes on with."""
        (context["run_dir"] / MADE_BY).write_text("resume-test\n", encoding="utf-8")
        record = Path(self.orders.record)
        # Line by line, so that what was noted before a kill is there.
        self.file = context["resources"].enter_context(record.open("a", buffering=1, encoding="utf-8"))
        self.name = context["runner_name"]
        if self.name == self.orders.runner:
            context["train_state"] = Counters(context["train_state"], self.orders.at, context["checkpointer"])

    @hookimpl
    def before_batch(self, context: Context, batch: Any) -> None:
        """Note what the batch is."""
        # It is not counted yet.
        self._note(context["train_state"]["iteration"] + 1, batch=digest(batch))

    @hookimpl
    def after_batch(self, context: Context, losses: Mapping[str, Tensor]) -> None:
        """Note its losses, to the last bit."""
        self._note(
            context["train_state"]["iteration"],
            losses={name: float(value.detach()).hex() for name, value in losses.items()},
        )

    def _note(self, iteration: int, **noted: Any) -> None:
        self.file.write(json.dumps({"runner": self.name, "iteration": iteration, **noted}) + "\n")


class Counters(dict[str, int]):
    """The counters of a run, which kill the process as soon as they say that an iteration is over.

    Whoever trains counts there: the loop, an experiment, or a runner stage of the user's own. To restore them from a
    checkpoint, by ``update``, counts as none.

    Args:
        counters: as they are.
        at: the iteration.
        checkpointer: what it is saving is waited for, so that there is a checkpoint wherever one was due.
    """

    def __init__(self, counters: Mapping[str, int], at: int, checkpointer: Checkpointer) -> None:
        super().__init__(counters)
        self.at, self.checkpointer = at, checkpointer

    def __setitem__(self, name: str, value: int) -> None:
        """Count."""
        super().__setitem__(name, value)
        if name == "iteration" and value == self.at:
            self.checkpointer.wait()
            os.kill(os.getpid(), signal.SIGKILL)
