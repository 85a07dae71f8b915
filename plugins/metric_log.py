"""Writes every number to ``metrics.jsonl``, on request to a CSV file too, and logs a line per epoch."""

from __future__ import annotations

import csv
import json
import os
import resource
import sys
import time
from io import FileIO, StringIO
from pathlib import Path
from typing import Any

import torch
from loguru import logger

from pipeline import hookimpl
from pipeline.checkpoint.state import StateModel
from pipeline.checkpoint.storage import as_number, finite, storing
from pipeline.context import Context

from .shared.json_lines import append, open_lines
from .shared.tracking import continues, numbers_of_validation

_TIMINGS = {"samples_per_second"}
_COLUMNS = ("event", "epoch", "iteration", "phase", "name", "value")
# Bytes of a unit of the system's memory count.
_UNIT = 1 if sys.platform == "darwin" else 1024


class LogState(StateModel):
    """How long the files are, in bytes, and whether an epoch is running."""

    metrics: int
    timing: int
    csv: int
    in_epoch: bool


class MetricLog:
    """One JSON object a line: {event, epoch, iteration, phase, and the numbers}.

    ``metrics.jsonl`` holds only what two equal runs have alike; whatever depends on the clock goes to ``timing.jsonl``.
    There each stage has its line too, with its seconds, and the most memory that the process had used when it ended. Other
    plugins may append lines to it.
    A number that is not finite is written as null. A second plugin of this class in a run, under another name, has that
    name before those of its files.

    ``metrics.csv`` has a row for each number of ``metrics.jsonl``: event, epoch, iteration, phase, name, value. So its columns
    are known before the numbers are, and a resumed run cuts its rows back like lines; pandas' ``pivot_table`` makes a column
    of each name.

    Args:
        csv: whether to write ``metrics.csv`` too.
        gradient_norm: whether to compute the norm of the gradients in each update where nothing else does, such as
            ``grad_clip``: reading it back is free, computing it costs as much as clipping does.
    """

    every_rank = False
    volatile = ("timing.jsonl", "*_timing.jsonl")

    plugin_name = "metric_log"

    def __init__(self, csv: bool = False, gradient_norm: bool = False) -> None:
        self.with_csv, self.gradient_norm = csv, gradient_norm
        self.metrics: FileIO
        self.timing: FileIO
        self.csv: FileIO | None = None
        self.epoch_began = 0.0
        self.in_epoch = False
        # The phases whose pass is over in this epoch, and the numbers of the newest validation that has its own line.
        self.passed: set[str] = set()
        self.logged: dict[str, dict[str, float]] = {}
        # The stage that runs, and when it began; the lines of those before it, in this part of the run.
        self.stage: tuple[str, float] | None = None
        self.stages: list[str] = []

    @hookimpl
    def before_pipeline(self, context: Context) -> None:
        """Open the files, to be closed with the run.

        Raises:
            StorageError: the storage refuses.
        """
        folder: Path = context["run_dir"] / context["runner_name"]
        prefix = "" if self.plugin_name == "metric_log" else f"{self.plugin_name}_"
        self.metrics = self._open(folder / f"{prefix}metrics.jsonl", context)
        self.timing = self._open(folder / f"{prefix}timing.jsonl", context)
        if self.with_csv:
            self.csv = self._open(folder / f"{prefix}metrics.csv", context)

    @hookimpl
    def before_stage(self, name: str, context: Context) -> None:
        """Look at the clock; have the optimizers compute the norm of their gradients, if it is to be written."""
        self.stage = name, time.perf_counter()
        if name == "runner" and self.gradient_norm:
            for phase in context.peek("model", {}).values():
                # An Experiment has none of ours.
                for scheduler in phase["optim_schedulers"].values() if "optim_schedulers" in phase else ():
                    scheduler.measures_norm = True

    @hookimpl
    def after_stage(self, name: str, context: Context) -> None:
        """Write how long the stage took, and the most memory that the process had used by then.

        After the runner stage also write the numbers of an epoch that was cut short: ``after_epoch`` is not called for it.
        A run that is resumed there removes these lines again, and writes those of the whole epoch.
        """
        if name == "runner" and self.in_epoch and not context.peek("is_exit"):
            self._write_epoch(context, "cut short")
        self._write_stage(context)

    @hookimpl
    def after_pipeline(self, context: Context) -> None:
        """Write it of a stage, too, that has not come to its end."""
        if self.stage:
            self._write_stage(context, completed=False)

    def state_dict(self) -> dict[str, int]:
        """How long the files are, in bytes, and whether an epoch is running."""
        return {
            "metrics": _size(self.metrics),
            "timing": _size(self.timing),
            "csv": _size(self.csv) if self.csv else 0,
            "in_epoch": self.in_epoch,
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Cut off what a run that was interrupted wrote after its checkpoint: it comes again."""
        sizes = LogState.from_tree(state, "metric_log")
        self.in_epoch = sizes.in_epoch
        for file, size in ((self.metrics, sizes.metrics), (self.timing, sizes.timing), (self.csv, sizes.csv)):
            if file is None:
                continue
            if _size(file) < size:
                # Nobody waits for the disk with every line, so the newest may be lost when the machine stops.
                missing = f"has {_size(file)} bytes, and had {size} when the checkpoint was saved"
                logger.warning(f"{file.name}: {missing}; the last lines before it are lost")
                continue
            with storing(Path(str(file.name))):
                file.truncate(size)
            if file is self.timing:
                # Those of this part were written already.
                append(file, "".join(self.stages))

    @hookimpl
    def on_resume(self) -> None:
        """Look at the clock: of an epoch that is resumed in its middle, only the rest is counted."""
        self.epoch_began = time.perf_counter()

    @hookimpl
    def before_epoch(self) -> None:
        """Look at the clock."""
        self.epoch_began, self.in_epoch = time.perf_counter(), True

    @hookimpl
    def after_pass(self, phase: str) -> None:
        """Note that what is validated from now on is in the line of the epoch."""
        self.passed |= {phase} if self.in_epoch else set()

    @hookimpl
    def on_print_interval(self, context: Context, phase: str, metrics: dict[str, float]) -> None:
        """Write the training numbers of the interval."""
        self._write("train", context, phase, metrics)

    @hookimpl
    def after_validation(self, context: Context, phase: str, metrics: dict[str, float]) -> None:
        """Write the numbers of a validation pass; those of an infer runner get their line too."""
        self._write("evaluate" if context["is_infer"] else "validate", context, phase, metrics)
        if context["is_infer"]:
            several = len(context.get("checkpoints") or ()) > 1
            which = f"iteration {context['train_state']['iteration']}  " if several else ""
            logger.info(f"{context['runner_name']}  {which}{phase}  {_line(metrics)}")
        elif phase not in self.passed or len(context["phases"]) > 1:
            # Else the line of the epoch, which comes at once, has the numbers.
            numbers = numbers_of_validation(context, phase, metrics)
            logger.info(f"iteration {context['train_state']['iteration']}  {phase}  {_line(numbers)}")
            self.logged[phase] = numbers

    @hookimpl
    def after_epoch(self, context: Context) -> None:
        """Write and log the numbers of the epoch."""
        self._write_epoch(context, "done")

    def _write_epoch(self, context: Context, state: str) -> None:
        """Write and log the numbers of an epoch that is ``done`` or ``cut short``."""
        seconds = time.perf_counter() - self.epoch_began
        self.in_epoch, self.passed = False, set()
        for phase, metrics in context["metrics"].items():
            self._write("epoch", context, phase, metrics)
            logged = self.logged.get(phase, {})
            line = _line(
                {name: value for name, value in metrics.items() if name not in logged or logged[name] != value}
            )
            logger.info(f"epoch {context['current_epoch']} {state} in {seconds:.1f} s  {phase}  {line}")
        self._record(self.timing, "epoch", context, {"seconds": seconds})

    def _open(self, path: Path, context: Context) -> FileIO:
        file = open_lines(path, context)
        if not continues(context):
            # Without a checkpoint to go on from, a resumed run begins again, and so do its numbers.
            with storing(path):
                file.truncate(0)
        return file

    def _write(self, event: str, context: Context, phase: str, numbers: dict[str, float]) -> None:
        timings = {name: value for name, value in numbers.items() if name in _TIMINGS}
        metrics = {name: value for name, value in numbers.items() if name not in _TIMINGS}
        self._record(self.metrics, event, context, {"phase": phase, **metrics})
        if timings:
            self._record(self.timing, event, context, {"phase": phase, **timings})
        if self.csv:
            where = (event, context["current_epoch"], context["train_state"]["iteration"], phase)
            rows = [(*where, name, as_number(value, f"metrics['{name}']")) for name, value in metrics.items()]
            text = StringIO()
            csv.writer(text, lineterminator="\n").writerows(rows if _size(self.csv) else [_COLUMNS, *rows])
            append(self.csv, text.getvalue())

    def _write_stage(self, context: Context, **more: bool) -> None:
        (name, began), self.stage = self.stage or ("", 0.0), None
        memory = {"peak_memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _UNIT}
        if (device := context.peek("device")).type == "cuda":
            memory["peak_gpu_memory"] = torch.cuda.max_memory_allocated(device)
        line = {"event": "stage", "stage": name, "seconds": time.perf_counter() - began, **memory, **more}
        self.stages.append(json.dumps(line) + "\n")
        append(self.timing, self.stages[-1])

    def _record(self, file: FileIO, event: str, context: Context, values: dict[str, Any]) -> None:
        where = {"event": event, "epoch": context["current_epoch"], "iteration": context["train_state"]["iteration"]}
        append(file, json.dumps({**where, **finite(values, "metrics")}) + "\n")


def _size(file: FileIO) -> int:
    return os.fstat(file.fileno()).st_size


def _line(metrics: dict[str, float]) -> str:
    numbers = {name: as_number(value, f"metrics['{name}']") for name, value in metrics.items()}
    return "  ".join(
        f"{name} {each:.4f}" if isinstance(each, float) else f"{name} {each}" for name, each in numbers.items()
    )
