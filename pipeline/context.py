"""The one dict that all five stages share, and the one table of the keys that the framework puts there."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, NamedTuple, NoReturn, Protocol, Self, cast, overload

from pipeline.config.schema import RunnerSchema
from pipeline.errors import ContextError, StageError, nearest, one_of

if TYPE_CHECKING:
    from contextlib import ExitStack
    from pathlib import Path

    import pluggy
    import torch
    from typing_extensions import TypeVar

    # What ``Context.get`` returns where the key is missing.
    D = TypeVar("D", default=None)
    V = TypeVar("V")
    # A key of a workspace. Beside a plain str, pyright would not complete those of the framework.
    Own = TypeVar("Own", bound=str)


class EngineMode(int, Enum):
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


class ConfigView(Protocol):
    """What a stage needs of the resolved config; it is in ``config/load.py``."""

    @property
    def workspace(self) -> Path | Any:
        """The folder that ``{workspace}`` stands for; None for a config in Python without one, which few have."""

    def phases(self, runner: Any) -> list[Any]:
        """The items of ``phase:`` that a runner trains, in their order, as objects with attributes."""

    def get(self, address: str, default: Any = None) -> Any:
        """The plain value at a dotted address such as ``dataset.train_data.batch_size``."""

    def origin(self, address: str) -> object:
        """Where the value at an address was written, as file, line and column."""


# What ``context["runner"]`` is: the keys of a runner; see ``pipeline show``.
RunnerSettings = RunnerSchema


class CheckpointerView(Protocol):
    """What stages and plugins need of the checkpointer; it is in ``checkpoint/run_checkpointer.py``."""

    def add_recoverable(self, name: str, recoverable: Any) -> None:
        """Keep the state of an object in each checkpoint, and restore it when the run is resumed."""

    def all(self) -> list[Path]:
        """The checkpoints, by step."""

    def newest(self) -> Path | None:
        """The checkpoint of the highest step; None if there is none."""

    def best(self, metric: str, mode: str) -> Path | None:
        """The checkpoint with the highest (``mode`` max) or lowest (min) number of a name."""

    def load_weights(self, path: str | Path, models: Mapping[str, Phase]) -> None:
        """Load the weights of a checkpoint into every phase, or those of a file into the only phase."""


class BrainView(Protocol):
    """What a runner stage needs of the Brain of a phase; it is in ``brain/brain.py``.

    What a class of your own has besides is on ``phase.model``.
    """

    modules: torch.nn.ModuleDict

    def compute_forward(self, batch: Any, stage: Any) -> Any:
        """The predictions for a batch."""

    def compute_objectives(self, predictions: Any, batch: Any, stage: Any) -> Any:
        """The loss of the predictions, or several by name."""

    def fit_batch(self, batch: Any) -> torch.Tensor:
        """Train on one batch; its loss, detached."""

    def evaluate_batch(self, batch: Any, stage: Any) -> torch.Tensor:
        """The loss of a batch, without training."""

    def log(self, name: str, value: torch.Tensor | float, batch_size: int | None = None) -> None:
        """Report a number, averaged over the samples of the pass."""


class UpdaterView(Protocol):
    """What a runner stage needs of the updater of a phase; it is in ``updater/updater.py``."""

    def update(self, batch: Any) -> Any:
        """Train on one batch; its loss, several by name, or None."""


class Phase(dict[str, Any]):
    """What the network stage builds for a phase: a dict whose items are attributes too.

    Args:
        name: of the phase.
        entry: ``model``, the object that the phase's ``model`` names; ``brain``, the Brain that trains it; ``updater``;
            and ``optim_schedulers`` by name.
    """

    def __init__(self, name: str, entry: Mapping[str, Any]) -> None:
        super().__init__(entry)
        self.name = name

    def __missing__(self, key: str) -> NoReturn:
        """Raise for a key that the network stage has not written."""
        keys = ", ".join(map(str, self)) or "nothing"
        what = f"context['model']['{self.name}'] has no '{key}', only {keys}"
        raise ContextError(f"{what}; the network stage has to write it, or replace the runner stage as well")

    @property
    def model(self) -> Any:
        """The object that the phase's ``model`` names: a Brain, or a module."""
        return self["model"]

    @property
    def brain(self) -> BrainView:
        """The Brain that trains it."""
        return cast("BrainView", self["brain"])

    @property
    def updater(self) -> UpdaterView:
        """Trains on one batch."""
        return cast("UpdaterView", self["updater"])

    @property
    def optim_schedulers(self) -> Mapping[str, Any]:
        """Name -> OptimScheduler: an optimizer and its learning rate."""
        return cast("Mapping[str, Any]", self["optim_schedulers"])


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


