"""Who draws the trials of a search, and says which are hopeless: Optuna."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.storages.journal import JournalFileBackend, JournalStorage
from optuna.trial import TrialState

from .folder import SweepFolder, Trial
from .metrics import read_values
from .values import Values

_STATES = {"done": TrialState.COMPLETE, "pruned": TrialState.PRUNED, "failed": TrialState.FAIL}


class Search:
    """A study of Optuna in the folder of a sweep, whose ``sweep.json`` is ahead of it.

    Args:
        folder: the folder, which is locked.
        values: what is drawn from.
        jobs: how many trials run at once.
    """

    def __init__(self, folder: SweepFolder, values: Sequence[Values], jobs: int) -> None:
        self.folder, self.state, self.values, self.jobs = folder, folder.state, values, jobs
        self.distributions = {own.address: _distribution(own) for own in values}
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        file = folder.path / "optuna.journal"
        _mend(file)
        self.storage = JournalStorage(JournalFileBackend(str(file)))
        self.study = optuna.create_study(
            storage=self.storage,
            study_name="sweep",
            direction="minimize" if self.state.mode == "min" else "maximize",
            sampler=RandomSampler(),
            pruner=optuna.pruners.MedianPruner(),
            load_if_exists=True,
        )
        # A process that was killed had come no further.
        for number, trial in enumerate(self.state.trials):
            if number >= len(self.study.trials):
                self.begin(trial.words)
            if trial.state != "waiting":
                self.end(number, trial)

    def draw(self, number: int) -> list[str]:
        """The words of the next trial; they depend on the seed, its number, and what the trials before it have come to."""
        # In memory: what is drawn is no trial before sweep.json has it.
        study = optuna.create_study(direction=self.study.direction, sampler=self._sampler(number))
        study.add_trials(self.study.get_trials(deepcopy=False))
        drawn = study.ask(self.distributions).params
        return [f"{own.address}={_text(own, drawn[own.address])}" for own in self.values]

    def _sampler(self, number: int) -> BaseSampler:
        # One for each trial, so that a search goes on after a kill as if there had been none.
        seed = random.Random(f"{self.state.seed} {number}").getrandbits(32)
        if self.state.search == "random":
            return RandomSampler(seed)
        return TPESampler(seed=seed, constant_liar=self.jobs > 1)

    def begin(self, words: Sequence[str]) -> None:
        """A trial with these words is about to run."""
        texts = dict(word.split("=", 1) for word in words)
        params = {own.address: _value(own, texts[own.address]) for own in self.values}
        trial = optuna.trial.create_trial(
            state=TrialState.RUNNING, params=params, distributions=self.distributions, value=None
        )
        self.study.add_trial(trial)

    def is_hopeless(self, number: int) -> bool:
        """Whether a trial is to be pruned, by its validations so far."""
        self._report(number)
        trial = self.study.trials[number]
        return bool(trial.intermediate_values) and self.study.pruner.prune(self.study, trial)

    def _report(self, number: int) -> None:
        trial = self.study.trials[number]
        for step, value in enumerate(read_values(self.folder.run_dir(number), self.state.metric).values()):
            # Counted in validations: another batch size makes other iterations.
            if step not in trial.intermediate_values:
                self.storage.set_trial_intermediate_value(trial._trial_id, step, value)

    def end(self, number: int, trial: Trial) -> None:
        """A trial has ended."""
        if self.study.trials[number].state == TrialState.RUNNING:
            self._report(number)
            self.study.tell(number, trial.value if trial.state == "done" else None, _STATES[trial.state])


def _distribution(values: Values) -> BaseDistribution:
    if (drawn := values.range) is None:
        return CategoricalDistribution(values.texts)
    if isinstance(drawn.low, int) and isinstance(drawn.high, int):
        return IntDistribution(drawn.low, drawn.high, log=drawn.log)
    return FloatDistribution(drawn.low, drawn.high, log=drawn.log)


def _text(values: Values, value: Any) -> str:
    return values.range.text(value) if values.range else str(value)


def _value(values: Values, text: str) -> Any:
    return text if values.range is None else type(values.range.low)(text)


def _mend(file: Path) -> None:
    """Take away what a process that was killed has left: its lock, of which ours is the better, and half of a line."""
    file.with_name(f"{file.name}.lock").unlink(missing_ok=True)
    if file.exists():
        content = file.read_bytes()
        with file.open("r+b") as lines:
            lines.truncate(content.rfind(b"\n") + 1)
