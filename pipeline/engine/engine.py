"""Engine: runs a training. It decides what happens after which iteration, when the training ends, and what is saved."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any, NamedTuple, NoReturn, cast

from loguru import logger

from pipeline.checkpoint.load_errors import fitting
from pipeline.checkpoint.random_state import lacking, restore_random_state, states_of
from pipeline.checkpoint.run_checkpointer import RunCheckpointer
from pipeline.checkpoint.state import EngineState, EpochStart, ValidationState
from pipeline.compute.validation import Validation
from pipeline.config.schema import RunnerSchema, time_is_over
from pipeline.context import CHECKPOINT, VALIDATION, Context, Phase
from pipeline.distributed.agreement import Agreement
from pipeline.distributed.world import current_world
from pipeline.engine.announced_lengths import AnnouncedLengths
from pipeline.engine.checkpoints import Checkpoints
from pipeline.engine.client import Client, Exporter
from pipeline.engine.epoch_numbers import EpochNumbers
from pipeline.engine.journal import Journal
from pipeline.engine.phase import phase_of
from pipeline.engine.phase_validator import PhaseValidator
from pipeline.engine.train_pass import TrainPass
from pipeline.engine.triggers import NEVER
from pipeline.errors import CheckpointError, ContextError, StageError
from pipeline.optim.stepping import attach_optimizer_hooks
from pipeline.signals import SHUTDOWN, ExitError, exit_requested

# Makes an exporter for a runner with these settings, once the models are built.
MakeExporter = Callable[[RunnerSchema, Context], Exporter]


class Actions(NamedTuple):
    """What is scheduled after an iteration. Exporting saves the weights for other programs."""

    printing: bool
    validating: bool
    saving: bool
    exporting: bool


class Engine(ABC):
    """Runs a training, and starts with the first call of one of its methods.

    Two classes derive from it. A ``PassEngine`` trains the phases of a runner, or a Brain alone, in passes over the data.
    An ``IterationEngine`` trains an experiment, whose code reads the batches itself. What they train, and how, is in the
    Client. This class has what they share: after an iteration it prints, validates, exports and saves what is scheduled
    or requested, it ends the training, and it restores the state from a checkpoint.

    Args:
        context: the context after the network and startup stages.
        client: what is trained, and how.
        make_exporter: makes what saves the models for other programs, if the runner asks for it.

    Attributes:
        counters: ``context["train_state"]``.
        schedule: the intervals and limits.
        next_check: the next iteration after which something may be scheduled. 0 means after the current one.
        agreement: makes multiple processes do the same after the same iteration; None for a single process.
        in_use: whether one of its methods was called.
        over: whether training is over.
        cut_short: whether training has ended in the middle of an epoch, or of a pass outside of epochs.
        place_saved: whether a limit has cut the training short and a checkpoint of that place is saved. Nothing is saved after it.
        journal: what the stage has called. After a resume it brings the stage to where the checkpoint was saved.
        numbers: the numbers of the running epoch.
        open_passes: the passes that have started and not ended.
        lengths: how many batches the phases have, and how many their loaders have announced.
    """

    def __init__(self, context: Context, client: Client, make_exporter: MakeExporter | None = None) -> None:
        self.context = context
        self.client = client
        self.counters: dict[str, int] = context["train_state"]
        self.next_check = NEVER
        world = current_world()
        self.agreement = Agreement(world, context) if world.size > 1 else None
        self.in_use = False
        self.over = False
        self.cut_short = False
        self.place_saved = False
        self.store = cast("RunCheckpointer", context["checkpointer"]).store
        self.journal = Journal(self.store.resumed, self._restore_random_state)
        self.numbers = EpochNumbers(context)
        self.open_passes: list[TrainPass] = []
        self.lengths = AnnouncedLengths()
        self.resources = ExitStack()
        self._make_exporter = make_exporter
        # The pass that leads while scheduled actions run. A checkpoint that is saved then continues with it.
        self._leader: TrainPass | None = None
        # Phase -> how many rounds over its data were started.
        self._rounds: dict[str, int] = {}
        # The iterations and updates when the epoch started.
        self._epoch_start = self._new_epoch_start()
        # The iteration of the last checkpoint.
        self._saved_at = self.counters["iteration"]
        # Whether the block of ``running`` was entered, and whether the training has ended.
        self._is_running = False
        self._finished = False

    # The life of a training.

    @contextmanager
    def running(self) -> Iterator[None]:
        """Enclose the training: finish it at the end of the block, and close everything after a failure."""
        with ExitStack() as stack:
            stack.push(self._close)
            self._is_running = True
            if self.in_use:
                self._defer_signals()
            with suppress(ExitError):
                yield
                self.finish()

    def _close(self, *error: Any) -> bool | None:
        """Leave the blocks around all open passes, with the error that ends them, if there is one."""
        stack = ExitStack()
        for resources in (self.resources, *(training.resources for training in self.open_passes)):
            stack.push(resources)
        return stack.__exit__(*error)

    def begin(self) -> None:
        """Prepare everything. The first call of any other method does this."""
        if self.in_use:
            return
        context = self.context
        self._check_context()
        self.in_use = True
        self.runner = self.client.runner
        self.hooks = context["hooks"]
        schemas = self.client.phases()
        self.schemas = {phase.name: phase for phase in schemas}
        self.schedule = self.client.schedule(self.counters)
        context["best"] = None
        self.validation = Validation(context, self.runner, schemas)
        self.validator = PhaseValidator(
            context,
            self.client,
            self.runner,
            self.validation,
            self.schemas,
            self.agreement,
            self._save_interrupted_validation,
        )
        self.phases = {name: phase_of(name, context) for name in self.schemas}
        for phase in self.phases.values():
            attach_optimizer_hooks(phase.get("optim_schedulers") or {}, context, phase.name)
        store = self.store if self.client.saves else None
        best = self.validation.best
        self.checkpoints = Checkpoints(store, context, best, self.runner.on_save_error, self.client.session)
        self.exporter: Exporter | None = None
        if self.runner.save_inference_interval:
            assert self._make_exporter, "only a runner of a config saves models for inference"
            self.exporter = self._make_exporter(self.runner, context)
        self._resume()
        if self.agreement is None or self.agreement.world.is_main:
            self.schedule.limit_time(self.runner.max_time, context, self.journal.checkpoint)
        self.numbers.replace(self.numbers.metrics or self.client.no_numbers(), self.numbers.measured_at)
        if self._is_running:
            self._defer_signals()
        context["current_epoch"] = self._first_epoch()
        if self.exporter:
            self.exporter.begin()
        self.look_ahead()
        if self.journal.checkpoint:
            self.hooks.on_resume(context=context)
        self._finish_preparing()

    def _check_context(self) -> None:
        """Raise an error if this context cannot be trained.

        Raises:
            StageError: the runner only evaluates.
            ContextError: the network stage has not left a dict of phases.
        """
        context = self.context
        if context.peek("is_infer"):
            raise StageError(f"runner.{context['runner_name']}.class: is infer, which trains nothing; write train")
        models = context["model"]
        if not isinstance(models, Mapping):
            kind, keys = type(models).__name__, "{phase: {model, brain, optim_schedulers, updater}}"
            raise ContextError(f"context['model'] is a {kind}, no dict of phases; write {keys} in the network stage")

    def _defer_signals(self) -> None:
        """Have signals and requests wait for the end of a step, until the training ends."""
        if self.agreement:
            self.resources.enter_context(self.agreement.ruling())
        self.resources.enter_context(SHUTDOWN.defer(self.wake))

    def _request_first_validation(self) -> None:
        """Request a validation before the first step, if the intervals say so. A resumed training keeps its own request."""
        if self.schedule.validating.starts and not self.journal.checkpoint:
            # All processes come here and decide alike, so they need not agree on it first.
            self.context.grant("request", VALIDATION)

    def finish(self) -> None:
        """End the training: finish what is active, validate the last weights, and save."""
        if not self.in_use or self._finished:
            return
        self._finished = True
        self._finish_work()
        at_end = self.counters["iteration"] == self._saved_at and not self.cut_short
        is_saved = self.client.ends_saved and at_end
        # If the last validation requests a stop, as early stopping does, a resumed run would end at once.
        with self.context.stops_withdrawn() if self.place_saved else nullcontext():
            if not is_saved:
                self._validate_last()
                self._end_cut_epoch()
                if not self.place_saved:
                    self._save()
            self.checkpoints.finish()
            if self.exporter:
                self.exporter.finish()
            if self.agreement:
                # A signal that has arrived meanwhile ends all processes.
                self.agreement.look(self.counters["iteration"])

    # What the two kinds of engines do differently.

    @abstractmethod
    def _first_epoch(self) -> int:
        """Return the number of the epoch with which the training starts or continues."""

    @abstractmethod
    def _finish_preparing(self) -> None:
        """Do the last thing before training starts or continues."""

    @abstractmethod
    def _finish_work(self) -> None:
        """End what is active at the end of the training."""

    @abstractmethod
    def _end_cut_epoch(self) -> None:
        """End the epoch that was cut short, after the last validation."""

    @abstractmethod
    def _print(self) -> None:
        """Give the numbers since the last time to the plugins."""

    @abstractmethod
    def batches_before_resume(self) -> int | None:
        """Return how many batches of the running epoch were done when the checkpoint was saved.

        Returns:
            The number; 0 if it is unknown, or if nothing is resumed; None if no epoch was running.
        """

    @abstractmethod
    def _is_in_step(self) -> bool:
        """Return whether an iteration has started that is finished before the training ends."""

    @abstractmethod
    def _is_busy(self) -> bool:
        """Return whether the code of the stage is at a place where no checkpoint can be saved."""

    @abstractmethod
    def _finish_active_batches(self) -> None:
        """Finish all active batches, before a call that yields no batch."""

    @abstractmethod
    def _stop(self) -> None:
        """Note where training has ended. If that is not the end of a pass or an epoch, training is cut short."""

    # What is scheduled or requested.

    def wake(self) -> None:
        """Look for requests after the current iteration. Signals, ``is_exit``, ``stop`` and ``request`` call this."""
        self.next_check = 0

    def look_ahead(self) -> None:
        """Set the next iteration after which something may be scheduled: this one if something was requested meanwhile."""
        self.next_check = self._next_scheduled()
        if exit_requested(self.context) or self.context.stop_reason is not None or self.context.requests:
            self.wake()

    def _next_scheduled(self) -> int:
        """Return the next iteration after which something may be scheduled."""
        return self.schedule.next_check(self.counters, self.agreement)

    def _scheduled_actions(self, epochs_done: int | None = None) -> Actions | None:
        """Return what to do after this iteration. With multiple processes, all of them get the same answer.

        Args:
            epochs_done: how many epochs are done, if the iteration has read the last batch of one.

        Returns:
            The actions; None if multiple processes have only looked for requests, and there are none.
        """
        printing, validating, saving, exporting = self.schedule.due(self.counters)
        # Between two epochs such requests are answered by the save that follows anyway.
        saving = saving or (self.journal.inner is not None and self.checkpoints.are_requested())
        if self.agreement:
            looked = self.agreement.look(self.counters["iteration"], printing, validating, saving, exporting)
            # A request has set `next_check` to 0.
            is_requested = any(looked) or self.next_check == 0 or epochs_done is not None
            if not (is_requested or self.validation.running or self.schedule.over(self.counters)):
                return None
            printing, validating, saving, exporting = looked
        if self.validation.running:
            # A signal has interrupted the validation, so it is repeated, and then the save that was to follow it.
            validating = True
            saving = True
        if epochs_done is not None:
            validating = validating or self.schedule.validating.fires_after(epochs_done)
            saving = saving or self.schedule.saving.fires_after(epochs_done)
        return Actions(printing, validating, saving, exporting)

    def _run_actions(self, actions: Actions, phases: Iterable[str]) -> bool:
        """Do what is scheduled or requested after an iteration.

        Args:
            actions: what is scheduled.
            phases: the phases to validate, if that is scheduled.

        Returns:
            Whether training continues.

        Raises:
            StoppedError, KeyboardInterrupt: a signal has requested the end. What is scheduled is done, and a checkpoint is saved.
            ExitError: ``is_exit`` has requested the end. The same is done.
        """
        self.checkpoints.notify_saved()
        if any(actions) or self.context.requests:
            self._check_divergence()
        if actions.printing:
            self._print()
        if actions.exporting and self.exporter:
            self.exporter.save()
        self._validate_on_request()
        if actions.validating:
            for name in phases:
                self._validate(name)
        is_over = self._is_over_after_actions()
        if is_over:
            self._stop()
        else:
            self.save_if(actions.saving)
            self.look_ahead()
        return not is_over

    def _is_over_after_actions(self) -> bool:
        """Return whether training is over, once everything is printed and validated."""
        return self.is_over()

    def _check_divergence(self) -> None:
        """Raise an error if too many losses were not finite. On a GPU this waits for the work so far."""
        for training in self.open_passes:
            training.trainable.check_divergence()

    # The end.

    def is_over(self) -> bool:
        """Return whether training is over. It is not while the code of a resumed stage has not arrived at its place."""
        if not self.journal.resuming and not self.over:
            over = self.client.is_over(limit=self.schedule.over(self.counters))
            if self.agreement:
                # Rank 0 decides for all processes, and requests that plugins have made meanwhile count now.
                [over] = self.agreement.look(self.counters["iteration"], over)
            self.over = bool(over)
            if not self.over and not self._is_in_step() and self.context.stop_reason is not None:
                self.over = True
                logger.info(f"training ends after iteration {self.counters['iteration']}: {self.context.stop_reason}")
        return self.over

    def _cut_short(self, place: str) -> None:
        """End training before its epoch is over. After a limit, save this place first, where a resumed training continues.

        Args:
            place: where training stops, for the log.
        """
        if self.cut_short:
            return
        logger.info(f"stopped {self._with_epoch(place)}")
        self.cut_short = True
        if self._has_reached_limit():
            self._check_divergence()
            self._save()
            self.place_saved = True
            self.checkpoints.end()

    def _with_epoch(self, place: str) -> str:
        """Return a place in the training for the log, with the running epoch: ``in epoch 3 after 2 of 7 batches``."""
        return f"in epoch {self.context['current_epoch']} {place}"

    def _has_reached_limit(self) -> bool:
        """Return whether a limit has ended the training, and not ``context.stop``. A resumed training may have a higher limit."""
        reason = self.context.stop_reason
        max_time = self.runner.max_time
        return reason is None or (max_time is not None and reason == time_is_over(max_time))

    # Validation.

    def _validate(self, name: str, *, last: bool = False, requested: bool = False) -> dict[str, float]:
        """Validate a phase, unless that was done in this iteration.

        Args:
            name: the phase.
            last: whether this is the end of the training. Then it is not repeated if nothing was trained since.
            requested: whether code of the user has called for it. Then it is always done.
        """
        if not requested and not self.validation.is_needed(self.schemas[name], last=last):
            return {}
        with self.context.validating(last=last):
            numbers = self.validator.run(
                self.phases[name],
                last=last,
                keeps_best=not self.place_saved,
                # A run cannot continue from within a batch.
                waits_with_signals=requested and self._is_busy(),
            )
        self.numbers.take(name, numbers)
        return numbers

    def _validate_last(self) -> None:
        """Validate, at the end of training, what was not validated since its last update."""
        if self.schedule.validating.intervals:
            for name in self.schemas:
                self._validate(name, last=True)

    def _validate_on_request(self) -> None:
        """Validate every phase, if that was requested. If a signal interrupts it, the request stays for the resumed run."""
        if VALIDATION in self.context.requests:
            for name in self.validation.phases:
                self._validate(name)
            self.context.clear_requests(VALIDATION)

    def _save_interrupted_validation(self) -> None:
        """Save a checkpoint in the middle of a validation, which a resumed training repeats."""
        if not self.place_saved:
            self._save()
        self.checkpoints.finish()

    def evaluate(self, context: Context, phase: Phase) -> dict[str, float]:
        """Return the loss and the metrics of a phase's validation data, computed with the current weights."""
        return self.validator.evaluate(context, phase)

    # Checkpoints.

    @property
    def resuming(self) -> bool:
        """Whether the code of a resumed training has not yet arrived where the checkpoint was saved."""
        return self.journal.resuming

    def save(self) -> None:
        """Save a checkpoint: now, or when the leading pass is asked for its next batch.

        In an epoch without a batch it is saved when a pass starts, or when the epoch ends.
        """
        self.begin()
        self._finish_active_batches()
        self.journal.arrive_after_last_call()
        if self.journal.resuming or self.place_saved:
            return
        if self._is_busy():
            self.context.request(CHECKPOINT)
        else:
            self._save()

    def save_if(self, scheduled: bool) -> None:
        """Save if that is scheduled, after one of the best validations, or if the end was requested; then end the run.

        Args:
            scheduled: whether saving is scheduled.

        Raises:
            StoppedError, KeyboardInterrupt: a signal has requested the end.
            ExitError: ``is_exit`` has requested the end.
        """
        is_ending = exit_requested(self.context)
        if self.journal.resuming:
            # The checkpoint from which it resumes is still valid.
            SHUTDOWN.raise_if_requested()
            return
        if self.place_saved:
            if is_ending:
                self._end_run()
            return
        best = self.validation.best
        is_best = best is not None and best.deserves_checkpoint(self.counters["iteration"])
        if not (scheduled or is_best or is_ending or CHECKPOINT in self.context.requests):
            return
        self._save()
        # A plugin may request the end when it is notified of the checkpoint, which has this moment then.
        if exit_requested(self.context):
            self._end_run()

    def _end_run(self) -> NoReturn:
        """End the run, as was requested. Nothing is left to do at its end."""
        self._finished = True
        self.checkpoints.end_run()

    def _save(self) -> None:
        self.client.save(self.save_checkpoint)
        self._saved_at = self.counters["iteration"]

    def save_checkpoint(self) -> None:
        """Save a checkpoint of this moment, while training continues."""
        self.begin()
        # First, since this checkpoint remembers which of the earlier ones are the best.
        self.checkpoints.wait_for_save()
        self.hooks.before_checkpoint_saved(context=self.context)
        if VALIDATION in self.context.requests and not self.validation.running:
            # A resumed run would validate after another iteration. For the validation, plugins undo their preparations.
            self._validate_on_request()
            self.hooks.before_checkpoint_saved(context=self.context)
        answered = [CHECKPOINT] if self.validation.running else [CHECKPOINT, VALIDATION]
        self.context.clear_requests(*answered)
        # First, since an experiment may read a batch ahead for its counters, which draws random numbers.
        counters = self.client.saved_counters()
        state = self.state()
        self.numbers.make_plain()
        time_spent = self.schedule.time_limit.state() if self.schedule.time_limit else {}
        self.checkpoints.save(
            counters,
            self.numbers.metrics,
            self._iterations_of_weights(),
            end_of_epoch=self.journal.inner is None,
            engine=state,
            metrics=self.numbers.metrics,
            **self.client.state(),
            **time_spent,
        )

    def state(self) -> EngineState:
        """Return what a checkpoint keeps of the engine."""
        return self.journal.capture(
            self._leader,
            validation=ValidationState(**self.validation.state_dict()),
            generators=states_of(self.generators()),
            passes=self._rounds,
            iterations=self.numbers.measured_at,
            asked_updates=self.schedule.asked_updates(),
            epoch_began=self._epoch_start,
        )

    def _resume(self) -> None:
        """Take the state of the engine from the checkpoint that the trainer has restored.

        Raises:
            CheckpointError: it was saved by a stage that does not use the engine.
        """
        checkpoint = self.journal.checkpoint
        if checkpoint is None:
            return
        if checkpoint.state is None or checkpoint.state.engine is None:
            what = f"{checkpoint.path}: is of another runner stage, without epochs() and batches()"
            raise CheckpointError(f"{what}; resume with that one, or start a new run with init_model_path")
        state = checkpoint.state.engine
        self.numbers.replace(checkpoint.state.metrics, state.iterations)
        self._rounds = state.passes
        self._epoch_start = state.epoch_began
        self.validation.load_state_dict(state.validation.to_tree())
        if state.asked_updates is not None:
            # The end of a pass made an update after the last iteration. What is scheduled for it is still to be done.
            self.schedule = self.client.schedule({**self.counters, "update": state.asked_updates})
        for name in lacking(self.generators(), state.generators):
            what = f"{checkpoint.path}: has the state of the random generator {name}"
            logger.warning(f"{what}, and this training has none such")
        self._resume_passes(state)

    @abstractmethod
    def _resume_passes(self, state: EngineState) -> None:
        """Continue the passes that were open when the checkpoint was saved."""

    def _restore_random_state(self) -> None:
        """Restore what startup and the code of the stage may have changed before the place of the checkpoint.

        These are the modes of the modules, and the random generators, which are restored only here.
        """
        checkpoint = self.journal.checkpoint
        assert checkpoint
        assert checkpoint.state
        assert checkpoint.state.engine
        self.store.restore_modes(self.context["model"])
        with fitting(str(checkpoint.path), "random", "use another checkpoint"):
            random = {**dict(checkpoint.state.random), "own": checkpoint.state.engine.generators}
            restore_random_state(random, self.generators())

    def generators(self) -> dict[str, Any]:
        """Return the random generators of the Brains, the updaters and the data, by name."""
        return self.client.generators()

    def _iterations_of_weights(self) -> Mapping[str, Mapping[str, int]]:
        """Return the iteration of each number. A validation counts for the current one if nothing was trained since."""
        trained: list[Any] = [training.brain for training in self.open_passes]
        validated = self.validation.validated
        unchanged = [
            name for name, phase in self.phases.items() if name in validated and phase.get("brain") not in trained
        ]

        def is_validated(phase: str, name: str) -> bool:
            return name.startswith("valid_") or self.schemas[phase].valid_name(name) == name

        return self.numbers.iterations_of_weights(unchanged, is_validated)

    def forget_numbers(self) -> None:
        """Forget the numbers of the epoch before."""
        self.numbers.replace(self.client.no_numbers(), {})

    def _new_epoch_start(self) -> EpochStart:
        return EpochStart(iteration=self.counters["iteration"], update=self.counters["update"])
