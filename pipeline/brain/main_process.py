"""What a script does on rank 0 alone; torchrun has started it several times. Names are SpeechBrain's."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from pipeline.distributed.world import SINGLE, current_world, joined
from pipeline.errors import ConfigError

_P = ParamSpec("_P")
_T = TypeVar("_T")


def ddp_init_group(run_opts: Mapping[str, Any]) -> None:
    """Join the processes that torchrun has started, until this one ends; else ``fit`` does it for as long as it trains.

    Loaders that are made after it give each of them its part.

    Args:
        run_opts: run options. The backend is nccl on a GPU and gloo on a CPU, whatever ``distributed_backend`` says.

    Raises:
        ConfigError: ``distributed_launch`` is set, and no launcher has started this process.
    """
    if run_opts.get("distributed_launch") and "RANK" not in os.environ:
        what = "distributed_launch is set, and no launcher has started this process"
        raise ConfigError(f"ddp_init_group: {what}; start the script with torchrun")
    if current_world() is not SINGLE:
        return
    group = joined()
    group.__enter__()

    @atexit.register
    def leave() -> None:
        # What has ended the script, if anything has.
        error = getattr(sys, "last_value", None)
        with suppress(Exception):
            group.__exit__(error and type(error), error, None)


def if_main_process() -> bool:
    """Whether this process is that of rank 0, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def main_process_only(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """A function that rank 0 alone calls. The others wait; all return what it has returned, or fail where it fails.

    What it returns has to be something that pickle takes.
    """

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        with joined() as world:

            def on_main() -> _T | None:
                with world.alone():
                    return function(*args, **kwargs) if world.is_main else None

            return world.broadcast(world.attempt(on_main))  # type: ignore[return-value] # rank 0 has called it

    return call


def run_on_main(
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    post_func: Callable[..., Any] | None = None,
    post_args: Sequence[Any] | None = None,
    post_kwargs: Mapping[str, Any] | None = None,
    run_post_on_main: bool = False,
) -> None:
    """Call a function on rank 0 alone, then another one on the other ranks, such as to load what the first has written.

    Unlike SpeechBrain's, the second is called nowhere if the first fails.

    Args:
        func: what rank 0 calls, while the others wait.
        args: its arguments.
        kwargs: likewise.
        post_func: what the others call after it.
        post_args: its arguments.
        post_kwargs: likewise.
        run_post_on_main: whether rank 0 calls it too, at the same time.
    """

    @main_process_only
    def first() -> None:
        func(*args or (), **kwargs or {})

    first()
    if post_func and (run_post_on_main or not if_main_process()):
        post_func(*post_args or (), **post_kwargs or {})
