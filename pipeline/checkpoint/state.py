"""The training state: everything from which a run goes on beside its weights. This file alone knows its names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Annotated, Any, Literal, Protocol, Self

from loguru import logger
from pydantic import BaseModel, ConfigDict, Field, InstanceOf, ValidationError, model_validator
from torch import Tensor, nn

from pipeline.checkpoint.comparison import below, brief
from pipeline.checkpoint.initial_models import InitialModels
from pipeline.checkpoint.load_errors import fitting
from pipeline.checkpoint.parts import trained_modules
from pipeline.checkpoint.random_state import random_state
from pipeline.checkpoint.storage import without_numpy
from pipeline.checkpoint.weights import Models, unique_brains
from pipeline.errors import CheckpointError, FormatError

# The format of the training state. A state of another format cannot be resumed.
VERSION = 5

# Of the parts that the ranks have saved, by rank, what the rank that is named goes on with.
_Rule = Callable[[Sequence[Any], int], Any]

# The recoverable that has a ``MidEpochState``.
MID_EPOCH = "mid_epoch"


class StateModel(BaseModel):
    """A part of the training state: an unknown key, a missing one or one of another type is an error."""

    model_config = ConfigDict(strict=True, extra="forbid", arbitrary_types_allowed=True)

    @model_validator(mode="before")
    @classmethod
    def _take_numpy_numbers(cls, tree: Any) -> Any:
        """Convert numpy numbers, with which user code may count, to Python numbers."""
        if not isinstance(tree, Mapping):
            return tree
        return {name: without_numpy(value) for name, value in tree.items()}

    @classmethod
    def from_tree(cls, tree: Any, where: str) -> Self:
        """The state that ``to_tree`` has returned.

        Args:
            tree: nested dicts and lists.
            where: what messages begin with.

        Raises:
            CheckpointError: a key is missing, unknown, or of another type.
        """
        try:
            return cls.model_validate(tree)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = _place(first["loc"], tree, first["input"])
            what = f"is {brief(first['input'])}: {first['msg'].lower()}"
            if first["type"] == "missing":
                place, what = below(place, first["loc"][-1]), "is missing"
            raise CheckpointError(f"{where}: {place or 'the state'} {what}; use another checkpoint") from error

    def to_tree(self) -> dict[str, Any]:
        """The same as nested dicts and lists; what others load stays as it is."""
        fields = type(self).model_fields.items()
        return {field.alias or name: _tree(getattr(self, name)) for name, field in fields}


def _place(keys: Iterable[Any], value: Any, found: Any) -> str:
    """The place of a value that was found in another; the rest of the keys are names of types that it might have had."""
    place = ""
    with suppress(LookupError, TypeError):
        for key in keys:
            if value is found:
                break
            value = value[key]
            place = below(place, key)
    return place


def _tree(value: Any) -> Any:
    if isinstance(value, StateModel):
        return value.to_tree()
    if type(value) is dict:
        return {key: _tree(item) for key, item in value.items()}
    return [_tree(item) for item in value] if type(value) is list else value


# What an object gives as its state, and takes again; only that object knows what is in it.
OwnState = InstanceOf[Mapping[str, Any]]


# Plugins may put other plain values beside the numbers.
Numbers = dict[str, bool | int | float | str | None]


# A number of samples; whoever logs may weight by any number, also by one on a GPU.
Amount = int | float | Tensor


class MeterState(StateModel):
    """The sums of a ``Meter``."""

    batches: int
    samples: Amount
    nonfinite: int
    first: tuple[int, float] | None
    total: Amount = Field(alias="_total")
    count: Amount = Field(alias="_count")
    recent_total: Amount = Field(alias="_recent_total")
    recent_count: Amount = Field(alias="_recent_count")


class RandomState(StateModel):
    """The states of the random generators."""

    python: tuple[int, tuple[int, ...], float | None]
    torch: Tensor
    numpy: tuple[str, list[int], int, int, float] | None
    cuda: list[Tensor]


class GeneratorStates(RandomState):
    """The same, and the states of further generators, by name."""

    own: dict[str, Any]


class CursorState(StateModel):
    """The place in one epoch of a loader, as ``DataCursor`` has it.

    Attributes:
        epoch: the number of the epoch, from 0; -1 before the first.
        taken: how many batches were taken.
        stand_ins: how many of them were stand-ins for batches that only other ranks had.
        place: what the loader says of its place; None if it says nothing.
        begun: the states of the random generators before the first batch; None if the loader says its place itself.
        ahead: their states before the batch that was read ahead; None if there is none.
        is_own: whether user code has made the iterator of the epoch.
    """

    epoch: int
    taken: int
    stand_ins: int
    place: OwnState | None
    begun: GeneratorStates | None
    ahead: GeneratorStates | None
    is_own: bool


class PassState(StateModel):
    """Where a pass of training is.

    Attributes:
        step: the ``step`` of the Brain.
        cursor: the place in the data.
        began: the iteration before the pass.
        train_loss: the training loss so far.
        logged: what was logged so far, by name.
        discarded: of each optimizer, how many windows were discarded for their gradients, and the first parameter
            with such a gradient.
        metrics: the state of each of the ``train_metrics``, or the states of several ranks.
        average, nonfinite: the mean loss and the losses that are not finite, as a Brain itself counts them.
    """

    step: int
    cursor: CursorState
    began: int
    train_loss: MeterState
    logged: dict[str, MeterState]
    discarded: list[tuple[int, str]]
    metrics: Mapping[str, OwnState | list[OwnState]]
    average: float | None
    nonfinite: int


class BestState(StateModel):
    """The best number so far, the checkpoints that are kept for theirs, and which phase reports which number."""

    value: float
    iteration: int
    kept: list[Annotated[tuple[float, int], Field(strict=False)]]
    reported: dict[str, str]


class ValidationState(StateModel):
    """Phase -> the iteration in which it was last validated; whether a validation is not over; the best."""

    validated: dict[str, int]
    running: bool
    best: BestState | None


class EntryState(StateModel):
    """A call of ``epochs``, ``batches`` or ``validate``.

    Attributes:
        kind: which of them.
        phase: whose data; ``""`` for epochs.
        over: whether it is over.
        number: of the running epoch, or of the pass over this phase.
        repeat: whether the pass begins again at its end.
        first: how many epochs were done before these.
        epochs: the numbers of the finished epochs if the caller has given numbers, else None.
        numbers: what it gave: numbers by name; of a validation of all phases, by phase.
        validated: whether the validation after the pass is done.
        done: how many batches of the pass are done.
        state: of a pass that is open.
    """

    kind: Literal["epochs", "pass", "validate"]
    phase: str
    over: bool
    number: int
    repeat: bool
    first: int
    epochs: list[int] | None
    numbers: dict[str, Any]
    validated: bool
    done: int
    state: PassState | None

    @classmethod
    def new(cls, kind: Literal["epochs", "pass", "validate"], phase: str, number: int, **more: Any) -> EntryState:
        """One that has just begun, but for ``more``."""
        flags = dict.fromkeys(("over", "repeat", "validated"), False)
        fields: dict[str, Any] = {**flags, "first": 0, "epochs": None, "done": 0, "numbers": {}, "state": None}
        return cls(kind=kind, phase=phase, number=number, **{**fields, **more})

    def mark_validated(self) -> None:
        """Note that the validation after the pass is done."""
        self.validated = True

    def begin_epoch(self, number: int, *, again: bool) -> None:
        """Note which epoch is running.

        Args:
            number: its number.
            again: whether a resumed training continues this epoch.

        Raises:
            CheckpointError: the training was interrupted in another one.
        """
        if again and number != self.number:
            what = f"was saved in the middle of epoch {self.number}, and epoch {number} would be next"
            raise CheckpointError(f"the checkpoint {what}; give the same numbers of epochs as then")
        self.number = number

    def end_epoch(self) -> None:
        """Note that the epoch is done, if the caller has given numbers."""
        if self.epochs is not None:
            self.epochs.append(self.number)

    def finish(self) -> None:
        """Note that what was called is over."""
        self.over = True


class EpochStart(StateModel):
    """The counters when an epoch began."""

    iteration: int
    update: int


class EngineState(StateModel):
    """Where the engine is.

    Attributes:
        outer: the calls of the stage outside of epochs.
        inner: those of the running epoch; None between two epochs.
        leader: the place of the pass that leads in ``[*outer, *inner]``.
        passes: phase -> how many passes over it were begun.
        validation: of the runner.
        iterations: phase -> name -> the iteration that a number is of.
        asked_updates: the updates when it was last asked what is due; None: nothing is due by updates.
        epoch_began: the counters when the running epoch, or the last one, began.
        generators: the states of the random generators of the Brains, the updaters and the data, by name.
    """

    outer: list[EntryState]
    inner: list[EntryState] | None
    leader: int | None
    passes: dict[str, int]
    validation: ValidationState
    iterations: dict[str, dict[str, int]]
    asked_updates: int | None
    epoch_began: EpochStart
    generators: dict[str, Any]

    @model_validator(mode="after")
    def _check_leader(self) -> Self:
        entries = dict(enumerate([*self.outer, *(self.inner or [])]))
        if self.leader is not None and (self.leader not in entries or not entries[self.leader].state):
            raise ValueError(f"its leader, {self.leader}, is no open pass")
        return self

    def has_open_pass(self) -> bool:
        """Return whether a pass was begun and is not over."""
        return any(entry.state for entry in [*self.outer, *(self.inner or [])])


class Counters(StateModel, extra="ignore"):
    """The counters that every training has; they are in ``state.json``."""

    iteration: int
    update: int
    epoch: int
    samples: int


class SchedulerState(StateModel):
    """The classes of an OptimScheduler and its optimizer, and its ``state_dict``."""

    classes: str = Field(alias="class")
    state: OwnState


class WindowState(StateModel):
    """The accumulation window of an OptimScheduler, and the rate and gradient norm of its last update."""

    real_step: int
    batches: int
    samples: Amount
    discards: bool
    rate: float | None
    gradient_norm: float | None
    owns_gradients: bool
    discarded_windows: int


class FrozenState(StateModel):
    """Phase -> the parameters that are not trained: when the training began, and now."""

    begun: dict[str, list[str]]
    now: dict[str, list[str]]


class ModesState(StateModel):
    """Model -> the names of its modules in evaluation mode: when the training began, and now."""

    begun: dict[str, list[str]]
    now: dict[str, list[str]]


class ExperimentState(StateModel):
    """What an experiment has besides the state of the engine.

    Attributes:
        data: the place in the data.
        in_epoch: whether an epoch has begun and is not over.
        numbers: the training numbers of this epoch, by name.
        lines: the length of its ``metrics.jsonl``; None in a run, where a plugin writes that.
        state: its ``training_state``.
    """

    data: CursorState
    in_epoch: bool
    numbers: dict[str, MeterState]
    lines: int | None
    state: OwnState


class MidEpochState(StateModel):
    """What decides the order of the data.

    Attributes:
        dataset: the order of each dataset; None for a stream.
        overfit_batches: of the runner.
    """

    dataset: dict[str, OwnState | None]
    overfit_batches: int | None


class Recoverable(Protocol):
    """Something with a state of its own that checkpoints keep."""

    def state_dict(self) -> Any:
        """Plain data and tensors."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Continue from it."""


