"""How the hooks of plugins are called: each call is counted, timed, and held to what a hook may return."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pluggy
from loguru import logger

from pipeline.config.schema import WARN
from pipeline.context import Context
from pipeline.errors import PluginError
from pipeline.signals import SHUTDOWN
from pipeline.user_code.plugins import HOOKS, Plugin
from pipeline.user_code.tracebacks import user_traceback

# Seconds from which on a call of a hook is named in the log.
SLOW = 10.0

# Of so many calls in the hot loop one is timed; such a number that it is not always, or never, every tenth.
EVERY = 51


class HookCall:
    """Calls a hook of a plugin, and knows how often, and how long that took.

    Args:
        plugin: the plugin.
        implementation: its method, as pluggy has registered it.
        calls: those of the runner.

    Attributes:
        where: ``plugin 'x', hook before_epoch (x.py:7)``.
        arguments: which of the hook's arguments it takes, in order.
        count: how often it was called.
        due: in the hot loop, the next call after so many is timed.
    """

    def __init__(self, plugin: Plugin, hook: str, implementation: pluggy.HookImpl, calls: PluginCalls) -> None:
        self.plugin, self.hook, self.calls = plugin, hook, calls
        self.method: Callable[..., Any] = implementation.function
        self.where = self.at(inspect.unwrap(self.method).__code__.co_firstlineno)
        self.arguments = [*implementation.argnames, *implementation.kwargnames]
        wraps = implementation.wrapper or implementation.hookwrapper
        self.may_return = wraps or HOOKS[hook].return_annotation != "None"
        self.count = self.due = self.errors = 0
        # Calls of which each is counted with its own time; and those that stand for others.
        self.exact, self.exact_seconds, self.samples, self.sample_seconds = 0, 0.0, 0, 0.0

    def __call__(self, *arguments: Any, **defaults: Any) -> Any:
        """Call the hook, and time it."""
        self.count += 1
        outer, began = self.calls.running, time.perf_counter()
        self.calls.running = self, began
        try:
            value = self.method(*arguments, **defaults)
            if value is not None and not self.may_return:
                self.refuse(value)
        except Exception as error:
            if self.plugin.settings.on_error != WARN:
                raise
            self.warn(error)
            return None
        finally:
            self.calls.running = outer
            self.took(time.perf_counter() - began)
        return value

    def at(self, line: int) -> str:
        """``plugin 'x', hook before_epoch (x.py:7)``."""
        file = Path(inspect.unwrap(self.method).__code__.co_filename).name
        return f"plugin '{self.plugin.name}', hook {self.hook} ({file}:{line})"

    def refuse(self, value: Any) -> None:
        """Refuse what a hook has returned that takes nothing.

        Raises:
            PluginError: always.
        """
        what = f"returned {value!r:.80}, a {type(value).__name__}"
        raise PluginError(f"{self.where} {what}; nothing is done with it, so return nothing")

    def warn(self, error: Exception) -> None:
        """Log an error of a plugin that may fail: of a hook's errors the 1st, 10th, 100th …."""
        self.errors += 1
        if str(self.errors).strip("0") == "1":
            times = f" for the {self.errors}th time" if self.errors > 1 else ""
            trace = user_traceback(error.__traceback__)
            where = self.at(trace.tb_lineno) if trace else self.where
            what = f"{where} failed{times}: {type(error).__name__}: {error}; on_error is '{WARN}', so the run goes on"
            logger.opt(exception=error.with_traceback(trace)).warning(what)

    def took(self, seconds: float) -> None:
        """Count the time of a call; a long one is logged."""
        if seconds > SLOW:
            logger.warning(f"{self.where} took {seconds:.0f} s")
        # The first call may have something to load: like a slow one, it does not stand for others.
        if seconds > SLOW or not self.exact:
            self.exact, self.exact_seconds = self.exact + 1, self.exact_seconds + seconds
        else:
            self.samples, self.sample_seconds = self.samples + 1, self.sample_seconds + seconds
        self.due = self.count + (EVERY - 1 if self.samples else 0)

    @property
    def seconds(self) -> float:
        """How long all calls took; in the hot loop an estimate."""
        return self.exact_seconds + self.sample_seconds / max(self.samples, 1) * (self.count - self.exact)


