"""ExperimentClient: what the engine calls to train an experiment: its batches, epochs and saves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import proxy, ref

from loguru import logger
from torch import nn

from pipeline.checkpoint import layout, parts, reader
from pipeline.checkpoint.checkpoint_store import CheckpointStore
from pipeline.checkpoint.random_state import random_state, restore_random_state
from pipeline.checkpoint.state import CursorState
from pipeline.compute.evaluation import in_evaluation_mode
from pipeline.compute.trainable import StepRecord
from pipeline.compute.unregistered import require_registered
from pipeline.compute.validation import Verb
from pipeline.compute.weak_methods import own_method
from pipeline.config.schema import PhaseSchema, RunnerSchema, parse_intervals
from pipeline.context import Context, Phase
from pipeline.data.batch import EmptySlice, count_samples
from pipeline.data.cursor import DataCursor
from pipeline.data.loader import SeededLoader, length, set_epoch
from pipeline.distributed.strategy import GradientAverage, require_equal_weights
from pipeline.distributed.world import SINGLE, current_world
from pipeline.engine.client import IterationClient
from pipeline.engine.iteration_engine import IterationEngine
from pipeline.engine.phase import begin_on_ranks
from pipeline.engine.triggers import Schedule
from pipeline.errors import ConfigError, DataError, StageError
from pipeline.experiment import experiment_config, trained_parts
from pipeline.experiment.experiment_config import PHASE
from pipeline.experiment.visualizers import JsonLines, PluginNumbers
from pipeline.metrics.meters import MOST
from pipeline.optim.optim_scheduler import OptimScheduler
from pipeline.optim.stepping import attach_optimizer_hooks, clear_leftovers, log_discarded_windows
from pipeline.user_code.plugin_calls import hook_or_none

if TYPE_CHECKING:
    from pipeline.experiment.experiment import ExperimentBase

# Key of ``config.training`` -> the attribute of a Schedule that has its intervals.
INTERVALS = {"valid_interval": "validating", "save_interval": "saving"}


class ExperimentPhase(PhaseSchema):
    """The settings of what an experiment trains, where other runners have phases."""

    def valid_name(self, number: str) -> str:
        """Return the name under which a number of the validation is reported: its own name."""
        return number


class ExperimentClient(IterationClient):
    """What an engine calls to train an experiment.

    It reads and counts the batches, starts and ends the epochs, calls the plugins, and saves and
    restores what a checkpoint keeps besides the models. The experiment calls it too:
    ``read_batch``, ``save`` and an assignment to ``iterator`` end here.

    Args:
        experiment: the experiment. The client keeps only a weak reference to it.

    Attributes:
        counters: ``context["train_state"]``.
        cursor: the place in the data of the current epoch.
        record: what happens to the active batch, for the OptimSchedulers.
        options: the options of ``optimizer`` when it was set up.
        numbers: what is reported to the plugins. It exists after ``open_numbers``.
        store: saves and restores the checkpoints. It exists after ``attach``.
    """

    # ``call_valid`` restores them, also if user code calls ``valid``.
    restores_generators = False

    numbers: PluginNumbers
    store: CheckpointStore

    def __init__(self, experiment: ExperimentBase) -> None:
        super().__init__(experiment.context)
        self._experiment: ExperimentBase = proxy(experiment)
        self._experiment_ref = ref(experiment)
        self._name = type(experiment).__name__
        self.counters = experiment.train_state
        self._engine: ref[IterationEngine] | None = None
        self._world = SINGLE
        self.record = StepRecord(own_method(self, "_weight"), under_autocast=True)
        self.options: parts.PartOptions = {}
        self._schedulers: list[OptimScheduler] = []
        self._schedulers_by_name: dict[str, OptimScheduler] = {}
        # Averages the gradients, if multiple ranks train.
        self._average: GradientAverage | None = None
        self._before_batch: Callable[..., Any] | None = None
        self._after_batch: Callable[..., Any] | None = None
        # The batch that was read last.
        self._batch: Any = None
        self.cursor = self._no_data()
        # An epoch is running. Before setup this is True, so that an iterator that is assigned then
        # starts no epoch.
        self._in_epoch = True
        # The run was resumed in an epoch that had started and was not over.
        self._interrupted = False
        # How many epochs are over, if the current iteration has ended one.
        self._ended: int | None = None
        # The states of the random generators before the epoch.
        self._states_before_epoch: Mapping[str, Any] = {}
        # How many batches the loader announced, if the length of the training depends on it.
        self._announced: int | None = None
        # The settings in ``config.training`` that the schedule was made from.
        self._planned: tuple[Any, ...] = ()
        # The newest checkpoint of this training, which may be overwritten.
        self._newest: Path | None = None

    @property
    def experiment(self) -> ExperimentBase:
        """The experiment itself, for a search of its attributes.

        In such a search, a proxy would be another object than the experiment.

        Raises:
            ReferenceError: it no longer exists.
        """
        experiment = self._experiment_ref()
        if experiment is None:
            raise ReferenceError(f"{self._name}: the experiment no longer exists; keep a reference to it")
        return experiment

    @property
    def engine(self) -> IterationEngine:
        """The engine that trains.

        Raises:
            StageError: the experiment is not set up.
        """
        engine = self._engine() if self._engine else None
        if engine is None:
            raise StageError(f"{self._name}: nothing is set up; call setup() first")
        return engine

    # What the engine calls.

    @property
    def runner(self) -> RunnerSchema:
        """The settings of the runner; without a run, the defaults."""
        if self._experiment.alone:
            return RunnerSchema.model_validate({"name": PHASE, "class": "train"})
        return super().runner

    def phases(self) -> list[PhaseSchema]:
        """Return the only phase, which is validated."""
        return [ExperimentPhase.model_validate({"name": PHASE, "valid_dataset_name": "valid_loader"})]

    def schedule(self, counters: Mapping[str, int]) -> Schedule:
        """Return an empty schedule. ``start_iterations`` sets the real one."""
        return Schedule(counters)

    def generators(self) -> dict[str, Any]:
        """Return the random generators in the experiment's attributes and its data, by name."""
        return trained_parts.generators_of(self.experiment, self.cursor)

    def trained(self) -> dict[str, Any]:
        """Return every object with a state except the model, such as optimizers, by place."""
        return trained_parts.parts_of(self.experiment)

    def validator(self, evaluate: Verb) -> Verb:
        """Return what validates the experiment: its ``valid``."""
        return self._evaluate

    def _evaluate(self, _context: Context, _phase: Phase) -> dict[str, float]:
        experiment = self._experiment
        is_last = self.context.is_last_validation
        schedules = trained_parts.schedules_restored(self.experiment) if is_last else nullcontext()

        def valid() -> None:
            with self._world.alone(), schedules:
                if self._world.is_main:
                    experiment.valid()

        return self.numbers.of_validation(valid)

    def address(self, phase: str) -> str:
        """Return the name of the experiment in messages."""
        return PHASE

    def errors(self, phase: str) -> AbstractContextManager[None]:
        """Return a block whose errors stay as they are."""
        return nullcontext()

    def save(self, save_checkpoint: Callable[[], None]) -> None:
        """Call ``save`` of the experiment, which a subclass may have overridden."""
        self._experiment.save()

    def saved_counters(self) -> dict[str, int]:
        """Return the counters that a checkpoint has."""
        return {**self.counters, **self._experiment.state_dict()}

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps besides the models, the parts and the engine's state."""
        visualizer = self._experiment.visualizer
        experiment = {
            "data": self.cursor.state_dict(),
            "in_epoch": self._in_epoch,
            "numbers": self.numbers.state_dict(),
            "lines": visualizer.size if isinstance(visualizer, JsonLines) else None,
            "state": self._experiment.training_state(),
        }
        return {"experiment": experiment}

    def no_numbers(self) -> dict[str, dict[str, Any]]:
        """Return the numbers of an epoch that starts."""
        return {PHASE: {}}

    def current_epoch(self) -> int:
        """Return the number of the epoch that is running or continues, or of the last one."""
        unread = self._interrupted and not self.cursor.taken
        return max(0, self._experiment.epoch - (not unread))

    def start_iterations(self) -> None:
        """Set the schedule of the engine, and start an epoch or continue one."""
        experiment = self._experiment
        engine = self.engine
        self._refuse_overwriting(experiment.iteration + 1)
        self._plan()
        self._ended = None
        if experiment.alone and experiment.iteration >= engine.schedule.max_steps:
            logger.info(f"nothing is left to train: config.training.max_iteration is {engine.schedule.max_steps}")
        if self._in_epoch or (engine.is_over() and not self._interrupted):
            return
        if self.cursor.over():
            experiment.new_epoch()
        else:
            self._start_epoch(again=self._interrupted)

    def after_iteration(self) -> int | None:
        """Count what an iteration has done.

        Returns:
            How many epochs are over, if the iteration has ended one; else None.
        """
        if self._after_batch:
            for scheduler in self._schedulers:
                scheduler.note_cleared()
            self._after_batch(context=self.context, phase=PHASE, batch=self._batch, predictions=None, losses={})
        if not self.cursor.taken and self.cursor.epoch <= 0:
            self._refuse_epochs_without_end()
        if self.has_read_epoch():
            self._ended = self.cursor.epoch + 1
            self._report_length()
        experiment = self._experiment
        if experiment.alone and _settings_of(experiment.config) != self._planned:
            self._plan()
        if self._average and experiment.iteration % MOST == 0:
            self.numbers.gather()
        ended = self._ended
        self._ended = None
        return ended

    def has_read_epoch(self) -> bool:
        """Return whether all batches of the running epoch were read."""
        return bool(self.cursor.taken) and self.cursor.over()

    def print_numbers(self) -> None:
        """Give the plugins the numbers since the last time."""
        self.numbers.print()

    def place_in_epoch(self) -> str | None:
        """Return where in an epoch the training is, such as ``3 of 7 batches``.

        If no epoch is running, return None.
        """
        cursor = self.cursor
        if not self._in_epoch or not cursor.taken or cursor.over():
            return None
        of = "" if cursor.length is None else f" of {cursor.length}"
        return f"{cursor.taken}{of} batches"

    def end_epoch(self, *, cut_short: bool) -> None:
        """End the epoch that is running, if one is.

        Args:
            cut_short: whether training has ended before the epoch. Then its numbers are kept, and
                the hooks for the end of an epoch are not called.
        """
        if cut_short:
            self._log_discarded_windows()
            self.engine.numbers.take(PHASE, self.numbers.of_training(), trained=True)
        elif self._in_epoch:
            self._in_epoch = False
            self.counters["epoch"] = self.cursor.epoch + 1
            self._log_discarded_windows()
            hooks = self.context["hooks"]
            numbers = self.numbers.of_training()
            hooks.after_pass(context=self.context, phase=PHASE, metrics=numbers)
            self.engine.numbers.take(PHASE, numbers, trained=True)
            hooks.after_phase(context=self.context, phase=PHASE)
            hooks.after_epoch(context=self.context)

    def _log_discarded_windows(self) -> None:
        """Log how many windows of the OptimSchedulers were discarded in this epoch."""
        log_discarded_windows(PHASE, self.cursor.epoch, self._schedulers_by_name)

    def _plan(self) -> None:
        """Set the schedule of the engine from ``config.training``."""
        experiment = self._experiment
        engine = self.engine
        every = None if experiment.alone else self.context["runner"].print_interval
        schedule = Schedule(
            {**self.counters, "iteration": experiment.iteration},
            max_steps=experiment_config.max_iteration(experiment.config),
            time_limit=engine.schedule.time_limit,
            printing=parse_intervals(every),
            validating=experiment_config.intervals(experiment.config, "valid_interval"),
            saving=experiment_config.intervals(experiment.config, "save_interval"),
        )
        self._planned = _settings_of(experiment.config)
        engine.set_schedule(schedule)

    def _report_length(self) -> None:
        """Warn once if an epoch has more or fewer batches than ``epochs`` was planned with."""
        announced = self._announced
        count = self.cursor.taken
        if announced is None or count == announced:
            return
        self._announced = None
        what = f"train_loader: announced {announced:,} batches, got {count:,}"
        runner = self.context["runner"]
        iterations = self.engine.schedule.max_steps
        planned = f"epochs: {runner.epochs} was planned as {iterations:,} iterations"
        logger.warning(f"{what}; {planned}")

    def _refuse_epochs_without_end(self) -> None:
        """Raise if intervals count epochs but ``read_batch`` is never called.

        No epoch would end then.
        """
        schedule = self.engine.schedule
        in_epochs = [name for name, attribute in INTERVALS.items() if getattr(schedule, attribute).epochs]
        if in_epochs and not self.cursor.taken:
            unread = f"{self._name}.train_batch: did not call self.read_batch(), so no epoch ends"
            raise StageError(f"{unread}; call it, or give {' and '.join(in_epochs)} in iterations")

    # What ``setup`` calls, in this order.

    def join_run(self, context: Context, counters: dict[str, int]) -> None:
        """Train in a run.

        Args:
            context: the context of the run.
            counters: its ``train_state``.
        """
        self.context = context
        self.counters = counters

    def find_hooks(self) -> None:
        """Find the hooks that are called for each batch, before anything is set up."""
        self._batch = None
        hooks = self.context["hooks"]
        self._before_batch = hook_or_none(hooks, "before_batch")
        self._after_batch = hook_or_none(hooks, "after_batch")

    def open_numbers(self, folder: Path) -> None:
        """Prepare what is reported to the plugins.

        Args:
            folder: the output folder.
        """
        self._world = current_world()
        self.numbers = PluginNumbers(self.context, folder)

    def attach(self, engine: IterationEngine, store: CheckpointStore) -> None:
        """Use an engine, which the experiment keeps alive, and a store of checkpoints."""
        self._engine = ref(engine)
        self.store = store

    def note_length(self, epochs: int | None) -> None:
        """Remember how many batches ``train_loader`` announces.

        Args:
            epochs: the runner's. None if the length of the training does not depend on the loader.
        """
        self._announced = length(self._experiment.train_loader) if epochs else None

    def offer_model(self) -> None:
        """Put the model where checkpoints and later stages find it.

        The OptimSchedulers among the attributes of the experiment are connected too.

        Raises:
            StageError: ``setup_model`` has not set ``model`` to a module.
            ConfigError: the model has layers in plain containers.
        """
        experiment = self._experiment
        model = getattr(experiment, "model", None)
        if not isinstance(model, nn.Module):
            kind = f"{self._name}.setup_model: self.model is a {type(model).__name__}, not an nn.Module"
            raise StageError(f"{kind}; set it to one, to an nn.ModuleDict where there are several")
        require_registered([model], f"{self._name}.setup_model: ")
        self.context["model"] = {**(self.context.peek("model") or {}), PHASE: Phase(PHASE, {"model": model})}
        self._schedulers_by_name = {
            place.removeprefix("self."): part
            for place, part in self.trained().items()
            if isinstance(part, OptimScheduler)
        }
        self._schedulers = list(self._schedulers_by_name.values())
        for scheduler in self._schedulers:
            scheduler.bind(self.record)
        attach_optimizer_hooks(self._schedulers_by_name, self.context, PHASE)
        self.options = parts.options_of_parts(trained_parts.optimizer_of(self.experiment))
        # ``training_state`` saves the optimizer.
        self.store.begin(self.context["model"], {"self": experiment}, apart=["self.optimizer"])

    def share_work(self) -> None:
        """Have all ranks train one model.

        They start from the same weights, and gradients are averaged over the ranks. This does not
        use DDP, which averages only if the model itself is called. An experiment may call any
        method of the model.
        """
        experiment = self._experiment
        valid = experiment.valid_loader
        if isinstance(valid, SeededLoader):
            # Rank 0 validates alone, so it needs all of the data.
            valid.stop_sharing()
        schedulers = [part for part in self.trained().values() if isinstance(part, OptimScheduler)]
        modules = trained_parts.modules_of(self.experiment).values()
        begin_on_ranks(modules, None if experiment.alone else self.context["runner"].seed)
        self._average = GradientAverage(modules, schedulers, self.record.count_samples)
        what = "one sum after each backward, since an experiment steps its optimizer itself"
        logger.info(f"the gradients of {self._world.size} ranks are averaged by {what}")

    def _weight(self, batch: Any) -> int:
        """Return how much a batch counts in an accumulation window.

        On a single rank, all batches count the same.
        """
        if not self._average:
            return 1
        return 0 if self.record.stand_in else count_samples(batch)

    def reset(self) -> None:
        """Start before the first epoch."""
        self.cursor = self._no_data()
        self._in_epoch = False

    # Batches and epochs.

    def read_batch(self) -> Any:
        """Return the next batch, on the device.

        After the last batch of an epoch, this calls ``new_epoch`` first.

        Raises:
            DataError: there is no batch.
        """
        experiment = self._experiment
        if self.cursor.over():
            if self.cursor.taken or not self._in_epoch:
                experiment.new_epoch()
            if self.cursor.over():
                nothing = f"train_loader: gave no batch in epoch {experiment.epoch}"
                raise DataError(f"{nothing}; check the dataset, or drop_last with few samples")
        batch = self.cursor.take()
        stands_in = type(batch) is EmptySlice
        batch = batch.batch if stands_in else batch
        number = self.record.number
        self.record.begin(batch, stand_in=stands_in)
        samples = 0 if stands_in else count_samples(batch)
        self.counters["samples"] += samples
        if self._average:
            self.numbers.weigh(samples)
        self._batch = batch
        if self._before_batch:
            self._before_batch(context=self.context, phase=PHASE, batch=self._batch)
        for scheduler in self._schedulers:
            if scheduler.last_gradients >= number and not scheduler.window.batches:
                clear_leftovers(scheduler, self._schedulers, number)
        return self._batch

    def active_batch(self) -> tuple[Any, int] | None:
        """Return the batch that was read last, and its number in the epoch.

        Before the first batch, return None.
        """
        return None if self._batch is None else (self._batch, self.cursor.taken)

    def call_new_epoch(self, new_epoch: Callable[[], None]) -> None:
        """Start an epoch.

        Args:
            new_epoch: the method of the experiment. It has to assign ``iterator``.

        Raises:
            StageError: it has not assigned ``iterator``.
        """
        if not self._in_epoch and self.cursor.taken and not self.cursor.over():
            # A custom `train` starts with this call. In a resumed run it continues the epoch.
            self._start_epoch(again=self._interrupted)
            return
        experiment = self._experiment
        # If the run is resumed in this epoch, these states start the epoch again.
        self._states_before_epoch = random_state(self.generators())
        set_epoch(experiment.train_loader, experiment.epoch)
        before = self.cursor
        new_epoch()
        if self.cursor is before:
            what = f"{self._name}.new_epoch: did not assign self.iterator, so that there is no batch to read"
            raise StageError(f"{what}; write self.iterator = iter(self.train_loader)")

    def assign(self, batches: Iterable[Any]) -> None:
        """Read from other batches. Usually this ends an epoch and starts the next one.

        Args:
            batches: ``train_loader``, or an iterator that the user's ``new_epoch`` has made.
        """
        # `new_epoch` may wrap the iterator of an epoch that has just started. The epoch is the
        # same.
        is_new = not self._in_epoch or bool(self.cursor.taken)
        if self._in_epoch and is_new:
            self._ended = self.cursor.epoch + 1
            self.end_epoch(cut_short=False)
        if is_new and not self._interrupted:
            self.numbers.begin_epoch()
            self.engine.forget_numbers()
        begun = None if batches is self._experiment.train_loader else self._states_before_epoch
        self.cursor = self._new_cursor(batches, self.cursor.epoch + is_new, begun=begun)
        if is_new:
            self._start_epoch(again=self._interrupted)

    def _start_epoch(self, *, again: bool) -> None:
        """Start an epoch.

        Args:
            again: whether a resumed run continues the epoch. Then the plugins were called before.
        """
        self._in_epoch = True
        self._interrupted = False
        self.context["current_epoch"] = self.cursor.epoch
        if not again:
            hooks = self.context["hooks"]
            hooks.before_epoch(context=self.context)
            hooks.before_phase(context=self.context, phase=PHASE)
            hooks.before_pass(context=self.context, phase=PHASE)

    def _new_cursor(self, batches: Iterable[Any], epoch: int, **more: Any) -> DataCursor:
        """Return a cursor for an epoch.

        Args:
            batches: the loader, or an iterator that the user's ``new_epoch`` has made.
            epoch: the number of the epoch, from 0.
            more: ``taken`` or ``begun`` of the cursor.
        """
        device = self._experiment.device
        generators = own_method(self, "generators")
        return DataCursor(batches, epoch, generators, device=device, world=self._world, name="train_loader", **more)

    def _no_data(self) -> DataCursor:
        """Return a cursor before the first epoch."""
        return DataCursor((), -1, own_method(self, "generators"))

    def call_valid(self, valid: Callable[[], None]) -> None:
        """Validate in evaluation mode and without gradients.

        Afterwards the modes and the random generators are restored.

        Args:
            valid: the method of the experiment.
        """
        random = random_state(self.generators())
        try:
            with in_evaluation_mode(self._experiment.model):
                valid()
        finally:
            restore_random_state(random, self.generators())

    # What is saved and restored.

    def place(self) -> dict[str, int]:
        """Return the place in the data.

        Returns:
            ``epoch``, the number of epochs that are over; and ``batches``, the number of batches
            that were read of the next epoch.
        """
        batches = self.cursor.taken
        over = batches and self.cursor.over()
        unfinished = not over and (batches or self._in_epoch)
        return {
            "epoch": self.cursor.epoch + 1 - bool(unfinished),
            "batches": 0 if over else batches,
        }

    def continue_at(self, epoch: int, batches: int) -> None:
        """Continue from a place in the data.

        Args:
            epoch: the number of the epoch, from 1.
            batches: how many of its batches were read.
        """
        loader = self._experiment.train_loader if batches else ()
        self.cursor = self._new_cursor(loader, epoch - 1, taken=batches)
        self._in_epoch = False

    def save_checkpoint(self) -> None:
        """Save a checkpoint of this moment.

        Raises:
            ConfigError: the output folder has checkpoints of another run, which would be
                overwritten.
        """
        experiment = self._experiment
        self._refuse_overwriting(experiment.iteration)
        if self._average:
            self.numbers.gather()
            require_equal_weights(trained_parts.modules_of(self.experiment), self._world)
        self.engine.save_checkpoint()
        self._newest = self.store.path_of(experiment.iteration)

    def _refuse_overwriting(self, iteration: int) -> None:
        """Raise if the output folder has checkpoints of another run that would be overwritten.

        In a run of a config this does nothing.

        Args:
            iteration: the first iteration at which a checkpoint may be saved.
        """
        experiment = self._experiment
        newest = experiment.checkpointer.newest() if experiment.alone else None
        if newest and newest != self._newest and (layout.step_of(newest) or 0) >= iteration:
            what = f"{newest}: is of another run, and this one is at iteration {experiment.iteration}, and would overwrite it"
            raise ConfigError(f"{what}; choose another args.output, or go on from it, without an args.checkpoint_path")

    @contextmanager
    def epoch_repeated(self, place: CursorState) -> Iterator[None]:
        """Let ``new_epoch`` start an interrupted epoch again in a ``with`` block, as it did before.

        Args:
            place: where the epoch was interrupted.
        """
        self._in_epoch = True
        self.cursor = self._new_cursor((), self.cursor.epoch)
        if place.begun is not None:
            restore_random_state(place.begun.to_tree(), self.generators())
        yield
        self._in_epoch = False

    def restore(self, checkpoint: reader.LoadedCheckpoint, *, is_in_epoch: bool) -> None:
        """Restore the numbers and the place in the data, after the models and the training state.

        Args:
            checkpoint: a checkpoint of an experiment.
            is_in_epoch: whether it was saved in the middle of an epoch.
        """
        state = checkpoint.state
        assert state
        own = state.experiment
        assert own
        self.numbers.load_state_dict({name: meter.to_tree() for name, meter in own.numbers.items()})
        self._interrupted = own.in_epoch
        experiment = self._experiment
        if experiment.alone:
            self.context.restore_requests(state.stopped, state.requested)
            self.store.restore_recoverables(checkpoint)
            in_folder = checkpoint.path.resolve().parent == self.store.folder.resolve()
            self._newest = self.store.path_of(experiment.iteration) if in_folder else None
            if in_folder and isinstance(experiment.visualizer, JsonLines):
                experiment.visualizer.cut(own.lines)
        # The engine restores the random generators after this. Creating the iterator of a loader
        # samples a number, as it did before.
        if is_in_epoch:
            self.cursor.load_state_dict(own.data.to_tree())
            self.cursor.reopen()


def _settings_of(config: Any) -> tuple[Any, ...]:
    """Return the settings that the schedule is made from. User code may change them meanwhile."""
    training = config.training
    return training.max_iteration, training.valid_interval, training.save_interval
