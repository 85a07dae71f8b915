"""Two launchers on one machine stand for two hosts."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import Workspace
from tests.distributed.test_equality import FILES, assert_same_training, run_job

pytestmark = pytest.mark.slow


def launch(config: Path, folder: Path, nodes: str, port: int, number: int, *words: str) -> subprocess.Popen[bytes]:
    """The launcher of one host, with one process; they meet in the one with number 0."""
    options = ["--nnodes", nodes, "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "job"]
    options += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--max-restarts", "3"]
    # By default a launcher takes 15 seconds for a lost one, and then waits 30 for another.
    settings = {"is_host": number == 0, "keep_alive_interval": 1, "keep_alive_max_attempt": 5, "last_call_timeout": 10}
    options += ["--rdzv-conf", ",".join(f"{name}={value}" for name, value in settings.items())]
    command = [sys.executable, "-m", "torch.distributed.run", *options, "-m", "pipeline", "run", str(config), *words]
    with (folder / "printed").open("ab") as printed:
        return subprocess.Popen(command, cwd=folder, stdout=printed, stderr=printed, start_new_session=True)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


STAGE = """
    from pathlib import Path
    from pipeline import stages

    class Startup(stages.Startup):
        def startup(self, context):
            Path(f"engine-{context['rank']}-{context['engine'].name}-{context['local_rank']}").touch()
            context["world"].once_per_host(lambda: Path(f"host-of-{context['rank']}").touch())
            super().startup(context)
"""


def test_a_run_on_two_hosts_trains_as_one_process(workspace: Workspace, tmp_path: Path) -> None:
    config = workspace({**FILES, "startup.py": STAGE}) / "config.yaml"
    words = ["runner.train.startup_class_path={workspace}/startup.py", f"output_dir={tmp_path / 'runs'}"]
    port = free_port()
    launchers = [launch(config, tmp_path, "2", port, number, *words) for number in range(2)]
    codes = [launcher.wait(120) for launcher in launchers]
    assert codes == [0, 0], (tmp_path / "printed").read_text()
    marks = {path.name for path in tmp_path.glob("*-*")}
    assert marks == {"engine-0-CLUSTER-0", "engine-1-CLUSTER-0", "host-of-0", "host-of-1"}
    alone = run_job(config, [f"output_dir={tmp_path / 'alone'}"])
    assert_same_training(str((tmp_path / "runs" / "workspace" / "latest").resolve()), alone)


SLOW = """
    import os, time
    from pipeline import hookimpl

    class Plugin:
        every_rank = True

        @hookimpl
        def after_batch(self):
            time.sleep(0.2)
"""


def test_where_one_of_two_hosts_is_lost_the_other_goes_on_alone(workspace: Workspace, tmp_path: Path) -> None:
    config = workspace({**FILES, "slow.py": SLOW}) / "config.yaml"
    words = ["plugins=[{progress_bar: false}, '{workspace}/slow.py']", "runner.train.save_interval=2"]
    words += ["runner.train.epochs=6", "mode=train", f"output_dir={tmp_path / 'runs'}"]
    port = free_port()
    end = time.monotonic() + 100
    launchers = [launch(config, tmp_path, "1:2", port, number, *words) for number in range(2)]
    checkpoints = tmp_path / "runs" / "workspace" / "latest" / "train" / "checkpoints"
    while not list(checkpoints.glob("step-*/rank-00001-of-00002.safetensors")):
        assert time.monotonic() < end, (tmp_path / "printed").read_text()
        time.sleep(0.1)
    os.killpg(launchers[1].pid, signal.SIGKILL)
    assert launchers[0].wait(150) == 0, (tmp_path / "printed").read_text()
    launchers[1].wait(10)
    words[-1] = f"output_dir={tmp_path / 'alone'}"
    alone = run_job(config, [word for word in words if not word.startswith("plugins")])
    assert_same_training(str((tmp_path / "runs" / "workspace" / "latest").resolve()), alone)
