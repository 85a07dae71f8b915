"""Workers that fail: which of them, at which sample, and what to do about it."""

from __future__ import annotations

import multiprocessing.connection
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from pipeline import Context, GeneralTrainer, RunnerBase
from pipeline.data.fetch import WorkerTracebackError
from pipeline.data.loader import make_loader
from pipeline.data.workers import RUNNING, supervise_workers, without_death_reports
from pipeline.errors import ConfigError, DataError
from tests.training.conftest import linear_config

pytestmark = [
    # torch reports a dead worker by an exception from a signal handler, wherever this process happens to be: in a
    # destructor too, or between the temporary files that torch opens then to see whether descriptors are left.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    # where there are fewer processors than workers
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]
PLACE = "the samples 6, 7, 8 \\(from place 6 of epoch 1 on\\)"


class TwoArgumentsError(Exception):
    """Cannot be made again of its message alone."""

    def __init__(self, what: str, where: str) -> None:
        super().__init__(f"{what} in {where}")


class Failing(Dataset[Any]):
    """Does something else at sample 7."""

    def __init__(self, act: Any) -> None:
        self.act = act

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return self.act() if index == 7 else torch.zeros(1)


class FailingStream(IterableDataset[Any]):
    """Does something else at sample 7."""

    def __init__(self, act: Any) -> None:
        self.act = act

    def __iter__(self) -> Iterator[Any]:
        return (self.act() if index == 7 else torch.zeros(1) for index in range(12))


def go_through(dataset: Any, workers: int, **keywords: Any) -> None:
    loader = make_loader(
        dataset, **{"seed": 0, "batch_size": 3, **keywords}, num_workers=workers, where="dataset.train"
    )
    loader.set_epoch(1)
    list(loader)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise KeyError("a broken file") from OSError("no such file")


def fail_with_two_arguments() -> None:
    raise TwoArgumentsError("broken", "a file")


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("act", "how"),
    [
        (kill, "was killed by SIGKILL at {}; most often the memory was full: use fewer num_workers or smaller"),
        (lambda: os._exit(3), "left with exit code 3 at {}; something in the dataset ends the process; set num_work"),
        (
            lambda: os.kill(os.getpid(), signal.SIGUSR2),
            "was killed by SIGUSR2 at {}; it crashed; set num_workers: 0 to see where",
        ),
        (
            lambda: os.kill(os.getpid(), signal.SIGBUS),
            "was killed by SIGBUS at {}; most often the shared memory was full",
        ),
    ],
)
def test_a_worker_that_dies_is_told_with_the_sample_that_it_was_at(act: Any, how: str, workers: int) -> None:
    message = f"dataset.train: worker 0 {how.format(f'sample 7, fetching {PLACE}')}"
    with pytest.raises(DataError, match=message):
        go_through(Failing(act), workers)


def test_the_sample_is_told_where_there_are_no_batches() -> None:
    message = r"worker 1 was killed by SIGKILL at sample 7 \(from place 7 of epoch 1 on\)"
    with pytest.raises(DataError, match=message):
        go_through(Failing(kill), 2, batch_size=None)


def test_of_a_stream_it_is_told_how_far_the_worker_was() -> None:
    message = "worker 0 was killed by SIGKILL at sample 1 of its batch 2, both counted from 0"
    with pytest.raises(DataError, match=message):
        go_through(FailingStream(kill), 1)


def test_a_worker_that_dies_before_it_comes_to_a_sample_is_told_so() -> None:
    with pytest.raises(DataError, match=r"dataset.train: worker 0 left with exit code 4 before it came to any sample"):
        go_through(Failing(fail), 1, worker_init_fn=lambda worker: os._exit(4))


def test_a_pass_that_nobody_reads_leaves_no_worker() -> None:
    loader = make_loader(Failing(fail), seed=0, num_workers=1)
    before = {*multiprocessing.active_children()}
    batches = iter(loader)
    (worker,) = {*multiprocessing.active_children()} - before
    del batches
    worker.join(10)
    assert not worker.is_alive()
    assert loader.state_dict()["taken"] == 0


