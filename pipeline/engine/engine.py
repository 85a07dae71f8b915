"""Engine: runs a training. It decides what happens after which iteration, what is saved, and where a resumed training continues."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any, NoReturn, cast

from loguru import logger

from pipeline.checkpoint.load_errors import fitting
from pipeline.checkpoint.random_state import lacking, random_state, restore_random_state, states_of
from pipeline.checkpoint.reader import Iterations
from pipeline.checkpoint.run_checkpointer import RunCheckpointer
from pipeline.checkpoint.state import EntryState, EpochStart, ValidationState
from pipeline.checkpoint.storage import as_number
from pipeline.config.schema import RunnerSchema, time_is_over
from pipeline.context import CHECKPOINT, VALIDATION, Context, Phase
from pipeline.distributed.agreement import Agreement
from pipeline.distributed.world import current_world
from pipeline.engine.checkpoints import Checkpoints
from pipeline.engine.client import Client, Exporter, IterationClient
from pipeline.engine.evaluation import Validation, batches_of, evaluate, evaluate_each, extend_metrics
from pipeline.engine.journal import Journal
from pipeline.engine.phase import (
    PlannedLength,
    pass_loader,
    phase_of,
    plan_schedules,
)
from pipeline.engine.train_pass import PassIterator, TrainPass
from pipeline.engine.trainable import Stage
from pipeline.engine.triggers import NEVER, Schedule
from pipeline.errors import CheckpointError, ConfigError, ContextError, StageError, one_of
from pipeline.metrics.base import build_train_metrics
from pipeline.metrics.ranks import in_step
from pipeline.optim.optim_scheduler import attach_optimizer_hooks, log_discarded_windows
from pipeline.signals import SHUTDOWN, ExitError, StoppedError, exit_requested
from pipeline.user_code.plugin_calls import hook_or_none

# After so many iterations a warning says what a scheduled action waits for.
PATIENCE = 1000


# Makes an exporter for a runner with these settings, once the models are built.
MakeExporter = Callable[[RunnerSchema, Context], Exporter]


class Engine:
    """Trains the phases of a runner, a Brain alone, or an experiment. It starts with the first call of one of its methods.

    A runner stage calls ``epochs``, ``batches``, ``validate`` and ``save``, through the context or by itself; so does
    ``Brain.fit``. A TrainPass, which has the loop over the batches, calls ``open``, ``on_due`` and ``close``. An experiment,
    which reads as many batches as it likes, loops over ``iterations``. What differs between them is in the Client.

    Passes may be nested: the code that trains on a batch of one pass may ask another pass for batches. A batch is active until
    its pass, or a pass around it, is asked for its next batch. The outermost pass with an active batch leads. The engine checks
    what is scheduled only when the leading pass is asked for a batch, or while no pass leads.

    Args:
        context: after network and startup.
        client: what is trained, and how.
        make_exporter: makes what saves the models for other programs, if the runner asks for it.

    Attributes:
        iterating: the client if it trains without passes, else None.
        counters: ``context["train_state"]``.
        schedule: the intervals and limits.
        due: the next iteration after which ``on_due`` is called.
        work: the passes that have an active batch, the outermost first.
        true_lengths: phase -> the batches of its last round, if the loader announced another number.
        agreement: makes several processes do the same after the same iteration; None for a single process.
        before_batch, after_batch: call the plugins; None if no plugin listens.
        in_use: whether one of its methods was called.
        over: whether training is over.
        cut_short: whether training has ended in the middle of an epoch, or of a pass outside of epochs.
        place_saved: whether a limit has cut it short, and a checkpoint of that place is saved. Nothing is saved after it.
        journal: what the stage has called; after a resume it brings the stage to where the checkpoint was saved.
        metrics: phase -> name -> number of the running epoch; ``context["metrics"]``.
        measured_at: phase -> name -> the iteration at which the number was measured.
        planned_length: the length of the training that the learning rate schedules were planned for.
        passes: phase -> how many rounds over its data were started.
    """

    before_batch: Callable[..., Any] | None = None
    after_batch: Callable[..., Any] | None = None

    def __init__(self, context: Context, client: Client, make_exporter: MakeExporter | None = None) -> None:
        self.context = context
        self.client = client
        self._make_exporter = make_exporter
        self.iterating = client if isinstance(client, IterationClient) else None
        self.counters: dict[str, int] = context["train_state"]
        self.due = NEVER
        self.work: list[TrainPass] = []
        world = current_world()
        self.agreement = Agreement(world, context) if world.size > 1 else None
        self.true_lengths: dict[str, int] = {}
        self._warned: set[str] = set()
        self.in_use = False
        self.over = False
        self.cut_short = False
        self.place_saved = False
        self.store = cast("RunCheckpointer", context["checkpointer"]).store
        self.journal = Journal(self.store.resumed, self._arrive)
        self.passes: dict[str, int] = {}
        self.planned_length = PlannedLength({}, {})
        self.metrics: dict[str, dict[str, Any]] = {}
        self.measured_at: dict[str, dict[str, int]] = {}
        self.resources = ExitStack()
        # The open passes, with the time and the samples at which their numbers were last printed.
        self._open: dict[TrainPass, tuple[float, int]] = {}
        # The leading pass, while scheduled actions run. A checkpoint that is saved then continues with it.
        self._leader: TrainPass | None = None
        # The pass that led last. What is scheduled while no pass leads is done for it.
        self._last_leader: TrainPass | None = None
        # The running epochs, and the epochs that a break has left. Their last epoch ends when the stage calls a method again.
        self._epochs_call: EntryState | None = None
        self._interrupted_epochs: EntryState | None = None
        # The iterations and updates when the epoch started.
        self._epoch_began = self._new_epoch_start()
        self._due_since = 0
        # The iteration of the last checkpoint.
        self._saved_at = self.counters["iteration"]
        # Whether the block of ``running`` was entered, whether an iteration without a pass is running, and whether the training
        # has ended.
        self._is_running = self._in_iteration = self._finished = False

    # What a stage calls.

    def epochs(self, count: int | None = None, numbers: Iterable[int] | None = None) -> Iterator[int]:
        """Yield the number of each epoch that is left: of ``count``, or up to the runner's limits.

        Args:
            count: how many epochs there are, those before a resume included.
            numbers: the number of each epoch; of each number as many are skipped as were trained before a resume. None
                counts from 0.

        Raises:
            StageError: an epoch is running, or a batch is active.
            CheckpointError: the checkpoint was saved in the middle of an epoch with another number.
        """
        self._begin_calls("epochs", "read_batch, which starts the epochs")
        if self.journal.inner is not None and not self._interrupted_epochs:
            raise StageError("context.epochs: an epoch is running; end it first, or use batches(…, repeat=True)")
        self._settle()
        if self._in_body():
            what = f"context.epochs: a batch of the pass over '{self.work[0].phase}' is active"
            raise StageError(f"{what}; end that pass first, with close(), or take its first batch in an epoch")
        trained = None if numbers is None else list[int]()
        call = self.journal.call("epochs", "", in_body=False, first=self.counters["epoch"], epochs=trained)
        end = NEVER if count is None else call.first + count
        return self._epochs(call, _numbers_left(call, end, self.counters, numbers))

    def _epochs(self, call: EntryState, numbers: Iterator[int]) -> Iterator[int]:
        journal = self.journal
        self._between()
        try:
            # If calls after them were made before the resume, the epochs were over.
            over = call.over or (journal.resuming and not journal.resuming_in_epoch)
            while not over and (journal.resuming_in_epoch or not self.is_over()):
                number = next(numbers, None)
                if number is None:
                    break
                call.begin_epoch(number, again=journal.resuming_in_epoch)
                self._epochs_call = call
                self.context["current_epoch"] = number
                journal.begin_epoch()
                if not journal.resuming_in_epoch:
                    self._epoch_began = self._new_epoch_start()
                    self.forget_numbers()
                    self.hooks.before_epoch(context=self.context)
                yield number
                self._end_epoch()
        except GeneratorExit:
            self._interrupted_epochs = call
            raise

    def forget_numbers(self) -> None:
        """Forget the numbers of the epoch before."""
        self.metrics, self.measured_at = self.client.no_numbers(), {}
        self.context["metrics"] = self.metrics

    @property
    def _number(self) -> int:
        """The number of the running epoch."""
        call = self._epochs_call
        return self.counters["epoch"] if call is None or call.epochs is None else call.number

    def _new_epoch_start(self) -> EpochStart:
        return EpochStart(iteration=self.counters["iteration"], update=self.counters["update"])

    def batches(self, phase: str | Phase, *, count: int | None = None, repeat: bool = False) -> PassIterator:
        """Return one pass over the data of a phase: an iterator of batches, on their device.

        Args:
            phase: its name, or its entry.
            count: how many batches end it, those before a resume included; None: the data does.
            repeat: whether it starts again at the end of the data, in a new order.
        """
        training = self.train_pass(phase)
        training.limit(count, repeat=repeat)
        return PassIterator(training)

    def train_pass(self, phase: str | Phase) -> TrainPass:
        """Return the same pass as an object. Its ``run`` trains on all batches."""
        self._begin_calls("batches", "read_batch")
        name = self._name(phase)
        if self._interrupted_epochs:
            self._settle()
        training = self.journal.recall("pass", name)
        if not isinstance(training, TrainPass):
            training = self._new_pass(name)
            self.journal.add_pass(training, in_body=self._in_body())
        if training.over or (training.state and not self._last_leader):
            # The resumed code has passed it, or it was started outside of an epoch that is over. So it counts as the last leader.
            self._last_leader = training
        return training

    def validate(self, phase: str | Phase | None = None) -> dict[str, Any]:
        """Validate a phase, and return its numbers, such as ``valid_loss`` or ``test/loss``; None validates all phases.

        Raises:
            ConfigError: the phase has no validation data.
        """
        self._begin_calls("validate", "context.request('validation')")
        names = [self._name(phase)] if phase is not None else list(self.validation.phases)
        for name in names or ["…"]:
            if name not in self.validation.phases:
                what = f"phase.{name}.valid_dataset_name: is not set, and context.validate() needs it"
                raise ConfigError(f"{what}; name a dataset there")
        self._settle()
        call = self.journal.call("validate", ",".join(names), in_body=self._in_body())
        if not call.over:
            self.journal.arrive_after_last_call()
            for name in names:
                call.numbers[name] = self._validate(name, asked=True)
            call.finish()
            self.wake()
        return call.numbers if phase is None else call.numbers[names[0]]

    def _begin_calls(self, method: str, instead: str) -> None:
        """Prepare everything for a call that the journal notes.

        Args:
            method: what was called.
            instead: what to call in an experiment, whose code would not call it again after a resume.

        Raises:
            StageError: an experiment trains.
        """
        if self.iterating:
            raise StageError(f"context.{method} was called in an experiment; call {instead}")
        self.begin()

    def iterations(self) -> Iterator[int]:
        """Yield the number of each iteration, from 1, until training is over; one is done when the next is requested.

        This is for a client without passes: an iteration is what its code does until it asks for the next one.
        """
        client, counters = self.iterating, self.counters
        assert client, "only a client that trains without passes counts its iterations"
        self.begin()
        client.start_iterations()
        if not counters["iteration"]:
            self._request_first_validation()
        self._between()
        goes_on = not self.is_over()
        while goes_on:
            self._in_iteration = True
            yield counters["iteration"] + 1
            self._in_iteration = False
            counters["iteration"] += 1
            counters["update"] += 1
            self.validation.outdate_all()
            ended = client.after_iteration()
            if ended is not None or counters["iteration"] >= self.due:
                goes_on = self._do_due(None, ended)

    def set_schedule(self, schedule: Schedule) -> None:
        """Use another schedule, whose limits may be higher, and check it after this iteration."""
        self.schedule = schedule
        self.over = self.cut_short = self.place_saved = False
        self.wake()

    def adopt(self, before: Engine) -> None:
        """Continue with the numbers and the validations of another engine, which has trained the same before."""
        self.begin()
        self.metrics, self.measured_at = before.metrics, before.measured_at
        self.context["metrics"] = self.metrics
        self.validation.load_state_dict(before.validation.state_dict())

    def wake(self) -> None:
        """Call ``on_due`` after the current iteration. Signals, ``is_exit``, ``stop`` and ``request`` do this."""
        self.due = 0

    def look_ahead(self) -> None:
        """Set the next iteration after which ``on_due`` is called: this one if something was requested meanwhile."""
        self.due = self.next_check()
        if exit_requested(self.context) or self.context.stop_reason is not None or self.context.requests:
            self.wake()

    def next_check(self) -> int:
        """Return the next iteration after which something may be scheduled."""
        return self.schedule.next_check(self.counters, self.agreement)

    @property
    def resuming(self) -> bool:
        """Whether the code of a resumed training has not yet arrived where the checkpoint was saved."""
        return self.journal.resuming

    def save(self) -> None:
        """Save a checkpoint: now, or when the leading pass is asked for its next batch.

        In an epoch without a batch it is saved when a pass starts, or when the epoch ends.
        """
        self.begin()
        self._settle()
        self.journal.arrive_after_last_call()
        if self.journal.resuming or self.place_saved:
            return
        if self.work or self._in_iteration or self._may_have_own_batches():
            self.context.request(CHECKPOINT)
        else:
            self._save()

    # What the default Runner calls.

    def end_phase(self, phase: Phase) -> bool:
        """Validate a phase after its pass, if the intervals say so; return whether training is over."""
        if self.cut_short:
            return True
        entries = self.journal.inner or ()
        own = [entry for entry in entries if isinstance(entry, TrainPass) and entry.phase == phase.name]
        # A train_phase of one's own may do without a pass.
        entry = own[-1] if own else self.journal.call("validate", phase.name, in_body=self._in_body())
        if not entry.validated:
            self.journal.arrive_after_last_call()
            if self.schedule.validating.fires_after(self.counters["epoch"] + 1):
                self._validate(phase.name)
            entry.mark_validated()
            if self._is_trained(phase.name) and not any(earlier.validated for earlier in own[:-1]):
                self.hooks.after_phase(context=self.context, phase=phase.name)
        return self.is_over()

    def end_between_phases(self) -> None:
        """A limit has ended training before the next phase of the epoch: a resumed run continues there."""
        self._cut_short("between two phases")

    def is_over(self) -> bool:
        """Return whether training is over. While the code of a resumed stage has not arrived at its place, it is not."""
        if not self.journal.resuming and not self.over:
            over = self.client.is_over(limit=self.schedule.over(self.counters))
            # Where several processes train, rank 0 says so; and what plugins have asked for meanwhile counts now.
            self.over = bool(self.agreement.look(self.counters["iteration"], over)[0] if self.agreement else over)
            # The step of the pass that leads is finished first, whatever its body asks for.
            in_step = bool(self.work) and self.work[0].in_batch
            if not (self.over or in_step) and self.context.stop_reason is not None:
                self.over = True
                logger.info(f"training ends after iteration {self.counters['iteration']}: {self.context.stop_reason}")
        return self.over

    def save_if(self, due: bool) -> None:
        """Save if that is scheduled, after one of the best validations, or if the end was requested; then end the run.

        Args:
            due: whether it is scheduled.

        Raises:
            StoppedError, KeyboardInterrupt: a signal has requested the end.
            ExitError: ``is_exit`` has.
        """
        best, ending = self.validation.best, exit_requested(self.context)
        if self.journal.resuming:
            # The checkpoint that it resumes from is still valid.
            SHUTDOWN.raise_if_requested()
            return
        if self.place_saved:
            if ending:
                self._end_run()
            return
        is_best = best is not None and best.deserves_checkpoint(self.counters["iteration"])
        due = due or is_best or CHECKPOINT in self.context.requests
        if not (due or ending):
            return
        self._save()
        # A plugin that is notified of a checkpoint may request the end; this moment is saved then.
        if exit_requested(self.context):
            self._end_run()

    def _end_run(self) -> NoReturn:
        """End the run, as was requested: nothing is left to do at its end."""
        self._finished = True
        self.checkpoints.end_run()

    def plan_schedules(self, own: str) -> None:
        """Tell the learning rate schedules that need it how long the training is.

        Args:
            own: user code that decides how long it is; ``""`` if the runner's keys and the data decide.

        Raises:
            ConfigError: as of ``phase.plan_schedules``.
        """
        self.planned_length = plan_schedules(self.runner, list(self.schemas.values()), self.context, own)

    # What the session calls.

    @contextmanager
    def running(self) -> Iterator[None]:
        """A block around the training: finish it at the end, and close everything after a failure."""
        with ExitStack() as stack:
            stack.push(self._close)
            self._is_running = True
            if self.in_use:
                self._defer()
            with suppress(ExitError):
                yield
                self.finish()

    def _close(self, *error: Any) -> bool | None:
        """Leave the blocks around all open passes, with the error that ends them, if there is one."""
        stack = ExitStack()
        for resources in (self.resources, *(training.resources for training in self._open)):
            stack.push(resources)
        return stack.__exit__(*error)

    def begin(self) -> None:
        """Prepare everything. The first call of any other method does this."""
        if self.in_use:
            return
        context = self.context
        if context.peek("is_infer"):
            raise StageError(f"runner.{context['runner_name']}.class: is infer, which trains nothing; write train")
        if not isinstance(models := context["model"], Mapping):
            kind, keys = type(models).__name__, "{phase: {model, brain, optim_schedulers, updater}}"
            raise ContextError(f"context['model'] is a {kind}, no dict of phases; write {keys} in the network stage")
        self.in_use = True
        self.runner = self.client.runner
        self.hooks = context["hooks"]
        self.before_batch = hook_or_none(self.hooks, "before_batch")
        self.after_batch = hook_or_none(self.hooks, "after_batch")
        self.extends = hook_or_none(self.hooks, "extend_metrics") is not None
        schemas = self.client.phases()
        self.schemas = {phase.name: phase for phase in schemas}
        self.schedule = self.client.schedule(self.counters)
        context["best"] = None
        self.validation = Validation(context, self.runner, schemas)
        self.phases = {name: phase_of(name, context) for name in self.schemas}
        for phase in self.phases.values():
            attach_optimizer_hooks(phase.get("optim_schedulers") or {}, context, phase.name)
        on_error, session = self.runner.on_save_error, self.client.session
        store = self.store if self.client.saves else None
        self.checkpoints = Checkpoints(store, context, self.validation.best, on_error, session)
        self.exporter: Exporter | None = None
        if self.runner.save_inference_interval:
            assert self._make_exporter, "only a runner of a config saves models for inference"
            self.exporter = self._make_exporter(self.runner, context)
        self._resume()
        if self.agreement is None or self.agreement.world.is_main:
            self.schedule.limit_time(self.runner.max_time, context, self.journal.checkpoint)
        context["metrics"] = self.metrics = self.metrics or self.client.no_numbers()
        if self._is_running:
            self._defer()
        # That of the last epoch, in case none is left.
        last = max(0, self.counters["epoch"] - (not self.journal.resuming_in_epoch))
        context["current_epoch"] = self.iterating.current_epoch() if self.iterating else last
        if self.exporter:
            self.exporter.begin()
        self.look_ahead()
        if self.journal.checkpoint:
            self.hooks.on_resume(context=context)
        if self.iterating:
            # It makes no calls that would have to be repeated.
            self.journal.arrive_after_last_call()
        else:
            self._request_first_validation()

    def _defer(self) -> None:
        """Have signals and requests wait for the end of a step, until the training ends."""
        if self.agreement:
            self.resources.enter_context(self.agreement.ruling())
        self.resources.enter_context(SHUTDOWN.defer(self.wake))

    def _request_first_validation(self) -> None:
        """Request a validation before the first step, if the intervals say so; a training interrupted in it keeps the request."""
        if self.schedule.validating.starts and not self.journal.checkpoint:
            # All processes come here and decide alike, so they need not agree on it first.
            self.context.grant("request", VALIDATION)

    def finish(self) -> None:
        """End the training: end its passes, validate the last weights, and save."""
        if not self.in_use or self._finished:
            return
        self._finished = True
        self._settle()
        for training in list(self._open):
            self.close(training)
        self.journal.require_arrival("the runner stage ended")
        if self.iterating:
            if self.is_over():
                self._stop_in(None)
            if not self.cut_short:
                self.iterating.end_epoch(cut_short=False)
        is_done = self.client.ends_saved and self.counters["iteration"] == self._saved_at and not self.cut_short
        # A stop that the last validation asks for, as early stopping does, would end a resumed run.
        with self.context.stops_withdrawn() if self.place_saved else nullcontext():
            if not is_done:
                self._validate_last()
                if self.iterating and self.cut_short:
                    self.iterating.end_epoch(cut_short=True)
                if not self.place_saved:
                    self._save()
            self.checkpoints.finish()
            if self.exporter:
                self.exporter.finish()
            if self.agreement:
                # A signal that came meanwhile ends all processes.
                self.agreement.look(self.counters["iteration"])

    # What its passes call.

    def open(self, training: TrainPass) -> Iterator[Any] | None:
        """Start a pass, or continue one, and return its batches; None if it is over at once."""
        if self.work and self.work[-1].dropped:
            self._settle()
        goes_on, leads = training.state is not None, not self.work
        is_leader = goes_on and training is self.journal.leader
        if leads and not is_leader:
            self._between()
        if training.over:
            return None
        # A pass in the body of another's batch is part of that step, which is finished.
        if leads and not goes_on and self.is_over():
            self._cut_short(f"before a pass over phase '{training.phase}'")
            return None
        with self.client.errors(training.phase):
            batches = self._read(training, leads=leads)
        if leads:
            self._last_leader = training
            self.look_ahead()
        if is_leader:
            self.journal.arrive()
            return batches if self.on_due(training) else None
        return batches

    def _read(self, training: TrainPass, *, leads: bool) -> Iterator[Any]:
        """Return the batches that are left of the current round of a pass."""
        loader = pass_loader(self.schemas[training.phase].dataset_name or "", self.runner, self.context)
        if training.state is None:
            rounds = self.client.order_of_pass(self.passes.get(training.phase, 0), self._number)
            self.passes[training.phase] = training.begin_round_after(rounds)
        training.resources.enter_context(self.client.errors(training.phase))
        return training.read(loader, interruptible=leads)

    def start(self, training: TrainPass, batches: int) -> None:
        """Prepare the Brain of a pass."""
        brain, own = training.brain, self.phases[training.phase]
        for other in self._open:
            if other.brain is brain:
                what = f"phase.{training.phase}: a pass starts while one of phase '{other.phase}' is open"
                raise StageError(f"{what}, and both train the same Brain; end that one first")
        self.client.bind(training, own)
        checkpoint, count = self.journal.checkpoint, len(own.optim_schedulers)
        if checkpoint and training.state and len(training.state.discarded) != count:
            where = f"{checkpoint.path}: engine: the pass over '{training.phase}'"
            raise CheckpointError(f"{where} is not of {count} optim_schedulers; use another checkpoint")
        self._open[training] = time.perf_counter(), self.counters["samples"]
        if training.state is None:
            if self.journal.inner is not None and not self._is_trained(training.phase):
                self.hooks.before_phase(context=self.context, phase=training.phase)
            self.hooks.before_pass(context=self.context, phase=training.phase)
        training.start(self._number, batches)

    def report_length(self, training: TrainPass, batches: int) -> None:
        """Warn once for each phase whose round had another number of batches than announced.

        Args:
            training: the pass, at the end of the round.
            batches: what the loader said when the round started; 0 if it did not say it.
        """
        phase, count = training.phase, training.in_round
        if batches and count != batches:
            self.true_lengths[phase] = count
        steps = self.planned_length.steps.get(phase)
        expected = batches if steps is None else self.planned_length.batches[phase]
        if not expected or count == expected or phase in self._warned:
            return
        self._warned.add(phase)
        what = f"{self.client.address(phase)}: announced {expected:,} batches, got {count:,}"
        planned = f"; the learning rate schedule was planned for {steps:,} updates" if steps is not None else ""
        logger.warning(f"{what}{planned}")

    def generators(self) -> dict[str, Any]:
        """Return the random generators of the Brains, the updaters and the data, by name."""
        return self.client.generators()

    def next_round(self, training: TrainPass) -> Iterator[Any]:
        """Return the batches of one more round over the data of a pass, in a new order."""
        training.begin_round()
        return self._read(training, leads=self.work[0] is training)

    def on_due(self, training: TrainPass) -> bool:
        """Do what is scheduled or requested after an iteration, unless another pass leads; return whether training continues.

        Raises:
            StoppedError, KeyboardInterrupt: a signal has requested the end. What is scheduled is done, and a checkpoint is saved.
            ExitError: ``is_exit`` has requested the end. The same is done.
        """
        if self.work[0] is training:
            return self._do_due(training)
        iteration = self.counters["iteration"]
        self._due_since = self._due_since or iteration
        if iteration - self._due_since >= PATIENCE:
            self._due_since = 0
            what = f"for {PATIENCE} iterations something is scheduled, such as a save"
            logger.warning(f"{what}, and waits until the pass over '{self.work[0].phase}' is asked for a batch")
        return True

    def _do_due(self, training: TrainPass | None, ended: int | None = None) -> bool:
        """Do what is scheduled or requested after an iteration, and return whether training continues.

        Args:
            training: the leading pass; None if the code creates or reads its batches itself.
            ended: how many epochs are over, if an iteration without a pass has read the last batch of one.
        """
        self._due_since = 0
        due = self._look(ended)
        if due is None:
            self.look_ahead()
            return True
        printing, validating, saving, exporting = due
        self._leader = training if training in self.work else None
        self.checkpoints.notify_saved()
        if any(due) or self.context.requests:
            for other in self._open:
                # On a GPU this waits for the work so far, as what follows does anyway.
                other.trainable.check_divergence()
        if printing:
            self._print_all()
        if exporting and self.exporter:
            self.exporter.save()
        self._validate_on_request()
        if validating:
            for name in [training.phase] if training else self.validation.phases:
                self._validate(name)
        over = self.is_over()
        if self.iterating and self.iterating.has_read_epoch():
            if over:
                self._validate_last()
            self.iterating.end_epoch(cut_short=False)
            over = self.is_over()
        if over:
            self._stop_in(training)
        else:
            self.save_if(saving)
            self.look_ahead()
        self._leader = None
        return not over

    def _look(self, ended: int | None) -> tuple[bool, bool, bool, bool] | None:
        """Return whether to print, to validate, to save and to export now; None if several processes have only looked.

        Args:
            ended: as in ``_do_due``.
        """
        printing, validating, saving, exporting = self.schedule.due(self.counters)
        # At the end of an epoch they are answered by the save that comes then.
        saving = saving or (self.journal.inner is not None and self.checkpoints.are_requested())
        if self.agreement:
            looked = self.agreement.look(self.counters["iteration"], printing, validating, saving, exporting)
            # What was requested has set the next iteration to 0.
            is_due = any(looked) or self.due == 0 or ended is not None
            if not (is_due or self.validation.running or self.schedule.over(self.counters)):
                return None
            printing, validating, saving, exporting = looked
        if self.validation.running:
            # A signal has interrupted it. It is made again, and then what was to be saved after it.
            validating = saving = True
        if ended is not None:
            validating = validating or self.schedule.validating.fires_after(ended)
            saving = saving or self.schedule.saving.fires_after(ended)
        return printing, validating, saving, exporting

    def _stop_in(self, training: TrainPass | None) -> None:
        """Training is over after an iteration. If that was not the last one of its pass or epoch, it is cut short."""
        if self.iterating and (place := self.iterating.place_in_epoch()):
            self._cut_short(f"after {place}")
        if training is None or self._leader is None or self.cut_short or training.has_ended():
            return
        progress = training.describe_progress()
        if training.has_ended() is None:
            # Asking for the next batch may change what a checkpoint holds.
            if self._is_limited:
                self._save()
            if not training.has_more():
                return
        self._cut_short(f"after {progress}")

    def _cut_short(self, place: str) -> None:
        """End training before its epoch is over. After a limit, save this place first, where a resumed training continues.

        Args:
            place: where training stops, for the log.
        """
        if self.cut_short:
            return
        has_epoch = self.journal.inner is not None or self.iterating
        logger.info(f"stopped in epoch {self.context['current_epoch']} {place}" if has_epoch else f"stopped {place}")
        self.cut_short = True
        if self._is_limited:
            for training in self._open:
                # On a GPU this waits for the work so far.
                training.trainable.check_divergence()
            self._save()
            self.place_saved = True
            self.checkpoints.end()

    @property
    def _is_limited(self) -> bool:
        """Whether a limit has ended the training, and not ``context.stop``. A resumed training may have a higher limit."""
        reason, max_time = self.context.stop_reason, self.runner.max_time
        return reason is None or (max_time is not None and reason == time_is_over(max_time))

    def _print_all(self) -> None:
        """Give the plugins the numbers since the last time."""
        # In the order of the config, in whatever order the passes were started, or started again.
        for name in self.phases:
            for training in [own for own in self._open if own.phase == name]:
                self._print(training)
        if self.iterating:
            self.iterating.print_numbers()

    def _print(self, training: TrainPass) -> None:
        """Give the plugins the numbers of a pass since the last time. On a GPU this waits for the work so far."""
        phase, of_pass = training.phase, training.trainable.numbers
        numbers, optim_schedulers = {"loss": of_pass.loss.recent()}, self.phases[phase].optim_schedulers
        for name, scheduler in optim_schedulers.items():
            suffix = f".{name}" if len(optim_schedulers) > 1 else ""
            # As long as none was made, there is no number of the last update.
            for what, value in (("learning_rate", scheduler.rate), ("gradient_norm", scheduler.gradient_norm)):
                if value is not None:
                    numbers[f"{what}{suffix}"] = float(value)
        numbers |= of_pass.logged.recent()
        (began, before), now, samples = self._open[training], time.perf_counter(), self.counters["samples"]
        numbers["samples_per_second"] = (samples - before) / (now - began)
        self._open[training] = now, samples
        if self.extends:
            extend_metrics(self.context, phase, numbers)
        self.hooks.on_print_interval(context=self.context, phase=phase, metrics=numbers)

    def unwind(self, training: TrainPass) -> None:
        """Finish what the code of the last batch has started, since the pass is asked for its next batch."""
        count = 0
        for other in self.work:
            count += 1
            if other is training:
                break
        self._unwind(count)
        if training not in self.work:
            self.work.append(training)

    def close(self, training: TrainPass) -> None:
        """A pass is over."""
        if training in self.work[:-1]:
            self.unwind(training)
        self._end(training)

    # What is done when.

    def _unwind(self, count: int) -> None:
        """Finish the batches of all but the outermost passes, and end the passes that were left early.

        Args:
            count: how many passes keep their batch active.
        """
        leader_is_dropped = bool(self.work) and self.work[0].dropped
        for index, training in enumerate(self.work):
            if training.dropped and index < count:
                count = index
        others, self.work[count:] = self.work[count:], []
        for training in reversed(others):
            if training.in_batch:
                training.count_batch()
        for training in others:
            if training.dropped:
                self._end(training)
        if leader_is_dropped:
            self._between()

    def _settle(self) -> None:
        """Finish all active batches, and end what was left early, before a call that yields no batch."""
        self._unwind(len(self.work))
        for training in reversed(self.work):
            if training.in_batch:
                training.count_batch()
        if call := self._interrupted_epochs:
            self._interrupted_epochs = None
            self._end_epoch(call)

    def _between(self) -> None:
        """Do what is scheduled or requested while no batch is active."""
        self.journal.arrive_after_last_call()
        if self.journal.resuming or self.cut_short:
            return
        due = self.counters["iteration"] >= self.due
        # A validation that a signal has interrupted is made again.
        if (due and self._last_leader) or self.validation.running:
            self._do_due(self._last_leader)
        elif exit_requested(self.context) or self.context.requests:
            self._validate_on_request()
            self.save_if(False)

    def _end(self, training: TrainPass) -> None:
        """End a pass, and take its numbers, once."""
        if training.over or not training.open:
            training.finish()
            return
        updates = self.counters["update"]
        with self.client.errors(training.phase):
            training.end(self.context["current_epoch"], f"'{self.schemas[training.phase].dataset_name}'")
        self._log_discarded_windows(training.phase)
        if training in self.work:
            self.work.remove(training)
        # Its last update, of a window that its end has closed, may have come after the last iteration.
        self.due = min(self.due, self.next_check())
        del self._open[training]
        closed_window = self.counters["update"] > updates
        self.validation.outdate(training.brain, always=self.cut_short and closed_window)
        training.updater.end_pass(None if self.cut_short else self.context["current_epoch"] + 1)
        extend_metrics(self.context, training.phase, training.numbers)
        training.share_numbers()
        self.take_numbers(training.phase, training.numbers, trained=True)
        if not self.cut_short:
            self.hooks.after_pass(context=self.context, phase=training.phase, metrics=training.numbers)

    def _log_discarded_windows(self, phase: str) -> None:
        """Log how many windows of a phase were discarded in this epoch, unless that is done."""
        schedulers = self.phases[phase].optim_schedulers
        log_discarded_windows(self.client.address(phase), self.context["current_epoch"], schedulers)

    def _is_trained(self, phase: str) -> bool:
        """Whether a pass over the data of a phase was made in this epoch."""
        return "loss" in self.metrics.get(phase, {})

    def take_numbers(self, phase: str, numbers: Mapping[str, float], *, trained: bool = False) -> None:
        """Put numbers where plugins and checkpoints find them. The numbers of a training pass come first."""
        others = self.metrics.get(phase, {})
        self.metrics[phase] = {**numbers, **others, **numbers} if trained else {**others, **numbers}
        self.measured_at.setdefault(phase, {}).update(dict.fromkeys(numbers, self.counters["iteration"]))

    def _end_epoch(self, interrupted: EntryState | None = None) -> None:
        """The next epoch is asked for, or what comes after the last; ``interrupted``: the epochs that a break has left."""
        # What came behind a break, whose pass is referred to yet, is not told from its body: the epoch is finished first.
        waits = SHUTDOWN.postponed() if self.work and not self.work[0].dropped else nullcontext()
        self._unwind(0)
        entries = self.journal.inner or []
        for training in [entry for entry in entries if isinstance(entry, TrainPass)]:
            self._end(training)
        self.journal.require_arrival("the epoch ended")
        if self.cut_short:
            self.journal.end_epoch()
            return
        for name in self.phases:
            # A pass that was begun outside of epochs is still open.
            self._log_discarded_windows(name)
        has_own_batches = self._may_have_own_batches()
        if has_own_batches:
            self._count_epoch()
            # A run that resumes inside this epoch would train on its batches again.
            waits = SHUTDOWN.postponed()
        epoch = self.counters["epoch"]
        validated = {entry.phase for entry in entries if entry.validated}
        unvalidated = [name for name in self.phases if self._is_trained(name) and name not in validated]
        # It is unknown which phases the stage has trained, so all are validated.
        validating = self.validation.phases if has_own_batches else unvalidated
        with waits:
            for name in validating if self.schedule.validating.fires_after(epoch + 1) else ():
                self._validate(name)
            if self.is_over() or epoch + 1 >= self.schedule.epochs:
                self._validate_last()
        for name in unvalidated:
            self.hooks.after_phase(context=self.context, phase=name)
        self.counters.update(epoch=epoch + 1, phase_index=0)
        self.journal.end_epoch()
        if self._epochs_call:
            self._epochs_call.end_epoch()
        if interrupted:
            # From here on a run that is resumed begins no other epoch of these.
            interrupted.finish()
        self.hooks.after_epoch(context=self.context)
        self.checkpoints.notify_saved()
        if self.exporter and self.schedule.exporting.fires_after(epoch + 1):
            self.exporter.save()
        if self.agreement:
            self.agreement.look(self.counters["iteration"])
        # What became due with the last batches of a pass that a variable holds: a resumed run would not know of it.
        if self.counters["iteration"] >= self.due and (self._last_leader or has_own_batches):
            self._do_due(self._last_leader)
        self.save_if(self.schedule.saving.fires_after(epoch + 1))

    def _may_have_own_batches(self) -> bool:
        """Return whether an epoch is running without a counted batch.

        The stage may have trained on batches that it created itself. A run cannot continue inside
        such an epoch, since the code of the stage runs again from the top.
        """
        is_uncounted = self.counters["iteration"] == self._epoch_began.iteration
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
        if self.counters["update"] == self._epoch_began.update:
            self.counters["update"] += 1
        self.validation.move(before, self.measured_at)
        for numbers in self.measured_at.values():
            numbers.update(dict.fromkeys(numbers, self.counters["iteration"]))

    def _validate_last(self) -> None:
        """Validate, at the end of training, what was not validated since its last update."""
        for name in self.schemas if self.schedule.validating.intervals else ():
            self._validate(name, last=True)

    def _validate_on_request(self) -> None:
        """Validate every phase, if a plugin has asked for it; where a signal interrupts that, a resumed run does it."""
        if VALIDATION in self.context.requests:
            for name in self.validation.phases:
                self._validate(name)
            self.context.clear_requests(VALIDATION)

    def _validate(self, name: str, *, last: bool = False, asked: bool = False) -> dict[str, float]:
        """Validate a phase, once in an iteration; ``last``: once since its last update; ``asked``: in any case."""
        if not asked and not self.validation.is_needed(self.schemas[name], last=last):
            return {}
        with self.context.validating(last=last):
            numbers = self._run_validation(name, last=last, asked=asked)
        self.take_numbers(name, numbers)
        return numbers

    def _run_validation(self, name: str, *, last: bool, asked: bool) -> dict[str, float]:
        """Return the numbers of a validation; the random generators stay as they are."""
        own = self.client.generators_in_validation()
        random = random_state(own)
        # Inside a batch, or an epoch whose batches the stage creates itself, a run cannot continue.
        in_body = asked and (bool(self.work) or self._may_have_own_batches())
        waits = SHUTDOWN.postponed() if in_body else nullcontext()
        try:
            with self.client.errors(name), waits:
                verb, keeps_best = self.client.validator(self.evaluate), not self.place_saved
                return self.validation.run(self.phases[name], verb, last=last, keeps_best=keeps_best)
        except (StoppedError, KeyboardInterrupt):
            # A resumed training makes the whole validation again.
            restore_random_state(random, own)
            if not self.place_saved:
                self._save()
            self.checkpoints.finish()
            raise
        finally:
            # A validation leaves the training as it was, even if a custom loop catches its error.
            if self.client.restores_generators:
                restore_random_state(random, own)

    def evaluate(self, context: Context, phase: Phase) -> dict[str, float]:
        """The numbers of a phase's validation data, as the weights are now."""
        schema, metrics = self.schemas[phase.name], self.validation.metrics[phase.name]

        def evaluate_one(dataset: str) -> dict[str, float]:
            name = schema.dataset_name or "" if self.runner.overfit_batches else dataset
            loader = pass_loader(name, self.runner, context)
            # A Brain that trains alone is validated on its loader as it is.
            with batches_of(loader, context["device"], in_order=self.client.validates_in_order) as batches:
                rounds = batches
                if self.agreement:
                    # Of streams, ranks may have different numbers of batches.
                    streams = getattr(loader, "streams", True)
                    rounds = self.agreement.watched(in_step(batches, self.agreement.world) if streams else batches)
                epoch: int = context["current_epoch"]
                return evaluate(phase["brain"], rounds, Stage.VALID, metrics, epoch=epoch, data=f"'{name}'")

        return evaluate_each(schema.valid_datasets, evaluate_one)

    # What is saved and resumed.

    def _save(self) -> None:
        self.client.save(self.save_checkpoint)
        self._saved_at = self.counters["iteration"]

    def save_checkpoint(self) -> None:
        """Save a checkpoint of this moment, while training continues."""
        self.begin()
        # First, since this checkpoint keeps which of the earlier ones are the best.
        self.checkpoints.wait_for_save()
        self.hooks.before_checkpoint_saved(context=self.context)
        if VALIDATION in self.context.requests and not self.validation.running:
            # A resumed run would do it at another iteration; and for it plugins undo what they did for the checkpoint.
            self._validate_on_request()
            self.hooks.before_checkpoint_saved(context=self.context)
        self.context.clear_requests(CHECKPOINT, *([] if self.validation.running else [VALIDATION]))
        validation, updates = ValidationState(**self.validation.state_dict()), self.schedule.asked_updates()
        own = {
            "passes": self.passes,
            "iterations": self.measured_at,
            "asked_updates": updates,
            "epoch_began": self._epoch_began,
        }
        engine = self.journal.capture(
            self._leader, validation=validation, generators=states_of(self.generators()), **own
        )
        for phase, numbers in self.metrics.items():
            # A plugin may have added some.
            for name, number in numbers.items():
                numbers[name] = as_number(number, f"metrics['{phase}']['{name}']")
        iterations = self.iterations_of_weights()
        timed = self.schedule.time_limit.state() if self.schedule.time_limit else {}
        more = {"engine": engine, "metrics": self.metrics, **self.client.state(), **timed}
        self.checkpoints.save(
            self.client.saved_counters(), self.metrics, iterations, end_of_epoch=self.journal.inner is None, **more
        )

    def iterations_of_weights(self) -> Iterations:
        """``iterations``, but the current one for validations of weights that have not been trained since."""
        trained: list[Any] = [training.brain for training in self._open]
        iterations = {phase: dict(own) for phase, own in self.measured_at.items()}
        for phase in self.phases.keys() & self.validation.validated.keys() & iterations.keys():
            if self.phases[phase].get("brain") not in trained:
                reported_as = self.schemas[phase].valid_name
                valid = [name for name in iterations[phase] if name.startswith("valid_") or reported_as(name) == name]
                iterations[phase] |= dict.fromkeys(valid, self.counters["iteration"])
        return iterations

    def _resume(self) -> None:
        """Take the journal of the checkpoint that the trainer has restored."""
        checkpoint = self.journal.checkpoint
        if checkpoint is None:
            return
        if checkpoint.state is None or checkpoint.state.engine is None:
            what = f"{checkpoint.path}: is of another runner stage, without epochs() and batches()"
            raise CheckpointError(f"{what}; resume with that one, or start a new run with init_model_path")
        state = checkpoint.state.engine
        self.metrics, self.measured_at, self.passes = checkpoint.state.metrics, state.iterations, state.passes
        self._epoch_began = state.epoch_began
        self.validation.load_state_dict(state.validation.to_tree())
        if state.asked_updates is not None:
            # An update that ended a pass came after its last iteration: what is due with it is yet to be done.
            self.schedule = self.client.schedule({**self.counters, "update": state.asked_updates})
        for name in lacking(self.generators(), state.generators):
            what = f"{checkpoint.path}: has the state of the random generator {name}"
            logger.warning(f"{what}, and this training has none such")
        for training in self.journal.load(state, self._new_pass):
            self.start(training, 0)

    def _arrive(self) -> None:
        """The code is where the checkpoint was saved: restore what startup and the code may have changed since.

        These are the modes of the modules, and the random generators, which are restored here alone.
        """
        checkpoint = self.journal.checkpoint
        assert checkpoint
        assert checkpoint.state
        assert checkpoint.state.engine
        self.store.restore_modes(self.context["model"])
        with fitting(str(checkpoint.path), "random", "use another checkpoint"):
            random = {**dict(checkpoint.state.random), "own": checkpoint.state.engine.generators}
            restore_random_state(random, self.generators())

    def _new_pass(self, name: str) -> TrainPass:
        phase = self.phases[self._name(name)]
        metrics = build_train_metrics(name, self.schemas[name].train_metrics, self.context["config"].workspace)
        return TrainPass(self, name, phase["brain"], phase["updater"], metrics)

    def _in_body(self) -> bool:
        """Return whether the code is training on a batch."""
        return bool(self.work) and not self.work[0].dropped

    def _name(self, phase: str | Phase) -> str:
        name = phase.name if isinstance(phase, Phase) else phase
        if name not in self.phases:
            raise ContextError(f"the runner '{self.runner.name}' has no phase '{name}'{one_of(name, self.phases)}")
        return name


def _numbers_left(
    call: EntryState, end: int, counters: Mapping[str, int], numbers: Iterable[int] | None
) -> Iterator[int]:
    """Yield the number of each epoch that is left.

    Args:
        call: the call of ``epochs``.
        end: how many epochs are done then.
        counters: of the training.
        numbers: those of all epochs; None counts from 0.
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


def make_engine(context: Context, stage: Any, make_exporter: MakeExporter) -> Engine:
    """Return the engine of a runner stage: with its own client if it has one."""
    own = getattr(stage, "engine_client", None)
    return Engine(context, own() if own else Client(context, stage), make_exporter)


def engine_of(context: Context) -> Engine:
    """The engine of the runner stage, prepared.

    Raises:
        StageError: no runner stage trains.
    """
    if not isinstance(context.loop, Engine):
        raise StageError("the engine is there in the runner stage alone; call this there")
    context.loop.begin()
    return context.loop
