"""A plugin that writes down what it is told, and ends or slows down the run where the environment says so."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from pipeline import Context, hookimpl


class Watching:
    """``context["events"]`` are (hook, iteration, phase) in the order of the calls; the phase where the hook has one.

    ``END_AT="after_batch 7 SIGTERM"`` sends the signal at the 7th call of that hook in this process; with ``error`` in
    place of a signal, an error is raised. ``SLOW_BATCH`` is how many seconds each batch waits.
    """

    def __init__(self) -> None:
        hook, call, how = os.environ.get("END_AT", "- 0 -").split()
        self.hook, self.call, self.how = hook, int(call), how
        self.slow = float(os.environ.get("SLOW_BATCH", "0"))

    def note(self, hook: str, context: Context, phase: str = "") -> None:
        context.setdefault("events", []).append((hook, context["train_state"]["iteration"], phase))
        if hook == self.hook:
            self.call -= 1
            if not self.call and self.how == "error":
                raise RuntimeError("killed")
            if not self.call:
                signal.raise_signal(getattr(signal, self.how))

    @hookimpl
    def before_epoch(self, context: Context) -> None:
        self.note("before_epoch", context)

    @hookimpl
    def before_batch(self, context: Context, batch: Any) -> None:
        time.sleep(self.slow)
        self.note("before_batch", context)

    @hookimpl
    def after_backward(self, context: Context, losses: Any) -> None:
        self.note("after_backward", context)

    @hookimpl
    def before_update(self, context: Context, name: str) -> None:
        self.note("before_update", context)

    @hookimpl
    def after_update(self, context: Context, name: str) -> None:
        self.note("after_update", context)

    @hookimpl
    def after_batch(self, context: Context, batch: Any, losses: Any) -> None:
        self.note("after_batch", context)

    @hookimpl
    def on_print_interval(self, context: Context, phase: str) -> None:
        self.note("on_print_interval", context, phase)

    @hookimpl
    def before_validation(self, context: Context, phase: str) -> None:
        self.note("before_validation", context, phase)

    @hookimpl
    def after_validation(self, context: Context, phase: str) -> None:
        self.note("after_validation", context, phase)

    @hookimpl
    def after_epoch(self, context: Context) -> None:
        self.note("after_epoch", context)

    @hookimpl
    def after_checkpoint_saved(self, context: Context) -> None:
        self.note("after_checkpoint_saved", context)
