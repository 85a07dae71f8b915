"""How one batch trains the model, with counters. Names are PaddleSpeech's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from pipeline.checkpoint.pytree import load_state, save_state
from pipeline.errors import CheckpointError
from pipeline.training.brain import Brain
from pipeline.training.meters import Meters


def is_plain(brain: Brain, updater: UpdaterBase) -> bool:
    """Whether an update is what ``Brain.fit_batch`` does, and nothing else."""
    return type(updater) is Updater and updater.brain is brain and type(brain).fit_batch is Brain.fit_batch


@dataclass
class UpdaterState:
    """How many iterations and epochs are done."""

    iteration: int = 0
    epoch: int = 0


class UpdaterBase:
    """Trains a model on one batch at a time; a subclass defines ``update``.

    The loop assigns ``state`` after each update, so an updater that counts itself is not counted twice.

    Attributes:
        state: the counters.
        logged: what ``log`` gathered in this pass; in a run, together with what the Brain logs.
    """

    def __init__(self, init_state: UpdaterState | None = None) -> None:
        self.state = init_state or UpdaterState()
        self.logged = Meters()

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
            CheckpointError: there is no such file, it is damaged or something else, or it is no state of this updater.
        """
        state = load_state(path)
        if not isinstance(state, dict):
            raise CheckpointError(f"{path}: holds a {type(state).__name__}, not the state of an updater; use another")
        self.set_state_dict(state)


class Updater(UpdaterBase):
    """The default: what the Brain does with a batch."""

    def __init__(self, brain: Brain) -> None:
        super().__init__()
        self.brain = brain

    def update(self, batch: Any) -> Tensor:
        """Train on one batch, and return its loss, detached."""
        return self.brain.fit_batch(batch)
