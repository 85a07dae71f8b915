"""Says which module first gives a number that is not finite, once a loss or a gradient is not."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from loguru import logger
from torch import Tensor, nn

from pipeline import hookimpl, hookspecs
from pipeline.brain.brain import Brain, Stage
from pipeline.checkpoint.random_state import generators_in, random_state, restore_random_state
from pipeline.compute.trainable import trainable_of
from pipeline.context import Context, Phase
from pipeline.engine.phase import phase_of
from pipeline.errors import ConfigError, DivergedError
from pipeline.optim.losses import Losses, losses_by_name
from pipeline.optim.precision import autocast
from pipeline.optim.touched_rows import with_dense_gradients

from .shared.brain_copy import copy_of

# What is found where the batch is not to blame.
_FINITE = "computed again by compute_forward and compute_objectives alone, all is finite"


class NanGuard:
    """Looks at the losses, and at the gradients, of a batch; if one is not finite, it computes that very batch again.

    This time there are hooks on each module, of a copy with the same weights, and the random generators are as they were
    before the batch: so the run goes on as without this plugin, bit for bit. What is first not finite is named: a
    parameter, the input or output of a module, the predictions, the loss, or in the backward a gradient; nan and inf
    apart, for an inf, as of a mask, may be meant. ``nonfinite_patience`` counts as ever.

    A batch that is looked at costs three calls, a copy of the states of the random generators, one norm of the gradients,
    and on a GPU two waits for it. Other batches cost the calls alone. With a gradient scaler (fp16), which finds its
    scale by gradients that are not finite, these are not looked at.

    Args:
        action: ``raise`` ends the run, with exit code 5; ``warn`` logs each finding once.
        every: how many iterations from one batch that is looked at to the next; None: 1, and on a GPU 50.
        gradients: whether to look at the gradients too.

    Raises:
        ConfigError: an argument is out of range.
    """

    # Each process looks at its own batches.
    every_rank = True

    def __init__(self, action: str = "raise", every: int | None = None, gradients: bool = True) -> None:
        if action not in {"raise", "warn"}:
            raise ConfigError(f"nan_guard: action is {action!r}; write raise or warn")
        if every is not None and every < 1:
            raise ConfigError(f"nan_guard: every is {every}; write 1 or more, or null")
        self.action, self.every, self.gradients = action, every, gradients
        # Phase -> its batch that is looked at, and the random state before it.
        self.batches: dict[str, tuple[Any, dict[str, Any]]] = {}
        self.logged: set[str] = set()

    @hookimpl
    def before_pipeline(self, context: Context) -> None:
        """Choose how often to look."""
        self.counters, self.processes = context["train_state"], context["world_size"]
        self.interval = self.every or (1 if context["device"].type == "cpu" else 50)

    @hookimpl(trylast=True)
    def before_batch(self, phase: str, batch: Any) -> None:
        """Keep the batch, if it is to be looked at."""
        self.batches.pop(phase, None)
        if self.counters["iteration"] % self.interval == 0:
            self.batches[phase] = batch, random_state()

    @hookimpl(trylast=True)
    def before_backward(self, context: Context, phase: str, losses: Losses) -> None:
        """Look at the losses that are descended.

        Raises:
            DivergedError: one is not finite.
        """
        if phase in self.batches:
            entry = phase_of(phase, context)
            for name in {scheduler.loss_name for scheduler in entry.optim_schedulers.values()} & losses.keys():
                # Reads a number: what comes next would read it anyway on a CPU.
                if phase in self.batches and not math.isfinite(value := losses[name].item()):
                    self._report(entry, f"the loss '{name}' is {value}", backward=False)

    @hookimpl(trylast=True)
    def after_backward(self, context: Context, phase: str) -> None:
        """Look at the gradients.

        Raises:
            DivergedError: one is not finite.
        """
        if self.gradients and phase in self.batches:
            entry = phase_of(phase, context)
            trained = [each for own in entry.optim_schedulers.values() if not own.scaler for each in own.parameters]
            gradients = [each.grad for each in with_dense_gradients(trained) if each.grad is not None]
            if gradients and not math.isfinite(nn.utils.get_total_norm(gradients, math.inf).item()):
                self._report(entry, "the loss is finite, but a gradient is not", backward=True)

    def _report(self, phase: Phase, what: str, *, backward: bool) -> None:
        batch, random = self.batches.pop(phase.name)
        brain: Any = phase.brain
        finding = _parameter(brain)
        if not finding:
            try:
                with _as_before(random, brain):
                    finding = _Repeat(brain).compute(batch, backward=backward)
            except Exception as error:  # whatever the user's code raises where it is not called as in the run
                finding = f"the batch could not be computed again: {type(error).__name__}: {error}"
        if backward and finding == _FINITE and self.processes > 1:
            # The gradients are those of all processes, and another has the batch that is to blame.
            return
        message = f"phase.{phase.name}: {what} in iteration {self.counters['iteration'] + 1}; {finding}"
        if self.action == "raise":
            raise DivergedError(f"{message}; mend that, or give nan_guard the action warn")
        if (phase.name + finding) not in self.logged:
            self.logged.add(phase.name + finding)
            logger.warning(f"nan_guard: {message}")


class _Event(NamedTuple):
    """A value that is not finite; ``is_nan``: whether it has a nan."""

    place: str
    numbers: str
    is_nan: bool
    value: Tensor


class _Repeat:
    """A batch is computed again by a copy of a Brain, with hooks on its modules.

    Args:
        brain: it stays as it is, but for attributes that cannot be copied.
    """

    def __init__(self, brain: Brain) -> None:
        self.brain, self.events, self.gradients = copy_of(brain), list[_Event](), list[_Event]()

    def compute(self, batch: Any, *, backward: bool) -> str:
        """What is first not finite, in words."""
        brain = self.brain
        with ExitStack() as hooks:
            for name, module in brain.modules.named_modules():
                place = f"'{name}' ({type(module).__name__})"
                before = module.register_forward_pre_hook(self._watch(f"the input of {place}"), with_kwargs=True)
                after = module.register_forward_hook(self._watch(f"the output of {place}"), with_kwargs=True)
                hooks.callback(before.remove)
                hooks.callback(after.remove)
            with autocast(trainable_of(brain).options.precision, brain.device) or nullcontext():
                predictions = brain.compute_forward(batch, Stage.TRAIN)
                self.events += _events_of("what compute_forward returns", predictions)
                returned = brain.compute_objectives(predictions, batch, Stage.TRAIN)
        losses = losses_by_name(returned, "compute_objectives")
        if not backward:
            self.events += _events_of("the loss that compute_objectives returns", losses)
            own = next(_events_of("the batch", batch), None)
            return _in_words(self.events, 0) + (f"; the batch itself has {own.numbers}" if own else "")
        named = {parameter: name for name, parameter in brain.modules.named_parameters() if parameter.requires_grad}
        total = torch.stack([loss for loss in losses.values() if loss.requires_grad]).sum()
        for name, gradient in zip(named.values(), torch.autograd.grad(total, [*named], allow_unused=True), strict=True):
            self.gradients += _events_of(f"the gradient of the parameter '{name}'", gradient)
        # The same gradient is that of an output first, and then of the input of the module that has computed it.
        return _in_words(self.gradients, -1)

    def _watch(self, place: str) -> Any:
        """A hook: inputs come as (module, args, kwargs), an output as the fourth."""

        def hook(_: nn.Module, args: Any, kwargs: Any, *output: Any) -> None:
            self.events += _events_of(place, output or (args, kwargs))
            for tensor in _tensors(output or (args, kwargs)):
                if tensor.requires_grad:
                    tensor.register_hook(lambda own: self.gradients.extend(_events_of(f"the gradient of {place}", own)))

        return hook


def _events_of(place: str, value: Any) -> Iterator[_Event]:
    for tensor in _tensors(value):
        nan, inf = int(tensor.isnan().sum()), int(tensor.isinf().sum())
        if nan or inf:
            parts = [f"{count} {kind}" for count, kind in ((nan, "nan"), (inf, "inf")) if count]
            yield _Event(place, f"{' and '.join(parts)} of {tensor.numel()} numbers", bool(nan), tensor)


def _in_words(events: list[_Event], place: int) -> str:
    """Which was first; ``place``: where to look for it among the events of the same tensor."""
    if not events:
        return _FINITE
    first, nan = events[0], next((event for event in events if event.is_nan), events[0])
    first, nan = ([event for event in events if event.value is own.value][place] for own in (first, nan))
    text = f"first not finite: {first.place}, with {first.numbers}"
    return text if nan is first else f"{text}; first nan: {nan.place}, with {nan.numbers}"


def _parameter(brain: Brain) -> str:
    """The first parameter that is not finite, in words; ``""``: all are finite."""
    for name, parameter in brain.modules.named_parameters():
        if not parameter.isfinite().all():
            return f"the parameter '{name}' is not finite already, since an update before"
    return ""


def _tensors(value: Any) -> Iterator[Any]:
    """The tensors of real numbers in a value, however deep in tuples, lists and mappings."""
    if isinstance(value, Tensor) and value.is_floating_point():
        yield value
    elif isinstance(value, list | tuple | Mapping):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(part)


@contextmanager
def _as_before(random: dict[str, Any], brain: Brain) -> Iterator[None]:
    """In the block the random generators are as they were before the batch, and ``observe`` calls no plugin."""
    own = generators_in(brain)
    now, observer = random_state(own), hookspecs.observer
    hookspecs.observer = None
    restore_random_state(random)
    try:
        yield
    finally:
        restore_random_state(now, own)
        hookspecs.observer = observer
