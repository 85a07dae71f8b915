"""Every hook, in the order in which they are called: the manual for authors of plugins.

A plugin is a class with one or more of these methods, each marked with ``@hookimpl`` (``from pipeline import
hookimpl``). A method takes those of the arguments that it needs. Plugins are called in the order in which the config lists
them, the defaults first, but for what their ``before`` and ``after`` say. One set of plugins serves one runner, from its
``before_pipeline`` to its ``after_pipeline``; that of the runner that ran last sees the end of the run, too.

What a hook returns is looked at by ``wrap_model`` and ``extend_metrics`` alone. A resumed run goes through the stages
again, so the hooks of the pipeline and of the stages come again; those of a training come where it goes on, and none comes
again for what was over, or, as ``before_epoch``, had begun, but for a validation that was interrupted. What a loop of one's
own calls by the context calls the same hooks. In an Experiment, which is one phase named ``experiment``, the hooks of
backward and update are those of its OptimSchedulers.

A hook may call ``backward()``. Around each hook the gradients of the trained parameters are set aside: the plugins see none,
and what they leave in ``grad`` is dropped. The hooks that are called in each step are an exception, since that would cost
too much: ``before_batch``, ``on_observe``, ``before_backward``, ``after_backward``, ``before_update``, ``after_update`` and
``after_batch``. What they leave is cleared when the next batch is handed out, if it begins an accumulation window.
Within a window it becomes part of the update. With ``debug: true`` a warning names such a hook.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import pluggy

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from signal import Signals

    from pipeline.context import Context

hookspec = pluggy.HookspecMarker("pipeline")
hookimpl = pluggy.HookimplMarker("pipeline")

_T = TypeVar("_T")

# Calls the plugins with what ``observe`` gets; None where no plugin has ``on_observe``. The runner sets it.
observer: Callable[[str, Any], None] | None = None


def observe(name: str, value: _T) -> _T:
    """Show a value to the plugins, which ``on_observe`` calls, and return it.

    For example ``hidden = observe("hidden", self.encoder(x))``.
    It may be called in a model, a Brain, an updater, a stage. Without a plugin that listens it costs one test, and
    torch.compile sees nothing of it. In a worker process of a loader nobody listens, nor where torch.export traces a model.
    """
    if observer is not None:
        observer(name, value)
    return value


@hookspec
def before_pipeline(context: Context) -> None:
    """The runner is about to enter its first stage."""


@hookspec
def before_stage(name: str, context: Context) -> None:
    """A stage (instance, network, startup, runner or terminal) is about to run."""


@hookspec
def wrap_model(context: Context, phase: str, model: Any) -> Any:
    """The network stage has built the model of a phase, and not yet its optimizers; a module that is returned takes its place.

    It is called once for each phase with a model of its own, in an infer runner and in a resumed run too. With None the
    model stays. The next plugin gets what the one before has returned. Of a plain module it is that module; of a Brain it
    is ``brain.modules``, an ``nn.ModuleDict``, whose items may be replaced. Weights are saved, and
    ``updated_modules`` are looked up, by the names that the new module gives them. A network stage that overrides
    ``build_phase`` without ``super()`` leaves it out, which the log says; an Experiment builds its model by itself.
    """


@hookspec
def after_checkpoint_loaded(context: Context, path: Path) -> None:
    """A resumed run is as its checkpoint has it: weights, optimizers, counters, plugins; the runner stage comes next."""


@hookspec
def on_resume(context: Context) -> None:
    """A training that was resumed is about to go on: once, before any other hook of the training.

    Everything is restored, the plugins too. ``context["current_epoch"]`` is the epoch that goes on, or the last one where
    none was running. Without a checkpoint to go on from it is not called.
    """


@hookspec
def before_epoch(context: Context) -> None:
    """An epoch begins; ``current_epoch`` counts from 0. Not called if it is resumed in its middle.

    The number is in ``context["current_epoch"]``. What a resumed run needs is prepared in
    ``on_resume``, or kept in the plugin's state.
    """


@hookspec
def before_phase(context: Context, phase: str) -> None:
    """A phase begins its first pass of this epoch. Not called if it is resumed in its middle.

    Outside of epochs there is none.
    """


@hookspec
def before_pass(context: Context, phase: str) -> None:
    """A pass over the training data begins. Not called if it is resumed in its middle.

    In an Experiment an epoch is a pass.
    """


@hookspec
def before_batch(context: Context, phase: str, batch: Any) -> None:
    """A training batch, already on its device, is about to be used.

    ``context["train_state"]`` counts the batches before this one, here and until ``after_batch``. In a runner stage with a
    loop of its own this is when ``context.batches`` gives the batch out.
    """


@hookspec
def on_observe(context: Context, name: str, value: Any) -> None:
    """User code has called ``observe(name, value)``, in whatever stage, pass or validation.

    A tensor is the one that goes on, with its graph: ``detach()`` what is kept. The code around it that torch.compile has
    compiled is split there.
    """


@hookspec
def on_visual(context: Context, phase: str, tag: str, path: Path, step: int) -> None:
    """An Experiment has written a figure to a PNG file, or a sound to a WAV file.

    User code has called ``visualizer.add_figure(tag, figure, step)`` or ``add_audio``, in a step or in a validation. A
    resumed run writes and tells again what came after its checkpoint.
    """


@hookspec
def before_backward(context: Context, phase: str, losses: dict[str, Any]) -> None:
    """The losses of a batch are computed, and nothing else yet: a term that is added to one in ``losses`` is trained on.

    It is called once for each ``optimize``: with the default Brain once in a batch, whatever optimizers there are. The
    loss that is reported has the term too; that of a validation has not.
    """


@hookspec
def after_backward(context: Context, phase: str, losses: dict[str, Any]) -> None:
    """The gradients of a batch are computed, but not yet unscaled or clipped; the losses are tensors on the device.

    It is called as often as ``before_backward``. Of a loss that is not finite there are no gradients, where that is known.
    """


@hookspec
def before_update(context: Context, phase: str, name: str, optim_scheduler: Any) -> None:
    """An optimizer is about to step; ``name`` is that of its OptimScheduler in the config.

    It is called for each optimizer by itself, once in its accumulation window, also for one that is discarded. The schedule
    has set the rate of this update. What a plugin sets in the optimizer's groups, or multiplies there, holds for this one
    alone, under each schedule, a constant one too. ``optim_scheduler.skip_update()`` discards the window: this optimizer
    does not step.
    """


@hookspec
def after_update(context: Context, phase: str, name: str, optim_scheduler: Any) -> None:
    """An optimizer has stepped, or has discarded its accumulation window; its gradients are cleared."""


@hookspec
def after_batch(context: Context, phase: str, batch: Any, predictions: Any, losses: dict[str, Any]) -> None:
    """A training batch has been used; the losses are tensors on the device: reading one makes a GPU wait.

    ``context["train_state"]`` counts it. The predictions are those of the Brain's ``fit_batch``, None where it was not
    called. For a batch without samples, the predictions are None and the losses empty. In a runner
    stage with a loop of its own this is when the next batch is asked for; of several batches that
    are done at once, it is called for the one first that was given out last. In an Experiment it is
    called after ``train_batch``, with the batch that was read last, and without predictions and
    losses.
    """


@hookspec
def extend_metrics(context: Context, phase: str, metrics: dict[str, float]) -> dict[str, Any] | None:
    """Numbers are about to be reported: those of a print interval, of a pass, or of a validation.

    A dict of numbers by name that it returns is added to them, and is wherever they are: in the bar, in ``metrics.jsonl``,
    in ``results.json``, and as ``valid_…`` of a validation in ``keep_best``. Where a phase is validated on several datasets,
    the numbers that are there begin with ``<dataset>/``; so may those that it returns. Before any plugin gets the numbers by another
    hook, each was asked here, so the order of plugins does not matter. Between ``before_validation`` and
    ``after_validation`` they are those of the validation. That two plugins return a number of one name is an error.
    """


@hookspec
def on_print_interval(context: Context, phase: str, metrics: dict[str, float]) -> None:
    """``print_interval`` iterations have passed; ``metrics`` are the means since the last call.

    It is called for each phase of which a pass is open.
    """


@hookspec
def after_pass(context: Context, phase: str, metrics: dict[str, float]) -> None:
    """A pass over the training data of a phase is over; ``metrics`` are its means, with what plugins have added.

    It is not called for a pass that was cut short, see ``after_epoch``. In an Experiment the validations of the epoch come before it.
    """


@hookspec
def before_validation(context: Context, phase: str) -> None:
    """A validation, or the evaluation of an infer runner, begins; again if it was interrupted.

    A resumed run makes the whole validation again that a signal has interrupted.
    """


@hookspec
def after_validation(context: Context, phase: str, metrics: dict[str, float]) -> None:
    """A validation pass is over; ``metrics`` are its numbers.

    After this hook the random generators are put back to where they were before the validation.

    ``context.is_last_validation`` says whether no interval has asked for it: it judges the weights with which the training
    ends, and must not change how a resumed run continues.

    In ``context["metrics"]`` they are already, in a training as ``valid_…``, but for those of one of several datasets,
    which are ``<dataset>/…`` here and there.
    """


@hookspec
def after_phase(context: Context, phase: str) -> None:
    """The passes of a phase in this epoch are over, and its validation that is due after the epoch.

    It is not called for a phase that was cut short, see ``after_epoch``. The default Runner's ``train_epoch`` ends one phase
    before it begins the next; a loop of one's own may train several by turns, so there all end with the epoch.
    """


@hookspec
def after_epoch(context: Context) -> None:
    """An epoch is over; ``context["metrics"]`` holds its numbers.

    It is not called for an epoch that was cut short: by a limit (``max_steps``, ``optimizer_step_limit``, ``max_time``) or
    ``context.stop`` before the end of its data, by a signal, or by ``is_exit``. An epoch that a limit, a signal or
    ``is_exit`` has cut short continues when the run is resumed, and the hook is called at its end.
    """


@hookspec
def before_export(context: Context) -> None:
    """Weights for inference are about to be written, as ``save_inference_interval`` says: those that the models have now."""


@hookspec
def after_export(context: Context) -> None:
    """Weights for inference have been written, or the storage has refused.

    Both come after the epochs or steps that ``save_inference_interval`` says, and at the end of the training.
    """


@hookspec
def before_checkpoint_saved(context: Context) -> None:
    """A checkpoint of this moment is about to be saved: what is changed now is in it.

    It is called again where a plugin has asked for a validation in it, which comes between. It is called at the end of a
    training too, where nothing is written if the last checkpoint is of the same moment.
    """


@hookspec
def after_checkpoint_captured(context: Context) -> None:
    """The checkpoint is copied, and not on disk yet: what was changed for it is to be put back.

    It is called too where the storage has refused.
    """


@hookspec
def after_checkpoint_saved(context: Context, path: Path) -> None:
    """A checkpoint is complete on disk; training may have gone on in the meantime.

    It is called at the latest before the next checkpoint is saved. It is called again when another checkpoint of the same
    iteration replaces this one, such as one that is saved after a validation.
    """


@hookspec
def after_stage(name: str, context: Context) -> None:
    """A stage has run."""


@hookspec
def on_signal(context: Context, signal: Signals) -> None:
    """A signal such as SIGTERM ends the run; a training was saved, if it could be, before this is called."""


@hookspec
def on_stage_error(name: str, context: Context, error: BaseException) -> None:
    """A stage has raised ``error``; terminal's ``abort`` follows."""


@hookspec
def after_pipeline(context: Context) -> None:
    """The runner is over, or has failed: then ``context["error"]`` is the error. The resources are still open."""


@hookspec
def after_run(context: Context) -> None:
    """The run is over, or has failed, and its files are written: ``status.json`` says how it has ended.

    It is called for the plugins of the runner that ran last; the resources are closed. An error in it is logged, and
    changes nothing.
    """
