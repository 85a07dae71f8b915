"""The one dict that all five stages share, and the one table of the keys that the framework puts there."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import Any, ClassVar, NamedTuple, Protocol, Self

from pipeline.errors import ContextError, StageError, nearest


class EngineMode(Enum):
    """Where a runner runs; the names and numbers are PaddleRec's."""

    SINGLE = 1
    CLUSTER = 2
    LOCAL_CLUSTER = 3


# Stage -> the method that the trainer calls, in the order in which they run.
STAGES = {
    "instance": "instance",
    "network": "build_network",
    "startup": "startup",
    "runner": "run",
    "terminal": "terminal",
}

# Status -> the stage to which it leads.
STATUSES = {
    "uninit": "instance",
    "network_pass": "network",
    "startup_pass": "startup",
    "train_pass": "runner",
    "terminal_pass": "terminal",
}


class PipelineStage(Protocol):
    """What the trainer needs of a stage; the base classes are in ``stages/base.py``."""

    reads: ClassVar[tuple[str, ...]]
    writes: ClassVar[tuple[str, ...]]

    @classmethod
    def from_context(cls, context: Context, **args: Any) -> Self:
        """Build the stage; ``args`` are the ``<stage>_args`` of the runner."""


class Batches(Iterator[Any], Protocol):
    """The batches of a pass."""

    @property
    def done(self) -> int:
        """How many batches are done, those before a resume included."""

    @property
    def numbers(self) -> dict[str, float]:
        """``loss`` and what was logged; empty until the pass is over."""

    def close(self) -> None:
        """End the pass."""


class TrainingLoop(Protocol):
    """What the context needs of the loop of a runner stage; it is in ``training/loop.py``."""

    resuming: bool

    def epochs(self, count: int | None) -> Iterator[int]:
        """As ``Context.epochs``."""

    def batches(self, phase: Any, *, count: int | None, repeat: bool) -> Batches:
        """As ``Context.batches``."""

    def validate(self, phase: Any) -> dict[str, Any]:
        """As ``Context.validate``."""

    def save(self) -> None:
        """As ``Context.save``."""


def base_of(stage: str) -> str:
    """The class path of a stage's base class."""
    return f"pipeline.stages.base:{stage.capitalize()}Base"


class ContextKey(NamedTuple):
    """A key that the framework sets: its type and meaning, and who writes it (``trainer`` or a stage)."""

    name: str
    type: str
    writer: str
    meaning: str


