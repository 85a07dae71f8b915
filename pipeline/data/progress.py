"""How far each worker is: written by it, and read by the process that trains once the worker is dead or hangs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from ctypes import c_int64
from multiprocessing.sharedctypes import RawArray
from typing import TypeVar

_T = TypeVar("_T")


class Progress:
    """What each of several workers is at, in memory that they share.

    Args:
        workers: how many.
    """

    def __init__(self, workers: int) -> None:
        self._at = RawArray(c_int64, [-1] * (2 * workers))

    def over(self, samples: Iterable[_T], batch: int, worker: int, *, there: bool = False) -> Iterator[_T]:
        """The samples of a batch, with a note of which one a worker is at.

        Args:
            samples: asked for one by one.
            batch: of which they are.
            worker: asks for them.
            there: whether it has a sample once it is given, and so is at the next; else it has its index.
        """
        self.begin(batch, worker)
        for number, sample in enumerate(samples):
            self._at[2 * worker + 1] = number + there
            yield sample

    def begin(self, batch: int, worker: int) -> None:
        """A worker is at the first sample of a batch."""
        self._at[2 * worker], self._at[2 * worker + 1] = batch, 0

    def of(self, worker: int) -> tuple[int, int]:
        """The batch that a worker was at last, -1 where it had come to none; and which sample in it, from 0."""
        return self._at[2 * worker], self._at[2 * worker + 1]
