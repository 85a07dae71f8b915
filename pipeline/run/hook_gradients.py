"""Gradients that plugins compute are no part of the training, unless a hook is there to change gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import pluggy

from pipeline.context import Context

# Hooks that are called in each training step. For them nothing is set aside: it would cost too much.
PER_BATCH = (
    "before_batch",
    "on_observe",
    "before_backward",
    "after_backward",
    "before_update",
    "after_update",
    "after_batch",
)

# The hooks among them that may change the gradients of an update.
CHANGING = ("after_backward", "before_update")


def set_aside_in_hooks(manager: pluggy.PluginManager, context: Context) -> Callable[[], None]:
    """Set gradients aside around each call of a hook that is not called in each step; the result ends this."""
    blocks: list[AbstractContextManager[Any]] = []

    def before(hook: str, calls: Sequence[Any], _: Mapping[str, Any]) -> None:
        if calls and hook not in PER_BATCH:
            block = context.set_gradients_aside(hook)
            block.__enter__()
            blocks.append(block)

    def after(_: Any, hook: str, calls: Sequence[Any], __: Mapping[str, Any]) -> None:
        if calls and hook not in PER_BATCH:
            blocks.pop().__exit__(None, None, None)

    return manager.add_hookcall_monitoring(before, after)
