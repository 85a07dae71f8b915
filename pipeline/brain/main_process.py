"""Functions for scripts that torchrun starts once per rank. The names are SpeechBrain's."""

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
    """Join the processes that torchrun has started, until this process ends.

    Loaders that are made afterwards give each process its part of the data. Without this call, ``fit``
    joins the processes for as long as it trains. For a single process it does nothing.

    Args:
        run_opts: run options. ``distributed_backend`` is not used: the backend is nccl on a GPU and
            gloo on a CPU.

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
        # The error that has ended the script, if there is one.
        error = getattr(sys, "last_value", None)
        with suppress(Exception):
            group.__exit__(error and type(error), error, None)


def if_main_process() -> bool:
    """Return whether this process has rank 0, or is the only one."""
    return os.environ.get("RANK", "0") == "0"


def main_process_only(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Return a function that only rank 0 calls, while the other ranks wait.

    All ranks return what rank 0 has returned, or raise if it has raised. What the function returns must be
    picklable.

    Example::

        @main_process_only
        def prepare(folder):
            return [path.name for path in sorted(Path(folder).glob("*.csv"))]


        Path("train.csv").write_text("1,2")
        assert prepare(".") == ["train.csv"]
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
    """Call a function on rank 0 only, then another function on the other ranks.

    The second function can load what the first has written. Unlike in SpeechBrain, no rank calls the
    second function if the first one fails.

    Args:
        func: the function that rank 0 calls, while the other ranks wait.
        args: the positional arguments of ``func``.
        kwargs: the keyword arguments of ``func``.
        post_func: the function that the other ranks call afterwards.
        post_args: the positional arguments of ``post_func``.
        post_kwargs: the keyword arguments of ``post_func``.
        run_post_on_main: whether rank 0 calls ``post_func`` too, at the same time.

    Example::

        def prepare(path, value):
            Path(path).write_text(value)


        run_on_main(prepare, args=["train.csv"], kwargs={"value": "1,2"})
        assert Path("train.csv").read_text() == "1,2"
    """

    @main_process_only
    def first() -> None:
        func(*args or (), **kwargs or {})

    first()
    if post_func and (run_post_on_main or not if_main_process()):
        post_func(*post_args or (), **post_kwargs or {})
