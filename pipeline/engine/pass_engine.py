"""PassEngine: trains in passes over the data. The default Runner, custom loops and ``Brain.fit`` use it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

from loguru import logger

from pipeline.checkpoint.state import EngineState, EntryState
from pipeline.compute.validation import extend_metrics
from pipeline.context import Context, Phase
from pipeline.engine.client import Client
from pipeline.engine.engine import Engine, MakeExporter
from pipeline.engine.phase import pass_loader
from pipeline.engine.train_pass import PassIterator, TrainPass
from pipeline.engine.triggers import NEVER
from pipeline.errors import CheckpointError, ConfigError, ContextError, StageError, one_of
from pipeline.metrics.base import build_train_metrics
from pipeline.optim.stepping import log_discarded_windows
from pipeline.signals import SHUTDOWN, exit_requested
from pipeline.user_code.plugin_calls import hook_or_none

# After so many iterations a warning says what a scheduled action waits for.
PATIENCE = 1000


class PassEngine(Engine):
    """Trains the phases of a runner, or a Brain alone, in passes over the data.

    A runner stage calls ``epochs``, ``batches``, ``validate`` and ``save``, through the context or directly, and so does
    ``Brain.fit``. A TrainPass, which has the loop over the batches, calls the methods of ``PassOwner``.

    Passes may be nested: the code that trains on a batch of one pass may request batches of another pass. A batch is
    active until its pass, or a pass around it, is asked for its next batch. The outermost pass with an active batch
    leads. The engine checks what is scheduled only when the leading pass is asked for a batch, or while no pass leads.

    Args:
        context: the context after the network and startup stages.
        client: what is trained, and how.
        make_exporter: makes what saves the models for other programs, if the runner asks for it.

    Attributes:
        active_passes: the passes that have an active batch, the outermost first.
        before_batch, after_batch: call the plugins; None if no plugin listens.
    """

    before_batch: Callable[..., Any] | None = None
    after_batch: Callable[..., Any] | None = None

    def __init__(self, context: Context, client: Client, make_exporter: MakeExporter | None = None) -> None:
        super().__init__(context, client, make_exporter)
        self.active_passes: list[TrainPass] = []
        # The pass that led last. What is scheduled while no pass leads is done for it.
        self._last_leader: TrainPass | None = None
        # The running epochs, and the epochs that a break has left. Their last epoch ends when the stage calls a method again.
        self._epochs_call: EntryState | None = None
        self._interrupted_epochs: EntryState | None = None
        # Since which iteration something is scheduled that waits for the leading pass; 0 if nothing waits.
        self._waiting_since = 0

    def begin(self) -> None:
        """Prepare everything. The first call of any other method does this."""
        if not self.in_use:
            hooks = self.context["hooks"]
            self.before_batch = hook_or_none(hooks, "before_batch")
            self.after_batch = hook_or_none(hooks, "after_batch")
            self._extends_metrics = hook_or_none(hooks, "extend_metrics") is not None
        super().begin()

    # What a stage calls.

    def epochs(self, count: int | None = None, numbers: Iterable[int] | None = None) -> Iterator[int]:
        """Yield the number of each epoch that is left.

        Args:
            count: how many epochs there are, including the ones before a resume; None stops at the runner's limits.
            numbers: the number of each epoch. Each number is skipped as often as it was trained before a resume. None
                counts from 0.

        Raises:
            StageError: an epoch is running, or a batch is active.
            CheckpointError: the checkpoint was saved in the middle of an epoch with another number.
        """
        self.begin()
        if self.journal.inner is not None and not self._interrupted_epochs:
            raise StageError("context.epochs: an epoch is running; end it first, or use batches(…, repeat=True)")
        self._finish_active_batches()
        if self._is_in_batch():
            what = f"context.epochs: a batch of the pass over '{self.active_passes[0].phase}' is active"
            raise StageError(f"{what}; end that pass first, with close(), or take its first batch in an epoch")
        trained = None if numbers is None else list[int]()
        call = self.journal.call("epochs", "", in_body=False, first=self.counters["epoch"], epochs=trained)
        end = NEVER if count is None else call.first + count
        return self._epochs(call, _numbers_left(call, end, self.counters, numbers))

    def _epochs(self, call: EntryState, numbers: Iterator[int]) -> Iterator[int]:
        journal = self.journal
        self._run_scheduled_between_passes()
        try:
            # If the code has made later calls before the resume, the epochs were over.
            is_over = call.over or (journal.resuming and not journal.resuming_in_epoch)
            while not is_over and (journal.resuming_in_epoch or not self.is_over()):
                number = next(numbers, None)
                if number is None:
                    break
                call.begin_epoch(number, again=journal.resuming_in_epoch)
                self._epochs_call = call
                self.context["current_epoch"] = number
                journal.begin_epoch()
                if not journal.resuming_in_epoch:
                    self._start_epoch()
                    self.hooks.before_epoch(context=self.context)
                yield number
                self._end_epoch()
        except GeneratorExit:
            self._interrupted_epochs = call
            raise

    def batches(self, phase: str | Phase, *, count: int | None = None, repeat: bool = False) -> PassIterator:
        """Return one pass over the data of a phase: an iterator of batches, on their device.

        Args:
            phase: its name, or its entry in ``context["model"]``.
            count: how many batches end it, including the ones before a resume; None: the data ends it.
            repeat: whether it starts again at the end of the data, in a new order.
        """
        training = self.train_pass(phase)
        training.limit(count, repeat=repeat)
        return PassIterator(training)

    def train_pass(self, phase: str | Phase) -> TrainPass:
        """Return the same pass as an object. Its ``run`` trains on all batches."""
        self.begin()
        name = self._name(phase)
        if self._interrupted_epochs:
            self._finish_active_batches()
        training = self.journal.recall("pass", name)
        if not isinstance(training, TrainPass):
            training = self._new_pass(name)
            self.journal.add_pass(training, in_body=self._is_in_batch())
        if training.over or (training.state and not self._last_leader):
            # The resumed code has passed it, or it was started outside of an epoch that is over. So it counts as the last leader.
            self._last_leader = training
        return training

    def _new_pass(self, name: str) -> TrainPass:
        phase = self.phases[self._name(name)]
        metrics = build_train_metrics(name, self.schemas[name].train_metrics, self.context["config"].workspace)
        return TrainPass(self, name, phase["brain"], phase["updater"], metrics)

    def _name(self, phase: str | Phase) -> str:
        name = phase.name if isinstance(phase, Phase) else phase
        if name not in self.phases:
            raise ContextError(f"the runner '{self.runner.name}' has no phase '{name}'{one_of(name, self.phases)}")
        return name

    def validate(self, phase: str | Phase | None = None) -> dict[str, Any]:
        """Validate a phase, and return its numbers, such as ``valid_loss`` or ``test/loss``; None validates all phases.

        Raises:
            ConfigError: the phase has no validation data.
        """
        self.begin()
        names = [self._name(phase)] if phase is not None else list(self.validation.phases)
        for name in names or ["…"]:
            if name not in self.validation.phases:
                what = f"phase.{name}.valid_dataset_name: is not set, and context.validate() needs it"
                raise ConfigError(f"{what}; name a dataset there")
        self._finish_active_batches()
        call = self.journal.call("validate", ",".join(names), in_body=self._is_in_batch())
        if not call.over:
            self.journal.arrive_after_last_call()
            for name in names:
                call.numbers[name] = self._validate(name, requested=True)
            call.finish()
            self.wake()
        return call.numbers if phase is None else call.numbers[names[0]]

    # What the default Runner calls.

    def plan_schedules(self, user_code: str) -> None:
        """Tell the learning rate schedules that need it how long the training is.

        Args:
            user_code: the user's code that decides how long it is; ``""`` if the runner's keys and the data decide.

        Raises:
            ConfigError: the length is unknown, or a schedule contradicts it.
        """
        self.lengths.plan(self.runner, list(self.schemas.values()), self.context, user_code)

    def end_phase(self, phase: Phase) -> bool:
        """Validate a phase after its pass, if the intervals say so; return whether training is over."""
        if self.cut_short:
            return True
        passes = [training for training in self._passes_of_epoch() if training.phase == phase.name]
        # A custom train_phase may do without a pass.
        entry = passes[-1] if passes else self.journal.call("validate", phase.name, in_body=self._is_in_batch())
        if not entry.validated:
            self.journal.arrive_after_last_call()
            if self.schedule.validating.fires_after(self.counters["epoch"] + 1):
                self._validate(phase.name)
            entry.mark_validated()
            if self.numbers.has_trained(phase.name) and not any(earlier.validated for earlier in passes[:-1]):
                self.hooks.after_phase(context=self.context, phase=phase.name)
        return self.is_over()

    def end_between_phases(self) -> None:
        """End training before the next phase of the epoch, after a limit. A resumed run continues there."""
        self._cut_short("between two phases")

    # Epochs.

    def _first_epoch(self) -> int:
        """Return the number of the running epoch, or of the last one."""
        return max(0, self.counters["epoch"] - (not self.journal.resuming_in_epoch))

    def batches_before_resume(self) -> int | None:
        """Return how many batches of the running epoch were done when the checkpoint was saved.

        Returns:
            The number; 0 if nothing is resumed; None if no epoch was running.
        """
        checkpoint = self.journal.checkpoint
        state = checkpoint.state.engine if checkpoint and checkpoint.state else None
        if state is None:
            return 0
        return None if state.inner is None else sum(entry.done for entry in state.inner)

    def _epoch_number(self) -> int:
        """Return the number of the running epoch."""
        call = self._epochs_call
        return self.counters["epoch"] if call is None or call.epochs is None else call.number

    def _start_epoch(self) -> None:
        """Note where an epoch starts."""
        self._epoch_start = self._new_epoch_start()
        self.forget_numbers()

    def _end_epoch(self, interrupted: EntryState | None = None) -> None:
        """End the epoch: end its passes, validate, and save, as scheduled.

        Args:
            interrupted: the epochs that a break has left; None if the next epoch was requested.
        """
        # If a variable still holds a pass after a break, its body may still run, so a run cannot be resumed here.
        is_held = bool(self.active_passes) and not self.active_passes[0].dropped
        self._finish_inner_batches(0)
        for training in self._passes_of_epoch():
            self._end(training)
        self.journal.require_arrival("the epoch ended")
        if self.cut_short:
            self.journal.end_epoch()
            return
        for name in self.phases:
            # A pass that was started outside of epochs is still open.
            self._log_discarded_windows(name)
        has_own_batches = self._may_have_own_batches()
        if has_own_batches:
            self._count_epoch()
        # A run that resumes in an epoch with batches of its own would train on them again.
        with SHUTDOWN.postponed() if is_held or has_own_batches else nullcontext():
            unvalidated = self._validate_after_epoch(has_own_batches=has_own_batches)
        for name in unvalidated:
            self.hooks.after_phase(context=self.context, phase=name)
        self._close_epoch(interrupted)
        self.hooks.after_epoch(context=self.context)
        self.checkpoints.notify_saved()
        done = self.counters["epoch"]
        if self.exporter and self.schedule.exporting.fires_after(done):
            self.exporter.save()
        if self.agreement:
            self.agreement.look(self.counters["iteration"])
        # Something may be scheduled after the last batches of a pass that a variable holds. A resumed run would not know it.
        if self.counters["iteration"] >= self.next_check and (self._last_leader or has_own_batches):
            self._run_scheduled(self._last_leader)
        self.save_if(self.schedule.saving.fires_after(done))

    def _validate_after_epoch(self, *, has_own_batches: bool) -> list[str]:
        """Validate what is scheduled at the end of an epoch.

        Args:
            has_own_batches: whether the stage may have trained on batches that it created itself.

        Returns:
            The trained phases that the stage has not ended with ``end_phase``.
        """
        validated = {entry.phase for entry in self.journal.inner or [] if entry.validated}
        unvalidated = [name for name in self.phases if self.numbers.has_trained(name) and name not in validated]
        done = self.counters["epoch"] + 1
        if self.schedule.validating.fires_after(done):
            # If it is unknown which phases the stage has trained, all are validated.
            for name in self.validation.phases if has_own_batches else unvalidated:
                self._validate(name)
        if self.is_over() or done >= self.schedule.epochs:
            self._validate_last()
        return unvalidated

    def _close_epoch(self, interrupted: EntryState | None) -> None:
        """Count the epoch. A run that is resumed from here on starts the next one."""
        self.counters.update(epoch=self.counters["epoch"] + 1, phase_index=0)
        self.journal.end_epoch()
        if self._epochs_call:
            self._epochs_call.end_epoch()
        if interrupted:
            interrupted.finish()

    def _passes_of_epoch(self) -> list[TrainPass]:
        """Return the passes that were started in the running epoch."""
        return [entry for entry in self.journal.inner or [] if isinstance(entry, TrainPass)]

    def _may_have_own_batches(self) -> bool:
        """Return whether an epoch is running without a counted batch.

        The stage may have trained on batches that it created itself. A run cannot continue inside
        such an epoch, since the code of the stage runs again from the top.
        """
        is_uncounted = self.counters["iteration"] == self._epoch_start.iteration
        return self.journal.inner is not None and is_uncounted

    def _count_epoch(self) -> None:
        """Count an epoch that the stage has trained on batches that it created itself as one iteration.

        The checkpoint at the end of the epoch has this iteration, so what was validated in the
        epoch gets it too.
        """
        before = self.counters["iteration"]
        # Validations that belong to a checkpoint that is being saved keep their iteration.
        self.checkpoints.wait_for_save()
        self.counters["iteration"] += 1
        if self.counters["update"] == self._epoch_start.update:
            self.counters["update"] += 1
        self.validation.move(before, self.numbers.measured_at)
        self.numbers.move_to_current_iteration()

    # What the passes call.

    def open(self, training: TrainPass) -> Iterator[Any] | None:
        """Start a pass, or continue one, and return its batches; None if it is over at once."""
        if self.active_passes and self.active_passes[-1].dropped:
            self._finish_active_batches()
        continues = training.state is not None
        leads = not self.active_passes
        continues_as_leader = continues and training is self.journal.leader
        if leads and not continues_as_leader:
            self._run_scheduled_between_passes()
        if training.over:
            return None
        # A pass within the batch of another pass is part of that iteration, which is finished.
        if leads and not continues and self.is_over():
            self._cut_short(f"before a pass over phase '{training.phase}'")
            return None
        with self.client.errors(training.phase):
            batches = self._read(training, leads=leads)
        if leads:
            self._last_leader = training
            self.look_ahead()
        if continues_as_leader:
            self.journal.arrive()
            return batches if self.run_scheduled(training) else None
        return batches

    def _read(self, training: TrainPass, *, leads: bool) -> Iterator[Any]:
        """Return the batches that are left of the current round of a pass."""
        loader = pass_loader(self.schemas[training.phase].dataset_name or "", self.runner, self.context)
        if training.state is None:
            rounds = self.client.order_of_pass(self._rounds.get(training.phase, 0), self._epoch_number())
            self._rounds[training.phase] = training.begin_round_after(rounds)
        training.resources.enter_context(self.client.errors(training.phase))
        return training.read(loader, interruptible=leads)

    def start(self, training: TrainPass, batches: int) -> None:
        """Prepare the Brain of a pass, and call the plugins.

        Args:
            training: the pass.
            batches: how many batches a round has; 0 if that is unknown.

        Raises:
            StageError: another open pass trains the same Brain.
            CheckpointError: the checkpoint has another number of optimizers.
        """
        phase = self.phases[training.phase]
        for other in self.open_passes:
            if other.brain is training.brain:
                what = f"phase.{training.phase}: a pass starts while one of phase '{other.phase}' is open"
                raise StageError(f"{what}, and both train the same Brain; end that one first")
        self.client.bind(training, phase)
        checkpoint = self.journal.checkpoint
        count = len(phase.optim_schedulers)
        if checkpoint and training.state and len(training.state.discarded) != count:
            where = f"{checkpoint.path}: engine: the pass over '{training.phase}'"
            raise CheckpointError(f"{where} is not of {count} optim_schedulers; use another checkpoint")
        self.open_passes.append(training)
        if training.state is None:
            if self.journal.inner is not None and not self.numbers.has_trained(training.phase):
                self.hooks.before_phase(context=self.context, phase=training.phase)
            self.hooks.before_pass(context=self.context, phase=training.phase)
        training.start(self._epoch_number(), batches)

    def next_round(self, training: TrainPass) -> Iterator[Any]:
        """Return the batches of one more round over the data of a pass, in a new order."""
        training.begin_round()
        return self._read(training, leads=self.active_passes[0] is training)

    def report_length(self, training: TrainPass, batches: int) -> None:
        """Warn if a round had another number of batches than its loader has announced; 0 if it has announced none."""
        address = self.client.address(training.phase)
        self.lengths.report(training.phase, batches, training.in_round, address)

    def finish_inner_batches(self, training: TrainPass) -> None:
        """Finish what the code of the last batch has started, since the pass is asked for its next batch."""
        inner = [*self.active_passes, training].index(training) + 1
        self._finish_inner_batches(inner)
        if training not in self.active_passes:
            self.active_passes.append(training)

    def close(self, training: TrainPass) -> None:
        """End a pass, and the passes that were started within its last batch."""
        if training in self.active_passes[:-1]:
            self.finish_inner_batches(training)
        self._end(training)

    def _end(self, training: TrainPass) -> None:
        """End a pass, and take its numbers, once."""
        if training.over or not training.open:
            training.finish()
            return
        epoch: int = self.context["current_epoch"]
        updates = self.counters["update"]
        with self.client.errors(training.phase):
            training.end(epoch, f"'{self.schemas[training.phase].dataset_name}'")
        self._log_discarded_windows(training.phase)
        if training in self.active_passes:
            self.active_passes.remove(training)
        # The end of the pass may have closed a window, so that its last update comes after the last iteration.
        self.next_check = min(self.next_check, self._next_scheduled())
        self.open_passes.remove(training)
        closed_window = self.counters["update"] > updates
        self.validation.outdate(training.brain, always=self.cut_short and closed_window)
        training.updater.end_pass(None if self.cut_short else epoch + 1)
        extend_metrics(self.context, training.phase, training.numbers)
        training.share_numbers()
        self.numbers.take(training.phase, training.numbers, trained=True)
        if not self.cut_short:
            self.hooks.after_pass(context=self.context, phase=training.phase, metrics=training.numbers)

    def _log_discarded_windows(self, phase: str) -> None:
        """Log how many windows of a phase were discarded in this epoch, unless that is done."""
        schedulers = self.phases[phase].optim_schedulers
        log_discarded_windows(self.client.address(phase), self.context["current_epoch"], schedulers)

    # What is scheduled or requested.

    def run_scheduled(self, training: TrainPass) -> bool:
        """Do what is scheduled or requested after an iteration, unless another pass leads.

        Returns:
            Whether training continues.

        Raises:
            StoppedError, KeyboardInterrupt: a signal has requested the end. What is scheduled is done, and a checkpoint is saved.
            ExitError: ``is_exit`` has requested the end. The same is done.
        """
        if self.active_passes[0] is training:
            return self._run_scheduled(training)
        iteration = self.counters["iteration"]
        self._waiting_since = self._waiting_since or iteration
        if iteration - self._waiting_since >= PATIENCE:
            self._waiting_since = 0
            what = f"for {PATIENCE} iterations something is scheduled, such as a save"
            logger.warning(
                f"{what}, and waits until the pass over '{self.active_passes[0].phase}' is asked for a batch"
            )
        return True

    def _run_scheduled(self, training: TrainPass | None) -> bool:
        """Do what is scheduled or requested, and return whether training continues.

        Args:
            training: the pass that leads or has led; None if the stage creates its batches itself.
        """
        self._waiting_since = 0
        actions = self._scheduled_actions()
        if actions is None:
            self.look_ahead()
            return True
        self._leader = training if training in self.active_passes else None
        continues = self._run_actions(actions, [training.phase] if training else self.validation.phases)
        self._leader = None
        return continues

    def _run_scheduled_between_passes(self) -> None:
        """Do what is scheduled or requested while no batch is active."""
        self.journal.arrive_after_last_call()
        if self.journal.resuming or self.cut_short:
            return
        is_scheduled = self.counters["iteration"] >= self.next_check and self._last_leader
        # If a signal has interrupted a validation, it is repeated here.
        if is_scheduled or self.validation.running:
            self._run_scheduled(self._last_leader)
        elif exit_requested(self.context) or self.context.requests:
            self._validate_on_request()
            self.save_if(False)

    def _print(self) -> None:
        """Give the numbers of the open passes since the last time to the plugins. On a GPU this waits for the work so far."""
        # In the order of the config, in whatever order the passes were started.
        for name in self.phases:
            for training in [training for training in self.open_passes if training.phase == name]:
                numbers = training.recent_numbers(self.phases[name].optim_schedulers)
                if self._extends_metrics:
                    extend_metrics(self.context, name, numbers)
                self.hooks.on_print_interval(context=self.context, phase=name, metrics=numbers)

    # The end.

    def _finish_preparing(self) -> None:
        """Request the first validation."""
        self._request_first_validation()

    def _finish_work(self) -> None:
        """Finish all active batches, and end all passes."""
        self._finish_active_batches()
        for training in list(self.open_passes):
            self.close(training)
        self.journal.require_arrival("the runner stage ended")

    def _stop(self) -> None:
        """Note where training has ended. If that was not the end of the leading pass, training is cut short."""
        training = self._leader
        if training is None or self.cut_short or training.has_ended():
            return
        progress = training.describe_progress()
        if training.has_ended() is None:
            # Requesting the next batch may change what a checkpoint holds.
            if self._has_reached_limit():
                self._save()
            if not training.has_more():
                return
        self._cut_short(f"after {progress}")

    def _with_epoch(self, place: str) -> str:
        """Return a place in the training for the log, with the epoch if one is running."""
        return place if self.journal.inner is None else super()._with_epoch(place)

    def _resume_passes(self, state: EngineState) -> None:
        """Continue the passes that were open when the checkpoint was saved."""
        for training in self.journal.load(state, self._new_pass):
            self.start(training, 0)

    def _end_cut_epoch(self) -> None:
        """Do nothing: a resumed training continues the epoch that was cut short."""

    # Active batches.

    def _is_in_batch(self) -> bool:
        """Return whether the code is training on a batch."""
        return bool(self.active_passes) and not self.active_passes[0].dropped

    def _is_in_step(self) -> bool:
        """Return whether the leading pass has a batch that is not counted. It is finished before the training ends."""
        return bool(self.active_passes) and self.active_passes[0].in_batch

    def _is_busy(self) -> bool:
        """Return whether a batch is active, or the stage may train on batches that it creates itself."""
        return bool(self.active_passes) or self._may_have_own_batches()

    def _finish_active_batches(self) -> None:
        """Finish all active batches, and end what the code has left early, before a call that yields no batch."""
        self._finish_inner_batches(len(self.active_passes))
        for training in reversed(self.active_passes):
            if training.in_batch:
                training.count_batch()
        call = self._interrupted_epochs
        if call:
            self._interrupted_epochs = None
            self._end_epoch(call)

    def _finish_inner_batches(self, count: int) -> None:
        """Finish the batches of all but the outermost passes, and end the passes that the code has left early.

        Args:
            count: how many passes keep their batch active.
        """
        leader_is_dropped = bool(self.active_passes) and self.active_passes[0].dropped
        for index, training in enumerate(self.active_passes):
            if training.dropped and index < count:
                count = index
        inner = self.active_passes[count:]
        del self.active_passes[count:]
        for training in reversed(inner):
            if training.in_batch:
                training.count_batch()
        for training in inner:
            if training.dropped:
                self._end(training)
        if leader_is_dropped:
            self._run_scheduled_between_passes()


def _numbers_left(
    call: EntryState, end: int, counters: Mapping[str, int], numbers: Iterable[int] | None
) -> Iterator[int]:
    """Yield the number of each epoch that is left.

    Args:
        call: the call of ``epochs``.
        end: how many epochs are done at the end.
        counters: the counters of the training.
        numbers: the numbers of all epochs; None counts from 0.
    """
    if numbers is None or call.epochs is None:
        while counters["epoch"] < end:
            yield counters["epoch"]
        return
    trained = Counter(call.epochs)
    left = map(int, numbers)
    while len(call.epochs) < end - call.first:
        number = next(left, None)
        if number is None:
            return
        if trained[number]:
            trained[number] -= 1
        else:
            yield number


def engine_of(context: Context) -> PassEngine:
    """Return the engine of the runner stage, prepared.

    Raises:
        StageError: no runner stage trains.
    """
    if not isinstance(context.loop, PassEngine):
        raise StageError("the engine is there in the runner stage alone; call this there")
    context.loop.begin()
    return context.loop