class TrainingState(StateModel):
    """Everything from which a run goes on, beside weights and counters.

    Attributes:
        version: of the format.
        updaters: phase -> the state of its updater.
        optim_schedulers: phase -> name -> its state; of phases that share a Brain, the first has them.
        gradients: phase, or the place of a module among the parts -> name of a parameter -> its gradient, while a window of
            accumulation is open.
        random: of the generators.
        metrics: phase -> the numbers of the running epoch.
        engine: where the engine is; None: something else trains.
        experiment: what an experiment has besides.
        recoverables: name -> the state of what ``add_recoverable`` has named.
        parts: place -> the state of another part of the models; None: there is none.
        objects: the same for an object of the user's class.
        frozen: which parameters are not trained; None: nobody has asked.
        modes: which modules training uses in evaluation mode, of each phase and of each module among the
            parts; None: nobody has asked.
        stopped: why ``stop`` has ended the training; None: it has not.
        requested: what ``request`` has asked for that is not done.
        seconds: the training time of a runner with ``max_time``; None: it has none.
    """

    version: Literal[5]
    updaters: dict[str, OwnState]
    optim_schedulers: dict[str, dict[str, SchedulerState]]
    gradients: dict[str, dict[str, Tensor]]
    random: RandomState
    metrics: dict[str, Numbers]
    engine: EngineState | None
    experiment: ExperimentState | None
    recoverables: dict[str, Any]
    parts: dict[str, Any]
    objects: dict[str, Any]
    frozen: FrozenState | None
    modes: ModesState | None
    stopped: str | None
    requested: list[str]
    seconds: float | None

    @classmethod
    def capture(
        cls, models: Models, recoverables: Mapping[str, Recoverable], initial: InitialModels | None, **more: Any
    ) -> TrainingState:
        """The state of everything that trains, between two steps.

        Args:
            models: phase -> what the network stage built for it; of phases that share a Brain, the first speaks for all.
            recoverables: name -> object whose state is kept too.
            initial: the models before anything was restored.
            more: what the training itself needs: ``engine``, ``metrics`` or ``experiment``; ``stopped``; ``requested``;
                ``seconds``.

        Raises:
            CheckpointError: something has a state from which no run could go on.
        """
        trained = {phase: entry for phase, entry in models.items() if "updater" in entry}
        brains = unique_brains(trained)
        owners = {phase: entry["updater"] for phase, entry in trained.items()}
        updaters = {phase: mapping_of(owner, owner.state_dict(), phase) for phase, owner in owners.items()}
        modules = trained_modules(models, initial.parts(models) if initial else {})
        own: dict[str, Any] = {
            "version": VERSION,
            "updaters": updaters,
            "optim_schedulers": {phase: _schedulers(entry, phase) for phase, entry in brains.items()},
            "gradients": {name: gradients_of(module) for name, module in modules.items()},
            "random": random_state(),
            "recoverables": {name: _state_of(name, recoverable) for name, recoverable in recoverables.items()},
        }
        states = [updaters, more.get("experiment")]
        changes = initial.changes(models, states, recoverables) if initial else {}
        return super().from_tree({**_DEFAULTS, **own, **changes, **more}, "the training state")

    @classmethod
    def from_tree(cls, tree: Any, where: str) -> Self:
        """Return the state that a checkpoint holds.

        Args:
            tree: nested dicts and lists.
            where: the checkpoint, for messages.

        Raises:
            FormatError: the state has another format.
            CheckpointError: a key is missing, unknown, or of another type.
        """
        # The first format had no number.
        version = tree.get("version", 1) if isinstance(tree, Mapping) else VERSION
        if type(version) is not int or version != VERSION:
            what = (
                f"its training state has format {brief(version)}, and this version of pipeline reads format {VERSION}"
            )
            resume = "resume it with the version that saved it"
            start = f"start a new run with init_model_path: {where} (its weights can still be loaded)"
            raise FormatError(f"{where}: {what}; {resume}, or {start}")
        return super().from_tree(tree, where)

    def on_rank(self, rank: int, own: Sequence[Mapping[str, list[Any]]], where: str, *, same: bool) -> Self:
        """The state with which one rank goes on from that of rank 0.

        Args:
            rank: which one.
            own: what the other ranks had of their own when they saved, by rank; with ``same``, what this one had.
            where: the checkpoint, for messages.
            same: whether as many ranks go on.

        Raises:
            CheckpointError: what is a rank's own is of another state.
        """
        tree, lists = self.to_tree(), [{place: [*parts] for place, parts in each.items()} for each in own]
        if not same and rank > len(own):
            what = f"was saved by {len(own) + 1} processes"
            logger.info(f"{where}: {what}; the random generators of rank {rank} begin anew")
        with fitting(where, "a rank's own", "use another checkpoint"):
            for place, rule in _OWN.items():
                change = partial(_combined, None if same else rule, rank, [each[place] for each in lists])
                tree = _changed(tree, place.split("."), change)
        return super().from_tree(tree, where)