class WorldView(Protocol):
    """What stages and plugins need of the processes that train together; it is in ``distributed/world.py``."""

    rank: int
    size: int

    @property
    def is_main(self) -> bool:
        """Whether this is the process of rank 0."""

    def broadcast(self, value: V) -> V:
        """The value of rank 0."""

    def all_gather(self, value: V) -> list[V]:
        """The values of all processes, by rank."""

    def once_per_host(self, function: Callable[[], V]) -> V:
        """What a function returns that one process of each host calls, such as a download."""


class GradientsView(Protocol):
    """What the context needs of the gradients of a training; it is in ``checkpoint/gradients.py``."""

    def set_aside(self, reason: str, /) -> AbstractContextManager[Any]:
        """As ``Context.set_gradients_aside``."""


class TrainingLoop(Protocol):
    """What the context needs of the engine of a runner stage: a ``PassEngine`` or an ``IterationEngine``."""

    def wake(self) -> object:
        """As ``Context.wake``."""

    @property
    def resuming(self) -> bool:
        """As ``Context.resuming``."""

    def epochs(self, count: int | None) -> Iterator[int]:
        """As ``Context.epochs``."""

    def batches(self, phase: str | Phase, *, count: int | None, repeat: bool) -> Batches:
        """As ``Context.batches``."""

    def validate(self, phase: str | Phase | None) -> dict[str, Any]:
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


# The dozen that one meets first.
FIRST_KEYS: tuple[ContextKey, ...] = (
    ContextKey("runner", "RunnerSettings", "trainer", 'the runner\'s settings: `context["runner"].epochs`'),
    ContextKey("config", "ConfigView", "trainer", "the resolved config: `get(address, default)`"),
    ContextKey("hyper_parameters", "dict[str, Any]", "trainer", "the config's `hyper_parameters`"),
    ContextKey("device", "torch.device", "trainer", "where models and batches go"),
    ContextKey("run_dir", "Path", "trainer", "the run directory"),
    ContextKey("is_infer", "bool", "trainer", "whether the runner's class is `infer`"),
    ContextKey("train_state", "dict[str, int]", "trainer",
               "{iteration, update, epoch, samples, phase_index}, all counted from 0; of an infer runner, those of its checkpoint"),
    ContextKey("checkpointer", "CheckpointerView", "trainer", "this runner's checkpoints, and what is kept in them"),
    ContextKey("dataset", "dict[str, Any]", "network", "dataset name -> loader"),
    ContextKey("model", "dict[str, Phase]", "network", "phase name -> {model, brain, optim_schedulers, updater}"),
    ContextKey("current_epoch", "int", "runner", "the epoch that is running, from 0"),
    ContextKey("metrics", "dict[str, dict[str, float]]", "runner", "the newest numbers: phase name -> {metric: value}"),
)  # fmt: skip
# What few stages need, and what PaddleRec's code does.
OTHER_KEYS: tuple[ContextKey, ...] = (
    ContextKey("status", "str", "trainer", "the stage to enter next; a stage that writes it jumps or repeats"),
    ContextKey("is_exit", "bool", "trainer", "True ends the run after this stage or training step; terminal still runs"),
    ContextKey("resources", "ExitStack", "trainer", "what is closed at the end, whatever happens, last opened first"),
    ContextKey("hooks", "pluggy.HookRelay", "trainer", "calls the plugins: `hooks.before_epoch(context=context)`"),
    ContextKey("best", "dict[str, Any] | None", "runner", "with `keep_best`: {metric, mode, value, iteration}, or None before any"),
    ContextKey("checkpoints", "dict[Path, dict[str, Any]]", "trainer",
               "of an infer runner: path -> phase -> {metric: value} of each checkpoint that it evaluates; startup loads the first"),
    ContextKey("error", "BaseException", "trainer", "what ended the run, after a failure"),
    ContextKey("config_yaml", "str | None", "trainer", "path of the config file; None for a dict"),
    ContextKey("env", "dict[str, Any]", "trainer", "the plain dict of the config; `env['phase']` holds the runner's phases"),
    ContextKey("runner_name", "str", "trainer", "name of the runner that is running"),
    ContextKey("phases", "list[dict[str, Any]]", "trainer", "the phases of this runner, in order"),
    ContextKey("engine", "EngineMode", "trainer", "SINGLE, LOCAL_CLUSTER or CLUSTER"),
    ContextKey("is_fleet", "bool", "trainer", "whether several processes train together"),
    ContextKey("fleet_mode", "str", "trainer", "how several processes train together; '' for a single one"),
    ContextKey("rank", "int", "trainer", "number of this process among all, from 0"),
    ContextKey("local_rank", "int", "trainer", "number of this process on its machine, from 0"),
    ContextKey("world_size", "int", "trainer", "how many processes there are"),
    ContextKey("world", "WorldView", "trainer", "what the processes tell each other; there with one process too"),
)  # fmt: skip
KEYS = FIRST_KEYS + OTHER_KEYS
# The counters of ``train_state``.
TRAIN_STATE = ("iteration", "update", "epoch", "samples", "phase_index")
# Key of the framework -> who writes it.
WRITERS = {key.name: key.writer for key in KEYS}


