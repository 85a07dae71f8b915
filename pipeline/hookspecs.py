"""Every hook, in calling order: the manual for who writes a plugin.

A plugin is a class with one or more of these methods, each marked with ``@hookimpl`` (``from pipeline import
hookimpl``). A method names just the arguments that it uses. Plugins are called in the order in which the config lists
them, the defaults first. One set of plugins serves one runner, from its ``before_pipeline`` to its ``after_pipeline``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from pathlib import Path

    from pipeline.context import Context

hookspec = pluggy.HookspecMarker("pipeline")
hookimpl = pluggy.HookimplMarker("pipeline")


@hookspec
def before_pipeline(context: Context) -> None:
    """The runner is about to enter its first stage."""


@hookspec
def before_stage(name: str, context: Context) -> None:
    """A stage (instance, network, startup, runner or terminal) is about to run."""


@hookspec
def before_epoch(context: Context) -> None:
    """An epoch begins; ``context["current_epoch"]`` counts from 0."""


@hookspec
def before_batch(context: Context, batch: Any) -> None:
    """A training batch, already on its device, is about to be used.

    ``context["train_state"]`` counts the batches before this one, here and until ``after_batch``.
    """


@hookspec
def after_backward(context: Context, losses: dict[str, Any]) -> None:
    """The gradients of a batch are there, not yet unscaled or clipped; the losses are tensors on the device."""


@hookspec
def before_update(context: Context, name: str, optim_scheduler: Any) -> None:
    """An OptimScheduler, named as in the config, is about to use the gradients of its window."""


@hookspec
def after_update(context: Context, name: str, optim_scheduler: Any) -> None:
    """An OptimScheduler has made its step, or discarded the window; its gradients are gone."""


@hookspec
def after_batch(context: Context, batch: Any, predictions: Any, losses: dict[str, Any]) -> None:
    """A training batch has been used; the losses are tensors on the device: reading one makes a GPU wait.

    ``context["train_state"]`` counts it.
    """


@hookspec
def on_print_interval(context: Context, phase: str, metrics: dict[str, float]) -> None:
    """``print_interval`` iterations have passed; the numbers are means since the last time."""


@hookspec
def before_validation(context: Context, phase: str) -> None:
    """A validation pass begins, or one of an infer runner."""


@hookspec
def after_validation(context: Context, phase: str, metrics: dict[str, float]) -> None:
    """A validation pass is over; ``metrics`` are its numbers."""


@hookspec
def after_epoch(context: Context) -> None:
    """An epoch is over; ``context["metrics"]`` holds its numbers."""


@hookspec
def after_checkpoint_saved(context: Context, path: Path) -> None:
    """A checkpoint is complete on disk, at the latest before the next is saved: training has gone on since it was begun.

    It comes again where a checkpoint of the same iteration took its place, as one that was saved after the validation.
    """


@hookspec
def after_stage(name: str, context: Context) -> None:
    """A stage has run."""


@hookspec
def on_stage_error(name: str, context: Context, error: BaseException) -> None:
    """A stage has raised ``error``; terminal's ``abort`` follows."""


@hookspec
def after_pipeline(context: Context) -> None:
    """The runner is over, or failed: then ``context["error"]`` says how. The resources are still open."""
