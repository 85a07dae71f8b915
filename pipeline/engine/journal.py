"""The journal of a runner stage: the recorded calls that a resumed stage replays."""

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

# A call of ``epochs`` or ``validate``, or a call of ``batches``.
Entry = EntryState | TrainPass


class Journal:
    """The ``epochs``, ``batches`` and ``validate`` calls that the code of a stage has made, in order.

    Local variables and the program counter cannot be saved. On resume, the stage's function is
    called again from the top, and its earlier calls are replayed from the checkpoint until
    execution reaches the point that was saved. So a checkpoint keeps the calls outside of epochs
    and the calls of the running epoch, each with its outcome: whether it is over, its numbers, and
    where an open pass is in its data.

    During the replay, call n of the code must be call n of the checkpoint; another call is an
    error. A call that was over gives nothing and calls no plugin. A validation returns its saved
    numbers. The code arrives where the checkpoint was saved

    - when the pass that led there is asked for a batch, or
    - when the last of the recorded calls is made, if no pass led.

    From there on, calls are new, and the random generators continue as in an unbroken run.

    Calls that were made in the body of a batch are not made again, since a resumed pass continues
    with the next batch. Of these calls only passes are kept, while they are open. The next body
    that calls ``batches`` of their phase continues them.

    Args:
        checkpoint: the checkpoint from which the run continues; None for a new run.
        on_arrival: restores what the code may have changed before it arrived.

    Attributes:
        resuming: whether the code has not yet arrived where the checkpoint was saved.
        outer: the calls outside of epochs.
        inner: the calls of the running epoch; None between two epochs.
        leader: the pass that led when the checkpoint was saved; None once the code has arrived.
    """

    def __init__(self, checkpoint: LoadedCheckpoint | None, on_arrival: Callable[[], None]) -> None:
        self.checkpoint = checkpoint
        self.on_arrival = on_arrival
        self.resuming = checkpoint is not None
        self.outer: list[Entry] = []
        self.inner: list[Entry] | None = None
        self.leader: TrainPass | None = None
        # The calls of the checkpoint that the code has not made again yet.
        self._remaining_outer = deque[Entry]()
        self._remaining_inner = deque[Entry]()
        # The open passes of the body in which the checkpoint was saved, until another
        # body continues them.
        self._passes_of_body: list[Entry] = []
        # The passes that were started in the body of a batch of another pass.
        self._nested: WeakSet[TrainPass] = WeakSet()
        self._saved_in_epoch = False

    def begin_epoch(self) -> None:
        """Start the list of the calls of an epoch."""
        self.inner = []

    def end_epoch(self) -> None:
        """Forget the calls of the epoch, which is over."""
        self.inner = None

    def load(self, state: EngineState, make_pass: Callable[[str], TrainPass]) -> list[TrainPass]:
        """Take the calls of the checkpoint.

        Args:
            state: the state of the engine in the checkpoint.
            make_pass: makes a pass of a phase.

        Returns:
            The open passes without the leader, which is opened when it is asked for a batch.
        """
        self._saved_in_epoch = state.inner is not None
        for states, remaining in (
            (state.outer, self._remaining_outer),
            (state.inner or [], self._remaining_inner),
        ):
            for call in states:
                remaining.append(make_pass(call.phase).load(call) if call.kind == "pass" else call)
        entries = [*self._remaining_outer, *self._remaining_inner]
        leader = None if state.leader is None else entries[state.leader]
        self.leader = leader if isinstance(leader, TrainPass) else None
        return [entry for entry in entries if isinstance(entry, TrainPass) and entry.state and entry is not leader]

    def capture(self, leader: TrainPass | None, **more: Any) -> EngineState:
        """Return the state that a checkpoint keeps.

        Args:
            leader: the pass that is asked for a batch and continues from here; None if there is
                none.
            more: the other fields of the EngineState.
        """
        for entries in (self.outer, self.inner or []):
            entries[:] = [entry for entry in entries if not self._is_finished_nested_pass(entry)]
        entries = [*self.outer, *(self.inner or [])]
        states = [entry if isinstance(entry, EntryState) else entry.entry_state() for entry in entries]
        inner = None if self.inner is None else states[len(self.outer) :]
        place = entries.index(leader) if leader in entries else None
        return EngineState(outer=states[: len(self.outer)], inner=inner, leader=place, **more)

    def call(self, kind: Kind, phase: str, *, in_body: bool, **fields: Any) -> EntryState:
        """Record a call of ``epochs`` or ``validate``, and return its entry.

        A call that the checkpoint has is returned as it was saved.

        Args:
            kind: what was called.
            phase: the phase for which it was called.
            in_body: whether the code is in the body of a batch.
            fields: further fields of a new entry.
        """
        entry = self.recall(kind, phase)
        if not isinstance(entry, EntryState):
            entry = EntryState.new(kind, phase, 0, **fields)
            if not in_body:
                self._scope(kind).append(entry)
        return entry

    def add_pass(self, training: TrainPass, *, in_body: bool) -> None:
        """Record a new pass.

        Args:
            training: the pass.
            in_body: whether the code is in the body of a batch.
        """
        if in_body:
            self._nested.add(training)
        self._scope("pass").append(training)

    def recall(self, kind: Kind, phase: str) -> Entry | None:
        """Return the entry that the checkpoint has for the present call; None if the call is new.

        Args:
            kind: what is called.
            phase: the phase for which it is called.

        Raises:
            CheckpointError: the code has called something else than before.
        """
        self.arrive_after_last_call()
        if not self.resuming:
            for entry in self._passes_of_body:
                if (entry.kind, entry.phase) == (kind, phase):
                    self._passes_of_body.remove(entry)
                    return entry
            return None
        scope = self._scope(kind)
        remaining = self._remaining_outer if scope is self.outer else self._remaining_inner
        if not remaining or (remaining[0].kind, remaining[0].phase) != (kind, phase):
            raise CheckpointError(self._unlike(_describe(kind, phase), remaining[0] if remaining else None))
        entry = remaining.popleft()
        scope.append(entry)
        return entry

    @property
    def resuming_in_epoch(self) -> bool:
        """Whether the code has not arrived yet, and the checkpoint was saved in an epoch."""
        return self.resuming and self._saved_in_epoch

    def arrive(self) -> None:
        """End the replay: the code is where the checkpoint was saved."""
        self.resuming = False
        self.leader = None
        for scope, remaining in (
            (self.outer, self._remaining_outer),
            (self._scope("pass"), self._remaining_inner),
        ):
            self._passes_of_body += remaining
            scope.extend(remaining)
            remaining.clear()
        self.on_arrival()

    def arrive_after_last_call(self) -> None:
        """End the replay if the code has made all calls of the checkpoint and no pass led there."""
        if self.resuming and not (self.leader or self._remaining_inner or self._remaining_outer):
            self.arrive()

    def require_arrival(self, event: str) -> None:
        """End the replay as ``arrive_after_last_call`` does, and raise if it cannot end yet.

        Args:
            event: what happens now, for the message.

        Raises:
            CheckpointError: the code has not made all the calls that it made before.
        """
        self.arrive_after_last_call()
        if self.resuming:
            raise CheckpointError(self._unlike(event))

    def _scope(self, kind: Kind) -> list[Entry]:
        """Return the list to which a call belongs."""
        return self.outer if kind == "epochs" or self.inner is None else self.inner

    def _is_finished_nested_pass(self, entry: Entry) -> bool:
        return isinstance(entry, TrainPass) and entry in self._nested and entry.over

    def _unlike(self, event: str, expected: Entry | None = None) -> str:
        """Return the message for a run whose code calls something else than before.

        Args:
            event: what its code does now.
            expected: the call of the checkpoint; None stands for the next one.
        """
        remaining = [*self._remaining_inner, *self._remaining_outer]
        expected = expected or next(iter(remaining), None) or self.leader
        before = _describe(expected.kind, expected.phase) if expected else "something else"
        path = self.checkpoint.path if self.checkpoint else "the checkpoint"
        what = f"{path}: {event}, where the run that saved it had {before} next"
        remedy = "set its code and phases back, or begin anew"
        return f"{what}; a resumed stage has to make the same calls in the same order: {remedy}"


def _describe(kind: str, phase: str) -> str:
    """Return a call as the code of a stage writes it, such as ``batches('line')``."""
    if kind == "epochs":
        return "epochs()"
    name = "batches" if kind == "pass" else kind
    return f"{name}('{phase}')"
