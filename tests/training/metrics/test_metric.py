"""How the metrics of a phase are built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import ClassPathError
from pipeline.training.metrics import AUC
from pipeline.training.metrics.base import LogLoss, build_metrics


class Count:
    def __init__(self, start: int = 0) -> None:
        self.start = start


def test_metrics_are_built_by_bare_name_class_path_or_class_with_their_arguments() -> None:
    built: dict[str, Any] = build_metrics(
        {
            "auc": {"class": "AUC"},
            "logloss": {"class": "pipeline.training.metrics:LogLoss", "args": {"from_logits": True}},
            "count": {"class": Count, "args": {"start": 5}},
        },
        None,
    )
    assert isinstance(built["auc"], AUC)
    assert isinstance(built["logloss"], LogLoss)
    assert built["logloss"].from_logits
    assert built["count"].start == 5


def test_a_metric_of_the_workspace_may_import_from_the_folder_above_it(workspace: Any) -> None:
    counting = "from ..shared import START\nclass Metric:\n    start = START\n"
    folder: Path = workspace({"shared.py": "START = 7", "metrics/counting.py": counting})
    built: dict[str, Any] = build_metrics({"count": {"class": str(folder / "metrics/counting.py")}}, folder)
    assert built["count"].start == 7


def test_an_unknown_metric_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ClassPathError, match=r"'Acuracy'.*Accuracy"):
        build_metrics({"accuracy": {"class": "Acuracy"}}, None)
