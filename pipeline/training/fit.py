"""``Brain.fit`` and ``evaluate``: a Brain by itself, over epochs, with a bar for each pass."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

from loguru import logger
from rich.progress import MofNCompleteColumn, Progress, TextColumn

from pipeline.checkpoint import reader, storage
from pipeline.checkpoint.checkpointer import Checkpointer
from pipeline.checkpoint.random_state import lacking, restore_states, states_of
from pipeline.checkpoint.restore import restore_training
from pipeline.checkpoint.state import EntryState, FitState, ModesState
from pipeline.config.schema import Interval
from pipeline.context import Context
from pipeline.data.batch import on_device
from pipeline.data.generators import own_generators
from pipeline.data.loader import length, set_epoch, without_state
from pipeline.distributed.world import current_world
from pipeline.errors import CheckpointError, ConfigError
from pipeline.run.bar_console import BarConsole
from pipeline.run.log import on_terminal
from pipeline.signals import SHUTDOWN
from pipeline.training.checkpoints import Checkpoints
from pipeline.training.evaluation import evaluate
from pipeline.training.optim_scheduler import log_discarded_windows
from pipeline.training.phase import begin_on_ranks
from pipeline.training.train_pass import PassLoop, TrainPass
from pipeline.training.trainable import Computation, Stage, trainable_of
from pipeline.training.triggers import NEVER, Schedule
from pipeline.training.updater import Updater, is_plain
from pipeline.user_code import class_path
from pipeline.user_code.plugins import installed_plugins, plugin_manager

# The phase under which a Brain that trains by itself saves and reports.
NAME = "brain"

# Batches between two movements of the bar.
EVERY = 50


class LoneBrain(Computation, Protocol):
    """A Brain that trains by itself."""

    checkpointer: Checkpointer | None
    hparams: Any


@contextmanager
def pass_progress(brain: LoneBrain, title: str, batches: int | None, show: bool | None) -> Iterator[Progress]:
    """A progress bar on stderr until the block ends; ``disable`` says that it is not show.

    Args:
        brain: whose pass it is.
        title: what stands before it.
        batches: how many there will be; None: that isn't known.
        show: whether it is; None: where stderr is a terminal, unless the Brain has ``noprogressbar``. Rank 0 alone shows it.
    """
    columns = *Progress.get_default_columns(), MofNCompleteColumn(), TextColumn("{task.fields[loss]}")
    shown = on_terminal() and not trainable_of(brain).options.noprogressbar if show is None else show
    world = current_world()
    console = BarConsole(quiet=not world.is_main)
    with Progress(*columns, console=console, transient=True, disable=not world.broadcast(shown)) as bar:
        bar.add_task(title, total=batches, loss="")
        yield bar


def test(brain: LoneBrain, loader: Any, show: bool | None) -> float:
    """The mean loss over the samples of a test set, nan where none is computed; ``show``: as in ``pass_progress``."""
    with pass_progress(brain, "test", length(loader), show) as bar:
        batches: Iterable[Any] = on_device(without_state(loader), brain.device)
        if not bar.disable:
            batches = bar.track(batches, task_id=bar.task_ids[0])
        return evaluate(brain, batches, Stage.TEST, {}, data="the test set").get("loss", math.nan)


class Fit(PassLoop):
    """The training of one ``Brain.fit``; with a checkpointer it goes on from the newest checkpoint.

    Args:
        brain: what is trained; its ``on_fit_start`` has been called.
        train: the training batches.
        valid: those that it is validated on after each epoch; None: it is not.
        show: whether progress is; None: where stderr is a terminal.

    Attributes:
        epochs: the numbers of the epochs that are done, those of earlier fits first.
        running: the pass in which the checkpoint was saved; None: between two epochs.
        metrics: the numbers of the last epoch.
        cut_short: whether ``optimizer_step_limit`` has ended the training within an epoch.
        saved_modes: those of the checkpoint with which it goes on; None: it has none.

    Raises:
        CheckpointError: the checkpoints are not of this Brain.
    """

    def __init__(self, brain: LoneBrain, train: Iterable[Any], valid: Iterable[Any] | None, show: bool | None) -> None:
        self.trainable = trainable_of(brain)
        options = self.trainable.options
        self.brain, self.options, self.train, self.valid, self.show = brain, options, train, valid, show
        seconds = round(options.ckpt_interval_minutes * 60)
        intervals = [Interval(options.ckpt_interval_steps, "iteration"), Interval(seconds, "second")]
        self.updater = Updater(brain)
        self.bar: Progress
        schedulers = {str(number): scheduler for number, scheduler in enumerate(self.trainable.schedulers)}
        entry = {"model": brain, "brain": brain, "optim_schedulers": schedulers, "updater": self.updater}
        super().__init__(Context(model={NAME: entry}, train_state=self.trainable.counters, hooks=plugin_manager().hook))
        saver = brain.checkpointer
        self.resources = ExitStack()
        if options.profile_training and current_world().is_main:
            self._profile()
        self.session = saver.session if saver else None
        self.checkpoints: Checkpoints | None = None
        if saver:
            # Several processes look together, when it is time.
            saver.session.begin_fit(object if self.agreement else self.wake)
            self.checkpoints = Checkpoints(saver.store, self.context, None, "error", saver.session.save)
        self.metrics: dict[str, float] = {}
        self.epochs: list[int] = []
        self.running: EntryState | None = None
        self.cut_short = False
        self.saved_modes: ModesState | None = None
        # Those of a window that an earlier fit was interrupted in.
        brain.modules.zero_grad()
        begin_on_ranks([brain.modules], None)
        self.restore()
        own = [interval for interval in intervals if interval.length > 0 and brain.checkpointer]
        self.schedule = Schedule(self.counters, saving=own, max_updates=options.optimizer_step_limit or NEVER)
        self.updater.set_state_dict({"iteration": self.counters["iteration"], "epoch": self.updater.state.epoch})

    def _profile(self) -> None:
        """Have the plugin ``profiler`` look at the first batches; it writes into the hyperparameter ``output_folder``."""
        folder = getattr(self.brain.hparams, "output_folder", None)
        if folder is None:
            raise ConfigError(
                "fit: profile_training writes into the hyperparameter output_folder; there is none, add it"
            )
        warmup, steps = self.options.profile_warmup, self.options.profile_steps
        plugin = class_path.load(class_path.parse(installed_plugins()["profiler"]))(0, warmup, steps)
        storage.make_folder(Path(folder))
        self.context |= {"run_dir": Path(folder), "runner_name": "", "device": self.brain.device}
        self.context |= {"resources": self.resources, "runner": None}
        plugin.before_pipeline(self.context)
        self.before_batch = lambda **_: plugin.before_batch()

    def restore(self) -> None:
        """Restore the newest checkpoint from which a fit can go on."""
        checkpointer = self.brain.checkpointer
        if checkpointer is None:
            return
        checkpointer.store.begin(self.context["model"])
        checkpoint = checkpointer.store.newest_valid()
        if checkpoint is None:
            return
        is_fit = checkpoint.weights.keys() == {NAME}
        state = checkpoint.state if is_fit else None
        if state is None or state.fit is None:
            what = f"{checkpoint.path}: was saved by a run, or by something else that is no fit of a Brain"
            raise CheckpointError(f"{what}; give the Brain a Checkpointer with a folder of its own")
        fit = state.fit
        checkpointer.session.refuse_lacking(checkpoint)
        restore_training(checkpoint, self.context, checkpointer.recoverables, checkpointer.store.initial)
        restore_states(self.generators(), fit.generators)
        for name in lacking(self.generators(), fit.generators):
            what = f"{checkpoint.path}: has the state of the random generator {name}"
            logger.warning(f"{what}, and the Brain and its data have none such")
        self.epochs = fit.epochs
        self.metrics = fit.metrics
        self.running = fit.running
        self.saved_modes = state.modes
        logger.info(f"going on after {len(self.epochs)} epochs, from {checkpoint.path}")

    def generators(self) -> dict[str, Any]:
        """The random generators of the Brain and its data, by name."""
        return own_generators({"": self.brain}, {"train": self.train, "valid": self.valid})

    def run(self, epoch_counter: Iterable[int]) -> None:
        """Train the epochs that are not done yet."""
        done, epochs_before = Counter(self.epochs), len(self.epochs)
        with self.resources, self.agreement.ruling() if self.agreement else nullcontext():
            nothing_left = self._over() and not self.running
            for epoch in map(int, () if nothing_left else epoch_counter):
                if done[epoch]:
                    done[epoch] -= 1
                    continue
                self.epoch(epoch)
                if self.cut_short:
                    break
                self.epochs.append(epoch)
                self.counters["epoch"] += 1
                self.save()
                if self._over():
                    break
            if len(self.epochs) == epochs_before and not self.cut_short:
                updates = self.counters["update"]
                logger.info(f"fit: nothing is left to train; {epochs_before} epochs and {updates} updates are done")
            if self.checkpoints:
                self.checkpoints.finish()

    def epoch(self, epoch: int) -> None:
        """Train on everything, then validate."""
        brain, training = self.brain, TrainPass(self, NAME, self.brain, self.updater, number=epoch)
        if self.running:
            training.load(self.running)
            self.running = None
        if training.number != epoch:
            what = f"the checkpoint was saved in the middle of epoch {training.number}, and epoch {epoch} would be next"
            raise CheckpointError(f"fit: {what}; give it the epochs that it had then")
        is_own = not is_plain(brain, self.updater)
        update = training.custom(brain.fit_batch, "fit_batch") if is_own else self.trainable.fit_batch
        # The length may depend on the epoch.
        set_epoch(self.train, epoch)
        progress = pass_progress(brain, f"epoch {epoch}", length(self.train), self.show)
        with progress as self.bar, SHUTDOWN.defer(self.wake), training.resources:
            training.run(update)
        self.metrics = training.numbers
        if self.valid is not None:
            batches = on_device(without_state(self.valid), brain.device)
            numbers = evaluate(brain, batches, Stage.VALID, {}, epoch=epoch, data="the validation set")
            self.metrics |= {f"valid_{name}": value for name, value in numbers.items()}

    def open(self, training: TrainPass) -> Iterator[Any] | None:
        """Begin the pass of an epoch, or go on with it; None: it was resumed at a limit that stands."""
        batches = training.read(self.train, interruptible=True)
        self.look_ahead()
        if self._over():
            self._stop_in(training)
            return None
        return batches

    def close(self, training: TrainPass) -> None:
        """The pass of an epoch is over."""
        training.end(training.number, "the training set")
        log_discarded_windows("fit", training.number, self.context["model"][NAME]["optim_schedulers"])
        self.work.remove(training)

    def start(self, training: TrainPass, batches: int) -> None:
        """Prepare the Brain of a pass; one that goes on keeps the modes of its checkpoint."""
        super().start(training, batches)
        saver = self.brain.checkpointer
        if training.state and self.saved_modes and saver and saver.store.initial:
            saver.store.initial.restore_modes(self.context["model"], self.saved_modes.to_tree())

    def on_due(self, training: TrainPass) -> bool:
        """Show progress, save or end, whatever is due; whether training goes on."""
        batches, bar = training.in_round, self.bar
        if not bar.disable and batches % EVERY == 0:
            if self.agreement:
                self.trainable.gather()
            mean = self.trainable.numbers.loss.mean()
            bar.update(bar.task_ids[0], completed=batches, loss=f"loss {mean:.4f}")
        is_asked = bool(self.session and self.session.requests)
        over, saving = self._over(), self.schedule.saving.fires(self.counters) or is_asked
        if self.agreement:
            over, saving = self.agreement.look(self.counters["iteration"], over, saving)
        if over:
            self._stop_in(training)
        elif saving:
            self.trainable.check_divergence()
            self.save(training.entry_state())
        self.look_ahead()
        return not over

    def _stop_in(self, training: TrainPass) -> None:
        """A limit ends the training after a batch: unless it was the last of the epoch, save the place first."""
        if training.has_ended():
            return
        message = f"fit: stopped in epoch {training.number} after {training.describe_progress()}"
        # Before another batch is asked for, which may change what a checkpoint holds.
        self.trainable.check_divergence()
        self.save(training.entry_state())
        if training.has_ended() is None and not training.has_more():
            return
        logger.info(message)
        self.cut_short = True
        if self.session:
            # What is saved from here on is at once, and nothing from which a fit continues.
            self.session.end_fit()

    def _over(self) -> bool:
        """Whether ``optimizer_step_limit`` or ``debug_epochs`` is reached."""
        max_epochs = self.options.debug_epochs if self.options.debug else 0
        return self.schedule.over(self.counters) or 0 < max_epochs <= len(self.epochs)

    def next_check(self) -> int:
        """The next iteration after which something may be due, such as to show progress."""
        shown = self.work[0].in_round if self.work else 0
        until_shown = NEVER if self.bar.disable else EVERY - shown % EVERY
        return min(super().next_check(), self.counters["iteration"] + until_shown)

    def save(self, running: EntryState | None = None) -> None:
        """Save a checkpoint, if there is a checkpointer; ``running``: the pass of an epoch that is not over."""
        if self.checkpoints and self.session:
            own, metrics = states_of(self.generators()), {NAME: self.metrics}
            fit = FitState(epochs=self.epochs, metrics=self.metrics, generators=own, running=running)
            # The numbers are those of the last end of an epoch.
            measured = running.state.began if running and running.state else self.counters["iteration"]
            with self.session.saving(end_of_epoch=running is None):
                self.checkpoints.save(self.counters, metrics, reader.iterations_at(metrics, measured), fit=fit)
