"""Whole runs on several ranks that are stopped, or asked to save, on one of them: all do it after the same iteration."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from pipeline import GeneralTrainer
from pipeline.testing import write_files
from tests.distributed.ranks import Ranks

FILES = {
    "data.py": """
        import time
        import torch
        from torch.utils.data import Dataset

        class Waves(Dataset):
            def __init__(self, samples=512, pause=0.0, wait=()):
                generator = torch.Generator().manual_seed(0)
                self.x = torch.randn(samples, 4, generator=generator)
                self.y = torch.sin(self.x.sum(1, keepdim=True))
                self.pause, self.wait = pause, wait
            def __len__(self):
                return len(self.x)
            def __getitem__(self, index):
                time.sleep(1.0 if index in self.wait else self.pause)
                return self.x[index], self.y[index]
    """,
    "act.py": """
        import os, signal, threading
        from pipeline import hookimpl

        class Plugin:
            every_rank = True

            def __init__(self, what="", rank=0, at=10, when="after_batch", later=0.0):
                self.what, self.rank, self.at, self.when, self.later = what, rank, at, when, later

            def act(self, context, when):
                if when != self.when or context["train_state"]["iteration"] != self.at:
                    return
                self.when = ""
                if context["rank"] not in ([self.rank] if isinstance(self.rank, int) else self.rank):
                    return
                if self.what == "stop":
                    context.stop(f"rank {self.rank} has had enough")
                elif self.what == "is_exit":
                    context["is_exit"] = True
                elif self.what in ("checkpoint", "validation"):
                    context.request(self.what)
                else:
                    send = lambda: os.kill(os.getpid(), getattr(signal, self.what))
                    threading.Timer(self.later, send).start() if self.later else send()

            @hookimpl
            def after_batch(self, context):
                self.act(context, "after_batch")

            @hookimpl
            def before_validation(self, context):
                self.act(context, "before_validation")

            @hookimpl
            def after_validation(self, context):
                self.act(context, "after_validation")

            @hookimpl
            def before_checkpoint_saved(self, context):
                self.act(context, "before_checkpoint_saved")

            @hookimpl
            def before_stage(self, name, context):
                if name == self.at:
                    context["is_exit"] = context["is_exit"] or context["rank"] == self.rank
    """,
    "config.yaml": """
        plugins: [{progress_bar: false}]
        hyper_parameters: {optimizer: {class: SGD, learning_rate: 0.1}}
        dataset:
          - {name: train, class_path: "{workspace}/data.py:Waves", args: {pause: 0.001}, batch_size: 4}
          - {name: valid, class_path: "{workspace}/data.py:Waves", args: {samples: 16}, batch_size: 4}
        runner:
          - {name: train, class: train, device: cpu, epochs: 2}
        phase:
          - {name: waves, model: torch.nn.Linear, model_args: {in_features: 4, out_features: 1}, loss: torch.nn.functional.mse_loss,
             dataset_name: train, valid_dataset_name: valid}
    """,
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    write_files(tmp_path / "workspace", FILES)
    return tmp_path / "workspace" / "config.yaml"


def run_job(config: Path, overrides: list[str], *, resume: bool = False) -> str:
    """How a run ends on this rank."""
    overrides = [*overrides, f"output_dir={config.parent / 'runs'}"]
    try:
        GeneralTrainer(config, overrides, resume="auto" if resume else "never").run()
    except BaseException as error:
        return type(error).__name__
    return "done"


def acting(**options: Any) -> str:
    """The override by which a plugin acts."""
    return "plugins=" + json.dumps([{"progress_bar": False}, {"{workspace}/act.py": options}])


def run_dir(config: Path) -> Path:
    return max((config.parent / "runs").rglob("status.json"), key=os.path.getmtime).parent


def status(config: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((run_dir(config) / "status.json").read_text(encoding="utf-8"))
    return told


def steps(config: Path) -> list[int]:
    return sorted(int(path.name[-9:]) for path in run_dir(config).glob("train/checkpoints/step-*"))


def validations(config: Path) -> int:
    return (run_dir(config) / "train" / "metrics.jsonl").read_text(encoding="utf-8").count('"validate"')


# What happens on a rank -> how the run ends on all, with which exit code.
ENDS = {
    "stop": ("done", 0),
    "is_exit": ("done", 0),
    "SIGTERM": ("StoppedError", 75),
    "SIGINT": ("KeyboardInterrupt", 130),
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("what", "rank"), [("SIGTERM", 0), ("SIGTERM", [0, 1, 2]), ("SIGINT", 1), ("stop", 1), ("is_exit", 2)]
)
def test_all_ranks_end_after_one_iteration_and_it_is_saved(
    three_ranks: Ranks, config: Path, what: str, rank: int | list[int]
) -> None:
    how, code = ENDS[what]
    assert three_ranks(run_job, config, [acting(what=what, rank=rank)]) == [how] * 3
    told = status(config)
    assert told["exit_code"] == code
    assert 10 <= told["iteration"] < 90
    # Its manifest has the files of all ranks, each of which says its iteration.
    assert steps(config) == [told["iteration"]]


@pytest.mark.slow
def test_the_reason_is_told_wherever_it_arose(two_ranks: Ranks, config: Path) -> None:
    two_ranks(run_job, config, [acting(what="stop", rank=1)])
    assert status(config)["reason"] == "rank 1 has had enough"
    two_ranks(run_job, config, [acting(what="is_exit", rank=1), "runner.train.epochs=1"])
    assert "was set in runner (act.py:" in status(config)["reason"]
    assert two_ranks(run_job, config, [acting(at="startup", rank=1)]) == ["done", "done"]
    assert "was set in startup (act.py:" in status(config)["reason"]
    assert steps(config) == []


@pytest.mark.slow
def test_a_validation_is_interrupted_on_all_ranks_and_made_again(two_ranks: Ranks, config: Path) -> None:
    slow = "dataset.valid.args={samples: 512, pause: 0.004}"
    signal = acting(what="SIGTERM", rank=1, at=64, when="before_validation")
    assert two_ranks(run_job, config, [signal, slow]) == ["StoppedError"] * 2
    assert steps(config) == [64]
    assert validations(config) == 0
    assert two_ranks(run_job, config, ["dataset.valid.args={samples: 512}"], resume=True) == ["done"] * 2
    assert steps(config) == [64, 128]
    assert validations(config) == 2


def test_a_signal_in_a_save_is_heeded_after_it(two_ranks: Ranks, config: Path) -> None:
    signal = acting(what="SIGTERM", rank=1, at=64, when="before_checkpoint_saved")
    assert two_ranks(run_job, config, [signal]) == ["StoppedError"] * 2
    assert 64 in steps(config)
    assert steps(config)[-1] == status(config)["iteration"]


@pytest.mark.slow
def test_a_signal_while_one_rank_waits_for_data_lets_all_finish_the_step(two_ranks: Ranks, config: Path) -> None:
    # Rank 1 has the second half of each batch of eight.
    signal, slow = acting(what="SIGTERM", rank=1, at=5, later=0.2), "dataset.train.args={wait: [46]}"
    for workers in (0, 1):
        loader = f"dataset.train.num_workers={workers}"
        assert two_ranks(run_job, config, [signal, slow, loader]) == ["StoppedError"] * 2
        assert steps(config) == [status(config)["iteration"]]


@pytest.mark.slow
def test_what_a_plugin_of_rank_0_says_after_a_validation_counts_at_once(two_ranks: Ranks, config: Path) -> None:
    stop = acting(what="stop", at=20, when="after_validation")
    assert two_ranks(run_job, config, [stop, "runner.train.valid_interval=20"]) == ["done"] * 2
    assert status(config)["iteration"] == 20
    stop = acting(what="stop", at=64, when="after_validation")
    assert two_ranks(run_job, config, [stop]) == ["done"] * 2
    assert status(config)["iteration"] == 64


@pytest.mark.quick_cases(0)
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_request_of_one_rank_is_done_on_all(two_ranks: Ranks, config: Path, rank: int) -> None:
    assert two_ranks(run_job, config, [acting(what="checkpoint", rank=rank), "runner.train.epochs=1"]) == ["done"] * 2
    asked, last = steps(config)
    assert 10 < asked < last == 64
    assert two_ranks(run_job, config, [acting(what="validation", rank=rank), "runner.train.epochs=1"]) == ["done"] * 2
    assert validations(config) == 2


@pytest.mark.slow
def test_intervals_of_updates_are_those_of_one_process(two_ranks: Ranks, config: Path) -> None:
    overrides = ["runner.train.accum_grad=3", "runner.train.save_interval=5 update", "runner.train.keep_last=50"]
    assert two_ranks(run_job, config, overrides) == ["done"] * 2
    together = steps(config)
    assert run_job(config, [*overrides, "dataset.train.batch_size=8"]) == "done"
    assert together == steps(config)
    assert len(together) > 5


@pytest.mark.slow
def test_rank_0_measures_the_time(two_ranks: Ranks, config: Path) -> None:
    overrides = ["runner.train.max_time=2 second", "runner.train.save_interval=1 second", "runner.train.epochs=1000"]
    assert two_ranks(run_job, config, overrides) == ["done"] * 2
    told, saved = status(config), steps(config)
    assert "max_time" in told["reason"]
    assert saved[-1] == told["iteration"]
    assert 1 < len(saved) < 4


@pytest.mark.slow
def test_a_run_that_was_stopped_comes_to_the_same_bits(two_ranks: Ranks, config: Path) -> None:
    assert two_ranks(run_job, config, []) == ["done"] * 2
    unbroken = (run_dir(config) / "train" / "checkpoints" / "step-000000000128" / "waves.safetensors").read_bytes()
    assert two_ranks(run_job, config, [acting(what="SIGUSR1", rank=1)]) == ["StoppedError"] * 2
    assert two_ranks(run_job, config, [acting()], resume=True) == ["done"] * 2
    resumed = run_dir(config) / "train" / "checkpoints" / "step-000000000128" / "waves.safetensors"
    assert resumed.read_bytes() == unbroken


# Of a launcher's processes: what is sent to whom, and what all leave with.


TORCHRUN = ["torch.distributed.run", "--nproc-per-node", "2", "-m", "pipeline", "run"]


def launch(config: Path, *words: str, by: Sequence[str] = TORCHRUN) -> subprocess.Popen[str]:
    """Begin a run of two processes, and wait until they have saved a checkpoint."""
    command = [sys.executable, "-m", *by, str(config), "runner.train.epochs=1000", "plugins=[progress_bar: false]"]
    command += [f"output_dir={config.parent / 'runs'}", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment)
    for _ in range(600):
        if list((config.parent / "runs").rglob("step-*")):
            return process
        time.sleep(0.1)
    raise AssertionError(process.communicate()[0])


def workers(process: subprocess.Popen[str]) -> list[int]:
    """The processes of a launcher."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text(encoding="utf-8")
    return [int(word) for word in children.split()]


