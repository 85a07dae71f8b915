"""What is told of samples that cannot be had: which dataset, which of its samples, in which worker."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Mapping
from typing import Any, Self

from torch import Tensor
from torch.utils.data import default_collate, default_convert, get_worker_info

from pipeline.errors import DataError
from pipeline.user_code import user_frames

MOST = 8
"""Samples of a batch that are named one by one."""
TORCHS = (default_collate, default_convert)
"""What a DataLoader collates with where it is given no function."""


class WorkerTracebackError(Exception):
    """The cause of an exception that a worker raised: its traceback there, as text."""

    def __str__(self) -> str:
        """The text, on lines of its own."""
        return f"\n{self.args[0]}"


class Raised:
    """What a worker gives in the place of a batch that it could not make.

    Args:
        error: what was raised; it can be pickled.
    """

    def __init__(self, error: Exception) -> None:
        self.error = error
        shown = error.with_traceback(user_frames(error.__traceback__))
        self.trace = "".join(traceback.format_exception(shown))

    @classmethod
    def instead(cls, error: Exception) -> Self:
        """Itself in a worker.

        Raises:
            Exception: the error, in the process that trains, or where it cannot be pickled: then torch reports it.
        """
        if get_worker_info() is None or not _can_travel(error):
            raise error
        return cls(error)

    def again(self) -> Exception:
        """The exception, in the process that trains."""
        if not isinstance(self.error, DataError):
            self.error.__cause__ = WorkerTracebackError(self.trace)
        return self.error


def _can_travel(error: Exception) -> bool:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever the class of a user's exception does
        return False
    return True


def blame(error: BaseException, where: str, what: str) -> None:
    """Give an error of user code a note that says where in the data it was raised; type and traceback stay.

    Args:
        error: gets it.
        where: the dataset.
        what: which samples, and what was done with them.
    """
    error.add_note(f"{where}: {what}{here()}")


def here() -> str:
    """``, in worker 1``; nothing in the process that trains."""
    info = get_worker_info()
    return f", in worker {info.id}" if info else ""


def uncollated(error: Exception, where: str, which: str, samples: Any, collate: Any) -> DataError | None:
    """What to raise where torch's own collate failed, which names no sample; a user's function gets a note instead.

    Args:
        error: was raised.
        where: the dataset.
        which: the samples, in words.
        samples: what the dataset gave.
        collate: the function.
    """
    if collate not in TORCHS:
        blame(error, where, f"collate_fn failed on {which}: {forms(samples)}")
        return None
    reason = str(error).partition("\n")[0]
    remedy = "return the same from each, in numbers or in tensors of one shape, or name a collate_fn that pads them"
    return DataError(
        f"{where}: torch's collate makes no batch of {which}{here()}: {forms(samples)} ({reason}); {remedy}"
    )


def listed(indices: Any) -> str:
    """``the samples 3, 17, 9``."""
    if not isinstance(indices, list | tuple):
        return f"sample {indices}"
    if len(indices) == 1:
        return f"sample {indices[0]}"
    return f"the samples {_first(indices)}"


def forms(samples: Any) -> str:
    """What the samples of a batch are, those that are alike told once: ``a tensor of shape (3,), 2 times; None``."""
    if not isinstance(samples, list | tuple):
        return form(samples)
    counts: dict[str, int] = {}
    for each in samples:
        told = form(each)
        counts[told] = counts.get(told, 0) + 1
    told_once = [told if count == 1 else f"{told}, {count} times" for told, count in counts.items()]
    more = f"; and {len(told_once) - MOST} other kinds" if len(told_once) > MOST else ""
    return "; ".join(told_once[:MOST]) + more


def form(value: Any, depth: int = 0) -> str:
    """What a sample is, with the shapes of the tensors in it."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if value is None:
        return "None"
    kind = f"a {type(value).__name__}"
    if isinstance(value, Mapping):
        inside = [f"{name}: {form(each, depth + 1)}" for name, each in list(value.items())[:MOST]]
    elif isinstance(value, list | tuple):
        inside = [form(each, depth + 1) for each in value[:MOST]]
    else:
        return f"{kind} of length {len(value)}" if isinstance(value, str | bytes) else kind
    return f"{kind} of {len(value)}" + (f" ({', '.join(inside)})" if inside and depth < 2 else "")


def _first(each: Any) -> str:
    told = ", ".join(map(str, each[:MOST]))
    return f"{told} … ({len(each)} of them)" if len(each) > MOST else told