# What a plugin may ask a training for, by ``Context.request``.
CHECKPOINT: Final = "checkpoint"
VALIDATION: Final = "validation"


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
        wake: called when ``is_exit`` is written, and by ``stop`` and ``request``; in a block of ``waking``, it makes the loop
            look after its step.
        ask: what ``stop`` and ``request`` go to where several processes train, until they agree; None: they count at once.
        exits: whether several processes that train have agreed to end for ``is_exit``.
        stop_reason: what ``stop`` was called with first, be it before a resume; None: nobody has called it.
        is_last_validation: whether a validation is running that no interval and nobody has asked for: it judges the weights
            with which the training ends. A run with a higher limit would not make it.
        loop: the loop of a runner stage that trains; None elsewhere.
        requests: what ``request`` was called with and is not done yet.
        running_hook: says which hook of a plugin is running, and where it is; None: none is.
        set_gradients_aside: makes a block in which the trained parameters have no gradients, for what its argument names.
        also_trained: returns modules and optimizers, by name, that are trained and not in ``context["model"]``.
    """

    def __init__(self, *args: Any, **values: Any) -> None:
        super().__init__()
        self.stage = "trainer"
        self.accesses: dict[Access, None] = {}
        self.wake: Callable[[], object] = _nothing
        self.ask: Callable[[str, Any], object] | None = None
        self.exits = False
        self.stop_reason: str | None = None
        self.is_last_validation = False
        self.loop: TrainingLoop | None = None
        self.requests: set[str] = set()
        self.running_hook: Callable[[], str | None] = _nothing
        self.set_gradients_aside: Callable[[str], AbstractContextManager[Any]] = nullcontext
        self.also_trained: Callable[[], Mapping[str, Any]] = dict
        self._wrote: set[str] = set()
        self.update(*args, **values)

    @classmethod
    def for_training(
        cls,
        values: Mapping[str, Any],
        gradients: Callable[[Context], GradientsView],
        running_hook: Callable[[], str | None] | None = None,
    ) -> Self:
        """Return the context of a training.

        Args:
            values: its keys.
            gradients: makes what sets gradients aside, from the context.
            running_hook: says which hook of a plugin is running; None: there are no plugins.
        """
        context = cls(values)
        context.set_gradients_aside = gradients(context).set_aside
        if running_hook:
            context.running_hook = running_hook
        return context

    def epochs(self, count: int | None = None) -> Iterator[int]:
        """In the runner stage: the epochs that are left, of ``count`` or up to the runner's limits."""
        return self._loop("epochs").epochs(count)

    def batches(self, phase: str | Phase, *, count: int | None = None, repeat: bool = False) -> Batches:
        """In the runner stage: one pass over the data of a phase, an iterator of batches on their device.

        Args:
            phase: its name, or ``context["model"][name]``.
            count: how many batches end the pass, those before a resume included; None: the data does.
            repeat: whether it begins again at the end of the data, in a new order.
        """
        return self._loop("batches").batches(phase, count=count, repeat=repeat)

    def validate(self, phase: str | Phase | None = None) -> dict[str, Any]:
        """In the runner stage: validate a phase; its numbers, such as ``valid_loss``, or of several datasets ``test/loss``.

        Without a phase: phase -> numbers, of each that has validation data.
        """
        return self._loop("validate").validate(phase)

    def save(self) -> None:
        """In the runner stage: save a checkpoint; in the body of a batch, when the next one is asked for."""
        self._loop("save").save()

    def stop(self, why: str) -> None:
        """End this runner's training after the current step; the terminal stage and later runners run.

        It may be called anywhere: by a plugin, a stage, a loop of one's own. The weights are validated and saved, unless
        they just were, and the runner counts as done. An infer runner has no training that would end.

        Args:
            why: the reason, for the log and ``status.json``.
        """
        (self.ask or self.grant)("stop", why)

    def request(self, what: Literal["checkpoint", "validation"]) -> None:
        """Ask for a checkpoint, or for a validation of every phase that has validation data, after the current step.

        That is where what the runner's intervals say is done, and the validation comes first. A phase that was validated
        in this iteration is not validated again. It may be called in any hook; an infer runner does neither, and says so.

        Raises:
            ContextError: it is something else.
        """
        if what not in (CHECKPOINT, VALIDATION):
            unknown = f"context.request({what!r}): is nothing that a training can be asked for"
            raise ContextError(f"{unknown}{one_of(what, (CHECKPOINT, VALIDATION))}")
        (self.ask or self.grant)("request", what)

    def grant(self, what: str, value: Any) -> None:
        """From now on, what was asked for counts: a ``stop``, a ``request``, or an ``exit``."""
        if what == "request":
            self.requests.add(value)
        elif what == "exit":
            self.exits = True
            self.accesses[Access(*value)] = None
            self.put_back("is_exit", True)
        elif self.stop_reason is None:
            self.stop_reason = value
        self.wake()

    def clear_requests(self, *requests: str) -> None:
        """Forget requests that are done."""
        self.requests.difference_update(requests)

    def restore_requests(self, stop_reason: str | None, requests: Iterable[str] = ()) -> None:
        """Take the stop and the requests of a checkpoint, which were not done when it was saved."""
        self.stop_reason = stop_reason
        self.requests.update(requests)

    @contextmanager
    def stops_withdrawn(self) -> Iterator[None]:
        """In the block, a ``stop`` counts only until its end."""
        stop_reason = self.stop_reason
        yield
        self.stop_reason = stop_reason

    @contextmanager
    def asking_first(self, ask: Callable[[str, Any], object]) -> Iterator[None]:
        """In the block, ``stop`` and ``request`` only call ``ask``; what is agreed on counts with ``grant``."""
        self.ask = ask
        try:
            yield
        finally:
            self.ask = None

    @contextmanager
    def waking(self, wake: Callable[[], object]) -> Iterator[None]:
        """In the block, ``is_exit``, ``stop`` and ``request`` call ``wake``."""
        before = self.wake
        self.wake = wake
        try:
            yield
        finally:
            self.wake = before

    @contextmanager
    def running_loop(self, loop: TrainingLoop) -> Iterator[None]:
        """In the block, ``epochs``, ``batches``, ``validate`` and ``save`` are those of a loop.

        After an error it stays, so that the report can say what the batch was.
        """
        self.loop = loop
        with self.waking(loop.wake):
            yield
        self.loop = None

    @contextmanager
    def validating(self, *, last: bool) -> Iterator[None]:
        """A block in which a validation runs; ``last``: as in ``is_last_validation``."""
        self.is_last_validation = last
        try:
            yield
        finally:
            self.is_last_validation = False

    @contextmanager
    def training_also(self, find: Callable[[], Mapping[str, Any]]) -> Iterator[None]:
        """In the block, the modules and optimizers that a function returns are trained too."""
        self.also_trained = find
        try:
            yield
        finally:
            self.also_trained = dict

    def wishes(self) -> list[tuple[str, Any]]:
        """What counts now, as ``grant`` takes it."""
        stop = [] if self.stop_reason is None else [("stop", self.stop_reason)]
        return [*stop, *self.exit_wish(), *(("request", what) for what in sorted(self.requests))]

    def exit_wish(self) -> list[tuple[str, Any]]:
        """The ``is_exit`` among them, with the access that wrote it last."""
        written = [access for access in self.accesses if (access.key, access.action) == ("is_exit", "write")]
        return [("exit", written[-1])] if self.peek("is_exit") else []

    @property
    def resuming(self) -> bool:
        """Whether the runner stage has not come yet to where the checkpoint was saved with which it goes on."""
        return self.loop is not None and self.loop.resuming

    def _loop(self, method: str) -> TrainingLoop:
        if hook := self.running_hook():
            what = f"{hook} called context.{method}, which only the code of a runner stage may do, not a hook within it"
            remedy = f"write context.request('{CHECKPOINT}'), or '{VALIDATION}', which is done after the step"
            raise ContextError(f"{what}; {remedy}")
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
                if key == "is_exit" and self.ask is None:
                    self.wake()
        return where

    if TYPE_CHECKING:

        @overload
        def __getitem__(self, key: Literal["runner"]) -> RunnerSettings: ...
        @overload
        def __getitem__(self, key: Literal["config"]) -> ConfigView: ...
        @overload
        def __getitem__(self, key: Literal["hyper_parameters", "dataset", "env"]) -> dict[str, Any]: ...
        @overload
        def __getitem__(self, key: Literal["device"]) -> torch.device: ...
        @overload
        def __getitem__(self, key: Literal["run_dir"]) -> Path: ...
        @overload
        def __getitem__(self, key: Literal["is_infer", "is_exit", "is_fleet"]) -> bool: ...
        @overload
        def __getitem__(self, key: Literal["train_state"]) -> dict[str, int]: ...
        @overload
        def __getitem__(self, key: Literal["checkpointer"]) -> CheckpointerView: ...
        @overload
        def __getitem__(self, key: Literal["model"]) -> dict[str, Phase]: ...
        @overload
        def __getitem__(self, key: Literal["current_epoch", "rank", "local_rank", "world_size"]) -> int: ...
        @overload
        def __getitem__(self, key: Literal["metrics"]) -> dict[str, dict[str, float]]: ...
        @overload
        def __getitem__(self, key: Literal["status", "runner_name", "fleet_mode"]) -> str: ...
        @overload
        def __getitem__(self, key: Literal["resources"]) -> ExitStack: ...
        @overload
        def __getitem__(self, key: Literal["hooks"]) -> pluggy.HookRelay: ...
        @overload
        def __getitem__(self, key: Literal["best"]) -> dict[str, Any] | None: ...
        @overload
        def __getitem__(self, key: Literal["checkpoints"]) -> dict[Path, dict[str, Any]]: ...
        @overload
        def __getitem__(self, key: Literal["error"]) -> BaseException: ...
        @overload
        def __getitem__(self, key: Literal["config_yaml"]) -> str | None: ...
        @overload
        def __getitem__(self, key: Literal["phases"]) -> list[dict[str, Any]]: ...
        @overload
        def __getitem__(self, key: Literal["engine"]) -> EngineMode: ...
        @overload
        def __getitem__(self, key: Literal["world"]) -> WorldView: ...
        @overload
        def __getitem__(self, key: Own) -> Any: ...

    def __getitem__(self, key: str) -> Any:
        """The value; a ContextError says who read a missing key and who should have written it."""
        where = self._note((key,), "read")
        if not dict.__contains__(self, key):
            raise ContextError(self.explain_missing(key, where))
        return super().__getitem__(key)

    def explain_missing(self, key: str, where: str) -> str:
        """Return what a ContextError says of a key that is missing.

        Args:
            key: the key.
            where: which line has read it.
        """
        written = ", ".join(self) or "nothing"
        owed = f" (it is {WRITERS[key]}'s to write)" if key in WRITERS else ""
        place = "here" if WRITERS.get(key) == self.stage else "in an earlier stage"
        hint = (key not in WRITERS and nearest(key, self)) or f"; write it {place}: context['{key}'] = …"
        return f"context['{key}'] was read by {self.stage} ({where}) but nothing wrote it{owed}; written so far: {written}{hint}"

    if TYPE_CHECKING:

        @overload
        def get(self, key: Literal["dataset"], default: D = ...) -> dict[str, Any] | D: ...
        @overload
        def get(self, key: Literal["model"], default: D = ...) -> dict[str, Phase] | D: ...
        @overload
        def get(self, key: Literal["current_epoch"], default: D = ...) -> int | D: ...
        @overload
        def get(self, key: Literal["metrics"], default: D = ...) -> dict[str, dict[str, float]] | D: ...
        @overload
        def get(self, key: Literal["best"], default: D = ...) -> dict[str, Any] | D | None: ...
        @overload
        def get(self, key: Literal["error"], default: D = ...) -> BaseException | D: ...
        @overload
        def get(self, key: Own, default: Any = None) -> Any: ...

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
        self.pop(key)

    def setdefault(self, key: str, default: Any = None) -> Any:
        """The value; the default is written first if there is none."""
        self._note((key,), "read" if dict.__contains__(self, key) else "write")
        return super().setdefault(key, default)

    def pop(self, key: str, *default: Any) -> Any:
        """Remove a key and return its value; counts as a write."""
        where = self._note((key,), "write")
        if not default and not dict.__contains__(self, key):
            raise ContextError(self.explain_missing(key, where))
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
    """No loop is training, and no hook is running."""
