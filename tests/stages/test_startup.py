"""The default startup stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from pipeline import Context, GeneralTrainer, RunnerBase, StartupBase, stages
from pipeline.checkpoint import tensors
from pipeline.errors import CheckpointError


class Nothing(RunnerBase):
    """Trains nothing, and so leaves the weights as startup made them."""

    def run(self, context: Context) -> None:
        context["metrics"] = {}


def first_weights(config: dict[str, Any], **runner: Any) -> dict[str, Tensor]:
    """The weights of a train runner after startup."""
    config["runner"] = [{**config["runner"][0], "runner_class_path": Nothing, **runner}]
    weights: dict[str, Tensor] = GeneralTrainer(config).run()["model"]["line"]["model"].state_dict()
    return weights


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_train_runner_starts_from_what_the_constructors_made(config: dict[str, Any]) -> None:
    weights = first_weights(config)
    torch.manual_seed(0)
    assert equal(weights, config["phase"][0]["model"]().state_dict())


def trained(config: dict[str, Any]) -> tuple[Path, dict[str, Tensor]]:
    """The newest checkpoint of a training, and the weights that it ended with."""
    config["mode"] = "train"
    context = GeneralTrainer(config).run()
    del config["mode"]
    return context["run_dir"] / "train/checkpoints/step-000000000006", context["model"]["line"]["model"].state_dict()


@pytest.mark.parametrize("name", ["", "line.safetensors"])
def test_init_model_path_gives_a_train_runner_its_first_weights(config: dict[str, Any], name: str) -> None:
    path, weights = trained(config)
    assert equal(first_weights(config, init_model_path=str(path / name)), weights)


def test_init_model_path_gives_an_infer_runner_its_weights_without_a_training_before_it(config: dict[str, Any]) -> None:
    path, weights = trained(config)
    config["runner"] = [{**config["runner"][1], "init_model_path": str(path)}]
    assert equal(GeneralTrainer(config).run()["model"]["line"]["model"].state_dict(), weights)


def test_an_infer_runner_takes_init_model_path_before_the_newest_checkpoint(config: dict[str, Any]) -> None:
    path, _ = trained(config)
    earlier = path.with_name("step-000000000003")
    config["runner"][1]["init_model_path"] = str(earlier)
    with safe_open(earlier / "line.safetensors", framework="pt") as file:
        expected = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert equal(GeneralTrainer(config).run()["model"]["line"]["model"].state_dict(), expected)


def test_an_infer_runner_takes_the_newest_checkpoint_of_the_train_runner_before_it(config: dict[str, Any]) -> None:
    config["runner"].insert(0, {**config["runner"][0], "name": "other", "seed": 5})
    trainer = GeneralTrainer(config)
    weights = trainer.run()["model"]["line"]["model"].state_dict()
    assert equal(weights, trainer.contexts["train"]["model"]["line"]["model"].state_dict())
    assert not equal(weights, trainer.contexts["other"]["model"]["line"]["model"].state_dict())


def test_a_train_runner_that_saved_nothing_leaves_the_infer_runner_with_a_clear_error(config: dict[str, Any]) -> None:
    config["runner"][0]["runner_class_path"] = Nothing
    with pytest.raises(
        CheckpointError, match=r"train/checkpoints: the runner 'train' saved no checkpoint; .*init_model"
    ):
        GeneralTrainer(config).run()


def test_an_infer_runner_without_a_train_runner_before_it_is_refused(config: dict[str, Any]) -> None:
    class Network(stages.Network):
        pass

    config["runner"] = [{**config["runner"][1], "network_class_path": Network}]
    with pytest.raises(CheckpointError, match=r"runner.infer: no train runner before it .*; add init_model_path"):
        GeneralTrainer(config).run()


def test_a_startup_of_ones_own_may_load_init_model_path_by_the_helper_of_the_base(config: dict[str, Any]) -> None:
    class Mine(StartupBase):
        def startup(self, context: Context) -> None:
            self.load(context)

    path, weights = trained(config)
    assert equal(first_weights(config, startup_class_path=Mine, init_model_path=str(path)), weights)


def test_weights_that_do_not_fit_end_the_run_with_what_does_not(config: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "other.safetensors"
    file.write_bytes(tensors.encode(nn.Linear(3, 9).state_dict()))
    message = r"other.safetensors: phase 'line': does not fit the model: .*has 'weight', which the model does not"
    with pytest.raises(CheckpointError, match=message):
        first_weights(config, init_model_path=str(file))
