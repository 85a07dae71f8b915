"""What the network stage has built for a phase, and what the runner's keys mean for its passes."""

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
    """Return ``context["model"][name]``.

    Args:
        name: the name of the phase.
        context: after the network stage.

    Raises:
        ContextError: the network stage has written no such entry.
    """
    entry = _entry_of(context, "model", name, "entry for phase")
    if not isinstance(entry, Mapping):
        keys = "{model, brain, optim_schedulers, updater}"
        raise ContextError(f"context['model']['{name}'] is a {type(entry).__name__}, not a dict; write {keys} there")
    return entry if isinstance(entry, Phase) else Phase(name, entry)


def loader_of(dataset: str, context: Context) -> Any:
    """Return ``context["dataset"][dataset]``.

    Args:
        dataset: the name of the dataset.
        context: after the network stage.

    Raises:
        ContextError: the network stage has written no such loader.
    """
    return _entry_of(context, "dataset", dataset, "loader")


def _entry_of(context: Context, key: str, name: str, what: str) -> Any:
    """Return ``context[key][name]``; ``what`` describes it in the message."""
    entries = context[key]
    if isinstance(entries, Mapping) and name in entries:
        return entries[name]
    known = one_of(name, map(str, entries)) if isinstance(entries, Mapping) else f"; it is a {type(entries).__name__}"
    raise ContextError(f"context['{key}'] has no {what} '{name}'{known}; the network stage has to write it")


@contextmanager
def phase_errors(name: str) -> Iterator[None]:
    """Add the name of the phase to errors about data, losses or options."""
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
    """Add the place in the config to an error about an optimizer or schedule.

    Args:
        address: where the optimizer or schedule is in the config.
        config: the config.
        arguments: where its arguments are, such as ``groups`` and ``optim_conf``, relative to
            ``address``; ``""`` if they are at ``address``.
    """
    try:
        yield
    except ConfigError as error:
        inside, _, message = str(error).partition(": ")
        if inside.startswith("groups."):
            address = f"{address}{arguments}.{inside}"
        elif inside == "optim_conf":
            # The keys of hyper_parameters.optimizer are the arguments of the optimizer themselves.
            address = f"{address}{arguments}.{inside}" if arguments else address
        else:
            message = str(error)
        raise ConfigError(f"{config.origin(address)}: {address}: {message}") from error


def pass_loader(dataset: str, runner: RunnerSchema, context: Context, *, ignore_debug: bool = False) -> Any:
    """Return the batches of one pass over a dataset, as many as it and the runner allow.

    Args:
        dataset: the name of the dataset.
        runner: the runner that makes the pass.
        context: after the network stage.
        ignore_debug: whether to return the pass of the whole training, even in a debug run.
    """
    loader = loader_of(dataset, context)
    if runner.overfit_batches:
        loader = overfit_batches(loader, runner.overfit_batches)
    own_limit = context["config"].get(f"dataset.{dataset}.limit_batches")
    return limited(loader, runner, own_limit, ignore_debug=ignore_debug)


def limited(loader: Any, runner: RunnerSettings, own_limit: int | None = None, *, ignore_debug: bool = False) -> Any:
    """Return a loader with at most as many batches as its dataset and the runner allow.

    Args:
        loader: any loader.
        runner: its ``limit_batches`` holds for datasets without a limit; in a debug run, also its
            ``debug_batches``.
        own_limit: ``limit_batches`` of the dataset; None if it has none.
        ignore_debug: whether to ignore that the run is a debug run.
    """
    is_debug = runner.debug and not ignore_debug
    limits = [own_limit or runner.limit_batches, runner.debug_batches if is_debug else None]
    smallest = min((limit for limit in limits if limit), default=0)
    return LimitedLoader(loader, smallest) if smallest else loader


def begin_on_ranks(modules: Iterable[nn.Module], seed: int | None) -> None:
    """Start a training on the ranks, with the weights of rank 0 and different random numbers.

    The random generators of rank 0 stay as they are.

    Args:
        modules: the modules that are trained. Checkpoints are restored after this.
        seed: the seed of rank 0; None if it was not seeded.
    """
    world = current_world()
    if world.size > 1:
        broadcast_tensors([tensor for module in modules for tensor in (*module.parameters(), *module.buffers())], world)
    if world.rank:
        rank_seed = mix(torch.initial_seed() if seed is None else seed, world.rank)
        torch.manual_seed(rank_seed)
        seed_generators(rank_seed)