def to_launcher(process: subprocess.Popen[str], number: int) -> None:
    process.send_signal(number)


def to_all(process: subprocess.Popen[str], number: int) -> None:
    """As Slurm does; the launcher forwards it too."""
    for pid in [*workers(process), process.pid]:
        os.kill(pid, number)


def to_last(process: subprocess.Popen[str], number: int) -> None:
    os.kill(workers(process)[-1], number)


@pytest.mark.parametrize(
    ("send", "number", "code"),
    [
        pytest.param(to_launcher, signal.SIGTERM, 75, marks=pytest.mark.release),
        pytest.param(to_launcher, signal.SIGINT, 130, marks=pytest.mark.release),
        pytest.param(to_all, signal.SIGTERM, 75, marks=pytest.mark.release),
        pytest.param(to_last, signal.SIGINT, 130, marks=pytest.mark.slow),
    ],
)
def test_a_signal_to_torchrun_or_its_processes_is_saved(
    config: Path, send: Callable[[subprocess.Popen[str], int], None], number: int, code: int
) -> None:
    assert_saved(launch(config), config, send, number, code)


def assert_saved(
    process: subprocess.Popen[str],
    config: Path,
    send: Callable[[subprocess.Popen[str], int], None],
    number: int,
    code: int,
) -> None:
    """After a signal all processes end, and the checkpoint is of their last iteration."""
    pids = workers(process)
    send(process, number)
    printed = process.communicate(timeout=60)[0]
    told = status(config)
    assert (told["exit_code"], told["resumable"]) == (code, True), printed
    assert steps(config)[-1] == told["iteration"], printed
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.mark.parametrize(
    "send",
    [pytest.param(to_launcher, marks=pytest.mark.release), pytest.param(to_all, marks=pytest.mark.slow)],
)
def test_a_signal_to_a_run_with_nproc_is_its_exit_code(
    config: Path, send: Callable[[subprocess.Popen[str], int], None]
) -> None:
    process = launch(config, "--nproc", "2", by=["pipeline", "run"])
    assert_saved(process, config, send, signal.SIGUSR1, 75)
    assert process.returncode == 75


@pytest.mark.slow
def test_ctrl_c_twice_ends_at_once(config: Path) -> None:
    # The step does not end before the test does.
    process = launch(
        config, "dataset.train.args={samples: 512, pause: 0.001, wait: [300, 301, 302, 303, 304, 305, 306]}"
    )
    pids = workers(process)
    process.send_signal(signal.SIGINT)
    time.sleep(2.5)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=10)
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
