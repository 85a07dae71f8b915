"""Work beside the training, one piece at a time, whose failure is never lost."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable

from loguru import logger


class Background:
    """A thread for one piece of work; the interpreter ends only when it is done."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Begin a piece of work, once the one before is done.

        Raises:
            BaseException: what the one before raised.
        """
        self.wait()
        self._thread = threading.Thread(target=self._run, args=[work], name="checkpoint", daemon=False)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the work is done.

        Raises:
            BaseException: what it raised, once.
        """
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
            self._thread = None
        self.check()

    def check(self) -> None:
        """Raise what the work raised, once; it may still be under way."""
        error, self._error = self._error, None
        if error is not None:
            atexit.unregister(self._tell)
            raise error

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error
            # In case the process ends without looking.
            atexit.register(self._tell)

    def _tell(self) -> None:
        logger.error(f"in the background: {self._error}")
