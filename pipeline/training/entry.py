"""What the network stage leaves in the context for each phase, looked up by whoever trains or evaluates it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.context import Context
from pipeline.errors import ContextError, one_of


def entry_of(phase: str, context: Context, *needed: str) -> Mapping[str, Any]:
    """``context["model"][phase]``, with at least the keys that are needed.

    Raises:
        ContextError: the network stage left no such entry, or one without a key.
    """
    models = context["model"]
    if not isinstance(models, Mapping) or phase not in models:
        known = one_of(phase, map(str, models)) if isinstance(models, Mapping) else f"; it is a {type(models).__name__}"
        raise ContextError(
            f"context['model'] has no entry for phase '{phase}'{known}; the network stage has to write it"
        )
    entry: Mapping[str, Any] = models[phase]
    if not isinstance(entry, Mapping):
        kind = type(entry).__name__
        raise ContextError(f"context['model']['{phase}'] is a {kind}, not a dict; write {{{', '.join(needed)}}} there")
    lacking = [key for key in needed if key not in entry]
    if lacking:
        has = ", ".join(map(str, entry)) or "nothing"
        raise ContextError(
            f"context['model']['{phase}'] has no '{lacking[0]}', only {has}; the network stage has to write it, "
            "or replace the runner stage as well"
        )
    return entry


def loader_of(dataset: str, context: Context) -> Any:
    """``context["dataset"][dataset]``.

    Raises:
        ContextError: the network stage left no such loader.
    """
    loaders = context["dataset"]
    if not isinstance(loaders, Mapping) or dataset not in loaders:
        known = (
            one_of(dataset, map(str, loaders))
            if isinstance(loaders, Mapping)
            else f"; it is a {type(loaders).__name__}"
        )
        raise ContextError(f"context['dataset'] has no loader '{dataset}'{known}; the network stage has to write it")
    return loaders[dataset]
