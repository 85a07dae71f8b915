"""What is saved while training goes on: told when it is there, tried again where the storage refuses, the best kept."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline import Context, GeneralTrainer, hookimpl
from pipeline.checkpoint import reader
from pipeline.errors import StorageError

Config = Callable[..., dict[str, Any]]


class Refusing:
    """A plugin that takes the storage away: from ``first`` to ``last`` the folder of checkpoints is a file."""

    first, last = 2, 4

    @hookimpl
    def before_batch(self, context: Context) -> None:
        iteration, folder = context["train_state"]["iteration"], context["checkpointer"].folder
        for each in threading.enumerate():
            if each.name == "checkpoint":
                each.join()
        if iteration == self.first:
            folder.rename(folder.with_name("away"))
            folder.write_text("")
        elif iteration == self.last:
            folder.unlink()
            folder.with_name("away").rename(folder)


@pytest.fixture
def refused(config: Config, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """A config of 6 iterations, saved after each, of which some find no storage."""

    def make(first: int, last: int, **runner: Any) -> dict[str, Any]:
        monkeypatch.setattr(Refusing, "first", first)
        monkeypatch.setattr(Refusing, "last", last)
        chosen = config(save_interval=1, **runner)
        chosen["plugins"].append(Refusing)
        return chosen

    return make


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))


def test_a_save_that_the_storage_refuses_ends_the_run_and_what_was_saved_is_there(
    refused: Callable[..., Any],
) -> None:
    with pytest.raises(StorageError, match=r"step-000000000003: cannot be saved: Not a directory; free or repair"):
        GeneralTrainer(refused(2, 99)).run()
    (run_dir,) = Path("runs").glob("*/2*")
    assert steps(run_dir / "train" / "away") == [1, 2]
    assert reader.problems_of(run_dir / "train" / "away" / "step-000000000002") == []


def test_with_warn_training_goes_on_and_the_next_save_is_tried(
    refused: Callable[..., Any], config: Config, log_lines: list[str]
) -> None:
    context = GeneralTrainer(refused(2, 4, on_save_error="warn")).run()
    assert steps(context["checkpointer"].folder) == [1, 2, 5, 6]
    unbroken = GeneralTrainer(config()).run()["model"]["line"]["model"].state_dict()
    assert all(
        (value == unbroken[name]).all() for name, value in context["model"]["line"]["model"].state_dict().items()
    )
    warned = [line for line in log_lines if "on_save_error is 'warn', so training goes on" in line]
    assert ["step-000000000003" in warned[0], "step-000000000004" in warned[-1]] == [True, True]


def test_with_warn_the_last_save_has_to_succeed_nevertheless(refused: Callable[..., Any]) -> None:
    with pytest.raises(StorageError, match="step-000000000006: cannot be saved: File exists; free or repair"):
        GeneralTrainer(refused(5, 99, on_save_error="warn")).run()


class FullArchive:
    """A plugin that copies each checkpoint elsewhere, where there is no room."""

    @hookimpl
    def after_checkpoint_saved(self, path: Path) -> None:
        raise StorageError(f"/archive/{path.name}: No space left on device; free some")


def test_with_warn_a_storage_error_of_a_plugin_still_ends_the_run(config: Config) -> None:
    chosen = config(save_interval=1, on_save_error="warn")
    chosen["plugins"].append(FullArchive)
    with pytest.raises(StorageError, match="/archive/step-000000000001: No space left on device"):
        GeneralTrainer(chosen).run()


class Scored:
    """A metric whose numbers are given beforehand."""

    values = (5.0, 4.0, 6.0, 3.0, 7.0, 1.0)

    def __init__(self) -> None:
        self.coming = iter(self.values)

    def update(self, predictions: Any, target: Any) -> None:
        pass

    def compute(self) -> float:
        return next(self.coming)

    def reset(self) -> None:
        pass


def judged(chosen: dict[str, Any]) -> dict[str, Any]:
    chosen["phase"][0] |= {"valid_dataset_name": "data", "metrics": {"score": {"class": Scored}}}
    return chosen


@pytest.mark.parametrize(("count", "best"), [(1, [18]), (2, [12, 18]), (3, [6, 12, 18]), (9, [3, 6, 9, 12, 15, 18])])
def test_so_many_of_the_best_are_kept_beside_the_newest(config: Config, count: int, best: list[int]) -> None:
    keep = {"metric": "valid_score", "mode": "min", "count": count}
    context = GeneralTrainer(judged(config(epochs=6, keep_last=2, keep_best=keep))).run()
    assert steps(context["checkpointer"].folder) == sorted({*best, 15, 18})


def test_the_best_goes_only_when_a_better_one_is_on_disk(refused: Callable[..., Any]) -> None:
    keep = {"metric": "valid_score", "mode": "min"}
    # The better ones, of the iterations 6 and 12, are refused; that of 9 is worse than the one of 3 that is there.
    runner = {"epochs": 5, "keep_last": 2, "keep_best": keep, "on_save_error": "warn"}
    chosen = judged(refused(4, 13, **runner))
    context = GeneralTrainer(chosen).run()
    assert steps(context["checkpointer"].folder) == [3, 14, 15]
    assert context["best"]["iteration"] == 12
