"""What a run says of its plugins: which take long, which were never called, and with ``debug: true`` what they change."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from threading import Event, Thread
from typing import Any

import pluggy
from loguru import logger
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pipeline.checkpoint.comparison import differences
from pipeline.checkpoint.gradients import named_parameters_of
from pipeline.checkpoint.random_state import random_state
from pipeline.context import Context
from pipeline.hookspecs import hookimpl
from pipeline.run.hook_gradients import CHANGING, PER_BATCH
from pipeline.signals import SHUTDOWN
from pipeline.user_code.plugin_calls import CURRENT, HookCall
from pipeline.user_code.plugins import HOOKS

# Seconds from which on a call of a hook is named in the log.
SLOW = 10.0

# In the hot loop, so many calls of a hook go by until one is timed. Of a hook that does something every ten calls, every
# 51st is one of these now and then; every 50th would always be one, or never.
_UNTIMED = 50

# Hooks that come only at an end, at a resume, at a signal, or after an error.
_RARE = {
    "after_checkpoint_loaded",
    "on_resume",
    "before_export",
    "after_export",
    "on_signal",
    "on_stage_error",
    "after_pipeline",
    "after_run",
}

# Hook -> the key of the runner that says how often it comes.
_INTERVALS = {
    "on_print_interval": "print_interval",
    "before_validation": "valid_interval",
    "after_validation": "valid_interval",
    "before_checkpoint_saved": "save_interval",
    "after_checkpoint_captured": "save_interval",
    "after_checkpoint_saved": "save_interval",
}

# What a hook had better leave alone, unless its plugin is there to change weights.
WEIGHT = "a weight"

_AT_A_BEGINNING = {"before_epoch", "before_phase", "before_pass"}


class CallTime:
    """How long the calls of a hook take.

    Args:
        call: the hook.
    """

    def __init__(self, call: HookCall) -> None:
        self.call, self.seconds, self.newest, self.timed = call, 0.0, 0.0, 0
        if not call.wraps:
            self.method = call.method
            call.watch(self.timed_call, _UNTIMED)

    def timed_call(self, *arguments: Any, **defaults: Any) -> Any:
        """Call the hook."""
        __tracebackhide__ = True
        began = time.perf_counter()
        try:
            return self.method(*arguments, **defaults)
        finally:
            self.add(time.perf_counter() - began)

    def add(self, seconds: float) -> None:
        """Count a call that was timed; in the hot loop it stands for those since the last."""
        calls = self.call.count - self.timed
        self.timed = self.call.count
        if seconds > SLOW:
            self.add_slow(seconds)
        else:
            self.seconds += seconds * calls
            self.newest = seconds

    def add_slow(self, seconds: float) -> None:
        """Log a slow call; it stands for itself alone."""
        logger.warning(f"{self.call.where} took {seconds:.0f} s")
        self.seconds += seconds

    def total(self) -> float:
        """The seconds of all calls; the newest that was timed stands for those after it."""
        return self.seconds + (self.call.count - self.timed) * self.newest


class PluginReport:
    """Watches the hooks of all plugins of a runner. It is there in each run, and is no plugin that a config could name.

    Args:
        manager: has the plugins of the runner.
    """

    # What the first process says holds of the others too.
    every_rank = False

    def __init__(self, manager: pluggy.PluginManager) -> None:
        implementations = [each for hook in HOOKS for each in getattr(manager.hook, hook).get_hookimpls()]
        self.calls = [each.function for each in implementations if isinstance(each.function, HookCall)]
        self.times = {call: CallTime(call) for call in self.calls}
        # How many epochs were done when the training began; None before, and once the first epoch was looked at.
        self.epochs: float | None = None
        self.resumed = self.saved = False
        self.ended = Event()
        self.began = 0.0

    @hookimpl(tryfirst=True)
    def before_pipeline(self, context: Context) -> None:
        """Look at the clock, now and every second."""
        if not self.calls:
            return
        self.began = time.perf_counter()
        thread = Thread(target=self._watch, name="plugin report", daemon=True)
        thread.start()
        context.peek("resources").callback(self._end, thread, context)
        if context.peek("runner").debug:
            for call in self.calls:
                if not call.wraps:
                    call.method = self.times[call].method = _checked(call, context)

    @hookimpl(tryfirst=True)
    def on_resume(self, context: Context) -> None:
        """Note with which epoch the training goes on."""
        self.resumed, self.epochs = True, context.peek("train_state")["epoch"]

    @hookimpl(tryfirst=True)
    def before_epoch(self, context: Context) -> None:
        """Note with which epoch the training begins; after the first, see which plugins were not called."""
        if self.epochs is None:
            self.epochs = context.peek("train_state")["epoch"]
        self._report_uncalled(context)

    @hookimpl(tryfirst=True)
    def before_checkpoint_saved(self) -> None:
        """Note that a checkpoint will be announced, once it is on disk."""
        self.saved = True

    @hookimpl(trylast=True)
    def after_stage(self, context: Context, name: str) -> None:
        """After a training of one epoch, see which plugins were not called; after the network stage, what nobody has wrapped."""
        if name == "runner":
            self._report_uncalled(context)
        elif name == "network":
            self._report_unwrapped(context)

    def _report_unwrapped(self, context: Context) -> None:
        models = context.peek("model")
        sharing = {phase["name"] for phase in context.peek("phases") if phase.get("model_of")}
        phases = [phase for phase in models if phase not in sharing] if isinstance(models, Mapping) else []
        for call in self.calls:
            if call.hook == "wrap_model" and call.count < len(phases):
                what = f"{call.where} was called for {call.count} of the phases {', '.join(phases)}"
                logger.warning(
                    f"{what}; have the network stage call super().build_phase(phase, runner, context), which does"
                )

    def _watch(self) -> None:
        """Look now and then which call is running, until the end: of those that nobody times, the slow ones are logged."""
        seen, since, last, named = (CURRENT.call, 0), 0.0, 0.0, True
        while True:
            ended, now = self.ended.wait(SLOW / 10), time.perf_counter()
            current = CURRENT.call
            running = current, current.count if current else 0
            call, count = seen
            # A hook may run another trainer, whose plugins have a report of their own.
            times = self.times.get(call) if call else None
            if times and running != seen and last - since > SLOW and times.timed != count:
                times.add_slow(last - since)
            if running != seen:
                seen, since, named = running, now, False
            last, signal = now, SHUTDOWN.arrived
            if current and signal and now - since > SLOW and not named:
                named = True
                logger.warning(f"{current.where} has run for {now - since:.0f} s, and {signal.name} waits for it")
            if ended:
                return

    def _end(self, thread: Thread, context: Context) -> None:
        """Log how long each plugin took; not after an error, which is to be the last that is logged."""
        self.ended.set()
        thread.join()
        if context.peek("error"):
            return
        whole, seconds = time.perf_counter() - self.began, dict[str, float]()
        for call, times in self.times.items():
            seconds[call.plugin.name] = seconds.get(call.plugin.name, 0.0) + times.total()
        by_time = sorted(seconds.items(), key=lambda item: -item[1])
        shares = ", ".join(f"{name} {own:.1f} s ({own / whole:.1%})" for name, own in by_time)
        logger.info(f"{context.peek('runner_name')} took {whole:.1f} s; of these the plugins: {shares}")

    def _report_uncalled(self, context: Context) -> None:
        if self.epochs is None or context.peek("train_state")["epoch"] <= self.epochs or context.peek("is_infer"):
            return
        # Once.
        self.epochs = float("inf")
        by_plugin: dict[str, list[HookCall]] = {}
        rare = {*_RARE, "after_checkpoint_saved"} if self.saved else _RARE
        for call in self.calls:
            by_plugin.setdefault(call.plugin.name, []).append(call)
        for name, own in by_plugin.items():
            if not any(call.count or call.hook in rare for call in own):
                reasons = "; ".join(f"{call.hook}{self._reason(call.hook, context)}" for call in own)
                logger.warning(f"plugin '{name}': none of its hooks was called in the first epoch: {reasons}")

    def _reason(self, hook: str, context: Context) -> str:
        """Why a hook was not called, with a colon before it; ``""`` where that cannot be told."""
        if hook in _AT_A_BEGINNING and self.resumed:
            return " (the epoch had begun before the run was resumed)"
        if hook == "on_observe":
            return " (nothing has called observe)"
        phases, key = context.peek("phases"), _INTERVALS.get(hook)
        if key == "valid_interval" and phases and not any(phase.get("valid_dataset_name") for phase in phases):
            return " (no phase has a valid_dataset_name)"
        if key:
            value, iteration = getattr(context.peek("runner"), key), context.peek("train_state")["iteration"]
            return f" ({key} is {'null' if value is None else value}, and the epoch was over at iteration {iteration})"
        return ""


def _checked(call: HookCall, context: Context) -> Callable[..., Any]:
    """The hook's method; what it changes that it had better leave alone is logged once."""
    method, reported = call.method, set[str]()
    if getattr(call.plugin.target, "changes_weights", False) is True:
        # It does so on purpose.
        reported.add(WEIGHT)

    @wraps(method)
    def check(*arguments: Any, **defaults: Any) -> Any:
        __tracebackhide__ = True
        batch = dict(zip(call.arguments, arguments, strict=False)).get("batch")
        before = _state(context, batch)
        gradients = _gradients(context) if call.hook in PER_BATCH else {}
        value = method(*arguments, **defaults)
        left = _gradient_left(context, gradients, may_change=call.hook in CHANGING)
        if left and "a gradient" not in reported:
            reported.add("a gradient")
            what = f"{call.where} left a gradient in '{left}', which may become part of an update"
            logger.warning(f"{what}; compute it with torch.autograd.grad, or clear it in the hook")
        for what, state in _state(context, batch).items():
            if what not in reported and (difference := next(differences(before[what], state), None)):
                reported.add(what)
                logger.warning(f"{call.where} has changed {what}: {difference}")
        return value

    return check


