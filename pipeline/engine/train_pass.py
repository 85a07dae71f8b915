"""One pass of training over the batches of a loader: the hot loop, what it counts, and where it is."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import islice
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from pipeline.checkpoint.random_state import random_state, restore_random_state
from pipeline.checkpoint.state import CursorState, EntryState, PassState, mapping_of
from pipeline.context import Context
from pipeline.data.batch import EmptySlice
from pipeline.data.cursor import DataCursor
from pipeline.data.loader import LimitedLoader, has_exact_length, has_own_state, length
from pipeline.data.workers import supervise_workers
from pipeline.distributed.strategy import Strategy, require_equal_weights
from pipeline.distributed.world import current_world
from pipeline.engine.evaluation import target_of
from pipeline.engine.trainable import Computation, Stage, Trainable, trainable_of
from pipeline.errors import DataError
from pipeline.metrics.base import judge, needs_target
from pipeline.metrics.meters import MOST, Meters
from pipeline.metrics.ranks import computed
from pipeline.optim.optim_scheduler import (
    OptimScheduler,
    autocast,
    clear_leftovers,
    losses_by_name,
)
from pipeline.signals import SHUTDOWN


class PassOwner(Protocol):
    """What a pass needs of the engine that it belongs to.

    Attributes:
        context: of the training.
        counters: ``context["train_state"]``.
        due: the next iteration after which ``on_due`` is called.
        work: the passes that have an active batch, the outermost first.
        before_batch, after_batch: call the plugins; None if no plugin listens.
    """

    context: Context
    counters: dict[str, int]
    due: int
    work: list[TrainPass]
    before_batch: Callable[..., Any] | None
    after_batch: Callable[..., Any] | None

    def generators(self) -> dict[str, Any]:
        """Return the random generators of the Brains, the updaters and the data, by name."""

    def open(self, training: TrainPass) -> Iterator[Any] | None:
        """Start a pass, or continue one, and return its batches; None if it is over at once."""

    def next_round(self, training: TrainPass) -> Iterator[Any] | None:
        """Return the batches of one more round over the data of a pass that repeats; None if there is none."""

    def start(self, training: TrainPass, batches: int) -> None:
        """Prepare the Brain of a pass; ``batches``: as in ``TrainPass.start``."""

    def report_length(self, training: TrainPass, batches: int) -> None:
        """Warn if a round had another number of batches than announced; 0 if none was."""

    def unwind(self, training: TrainPass) -> None:
        """Finish what was started in the body of the batch before, since the pass is asked for its next one."""

    def on_due(self, training: TrainPass) -> bool:
        """Do what is scheduled or requested after an iteration, and return whether the pass continues."""

    def close(self, training: TrainPass) -> None:
        """End a pass."""


class BatchTrainer(Protocol):
    """What trains on the batches of a phase: its ``updater``."""

    @property
    def state(self) -> Any:
        """Its counters: ``iteration`` and ``epoch``."""

    def is_plain(self, brain: Computation) -> bool:
        """Return whether it trains on a batch as ``Trainable.fit_batch`` of this computation does."""

    def begin_pass(self, epoch: int, count: PassCount, logged: Meters) -> None:
        """Let a pass count the iterations, and report what is logged.

        Args:
            epoch: the epoch that is running, from 0.
            count: counts the iterations.
            logged: the numbers that the pass reports.
        """

    def end_pass(self, epoch: int | None) -> None:
        """Note that a pass has ended; ``epoch``: how many epochs are done then, or None if it was cut short."""


class PassCount:
    """How many batches a phase has trained on, for the updater of the phase.

    Attributes:
        iterations: how many.
    """

    def __init__(self, iterations: int) -> None:
        self.iterations = iterations


class TrainPass:
    """One pass over the batches of a phase, or with ``repeat`` as many as are asked for.

    ``run`` trains on all of them. A custom loop trains on the ones that ``batches`` yields.

    Args:
        engine: what it is part of.
        phase: the phase's name, for messages.
        brain: computes the losses; bound to its optimizers.
        updater: trains on a batch, and counts for itself.
        metrics: what judges the predictions of its batches, by name.
        number: how many rounds over the data of this phase were started before. With the seed it decides the order.
        repeat: whether it starts again at the end of the data.

    Attributes:
        count: how many batches end it, over all rounds; None: the data does.
        done: how many batches are done, over all rounds.
        cursor: the place in the data of this round.
        in_round: how many batches of this round were given out.
        batch: the active batch; None between two batches.
        numbers: ``loss`` and what was logged, means over samples; empty until it is over.
        open, over: whether it has started; whether it is done.
        dropped: whether the loop has left it before its end.
        in_batch: whether its batch is not counted yet.
        after_batch: is called after each batch: the plugins, or the metrics, which call the plugins.
        validated: whether its phase was validated after it, if that was scheduled.
        stand_in: whether its batch is a stand-in, because only other ranks have samples. Plugins do not get it.
        state: the state from a checkpoint that it continues from; None for a new pass.
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
        self.engine, self.phase, self.brain, self.updater, self.metrics = engine, phase, brain, updater, metrics or {}
        self.trainable = trainable_of(brain)
        self.after_batch = self._judge if metrics else engine.after_batch
        self.count: int | None = None
        self.number, self.repeat = number, repeat
        self.done = 0
        self.in_round = 0
        self.cursor = DataCursor((), -1, engine.generators)
        self.batch: Any = None
        self.numbers: dict[str, float] = {}
        self.open = self.over = self.dropped = self.in_batch = self.validated = False
        self.stand_in = False
        self.state: PassState | None = None
        self.resources = ExitStack()
        # Whether ``run`` consumes the batches, and whether its update is something else than the Brain's own ``fit_batch``.
        self._is_run = self._is_custom = False
        # The batches of this round that are not taken; how many it has, and how many at most, where that is certain.
        self._batches: Iterator[Any] = iter(())
        self._length: int | None = None
        self._limit: int | None = None
        # After how many batches of a round every window closes; 0: that is not known.
        self._planned = 0
        self._count = PassCount(0)
        self._scheduled = False
        self._announced = 0

    def run(self, update: Callable[[Any], Any]) -> None:
        """Train on every batch that is left.

        Args:
            update: trains on one batch; what it returns are losses, if it is not the Brain's own ``fit_batch``.
        """
        if self.trainable.averages:
            update = self._averaged(update)
        self._is_run = True
        for batch in self.batches():
            update(batch)
            # Free the batch before the next one is made.
            del batch

    def batches(self) -> Generator[Any]:  # noqa: PLR0912 # a method for each branch would be one more call in each step
        """Yield each batch; it is done when the next one is requested. This is the only loop over training batches.

        This is the innermost loop of the whole training::

            for each epoch:                               # Engine.epochs
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
                        if something is scheduled:        # Engine.on_due
                            print, export, validate, save
                            end the training at a limit, or if a signal or a plugin has requested it
                    step the windows that are still open  # Engine.close
                    Brain.on_stage_end
                    plugins: after_pass
                    validate the phase, if that is scheduled
                    plugins: after_phase
                plugins: after_epoch
                save, if that is scheduled
            validate the last weights, and save           # Engine.finish

        """
        engine, trainable, record, context = self.engine, self.trainable, self.trainable.record, self.engine.context
        counters, work, before = engine.counters, engine.work, engine.before_batch
        try:
            for batches in self._rounds():
                schedulers, cursor = trainable.schedulers, self.cursor
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
                        stand_in=self.stand_in,
                        has_more=cursor.has_more,
                    )
                    if self not in work:
                        work.append(self)
                    if counts_first:
                        record.count_samples()
                    if before and not self.stand_in:
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
                    if not work or work[-1] is not self:
                        engine.unwind(self)
                    if self.in_batch:
                        self.count_batch()
                    # Free the batch before the loader makes the next one.
                    self.batch = None
                    del batch
                    # One comparison in each step, whatever is scheduled.
                    if counters["iteration"] >= engine.due and not engine.on_due(self):
                        engine.close(self)
                        return
        except GeneratorExit:
            # ``run`` only leaves the generator early after an error, and then the pass stays as it is.
            if not self._is_run:
                self.dropped = True
                # The pass that is asked next sees that it is not the innermost one.
                work.append(self)
            raise
        engine.close(self)

    def _rounds(self) -> Iterator[Iterator[Any]]:
        """The batches of each round over the data."""
        if self.over:
            return
        batches = self.engine.open(self)
        while batches is not None:
            yield batches if self.count is None else islice(batches, self.count - self.done)
            if self.done != self.count and not self.over:
                # The data ended the round, and no limit.
                self.engine.report_length(self, self._announced)
            # A round without a batch would be followed by another forever.
            again = self.repeat and self.in_round and self.done != self.count and not self.over
            batches = self.engine.next_round(self) if again else None

    def start(self, epoch: int, batches: int) -> None:
        """Prepare the Brain and the counters: from zero, or from the state of a checkpoint.

        Args:
            epoch: the epoch that is running, from 0.
            batches: how many there are in a round; 0 if that is not known, or if another round may follow.
        """
        brain, trainable = self.brain, self.trainable
        self.open = True
        self.in_round = 0
        self._planned = batches
        trainable.begin_pass(keeps_outputs=self.after_batch is not None)
        strategy, record = trainable.strategy, trainable.record
        if strategy is not None and trainable.overrides("fit_batch"):
            strategy.average_each_backward(trainable.schedulers, record.count_samples, self.resources)
        for metric in self.metrics.values():
            metric.reset()
        if self.state:
            trainable.load_state_dict(self.state.to_tree())
            self.in_round = self.state.cursor.taken
            for name in self.metrics.keys() & self.state.metrics:
                metric, state = self.metrics[name], self.state.metrics[name]
                take = metric.merge if isinstance(state, list) else metric.load_state_dict
                take(state)
        self._count = PassCount(self.updater.state.iteration)
        self.updater.begin_pass(epoch, self._count, trainable.numbers.logged)
        brain.on_stage_start(Stage.TRAIN, epoch)
        trainable.log_modes()
        if trainable.forgets and not self.state:
            brain.zero_grad()
        if hasattr(brain.train_sampler, "set_epoch"):
            brain.train_sampler.set_epoch(epoch)

    def read(self, loader: Any, *, interruptible: bool) -> Iterator[Any]:
        """Return the batches that are left of a round over a loader, on their device; the first is active at once.

        Args:
            loader: its order is that of ``number``.
            interruptible: whether a signal may end the wait for a batch of workers.
        """
        trainable, engine = self.trainable, self.engine
        random = random_state(engine.generators()) if self.state else None
        cursor = DataCursor(loader, self.number, engine.generators, device=trainable.device, name=f"phase.{self.phase}")
        self._announced = length(loader) or 0
        exact = has_exact_length(loader)
        # Otherwise the ranks would close their last windows after different batches.
        sure = current_world().size == 1 or (has_as_many_on_all(loader) and exact)
        # A window that a wrong length closes early would be another than without a length.
        count = self._announced if sure and exact and not self.repeat else 0
        if not self.open:
            engine.start(self, count)
        self._planned = min(count, self.count or count)
        self._limit = loader.count if isinstance(loader, LimitedLoader) else None
        self._length = self._announced if sure and exact else None
        if self.state:
            cursor.load_state_dict(self.state.cursor.to_tree())
            self.state = None
        self.cursor = cursor
        batches = cursor.open()
        self.resources.callback(cursor.close)
        self.in_round = cursor.taken
        # An interrupted wait may lose a batch. A loader that saves its state itself would not read it again after a resume.
        workers = getattr(cursor.reading, "num_workers", 0)
        if interruptible and workers and not has_own_state(loader):
            batches = SHUTDOWN.interruptible(batches, lambda: engine.on_due(self))
        self.resources.enter_context(supervise_workers(batches))
        if strategy := trainable.strategy:
            if not sure:
                batches = cursor.in_step(batches, strategy.world, strategy.any_has_more, trainable.device)
            batches = self._slices(batches, strategy)
        if random:
            # Starting a pass, and iterating over a loader, samples numbers that were sampled before the resume too.
            restore_random_state(random, engine.generators())
        if self not in engine.work:
            engine.work.append(self)
        self._batches = batches
        return batches

    def _slices(self, batches: Iterator[Any], strategy: Strategy) -> Iterator[Any]:
        """The slices of this rank; a stand-in for each that is empty. After the first update all have the same weights."""
        trainable, first = self.trainable, True
        for batch in batches:
            self.stand_in = type(batch) is EmptySlice
            yield batch.batch if self.stand_in else batch
            if first and trainable.counters["update"]:
                first = False
                require_equal_weights({self.phase: trainable.modules}, strategy.world)
        self.stand_in = False

    def end(self, epoch: int, data: str) -> None:
        """Close the windows that are open, and compute the numbers of the pass.

        Raises:
            DataError: there was no batch; ``data`` says in what.
        """
        if not self.done:
            raise DataError(f"{data} gave no batch in epoch {epoch}; check the dataset, or drop_last with few samples")
        brain, trainable = self.brain, self.trainable
        trainable.end_pass()
        self.resources.close()
        trainable.record.close()
        if trainable.forgets:
            brain.zero_grad(set_to_none=True)
        numbers = trainable.numbers
        loss = brain.avg_train_loss if trainable.averages else numbers.loss.mean()
        brain.on_stage_end(Stage.TRAIN, loss, epoch)
        # What it has logged.
        trainable.gather()
        metrics = computed(self.metrics, current_world())
        self.numbers = numbers.with_logged({"loss": loss, **metrics}, trainable.where)
        self.finish()

    def finish(self) -> None:
        """Give out no batch any more."""
        self.over = True

    def share_numbers(self) -> None:
        """Take the numbers of rank 0, whose plugins may have added some."""
        self.numbers = current_world().broadcast(self.numbers)

    def has_ended(self) -> bool | None:
        """Whether the batch that is done was the last of the pass; None: only asking for the next one can tell."""
        if self.count is not None and self.done >= self.count:
            return True
        if self.repeat:
            return False
        if self._limit is not None and self.in_round >= self._limit:
            return True
        return None if self._length is None else self.in_round >= self._length

    def has_more(self) -> bool:
        """Ask for the next batch, which is lost, and say whether there was one."""
        end = object()
        return next(self._batches, end) is not end

    def describe_progress(self) -> str:
        """``3 of 7 batches``; without the length where it is unknown, or where another round may follow."""
        if self.count is not None:
            return f"{self.done} of {self.count} batches"
        if self.repeat or not self._announced:
            return f"{self.done} batches"
        return f"{self.in_round} of {self._announced} batches"

    def entry_state(self) -> EntryState:
        """What a checkpoint keeps; on a GPU this waits."""
        state = self.state
        if self.open and not self.over:
            # If no batch was requested since the resume, the pass is still at the place from the checkpoint.
            cursor = state.cursor if state else CursorState(**self.cursor.state_dict(self.in_round))
            metrics = {name: mapping_of(own, own.state_dict(), self.phase) for name, own in self.metrics.items()}
            state = PassState(**self.trainable.state_dict(), cursor=cursor, metrics=metrics)
        own = {"over": self.over, "repeat": self.repeat, "numbers": self.numbers, "validated": self.validated}
        return EntryState.new("pass", self.phase, self.number, **own, done=self.done, state=state)

    def begin_round_after(self, rounds: int) -> int:
        """Use the order that follows so many rounds over the data of the phase; return how many are started then."""
        self.number = rounds
        return rounds + 1

    def begin_round(self) -> None:
        """Be ready for one more round over the data."""
        self.in_round = 0
        self.resources.close()

    def limit(self, count: int | None, *, repeat: bool) -> None:
        """Say where the pass ends: after so many batches, or if that is None with the data, unless these ``repeat``."""
        self.count, self.repeat = count, repeat

    def load(self, state: EntryState) -> TrainPass:
        """Continue from a state once a batch is requested; return the pass itself."""
        self.over, self.validated, self.number, self.done = state.over, state.validated, state.number, state.done
        self.numbers, self.state = state.numbers, state.state
        return self

    def mark_validated(self) -> None:
        """Note that its phase was validated after it, if that was scheduled."""
        self.validated = True

    def count_batch(self) -> None:
        """The batch that was given out is done."""
        engine, record = self.engine, self.trainable.record
        self.in_batch = False
        if not record.trained:
            self._count_losses()
        self.done += 1
        self._count.iterations += 1
        engine.counters["iteration"] += 1
        if (after := self.after_batch) and not self.stand_in:
            if not self._is_run or self._is_custom:
                # So gradients that a plugin leaves are not taken for gradients of code that steps its optimizers itself.
                for scheduler in self.trainable.schedulers:
                    scheduler.note_cleared()
            predictions, losses = record.take_outputs()
            after(context=engine.context, phase=self.phase, batch=self.batch, predictions=predictions, losses=losses)

    def _clear_leftovers(self, scheduler: OptimScheduler, number: int) -> None:
        """Clear gradients that other code has left, when the first batch of a window is handed out.

        The code that trains on the batch may call ``backward`` itself after that.

        Args:
            scheduler: its window is about to start.
            number: the number of the batch before.
        """
        entries: Iterable[Mapping[str, Any]] = self.engine.context["model"].values()
        others = [own for entry in entries for own in (entry.get("optim_schedulers") or {}).values()]
        clear_leftovers(scheduler, others, number)

    def _judge(self, *, batch: Any, predictions: Any, **values: Any) -> None:
        """Have the metrics judge a batch, and call the plugins."""
        if self.trainable.record.samples == 0:
            # A batch without samples contributes to no metric.
            if after := self.engine.after_batch:
                after(batch=batch, predictions=predictions, **values)
            return
        if predictions is None:
            what = f"phase.{self.phase}.train_metrics: nothing gives the predictions on which this phase is trained"
            raise DataError(f"{what}; call Brain.fit_batch in the step, or remove them and use self.log")
        with torch.no_grad():
            judged = predictions.detach() if isinstance(predictions, torch.Tensor) else predictions
            brain, kind = self.brain, type(self.brain)
            needed = any(map(needs_target, self.metrics.values()))
            judged, target = kind.readable(brain, judged, batch), target_of(brain, batch, needed=needed)
            for metric in self.metrics.values():
                judge(metric, judged, target, batch)
        if after := self.engine.after_batch:
            after(batch=batch, predictions=predictions, **values)

    def _count_losses(self) -> None:
        """Count a batch that did not go through the Brain's own ``fit_batch``."""
        trainable, number = self.trainable, self.trainable.record.number
        trainable.count_losses()
        updated = False
        for scheduler in trainable.schedulers:
            self._scheduled = self._scheduled or scheduler.last_batch == number
            updated = updated or scheduler.last_update == number
        # Unless it is counted already: where nothing goes through the schedulers, each batch counts as one update, or each
        # window of a fit_batch.
        if trainable.counters["update"] == trainable.record.updates_before:
            window = trainable.options.grad_accumulation_factor if trainable.overrides("fit_batch") else 1
            by_hand = self.in_round % window == 0
            trainable.counters["update"] += updated if self._scheduled else by_hand
        if self.in_round % MOST == 0:
            trainable.check_divergence()

    def _averaged(self, update: Callable[[Any], Any]) -> Callable[[Any], None]:
        """An update after which the Brain itself averages the loss."""
        trainable = self.trainable

        def train_on(batch: Any) -> None:
            loss = update(batch)
            if loss is not None:
                trainable.average(loss)

        return train_on

    def custom(self, update: Callable[[Any], Any], name: str) -> Callable[[Any], Tensor | None]:
        """An update that is not the Brain's own ``fit_batch``: its losses and windows are counted here.

        Args:
            update: returns a loss, several by name, or None.
            name: what messages call it.
        """
        trainable = self.trainable
        if trainable.strategy is not None:
            trainable.strategy.forgo_ddp(f"{name} is not that of the framework")
        update = trainable.compiled(update)
        # Not the Brain's autocast: the update may call fit_batch, which enters that one, and it cannot be entered twice.
        around = autocast(trainable.options.precision, trainable.device, steps=True)
        self._is_custom = True

        def train_on(batch: Any) -> Tensor | None:
            has_none = trainable.begin_update(batch, under_autocast=bool(around))
            with around or nullcontext(), gradients_dropped(trainable) if has_none else nullcontext():
                returned = update(batch)
            losses = {} if returned is None else losses_by_name(returned, name)
            losses = {name: loss.detach() for name, loss in losses.items()}
            trainable.note_losses(losses)
            return losses.get("loss")

        return train_on


