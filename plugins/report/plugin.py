"""Measures steps while a run goes on, and writes its page when it is over."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from io import FileIO
from typing import Any

import torch
from loguru import logger

from pipeline import hookimpl
from pipeline.context import Context
from pipeline.errors import ConfigError
from pipeline.run.runs import list_runs
from pipeline.user_code.plugin_calls import HookCall

from ..shared.json_lines import append, open_lines
from .command import write_page
from .run_data import PARTS, read_run

# The hooks of a step; ``observe`` may be called in one.
_OF_A_STEP = ("before_batch", "before_backward", "after_backward", "before_update", "after_update", "after_batch")
_WATCHED = (*_OF_A_STEP, "on_observe")


class Report:
    """Writes ``report.html`` into the run directory when the run is over, however it ends.

    Of the first iterations one step is measured, and one in each print interval, each time another: how long it waits for
    its data, computes forward and backward, and updates, and how long other plugins take meanwhile. ``timing.jsonl`` has
    a line for each. On a GPU such a step waits for the device between these parts; no other one does.
    A second plugin of this class, under another name, writes ``<name>_report.html``.
    """

    every_rank = False
    # Those that the command needs; read from the source.
    requires = ("bokeh", "jinja2")
    volatile = ("../report.html", "../*_report.html")

    plugin_name = "report"

    def __init__(self) -> None:
        self.file: FileIO
        self.context: Context
        self.wait: Callable[[], object] | None = None
        # How long the hooks of other plugins took in measured steps; the seconds by part of the one that is measured.
        self.hooked, self.parts = 0.0, dict.fromkeys(PARTS, 0.0)
        # How many steps go by until one is measured, 0: none will be; how many were.
        self.left, self.count = 0, 0
        # Whether the next step is measured, or one is: then the clock and ``hooked`` when the part that runs began.
        self.due = self.running = False
        self.began, self.hooked_before, self.phase = 0.0, 0.0, ""

    @hookimpl
    def before_pipeline(self, context: Context) -> None:
        """Open the file, to be closed with the run, and watch the hooks of other plugins.

        Raises:
            ConfigError: there is no run, but a Brain that trains alone.
            StorageError: the storage refuses.
        """
        if not context.peek("runner_name"):
            what = "report: shows a run directory, and a Brain that trains alone has none"
            raise ConfigError(f"{what}; take it out, or train with a config")
        self.context = context
        self.file = open_lines(context.peek("run_dir") / context.peek("runner_name") / "timing.jsonl", context)
        if context.peek("device").type != "cpu":
            self.wait = torch.accelerator.synchronize
        self.calls = [call for call in _calls(context.peek("hooks")) if call.plugin.name != self.plugin_name]
        for call in self.calls:
            call.watched = self._timed(call, call.watched)

    @hookimpl
    def on_resume(self) -> None:
        """Have a step measured before the first print interval is over; not the first, which has more to do."""
        self.left = 1

    @hookimpl
    def before_pass(self) -> None:
        """The same in a run that is not resumed; of a step that is due already, this is the beginning."""
        if not self.count and not self.left:
            self.left = 1
        self._begin_wait()

    @hookimpl(trylast=True)
    def on_print_interval(self, context: Context) -> None:
        """Have a step of the next interval measured: each time another, for not all steps may do the same."""
        self.left = self.count % (context.peek("runner").print_interval or 1)
        self.due = not self.left
        self._begin_wait()

    @hookimpl(trylast=True)
    def after_validation(self) -> None:
        """Leave it out of the wait for data."""
        self._begin_wait()

    @hookimpl(trylast=True)
    def after_checkpoint_captured(self) -> None:
        """Leave the save out of the wait for data."""
        self._begin_wait()

    @hookimpl
    def before_batch(self, phase: str) -> None:
        """The data are there."""
        if self.due:
            self.due, self.running, self.phase = False, True, phase
            self._end("data")

    @hookimpl
    def before_backward(self) -> None:
        """The losses are computed."""
        if self.running:
            self._end("forward")

    @hookimpl
    def after_backward(self) -> None:
        """The gradients are computed."""
        if self.running:
            self._end("backward")

    @hookimpl
    def after_update(self) -> None:
        """An optimizer has stepped."""
        if self.running:
            self._end("update")

    @hookimpl(trylast=True)
    def after_batch(self, phase: str) -> None:
        """The step is over: write its times, or count down to the one that is measured."""
        if self.running:
            # One of another phase may be used within it.
            if phase == self.phase:
                self._end("other")
                self._write()
        elif self.left:
            self.left -= 1
            self.due = not self.left
            self._begin_wait()

    @hookimpl
    def after_run(self, context: Context) -> None:
        """Write the page; where that fails the log says so, and the run is what it is."""
        run_dir = context.peek("run_dir")
        name = "report.html" if self.plugin_name == "report" else f"{self.plugin_name}_report.html"
        try:
            write_page(run_dir / name, [read_run(record) for record in list_runs(run_dir)])
        except Exception as error:  # it is about the run, and not part of it
            what = f"{type(error).__name__}: {error}"
            logger.warning(f"{run_dir / name}: was not written ({what}); `pipeline report {run_dir}` writes it")
        else:
            logger.info(f"{run_dir / name} shows the run")

    def _begin_wait(self) -> None:
        """Look at the clock, if the next step is to be measured: from now on it waits for its data."""
        if self.due:
            self.parts = dict.fromkeys(PARTS, 0.0)
            for call in self.calls:
                call.due = 0
            self._look()

    def _look(self) -> None:
        if self.wait:
            # What was asked of the device before belongs to what was before.
            self.wait()
        self.began, self.hooked_before = time.perf_counter(), self.hooked

    def _end(self, part: str) -> None:
        """A part is over; what other plugins took meanwhile does not count."""
        began, hooked_before = self.began, self.hooked_before
        self._look()
        hooked = self.hooked_before - hooked_before
        self.parts["hooks"] += hooked
        self.parts[part] += self.began - began - hooked

    def _write(self) -> None:
        self.running = False
        self.count += 1
        where = {
            "epoch": self.context.peek("current_epoch"),
            "iteration": self.context.peek("train_state")["iteration"],
        }
        append(self.file, json.dumps({"event": "step", **where, "phase": self.phase, **self.parts}) + "\n")

    def _timed(self, call: HookCall, method: Callable[..., Any]) -> Callable[..., Any]:
        """The hook of another plugin, whose time is counted."""

        def timed_call(*arguments: Any, **defaults: Any) -> Any:
            __tracebackhide__ = True
            began = time.perf_counter()
            try:
                return method(*arguments, **defaults)
            finally:
                self.hooked += time.perf_counter() - began
                if self.running or self.due:
                    # It may be called again in this step.
                    call.due = 0

        return timed_call


def _calls(hooks: Any) -> Iterator[HookCall]:
    """The calls of the hooks of a step, but for wrappers, which nobody may time."""
    for hook in _WATCHED:
        for each in getattr(hooks, hook).get_hookimpls():
            if isinstance(each.function, HookCall) and not each.function.wraps:
                yield each.function
