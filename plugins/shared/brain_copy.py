"""A copy of a Brain, on which plugins compute what the run is not to notice."""

from __future__ import annotations

import copy
from typing import Any

from torch.nn.parameter import is_lazy

from pipeline import Brain
from pipeline.compute.trainable import trainable_of


def copy_of(brain: Brain, *same: Any) -> Brain:
    """A copy with the same weights, and the objects in ``same``; attributes that cannot be copied are the same too."""
    # Parameters that have no shape yet get one in the first forward.
    parameters = [parameter for parameter in brain.modules.parameters() if not is_lazy(parameter)]
    trained = trainable_of(brain)
    shared = [trained.schedulers, trained.counters, trained.strategy, brain.checkpointer, *parameters, *same]
    other = copy.copy(brain)
    memo = {id(brain): other, **{id(value): value for value in shared}}
    for name, value in vars(brain).items():
        before = dict(memo)
        try:
            vars(other)[name] = copy.deepcopy(value, memo)
        except Exception:
            # As far as the copy has come, nothing else is to refer to it. The memo stays the same object: it has its own id.
            memo.clear()
            memo.update(before)
    return other