KEYS: tuple[ContextKey, ...] = (
    ContextKey("status", "str", "trainer", "the stage to enter next; a stage that writes it jumps or repeats"),
    ContextKey("is_exit", "bool", "trainer", "True ends the run after this stage or training step; terminal still runs"),
    ContextKey("config_yaml", "str | None", "trainer", "path of the config file; None for a dict"),
    ContextKey("config", "Config", "trainer", "the resolved config: `get(address, default)`"),
    ContextKey("env", "dict", "trainer", "the plain dict of the config; `env['phase']` holds the runner's phases"),
    ContextKey("runner_name", "str", "trainer", "name of the runner that is running"),
    ContextKey("runner", "RunnerSchema", "trainer", 'the runner\'s settings, typed: `context["runner"].epochs`'),
    ContextKey("phases", "list[dict]", "trainer", "the phases of this runner, in order"),
    ContextKey("hyper_parameters", "dict", "trainer", "the config's `hyper_parameters`"),
    ContextKey("engine", "EngineMode", "trainer", "SINGLE, LOCAL_CLUSTER or CLUSTER"),
    ContextKey("is_fleet", "bool", "trainer", "whether several processes train together"),
    ContextKey("fleet_mode", "str", "trainer", "how several processes train together; '' for a single one"),
    ContextKey("is_infer", "bool", "trainer", "whether the runner's class is `infer`"),
    ContextKey("device", "torch.device", "trainer", "where models and batches go"),
    ContextKey("rank", "int", "trainer", "number of this process among all, from 0"),
    ContextKey("local_rank", "int", "trainer", "number of this process on its machine, from 0"),
    ContextKey("world_size", "int", "trainer", "how many processes there are"),
    ContextKey("hooks", "pluggy.HookRelay", "trainer", "calls the plugins: `hooks.before_epoch(context=context)`"),
    ContextKey("run_dir", "Path", "trainer", "the run directory"),
    ContextKey("checkpointer", "Checkpointer", "trainer", "saves and loads this runner's checkpoints"),
    ContextKey(
        "train_state", "dict", "trainer",
        "{iteration, update, epoch, samples, phase_index}, all counted from 0; of an infer runner, those of its checkpoint",
    ),
    ContextKey(
        "checkpoints", "dict", "trainer",
        "of an infer runner: path -> phase -> {metric: value} of each checkpoint that it evaluates; startup loads the first",
    ),
    ContextKey("resources", "ExitStack", "trainer", "what is closed at the end, whatever happens, last opened first"),
    ContextKey("dataset", "dict", "network", "dataset name -> loader"),
    ContextKey("model", "dict", "network", "phase name -> {model, brain, optim_schedulers, updater}"),
    ContextKey("current_epoch", "int", "runner", "the epoch that is running, from 0"),
    ContextKey("metrics", "dict", "runner", "the newest numbers: phase name -> {metric: value}"),
    ContextKey("best", "dict | None", "runner", "with `keep_best`: {metric, mode, value, iteration}, or None before any"),
    ContextKey("error", "BaseException", "trainer", "what ended the run, after a failure"),
)  # fmt: skip
# The counters of ``train_state``.
TRAIN_STATE = ("iteration", "update", "epoch", "samples", "phase_index")
# Key of the framework -> who writes it.
WRITERS = {key.name: key.writer for key in KEYS}


class Access(NamedTuple):
    """One use of a key: by which stage, at ``file:line``, ``action`` being ``read`` or ``write``."""

    stage: str
    key: str
    action: str
    where: str


