"""AnnouncedLengths: compares how many batches the loaders have announced with how many there were."""

from __future__ import annotations

from loguru import logger

from pipeline.config.schema import PhaseSchema, RunnerSchema
from pipeline.context import Context
from pipeline.engine.planning import PlannedLength, plan_schedules


class AnnouncedLengths:
    """What is known about the number of batches of each phase.

    Attributes:
        planned: the length of the training for which the learning rate schedules were planned.
        true_lengths: phase -> the batches of its last round, if the loader has announced another number.
    """

    def __init__(self) -> None:
        self.planned = PlannedLength({}, {})
        self.true_lengths: dict[str, int] = {}
        self._warned: set[str] = set()

    def plan(self, runner: RunnerSchema, phases: list[PhaseSchema], context: Context, user_code: str) -> None:
        """Plan the learning rate schedules that need it for the length that the training has.

        Args:
            runner: the settings of the runner.
            phases: the settings of its phases, in order.
            context: the context after the network and startup stages.
            user_code: the user's code that decides how long it is; ``""`` if the runner's keys and the data decide.

        Raises:
            ConfigError: the length is unknown, or a schedule contradicts it.
        """
        self.planned = plan_schedules(runner, phases, context, user_code)

    def report(self, phase: str, announced: int, found: int, address: str) -> None:
        """Warn, once for each phase, if a round had another number of batches than its loader has announced.

        Args:
            phase: the phase.
            announced: the number of batches that the loader announced when the round started; 0 if it has no length.
            found: the number of batches that there were.
            address: what the warning calls the phase.
        """
        if announced and found != announced:
            self.true_lengths[phase] = found
        steps = self.planned.steps.get(phase)
        expected = announced if steps is None else self.planned.batches[phase]
        if not expected or found == expected or phase in self._warned:
            return
        self._warned.add(phase)
        what = f"{address}: announced {expected:,} batches, got {found:,}"
        planned = f"; the learning rate schedule was planned for {steps:,} updates" if steps is not None else ""
        logger.warning(f"{what}{planned}")
