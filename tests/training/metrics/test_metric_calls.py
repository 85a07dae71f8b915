"""A metric whose methods take other arguments than they are called with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline import GeneralTrainer
from pipeline.errors import ConfigError
from tests.training.conftest import linear_config


class Count:
    """Counts the batches."""

    batches = 0

    def update(self, predictions: Any, target: Any) -> None:
        self.batches += 1

    def compute(self) -> float:
        return self.batches

    def reset(self) -> None:
        self.batches = 0

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def count_with(**methods: Any) -> type:
    return type("Own", (Count,), methods)


def takes_nothing(self: Any) -> None: ...


def takes_one(self: Any, first: Any) -> None: ...


def takes_three(self: Any, predictions: Any, target: Any, rows: Any) -> None: ...


@pytest.mark.parametrize(
    ("key", "metric", "message"),
    [
        (
            "metrics",
            {"class": count_with(update=takes_one)},
            r"phase\.line\.metrics\.own: Own\.update.* is called as update\(predictions, target\)",
        ),
        (
            "train_metrics",
            {"class": count_with(update=takes_three)},
            r"phase\.line\.train_metrics\.own: Own\.update.*'rows'",
        ),
        (
            "metrics",
            {"class": Count, "batch": {"weights": "w"}},
            r"phase\.line\.metrics\.own: Count\.update.*'weights'",
        ),
        (
            "metrics",
            {"class": count_with(reset=takes_one)},
            r"phase\.line\.metrics\.own: Own\.reset.* is called as reset\(\)",
        ),
        (
            "train_metrics",
            {"class": count_with(load_state_dict=takes_nothing)},
            r"phase\.line\.train_metrics\.own: Own\.load_state_dict.*load_state_dict\(state\)",
        ),
    ],
)
def test_metric_with_wrong_arguments_is_named_before_a_step(
    key: str,
    metric: dict[str, Any],
    message: str,
) -> None:
    chosen = linear_config()
    chosen["phase"][0] |= {key: {"own": metric}, "valid_dataset_name": "data"}
    trainer = GeneralTrainer(chosen)
    with pytest.raises(ConfigError, match=message):
        trainer.run()
    steps = [context["train_state"]["iteration"] for context in trainer.contexts.values()]
    assert steps in ([], [0])


HIDDEN = """
import functools

def logged(method):
    @functools.wraps(method)
    def call(*args):
        return method(*args)
    return call

class Metric:
    @logged
    def update(self, predictions): ...
    def compute(self): return 0.0
    def reset(self): ...
"""


def test_metric_with_a_decorated_update_is_found_by_build(pipeline: Any, linear: Path) -> None:
    """The source of a decorated method does not tell what it takes."""
    (linear.parent / "own.py").write_text(HIDDEN, encoding="utf-8")
    own = "phase.line.metrics={own: {class: '{workspace}/own.py'}}"
    done = pipeline("check", "--build", linear, own)
    assert done.exit_code == 2
    assert "phase.line.metrics.own: Metric.update(predictions) is called as" in done.stderr
