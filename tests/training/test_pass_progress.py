"""The bar of a pass of a Brain that runs by itself."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from pipeline import Brain, Stage
from pipeline.training.fit import EVERY, pass_progress


class Line(Brain):
    """A linear model of one input, whose targets are its inputs."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__({"net": nn.Linear(1, 1)}, opt_class=lambda x: SGD(x, 0.1), **keywords)

    def compute_forward(self, batch: Any, stage: Stage) -> Any:
        return self.modules.net(batch)

    def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> Tensor:
        return nn.functional.mse_loss(predictions, batch)


DATA = [torch.ones(1)] * 3


def test_nothing_is_shown_where_stderr_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with pass_progress("epoch 1", 100, None) as progress:
        progress.show(50, 0.5)
        assert list(progress.over([1, 2])) == [1, 2]
    assert progress.every == 0
    assert capsys.readouterr().err == ""


def test_where_stderr_is_a_terminal_it_is_shown_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with pass_progress("epoch 1", 100, None) as shown, pass_progress("epoch 1", 100, False) as hidden:
        assert (shown.every, hidden.every) == (EVERY, 0)


def test_the_bar_has_the_batches_and_the_loss() -> None:
    with pass_progress("epoch 1", 100, True) as progress:
        progress.show(50, 0.25)
        assert progress.bar is not None
        (task,) = progress.bar.tasks
        assert (task.description, task.completed, task.total, task.fields["loss"]) == (
            "epoch 1", 50, 100, "loss 0.2500",
        )  # fmt: skip


def test_the_bar_moves_with_the_batches_of_an_evaluation() -> None:
    with pass_progress("test", 3, True) as progress:
        done = [progress.bar.tasks[0].completed for _ in progress.over("abc") if progress.bar]
        assert len(done) == 3
        assert progress.bar is not None
        assert progress.bar.tasks[0].completed == 3


@pytest.mark.parametrize(
    ("progressbar", "options", "shown"),
    [
        (True, {}, True),
        (False, {}, False),
        (None, {"noprogressbar": True}, False),
        (True, {"noprogressbar": True}, True),
    ],
)
def test_fit_and_evaluate_show_a_bar_where_they_are_asked_to(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    progressbar: bool | None,
    options: dict[str, Any],
    shown: bool,
) -> None:
    # rich draws nothing that moves into what is no terminal, but for this.
    monkeypatch.setenv("FORCE_COLOR", "1")
    brain = Line(run_opts=options)
    brain.fit([3], DATA, progressbar=progressbar)
    assert ("epoch 3" in capsys.readouterr().err) is shown
    brain.evaluate(DATA, progressbar=progressbar)
    assert ("test" in capsys.readouterr().err) is shown


def test_a_bar_does_not_change_what_is_trained() -> None:
    weights = []
    for shown in (True, False):
        torch.manual_seed(0)
        brain = Line()
        brain.fit(range(2), [torch.randn(1) for _ in range(2 * EVERY)], progressbar=shown)
        weights.append(brain.modules.net.weight)
    assert torch.equal(*weights)
