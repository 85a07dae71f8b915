"""Writes the numbers of a run, and what an Experiment shows, for Weights & Biases, offline."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from pipeline import hookimpl
from pipeline.context import Context

from .shared.tracking import name_of_run, numbers_by_name, numbers_of_validation, resolved_config


class WandB:
    """A run of Weights & Biases for each runner, named ``<run directory>/<runner>``, in the folder ``wandb`` of the runner.

    Nothing is uploaded: ``wandb sync`` does that, with the folders ``offline-run-…`` as its arguments. ``loss`` is the mean
    of a print interval, ``epoch_loss`` that of a pass, ``valid_loss`` that of a validation; where a runner has several
    phases, ``phase.loss`` and so on. Their x-axis is ``iteration``. Figures and sounds of an Experiment are images and
    audio under their tags. The resolved config is the run's config, the run directory too.

    A resumed run has one more folder, with the same id, which is made of the name of the run directory; ``wandb sync`` joins
    them. What the earlier folders have of a number up to some iteration is not logged again, so none is there twice. They
    stay as they were where a run goes back to an earlier checkpoint. A process that is killed loses what wandb has not yet
    written: the numbers of the last ``flush_seconds``. A second plugin of this class, under another name, has the folder
    ``<name>_wandb``. Each process has a service of wandb of its own, whatever ``WANDB_SERVICE`` says.

    Args:
        project: its name; by default that of the config.
        flush_seconds: how long a number may wait until it is in the file.
    """

    every_rank = False
    requires = ("wandb",)
    volatile = ("wandb", "*_wandb")

    plugin_name = "wandb"

    def __init__(self, project: str | None = None, flush_seconds: float = 1) -> None:
        # An extra, and slow to import.
        self.wandb: Any = import_module("wandb")
        self.project, self.flush_seconds = project, flush_seconds
        self.run: Any = None
        # How many rows earlier processes have logged; name of a number -> the last iteration of which they have it.
        self.rows, self.logged = 0, dict[str, int]()

    @hookimpl
    def before_pipeline(self, context: Context) -> None:
        """Begin the run, or go on with it."""
        run_dir, runner = context["run_dir"], context["runner_name"]
        folder = run_dir / runner / ("" if self.plugin_name == "wandb" else f"{self.plugin_name}_wandb")
        folder.mkdir(exist_ok=True)
        for row in _rows(folder):
            self.rows = row["_step"] + 1
            self.logged |= dict.fromkeys(row, row["iteration"])
        # wandb's service of the process that started this one may have ended, or still hold the id of a run that was killed.
        os.environ.pop("WANDB_SERVICE", None)
        self.run = self.wandb.init(
            mode="offline",
            # A run of user code stays open, and is not taken for this one.
            reinit="create_new",
            dir=str(folder),
            project=self.project or run_dir.parent.name,
            name=name_of_run(context),
            id=f"{run_dir.name}-{runner}-{self.plugin_name}",
            resume="allow",
            config={"run_dir": str(run_dir), **resolved_config(context)},
            settings=self.wandb.Settings(
                silent=True, console="off", x_transaction_log_flush_interval=self.flush_seconds
            ),
        )
        self.run.define_metric("*", step_metric="iteration")
        context["resources"].callback(self._end, context)

    @hookimpl
    def on_print_interval(self, context: Context, phase: str, metrics: dict[str, float]) -> None:
        """Log the training numbers of the interval."""
        self._log(context, phase, metrics)

    @hookimpl
    def after_pass(self, context: Context, phase: str, metrics: dict[str, float]) -> None:
        """Log the training numbers of the pass."""
        self._log(context, phase, metrics, "epoch_")

    @hookimpl
    def after_validation(self, context: Context, phase: str, metrics: dict[str, float]) -> None:
        """Log the numbers of a validation, or of an infer runner."""
        self._log(context, phase, numbers_of_validation(context, phase, metrics, "valid_"))

    @hookimpl
    def on_visual(self, tag: str, path: Path, step: int) -> None:
        """Log a figure or a sound."""
        # Of a file wandb has several values.
        if step > self.logged.get(f"{tag}.sha256", -1):
            media = self.wandb.Image if path.suffix == ".png" else self.wandb.Audio
            self._log_row(step, {tag: media(str(path))})

    def _log(self, context: Context, phase: str, metrics: dict[str, float], prefix: str = "") -> None:
        iteration = context["train_state"]["iteration"]
        numbers = numbers_by_name(context, phase, metrics, prefix)
        new = {name: value for name, value in numbers.items() if iteration > self.logged.get(name, -1)}
        if new:
            self._log_row(iteration, new)

    def _log_row(self, iteration: int, values: dict[str, Any]) -> None:
        # wandb's own step counts the rows, for it takes no second row of a step, and holds back the newest without commit.
        self.run.log({"iteration": iteration, **values}, step=self.rows, commit=True)
        self.rows += 1

    def _end(self, context: Context) -> None:
        self.run.finish(exit_code=int(context.get("error") is not None))


def _rows(folder: Path) -> Iterator[dict[str, Any]]:
    """What earlier processes have logged, in their order, as wandb's own reader prints it."""
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(path)]
        lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
        records = map(json.loads, lines)
        yield from (record["history"]["item"] for record in records if record["type"] == "history")
