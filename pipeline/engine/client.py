"""Client: what an Engine trains, and how.

``Client`` trains the phases of a runner stage. The clients of other trainings derive from it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

from pipeline.checkpoint.random_state import generators_in
from pipeline.compute.validation import Verb
from pipeline.config.schema import PhaseSchema, RunnerSchema
from pipeline.context import Context, Phase
from pipeline.data.generators import generators_of_phases
from pipeline.engine.checkpoints import SaveSession
from pipeline.engine.phase import loader_of, phase_errors
from pipeline.engine.train_pass import TrainPass
from pipeline.engine.triggers import Schedule
from pipeline.errors import StageError
from pipeline.optim.stepping import attach_optimizer_hooks


@runtime_checkable
class BatchReader(Protocol):
    """Something with a ``train_batch`` that reads batches itself."""

    def active_batch(self) -> tuple[Any, int] | None:
        """Return the batch that was read last, and its number in the epoch, from 1.

        Before the first batch it is None.
        """


class Exporter(Protocol):
    """Saves the models for other programs while they are trained."""

    def begin(self) -> None:
        """Check before the training whether the models can be saved."""

    def save(self) -> None:
        """Save the models as they are now."""

    def finish(self) -> None:
        """Save the models at the end of the training."""


class Client:
    """What an engine trains, and how: the phases of a runner stage, as the keys of its runner say.

    If the stage derives from the default Runner, its ``validate`` and ``is_over`` are called.

    Args:
        context: the context after the network and startup stages.
        stage: the runner stage.

    Attributes:
        restores_generators: whether a validation leaves the random generators as they were before.
        validates_in_order: whether validation data come in the order of the dataset, whatever their
            loader does.
        ends_saved: whether each end of an epoch is validated and saved, so that nothing is left to
            do after the last one.
        saves: whether checkpoints are saved.
        session: answers the requests for checkpoints of a Brain that trains without a config; None
            in a run.
    """

    restores_generators = True
    validates_in_order = True
    ends_saved = False
    saves = True
    session: SaveSession | None = None

    def __init__(self, context: Context, stage: Any = None) -> None:
        self.context = context
        self._stage = stage
        self._has_verbs = stage is not None and stage.has_loop_methods

    @property
    def runner(self) -> RunnerSchema:
        """The settings of the runner."""
        return self.context["runner"]

    def phases(self) -> list[PhaseSchema]:
        """Return the settings of the phases.

        Their loaders are checked here, so that a missing one is an error before the first hook.
        """
        phases: list[PhaseSchema] = self.context["config"].phases(self.runner)
        for phase in phases:
            loader_of(phase.dataset_name or "", self.context)
        return phases

    def schedule(self, counters: Mapping[str, int]) -> Schedule:
        """Return the intervals and limits, counted from these counters."""
        return Schedule.of_runner(self.runner, counters)

    def generators(self) -> dict[str, Any]:
        """Return the random generators of the Brains, the updaters and the data, by name."""
        return generators_of_phases(self.context.peek("model"), self.context.peek("dataset"))

    def generators_in_validation(self) -> dict[str, Any]:
        """Return the random generators that a validation restores in addition to the global ones.

        The generators of the stage are among them.
        """
        of_stage = {f"runner.{name}": generator for name, generator in generators_in(self._stage).items()}
        return {**of_stage, **self.generators()}

    def validator(self, evaluate: Verb) -> Verb:
        """Return the function that validates a phase.

        Args:
            evaluate: validates it as the default Runner does.
        """
        verb: Verb = self._stage.validate if self._has_verbs else evaluate
        return verb

    def is_over(self, *, limit: bool) -> bool:
        """Return whether training is over.

        Args:
            limit: whether training has reached one of its limits.

        Raises:
            StageError: the ``is_over`` of the stage returned None.
        """
        # A debug run ends at its limits, whatever the stage says.
        if not self._has_verbs or (limit and self.runner.debug):
            return limit
        over: Any = self._stage.is_over(self.context)
        if over is None:
            raise StageError(f"{getattr(self._stage.is_over, '__qualname__', '')} returned None; return True or False")
        return bool(over)

    def address(self, phase: str) -> str:
        """Return the name of a phase in messages."""
        return f"phase.{phase}"

    def errors(self, phase: str) -> AbstractContextManager[None]:
        """Return a context manager in which errors get the name of a phase."""
        return phase_errors(phase)

    def bind(self, training: TrainPass, phase: Phase) -> None:
        """Prepare the Brain of a phase for a pass.

        Another phase may share the Brain and its optimizers, so this is done before each pass.
        """
        brain = training.brain
        type(brain).bind(brain, training.phase, phase.optim_schedulers, self.context, self.runner.nonfinite_patience)
        attach_optimizer_hooks(phase.optim_schedulers, self.context, training.phase)

    def order_of_pass(self, rounds: int, epoch: int) -> int:
        """Return the number that decides, together with the seed, the order of a pass.

        Args:
            rounds: how many rounds over the data of the phase were started before.
            epoch: the number of the running epoch.
        """
        return rounds

    def save(self, save_checkpoint: Callable[[], None]) -> None:
        """Save a checkpoint of this moment.

        Args:
            save_checkpoint: saves it.
        """
        save_checkpoint()

    def saved_counters(self) -> dict[str, int]:
        """Return the counters that a checkpoint keeps."""
        counters: dict[str, int] = self.context["train_state"]
        return counters

    def state(self) -> dict[str, Any]:
        """Return what else a checkpoint keeps.

        It is passed as ``more`` to ``TrainingState.capture``.
        """
        return {}

    def no_numbers(self) -> dict[str, dict[str, Any]]:
        """Return the numbers of an epoch that starts."""
        return {}


class IterationClient(Client):
    """A client that trains without passes.

    Its code loops over ``IterationEngine.iterations``, and reads any number of batches in each iteration. It
    also decides when an epoch starts and ends.
    """

    @abstractmethod
    def current_epoch(self) -> int:
        """Return the number of the epoch that is running or continues after a resume.

        Between two epochs it is the number of the last one.
        """

    @abstractmethod
    def start_iterations(self) -> None:
        """Set the schedule of the engine, and start an epoch or continue one."""

    @abstractmethod
    def after_iteration(self) -> int | None:
        """Count what an iteration has done.

        Returns:
            How many epochs are over, if the iteration has read the last batch of one; None
            otherwise. The code may have started the next epoch already.
        """

    @abstractmethod
    def has_read_epoch(self) -> bool:
        """Return whether all batches of the running epoch have been read."""

    @abstractmethod
    def print_numbers(self) -> None:
        """Give the plugins the numbers since the last call."""

    @abstractmethod
    def place_in_epoch(self) -> str | None:
        """Return where in an epoch the training is, such as ``3 of 7 batches``.

        If no epoch is running, it is None.
        """

    @abstractmethod
    def end_epoch(self, *, cut_short: bool) -> None:
        """End the epoch that is running, if one is.

        Args:
            cut_short: whether training has ended before the end of the epoch.
        """
