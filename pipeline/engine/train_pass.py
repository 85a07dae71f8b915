"""TrainPass: one pass of training over the batches of a phase. It has the hot loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack
from itertools import islice
from typing import Any

from torch import Tensor

from pipeline.checkpoint.random_state import random_state, restore_random_state
from pipeline.checkpoint.state import CursorState, EntryState, PassState
from pipeline.compute.custom_update import UpdateCounter, custom_update
from pipeline.compute.pass_metrics import PassMetrics
from pipeline.compute.stage import Stage
from pipeline.compute.trainable import Computation, trainable_of
from pipeline.distributed.world import current_world
from pipeline.engine.pass_owner import BatchTrainer, PassOwner
from pipeline.engine.pass_round import PassRound
from pipeline.errors import DataError
from pipeline.optim.stepping import clear_leftovers
from pipeline.optim.windowed_optimizer import WindowedOptimizer


class TrainPass:
    """One pass over the batches of a phase, or with ``repeat`` as many batches as are requested.

    ``run`` trains on all of them. A custom loop trains on the ones that ``batches`` yields.

    Args:
        engine: the engine that the pass belongs to.
        phase: the name of the phase, for messages.
        brain: computes the losses; bound to its optimizers.
        updater: trains on a batch, and counts for itself.
        metrics: name -> metric that judges the predictions of its batches.
        number: how many rounds over the data of this phase were started before. With the seed it decides the order.
        repeat: whether it starts again at the end of the data.

    Attributes:
        count: how many batches end it, over all rounds; None: the data ends it.
        done: how many batches are done, over all rounds.
        in_round: how many batches of this round were given out.
        batch: the active batch; None between two batches.
        numbers: ``loss`` and what was logged, means over samples; empty until it is over.
        open: whether it has started.
        over: whether it is done.
        dropped: whether the loop has left it before its end.
        in_batch: whether its batch is not counted yet.
        after_batch: is called after each batch. It has the metrics judge the batch, and calls the plugins.
        validated: whether its phase was validated after it, if that was scheduled.
        state: the state from a checkpoint that it continues from; None for a new pass.
        resources: are closed at the end of each round and of the pass.
    """

    kind = "pass"

    def __init__(
        self,
        engine: PassOwner,
        phase: str,
        brain: Computation,
        updater: BatchTrainer,
        metrics: Mapping[str, Any] | None = None,
        *,
        number: int = 0,
        repeat: bool = False,
    ) -> None:
        self.engine = engine
        self.phase = phase
        self.brain = brain
        self.trainable = trainable_of(brain)
        self.updater = updater
        self.number = number
        self.repeat = repeat
        self.count: int | None = None
        self.done = 0
        self.in_round = 0
        self.batch: Any = None
        self.numbers: dict[str, float] = {}
        self.open = False
        self.over = False
        self.dropped = False
        self.in_batch = False
        self.validated = False
        self.state: PassState | None = None
        self.resources = ExitStack()
        self._metrics = PassMetrics(self.trainable, metrics or {}, phase, engine.after_batch)
        self.after_batch = self._metrics.judge if metrics else engine.after_batch
        self._round = PassRound((), -1, engine.generators, self.trainable, phase)
        # After how many batches of a round every window closes; 0 if that is unknown.
        self._planned = 0
        # Whether gradients may be left at the end of the pass that belong to no window.
        self._may_leave_gradients = self.trainable.custom.trains or self.trainable.custom.clears_gradients
        self._update_counter = UpdateCounter(self.trainable)
        self._updater_count = PassCount(0)
        # Whether ``run`` consumes the batches, and whether it trains with other code than the Brain's own ``fit_batch``.
        self._is_run = False
        self._is_custom = False
        # When the numbers were last printed, and how many samples there were.
        self._printed_at = 0.0
        self._printed_samples = 0

    def run(self, update: Callable[[Any], Any]) -> None:
        """Train on every batch that is left.

        Args:
            update: trains on one batch: ``Trainable.fit_batch``, or what ``custom`` returns.
        """
        update = self.trainable.around(update)
        self._is_run = True
        for batch in self.batches():
            update(batch)
            # Free the batch before the next one is made.
            del batch

    def custom(self, update: Callable[[Any], Any], name: str) -> Callable[[Any], Tensor | None]:
        """Return a function for ``run`` that trains with other code than the Brain's own ``fit_batch``.

        Args:
            update: trains on a batch. It returns a loss, multiple losses by name, or None.
            name: what messages call it.
        """
        self._is_custom = True
        return custom_update(self.trainable, update, name)

    def batches(self) -> Generator[Any]:  # noqa: PLR0912 # a method for each branch would be one more call in each step
        """Yield each batch; it is done when the next one is requested. This is the only loop over training batches.

        This is the innermost loop of the whole training::

            for each epoch:                               # PassEngine.epochs
                plugins: before_epoch
                for each phase:                           # Runner.train_epoch, or the code of a stage
                    plugins: before_pass
                    Brain.on_stage_start
                    for each batch:                       # this method
                        plugins: before_batch
                        train on the batch                # Trainable.fit_batch, or the code of a loop
                            compute the loss, and its gradients
                            at the end of a window: step the optimizers
                        count the batch                   # TrainPass.count_batch
                        plugins: after_batch
                        if something is scheduled:        # PassEngine.run_scheduled
                            print, export, validate, save
                            end the training at a limit, or if a signal or a plugin has requested it
                    step the windows that are still open  # PassEngine.close
                    Brain.on_stage_end
                    plugins: after_pass
                    validate the phase, if that is scheduled
                    plugins: after_phase
                plugins: after_epoch
                save, if that is scheduled
            validate the last weights, and save           # Engine.finish

        """
        engine, trainable, record, context = self.engine, self.trainable, self.trainable.record, self.engine.context
        counters, active_passes, before = engine.counters, engine.active_passes, engine.before_batch
        try:
            for batches in self._rounds():
                schedulers, data, cursor = trainable.schedulers, self._round, self._round.cursor
                # The code of a loop may change its batch, so the samples that weigh the loss are counted before that.
                counts_first = (not self._is_run or self._is_custom) and trainable.weighs_batches()
                for batch in batches:
                    self.in_round += 1
                    self.batch, self.in_batch, number = batch, True, record.number
                    # The code that trains on the batch fills in the record, and `count_batch` reads it.
                    record.begin(
                        batch,
                        counters["update"],
                        counters["epoch"],
                        last=0 < self._planned == self.in_round,
                        stand_in=data.is_stand_in,
                        has_more=cursor.has_more,
                    )
                    if self not in active_passes:
                        active_passes.append(self)
                    if counts_first:
                        record.count_samples()
                    if before and not data.is_stand_in:
                        before(context=context, phase=self.phase, batch=batch)
                    # Gradients that other code has left since the last window must not get into this one.
                    for scheduler in schedulers:
                        if scheduler.last_gradients >= number and not scheduler.window.batches:
                            for parameter in scheduler.parameters:
                                if parameter.grad is not None:
                                    self._clear_leftovers(scheduler, number)
                                    break
                    yield batch
                    # The code may have started other passes, which end here. If it has ended the epoch, no pass is left.
                    if not active_passes or active_passes[-1] is not self:
                        engine.finish_inner_batches(self)
                    if self.in_batch:
                        self.count_batch()
                    # Free the batch before the loader makes the next one.
                    self.batch = None
                    del batch
                    # One comparison in each step, whatever is scheduled.
                    if counters["iteration"] >= engine.next_check and not engine.run_scheduled(self):
                        engine.close(self)
                        return
        except GeneratorExit:
            # ``run`` only leaves the generator early after an error, and then the pass stays as it is.
            if not self._is_run:
                self.dropped = True
                # The pass that is asked next sees that it is not the innermost one.
                active_passes.append(self)
            raise
        engine.close(self)

    def count_batch(self) -> None:
        """Count the batch that was given out: it is done."""
        engine, record = self.engine, self.trainable.record
        self.in_batch = False
        if not record.trained:
            self._update_counter.count(self.in_round)
        self.done += 1
        self._updater_count.iterations += 1
        engine.counters["iteration"] += 1
        if (after := self.after_batch) and not self._round.is_stand_in:
            if not self._is_run or self._is_custom:
                # So gradients that a plugin leaves are not taken for gradients of code that steps its optimizers itself.
                for scheduler in self.trainable.schedulers:
                    scheduler.note_cleared()
            predictions, losses = record.take_outputs()
            after(context=engine.context, phase=self.phase, batch=self.batch, predictions=predictions, losses=losses)

    def _clear_leftovers(self, scheduler: WindowedOptimizer, number: int) -> None:
        """Clear gradients that other code has left, when the first batch of a window is given out.

        The code that trains on the batch may call ``backward`` itself after that.

        Args:
            scheduler: its window is about to start.
            number: the number of the batch before.
        """
        entries: Iterable[Mapping[str, Any]] = self.engine.context["model"].values()
        others = [other for entry in entries for other in (entry.get("optim_schedulers") or {}).values()]
        clear_leftovers(scheduler, others, number)

    # The data.

    def _rounds(self) -> Iterator[Iterator[Any]]:
        """Yield the batches of each round over the data."""
        if self.over:
            return
        batches = self.engine.open(self)
        while batches is not None:
            yield batches if self.count is None else islice(batches, self.count - self.done)
            if self.done != self.count and not self.over:
                # The data has ended the round, and no limit.
                self.engine.report_length(self, self._round.announced)
            # A round without a batch would be followed by another forever.
            is_repeated = self.repeat and self.in_round and self.done != self.count and not self.over
            batches = self.engine.next_round(self) if is_repeated else None

    def limit(self, count: int | None, *, repeat: bool) -> None:
        """Set where the pass ends.

        Args:
            count: how many batches end it; None: the data ends it.
            repeat: whether it starts again at the end of the data.
        """
        self.count = count
        self.repeat = repeat

    def begin_round_after(self, rounds: int) -> int:
        """Use the order that follows so many rounds over the data of the phase; return how many are started then."""
        self.number = rounds
        return rounds + 1

    def begin_round(self) -> None:
        """Be ready for one more round over the data."""
        self.in_round = 0
        self.resources.close()

    def read(self, loader: Any, *, interruptible: bool) -> Iterator[Any]:
        """Return the batches that are left of a round over a loader, on their device. The pass is active from now on.

        Args:
            loader: has the batches. ``number`` decides their order.
            interruptible: whether a signal may interrupt the wait for a batch of workers.
        """
        engine = self.engine
        random = random_state(engine.generators()) if self.state else None
        data = PassRound(loader, self.number, engine.generators, self.trainable, self.phase)
        data.measure()
        # A window that a wrong length closes early would be another one than without a length.
        batches_known = 0 if self.repeat else data.certain_length or 0
        if not self.open:
            engine.start(self, batches_known)
        self._planned = min(batches_known, self.count or batches_known)
        if self.state:
            data.cursor.load_state_dict(self.state.cursor.to_tree())
            self.state = None
        self._round = data
        batches = data.open(self.resources, (lambda: engine.run_scheduled(self)) if interruptible else None)
        self.in_round = data.cursor.taken
        if random:
            # Starting a pass, and iterating over a loader, samples numbers that were sampled before the resume too.
            restore_random_state(random, engine.generators())
        if self not in engine.active_passes:
            engine.active_passes.append(self)
        return batches

    def has_ended(self) -> bool | None:
        """Return whether the batch that is done was the last of the pass; None if only the next request can tell."""
        if self.count is not None and self.done >= self.count:
            return True
        return False if self.repeat else self._round.has_ended(self.in_round)

    def has_more(self) -> bool:
        """Request the next batch, which is lost, and return whether there was one."""
        return self._round.has_more()

    def describe_progress(self) -> str:
        """Return ``3 of 7 batches``; without the 7 if the length is unknown, or if another round may follow."""
        if self.count is not None:
            return f"{self.done} of {self.count} batches"
        if self.repeat or not self._round.announced:
            return f"{self.done} batches"
        return f"{self.in_round} of {self._round.announced} batches"

    # Its start and its end.

    def start(self, epoch: int, batches: int) -> None:
        """Prepare the Brain and the counters: from zero, or from the state of a checkpoint.

        Args:
            epoch: the epoch that is running, from 0.
            batches: how many there are in a round; 0 if that is unknown, or if another round may follow.
        """
        brain = self.brain
        trainable = self.trainable
        self.open = True
        self.in_round = 0
        self._planned = batches
        self._printed_at = time.perf_counter()
        self._printed_samples = self.engine.counters["samples"]
        trainable.begin_pass(keeps_outputs=self.after_batch is not None)
        strategy = trainable.strategy
        if strategy is not None and trainable.custom.trains:
            strategy.average_each_backward(trainable.schedulers, trainable.record.count_samples, self.resources)
        self._metrics.reset()
        if self.state:
            trainable.load_state_dict(self.state.to_tree())
            self.in_round = self.state.cursor.taken
            self._metrics.load_state_dict(self.state.metrics)
        self._updater_count = PassCount(self.updater.state.iteration)
        self.updater.begin_pass(epoch, self._updater_count, trainable.numbers.logged)
        brain.on_stage_start(Stage.TRAIN, epoch)
        trainable.log_modes()
        if self._may_leave_gradients and not self.state:
            brain.zero_grad()
        if hasattr(brain.train_sampler, "set_epoch"):
            brain.train_sampler.set_epoch(epoch)

    def end(self, epoch: int, data: str) -> None:
        """Close the windows that are open, and compute the numbers of the pass.

        Args:
            epoch: the epoch that is running, from 0.
            data: what messages call the data.

        Raises:
            DataError: there was no batch.
        """
        if not self.done:
            raise DataError(f"{data} gave no batch in epoch {epoch}; check the dataset, or drop_last with few samples")
        brain = self.brain
        trainable = self.trainable
        trainable.end_pass()
        self.resources.close()
        trainable.record.close()
        if self._may_leave_gradients:
            brain.zero_grad(set_to_none=True)
        numbers = trainable.numbers
        loss = trainable.mean_loss()
        brain.on_stage_end(Stage.TRAIN, loss, epoch)
        # Take what it has logged.
        trainable.gather()
        self.numbers = numbers.with_logged({"loss": loss, **self._metrics.compute()}, trainable.where)
        self.finish()

    def finish(self) -> None:
        """Give out no batch any more."""
        self.over = True

    def share_numbers(self) -> None:
        """Take the numbers of rank 0, whose plugins may have added some."""
        self.numbers = current_world().broadcast(self.numbers)

    def mark_validated(self) -> None:
        """Note that its phase was validated after it, if that was scheduled."""
        self.validated = True

    def recent_numbers(self, optim_schedulers: Mapping[str, WindowedOptimizer]) -> dict[str, float]:
        """Return the numbers since the last call. On a GPU this waits for the work so far.

        Args:
            optim_schedulers: name -> optimizer of the phase, with the learning rate and the gradient norm.
        """
        of_pass = self.trainable.numbers
        numbers = {"loss": of_pass.loss.recent()}
        for name, scheduler in optim_schedulers.items():
            suffix = f".{name}" if len(optim_schedulers) > 1 else ""
            # Before the first update there are no such numbers.
            if scheduler.rate is not None:
                numbers[f"learning_rate{suffix}"] = float(scheduler.rate)
            if scheduler.gradient_norm is not None:
                numbers[f"gradient_norm{suffix}"] = float(scheduler.gradient_norm)
        numbers |= of_pass.logged.recent()
        now = time.perf_counter()
        samples = self.engine.counters["samples"]
        numbers["samples_per_second"] = (samples - self._printed_samples) / (now - self._printed_at)
        self._printed_at = now
        self._printed_samples = samples
        return numbers

    # Checkpoints.

    def entry_state(self) -> EntryState:
        """Return what a checkpoint keeps of the pass. On a GPU this waits for the work so far."""
        state = self.state
        if self.open and not self.over:
            # If no batch was requested since the resume, the pass is still at the place from the checkpoint.
            cursor = state.cursor if state else CursorState(**self._round.cursor.state_dict(self.in_round))
            state = PassState(**self.trainable.state_dict(), cursor=cursor, metrics=self._metrics.state_dict())
        return EntryState.new(
            "pass",
            self.phase,
            self.number,
            over=self.over,
            repeat=self.repeat,
            numbers=self.numbers,
            validated=self.validated,
            done=self.done,
            state=state,
        )

    def load(self, state: EntryState) -> TrainPass:
        """Continue from a state once a batch is requested; return the pass itself."""
        self.over = state.over
        self.validated = state.validated
        self.number = state.number
        self.done = state.done
        self.numbers = state.numbers
        self.state = state.state
        return self


class PassCount:
    """How many batches a phase has trained on, for the updater of the phase.

    Attributes:
        iterations: the number of batches.
    """

    def __init__(self, iterations: int) -> None:
        self.iterations = iterations


class PassIterator(Iterator[Any]):
    """The batches of a pass, for a custom loop. The pass is over when nothing refers to this any more.

    Args:
        training: the pass.
    """

    def __init__(self, training: TrainPass) -> None:
        self._training = training
        self._batches = training.batches()

    @property
    def done(self) -> int:
        """How many batches are done, including the ones before a resume."""
        return self._training.done

    @property
    def numbers(self) -> dict[str, float]:
        """``loss`` and what was logged, means over samples; empty until the pass is over."""
        return self._training.numbers

    def __iter__(self) -> Iterator[Any]:
        """Return the generator itself, so that a loop over the batches makes no further call."""
        return self._batches

    def __next__(self) -> Any:
        """Return the next batch."""
        return next(self._batches)

    def close(self) -> None:
        """End the pass."""
        self._batches.close()
