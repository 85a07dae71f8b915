"""What is said where an object does not take the state that a checkpoint has of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pipeline.errors import CheckpointError, printable


@contextmanager
def fitting(where: str, place: str, remedy: str) -> Iterator[None]:
    """Say which state of a checkpoint it is, where an object does not take it.

    Args:
        where: the checkpoint.
        place: of the state.
        remedy: what to do.

    Raises:
        CheckpointError: the block has raised what a wrong state leads to.
    """
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {place}: {error}") from error
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
        raise CheckpointError(f"{where}: the state of {place} does not fit it ({error}); {remedy}") from error


@contextmanager
def loading(place: str) -> Iterator[None]:
    """Say which state it is that an object of the user's does not take; what its own code raises keeps its traceback."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{place}: {error}") from error
    except Exception as error:
        error.add_note(printable(f"while it was given its state of {place}"))
        raise
