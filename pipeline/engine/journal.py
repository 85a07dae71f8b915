"""The journal of a runner stage: the calls that its code has made, by which a resumed stage comes to its place."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Literal
from weakref import WeakSet

from pipeline.checkpoint.reader import LoadedCheckpoint
from pipeline.checkpoint.state import EngineState, EntryState
from pipeline.engine.train_pass import TrainPass
from pipeline.errors import CheckpointError

Kind = Literal["epochs", "pass", "validate"]

# A call of ``epochs`` or ``validate``, or one of ``batches``.
Entry = EntryState | TrainPass


class Journal:
    """The calls of ``epochs``, ``batches`` and ``validate`` that the code of a stage has made, in order.

    In which line a function is, and what its variables are, cannot be saved; but the function can be called again. So a
    checkpoint keeps the calls outside of epochs and those of the running epoch, each with its outcome: whether it is
    over, its numbers, where an open pass is in its data.

    On resume the code runs from its top, and its n-th call has to be the n-th of the checkpoint; another one is an error.
    What was over then gives nothing and calls no plugin; a validation returns its saved numbers. Thus the code skips
    what it has done, until it arrives where the checkpoint was saved: if a pass led then, when that one is asked for a
    batch; if none did, when the last of the calls is made. From there on calls are new, and the random generators go
    on as they would have.

    What was called in the body of a batch is not called again, since a resumed pass goes on with the batch behind. Of
    these calls only passes are kept, while they are open; the body that calls ``batches`` of their phase next goes on
    with them.

    Args:
        checkpoint: the one from which the run goes on; None for one that begins.
        on_arrival: restores what code before that place may have changed.

    Attributes:
        resuming: whether the code has not yet arrived where the checkpoint was saved.
        outer: the calls outside of epochs.
        inner: those of the running epoch; None between two epochs.
        leader: the pass that led when the checkpoint was saved, until the code arrives.
    """

    def __init__(self, checkpoint: LoadedCheckpoint | None, on_arrival: Callable[[], None]) -> None:
        self.on_arrival = on_arrival
        self.checkpoint, self.resuming = checkpoint, checkpoint is not None
        self.outer: list[Entry] = []
        self.inner: list[Entry] | None = None
        self.leader: TrainPass | None = None
        # What the checkpoint has of outer and inner, less what the code has called again.
        self._rest_of_outer, self._rest_of_inner = deque[Entry](), deque[Entry]()
        # Open passes of the body in which the checkpoint was saved, less those with which a body goes on.
        self._passes_of_body: list[Entry] = []
        # Passes that were begun in the body of another's batch.
        self._nested: WeakSet[TrainPass] = WeakSet()
        self._saved_in_epoch = False

    def begin_epoch(self) -> None:
        """From here on, calls are those of an epoch."""
        self.inner = []

    def end_epoch(self) -> None:
        """The epoch is over: forget its calls."""
        self.inner = None

    def load(self, state: EngineState, make_pass: Callable[[str], TrainPass]) -> list[TrainPass]:
        """Take the calls of the checkpoint.

        Args:
            state: has them.
            make_pass: makes a pass of a phase.

        Returns:
            The open passes, but the leader: that one is opened when it is asked for.
        """
        self._saved_in_epoch = state.inner is not None
        for states, rest in ((state.outer, self._rest_of_outer), (state.inner or [], self._rest_of_inner)):
            rest.extend(make_pass(own.phase).load(own) if own.kind == "pass" else own for own in states)
        entries = [*self._rest_of_outer, *self._rest_of_inner]
        leader = None if state.leader is None else entries[state.leader]
        self.leader = leader if isinstance(leader, TrainPass) else None
        return [entry for entry in entries if isinstance(entry, TrainPass) and entry.state and entry is not leader]

    def capture(self, leader: TrainPass | None, **more: Any) -> EngineState:
        """What a checkpoint keeps.

        Args:
            leader: the pass that is asked for a batch, and goes on from here; None: none is.
            more: what else an EngineState has.
        """
        for entries in (self.outer, self.inner or []):
            entries[:] = [
                own for own in entries if not (isinstance(own, TrainPass) and own in self._nested and own.over)
            ]
        entries = [*self.outer, *(self.inner or [])]
        states = [entry if isinstance(entry, EntryState) else entry.entry_state() for entry in entries]
        inner = None if self.inner is None else states[len(self.outer) :]
        place = entries.index(leader) if leader in entries else None
        return EngineState(outer=states[: len(self.outer)], inner=inner, leader=place, **more)

    def call(self, kind: Kind, phase: str, *, in_body: bool, **own: Any) -> EntryState:
        """Note a call of ``epochs`` or ``validate``: the one that a checkpoint has, else a new one.

        Args:
            kind: what was called.
            phase: for which phase.
            in_body: whether the code is in the body of a batch.
            own: what a new one has of its own.
        """
        call = self.recall(kind, phase)
        if not isinstance(call, EntryState):
            call = EntryState.new(kind, phase, 0, **own)
            if not in_body:
                self._scope(kind).append(call)
        return call

    def add_pass(self, training: TrainPass, *, in_body: bool) -> None:
        """Note a new pass."""
        if in_body:
            self._nested.add(training)
        self._scope("pass").append(training)

    def recall(self, kind: Kind, phase: str) -> Entry | None:
        """What a checkpoint has of the call that comes now; None: it is new.

        Raises:
            CheckpointError: the code has called something else than before.
        """
        self.arrive_after_last_call()
        if not self.resuming:
            entry = next((own for own in self._passes_of_body if (own.kind, own.phase) == (kind, phase)), None)
            if entry:
                self._passes_of_body.remove(entry)
            return entry
        scope = self._scope(kind)
        rest = self._rest_of_outer if scope is self.outer else self._rest_of_inner
        if not rest or (rest[0].kind, rest[0].phase) != (kind, phase):
            raise CheckpointError(self._unlike(_describe(kind, phase), rest[0] if rest else None))
        entry = rest.popleft()
        scope.append(entry)
        return entry

    @property
    def resuming_in_epoch(self) -> bool:
        """Whether the code has not arrived, and the checkpoint was saved in an epoch."""
        return self.resuming and self._saved_in_epoch

    def arrive(self) -> None:
        """The code is where the checkpoint was saved."""
        self.resuming, self.leader = False, None
        for scope, rest in ((self.outer, self._rest_of_outer), (self._scope("pass"), self._rest_of_inner)):
            self._passes_of_body += rest
            scope.extend(rest)
            rest.clear()
        self.on_arrival()

    def arrive_after_last_call(self) -> None:
        """Arrive, where the code has made all calls of the checkpoint, and no pass led then."""
        if self.resuming and not (self.leader or self._rest_of_inner or self._rest_of_outer):
            self.arrive()

    def require_arrival(self, event: str) -> None:
        """Arrive likewise.

        Args:
            event: what comes now, for the message.

        Raises:
            CheckpointError: the code has not called what it did before.
        """
        self.arrive_after_last_call()
        if self.resuming:
            raise CheckpointError(self._unlike(event))

    def _scope(self, kind: Kind) -> list[Entry]:
        return self.outer if kind == "epochs" or self.inner is None else self.inner

    def _unlike(self, event: str, expected: Entry | None = None) -> str:
        """Why a run cannot go on: its code has called something else than before."""
        rest = [*self._rest_of_inner, *self._rest_of_outer]
        expected = expected or next(iter(rest), None) or self.leader
        before = _describe(expected.kind, expected.phase) if expected else "something else"
        path = self.checkpoint.path if self.checkpoint else "the checkpoint"
        what = f"{path}: {event}, where the run that saved it had {before} next"
        remedy = "set its code and phases back, or begin anew"
        return f"{what}; a resumed stage has to make the same calls in the same order: {remedy}"


def _describe(kind: str, phase: str) -> str:
    return "epochs()" if kind == "epochs" else f"{'batches' if kind == 'pass' else kind}('{phase}')"
