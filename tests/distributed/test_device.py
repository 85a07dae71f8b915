"""Where a run computes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from pipeline import GeneralTrainer
from pipeline.distributed import device
from pipeline.distributed.device import CUBLAS, deterministic
from pipeline.errors import ConfigError, ExitCode

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


@pytest.mark.parametrize("world_size", ["1", None])
def test_a_single_process_may_run_under_a_launcher_or_without(
    monkeypatch: pytest.MonkeyPatch, linear: Path, world_size: str | None
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if world_size:
        monkeypatch.setenv("WORLD_SIZE", world_size)
    context = GeneralTrainer(linear, ["runner.train_runner.epochs=1"]).run()
    assert (context["world_size"], context["rank"], context["local_rank"]) == (1, 0, 0)


def settings() -> tuple[bool, bool, bool, bool, str | None]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.benchmark,
        os.environ.get(CUBLAS),
    )


def put_in_no_order() -> torch.Tensor:
    """Two values for one place: on a CPU too, torch says that which of them wins is left to chance."""
    return torch.zeros(2).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))


def test_within_it_torch_takes_only_operations_that_repeat_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CUBLAS, raising=False)
    with deterministic():
        assert settings() == (True, False, True, False, ":4096:8")
        with pytest.raises(RuntimeError, match="put_ does not have a deterministic implementation"):
            put_in_no_order()
    assert put_in_no_order().shape == (2,)


@pytest.mark.parametrize(("given", "used"), [(None, ":4096:8"), (":16:8", ":16:8")])
def test_afterwards_all_is_as_it_was_even_after_an_error(
    monkeypatch: pytest.MonkeyPatch, given: str | None, used: str
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    monkeypatch.setenv(CUBLAS, given) if given else monkeypatch.delenv(CUBLAS, raising=False)
    before = settings()
    with pytest.raises(RuntimeError, match="put_ does not have"), deterministic():
        put_in_no_order() if os.environ[CUBLAS] == used else None
    assert settings() == before


def test_a_setting_that_only_warns_comes_back() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with deterministic():
            assert settings()[:2] == (True, False)
        assert settings()[:2] == (True, True)
    finally:
        torch.use_deterministic_algorithms(False)
