"""What a metric is, and how a phase's are built."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from pipeline import class_path
from pipeline.checks.phase_check import METRICS


class Metric(Protocol):
    """What the runner asks of a metric."""

    def update(self, predictions: Any, target: Any) -> None:
        """Take in one batch."""

    def compute(self) -> Any:
        """The number over all batches since the last reset: a float or a tensor with one element."""

    def reset(self) -> None:
        """Start again."""


def build_metrics(settings: Mapping[str, Mapping[str, Any]], workspace: Path | None) -> dict[str, Metric]:
    """The metrics of a phase: name -> ``{class, args}`` to name -> metric. A bare class name is one of ours."""
    metrics = {}
    for name, each in settings.items():
        chosen = each["class"]
        path = (
            chosen
            if isinstance(chosen, type)
            else class_path.parse(chosen, name="Metric", workspace=workspace, module=METRICS)
        )
        metrics[name] = class_path.load_class(path, object)(**each.get("args", {}))
    return metrics
