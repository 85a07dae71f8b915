"""Where a run computes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from pipeline import GeneralTrainer
from pipeline.errors import ConfigError, ExitCode
from pipeline.run import device

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


def test_cpu_is_the_cpu() -> None:
    assert device.resolve_device("cpu") == torch.device("cpu")


def test_auto_is_a_gpu_where_there_is_one_and_else_the_cpu() -> None:
    assert device.resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


@no_gpu
@pytest.mark.parametrize("name", ["cuda", "cuda:0", "cuda:3", "gpu"])
def test_a_gpu_that_the_machine_does_not_have_is_refused_with_how_many_it_has(name: str) -> None:
    with pytest.raises(ConfigError, match=f"'{name}'.* this machine has 0 GPUs; write cpu or auto") as caught:
        device.resolve_device(name)
    assert caught.value.exit_code == ExitCode.USAGE == 2


@no_gpu
def test_a_run_on_a_device_that_is_not_there_ends_before_it_leaves_anything(linear: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'cuda:1'.* this machine has 0 GPUs; write cpu or auto"):
        GeneralTrainer(linear, ["runner.train_runner.device=cuda:1"]).run()
    assert not (tmp_path / "cwd" / "runs").exists()


def test_the_hardware_is_told_as_data() -> None:
    told = device.describe_hardware()
    assert told["torch_threads"] == torch.get_num_threads()
    assert len(told["gpus"]) == torch.cuda.device_count()
    assert json.loads(json.dumps(told)) == told


@pytest.mark.parametrize("world_size", ["2", "16"])
def test_one_of_several_processes_is_refused(monkeypatch: pytest.MonkeyPatch, world_size: str) -> None:
    monkeypatch.setenv("WORLD_SIZE", world_size)
    with pytest.raises(
        ConfigError, match=f"WORLD_SIZE={world_size}: several processes are not yet possible; start one"
    ):
        device.refuse_several_processes()


@pytest.mark.parametrize("world_size", ["1", None])
def test_a_single_process_may_run_under_a_launcher_or_without(
    monkeypatch: pytest.MonkeyPatch, linear: Path, world_size: str | None
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if world_size:
        monkeypatch.setenv("WORLD_SIZE", world_size)
    context = GeneralTrainer(linear, ["runner.train_runner.epochs=1"]).run()
    assert (context["world_size"], context["rank"], context["local_rank"]) == (1, 0, 0)
