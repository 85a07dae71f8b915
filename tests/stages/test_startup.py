"""The default startup stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from pipeline import Context, GeneralTrainer, RunnerBase, StartupBase, stages
from pipeline.checkpoint import safetensors_io
from pipeline.errors import CheckpointError, ConfigError, ExitCode, NoCheckpointError


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
    expected = load_file(earlier / "line.safetensors")
    assert equal(GeneralTrainer(config).run()["model"]["line"]["model"].state_dict(), expected)


def test_an_infer_runner_takes_the_newest_checkpoint_of_the_train_runner_before_it(config: dict[str, Any]) -> None:
    config["runner"].insert(0, {**config["runner"][0], "name": "other", "seed": 5})
    trainer = GeneralTrainer(config)
    weights = trainer.run()["model"]["line"]["model"].state_dict()
    assert equal(weights, trainer.contexts["train"]["model"]["line"]["model"].state_dict())
    assert not equal(weights, trainer.contexts["other"]["model"]["line"]["model"].state_dict())


def test_a_train_runner_that_saved_nothing_leaves_the_infer_runner_with_a_clear_error(config: dict[str, Any]) -> None:
    config["runner"][0]["runner_class_path"] = Nothing
    with pytest.raises(CheckpointError, match=r"train/checkpoints: 'train' saved no checkpoint; .*init_model"):
        GeneralTrainer(config).run()


def test_an_infer_runner_without_a_train_runner_before_it_is_refused(config: dict[str, Any]) -> None:
    class Network(stages.Network):
        pass

    config["runner"] = [{**config["runner"][1], "network_class_path": Network}]
    with pytest.raises(
        CheckpointError, match=r"runner.infer: no train runner before it .*; name some in init_model_path"
    ):
        GeneralTrainer(config).run()


def test_a_startup_of_ones_own_may_load_init_model_path_by_the_helper_of_the_base(config: dict[str, Any]) -> None:
    class Mine(StartupBase):
        def startup(self, context: Context) -> None:
            self.load(context)

    path, weights = trained(config)
    assert equal(first_weights(config, startup_class_path=Mine, init_model_path=str(path)), weights)


def test_weights_that_do_not_fit_end_the_run_with_what_does_not(config: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "other.safetensors"
    file.write_bytes(safetensors_io.encode_tensors(nn.Linear(3, 9).state_dict()))
    message = r"other.safetensors: phase 'line': does not fit the model: .*has 'weight', which the model does not"
    with pytest.raises(CheckpointError, match=message):
        first_weights(config, init_model_path=str(file))


# Other checkpoints than the newest


def several(config: dict[str, Any], **runner: Any) -> GeneralTrainer:
    """A training that was better before it was over, and then a runner with these keys; both have run."""
    keep_best = {"metric": "valid_loss", "mode": "min"}
    config["runner"][0] |= {"epochs": 4, "keep_best": keep_best}
    config["hyper_parameters"]["optimizer"] = {"class": "SGD", "lr": 0.6}
    config["runner"][1] = {**config["runner"][1], **runner}
    trainer = GeneralTrainer(config)
    trainer.run()
    return trainer


def test_an_infer_runner_may_evaluate_the_best_checkpoint_of_the_train_runner_before_it(config: dict[str, Any]) -> None:
    contexts = several(config, init_model_path="best").contexts
    best, evaluated = contexts["train"]["best"], contexts["infer"]
    assert best["iteration"] < contexts["train"]["train_state"]["iteration"]
    assert evaluated["metrics"]["line"]["loss"] == best["value"]
    assert evaluated["train_state"]["iteration"] == best["iteration"]


def test_a_train_runner_may_begin_with_the_last_weights_of_the_one_before_it_and_counts_from_0(
    config: dict[str, Any],
) -> None:
    trainer = several(config, **{"class": "train", "epochs": 1}, init_model_path="last", runner_class_path=Nothing)
    first, second = trainer.contexts.values()
    assert equal(*(each["model"]["line"]["model"].state_dict() for each in (first, second)))
    assert (second["train_state"]["iteration"], second["checkpoints"]) == (0, {})


def test_a_runner_may_take_the_best_weights_of_another_run(config: dict[str, Any]) -> None:
    best = several(config).contexts["train"]
    other = {"run": str(best["run_dir"]), "which": "best"}
    config["runner"][1] |= {"init_model_path": other}
    again = GeneralTrainer({**config, "runner": config["runner"][1:]}).run()
    assert again["metrics"]["line"]["loss"] == best["best"]["value"]
    assert again["train_state"]["iteration"] == best["best"]["iteration"]


@pytest.mark.parametrize("below", ["train", "train/checkpoints", "."])
def test_a_train_runner_takes_the_newest_valid_checkpoint_of_a_folder(
    config: dict[str, Any], below: str, log_lines: list[str]
) -> None:
    path, _ = trained(config)
    expected = load_file(path.with_name("step-000000000003") / "line.safetensors")
    damage(path)
    assert equal(first_weights(config, init_model_path=str(path.parents[2] / below)), expected)
    assert any(line.startswith("WARNING") and path.name in line for line in log_lines)
    assert path.is_dir()


def damage(path: Path) -> None:
    file = path / "line.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def test_a_damaged_checkpoint_that_is_named_itself_is_an_error(config: dict[str, Any]) -> None:
    path, _ = trained(config)
    damage(path)
    with pytest.raises(CheckpointError, match=r"step-000000000006/line.safetensors: .*use another"):
        first_weights(config, init_model_path=str(path))
    assert path.is_dir()


class Damaging(stages.Terminal):
    """Ends a training with some of its checkpoints damaged."""

    def __init__(self, context: Context, steps: list[int]) -> None:
        super().__init__(context)
        self.steps = steps

    def terminal(self, context: Context) -> None:
        for step in self.steps:
            damage(context["checkpointer"].store.path_of(step))


def test_where_the_newest_is_damaged_an_infer_runner_takes_the_one_before(
    config: dict[str, Any], log_lines: list[str]
) -> None:
    config["runner"][0] |= {"terminal_class_path": Damaging, "terminal_args": {"steps": [6]}}
    context = GeneralTrainer(config).run()
    [path] = context["checkpoints"]
    assert path.name == "step-000000000003"
    assert equal(context["model"]["line"]["model"].state_dict(), load_file(path / "line.safetensors"))
    assert any(line.startswith("WARNING") and "step-000000000006" in line for line in log_lines)


def test_where_none_is_valid_an_infer_runner_ends_with_an_exit_code_of_its_own(config: dict[str, Any]) -> None:
    config["runner"][0] |= {"terminal_class_path": Damaging, "terminal_args": {"steps": [3, 6]}}
    trainer = GeneralTrainer(config)
    with pytest.raises(NoCheckpointError, match="train/checkpoints: none of its 2 checkpoints is valid"):
        trainer.run()
    assert trainer.outcome == ExitCode.NO_CHECKPOINT


def test_a_part_of_several_checkpoints_is_refused(config: dict[str, Any]) -> None:
    config["runner"][1] |= {"init_model_path": "{run_dir}/train", "init_modules": "0"}
    message = r"runner.infer.init_modules: is for one checkpoint, and there are 2, .*; name one in init_model_path"
    with pytest.raises(ConfigError, match=message):
        GeneralTrainer(config).run()
