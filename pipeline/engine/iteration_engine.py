"""IterationEngine: trains an experiment, whose code reads the batches itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

from pipeline.checkpoint.state import EngineState
from pipeline.context import Context, Phase
from pipeline.engine.client import IterationClient
from pipeline.engine.engine import Engine, MakeExporter
from pipeline.engine.triggers import Schedule
from pipeline.errors import StageError
from pipeline.signals import exit_requested


class IterationEngine(Engine):
    """Trains without passes: code loops over ``iterations``, and reads as many batches as it likes in each.

    Args:
        context: the context after the network and startup stages.
        client: what is trained, and how. It counts the epochs.
        make_exporter: makes what saves the models for other programs, if the runner asks for it.
    """

    client: IterationClient

    def __init__(self, context: Context, client: IterationClient, make_exporter: MakeExporter | None = None) -> None:
        super().__init__(context, client, make_exporter)
        self._is_in_iteration = False

    def iterations(self) -> Iterator[int]:
        """Yield the number of each iteration, from 1, until training is over.

        An iteration is what the code does until it requests the next number.
        """
        counters = self.counters
        self.begin()
        self.client.start_iterations()
        if not counters["iteration"]:
            self._request_first_validation()
        self._answer_requests()
        continues = not self.is_over()
        while continues:
            self._is_in_iteration = True
            yield counters["iteration"] + 1
            self._is_in_iteration = False
            counters["iteration"] += 1
            counters["update"] += 1
            self.validation.outdate_all()
            epochs_done = self.client.after_iteration()
            if epochs_done is not None or counters["iteration"] >= self.next_check:
                continues = self._run_scheduled(epochs_done)

    def _answer_requests(self) -> None:
        """Do what was requested before the first iteration, and repeat a validation that a signal has interrupted."""
        if self.cut_short:
            return
        if self.validation.running:
            self._run_scheduled(None)
        elif exit_requested(self.context) or self.context.requests:
            self._validate_on_request()
            self.save_if(False)

    def _run_scheduled(self, epochs_done: int | None) -> bool:
        """Do what is scheduled or requested after an iteration, and return whether training continues.

        Args:
            epochs_done: how many epochs are done, if the iteration has read the last batch of one.
        """
        actions = self._scheduled_actions(epochs_done)
        if actions is None:
            self.look_ahead()
            return True
        return self._run_actions(actions, self.validation.phases)

    def set_schedule(self, schedule: Schedule) -> None:
        """Use another schedule, whose limits may be higher, and check it after this iteration."""
        self.schedule = schedule
        self.over = False
        self.cut_short = False
        self.place_saved = False
        self.wake()

    def adopt(self, before: Engine) -> None:
        """Continue with the numbers and the validations of another engine, which has trained the same before."""
        self.begin()
        self.numbers.replace(before.numbers.metrics, before.numbers.measured_at)
        self.validation.load_state_dict(before.validation.state_dict())

    # Calls of a stage that an experiment cannot make, since its code would not make them again after a resume.

    def epochs(self, count: int | None = None) -> Iterator[int]:
        """Raise an error, since ``read_batch`` starts the epochs.

        Raises:
            StageError: always.
        """
        _refuse("epochs", "read_batch, which starts the epochs")

    def batches(self, phase: str | Phase, *, count: int | None = None, repeat: bool = False) -> NoReturn:
        """Raise an error, since ``read_batch`` returns the batches.

        Raises:
            StageError: always.
        """
        _refuse("batches", "read_batch")

    def validate(self, phase: str | Phase | None = None) -> dict[str, Any]:
        """Raise an error, since a validation has to be requested.

        Raises:
            StageError: always.
        """
        _refuse("validate", "context.request('validation')")

    # What the training does at its ends.

    def _first_epoch(self) -> int:
        return self.client.current_epoch()

    def _finish_preparing(self) -> None:
        """Restore the random generators. There are no calls that would have to be replayed first."""
        self.journal.arrive_after_last_call()

    def _is_over_after_actions(self) -> bool:
        """Return whether training is over; end the epoch first, if all of its batches are read."""
        is_over = self.is_over()
        if self.client.has_read_epoch():
            if is_over:
                self._validate_last()
            self.client.end_epoch(cut_short=False)
            is_over = self.is_over()
        return is_over

    def _stop(self) -> None:
        """Note where training has ended. If that is in the middle of an epoch, training is cut short."""
        place = self.client.place_in_epoch()
        if place:
            self._cut_short(f"after {place}")

    def _finish_work(self) -> None:
        """End the running epoch, unless the training was cut short."""
        self.journal.require_arrival("the runner stage ended")
        if self.is_over():
            self._stop()
        if not self.cut_short:
            self.client.end_epoch(cut_short=False)

    def _end_cut_epoch(self) -> None:
        if self.cut_short:
            self.client.end_epoch(cut_short=True)

    def _print(self) -> None:
        self.client.print_numbers()

    def batches_before_resume(self) -> int | None:
        """Return 0: an experiment does not count them."""
        return 0

    def _resume_passes(self, state: EngineState) -> None:
        """Do nothing: the client continues its epoch itself."""

    def _is_in_step(self) -> bool:
        return False

    def _is_busy(self) -> bool:
        return self._is_in_iteration

    def _finish_active_batches(self) -> None:
        """Do nothing: the code of the experiment has no batches that the engine knows."""


def _refuse(method: str, instead: str) -> NoReturn:
    raise StageError(f"context.{method} was called in an experiment; call {instead}")
