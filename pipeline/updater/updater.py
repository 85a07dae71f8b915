"""How one batch trains the model, with counters. Names are PaddleSpeech's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property, partial, reduce
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data.dataloader import _BaseDataLoaderIter

from pipeline.checkpoint.load_errors import fitting
from pipeline.checkpoint.optimizer_state import warn_of_unsaved
from pipeline.checkpoint.pytree import load_state, save_state
from pipeline.checkpoint.random_state import random_state, restore_random_state
from pipeline.data.cursor import DataCursor
from pipeline.data.generators import own_generators
from pipeline.data.loader import length
from pipeline.engine.train_pass import PassCount
from pipeline.engine.trainable import Computation, trainable_of
from pipeline.engine.unregistered import require_registered
from pipeline.engine.weak_methods import own_method
from pipeline.errors import CheckpointError, DataError
from pipeline.metrics.meters import Meters
from pipeline.optim.losses import Losses, losses_by_name
from pipeline.optim.optim_scheduler import OptimScheduler, optimize


class UpdaterState:
    """How many iterations and epochs are done.

    In a run the pass over the data counts the iterations. What an updater assigns to ``iteration`` holds until its batch
    is done, so one that counts by itself is not counted twice.

    Args:
        iteration: the iterations that are done.
        epoch: the epochs that are done.
    """

    def __init__(self, iteration: int = 0, epoch: int = 0) -> None:
        self.epoch = epoch
        self._iteration = iteration
        self._count: PassCount | None = None
        # What the pass had counted when the iteration was assigned.
        self._counted = 0

    @property
    def iteration(self) -> int:
        """The iterations that are done."""
        if self._count is not None and self._count.iterations != self._counted:
            return self._count.iterations
        return self._iteration

    @iteration.setter
    def iteration(self, value: int) -> None:
        self._iteration = value
        if self._count is not None:
            self._counted = self._count.iterations

    def follow(self, count: PassCount) -> None:
        """Let a pass count the iterations."""
        self._count, self._counted, self._iteration = count, count.iterations, count.iterations

    def settle(self) -> None:
        """Keep the iterations that the pass has counted, which is over."""
        self._iteration, self._count = self.iteration, None

    def __eq__(self, other: object) -> bool:
        """Whether the counters of another are the same."""
        if not isinstance(other, UpdaterState):
            return NotImplemented
        return (self.iteration, self.epoch) == (other.iteration, other.epoch)

    __hash__ = None  # type: ignore[assignment] # as a dataclass that can change

    def __repr__(self) -> str:
        return f"UpdaterState(iteration={self.iteration}, epoch={self.epoch})"


class UpdaterBase:
    """Trains a model on one batch at a time; a subclass defines ``update``.

    In a run, the pass over the data counts in ``state``; an updater that counts by itself is not counted twice.

    Attributes:
        state: the counters.
        logged: what ``log`` gathered in this pass; in a run, together with what the Brain logs.
    """

    def __init__(self, init_state: UpdaterState | Mapping[str, int] | None = None) -> None:
        self.state = UpdaterState(**init_state) if isinstance(init_state, Mapping) else init_state or UpdaterState()

    @cached_property
    def logged(self) -> Meters:
        """What ``log`` gathers."""
        return Meters()

    def is_plain(self, brain: Computation) -> bool:
        """Return whether an update is what ``Trainable.fit_batch`` of a Brain does, and nothing else."""
        return False

    def begin_pass(self, epoch: int, count: PassCount, logged: Meters) -> None:
        """Let a pass of a run count the iterations, and report what is logged.

        Args:
            epoch: the epoch that is running, from 0.
            count: counts the iterations.
            logged: the numbers that the pass reports.
        """
        self.state.epoch = epoch
        self.state.follow(count)
        self.logged = logged

    def end_pass(self, epoch: int | None) -> None:
        """Keep what the pass has counted; ``epoch``: how many are done, or None if this one was cut short."""
        self.state.settle()
        if epoch is not None:
            self.state.epoch = epoch

    def log(self, name: str, value: Tensor | float, batch_size: int | None = None) -> None:
        """Report a number with those of the pass, as ``Brain.log`` does."""
        self.logged.log(name, value, batch_size)

    def update(self, batch: Any) -> Any:
        """Train on one batch.

        Returns:
            Its loss, a scalar; or several by name, or None.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define update(batch)")

    def state_dict(self) -> dict[str, Any]:
        """The counters; a subclass adds what else it needs, such as the states of models and optimizers."""
        return {"epoch": self.state.epoch, "iteration": self.state.iteration}

    def set_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the counters; a subclass restores what it has added.

        Raises:
            CheckpointError: a counter is missing, or no whole number.
        """
        kind = type(self).__name__
        for name in ("epoch", "iteration"):
            value = state_dict.get(name)
            if type(value) is not int or value < 0:
                what = f"'{name}' is {value!r}" if name in state_dict else f"there is no '{name}'"
                raise CheckpointError(f"{kind}.set_state_dict: {what}; give it what state_dict() of a {kind} returned")
        self.state.epoch, self.state.iteration = state_dict["epoch"], state_dict["iteration"]

    def save(self, path: str | Path) -> None:
        """Write ``state_dict()`` to a file, without pickle.

        Raises:
            CheckpointError: it holds something that such a file cannot.
            StorageError: the storage refuses.
        """
        save_state(path, self.state_dict())

    def load(self, path: str | Path) -> None:
        """Restore the state that ``save`` wrote.

        Raises:
            CheckpointError: there is no such file, it is cut short or something else, or it is no state of this updater.
        """
        state = load_state(path)
        if not isinstance(state, dict):
            raise CheckpointError(f"{path}: holds a {type(state).__name__}, not the state of an updater; use another")
        self.set_state_dict(state)


class Updater(UpdaterBase):
    """The default: what the Brain does with a batch."""

    def __init__(self, brain: Computation) -> None:
        super().__init__()
        self.brain = brain

    def is_plain(self, brain: Computation) -> bool:
        """Return whether an update is what ``Trainable.fit_batch`` of this Brain does, and nothing else."""
        own = trainable_of(brain).custom.trains or "fit_batch" in vars(brain)
        return type(self) is Updater and self.brain is brain and not own

    def update(self, batch: Any) -> Tensor:
        """Train on one batch, and return its loss, detached."""
        return self.brain.fit_batch(batch)


def own_losses(model: nn.Module, batch: Any) -> Losses:
    """What a model returns that computes its loss itself; the one to minimize is ``loss``: its ``main``, or else the sum."""
    items = batch if isinstance(batch, list | tuple | Mapping) else (batch,)
    returned = model(**items) if isinstance(items, Mapping) else model(*items)
    losses = losses_by_name(returned, f"{type(model).__name__}.forward")
    main = losses.pop("main") if "main" in losses else reduce(torch.add, losses.values())
    return {**losses, "loss": main}


class StandardUpdater(UpdaterBase):
    """Trains a model that computes its loss itself. By hand ``update()`` reads the batch, in a run it is given one.

    Args:
        model: is called with the items of a batch, by position or by name; returns its loss, or several by name, of which
            ``main`` is minimized, or else their sum.
        optimizer: of torch. A run gives that of the phase, and steps it as its OptimScheduler says.
        dataloader: gives the batches by hand.
        init_state: the counters with which it begins.

    Attributes:
        models, optimizers: name -> what ``state_dict`` keeps; ``main`` is what it was given.
        optim_schedulers: those of the run, none if this updater has its own optimizer; None by hand.
    """

    # Of the class, since PaddleSpeech's updaters of several models do not call this constructor.
    optim_schedulers: Mapping[str, OptimScheduler] | None = None
    _cursor: DataCursor | None = None
    # The epoch and the random generators before the user's ``new_epoch``; None if no epoch has started.
    _begun: Mapping[str, Any] | None = None
    # Whether the models were looked at, by hand.
    _checked = False

    def __init__(self, model: nn.Module, optimizer: Optimizer, dataloader: Any, init_state: Any = None) -> None:
        super().__init__(init_state)
        self.model, self.optimizer, self.dataloader = model, optimizer, dataloader
        self.models: dict[str, Any] = {"main": model}
        self.optimizers: dict[str, Any] = {"main": optimizer}
        self._watch_epochs()

    def step_by(self, optim_schedulers: Mapping[str, OptimScheduler]) -> None:
        """Step the optimizers as these OptimSchedulers of a run say; by none, if the updater has an optimizer of its own."""
        self.optim_schedulers = dict(optim_schedulers)

    @property
    def updates_per_epoch(self) -> int | None:
        """How many batches an epoch has; None where the dataloader does not say."""
        return length(self.dataloader)

    @property
    def train_iterator(self) -> Iterator[Any]:
        """The batches that are left of this epoch. Another iterator may be assigned, which begins an epoch."""
        if self._cursor is None:
            self.new_epoch()
        return self._cursor or iter(())

    @train_iterator.setter
    def train_iterator(self, batches: Iterable[Any]) -> None:
        self._watch_epochs()
        if batches is self.dataloader:
            self._cursor = self._new_cursor(batches)
        elif self._begun is not None or not isinstance(batches, _BaseDataLoaderIter):
            self._begun = self._begun or self._now()
            self._cursor = self._new_cursor(batches, self._begun)
        # Otherwise a constructor assigns it. The epoch starts with the first batch, so that it can be started again.

    def _new_cursor(self, batches: Any, begun: Mapping[str, Any] | None = None) -> DataCursor:
        generators = own_method(self, "_generators")
        return DataCursor(batches, self.state.epoch, generators, begun=begun, name="dataloader")

    def _watch_epochs(self) -> None:
        """Note how each epoch begins, also where the user's code calls ``new_epoch``."""
        if "new_epoch" not in vars(self):
            begin_epoch = own_method(self, "_begin_epoch")
            vars(self)["new_epoch"] = partial(begin_epoch, own_method(self, "new_epoch"))

    def new_epoch(self) -> None:
        """Begin an epoch of the dataloader, in its own order."""
        self.train_iterator = self.dataloader

    def read_batch(self) -> Any:
        """The next batch; after the last one, that of a new epoch.

        Raises:
            DataError: the dataloader has none.
        """
        for _ in range(2):
            for batch in islice(self.train_iterator, 1):
                return batch
            self.new_epoch()
        what = f"{type(self).__name__}.read_batch: the dataloader gave no batch in epoch {self.state.epoch}"
        raise DataError(f"{what}; check the dataset, or drop_last with few samples")

    def update(self, batch: Any = None) -> Any:
        """Train on one batch: in a run on the one that is given, by hand on the next, which is counted.

        Raises:
            ConfigError: a model keeps layers in a plain list.
        """
        if batch is not None:
            return self.update_core(batch)
        if not self._checked:
            self._checked = True
            require_registered(self.models.values())
        for model in self.models.values():
            model.train()
        losses = self.update_core(self.read_batch())
        self.state.iteration += 1
        if self.updates_per_epoch and self.state.iteration % self.updates_per_epoch == 0:
            self.state.epoch += 1
        return losses

    def update_core(self, batch: Any) -> Any:
        """Make a step on a batch; a subclass that does so may report numbers with ``log``, or return its losses.

        Raises:
            DataError: the model returns no loss.
        """
        losses = own_losses(self.model, batch)
        if not self.optim_schedulers:
            self.optimizer.zero_grad()
            torch.autograd.backward(losses["loss"])
            self.optimizer.step()
        else:
            optimize(losses, self.optim_schedulers)
        return {name: loss.detach() for name, loss in losses.items()}

    def state_dict(self) -> dict[str, Any]:
        """The counters, the models, the optimizers and the place in the data.

        A run keeps the rest itself. There it is the counters, and the optimizers if they are not the run's.
        """
        state = super().state_dict()
        if self.optim_schedulers is None:
            state |= {name: part.state_dict() for name, part in self._parts().items()}
            for name, optimizer in self.optimizers.items():
                warn_of_unsaved(optimizer, state[f"{name}_optimizer"])
            state["now"] = self._now()
            if self._cursor is not None:
                state["data"] = self._cursor.state_dict()
        elif not self.optim_schedulers:
            state |= {name: own.state_dict() for name, own in self._own_optimizers().items()}
        return state

    def set_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a state, bit for bit, also in the middle of an epoch; without a place in the data a new one begins.

        Raises:
            CheckpointError: it is the state of another.
        """
        super().set_state_dict(state_dict)
        if self.optim_schedulers:
            return
        remedy = f"give it what state_dict() of a {type(self).__name__} returned"
        parts = self._parts() if self.optim_schedulers is None else self._own_optimizers()
        for name, part in parts.items():
            with fitting(f"{type(self).__name__}.set_state_dict", name, remedy):
                part.load_state_dict(state_dict[name])
        if self.optim_schedulers is not None:
            return
        self._cursor = None
        if (data := state_dict.get("data")) and data["taken"] != self.updates_per_epoch:
            # The epoch starts again, and the batches that were taken are skipped.
            self.state.epoch = data["epoch"]
            if data["is_own"]:
                restore_random_state(data["begun"], self._generators())
            self.new_epoch()
            if self._cursor is not None:
                self._cursor.load_state_dict(data)
                self._cursor.reopen()
        if "now" in state_dict:
            self.state.epoch = state_dict["now"]["epoch"]
            restore_random_state(state_dict["now"], self._generators())

    def _parts(self) -> dict[str, Any]:
        parts = {f"{name}_params": model for name, model in self.models.items()}
        return parts | self._own_optimizers()

    def _own_optimizers(self) -> dict[str, Any]:
        optimizers: Mapping[str, Any] = getattr(self, "optimizers", {})
        return {f"{name}_optimizer": optimizer for name, optimizer in optimizers.items()}

    def _begin_epoch(self, new_epoch: Callable[[], None]) -> None:
        self._begun = self._now()
        new_epoch()

    def _now(self) -> dict[str, Any]:
        """The epoch, and the states of the random generators, those of its own too."""
        return {**random_state(self._generators()), "epoch": self.state.epoch}

    def _generators(self) -> dict[str, Any]:
        return own_generators({"": self}, {"dataloader": self.dataloader})