class PluginCalls:
    """The hooks of all plugins of a runner.

    Attributes:
        implementations: each hook of each plugin.
        running: the one that is running, and since when.
        now: the time, as a thread has seen it last: to read it is no call.
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        self.implementations: list[HookCall] = []
        self.running: tuple[HookCall | None, float] = None, 0.0
        self.now = self.began = time.perf_counter()

    def add(self, plugin: Plugin, hook: str, implementation: pluggy.HookImpl) -> None:
        """Take over the calls of a hook of a plugin."""
        self.implementations.append(HookCall(plugin, hook, implementation, self))
        registered: Any = implementation  # mypy: what pluggy calls is final
        registered.function = self.implementations[-1]

    def running_hook(self) -> str | None:
        """``plugin 'x', hook before_epoch (x.py:7)``, where one is running."""
        hook, _ = self.running
        return hook.where if hook else None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """In the block, slow hooks are noticed; at its end, how long each plugin took is logged."""
        ended = Event()
        thread = Thread(target=self._watch, args=[ended], name="plugins", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            if self.implementations and not self.context.peek("error"):
                self._log_seconds()

    def _watch(self, ended: Event) -> None:
        """Look at the clock, until the end; where a signal waits for a slow hook, name it."""
        reported = self.running
        while not ended.wait(SLOW / 10):
            self.now = time.perf_counter()
            running = self.running
            hook, since = running
            if hook and (signal := SHUTDOWN.requested) and self.now - since > SLOW and running is not reported:
                reported = running
                logger.warning(
                    f"{hook.where} has been running for {self.now - since:.0f} s, and {signal.name} waits for it"
                )

    def _log_seconds(self) -> None:
        whole, seconds = time.perf_counter() - self.began, dict[str, float]()
        for hook in self.implementations:
            seconds[hook.plugin.name] = seconds.get(hook.plugin.name, 0.0) + hook.seconds
        in_order = sorted(seconds.items(), key=lambda item: -item[1])
        shares = [f"{name} {own:.1f} s ({own / whole:.1%})" for name, own in in_order]
        logger.info(f"{self.context.peek('runner_name')} took {whole:.1f} s; of these the plugins: {', '.join(shares)}")


def hook_or_none(hooks: pluggy.HookRelay, name: str) -> Callable[..., Any] | None:
    """A hook for the hot loop: a plain function, or None if nobody implements it, which costs nothing.

    It makes one call of ours beside those of the plugins. Where one wraps others, it is pluggy's.
    """
    caller: pluggy.HookCaller = getattr(hooks, name)
    implementations = caller.get_hookimpls()
    functions = [each.function for each in reversed(implementations)]
    own = [function for function in functions if isinstance(function, HookCall)]
    if not implementations:
        return None
    if len(own) < len(functions) or any(each.wrapper or each.hookwrapper for each in implementations):
        return caller
    return _plain_function(own)


def _plain_function(hooks: list[HookCall]) -> Callable[..., None]:
    calls = hooks[0].calls

    def call(**arguments: Any) -> None:
        outer = calls.running
        for hook in hooks:
            own = map(arguments.__getitem__, hook.arguments)
            if hook.count >= hook.due:
                hook(*own)
                continue
            hook.count += 1
            began = calls.now
            calls.running = hook, began
            try:
                if (value := hook.method(*own)) is not None:
                    hook.refuse(value)
            except Exception as error:
                if hook.plugin.settings.on_error != WARN:
                    raise
                hook.warn(error)
            finally:
                calls.running = outer
                if calls.now - began > SLOW:
                    hook.took(calls.now - began)

    return call
