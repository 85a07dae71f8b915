"""Runs on several processes that are stopped anywhere, and go on with as many processes, or with others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import whole_runs

from pipeline import GeneralTrainer
from pipeline.checkpoint import layout, reader
from pipeline.signals import StoppedError
from pipeline.testing import write_files
from tests.distributed.ranks import Ranks
from tests.distributed.test_equality import FILES, NOAM, assert_same_training

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
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STOP_AT", stop)
        patch.setenv("SLOW_DATA", "0")
        trainer = GeneralTrainer(config, ["mode=train", *overrides], resume)
        try:
            return str(trainer.run()["run_dir"])
        except StoppedError:
            return str(trainer.contexts["train"]["run_dir"]) if trainer.contexts else ""


def stopped_and_resumed(
    ranks: Ranks, others: Ranks | None, config: Path, overrides: list[str], stop: str, folder: Path
) -> str:
    """The run directory of a run that is stopped on some ranks, and goes on on others; None: in this process."""
    where = [*overrides, f"output_dir={folder}"]
    ranks(run_until, config, where, stop, "never")
    if others:
        return str(others(run_until, config, where, "-1", "auto")[0])
    return run_until(config, where, "-1", "auto")


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[Ranks]:
    ranks = Ranks(4)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="module")
def noisy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job with dropout, batch norm, accumulation, noisy data, and validations within epochs."""
    changes = {"{workspace}/moments.py": "{workspace}/stops.py", "epochs: 3": "epochs: 2"}
    changes |= {" batch_size: 3": " global_batch_size: 6", " batch_size: 6": " global_batch_size: 6"}
    text = whole_runs.FILES["config.yaml"]
    for old, new in changes.items():
        text = text.replace(old, new)
    files = {**whole_runs.FILES, "stops.py": STOPS, "config.yaml": text}
    return write_files(tmp_path_factory.mktemp("noisy") / "workspace", files) / "config.yaml"


@pytest.fixture(scope="module")
def noisy_run(three_ranks: Ranks, noisy: Path) -> Callable[[int], str]:
    """Return the run directory of three unbroken ranks, by the number of data workers of each."""

    def run(workers: int) -> str:
        overrides = [f"dataset.train.num_workers={workers}", f"output_dir={noisy.parent / 'whole'}"]
        return str(three_ranks(run_until, noisy, overrides, "-1", "never")[0])

    return cache(run)


def last_checkpoint(run_dir: str) -> Path:
    return max(Path(run_dir, "train", "checkpoints").glob("step-*"))


# Where the run is stopped, and the number of data workers of each rank.
STOPPED = [("2", 0), ("7", 2), ("17", 0), ("validation", 2)]


@pytest.mark.parametrize(
    ("stop", "workers"),
    [
        pytest.param(stop, workers, marks=pytest.mark.slow if (stop, workers) in STOPPED else pytest.mark.release)
        for workers in (0, 2)
        for stop in ("1", "2", "7", "17", "22", "validation")
    ],
)
def test_as_many_ranks_go_on_bit_for_bit(
    three_ranks: Ranks, noisy: Path, noisy_run: Callable[[int], str], stop: str, workers: int, tmp_path: Path
) -> None:
    whole = noisy_run(workers)
    overrides = [f"dataset.train.num_workers={workers}"]
    ours = last_checkpoint(stopped_and_resumed(three_ranks, three_ranks, noisy, overrides, stop, tmp_path / "stopped"))
    theirs = last_checkpoint(whole)
    one, other = reader.read_checkpoint(ours), reader.read_checkpoint(theirs)
    assert whole_runs.differences(one.weights, other.weights) == []
    clock = ".recoverables.plugin:metric_log.timing"
    assert set(whole_runs.differences(one.training, other.training)) <= {clock}
    files, expected = layout.read_manifest(ours), layout.read_manifest(theirs)
    assert {name for name in expected if files.get(name) != expected[name]} <= {layout.TRAINING}
    text = [Path(run_dir, "train", "metrics.jsonl").read_bytes() for run_dir in (whole, str(ours.parents[2]))]
    assert text[0] == text[1]


@pytest.fixture(scope="module")
def smooth(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = FILES["config.yaml"].replace("[{progress_bar: false}]", '[{progress_bar: false}, "{workspace}/stops.py"]')
    files = {**FILES, "stops.py": STOPS, "config.yaml": config}
    return write_files(tmp_path_factory.mktemp("smooth") / "workspace", files) / "config.yaml"


@pytest.fixture(scope="module")
def smooth_run(smooth: Path) -> str:
    """The run directory of one process that nobody stops."""
    return run_until(smooth, [*NOAM, f"output_dir={smooth.parent / 'whole'}"], "-1", "never")


# Where the run is stopped, also in an open window of two batches, and how many ranks go on.
OTHERS = [("3", 1), ("6", 4), ("11", 3)]


@pytest.mark.parametrize(
    ("stop", "others"),
    [
        pytest.param(stop, others, marks=pytest.mark.slow if (stop, others) in OTHERS else pytest.mark.release)
        for others in (1, 3, 4)
        for stop in ("3", "6", "11")
    ],
)
def test_other_ranks_go_on_with_the_same_samples(
    request: pytest.FixtureRequest, smooth: Path, smooth_run: str, stop: str, others: int, tmp_path: Path
) -> None:
    two, *_ = worlds = [request.getfixturevalue("two_ranks")]
    if others > 1:
        worlds.append(request.getfixturevalue({3: "three_ranks", 4: "four_ranks"}[others]))
    ours = stopped_and_resumed(two, worlds[1] if others > 1 else None, smooth, NOAM, stop, tmp_path / "stopped")
    assert_same_training(ours, smooth_run)
