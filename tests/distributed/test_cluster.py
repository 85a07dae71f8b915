"""The recipes for clusters say what they have to, and their commands train on two processes of this machine."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

EXAMPLES = Path(__file__).parents[2] / "workspace_examples"
SBATCH = EXAMPLES / "cluster" / "train.sbatch"
CONFIG = EXAMPLES / "first_steps" / "config.yaml"
# What a cluster has, for two nodes that are this machine.
STUBS = {
    "torchrun": f'exec {shlex.quote(sys.executable)} -m torch.distributed.run --local-addr localhost "$@"',
    "srun": '"$@" & "$@" & wait -n && wait',
    "scontrol": '[ "$1" = show ] && echo localhost || echo "$@" >> scontrol.txt',
}


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def job() -> tuple[dict[str, Any], dict[str, Any]]:
    """(service, job) of the recipe for Kubernetes."""
    service, job = yaml.safe_load_all((EXAMPLES / "cluster" / "job.yaml").read_text("utf-8"))
    return service, job["spec"]


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """The environment of a machine that has the programs of a cluster."""
    (tmp_path / "bin").mkdir()
    for name, script in STUBS.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{script}\n", encoding="utf-8")
        (tmp_path / "bin" / name).chmod(0o755)
    slurm = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": "2", "SLURM_JOB_ID": "7", "PORT": free_port()}
    return {**os.environ, **slurm, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}


def assert_two_ranks_are_done() -> None:
    (run_dir,) = (path for path in Path("runs/first_steps").iterdir() if not path.is_symlink())
    assert json.loads((run_dir / "status.json").read_bytes())["state"] == "done"
    assert [path.name for path in (run_dir / "ranks").iterdir()] == ["00001"]


def test_the_batch_script_asks_for_a_launcher_on_each_node_and_for_a_signal_in_time() -> None:
    text = SBATCH.read_text("utf-8")
    options = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", text, re.MULTILINE))
    assert (options["ntasks-per-node"], options["signal"], options["requeue"]) == ("1", "SIGUSR1@90", "")
    assert "--signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGUSR1" in text
    subprocess.run(["bash", "-n", SBATCH], check=True)


def test_a_stopped_job_is_requeued_and_no_other(cluster: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "bin" / "srun").write_text("#!/bin/bash\nexit 1\n", encoding="utf-8")
    status = Path("runs/job/latest/status.json")
    status.parent.mkdir(parents=True)
    for code in (1, 75):
        status.write_text(json.dumps({"exit_code": code}, indent=2), encoding="utf-8")
        subprocess.run(["bash", SBATCH, "config.yaml"], env=cluster, check=False)
        assert Path("scontrol.txt").exists() is (code == 75)
    assert Path("scontrol.txt").read_text("utf-8") == "requeue 7\n"


@pytest.mark.slow
def test_the_batch_script_trains_on_two_nodes(cluster: dict[str, str]) -> None:
    done = subprocess.run(["bash", SBATCH, CONFIG], env=cluster, check=False, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
    assert_two_ranks_are_done()


def test_the_pods_of_the_job_find_the_first_by_the_name_of_the_service() -> None:
    service, spec = job()
    pods = spec["template"]["spec"]
    command, name = pods["containers"][0]["command"], service["metadata"]["name"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    assert (service["spec"]["clusterIP"], service["spec"]["selector"]) == ("None", {"job-name": "pipeline"})
    assert pods["subdomain"] == name
    assert {"--nnodes=2", f"--rdzv-endpoint=pipeline-0.{name}:29400"} < {*command}
    assert f"--nproc-per-node={pods['containers'][0]['resources']['limits']['nvidia.com/gpu']}" in command


@pytest.mark.release
def test_the_command_of_the_job_trains_in_two_pods(cluster: dict[str, str]) -> None:
    changes = {
        "--nproc-per-node=4": "--nproc-per-node=1",
        "--rdzv-endpoint=pipeline-0.pipeline:29400": f"--rdzv-endpoint=localhost:{cluster['PORT']}",
        "config.yaml": str(CONFIG),
    }
    command = job()[1]["template"]["spec"]["containers"][0]["command"]
    words = [changes.pop(word, word) for word in command]
    assert not changes
    with subprocess.Popen(words, env=cluster) as first, subprocess.Popen(words, env=cluster) as second:
        assert (first.wait(120), second.wait(120)) == (0, 0)
    assert_two_ranks_are_done()
