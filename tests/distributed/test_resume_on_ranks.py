"""Runs on several processes that are stopped anywhere, and go on with as many processes, or with others."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import whole_runs

from pipeline import GeneralTrainer
from pipeline.checkpoint import layout, reader
from pipeline.signals import StoppedError
from tests.conftest import Workspace
from tests.distributed.ranks import Ranks
from tests.distributed.test_equality import FILES, NOAM, assert_same_training

pytestmark = pytest.mark.slow

STOPS = """
    import os, signal
    from pipeline import hookimpl

    class Plugin:
        every_rank = True

        @hookimpl
        def after_batch(self, context):
            if str(context["train_state"]["iteration"]) == os.environ.get("STOP_AT") and context["rank"] == 0:
                signal.raise_signal(signal.SIGTERM)

        @hookimpl
        def before_validation(self, context):
            if os.environ.get("STOP_AT") == "validation" and context["rank"] == 0:
                signal.raise_signal(signal.SIGTERM)
"""


def run_until(config: Path, overrides: list[str], stop: str, resume: str) -> str:
    """The run directory of a run that is over, or that a signal to rank 0 has stopped."""
    os.environ["STOP_AT"] = stop
    trainer = GeneralTrainer(config, ["mode=train", *overrides], resume)
    try:
        return str(trainer.run()["run_dir"])
    except StoppedError:
        return str(trainer.contexts["train"]["run_dir"]) if trainer.contexts else ""


def stopped_and_resumed(ranks: Ranks, others: Ranks | None, config: Path, overrides: list[str], stop: str) -> str:
    """The run directory of a run that is stopped on some ranks, and goes on on others; None: in this process."""
    where = [*overrides, f"output_dir={config.parent / 'stopped'}"]
    ranks(run_until, config, where, stop, "never")
    if others:
        return str(others(run_until, config, where, "-1", "auto")[0])
    return run_until(config, where, "-1", "auto")


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[Ranks]:
    ranks = Ranks(4)
    yield ranks
    ranks.stop()


@pytest.fixture
def noisy(workspace: Workspace) -> Path:
    """A job with dropout, batch norm, accumulation, noisy data, and validations within epochs."""
    changes = {"{workspace}/moments.py": "{workspace}/stops.py", "epochs: 3": "epochs: 2"}
    changes |= {" batch_size: 3": " global_batch_size: 6", " batch_size: 6": " global_batch_size: 6"}
    text = whole_runs.FILES["config.yaml"]
    for old, new in changes.items():
        text = text.replace(old, new)
    return workspace({**whole_runs.FILES, "stops.py": STOPS, "config.yaml": text}) / "config.yaml"


def last_checkpoint(run_dir: str) -> Path:
    return max(Path(run_dir, "train", "checkpoints").glob("step-*"))


@pytest.mark.parametrize("stop", ["1", "2", "7", "17", "22", "validation"])
@pytest.mark.parametrize("workers", [0, 2])
def test_as_many_ranks_go_on_bit_for_bit(
    three_ranks: Ranks, noisy: Path, stop: str, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLOW_DATA", "0")
    overrides = [f"dataset.train.num_workers={workers}"]
    whole = three_ranks(run_until, noisy, [*overrides, f"output_dir={noisy.parent / 'whole'}"], "-1", "never")[0]
    ours = last_checkpoint(stopped_and_resumed(three_ranks, three_ranks, noisy, overrides, stop))
    theirs = last_checkpoint(whole)
    one, other = reader.read_checkpoint(ours), reader.read_checkpoint(theirs)
    assert whole_runs.differences(one.weights, other.weights) == []
    clock = ".recoverables.plugin:metric_log.timing"
    assert set(whole_runs.differences(one.training, other.training)) <= {clock}
    files, expected = layout.read_manifest(ours), layout.read_manifest(theirs)
    assert {name for name in expected if files.get(name) != expected[name]} <= {layout.TRAINING}
    text = [Path(run_dir, "train", "metrics.jsonl").read_bytes() for run_dir in (whole, str(ours.parents[2]))]
    assert text[0] == text[1]


@pytest.fixture
def smooth(workspace: Workspace) -> Path:
    config = FILES["config.yaml"].replace("[{progress_bar: false}]", '[{progress_bar: false}, "{workspace}/stops.py"]')
    return workspace({**FILES, "stops.py": STOPS, "config.yaml": config}) / "config.yaml"


@pytest.mark.parametrize("stop", ["3", "6", "11"])
@pytest.mark.parametrize("others", [1, 3, 4])
def test_other_ranks_go_on_with_the_same_samples(
    two_ranks: Ranks, three_ranks: Ranks, four_ranks: Ranks, smooth: Path, stop: str, others: int
) -> None:
    worlds = {1: None, 3: three_ranks, 4: four_ranks}
    # In an open window of two batches, too.
    ours = stopped_and_resumed(two_ranks, worlds[others], smooth, NOAM, stop)
    whole = run_until(smooth, [*NOAM, f"output_dir={smooth.parent / 'whole'}"], "-1", "never")
    assert_same_training(ours, whole)