KILLED_AT_A_START = """
import os, signal, time
from pipeline.data.loader import make_loader

def kill_run(worker):
    if worker == 1:
        run = os.getppid()
        os.kill(run, signal.SIGKILL)
        while os.getppid() == run:
            time.sleep(0.01)

next(iter(make_loader(range(10), seed=0, num_workers=2, worker_init_fn=kill_run)))
"""


@pytest.mark.slow
def test_workers_end_with_a_run_that_is_killed_while_they_start() -> None:
    # They hold the pipe: without their end this would wait for ever.
    done = subprocess.run([sys.executable, "-c", KILLED_AT_A_START], stdout=subprocess.PIPE, timeout=100, check=False)
    assert done.returncode == -signal.SIGKILL


def test_a_death_that_is_reported_while_a_lost_connection_is_explained_is_told_as_well() -> None:
    loader = make_loader(Failing(kill), seed=0, batch_size=3, num_workers=1, where="dataset.train")
    before = {*multiprocessing.active_children()}
    batches = iter(loader)
    (worker,) = {*multiprocessing.active_children()} - before
    # A mask would be that of this thread alone, and another may get the signal.
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    next(batches)
    multiprocessing.connection.wait([worker.sentinel], 60)
    (workers,) = (running for running in RUNNING if running.iterator._workers[0].pid == worker.pid)

    def report(frame: Any, event: str, argument: Any) -> None:
        if frame.f_code.co_name == without_death_reports.__name__ and signal.getsignal(signal.SIGCHLD) is not handler:
            signal.signal(signal.SIGCHLD, handler)
            signal.raise_signal(signal.SIGCHLD)

    sys.settrace(report)
    try:
        explained = workers.explain(ConnectionResetError(104, "Connection reset by peer"))
    finally:
        sys.settrace(None)
        signal.signal(signal.SIGCHLD, handler)
    assert str(explained).startswith("dataset.train: worker 0 was killed by SIGKILL at sample 7")


def begin_and_linger(loader: Any) -> None:
    batches = iter(loader)
    with supervise_workers():
        next(batches)
        while True:
            time.sleep(0.01)


def test_a_worker_that_dies_during_a_step_is_told_as_well() -> None:
    loader = make_loader(Failing(kill), seed=0, batch_size=3, num_workers=1, where="dataset.train")
    with pytest.raises(DataError, match=r"dataset.train: worker 0 was killed by SIGKILL at sample 7"):
        begin_and_linger(loader)


def test_what_else_goes_wrong_in_a_step_stays_as_it_is() -> None:
    with pytest.raises(RuntimeError, match=r"^out of memory$") as raised, supervise_workers():
        raise RuntimeError("out of memory")
    assert not isinstance(raised.value, DataError)


@pytest.mark.parametrize(
    ("dataset", "where"),
    [
        (Failing, f"at sample 7, fetching {PLACE}"),
        (FailingStream, "at sample 1 of its batch 1, both counted from 0"),
    ],
)
@pytest.mark.slow
def test_a_worker_that_hangs_is_told_after_the_timeout_and_is_ended(dataset: Any, where: str, tmp_path: Path) -> None:
    def hang() -> None:
        (tmp_path / "pid").write_text(str(os.getpid()), encoding="utf-8")
        time.sleep(600)

    message = f"dataset.train: worker 0 hangs {where}: it has not answered within the timeout of 2 seconds; see what"
    with pytest.raises(DataError, match=message):
        go_through(dataset(hang), 2, timeout=2)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text(encoding="utf-8")), 0)


def test_a_timeout_without_workers_would_be_ignored() -> None:
    with pytest.raises(
        ConfigError, match=r"dataset.train: timeout: 5 is how long workers are waited for, and there are"
    ):
        go_through(Failing(kill), 0, timeout=5)


@pytest.mark.parametrize(("workers", "seed"), [(0, 0), (2, 0), (2, None)])
def test_what_a_dataset_raises_stays_what_it_is_with_a_note_of_the_sample(workers: int, seed: int | None) -> None:
    with pytest.raises(KeyError) as raised:
        go_through(Failing(fail), workers, seed=seed)
    assert raised.value.args == ("a broken file",)
    here = ", in worker 0" if workers else ""
    note = f"dataset.train: raised for sample 7, fetching the samples 6, 7, 8 (from place 6 of epoch 1 on){here}"
    assert raised.value.__notes__ == [note]


