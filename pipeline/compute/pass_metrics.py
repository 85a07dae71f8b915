"""PassMetrics: the metrics that judge the predictions of a training pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from pipeline.checkpoint.state import mapping_of
from pipeline.compute.evaluation import target_of
from pipeline.compute.trainable import Trainable
from pipeline.distributed.world import current_world
from pipeline.errors import DataError
from pipeline.metrics.base import judge, needs_target
from pipeline.metrics.ranks import computed


class PassMetrics:
    """The metrics of a training pass. They judge the predictions that the batches were trained with.

    Args:
        trainable: what is trained.
        metrics: name -> metric.
        phase: the name of the phase, for messages.
        after_batch: calls the plugins; None if no plugin listens.
    """

    def __init__(
        self,
        trainable: Trainable,
        metrics: Mapping[str, Any],
        phase: str,
        after_batch: Callable[..., Any] | None,
    ) -> None:
        self._trainable = trainable
        self._metrics = metrics
        self._phase = phase
        self._after_batch = after_batch

    def judge(self, *, batch: Any, predictions: Any, **values: Any) -> None:
        """Judge a batch, and call the plugins.

        Raises:
            DataError: the code that trains does not give the predictions.
        """
        # A batch without samples contributes to no metric.
        if self._trainable.record.samples != 0:
            self._judge(batch, predictions)
        if self._after_batch:
            self._after_batch(batch=batch, predictions=predictions, **values)

    def _judge(self, batch: Any, predictions: Any) -> None:
        if predictions is None:
            what = f"phase.{self._phase}.train_metrics: nothing gives the predictions on which this phase is trained"
            raise DataError(f"{what}; call Brain.fit_batch in the step, or remove them and use self.log")
        brain = self._trainable.brain
        with torch.no_grad():
            judged = predictions.detach() if isinstance(predictions, torch.Tensor) else predictions
            is_needed = any(map(needs_target, self._metrics.values()))
            judged = type(brain).readable(brain, judged, batch)
            target = target_of(brain, batch, needed=is_needed)
            for metric in self._metrics.values():
                judge(metric, judged, target, batch)

    def reset(self) -> None:
        """Forget the batches before."""
        for metric in self._metrics.values():
            metric.reset()

    def compute(self) -> dict[str, float]:
        """Return the numbers of all ranks by name."""
        return computed(self._metrics, current_world())

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each metric by name."""
        return {name: mapping_of(metric, metric.state_dict(), self._phase) for name, metric in self._metrics.items()}

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Restore the states of the metrics that a checkpoint has."""
        for name in self._metrics.keys() & states.keys():
            metric = self._metrics[name]
            state = states[name]
            # The state of multiple ranks is a list.
            if isinstance(state, list):
                metric.merge(state)
            else:
                metric.load_state_dict(state)
