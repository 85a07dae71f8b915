"""What goes wrong when a config is tried out: each thing that fails is a fault of the config, and they are collected."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

from pipeline.config.load import Config
from pipeline.config.tree import Origin
from pipeline.errors import ClassPathError, ConfigError, Fault, PipelineError
from pipeline.user_code import user_frames

_T = TypeVar("_T")
_ADDRESSED = re.compile(r"(?:.*?: )??((?:runner|dataset|phase|hyper_parameters)\.[\w.-]+|plugins): (.*)", re.DOTALL)
"""How our errors say where in the config: ``config.yaml:12: phase.ctr.model: …``."""


class Problem(NamedTuple):
    """A fault, and what the user's own code raised, its traceback cut to his frames; None where it raised nothing."""

    fault: Fault
    error: BaseException | None = None


class CannotTellError(Exception):
    """Something fails for a reason that need not hold in a run, and so is no problem.

    Args:
        reason: what that is.
        error: how it fails.
    """

    def __init__(self, reason: str, error: BaseException | None = None) -> None:
        failure = f": {type(error).__name__}: {error}".splitlines()[0] if error else ""
        super().__init__(f"cannot tell ({reason}){failure}")


class Problems:
    """The problems of one config.

    Attributes:
        found: all of them, each once.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.found: list[Problem] = []

    def attempt(
        self,
        address: str,
        act: Callable[[], _T],
        failing: str = "cannot be built",
        remedy: str = "mend it, or its arguments",
        origin: Origin | None = None,
    ) -> _T | None:
        """What ``act`` returns; None where it fails, which is then a problem.

        Args:
            address: where the config names what is tried.
            act: tries it.
            failing: what it means that it fails.
            remedy: what to do then.
            origin: the place of the address, where there are several.

        Raises:
            CannotTellError: it fails for a reason that need not hold in a run.
        """
        try:
            return act()
        except CannotTellError:
            raise
        except (Exception, SystemExit) as error:
            self.add(error, address, failing, remedy, origin)
        return None

    def add(self, error: BaseException, address: str, failing: str, remedy: str, origin: Origin | None = None) -> None:
        """Note an error; the arguments are those of ``attempt``."""
        origin = origin or self.config.origin(address)
        if isinstance(error, PipelineError):
            problem = self._told(error, address, origin)
        else:
            message = f"{failing}: {type(error).__name__}: {error}{self._place(error)}; {remedy}"
            frames = user_frames(error.__traceback__) or error.__traceback__
            problem = Problem(origin.fault(address, message), error.with_traceback(frames))
        if problem.fault not in [each.fault for each in self.found]:
            self.found.append(problem)

    def _told(self, error: PipelineError, address: str, origin: Origin) -> Problem:
        """An error of ours says itself what is wrong, and often where."""
        if isinstance(error, ConfigError) and error.faults[0].address:
            return Problem(error.faults[0])
        message = str(error).removeprefix(f"{origin}: ")
        if addressed := _ADDRESSED.fullmatch(message):
            origin = origin if addressed[1] == address else self.config.origin(addressed[1])
            address, message = addressed.groups()
        return Problem(origin.fault(address, message), error.user_error if isinstance(error, ClassPathError) else None)

    def _place(self, error: BaseException) -> str:
        """The last line of the user's code that an error came through."""
        frames = traceback.extract_tb(error.__traceback__)
        own = [each for each in frames if Path(each.filename) in self.config.sources]
        return f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""
