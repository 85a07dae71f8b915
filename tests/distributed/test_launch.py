"""Several processes are started, end together with the first one's exit code, and go on after a failure."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from click.testing import Result
from forked_runs import Zygote

from pipeline import GeneralTrainer
from pipeline.config.load import ConfigBuilder
from pipeline.distributed import launch
from pipeline.distributed.exit import end_with_launcher
from pipeline.distributed.world import World
from pipeline.errors import ConfigError

Call = Callable[..., Result]
CONFIG = """
    hyper_parameters: {optimizer: {class: SGD, learning_rate: 0.01}}
    dataset:
      - {name: d, class_path: "{workspace}/job.py:Data", global_batch_size: 8}
    runner:
      - {name: t, class: train, device: cpu, epochs: 3, print_interval: null, runner_class_path: "{workspace}/job.py"}
    phase:
      - name: p
        model: torch.nn.Linear
        model_args: {in_features: 2, out_features: 1}
        loss: torch.nn.functional.mse_loss
        dataset_name: d
"""
# Each process notes who it is in each epoch; in its first attempt rank 1 fails as it is told.
JOB = """
    import json, os, signal, sys, time
    from pathlib import Path
    import torch
    from torch.utils.data import Dataset
    from pipeline import stages
    from pipeline.errors import DivergedError

    class Data(Dataset):
        def __len__(self):
            return 40

        def __getitem__(self, index):
            x = torch.tensor([index / 40, 1.0])
            return x, x.sum(0, keepdim=True)

    class Runner(stages.Runner):
        def train_epoch(self, context, epoch):
            attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
            about = dict(rank=context["rank"], pid=os.getpid(), launcher=os.getppid(), attempt=attempt, epoch=epoch)
            about |= dict(engine=context["engine"].name, world_size=context["world_size"], words=sys.argv[1:])
            about |= dict(threads=torch.get_num_threads(), run_dir=str(context["run_dir"]))
            with Path(os.environ["NOTES"], f"{os.getpid()}.jsonl").open("a") as notes:
                notes.write(json.dumps(about) + "\\n")
            if about["rank"] == context["world_size"] - 1 and (attempt, epoch) == (0, 1):
                if "FAILS" in os.environ:
                    raise DivergedError("mine")
                if "KILLED" in os.environ:
                    while not list(Path(context["run_dir"], "t", "checkpoints").glob("step-*")):
                        time.sleep(0.01)
                    os.kill(os.getpid(), signal.SIGKILL)
            super().train_epoch(context, epoch)
