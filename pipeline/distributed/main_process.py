"""What a script does on rank 0 alone; torchrun has started it several times. Names are SpeechBrain's."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from pipeline.distributed.world import Failure, PeerError, World, describe, exit_code, joined
from pipeline.errors import ConfigError

_P = ParamSpec("_P")
_T = TypeVar("_T")

_world = ExitStack()


@atexit.register
def _leave() -> None:
    """Leave the others, as one that has failed where an error has ended the script."""
    error: BaseException | None = getattr(sys, "last_value", None)
    with suppress(Exception):
        _world.__exit__(type(error) if error else None, error, None)


# The functions in work that rank 0 alone has called; in these nothing waits for the others.
_alone: list[str] = []


def join() -> World:
    """Join the processes that a launcher has started, for as long as this one lives; without a launcher it is alone."""
    return _world.enter_context(joined())


def ddp_init_group(run_opts: Mapping[str, Any]) -> None:
    """Join the processes that torchrun has started, as ``fit`` does too.

    Args:
        run_opts: run options. The backend is nccl on a GPU and gloo on a CPU, whatever ``distributed_backend`` says.

    Raises:
        ConfigError: ``distributed_launch`` is set, and no launcher has started this process.
    """
    if run_opts.get("distributed_launch") and "RANK" not in os.environ:
        what = "distributed_launch is set, and no launcher has started this process"
        raise ConfigError(f"ddp_init_group: {what}; start the script with torchrun")
    join()


def if_main_process() -> bool:
    """Whether this process is that of rank 0, or the only one."""
    return join().is_main


def main_process_only(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """A function that rank 0 alone calls. The others wait; all return what it has returned, or fail where it fails.

    What it returns has to be something that pickle takes.
    """

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        world = join()
        if world.size == 1 or _alone:
            return function(*args, **kwargs)
        result, error = None, None
        if world.is_main:
            _alone.append(function.__name__)
            try:
                result = function(*args, **kwargs)
            except Exception as raised:
                error = raised
            finally:
                _alone.pop()
        result, failure = world.broadcast((result, error and Failure(0, exit_code(error), describe(error))))
        if failure:
            raise error or PeerError(failure)
        return result  # type: ignore[return-value] # rank 0 has called it

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
    def on_main() -> None:
        func(*args or (), **kwargs or {})

    on_main()
    if post_func and (run_post_on_main or not if_main_process()):
        post_func(*post_args or (), **post_kwargs or {})
