"""Whether a dataset or a collate function uses random numbers: what it declares, and a check of that."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pipeline.checkpoint.comparison import differences
from pipeline.checkpoint.random_state import restore_states, states_of
from pipeline.data.rng import get_states, set_states
from pipeline.errors import DataError

ATTRIBUTE = "uses_random_numbers"

_UNDECLARED = object()


def declared_use(part: Any, where: str) -> bool | None:
    """Return what an object declares in its attribute ``uses_random_numbers``.

    The attribute is that of the object or its class. What ``__getattr__`` finds does not count: a dataset that passes
    every attribute of another one on may itself draw.

    Args:
        part: a dataset or a collate function.
        where: what messages begin with.

    Returns:
        None if it declares nothing.

    Raises:
        DataError: the value is not a bool.
    """
    if inspect.getattr_static(part, ATTRIBUTE, _UNDECLARED) is _UNDECLARED:
        return None
    value = getattr(part, ATTRIBUTE)
    if not isinstance(value, bool):
        name = getattr(part, "__name__", type(part).__name__)
        raise DataError(f"{where}: {name}.{ATTRIBUTE} is {value!r}; set it to True or False, or remove it")
    return value


@contextmanager
def refuse_draws(generators: Mapping[str, Any], where: str, which: str) -> Iterator[None]:
    """Raise if a random generator has another state at the end of the block.

    The states are compared, which takes as long as ten batches. So this is not for every batch.

    Args:
        generators: those that the dataset and the collate function hold, by name.
        where: what messages begin with.
        which: the samples that are made in the block, in words.

    Raises:
        DataError: a generator has been used; all of them are restored.
    """
    states = get_states()
    held = states_of(generators)
    yield
    now = {**get_states()._asdict(), **states_of(generators)}
    before = {**states._asdict(), **held}
    used = [name for name in before if next(differences(before[name], now[name]), None)]
    if not used:
        return
    set_states(states)
    restore_states(generators, held)
    names = ", ".join(_NAMES.get(name, name) for name in used)
    what = f"{ATTRIBUTE} is False, but {which} used random numbers of {names}"
    raise DataError(f"{where}: {what}; remove the declaration, or set it to True: then each batch is seeded")


# Of the fields of States.
_NAMES = {"python": "Python's random", "torch": "torch", "numpy": "numpy.random"}
