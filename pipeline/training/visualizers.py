"""Where the numbers of an experiment go: to a file of its own, or as a stage to the plugins."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TextIO

from loguru import logger
from torch import Tensor

from pipeline.context import Context
from pipeline.run_directory import finite
from pipeline.training.average import Averages

PHASE = "experiment"
"""The name under which an experiment's model and numbers stand where others have phases."""


class Visualizer(Protocol):
    """What an experiment calls; tensorboard's SummaryWriter fits as it is."""

    def add_scalar(self, name: str, value: Any, step: int, /) -> None:
        """Take a number, measured at an iteration."""


class JsonLines:
    """Writes each number as a line ``{"step": 3, "name": "loss", "value": 0.25}``; one that is not finite is null.

    Args:
        path: the file; what it has is kept. It is opened with the first number, also with the first after ``close()``.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: TextIO | None = None

    def add_scalar(self, name: str, value: Any, step: int) -> None:
        """Write a number; reading a tensor makes a GPU wait."""
        self.file = self.file or self.path.open("a", buffering=1, encoding="utf-8")
        number = value.item() if isinstance(value, Tensor) else float(value)
        self.file.write(json.dumps({"step": step, "name": name, "value": finite(number)}) + "\n")

    @property
    def size(self) -> int:
        """How many bytes were written."""
        return self.path.stat().st_size if self.path.exists() else 0

    def cut(self, size: int | None) -> None:
        """Take away what was written after the first so many bytes; None: keep it."""
        self.close()
        if size is not None and size < self.size:
            os.truncate(self.path, size)

    def close(self) -> None:
        """Close the file."""
        if self.file:
            self.file.close()
        self.file = None


class PluginNumbers:
    """Tells the plugins: the means of training numbers at each ``print_interval``, those of a validation after it.

    Numbers stay on their device until then.

    Args:
        context: the run's.

    Attributes:
        training: the training numbers of this epoch.
        validation: those of the validation that is running.
        judged: those of the validations of this epoch that are over.
        iterations: of each number in ``context["metrics"]`` the iteration that it is of.
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        self.train_state: dict[str, int] = context["train_state"]
        self.training = Averages()
        self.validation: Averages | None = None
        self.judged: dict[str, float] = {}
        self.iterations: dict[str, int] = {}
        self._strange: set[str] = set()

    def add_scalar(self, name: str, value: Any, step: int) -> None:
        """Take a number; several of a name are averaged, each counting alike."""
        iteration = self.train_state["iteration"]
        # A batch counts once it has been trained on.
        if step not in (iteration, iteration + 1) and name not in self._strange:
            self._strange.add(name)
            logger.warning(f"visualizer: '{name}' is given for step {step}; the plugins are told iteration {iteration}")
        numbers = self.training if self.validation is None else self.validation
        numbers.log(name, value, 1)

    def begin_epoch(self) -> None:
        """Forget the epoch before."""
        self.training, self.judged, self.iterations = Averages(), {}, {}
        self.context["metrics"] = {PHASE: {}}

    def print(self) -> None:
        """Tell the training numbers since the last time: on a GPU this waits for the work so far."""
        numbers = self.training.recent()
        self.context["hooks"].on_print_interval(context=self.context, phase=PHASE, metrics=numbers)

    @contextmanager
    def validating(self) -> Iterator[None]:
        """What comes within belongs to a validation, of which the plugins are told before and after."""
        hooks, self.validation = self.context["hooks"], Averages()
        hooks.before_validation(context=self.context, phase=PHASE)
        try:
            yield
            numbers = self.validation.means()
        finally:
            self.validation = None
        self.judged |= numbers
        self.context["metrics"][PHASE] |= numbers
        self.iterations |= dict.fromkeys(numbers, self.train_state["iteration"])
        hooks.after_validation(context=self.context, phase=PHASE, metrics=numbers)

    def end_epoch(self) -> None:
        """The training numbers of the whole epoch come before those of its validations."""
        numbers, iteration = self.training.means(), self.train_state["iteration"]
        self.context["metrics"][PHASE] = numbers | self.judged
        judged = {name: self.iterations[name] for name in self.judged}
        self.iterations = dict.fromkeys(numbers, iteration) | judged

    def state_dict(self) -> dict[str, Any]:
        """Everything, so that another goes on from it; on a GPU this waits for the work so far."""
        numbers = {"metrics": self.context["metrics"], "iterations": self.iterations}
        return {"training": self.training.state_dict(), "judged": self.judged, **numbers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from the state of another."""
        self.begin_epoch()
        self.training.load_state_dict(state["training"])
        self.judged, self.iterations = state["judged"], state["iterations"]
        self.context["metrics"] = state["metrics"]
