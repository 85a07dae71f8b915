"""Going on in the middle of an epoch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from loguru import logger

from pipeline.data.limits import Limited
from pipeline.data.seeded_loader import SeededLoader
from pipeline.errors import DataError


def after(loader: Any, taken: int) -> Any:
    """The batches of a pass that come after the first ``taken``.

    Of a map-style dataset these are not fetched. Of anything else they are read again, and left out.
    """
    if not taken:
        return loader
    if isinstance(loader, Limited):
        return Limited(after(loader.loader, taken), max(0, loader.count - taken))
    if isinstance(loader, SeededLoader) and not loader.streams:
        return loader.after(taken)
    return _ReadAgain(loader, taken)


class _ReadAgain:
    """Reads the first batches of a loader, and gives the others."""

    def __init__(self, loader: Any, taken: int) -> None:
        self.loader, self.taken = loader, taken

    def __iter__(self) -> Iterator[Any]:
        logger.warning(f"{self.taken} batches of the epoch are read again, to go on after them: a stream has no index")
        batches: Iterator[Any] = iter(self.loader)
        found = sum(1 for _ in islice(batches, self.taken))
        if found < self.taken:
            raise DataError(
                f"the epoch has {found} batches, and {self.taken} of them were trained on before; go on with the data "
                "and batch size of the run that is resumed"
            )
        return batches

    def __len__(self) -> int:
        return max(0, len(self.loader) - self.taken)
