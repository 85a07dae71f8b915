"""Counts the samples of a batch."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from loguru import logger

from pipeline.data.batch import count_targets, differing_lengths, is_countable, raise_no_samples
from pipeline.distributed.world import current_world
from pipeline.errors import DataError


class SampleCounter:
    """Counts the samples of a batch, with a function of the user or with a default.

    Args:
        default: counts the samples of a batch if neither a subclass of Brain nor the config does.
        method: the method ``count_samples`` of a subclass of Brain, with its name for messages;
            None if the subclass does not define it.

    Attributes:
        count: returns how many samples a batch has. It returns 0 as well if it finds nothing to
            count. This is an attribute and not a method, because the training loop calls it for
            each batch: after the first batch it is usually the default itself, without a method
            around it.
    """

    def __init__(
        self,
        default: Callable[[Any], int],
        method: tuple[Callable[[Any], Any], str] | None,
    ) -> None:
        self._default = default
        # The function of the user, with its name for messages.
        self._user_function = method
        self.count: Callable[[Any], int] = self._count_by_user if method else self._count_first_batch
        # For messages: the phase, and the key in the config that would name a function.
        self._where = ""
        self._key = ""

    def name_phase(self, phase: str) -> None:
        """Name the phase in messages.

        Args:
            phase: its name; empty if there is no phase.
        """
        self._where = f"phase.{phase}: " if phase else ""
        self._key = f"phase.{phase}.count_samples" if phase else ""

    def count_with(self, function: Callable[[Any], Any]) -> None:
        """Count the samples of each batch with the function that the config names."""
        self._user_function = function, "count_samples"
        self._default = self._count_by_user
        self.count = self._count_by_user

    def default_count(self, batch: Any) -> int:
        """Return how many samples a batch has, without asking a method of a subclass.

        The function of the config counts if there is one, and the default otherwise.
        """
        return self._default(batch)

    def is_countable(self, batch: Any) -> bool:
        """Return whether a count of 0 means that the batch has no samples."""
        return self._user_function is not None or is_countable(batch)

    def check_countable(self, batch: Any) -> int:
        """Return 0 for a batch for which ``count`` has returned 0.

        Raises:
            DataError: nothing in the batch can be counted.
        """
        if not self.is_countable(batch):
            raise_no_samples(batch)
        return 0

    def _count_by_user(self, batch: Any) -> int:
        """Return what the function of the user returns for a batch, as an int.

        Raises:
            DataError: the returned value is not a whole number of 0 or more.
        """
        if self._user_function is None:
            return self._default(batch)
        function, name = self._user_function
        returned = function(batch)
        # any() instead of sum() would count each batch as 1.
        is_bool = type(returned) is bool or getattr(returned, "dtype", None) is torch.bool
        try:
            # This accepts numbers of numpy and tensors with one element, too. A tensor on a GPU
            # makes this wait.
            samples = operator.index(returned)
        except TypeError:
            samples = -1
        if is_bool or samples < 0:
            what = f"{self._where}{name} returned {returned!r}"
            raise DataError(f"{what}; return how many samples the batch has, an int of 0 or more")
        return samples

    def _count_first_batch(self, batch: Any) -> int:
        """Count a batch, and warn if its input and target differ in their first dimension.

        After that, ``count`` is the function that only counts.
        """
        self.count = self._default
        samples = self._default(batch)
        difference = differing_lengths(batch) if current_world().is_main else ""
        if difference:
            source = "target" if self._default is count_targets else "first tensor"
            counted = f"it counts as {samples} samples, by its {source}"
            remedy = "define count_samples(batch) in the Brain"
            if self._key:
                remedy = f"name a function of the batch that counts them: {self._key}"
            logger.warning(f"{self._where}{difference}; {counted}; if that is wrong, {remedy}")
        return samples
