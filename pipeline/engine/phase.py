"""What the network stage built for a phase; and what the keys of a runner mean for its passes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from pipeline.config.schema import RunnerSchema
from pipeline.context import ConfigView, Context, Phase, RunnerSettings
from pipeline.data.loader import LimitedLoader, overfit_batches
from pipeline.data.rng import mix, seed_generators
from pipeline.distributed.strategy import broadcast_tensors
from pipeline.distributed.world import current_world
from pipeline.errors import ConfigError, ContextError, DataError, one_of
from pipeline.user_code.tracebacks import error_context


def phase_of(name: str, context: Context) -> Phase:
    """``context["model"][name]``.

    Raises:
        ContextError: the network stage left no such entry.
    """
    entry = _entry_of(context, "model", name, "entry for phase")
    if not isinstance(entry, Mapping):
        keys = "{model, brain, optim_schedulers, updater}"
        raise ContextError(f"context['model']['{name}'] is a {type(entry).__name__}, not a dict; write {keys} there")
    return entry if isinstance(entry, Phase) else Phase(name, entry)


def _entry_of(context: Context, key: str, name: str, what: str) -> Any:
    """``context[key][name]``; ``what`` it is, for the message."""
    entries = context[key]
    if isinstance(entries, Mapping) and name in entries:
        return entries[name]
    known = one_of(name, map(str, entries)) if isinstance(entries, Mapping) else f"; it is a {type(entries).__name__}"
    raise ContextError(f"context['{key}'] has no {what} '{name}'{known}; the network stage has to write it")


def loader_of(dataset: str, context: Context) -> Any:
    """``context["dataset"][dataset]``.

    Raises:
        ContextError: the network stage left no such loader.
    """
    return _entry_of(context, "dataset", dataset, "loader")


@contextmanager
def phase_errors(name: str) -> Iterator[None]:
    """What is wrong with data, losses or options is reported with the phase in which it was found."""
    address = f"phase.{name}"
    with error_context(address):
        try:
            yield
        except (DataError, ConfigError) as error:
            if str(error).startswith("phase."):
                raise
            raise type(error)(f"{address}: {error}") from error


@contextmanager
def faults_at(address: str, config: ConfigView, arguments: str = "") -> Iterator[None]:
    """Say where in the config is what an OptimScheduler refuses; one of ``groups`` is among its ``arguments``, like ``optim_conf``."""
    try:
        yield
    except ConfigError as error:
        inside, _, message = str(error).partition(": ")
        if inside.startswith("groups."):
            address = f"{address}{arguments}.{inside}"
        elif inside == "optim_conf":
            # The keys of hyper_parameters.optimizer are the arguments of the optimizer.
            address = f"{address}{arguments}.{inside}" if arguments else address
        else:
            message = str(error)
        raise ConfigError(f"{config.origin(address)}: {address}: {message}") from error


def pass_loader(dataset: str, runner: RunnerSchema, context: Context, *, ignore_debug: bool = False) -> Any:
    """Return the batches of one pass over a dataset, as many as it and the runner allow.

    Args:
        dataset: its name.
        runner: whose pass it is.
        context: after the network stage.
        ignore_debug: whether to return the pass of the whole training, also in a debug run.
    """
    loader = loader_of(dataset, context)
    if runner.overfit_batches:
        loader = overfit_batches(loader, runner.overfit_batches)
    own_limit = context["config"].get(f"dataset.{dataset}.limit_batches")
    return limited(loader, runner, own_limit, ignore_debug=ignore_debug)


def limited(loader: Any, runner: RunnerSettings, own_limit: int | None = None, *, ignore_debug: bool = False) -> Any:
    """Limit a loader to its own ``limit_batches``, else the runner's, and to a debug run's."""
    is_debug = runner.debug and not ignore_debug
    limits = [own_limit or runner.limit_batches, runner.debug_batches if is_debug else None]
    most = min((limit for limit in limits if limit), default=0)
    return LimitedLoader(loader, most) if most else loader


def begin_on_ranks(modules: Iterable[nn.Module], seed: int | None) -> None:
    """Where several ranks train: all take the first weights of rank 0, and others than that draw numbers of their own.

    Args:
        modules: what is trained; a restore comes after it.
        seed: what rank 0 was seeded with; None: nothing.
    """
    world = current_world()
    if world.size > 1:
        broadcast_tensors([own for module in modules for own in (*module.parameters(), *module.buffers())], world)
    if world.rank:
        own = mix(torch.initial_seed() if seed is None else seed, world.rank)
        torch.manual_seed(own)
        seed_generators(own)