"""
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
RUN = ["-m", "pipeline", "run", "-q"]


class Job(NamedTuple):
    """A config whose processes write notes."""

    config: Path
    notes: Path
    request: pytest.FixtureRequest

    def start(self, *command: str, **environment: str) -> subprocess.Popen[str]:
        """Start a command in a session of its own."""
        own = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        own |= {"NOTES": str(self.notes), **environment}
        pipe: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, env=own, start_new_session=True, **pipe)

    def run(self, *words: str, **environment: str) -> tuple[int, str]:
        """(exit code, stderr) of ``pipeline run`` of the config."""
        return self.call("run", "-q", str(self.config), *words, **environment)

    def call(self, *words: str, **environment: str) -> tuple[int, str]:
        """(exit code, stderr) of a command."""
        # Few tests need the fixture, which starts a process.
        done = self.request.getfixturevalue("process")(*words, NOTES=str(self.notes), **environment)
        return done.returncode, done.stderr

    def wait(self, processes: int) -> list[dict[str, Any]]:
        """The first notes of so many processes, by rank, once they are there."""
        end = time.monotonic() + 100
        while len(notes := self._complete_notes()) < processes and time.monotonic() < end:
            time.sleep(0.05)
        firsts = (json.loads(note.splitlines()[0]) for note in notes)
        return sorted(firsts, key=lambda about: (about["attempt"], about["rank"]))

    def _complete_notes(self) -> list[str]:
        """What the processes have written of which the first line is complete."""
        return [text for path in self.notes.glob("*") if "\n" in (text := path.read_text("utf-8"))]

    def told(self) -> list[dict[str, Any]]:
        """All notes."""
        return [json.loads(line) for path in self.notes.glob("*") for line in path.read_text("utf-8").splitlines()]

    def run_dirs(self) -> list[Path]:
        """The run directories."""
        return [path for path in Path("runs").glob("*/*") if not path.is_symlink()]

    def status(self) -> dict[str, Any]:
        """The ``status.json`` of the only run."""
        (run_dir,) = self.run_dirs()
        status: dict[str, Any] = json.loads((run_dir / "status.json").read_bytes())
        return status


@pytest.fixture
def job(request: pytest.FixtureRequest, workspace: Callable[..., Path], tmp_path: Path) -> Job:
    (tmp_path / "notes").mkdir()
    files = {"config.yaml": CONFIG.replace("\n    ", "\n"), "job.py": JOB.replace("\n    ", "\n")}
    return Job(workspace(files) / "config.yaml", tmp_path / "notes", request)


def wait_for_session(session: int) -> None:
    """Wait until no process of a session runs any more, and fail with what each thread waits for."""
    command = ["ps", "-L", "-o", "stat,pid,ppid,tid,comm,wchan:30,args", "--sid", str(session), "--no-headers"]
    end = time.monotonic() + 60
    while True:
        threads = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
        running = [thread for thread in threads if not thread.startswith(("Z", "X"))]
        if not running:
            return
        assert time.monotonic() < end, "\n".join(running)
        time.sleep(0.1)


@pytest.mark.slow
def test_worker_num_starts_processes_with_the_same_words_and_their_share_of_the_cores(job: Job) -> None:
    words = ["runner.t.class=local_cluster_train", "runner.t.worker_num=2", "+hyper_parameters.price=$$5"]
    # Not by the fixture, whose processes know how many threads they have.
    command = [sys.executable, *RUN, str(job.config), *words, "--max-restarts=1", "--nproc", "2"]
    with job.start(*command) as process:
        _, errors = process.communicate(timeout=100)
    assert (process.returncode, job.status()["state"]) == (0, "done"), errors
    assert "worker_num" not in errors
    firsts = job.wait(2)
    assert [about["rank"] for about in firsts] == [0, 1]
    assert {about["engine"] for about in firsts} == {"LOCAL_CLUSTER"}
    assert all(about["words"] == ["run", "-q", str(job.config), *words] for about in firsts)
    assert {about["threads"] for about in firsts} == {max(1, len(os.sched_getaffinity(0)) // 2)}


@pytest.mark.parametrize(
    "restarts", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.release)]
)
def test_the_code_of_the_rank_that_fails_first_is_kept_by_each_later_attempt(job: Job, restarts: int) -> None:
    code, errors = job.run("--nproc", "2", "--max-restarts", str(restarts), FAILS="1")
    assert (code, job.status()["exit_code"]) == (5, 5), errors
    assert {about["attempt"] for about in job.told()} == {0}
    assert f"{job.run_dirs()[0].resolve()}: the attempt before has left with 5: " in errors
    assert "was the first to leave, with exit code 5: " in errors.splitlines()[-1]


@pytest.mark.parametrize(
    "processes", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.release)]
)
def test_a_killed_rank_starts_the_run_again_in_its_directory(job: Job, processes: int) -> None:
    command = [*TORCHRUN, "--nproc-per-node", str(processes), "--max-restarts", "1", *RUN, str(job.config)]
    with job.start(*command, KILLED="1") as launcher:
        _, errors = launcher.communicate(timeout=100)
    assert (launcher.returncode, job.status()["state"]) == (0, "done"), errors
    assert sorted((about["attempt"], about["epoch"]) for about in job.told() if about["rank"] == 0) == [
        (0, 0), (0, 1), (1, 1), (1, 2)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("number", "to_rank", "code"),
    [
        pytest.param(signal.SIGUSR1, None, 75, marks=pytest.mark.release),
        pytest.param(signal.SIGINT, None, 130, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 1, 75, marks=pytest.mark.slow),
    ],
)
def test_a_signal_saves_and_leaves_with_its_code(
    job: Job, zygote: Zygote, number: int, to_rank: int | None, code: int
) -> None:
    words = ["run", str(job.config), "runner.t.epochs=1000000", "--nproc", "2"]
    with zygote.start(Path.cwd(), words, Path("stderr"), {"NOTES": str(job.notes)}) as launcher:
        firsts = job.wait(2)
        os.kill(launcher.pid if to_rank is None else firsts[to_rank]["pid"], number)
        launcher.wait(100)
    errors = Path("stderr").read_text("utf-8")
    assert (launcher.code, job.status()["exit_code"]) == (code, code), errors
    assert job.status()["resumable"]


@pytest.mark.slow
def test_a_run_is_resumed_on_several_processes_from_another_folder(job: Job, tmp_path: Path) -> None:
    assert job.run("runner.t.epochs=1")[0] == 0
    folder = job.run_dirs()[0].resolve()
    words = ["resume", os.path.relpath(folder, tmp_path), "runner.t.epochs=2", "--nproc=2"]
    with contextlib.chdir(tmp_path):
        code, errors = job.call(*words)
    assert (code, job.status()["epoch"]) == (0, 2), errors
    resumed = sorted((about["rank"], about["epoch"]) for about in job.told() if about["world_size"] == 2)
    assert resumed == [(0, 1), (1, 1)]
    assert errors.count("begun in") == 2  # The launcher says it, and rank 0.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "number"),
    [
        ([*TORCHRUN, "--nproc-per-node", "2", *RUN], signal.SIGUSR1),
        ([sys.executable, *RUN, "--nproc=2"], signal.SIGKILL),
    ],
)
def test_processes_end_soon_after_their_launcher(job: Job, command: list[str], number: int) -> None:
    with job.start(*command, str(job.config), "runner.t.epochs=1000000", "dataset.d.num_workers=1") as launcher:
        assert len(job.wait(2)) == 2
        launcher.send_signal(number)
        # They would train for days. The workers of their loaders, which hold the pipe, end too.
        wait_for_session(launcher.pid)
        launcher.communicate(timeout=60)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux kills a process when the one before it has ended")
def test_process_of_a_launcher_is_killed_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only told by the store, which is in the launcher, that this is gone."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "tests")
    system, killed_by = ctypes.CDLL(None), ctypes.c_int()
    set_death_signal, get_death_signal = 1, 2
    try:
        end_with_launcher()
        system.prctl(get_death_signal, ctypes.byref(killed_by))
    finally:
        system.prctl(set_death_signal, 0)
    assert killed_by.value == signal.SIGKILL


@pytest.mark.parametrize(
    ("variables", "tasks"),
    [
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, None),  # A batch script.
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4"}, 4),
        ({"SLURM_NTASKS": "2", "SLURM_PROCID": "1"}, 2),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, None),
    ],
)
def test_processes_of_srun_without_torchrun_are_refused(
    pipeline: Call, job: Job, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], tasks: int | None
) -> None:
    for name, value in {**variables, "NOTES": str(job.notes)}.items():
        monkeypatch.setenv(name, value)
    done = pipeline("run", "-q", job.config, "runner.t.epochs=1")
    refused = (
        f"environment SLURM_NTASKS={tasks}: srun has started them, and no torchrun; write srun --ntasks-per-node 1"
    )
    assert done.exit_code == (2 if tasks else 0)
    assert done.stderr.startswith(refused) or tasks is None


@pytest.mark.parametrize(
    ("keys", "address", "message"),
    [
        (
            "dataset.d.global_batch_size=2",
            "dataset.d.global_batch_size",
            "is 2, and there are 3 processes; start fewer",
        ),
        (
            "runner.t.sync_batchnorm=true",
            "runner.t.sync_batchnorm",
            "is true, and the device is the CPU; use GPUs, or remove",
        ),
        (
            "runner.t.device=gpu",
            "runner.t.device",
            "is 'gpu', and this machine has 2 GPUs for 3 processes; start fewer, or write cpu",
        ),
        (
            "runner.t.device=cuda:1",
            "runner.t.device",
            "is 'cuda:1', one GPU for 3 processes of this machine; write cuda",
        ),
    ],
)
def test_what_so_many_processes_cannot_run_is_told_before(
    job: Job, monkeypatch: pytest.MonkeyPatch, keys: str, address: str, message: str
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    config = ConfigBuilder(str(job.config), [keys]).config
    assert config
    with pytest.raises(ConfigError, match=rf"^override '{keys}': {address}: {message}"):
        launch.find_devices(config, World(2, 2, 3, 3))


def test_a_plugin_that_does_not_say_where_it_runs_is_told_of_before_any_process_starts(
    pipeline: Call, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin = "from pipeline import hookimpl\nclass Plugin:\n    @hookimpl\n    def after_batch(self, context):\n        pass\n"
    job.config.with_name("plug.py").write_text(plugin, "utf-8")
    # What would be started.
    monkeypatch.setattr("pipeline.cli.run.launch", lambda *_: 0)
    words = ["run", "-q", job.config, "plugins=['{workspace}/plug.py']", "--nproc"]
    assert pipeline(*words, "1").exit_code == 0
    done = pipeline(*words, "2")
    assert done.exit_code == 2
    assert "Plugin (plug.py:2) has after_batch, and does not say on which of several processes it runs" in done.stderr


def test_a_runner_that_a_launcher_starts_is_not_run_alone(job: Job) -> None:
    with pytest.raises(
        ConfigError, match=r"t\.fleet_mode: is 'collective', and this is one process; start it by `torch"
    ):
        GeneralTrainer(str(job.config), ["runner.t.class=cluster_train"]).run()
    assert job.run_dirs() == []


def test_auto_is_one_process_for_each_gpu(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ConfigBuilder(str(job.config), []).config
    assert config
    for gpus, processes in ((0, 1), (1, 1), (4, 4)):
        monkeypatch.setattr("torch.cuda.device_count", lambda gpus=gpus: gpus)
        assert launch.count_processes(config, "auto", 0) == processes
