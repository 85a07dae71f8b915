"""PhaseValidator: validates a phase in the middle of a training, and leaves the training as it was."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext

from pipeline.checkpoint.random_state import random_state, restore_random_state
from pipeline.compute.evaluation import batches_of, evaluate
from pipeline.compute.stage import Stage
from pipeline.compute.validation import Validation, evaluate_each
from pipeline.config.schema import PhaseSchema, RunnerSchema
from pipeline.context import Context, Phase
from pipeline.distributed.agreement import Agreement
from pipeline.engine.client import Client
from pipeline.engine.phase import pass_loader
from pipeline.metrics.ranks import in_step
from pipeline.signals import SHUTDOWN, StoppedError


class PhaseValidator:
    """Validates one phase in the middle of a training, and leaves the training as it was.

    Args:
        context: the context of the training.
        client: says how phases are validated.
        runner: the settings of the runner.
        validation: has the metrics, and remembers when each phase was validated.
        schemas: phase -> its settings.
        agreement: makes multiple processes do the same; None for a single process.
        save_interrupted: is called if a signal interrupts a validation. It saves a checkpoint.
    """

    def __init__(
        self,
        context: Context,
        client: Client,
        runner: RunnerSchema,
        validation: Validation,
        schemas: Mapping[str, PhaseSchema],
        agreement: Agreement | None,
        save_interrupted: Callable[[], None],
    ) -> None:
        self._context = context
        self._client = client
        self._runner = runner
        self._validation = validation
        self._schemas = schemas
        self._agreement = agreement
        self._save_interrupted = save_interrupted

    def run(self, phase: Phase, *, last: bool, keeps_best: bool, waits_with_signals: bool) -> dict[str, float]:
        """Validate a phase, and restore the random generators afterwards.

        Args:
            phase: the phase.
            last: whether this is the validation at the end of the training.
            keeps_best: whether the result may be the best one.
            waits_with_signals: whether a signal takes effect only after the validation. This is for
                places where a resumed run could not continue.

        Returns:
            The numbers of the validation, by the names under which they are reported.

        Raises:
            StoppedError, KeyboardInterrupt: a signal has interrupted the validation. A checkpoint is saved, and a resumed
                training repeats the validation.
        """
        generators = self._client.generators_in_validation()
        before = random_state(generators)
        validate = self._client.validator(self.evaluate)
        signals = SHUTDOWN.postponed() if waits_with_signals else nullcontext()
        try:
            with self._client.errors(phase.name), signals:
                return self._validation.run(phase, validate, last=last, keeps_best=keeps_best)
        except (StoppedError, KeyboardInterrupt):
            restore_random_state(before, generators)
            self._save_interrupted()
            raise
        finally:
            # Also after an error, which the code of a stage may catch to continue the training.
            if self._client.restores_generators:
                restore_random_state(before, generators)

    def evaluate(self, context: Context, phase: Phase) -> dict[str, float]:
        """Return the loss and the metrics of a phase's validation data, computed with the current weights."""
        schema = self._schemas[phase.name]
        metrics = self._validation.metrics[phase.name]
        epoch: int = context["current_epoch"]

        def evaluate_one(dataset: str) -> dict[str, float]:
            name = schema.dataset_name or "" if self._runner.overfit_batches else dataset
            loader = pass_loader(name, self._runner, context)
            with batches_of(loader, context["device"], in_order=self._client.validates_in_order) as on_device:
                batches = on_device
                if self._agreement is not None:
                    # The ranks may have different numbers of batches of a stream.
                    if getattr(loader, "streams", True):
                        batches = in_step(batches, self._agreement.world)
                    batches = self._agreement.watched(batches)
                return evaluate(phase["brain"], batches, Stage.VALID, metrics, epoch=epoch, data=f"'{name}'")

        return evaluate_each(schema.valid_datasets, evaluate_one)
