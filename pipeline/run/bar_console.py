"""The console on which progress bars are drawn."""

from __future__ import annotations

import sys

from rich.console import Console


class BarConsole(Console):
    """A console on stderr. If stderr cannot show a bar, the bar is lost and the training continues.

    Args:
        quiet: whether nothing is shown.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        super().__init__(stderr=True, quiet=quiet or not _can_draw(sys.stderr))

    def on_broken_pipe(self) -> None:
        """Show nothing more; rich would end the process."""
        self.quiet = True


def _can_draw(stream: object) -> bool:
    """Return whether rich can draw on a stream; a program may have closed or replaced it."""
    return hasattr(stream, "flush") and not getattr(stream, "closed", False)