def _state(context: Context, batch: Any) -> dict[str, Any]:
    """What a plugin had better leave alone: the weights of all phases, the batch's devices, and the random states."""
    models = context.peek("model")
    phases = models if isinstance(models, Mapping) else {}
    modules = {name: _module(entry) for name, entry in phases.items() if isinstance(entry, Mapping)}
    return {
        WEIGHT: {name: dict(_weights(module)) for name, module in modules.items() if isinstance(module, nn.Module)},
        "the device of the batch": _devices(batch),
        "a random state": random_state(),
    }


# Of each parameter the gradient, and how often that was changed in place; None: there is no gradient.
_Gradients = dict[Tensor, tuple[Tensor, int] | None]


def _gradients(context: Context) -> _Gradients:
    """The gradients of everything that is trained, as they are now."""
    return {parameter: _gradient_of(parameter) for parameter in named_parameters_of(context)}


def _gradient_of(parameter: Tensor) -> tuple[Tensor, int] | None:
    gradient = parameter.grad
    return None if gradient is None else (gradient, gradient._version)


def _gradient_left(context: Context, before: _Gradients, *, may_change: bool) -> str | None:
    """The name of a parameter that has a gradient which it had not before; None: there is none.

    Args:
        context: the context.
        before: the gradients before.
        may_change: whether a gradient that was there before may have changed.
    """
    names = named_parameters_of(context) if before else {}
    for parameter, had in before.items():
        has = _gradient_of(parameter)
        if has is None:
            continue
        if had is None or (not may_change and (has[0] is not had[0] or has[1] != had[1])):
            return names.get(parameter)
    return None


def _devices(value: Any) -> Any:
    """The device of each part of a batch."""
    if isinstance(value, Mapping):
        return {key: _devices(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_devices(part) for part in value]
    return str(getattr(value, "device", None))


def _module(entry: Mapping[str, Any]) -> Any:
    """The model of a phase; where that is a Brain, its modules."""
    model = entry.get("model")
    return model if isinstance(model, nn.Module) else getattr(entry.get("brain"), "modules", None)


def _weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, value in module.state_dict().items():
        if isinstance(value, Tensor) and not is_lazy(value):
            yield name, value.detach().clone()
