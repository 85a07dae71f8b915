"""How one batch trains the model, and how many have. Names are PaddleSpeech's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pipeline.training.brain import Brain


@dataclass
class UpdaterState:
    """How many iterations and epochs are done."""

    iteration: int = 0
    epoch: int = 0


class UpdaterBase:
    """Trains a model on one batch at a time; a subclass defines ``update``.

    The loop assigns ``state`` after each update, so an updater that counts itself is not counted twice.
    """

    def __init__(self, init_state: UpdaterState | None = None) -> None:
        self.state = init_state or UpdaterState()

    def update(self, batch: Any) -> Tensor:
        """Train on one batch, and return its loss, detached."""
        raise NotImplementedError(f"{type(self).__name__} does not define update(batch)")

    def state_dict(self) -> dict[str, int]:
        """The counters."""
        return {"epoch": self.state.epoch, "iteration": self.state.iteration}

    def set_state_dict(self, state_dict: dict[str, int]) -> None:
        """Take the counters of another."""
        self.state.epoch = state_dict["epoch"]
        self.state.iteration = state_dict["iteration"]


class Updater(UpdaterBase):
    """The default: what the Brain does with a batch."""

    def __init__(self, brain: Brain) -> None:
        super().__init__()
        self.brain = brain

    def update(self, batch: Any) -> Tensor:
        """Train on one batch, and return its loss, detached."""
        return self.brain.fit_batch(batch)
