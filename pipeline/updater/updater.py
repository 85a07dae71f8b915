"""Updaters: how one batch trains the model, with counters. The names are PaddleSpeech's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property, partial, reduce
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
from pipeline.compute.trainable import Computation, trainable_of
from pipeline.compute.unregistered import require_registered
from pipeline.compute.weak_methods import own_method
from pipeline.data.cursor import DataCursor
from pipeline.data.generators import own_generators
from pipeline.data.loader import length
from pipeline.engine.train_pass import PassCount
from pipeline.errors import CheckpointError, DataError
from pipeline.metrics.meters import Meters
from pipeline.optim.losses import Losses, losses_by_name
from pipeline.optim.optim_scheduler import OptimScheduler, optimize


class UpdaterBase:
    """Base class of updaters, which train a model on one batch at a time.

    A subclass defines ``update``. In a run, the pass over the data counts the iterations in
    ``state``. An updater that counts its iterations itself is not counted twice.

    Args:
        init_state: the counters to start with, as an ``UpdaterState`` or as a mapping of its
            arguments; None starts both at 0.

    Attributes:
        state: the counters.
        logged: what ``log`` has collected in this pass. In a run, it also contains what the Brain
            logs.

    Example:
        >>> import torch
        >>> from pipeline import UpdaterBase
        >>> class MeanTracker(UpdaterBase):
        ...     mean = torch.zeros(3)
        ...
        ...     def update(self, batch):
        ...         loss = ((batch - self.mean) ** 2).mean()
        ...         self.mean = self.mean + 0.5 * (batch.mean(0) - self.mean)
        ...         return loss
        >>> updater = MeanTracker({"iteration": 5})
        >>> updater.update(torch.ones(4, 3))
        tensor(1.)
        >>> updater.state_dict()
        {'epoch': 0, 'iteration': 5}
    """

    def __init__(self, init_state: UpdaterState | Mapping[str, int] | None = None) -> None:
        if init_state is None:
            init_state = UpdaterState()
        elif isinstance(init_state, Mapping):
            init_state = UpdaterState(**init_state)
        self.state = init_state

    @cached_property
    def logged(self) -> Meters:
        """The numbers that ``log`` collects."""
        return Meters()

    def is_plain(self, brain: Computation) -> bool:
        """Return whether ``update`` does what ``Trainable.fit_batch`` of a Brain does, and nothing else."""
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
        """Keep what the pass has counted.

        Args:
            epoch: how many epochs are done, or None if this pass was cut short.
        """
        self.state.stop_following()
        if epoch is not None:
            self.state.epoch = epoch

    def log(self, name: str, value: Tensor | float, batch_size: int | None = None) -> None:
        """Report a number together with the numbers of the pass, as ``Brain.log`` does.

        Args:
            name: the name under which the number is reported.
            value: a scalar that is a mean over samples.
            batch_size: how many samples the mean is over; None for the samples of the batch.

        Raises:
            DataError: ``value`` is not a scalar.
        """
        self.logged.log(name, value, batch_size)

    def update(self, batch: Any) -> Any:
        """Train on one batch.

        Args:
            batch: what the loader of the phase returns.

        Returns:
            The loss, a scalar tensor; or multiple losses by name; or None.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define update(batch)")

    def state_dict(self) -> dict[str, Any]:
        """Return the counters.

        A subclass adds what else it needs, such as the states of models and optimizers.
        """
        return {"epoch": self.state.epoch, "iteration": self.state.iteration}

    def set_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the counters. A subclass restores what it has added.

        Args:
            state_dict: what ``state_dict`` returned.

        Raises:
            CheckpointError: a counter is missing, negative, or not a whole number.
        """
        kind = type(self).__name__
        for name in ("epoch", "iteration"):
            value = state_dict.get(name)
            if type(value) is not int or value < 0:
                what = f"'{name}' is {value!r}" if name in state_dict else f"there is no '{name}'"
                raise CheckpointError(f"{kind}.set_state_dict: {what}; give it what state_dict() of a {kind} returned")
        self.state.epoch = state_dict["epoch"]
        self.state.iteration = state_dict["iteration"]

    def save(self, path: str | Path) -> None:
        """Write ``state_dict()`` to a file, without pickle.

        Args:
            path: the file. It is replaced if it exists, and missing folders above it are created.

        Raises:
            CheckpointError: the state contains an object that such a file cannot contain.
            StorageError: the file cannot be written.
        """
        save_state(path, self.state_dict())

    def load(self, path: str | Path) -> None:
        """Restore the state that ``save`` wrote.

        Args:
            path: the file.

        Raises:
            CheckpointError: the file does not exist, is truncated, was not written by ``save``, or
                contains a state that does not fit this updater.
        """
        state = load_state(path)
        if not isinstance(state, dict):
            raise CheckpointError(f"{path}: holds a {type(state).__name__}, not the state of an updater; use another")
        self.set_state_dict(state)


class Updater(UpdaterBase):
    """The default updater, which trains with ``fit_batch`` of the Brain.

    Args:
        brain: the Brain of the phase.

    Attributes:
        brain: the same.
    """

    def __init__(self, brain: Computation) -> None:
        super().__init__()
        self.brain = brain

    def is_plain(self, brain: Computation) -> bool:
        """Return whether ``update`` does what ``Trainable.fit_batch`` of this Brain does, and nothing else."""
        is_replaced = trainable_of(brain).custom.trains or "fit_batch" in vars(brain)
        return type(self) is Updater and self.brain is brain and not is_replaced

    def update(self, batch: Any) -> Tensor:
        """Train on one batch, and return its loss, detached."""
        return self.brain.fit_batch(batch)


class StandardUpdater(UpdaterBase):
    """An updater of a model that computes its loss itself.

    It works in two ways:

    - In a script, ``update()`` reads the next batch of the dataloader, trains on it and counts it.
    - In a run, it is the updater of a phase. ``update(batch)`` gets the batch from the run, which
      also counts, saves and validates.

    A subclass may override ``update_core``, ``read_batch`` and ``new_epoch``. Its constructor need
    not call this one. In a run, it may not override ``read_batch``.

    Args:
        model: called with the items of a batch, by position or by name. It returns its loss, a
            scalar tensor, or multiple losses by name. If one of them is ``main``, that loss is
            minimized; otherwise the sum of them is.
        optimizer: an optimizer of torch. In a run, it is the optimizer of the phase, which steps
            as its OptimScheduler says.
        dataloader: an iterable of batches, which a script trains on.
        init_state: the counters to start with, as in ``UpdaterBase``.

    Attributes:
        model, optimizer, dataloader: the same.
        models: name -> model that ``state_dict`` saves; at first ``main`` is ``model``.
        optimizers: name -> optimizer that ``state_dict`` saves; at first ``main`` is ``optimizer``.
        optim_schedulers: the OptimSchedulers of the run by name, empty if this updater has its own
            optimizer. In a script it is None.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from pipeline import StandardUpdater
        >>> class Line(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.linear = nn.Linear(1, 1)
        ...
        ...     def forward(self, x, y):
        ...         return nn.functional.mse_loss(self.linear(x), y)
        >>> x = torch.linspace(0, 1, 8).reshape(8, 1)
        >>> dataset = torch.utils.data.TensorDataset(x, 2 * x)
        >>> loader = torch.utils.data.DataLoader(dataset, batch_size=4)
        >>> model = Line()
        >>> updater = StandardUpdater(model, torch.optim.SGD(model.parameters(), 0.1), loader)
        >>> while updater.state.epoch < 3:
        ...     losses = updater.update()
        >>> updater.state
        UpdaterState(iteration=6, epoch=3)
        >>> list(losses)
        ['loss']
    """

    # These are class attributes, since PaddleSpeech's updaters of multiple models do not call this
    # constructor.
    optim_schedulers: Mapping[str, OptimScheduler] | None = None
    # The batches that are left of the epoch, in a script.
    _cursor: DataCursor | None = None
    # The epoch and the states of the random generators before `new_epoch` was called; None if no
    # epoch has started.
    _epoch_start: Mapping[str, Any] | None = None
    # Whether a script has searched the models for layers in plain lists.
    _has_checked_models = False

    def __init__(self, model: nn.Module, optimizer: Optimizer, dataloader: Any, init_state: Any = None) -> None:
        super().__init__(init_state)
        self.model = model
        self.optimizer = optimizer
        self.dataloader = dataloader
        self.models: dict[str, Any] = {"main": model}
        self.optimizers: dict[str, Any] = {"main": optimizer}
        self._wrap_new_epoch()

    def step_by(self, optim_schedulers: Mapping[str, OptimScheduler]) -> None:
        """Step the optimizers of a run as its OptimSchedulers say.

        Args:
            optim_schedulers: the OptimSchedulers of the phase by name; empty if this updater has
                its own optimizer.
        """
        self.optim_schedulers = dict(optim_schedulers)

    @property
    def updates_per_epoch(self) -> int | None:
        """The number of batches in an epoch; None if the dataloader has no length."""
        return length(self.dataloader)

    @property
    def train_iterator(self) -> Iterator[Any]:
        """The batches that are left of this epoch, in a script.

        Reading it starts the first epoch. Assigning another iterator starts an epoch, too.
        """
        if self._cursor is None:
            self.new_epoch()
        return self._cursor or iter(())

    @train_iterator.setter
    def train_iterator(self, batches: Iterable[Any]) -> None:
        self._wrap_new_epoch()
        if batches is self.dataloader:
            self._cursor = self._make_cursor(batches)
        elif self._epoch_start is not None or not isinstance(batches, _BaseDataLoaderIter):
            self._epoch_start = self._epoch_start or self._current_state()
            self._cursor = self._make_cursor(batches, self._epoch_start)
        # Otherwise a constructor assigns the iterator of a DataLoader. It is ignored: the epoch
        # starts with the first batch, so that a resume can start it again in the same order.

    def new_epoch(self) -> None:
        """Start an epoch of the dataloader, in the order of that epoch."""
        self.train_iterator = self.dataloader

    def read_batch(self) -> Any:
        """Return the next batch, which is the first batch of a new epoch after the last one.

        Raises:
            DataError: the dataloader has no batches.
        """
        for _ in range(2):
            batches = iter(self.train_iterator)
            try:
                return next(batches)
            except StopIteration:
                pass
            self.new_epoch()
        what = f"{type(self).__name__}.read_batch: the dataloader gave no batch in epoch {self.state.epoch}"
        raise DataError(f"{what}; check the dataset, or drop_last with few samples")

    def update(self, batch: Any = None) -> Any:
        """Train on one batch.

        Args:
            batch: the batch that a run gives. None, as in a script, reads the next batch of the
                dataloader and counts it.

        Returns:
            What ``update_core`` returns.

        Raises:
            ConfigError: a model keeps layers in a plain list.
            DataError: the dataloader has no batches, or the model returns no loss.
        """
        if batch is not None:
            return self.update_core(batch)
        if not self._has_checked_models:
            self._has_checked_models = True
            require_registered(self.models.values())
        for model in self.models.values():
            model.train()
        losses = self.update_core(self.read_batch())
        self.state.iteration += 1
        if self.updates_per_epoch and self.state.iteration % self.updates_per_epoch == 0:
            self.state.epoch += 1
        return losses

    def update_core(self, batch: Any) -> Any:
        """Make one step on a batch.

        A subclass that overrides this may report numbers with ``log``, or return its losses.

        Args:
            batch: the batch; a mapping is passed to the model by name.

        Returns:
            The losses by name, as detached scalars. ``loss`` is the one that is minimized.

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
        """Return what a training needs to continue.

        In a script, these are the counters, the models, the optimizers, the random generators and
        the position in the data. A run saves most of these itself. There it is only the counters,
        and the optimizers if they do not belong to the run.
        """
        state = super().state_dict()
        if self.optim_schedulers is None:
            state |= {name: part.state_dict() for name, part in self._parts().items()}
            for name, optimizer in self.optimizers.items():
                warn_of_unsaved(optimizer, state[f"{name}_optimizer"])
            state["now"] = self._current_state()
            if self._cursor is not None:
                state["data"] = self._cursor.state_dict()
        elif not self.optim_schedulers:
            state |= {name: optimizer.state_dict() for name, optimizer in self._optimizer_parts().items()}
        return state

    def set_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a state, so that training continues bit for bit, also in the middle of an epoch.

        If the state has no position in the data, the next batch starts a new epoch.

        Args:
            state_dict: what ``state_dict`` returned.

        Raises:
            CheckpointError: the state does not fit this updater.
        """
        super().set_state_dict(state_dict)
        if self.optim_schedulers:
            return
        is_in_script = self.optim_schedulers is None
        parts = self._parts() if is_in_script else self._optimizer_parts()
        remedy = f"give it what state_dict() of a {type(self).__name__} returned"
        for name, part in parts.items():
            with fitting(f"{type(self).__name__}.set_state_dict", name, remedy):
                part.load_state_dict(state_dict[name])
        if is_in_script:
            self._restore_position(state_dict)

    def _restore_position(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the position in the data, and then the random generators."""
        self._cursor = None
        data = state_dict.get("data")
        # After the last batch of an epoch, the next batch starts a new epoch anyway.
        if data and data["taken"] != self.updates_per_epoch:
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

    def _wrap_new_epoch(self) -> None:
        """Note the random state before each ``new_epoch``, also when the user's code calls it.

        An iterator that ``new_epoch`` of a subclass makes can only be restored from this state.
        """
        if "new_epoch" not in vars(self):
            start_epoch = own_method(self, "_start_epoch")
            vars(self)["new_epoch"] = partial(start_epoch, own_method(self, "new_epoch"))

    def _start_epoch(self, new_epoch: Callable[[], None]) -> None:
        self._epoch_start = self._current_state()
        new_epoch()

    def _make_cursor(self, batches: Any, begun: Mapping[str, Any] | None = None) -> DataCursor:
        generators = own_method(self, "_generators")
        return DataCursor(batches, self.state.epoch, generators, begun=begun, name="dataloader")

    def _parts(self) -> dict[str, Any]:
        """Return the models and the optimizers by their keys in ``state_dict``."""
        parts = {f"{name}_params": model for name, model in self.models.items()}
        return parts | self._optimizer_parts()

    def _optimizer_parts(self) -> dict[str, Any]:
        """Return the optimizers by their keys in ``state_dict``."""
        optimizers: Mapping[str, Any] = getattr(self, "optimizers", {})
        return {f"{name}_optimizer": optimizer for name, optimizer in optimizers.items()}

    def _current_state(self) -> dict[str, Any]:
        """Return the epoch and the states of the random generators."""
        return {**random_state(self._generators()), "epoch": self.state.epoch}

    def _generators(self) -> dict[str, Any]:
        """Return the random generators of this updater and of its data, by name."""
        return own_generators({"": self}, {"dataloader": self.dataloader})


class UpdaterState:
    """The number of iterations and epochs that are done.

    In a run, the pass over the data counts the iterations. If an updater assigns ``iteration``
    itself, that value holds until its batch is done. So an updater that counts its iterations is
    not counted twice.

    Args:
        iteration: the iterations that are done.
        epoch: the epochs that are done.

    Attributes:
        epoch: the epochs that are done.

    Example:
        >>> from pipeline import UpdaterState
        >>> state = UpdaterState(iteration=12, epoch=3)
        >>> state.iteration += 1
        >>> state
        UpdaterState(iteration=13, epoch=3)
        >>> state == UpdaterState(13, 3)
        True
    """

    def __init__(self, iteration: int = 0, epoch: int = 0) -> None:
        self.epoch = epoch
        self._iteration = iteration
        self._count: PassCount | None = None
        # What the pass had counted when `iteration` was assigned.
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
        """Take the iterations from the count of a pass."""
        self._count = count
        self._counted = count.iterations
        self._iteration = count.iterations

    def stop_following(self) -> None:
        """Keep the iterations that a pass has counted, now that the pass is over."""
        self._iteration = self.iteration
        self._count = None

    def __eq__(self, other: object) -> bool:
        """Return whether another state has the same counters."""
        if not isinstance(other, UpdaterState):
            return NotImplemented
        return (self.iteration, self.epoch) == (other.iteration, other.epoch)

    # A state can change, so it cannot be hashed.
    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"UpdaterState(iteration={self.iteration}, epoch={self.epoch})"


def own_losses(model: nn.Module, batch: Any) -> Losses:
    """Return the losses that a model computes itself, by name.

    Args:
        model: returns a scalar tensor, or multiple losses by name.
        batch: passed to the model by name if it is a mapping, by position if it is a list or
            tuple, and as the only argument otherwise.

    Returns:
        The losses. ``loss`` is the one to minimize: the ``main`` loss of the model, or else the sum
        of its losses.

    Raises:
        DataError: the model returns something else.
    """
    if isinstance(batch, Mapping):
        returned = model(**batch)
    elif isinstance(batch, list | tuple):
        returned = model(*batch)
    else:
        returned = model(batch)
    losses = losses_by_name(returned, f"{type(model).__name__}.forward")
    main = losses.pop("main") if "main" in losses else reduce(torch.add, losses.values())
    return {**losses, "loss": main}
