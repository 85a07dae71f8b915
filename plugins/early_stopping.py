"""Ends the training of a runner once a number of its validation has stopped improving."""

from __future__ import annotations

import math
from typing import Any

from pipeline import hookimpl
from pipeline.checkpoint.state import StateModel
from pipeline.context import Context
from pipeline.errors import ConfigError, DataError, no_loss, one_of

from .shared.tracking import numbers_of_validation


class StoppingState(StateModel):
    """The best number so far, the iteration that it is of, and how many validations came since without a better one."""

    best: float | None
    iteration: int
    waited: int


class EarlyStopping:
    """Calls ``context.stop`` after ``patience`` validations without an improvement; nan is none.

    The last validation of a training does not count, unless an interval asks for it: it must not end a resumed run.

    Args:
        metric: what to watch, as ``keep_best`` names it: ``valid_loss``; where several phases report it,
            ``phase.valid_loss``.
        mode: ``min`` or ``max``: which is better.
        patience: after how many validations in a row without an improvement the training ends.
        min_delta: by how much a number has to be better than the best before, to count as an improvement.
        start_epoch: the first epoch whose validations count, from 0.

    Raises:
        ConfigError: an argument is out of range.
    """

    # Each process decides by itself, from the same numbers.
    every_rank = True
    # `check` finds a number that no validation reports.
    watches = ("metric",)

    def __init__(
        self,
        metric: str = "valid_loss",
        mode: str = "min",
        patience: int = 3,
        min_delta: float = 0.0,
        start_epoch: int = 0,
    ) -> None:
        if mode not in {"min", "max"}:
            raise ConfigError(f"early_stopping: mode is {mode!r}; write min or max")
        for name, value, least in (
            ("patience", patience, 1),
            ("min_delta", min_delta, 0),
            ("start_epoch", start_epoch, 0),
        ):
            if not value >= least:
                raise ConfigError(f"early_stopping: {name} is {value}; write {least} or more")
        self.metric, self.mode, self.patience = metric, mode, patience
        self.min_delta, self.start_epoch = min_delta, start_epoch
        self.best: float | None = None
        self.iteration = self.waited = 0
        # Name of a number -> the phase that has reported it.
        self.reported: dict[str, str] = {}

    @hookimpl
    def before_stage(self, name: str, context: Context) -> None:
        """Refuse a training whose validations do not report the number.

        Raises:
            ConfigError: no phase has validation data, or each has several datasets, whose names the numbers bear.
        """
        if name != "runner" or context["is_infer"] or not context["phases"]:
            return
        datasets = [phase["valid_dataset_name"] for phase in filter(_has_validation, context["phases"])]
        if not datasets:
            what = f"early_stopping watches '{self.metric}'"
            if not context["runner_name"]:
                raise ConfigError(f"{what}, and fit has no valid_set; give it one")
            raise ConfigError(
                f"{what}, and no phase of {context['runner_name']} is validated; add valid_dataset_name to one"
            )
        number = self.metric.rpartition(".")[2]
        # A dataset may be named valid_data.
        several = "/" not in number and all(isinstance(names, list) and len(names) > 1 for names in datasets)
        if several and number.startswith("valid_"):
            instead = f"{datasets[0][0]}/{number.removeprefix('valid_')}"
            what = f"early_stopping watches '{self.metric}', and validations of several datasets have their names"
            raise ConfigError(f"{what}; write metric: {instead}, for example")

    @hookimpl
    def after_validation(self, context: Context, phase: str, metrics: dict[str, float]) -> None:
        """Compare with the best so far.

        Raises:
            DataError: the number is reported by no phase, or by several.
        """
        if context["is_infer"]:
            return
        numbers = self._named(context, phase, metrics)
        if context.is_last_validation:
            # A run that has a higher limit from the beginning does not make it.
            return
        if self.metric in numbers and context["current_epoch"] >= self.start_epoch:
            self._take(numbers[self.metric], context)

    def _take(self, value: float, context: Context) -> None:
        iteration = context["train_state"]["iteration"]
        if self._improves(value):
            self.best, self.iteration, self.waited = value, iteration, 0
            return
        self.waited += 1
        if self.waited >= self.patience:
            best = (
                "none was a number"
                if self.best is None
                else f"the best was {self.best:g}, of iteration {self.iteration}"
            )
            context.stop(f"{self.metric} has not improved in {self.waited} validations; {best}")

    def _improves(self, value: float) -> bool:
        if self.best is None:
            return not math.isnan(value)
        return (self.best - value if self.mode == "min" else value - self.best) > self.min_delta

    def _named(self, context: Context, phase: str, metrics: dict[str, float]) -> dict[str, float]:
        """The numbers of a validation as ``metrics.jsonl`` names them at the end of an epoch, with and without the phase."""
        validated = [entry["name"] for entry in context["phases"] if _has_validation(entry)]
        plain = numbers_of_validation(context, phase, metrics)
        other = self.reported.get(self.metric, phase) if self.metric in plain else phase
        if other != phase:
            both = f"which phases '{other}' and '{phase}' both report"
            raise DataError(f"early_stopping watches '{self.metric}', {both}; write {other}.{self.metric}, for example")
        numbers = {**plain, **{f"{phase}.{name}": value for name, value in plain.items()}}
        self.reported |= dict.fromkeys(numbers, phase)
        if self.metric not in self.reported and {*validated} <= {*self.reported.values()}:
            known = [name for name in self.reported if len(validated) > 1 or "." not in name]
            why = no_loss(self.metric, known) or one_of(self.metric, known)
            raise DataError(f"early_stopping watches '{self.metric}', which no validation reports{why}")
        return numbers

    def state_dict(self) -> dict[str, Any]:
        """The best so far, and how long ago it was."""
        return {"best": self.best, "iteration": self.iteration, "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a ``state_dict``."""
        own = StoppingState.from_tree(state, "early_stopping")
        self.best, self.iteration, self.waited = own.best, own.iteration, own.waited


def _has_validation(phase: dict[str, Any]) -> bool:
    return phase.get("valid_dataset_name") is not None