def test_the_traceback_in_the_worker_is_the_cause() -> None:
    with pytest.raises(KeyError) as raised:
        go_through(Failing(fail), 1)
    told = str(raised.value.__cause__)
    assert isinstance(raised.value.__cause__, WorkerTracebackError)
    assert 'raise KeyError("a broken file") from OSError("no such file")' in told
    assert "OSError: no such file" in told
    assert "torch/utils/data" not in told


def test_an_exception_that_cannot_travel_is_reported_by_torch_with_the_note_in_it(monkeypatch: Any) -> None:
    """The worker lives, so nothing waits for it to die."""
    monkeypatch.setattr("pipeline.data.workers.wait", pytest.fail)
    with pytest.raises(
        RuntimeError, match=f"(?s)TwoArgumentsError.*raised for sample 7, fetching {PLACE}, in worker 0"
    ):
        go_through(Failing(fail_with_two_arguments), 1)


@pytest.mark.parametrize("workers", [0, 2])
def test_what_a_stream_raises_is_told_with_its_batch(workers: int) -> None:
    with pytest.raises(KeyError) as raised:
        go_through(FailingStream(fail), workers)
    which = "batch 1 of the worker that reads share 0 in epoch 1, in worker 0" if workers else "batch 2 in epoch 1"
    assert raised.value.__notes__ == [f"dataset.train: raised for {which}"]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_that_would_end_the_epoch_without_a_word_is_refused(workers: int) -> None:
    def stop() -> None:
        raise StopIteration

    message = "Failing raised StopIteration for sample 7.*, which ends the epoch; raise IndexError, or fix"
    with pytest.raises(DataError, match=f"^dataset.train: {message}"):
        go_through(Failing(stop), workers)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("sample", "what"),
    [
        (None, r"a tensor of shape \(1,\), 2 times; None \(.*\); return the same from each, in numbers"),
        (
            torch.zeros(2),
            r"a tensor of shape \(1,\), 2 times; a tensor of shape \(2,\) \(.*\); return the same from each",
        ),
        ({"x": torch.zeros(1)}, r"a tensor of shape \(1,\), 2 times; a dict of 1 \(x: a tensor of shape \(1,\)\) \("),
    ],
)
def test_samples_that_make_no_batch_are_told_with_their_shapes(sample: Any, what: str, workers: int) -> None:
    here = ", in worker 0" if workers else ""
    with pytest.raises(DataError, match=f"^dataset.train: torch's collate makes no batch of {PLACE}{here}: {what}"):
        go_through(Failing(lambda: sample), workers)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_of_samples_that_make_no_batch_is_told_with_its_batch(workers: int) -> None:
    with pytest.raises(
        DataError, match=r"^dataset.train: torch's collate makes no batch of batch 2 in epoch 1.*\(2,\)"
    ):
        go_through(FailingStream(lambda: torch.zeros(2)), workers)


def test_what_a_collate_fn_of_the_users_own_raises_stays_what_it_is() -> None:
    with pytest.raises(TypeError) as raised:
        go_through(Failing(lambda: None), 1, collate_fn=torch.stack)
    note = (
        "collate_fn failed on the samples 6, 7, 8 (from place 6 of epoch 1 on): a tensor of shape (1,), 2 times; None"
    )
    assert raised.value.__notes__ == [f"dataset.train: {note}, in worker 0"]


class KeepsItsPass(RunnerBase):
    """A loop of its own, whose variable keeps a pass that is over; ``left``: how many workers are left then."""

    left = -1

    def run(self, context: Context) -> None:
        before = {*multiprocessing.active_children()}
        batches = context.batches("line", count=2)
        for batch in batches:
            context["model"]["line"].brain.fit_batch(batch)
        KeepsItsPass.left = len({*multiprocessing.active_children()} - before)


def test_the_workers_of_a_pass_end_with_it_though_a_variable_keeps_it() -> None:
    made = linear_config(runner_class_path=KeepsItsPass)
    made["dataset"][0]["num_workers"] = 1
    GeneralTrainer(made).run()
    assert KeepsItsPass.left == 0