class Context(dict[str, Any]):
    """The shared dict, which remembers who read and wrote which key.

    The record is kept beside the data, never in it, and each (stage, key, action, place) once, so it does not grow
    with the number of steps. A loop works on locals and pays nothing.

    Attributes:
        stage: name of what is running: ``trainer`` or one of the five stages; the trainer sets it.
        accesses: every use so far, in order.
        wake: called when ``is_exit`` is written; a training loop sets it, so that it ends after its step.
        loop: the loop of a runner stage that trains; None elsewhere.
    """

    def __init__(self, *args: Any, **values: Any) -> None:
        super().__init__()
        self.stage = "trainer"
        self.accesses: dict[Access, None] = {}
        self.wake: Callable[[], object] = _nothing
        self.loop: TrainingLoop | None = None
        self._wrote: set[str] = set()
        self.update(*args, **values)

    def epochs(self, count: int | None = None) -> Iterator[int]:
        """In the runner stage: the epochs that are left, of ``count`` or up to the runner's limits."""
        return self._loop("epochs").epochs(count)

    def batches(self, phase: Any, *, count: int | None = None, repeat: bool = False) -> Batches:
        """In the runner stage: one pass over the data of a phase, an iterator of batches on their device.

        Args:
            phase: its name, or ``context["model"][name]``.
            count: how many batches end the pass, those before a resume included; None: the data does.
            repeat: whether it begins again at the end of the data, in a new order.
        """
        return self._loop("batches").batches(phase, count=count, repeat=repeat)

    def validate(self, phase: Any = None) -> dict[str, Any]:
        """In the runner stage: validate a phase; its numbers, with ``valid_`` before their names.

        Without a phase: phase -> numbers, of each that has validation data.
        """
        return self._loop("validate").validate(phase)

    def save(self) -> None:
        """In the runner stage: save a checkpoint; in the body of a batch, when the next one is asked for."""
        self._loop("save").save()

    @property
    def resuming(self) -> bool:
        """Whether the runner stage has not come yet to where the checkpoint was saved with which it goes on."""
        return self.loop is not None and self.loop.resuming

    def _loop(self, method: str) -> TrainingLoop:
        if self.loop is None:
            what = f"context.{method} was called by {self.stage}"
            raise StageError(f"{what}, and only a runner stage that trains has a loop; call it there")
        return self.loop

    def enter(self, stage: str) -> None:
        """From now on, uses count as ``stage``'s."""
        self.stage = stage
        self._wrote = set()

    def wrote(self, key: str) -> bool:
        """Whether the stage that runs now has written ``key``, whatever the value."""
        return key in self._wrote

    def record(self) -> list[dict[str, str]]:
        """The uses as plain data, for ``context.json``."""
        return [access._asdict() for access in self.accesses]

    def _note(self, keys: Iterable[str], action: str) -> str:
        frame = sys._getframe(2)
        while frame.f_code.co_filename == __file__ and frame.f_back:
            frame = frame.f_back
        where = f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
        for key in keys:
            self.accesses[Access(self.stage, key, action, where)] = None
            if action == "write":
                self._wrote.add(key)
                if key == "is_exit":
                    self.wake()
        return where

    def __getitem__(self, key: str) -> Any:
        """The value; a ContextError says who read a missing key and who should have written it."""
        where = self._note((key,), "read")
        if not dict.__contains__(self, key):
            raise ContextError(self._missing(key, where))
        return super().__getitem__(key)

    def _missing(self, key: str, where: str) -> str:
        written = ", ".join(self) or "nothing"
        owed = f" (it is {WRITERS[key]}'s to write)" if key in WRITERS else ""
        place = "here" if WRITERS.get(key) == self.stage else "in an earlier stage"
        hint = (key not in WRITERS and nearest(key, self)) or f"; write it {place}: context['{key}'] = …"
        return f"context['{key}'] was read by {self.stage} ({where}) but nothing wrote it{owed}; written so far: {written}{hint}"

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or ``default``."""
        self._note((key,), "read")
        return super().get(key, default)

    def peek(self, key: str, default: Any = None) -> Any:
        """The value, or ``default``, as the trainer looks at what a stage has written: it counts as nobody's read."""
        return super().get(key, default)

    def put_back(self, key: str, value: Any) -> None:
        """Undo what a stage has written: it counts as nobody's write."""
        super().__setitem__(key, value)

    def __contains__(self, key: object) -> bool:
        """Whether the key is there; counts as a read."""
        self._note((str(key),), "read")
        return super().__contains__(key)

    def __setitem__(self, key: str, value: Any) -> None:
        """Write a key."""
        self._note((key,), "write")
        super().__setitem__(key, value)

    def __delitem__(self, key: str) -> None:
        """Remove a key; counts as a write."""
        where = self._note((key,), "write")
        if not dict.__contains__(self, key):
            raise ContextError(self._missing(key, where))
        super().__delitem__(key)

    def setdefault(self, key: str, default: Any = None) -> Any:
        """The value; the default is written first if there is none."""
        self._note((key,), "read" if dict.__contains__(self, key) else "write")
        return super().setdefault(key, default)

    def pop(self, key: str, *default: Any) -> Any:
        """Remove a key and return its value; counts as a write."""
        where = self._note((key,), "write")
        if not default and not dict.__contains__(self, key):
            raise ContextError(self._missing(key, where))
        return super().pop(key, *default)

    def update(self, *args: Any, **values: Any) -> None:
        """Write several keys."""
        new: dict[str, Any] = dict(*args, **values)
        self._note(new, "write")
        super().update(new)

    def _merge(self, other: Any, /) -> Any:
        """Write several keys: ``context |= {…}``."""
        self.update(other)
        return self

    __ior__ = _merge

    def __copy__(self) -> dict[str, Any]:
        """A plain dict, like ``copy()``: changes to it do not change the run."""
        return dict.copy(self)

    def __iter__(self) -> Iterator[str]:
        """The keys, without counting as a read of each."""
        return super().__iter__()


def _nothing() -> None:
    """Do nothing: no loop is training."""
