"""A plugin to copy: it writes down how the weights move."""

import json
from pathlib import Path
from typing import TextIO

import torch

from pipeline import Context, hookimpl


class Plugin:
    """Writes the norm of every parameter to `weights.jsonl` of the runner.

    Each method is a hook: its name says when it is called, its parameters which of the hook's arguments it wants. All
    hooks are listed in `pipeline/hookspecs.py`; a misspelt one is refused before anything runs.

    Args:
        every: iterations between two lines.
    """

    def __init__(self, every: int = 100) -> None:
        self.every = every
        self.file: TextIO

    @hookimpl
    def before_pipeline(self, context: Context) -> None:
        path: Path = context["run_dir"] / context["runner_name"] / "weights.jsonl"
        # Closed at the end of the run, whatever happens.
        self.file = context["resources"].enter_context(path.open("w", encoding="utf-8"))

    @hookimpl
    def after_batch(self, context: Context) -> None:
        iteration = context["train_state"]["iteration"]
        if iteration % self.every:
            return
        for phase, entry in context["model"].items():
            norms = {name: torch.linalg.vector_norm(each).item() for name, each in entry["model"].named_parameters()}
            self.file.write(json.dumps({"iteration": iteration, "phase": phase, **norms}) + "\n")