def _combined(rule: _Rule | None, rank: int, others: Sequence[list[Any]], part: Any) -> Any:
    """A part, and the next of each of the others, by a rule; None: the last of them goes on as it is."""
    parts = [part, *(own.pop(0) for own in others)]
    return rule(parts, rank) if rule else parts[-1]


def _kept(parts: Sequence[Any], rank: int) -> Any:
    """That of the rank; a new one begins with rank 0's."""
    return parts[rank if rank < len(parts) else 0]


def _drawn(parts: Sequence[Any], rank: int) -> Any:
    """That of the rank; the generators of a new one stay as they were seeded."""
    return parts[rank] if rank < len(parts) else RandomState(**random_state()).to_tree()


def _total(parts: Sequence[Any], rank: int) -> Any:
    """The sum for rank 0, nothing for the others."""
    return parts[0] * 0 if rank else sum(parts[1:], parts[0])


def _each(rule: _Rule, parts: Sequence[Any], rank: int) -> Any:
    """What a rule makes of each value of mappings, by name."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: rule([part[name] for part in parts if name in part], rank) for name in names}


def _window(parts: Sequence[Any], rank: int) -> Any:
    """The samples of a window in which all ranks had as many batches; one that discards it speaks for all."""
    samples = _total([part["samples"] for part in parts], rank)
    return {**parts[0], "samples": samples, "discards": any(part["discards"] for part in parts)}


def _pass(parts: Sequence[Any], rank: int) -> Any:
    """That of the rank; of each metric the states of all ranks, for rank 0. The means are of all ranks anyway."""
    metrics = {} if rank else {name: [part["metrics"][name] for part in parts] for name in parts[0]["metrics"]}
    return {**_kept(parts, rank), "metrics": metrics}


# What each rank has of its own, by place (`*` is any key), and what another number of ranks makes of it. Everything else
# is alike on all ranks, and rank 0 saves it.
_OWN: dict[str, _Rule] = {
    "random": _drawn,
    "gradients": partial(_each, partial(_each, _total)),
    "recoverables": _kept,
    "objects": _kept,
    "optim_schedulers.*.*.state.window": _window,
    "engine.outer.*.state": _pass,
    "engine.inner.*.state": _pass,
    "engine.generators": _kept,
    "experiment.data": _kept,
    "experiment.numbers": _kept,
}


def own_parts(tree: Any) -> dict[str, list[Any]]:
    """What a rank has of its own in a training state: place -> the parts that are there."""
    own: dict[str, list[Any]] = {place: [] for place in _OWN}
    for place, parts in own.items():
        _changed(tree, place.split("."), parts.append)
    return own


def _changed(tree: Any, place: Sequence[str], change: Callable[[Any], Any]) -> Any:
    """A tree whose parts at a place are changed."""
    if tree is None or not place:
        return tree if tree is None else change(tree)
    if isinstance(tree, list):
        return [_changed(item, place[1:], change) for item in tree]
    keys = tree if place[0] == "*" else {place[0]} & tree.keys()
    return {**tree, **{key: _changed(tree[key], place[1:], change) for key in keys}}


# The parts of a state that not every training has.
_DEFAULTS: dict[str, Any] = {
    "metrics": {},
    "engine": None,
    "experiment": None,
    "parts": {},
    "objects": {},
    "frozen": None,
    "modes": None,
    "stopped": None,
    "requested": [],
    "seconds": None,
}


def _schedulers(entry: Mapping[str, Any], phase: str) -> dict[str, Any]:
    states = {}
    for name, scheduler in entry["optim_schedulers"].items():
        state = mapping_of(scheduler, scheduler.state_dict(), phase)
        if "optimizer" in state:
            mapping_of(scheduler.optimizer, state["optimizer"], phase)
        # Gradients are saved with the modules.
        state = {key: value for key, value in state.items() if key != "gradients"}
        states[name] = {"class": classes_of(scheduler), "state": state}
    return states


def mapping_of(owner: Any, state: Any, phase: str) -> Mapping[str, Any]:
    """The state that an object has returned, if it is a dict."""
    if isinstance(state, Mapping):
        return state
    what = f"phase.{phase}: {type(owner).__name__}.state_dict returned a {type(state).__name__}"
    raise CheckpointError(f"{what}, from which no run could go on; return a dict")


def _state_of(name: str, recoverable: Recoverable) -> Any:
    """The state of a recoverable; a ``state_dict`` without a return would be noticed by the resumed run alone."""
    if (state := recoverable.state_dict()) is None:
        raise CheckpointError(f"{name}: state_dict returned None, from which no run could go on; return a dict")
    return state


def classes_of(scheduler: Any) -> str:
    """``Noam of AdamW``."""
    return f"{type(scheduler).__name__} of {type(scheduler.optimizer).__name__}"


def gradients_of(module: nn.Module) -> dict[str, Tensor]:
    """The gradients of open accumulation windows."""
    return {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}
