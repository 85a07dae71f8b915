"""The random generators that belong to a training, beside the global ones: those of its Brains and of its data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import DataLoader

from pipeline.checkpoint.random_state import generators_in
from pipeline.data.loader import LimitedLoader, WorkerSeed, generators_of, keeps_workers

# What of a DataLoader may hold generators.
PARTS = ("dataset", "collate_fn", "batch_sampler", "sampler")


def own_generators(owners: Mapping[str, object], loaders: Mapping[str, Any]) -> dict[str, Any]:
    """Find every generator of a training whose state is saved and restored, each once.

    The state of a validation or a checkpoint contains these generators by their names. The workers of a loader with
    ``persistent_workers`` count as one: its state is the seed that torch has drawn for them.

    Args:
        owners: the Brains, updaters or other objects, by name; ``""`` for one whose generators need no prefix.
        loaders: the training and validation data, by name.

    Returns:
        The generators by name, such as ``phase.line.brain.noise`` or ``train.dataset.transform.generator``.
    """
    generators: dict[str, Any] = {}
    for name, owner in owners.items():
        prefix = f"{name}." if name else ""
        generators |= {f"{prefix}{path}": generator for path, generator in generators_in(owner).items()}
    for name, loader in loaders.items():
        generators |= _generators_of_loader(name, loader)
    once = {id(generator): (name, generator) for name, generator in reversed(generators.items())}
    return dict(reversed(once.values()))


def generators_of_phases(models: Any, loaders: Any) -> dict[str, Any]:
    """Find those of a run.

    Args:
        models: ``context["model"]``, or None.
        loaders: ``context["dataset"]``, or None.
    """
    owners: dict[str, object] = {}
    for phase, entry in models.items() if isinstance(models, Mapping) else ():
        roles = entry.items() if isinstance(entry, Mapping) else ()
        owners |= {f"phase.{phase}.{role}": owner for role, owner in roles if role in {"model", "brain", "updater"}}
    named = loaders.items() if isinstance(loaders, Mapping) else ()
    return own_generators(owners, {f"dataset.{name}": loader for name, loader in named})


def _generators_of_loader(name: str, loader: Any) -> dict[str, Any]:
    generators: dict[str, Any] = {}
    for number, generator in enumerate(generators_of(loader)):
        generators[f"{name}.generator {number}"] = generator
    is_loader = isinstance(loader, DataLoader | LimitedLoader)
    parts = {part: getattr(loader, part, None) for part in PARTS} if is_loader else {"loader": loader}
    for part, owner in parts.items():
        found = generators_in(owner)
        generators |= {f"{name}.{part}.{path}": generator for path, generator in found.items()}
    if keeps_workers(loader):
        generators[f"{name}.workers"] = WorkerSeed(loader)
    return generators
