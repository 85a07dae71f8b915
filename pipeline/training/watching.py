"""The hooks of plugins that are fired while losses become gradients, and gradients updates."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from pipeline.context import Context
from pipeline.discovery import plain_callable
from pipeline.training.optim_scheduler import OptimScheduler


def watch(optim_schedulers: Mapping[str, OptimScheduler], context: Context) -> None:
    """Let the plugins know of each backward and update of these schedulers; a hook that nobody implements costs nothing."""
    hooks = context["hooks"]
    backward = plain_callable(hooks, "after_backward")
    before, after = plain_callable(hooks, "before_update"), plain_callable(hooks, "after_update")
    for name, scheduler in optim_schedulers.items():
        scheduler.after_backward = partial(backward, context=context) if backward else None
        scheduler.before_update = partial(before, context=context, name=name) if before else None
        scheduler.after_update = partial(after, context=context, name=name) if after else None
