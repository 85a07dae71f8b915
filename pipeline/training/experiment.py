"""A training that is written by hand, with everything around it made; names and order are Parakeet's."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from pipeline.checkpoint import optimizer_state, weights
from pipeline.checkpoint.random_state import restore_random_state
from pipeline.checkpoint.saved import Saved
from pipeline.checkpoint.snapshot import snapshot
from pipeline.context import TRAIN_STATE, Context
from pipeline.data.batch import count_samples, to_device
from pipeline.errors import DataError, StageError
from pipeline.stopping import STOP
from pipeline.training import experiment_settings as settings
from pipeline.training.batches import Batches
from pipeline.training.evaluation import in_evaluation_mode
from pipeline.training.experiment_setup import ExperimentSetup
from pipeline.training.triggers import Triggers
from pipeline.training.visualizers import PHASE


class ExperimentBase(ExperimentSetup):
    """A training whose steps are the user's own: ``train_batch``, ``valid``, ``setup_model``, ``setup_dataloader``.

    By hand: ``experiment = Mine(config, args); experiment.setup(); experiment.run()``. As the runner stage of a config
    it is built and set up by the trainer, and adopts what that has made: device, run directory, log, checkpointer.

    Where the ancestor's behaviour was a fault, this differs: Ctrl-C ends in a KeyboardInterrupt and not in an exit
    without a word, the last weights are saved too, and epoch and position in the data are resumed.

    Args:
        config: an object with attributes or a mapping, read as ``config.training.max_iteration``. ``training`` has
            ``max_iteration``, and ``valid_interval`` and ``save_interval``: iterations, ``"2 epoch"``, a list of
            these, or None for never. As a stage it is the ``hyper_parameters`` with the runner's keys.
        args: likewise; ``device``, ``nprocs``, ``output`` (a folder), ``checkpoint_path`` (or None).

    Attributes:
        model: a module; ``setup_model`` sets it, and ``optimizer``.
        train_loader: batches; ``setup_dataloader`` sets it, and ``valid_loader``.
        iteration: how many batches were trained on, the present one included.
        epoch: the epoch of the present batch, from 1.
        context: the run's as a stage; by hand one of its own, with counters and without plugins.
        alone: whether it is used by hand.
    """

    def __init__(self, config: Any, args: Any) -> None:
        super().__init__(config, args)
        self._batches = Batches((), 0)
        self._in_epoch = False
        self._ended = 0

    @abstractmethod
    def train_batch(self) -> None:
        """Read a batch (``self.read_batch()``) and train on it."""

    @abstractmethod
    def valid(self) -> None:
        """Evaluate on ``self.valid_loader``; called without gradients and with the model in evaluation mode."""

    def run(self, context: Context | None = None) -> None:
        """The whole training, after ``setup()``; with the context of a run, as its stage."""
        try:
            if context is not None:
                self.setup()
                self.set_state_dict(self.train_state)
            elif "model" not in self.context:
                raise StageError(f"{type(self).__name__}.run: nothing is set up; call setup() first")
            if self.checkpointer.resumed is None:
                self.resume_or_load()
            else:
                self._go_on(self.checkpointer.resumed)
            with STOP.deferred(self._hurry):
                self.train()
                self._end_epoch()
                self.save()
                self._checkpoints.finish()
        finally:
            self.close()

    def train(self) -> None:
        """Train on batch after batch, up to ``max_iteration``."""
        limit = settings.max_iteration(self.config)
        self._begin(limit)
        while self.iteration < limit:
            self.iteration += 1
            self.train_batch()
            self._after_batch()

    def read_batch(self) -> Any:
        """The next batch of ``train_loader``, on the device; after the last one of an epoch, the next epoch's first.

        Raises:
            DataError: there is none.
        """
        if self._batches.over():
            if self._batches.taken or not self._in_epoch:
                self.new_epoch()
            if self._batches.over():
                nothing = f"train_loader: gave no batch in epoch {self.epoch}"
                raise DataError(f"{nothing}; check the dataset, or drop_last with few samples")
        batch = self._batches.take()
        self.train_state["samples"] += count_samples(batch)
        return batch if self.device.type == "cpu" else to_device(batch, self.device)

    def new_epoch(self) -> None:
        """Begin the next epoch: ``epoch`` counts it, and the loader's sampler is told."""
        if self._in_epoch:
            self._ended = self.epoch
            self._end_epoch()
        self.epoch += 1
        self._batches = Batches(self.train_loader, self.epoch)
        self._begin_epoch()

    def save(self) -> None:
        """Save a checkpoint of this moment: weights, counters, and the position in the data."""
        metrics = dict.get(self.context, "metrics") or {}
        counters = {**self.train_state, **self.state_dict()}
        self._checkpoints.settle()
        training = snapshot({}, data=self._batches.place(), **self.training_state())
        self._checkpoints.save(counters, metrics, training, {PHASE: self._numbers.iterations})

    def resume_or_load(self) -> None:
        """Go on from the checkpoint ``args.checkpoint_path``, if one is named.

        As a stage, and from a ``.safetensors`` file, it gives the first weights alone.
        """
        path = settings.setting(self.args, "args.checkpoint_path")
        if not path:
            return
        self.checkpointer.load_weights(path, self.context["model"])
        state = Path(path) / "state.json"
        if self.alone and state.is_file():
            self.set_state_dict(json.loads(state.read_bytes())["train_state"])

    def training_state(self) -> dict[str, Any]:
        """What checkpoints keep beside weights, counters and random generators; a subclass adds what it needs."""
        optimizer = getattr(self, "optimizer", None)
        if isinstance(optimizer, Optimizer):
            return {"optimizer": optimizer_state.state_of(optimizer, self._configured)}
        state_of = getattr(optimizer, "state_dict", None)
        return {"optimizer": state_of() if state_of else None}

    def load_training_state(self, state: Mapping[str, Any]) -> None:
        """Take what ``training_state`` gave; of options of the optimizer that the config now says otherwise, its own."""
        if isinstance(self.optimizer, Optimizer):
            optimizer_state.load(self.optimizer, state["optimizer"], self._configured)
        elif state["optimizer"] is not None:
            self.optimizer.load_state_dict(state["optimizer"])

    def _go_on(self, resumed: Saved) -> None:
        """As a stage, from the checkpoint of a run that was interrupted."""
        weights.load(resumed.weights, self.context["model"], str(resumed.path))
        if resumed.training is not None:
            self.load_training_state(resumed.training)
            # The generators last: beginning to read draws a number, as it did before.
            self._batches.open(resumed.training["data"])
            restore_random_state(resumed.training["random"])

    def state_dict(self) -> dict[str, int]:
        """Where the training is: ``iteration``, ``epoch`` (how many are over), ``batches`` (read of the one after)."""
        taken = self._batches.taken
        if taken and not self._batches.over():
            return {"iteration": self.iteration, "epoch": self.epoch - 1, "batches": taken}
        just_begun = self._in_epoch and not taken
        return {"iteration": self.iteration, "epoch": self.epoch - just_begun, "batches": 0}

    def set_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Go on where another was: ``read_batch`` gives the batch that would have come there."""
        self.train_state.update({name: state_dict[name] for name in TRAIN_STATE if name in state_dict})
        taken = state_dict.get("batches", 0)
        self.iteration, self.epoch = state_dict["iteration"], state_dict["epoch"] + bool(taken)
        self._batches = Batches(self.train_loader, self.epoch, taken) if taken else Batches((), self.epoch)
        self._in_epoch = False

    def _begin(self, limit: int) -> None:
        """Be ready for the first batch."""
        in_config = {name: settings.intervals(self.config, name) for name in ("valid_interval", "save_interval")}
        self._validating, self._saving = (Triggers(each, self.iteration) for each in in_config.values())
        self._printing = Triggers([] if self.alone else settings.print_intervals(self.context), self.iteration)
        self._in_epochs = [name for name, each in in_config.items() if any(one.unit == "epoch" for one in each)]
        self._due = self._ended = 0
        if self.iteration < limit and not self._in_epoch:
            if self._batches.over():
                self.new_epoch()
            else:
                self._begin_epoch()

    def _after_batch(self) -> None:
        """Count the batch, and do what is due."""
        self.train_state["iteration"] = self.iteration
        self.train_state["update"] += 1
        over = self._batches.taken and self._batches.over()
        if over:
            self._ended = self.epoch
        if not self._ended and self.iteration < self._due:
            return
        self._checkpoints.tell()
        self._refuse_epochs_without_end()
        ended, self._ended = self._ended, 0
        if self._printing.fires(self.iteration):
            self._numbers.print()
        if self._validating.fires(self.iteration) or (ended and self._validating.fires_after(ended)):
            with self._numbers.validating(), in_evaluation_mode(self.model):
                self.valid()
        if over:
            self._end_epoch()
        if self._saving.fires(self.iteration) or (ended and self._saving.fires_after(ended)):
            self.save()
        self._due = min(each.next_look() for each in (self._printing, self._validating, self._saving))
        self._heed()

    def _heed(self) -> None:
        """End here with everything saved, if a signal has asked for it."""
        if STOP.asked is not None:
            self.save()
            self._checkpoints.finish()
            STOP.end()

    def _hurry(self) -> None:
        """Look after this batch."""
        self._due = 0

    def _refuse_epochs_without_end(self) -> None:
        """An epoch ends with the batches that ``read_batch`` gives: without it, what counts epochs would never come."""
        if self._in_epochs and not self._batches.taken:
            unread = f"{type(self).__name__}.train_batch: did not call self.read_batch(), so no epoch ends"
            raise StageError(f"{unread}; call it, or give {' and '.join(self._in_epochs)} in iterations")

    def _begin_epoch(self) -> None:
        self._in_epoch = True
        self.context["current_epoch"] = self.epoch - 1
        self._numbers.begin_epoch()
        self.context["hooks"].before_epoch(context=self.context)

    def _end_epoch(self) -> None:
        """Tell the plugins that the epoch is over, or that nothing more comes of it."""
        if self._in_epoch:
            self._in_epoch = False
            self.train_state["epoch"] = self.epoch
            self._numbers.end_epoch()
            self.context["hooks"].after_epoch(context=self.context)