@contextmanager
def gradients_dropped(trainable: Trainable) -> Iterator[None]:
    """Have no backward change a gradient of its modules until the block ends.

    This is for code that calls ``backward`` itself, for a batch without samples. A parameter that
    had no gradient has none afterwards, so an optimizer leaves it as it is.
    """
    had_none: set[nn.Parameter] = set()

    def drop(parameter: nn.Parameter, gradient: Tensor) -> Tensor:
        # The Brain's own fit_batch, called for something else, has counted that.
        if trainable.record.samples:
            return gradient
        if parameter.grad is None:
            had_none.add(parameter)
        return torch.zeros_like(gradient)

    def clear(parameter: nn.Parameter) -> None:
        # A scaler refuses to step without gradients.
        if parameter in had_none and not trainable.brain.scaler.is_enabled():
            parameter.grad = None
        had_none.discard(parameter)

    with ExitStack() as handles:
        for parameter in trainable.modules.parameters():
            if parameter.requires_grad:
                # torch has no types for these.
                hooked: Any = parameter
                handles.enter_context(hooked.register_hook(partial(drop, parameter)))
                handles.enter_context(hooked.register_post_accumulate_grad_hook(clear))
        yield


class PassIterator(Iterator[Any]):
    """The batches of a pass, for a custom loop. When nothing refers to this any more, the pass is over.

    Args:
        training: the pass.
    """

    def __init__(self, training: TrainPass) -> None:
        self._training, self._batches = training, training.batches()

    @property
    def done(self) -> int:
        """How many batches are done, those before a resume included."""
        return self._training.done

    @property
    def numbers(self) -> dict[str, float]:
        """``loss`` and what was logged, means over samples; empty until the pass is over."""
        return self._training.numbers

    def __iter__(self) -> Iterator[Any]:
        """Return the generator itself, so that a loop over the batches makes no further call."""
        return self._batches

    def __next__(self) -> Any:
        """The next batch."""
        return next(self._batches)

    def close(self) -> None:
        """End the pass."""
        self._batches.close()


def has_as_many_on_all(loader: Any) -> bool:
    """Return whether each rank has the same number of batches of a loader. For a stream that is unknown."""
    dataset = getattr(loader, "dataset", None)
    counts = current_world().all_gather(None if isinstance(dataset, IterableDataset) else length(loader))
    return None not in counts and len(set(counts)) == 1
