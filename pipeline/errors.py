"""The errors: what can go wrong, the form of the message, and the exit code.

Every message has the form ``<where>: <what is wrong, with the value>; <what to do>``. What a user's own code raises is
never wrapped in one of these: it keeps its type and its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum


class ExitCode(IntEnum):
    """The exit codes of the command line; the table in checkpoint/README.md is tested against this enum."""

    DONE = 0, "done"
    FAILED = 1, "a stage, plugin or data failed during the run"
    USAGE = 2, "wrong command line or config: nothing was run"
    DIVERGED = 5, "training diverged"
    BUG = 70, "a bug of ours"
    LOCKED = 73, "the run directory is in use"
    STORAGE = 74, "storage failed"
    STOPPED = 75, "stopped by SIGTERM, SIGUSR1 or SIGHUP after saving"
    NO_CHECKPOINT = 78, "no valid checkpoint to resume from"
    INTERRUPTED = 130, "interrupted by SIGINT (Ctrl-C)"
    TERMINATED = 143, "ended at once by a second SIGTERM or SIGUSR1"

    meaning: str

    def __new__(cls, code: int, meaning: str) -> ExitCode:
        """Give the number its meaning."""
        member = int.__new__(cls, code)
        member._value_ = code
        member.meaning = meaning
        return member


class PipelineError(Exception):
    """An error that a config, workspace, file or command line caused; shown as one message without a traceback.

    Attributes:
        exit_code: what the command line leaves with when this error ends it.
    """

    exit_code: ExitCode = ExitCode.FAILED


@dataclass(frozen=True)
class Fault:
    """One mistake in a config or in a file that it names.

    Attributes:
        where: the file (or override, or base) that holds it, as the user would type it.
        line: counted from 1; 0 where there is no line (an override, a dict).
        column: counted from 1; 0 where there is none.
        address: the dotted address of the value, or ``""``.
        message: what is wrong, with the value, and what to do.
        source: the source line itself, for the caret; ``""`` where there is none.
    """

    where: str
    line: int
    column: int
    address: str
    message: str
    source: str = ""

    def __str__(self) -> str:
        """``config.yaml:12:5: address: message`` with the source line and a caret under it."""
        place = ":".join(str(part) for part in (self.where, self.line, self.column) if part)
        text = f"{place}: {self.address}: {self.message}" if self.address else f"{place}: {self.message}"
        if not self.source:
            return text
        visible = self.source.expandtabs(1).rstrip()
        return f"{text}\n    {visible}\n    {' ' * (self.column - 1)}^"

    def as_dict(self) -> dict[str, str | int]:
        """The same as data, for ``--json``."""
        return asdict(self)


class ConfigError(PipelineError):
    """One or more faults found before anything ran.

    Attributes:
        faults: all of them, in the order of the file.
    """

    exit_code = ExitCode.USAGE

    def __init__(self, faults: Sequence[Fault] | str) -> None:
        self.faults = [Fault(faults, 0, 0, "", "")] if isinstance(faults, str) else list(faults)
        super().__init__(faults if isinstance(faults, str) else "\n".join(str(fault) for fault in self.faults))


class ClassPathError(PipelineError):
    """A class path that leads to no usable class.

    Attributes:
        user_error: what the user's file raised when it was imported, its traceback cut to the user's frames; or None.
    """

    exit_code = ExitCode.USAGE

    def __init__(self, message: str, user_error: BaseException | None = None) -> None:
        super().__init__(message)
        self.user_error = user_error


class ContextError(PipelineError, KeyError):
    """A context key that nothing wrote, or that a stage declared but did not write. Also a KeyError."""

    def __str__(self) -> str:
        """The message itself; KeyError would show its repr."""
        return str(self.args[0])


class PluginError(PipelineError):
    """A plugin that cannot be loaded."""

    exit_code = ExitCode.USAGE


# Characters of a message.
LONGEST = 3000


class CheckpointError(PipelineError):
    """A checkpoint that is missing, damaged or does not fit the model.

    Its message may have names that somebody else has put there: control characters are escaped, and it has an end.
    """

    def __init__(self, message: str) -> None:
        shown = message if len(message) <= LONGEST else f"{message[: LONGEST - 500]} … {message[-500:]}"
        super().__init__(printable(shown, keep="\n\t"))


class NoCheckpointError(CheckpointError):
    """Checkpoints were saved, and none of them is valid any more."""

    exit_code = ExitCode.NO_CHECKPOINT


class FormatError(CheckpointError):
    """A checkpoint that cannot be resumed, because its training state has the format of another version."""


class DataError(PipelineError):
    """Data that is missing, damaged or does not fit the model."""


class StageError(PipelineError):
    """A stage that broke the rules of the run, such as an unknown status or endless repetition."""


class ConcurrentRunError(StageError):
    """A training that was started while another one was running in the same process."""


class DivergedError(PipelineError, ValueError):
    """Training that produced more non-finite losses than ``nonfinite_patience`` allows.

    It is a ValueError too, as in SpeechBrain.
    """

    exit_code = ExitCode.DIVERGED


class LockedError(PipelineError):
    """A run directory that another process is using."""

    exit_code = ExitCode.LOCKED


class StorageError(PipelineError):
    """A write that the storage refused."""

    exit_code = ExitCode.STORAGE


def printable(text: object, keep: str = "") -> str:
    """A text with its control characters escaped, but for some: a name in a file of others must not write to a terminal."""
    return "".join(part if part.isprintable() or part in keep else ascii(part)[1:-1] for part in str(text))


def nearest(name: str, candidates: Iterable[str]) -> str:
    """`` did you mean 'x'?`` for the candidate nearest to ``name``, with its leading ``;``, or ``""`` if none is near."""
    known = {candidate.lower(): candidate for candidate in candidates}
    matches = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.6)
    return f"; did you mean '{known[matches[0]]}'?" if matches else ""


def no_loss(name: str, numbers: Iterable[str]) -> str:
    """Why a loss that is watched is not among the numbers of an evaluation, with its leading ``;``; ``""``: it is no loss."""
    why = "; compute_objectives returned none there: return one, or watch another number"
    return why if name.endswith("loss") and not any(number.endswith("loss") for number in numbers) else ""


def one_of(name: str, candidates: Iterable[str]) -> str:
    """The remedy for a wrong name: the nearest right one, else all of them, with its leading ``;``."""
    names = sorted(candidates)
    return nearest(name, names) or (f"; known: {', '.join(names)}" if names else "; there are none")
