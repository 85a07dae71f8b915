"""Every runner key of an experiment: it works, or the run is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset

from pipeline import Context, ExperimentBase, GeneralTrainer, NetworkBase, hookimpl
from pipeline.config.schema import RunnerSchema
from pipeline.data.loader import make_loader
from pipeline.errors import ConfigError, DataError

Config = dict[str, Any]

# The number that each validation reports: the best is the third, and the last is the worst.
NUMBERS = [4.0, 3.0, 1.0, 5.0, 2.0, 6.0, 7.0, 8.0]


class Counting(ExperimentBase):
    """Counts its iterations in its only weight; 3 batches to an epoch."""

    def setup_dataloader(self) -> None:
        x = torch.arange(6.0).unsqueeze(1)
        self.train_loader = make_loader(TensorDataset(x, x), seed=0, batch_size=2)

    def setup_model(self) -> None:
        self.model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.model.weight)

    def train_batch(self) -> None:
        self.read_batch()
        with torch.no_grad():
            self.model.weight += 1
        deterministic = float(torch.are_deterministic_algorithms_enabled())
        self.visualizer.add_scalar("deterministic", deterministic, self.iteration)

    def valid(self) -> None:
        self.visualizer.add_scalar("valid_loss", NUMBERS[self.iteration - 1], self.iteration)


class NoNetwork(NetworkBase):
    """Builds nothing, because the experiment does."""

    def build_network(self, context: Context) -> None:
        """Build nothing."""


class Stopping:
    """A plugin that ends the run after an iteration, as a signal does."""

    def __init__(self, iteration: int) -> None:
        self.iteration = iteration

    @hookimpl
    def after_batch(self, context: Context) -> None:
        if context["train_state"]["iteration"] == self.iteration:
            context["is_exit"] = True


KEEP = {"metric": "valid_loss", "mode": "min"}


def config(**runner: Any) -> Config:
    own = {"name": "train", "class": "train", "device": "cpu", "max_steps": 8}
    own |= {"runner_class_path": Counting, "valid_interval": 1, "save_interval": 1}
    own |= runner
    return {
        "plugins": [{"progress_bar": False}],
        "runner": [{key: value for key, value in own.items() if value != "out"}],
    }


def iterations_saved(run_dir: Path) -> list[int]:
    folder = run_dir / "train" / "checkpoints"
    return sorted(int(path.name.partition("-")[2]) for path in folder.glob("step-*"))


def weight_of(path: Path) -> float:
    return load_file(path / "experiment.safetensors")["weight"].item()


def test_the_best_checkpoint_of_an_experiment_is_kept() -> None:
    context = GeneralTrainer(config(keep_best=KEEP)).run()

    assert iterations_saved(context["run_dir"]) == [3, 6, 7, 8]
    assert context["best"] == {**KEEP, "value": 1.0, "iteration": 3}


def test_as_many_best_checkpoints_as_asked_are_kept() -> None:
    """Of the numbers 4, 3, 1, 5, 2, 6, 7, 8 the best two have the iterations 3 and 5."""
    context = GeneralTrainer(config(keep_best={**KEEP, "count": 2}, keep_last=2)).run()

    assert iterations_saved(context["run_dir"]) == [3, 5, 7, 8]


def test_the_largest_number_is_the_best_with_max() -> None:
    context = GeneralTrainer(config(keep_best={**KEEP, "mode": "max"}, max_steps=4)).run()

    assert context["best"]["iteration"] == 4


def test_a_best_validation_between_two_saves_is_saved() -> None:
    context = GeneralTrainer(config(keep_best=KEEP, save_interval=8)).run()

    # Those of the iterations 1 to 3 were the best so far.
    assert iterations_saved(context["run_dir"]) == [2, 3, 8]
    assert weight_of(context["run_dir"] / "train" / "checkpoints" / "step-000000000003") == 3.0


def test_best_loads_the_best_weights_into_the_next_runner() -> None:
    data = config(keep_best=KEEP, keep_last=2)
    second = {"name": "second", "class": "train", "device": "cpu", "max_steps": 1}
    data["runner"].append({**second, "valid_interval": None, "init_model_path": "best"})
    data |= {
        "hyper_parameters": {"optimizer": {"class": "SGD", "lr": 0.0}},
        "dataset": [{"name": "data", "class_path": lambda: [(torch.ones(1), torch.ones(1))]}],
        "phase": [
            {
                "name": "experiment",
                "model": lambda: nn.Linear(1, 1, bias=False),
                "loss": nn.functional.mse_loss,
                "dataset_name": "data",
            }
        ],
    }
    data["runner"][0]["network_class_path"] = NoNetwork

    context = GeneralTrainer(data).run()

    assert context["model"]["experiment"].model.weight.item() == 3.0


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("stop", [2, 4, 6])
def test_a_resumed_experiment_keeps_the_best_of_both_parts(stop: int) -> None:
    data = config(keep_best=KEEP, keep_last=2)
    data["plugins"].append({f"{__name__}:Stopping": {"iteration": stop}})

    first = GeneralTrainer(data).run()
    context = GeneralTrainer(data, resume=str(first["run_dir"])).run()

    assert iterations_saved(context["run_dir"]) == [3, 7, 8]
    assert context["best"] == {**KEEP, "value": 1.0, "iteration": 3}


def test_a_number_that_no_validation_reports_is_an_error() -> None:
    with pytest.raises(DataError, match=r"keep_best watches 'valid_los'.*valid_loss"):
        GeneralTrainer(config(keep_best={**KEEP, "metric": "valid_los"})).run()


# Key -> a value that no experiment obeys.
REFUSED: Config = {
    "precision": "bf16",
    "eval_precision": "bf16",
    "grad_clip": 1.0,
    "grad_clip_value": 1.0,
    "accum_grad": 2,
    "nonfinite_patience": 0,
    "check_gradients": True,
    "compile": True,
    "compile_module_keys": "model",
    "compile_mode": "max-autotune",
    "compile_using_fullgraph": True,
    "compile_using_dynamic_shape_tracing": True,
    "jit": True,
    "jit_module_keys": "model",
    "overfit_batches": 1,
    "sync_batchnorm": True,
    "find_unused_parameters": True,
    "predictions": {},
    "save_inference_interval": 1,
    "save_inference_path": "elsewhere",
    "save_inference_export": True,
    "save_inference_dynamic": {"length": {"x": 1}},
    "init_modules": "model",
    "rename": {"a": "b"},
    "freeze": "model",
    # Without what switches them on.
    "debug_batches": 1,
    "debug_epochs": 1,
    "debug_persistently": True,
    "profile_warmup": 1,
    "profile_steps": 1,
    "worker_num": 2,
}


@pytest.mark.parametrize("key", REFUSED)
def test_a_key_that_an_experiment_ignores_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"runner\.train\.{key}\b"):
        GeneralTrainer(config(**{key: REFUSED[key]}))


def test_keep_best_without_validations_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"keep_best.*valid_interval"):
        GeneralTrainer(config(keep_best=KEEP, valid_interval=None))


def iteration_is(count: int) -> Callable[[Context], bool]:
    return lambda context: context["train_state"]["iteration"] == count


def saved_are(*iterations: int) -> Callable[[Context], bool]:
    return lambda context: iterations_saved(context["run_dir"]) == list(iterations)


# Key -> other keys of the runner, and what is true after the run.
WORKS: dict[str, tuple[Config, Callable[[Context], bool]]] = {
    "epochs": ({"epochs": 2, "max_steps": "out"}, iteration_is(6)),
    "max_steps": ({"max_steps": 5}, iteration_is(5)),
    "optimizer_step_limit": ({"optimizer_step_limit": 4}, iteration_is(4)),
    "limit_batches": ({"limit_batches": 2, "epochs": 2}, iteration_is(4)),
    "save_interval": ({"save_interval": 3, "keep_last": None}, saved_are(3, 6, 8)),
    "keep_last": ({"keep_last": 2}, saved_are(7, 8)),
    "keep_best": ({"keep_best": KEEP, "keep_last": 2}, saved_are(3, 7, 8)),
    "valid_interval": (
        {"valid_interval": 3, "max_steps": 5},
        lambda context: context["metrics"]["experiment"]["valid_loss"] == NUMBERS[4],
    ),
    "debug": ({"debug": True, "debug_batches": 1, "debug_epochs": 2}, iteration_is(2)),
    "profile_training": (
        {"profile_training": True, "profile_warmup": 1, "profile_steps": 2},
        lambda context: any((context["run_dir"] / "train" / "profiler").iterdir()),
    ),
    "deterministic": (
        {"deterministic": True},
        lambda context: context["metrics"]["experiment"]["deterministic"] == 1,
    ),
    "threads": ({"threads": 1}, lambda context: torch.get_num_threads() == 1),
    "seed": ({"seed": 7}, lambda context: torch.initial_seed() == 7),
    "device": ({"device": "cpu"}, lambda context: context["device"].type == "cpu"),
}

# Key -> the tests that show that an experiment obeys it, or that no stage reads it.
SHOWN_ELSEWHERE = {
    "max_time": "tests/training/test_max_time.py",
    "print_interval": "tests/stages/test_experiment.py",
    "on_save_error": "tests/training/test_loop.py",
    "init_model_path": "tests/stages/test_experiment.py",
    "noprogressbar": "tests/plugins/test_progress_bar.py",
    "strategy": "has one value",
    "collective_timeout": "tests/distributed/test_failing_ranks.py",
    "fleet_mode": "tests/distributed/test_launch.py",
    "phases": "the network stage reads it",
    "trainer_class": "tests/test_trainer.py",
    "max_stage_repeats": "tests/test_trainer.py",
    "name": "every test has one",
    "kind": "tests/check/test_experiment.py",
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("key", WORKS)
def test_a_key_of_an_experiment_works(key: str, one_thread: None) -> None:
    runner, holds = WORKS[key]

    context = GeneralTrainer(config(**runner)).run()

    assert holds(context)


def test_the_checkpoints_of_an_experiment_may_be_elsewhere(tmp_path: Path) -> None:
    GeneralTrainer(config(save_checkpoint_path=str(tmp_path))).run()

    assert any(tmp_path.rglob("step-000000000008/experiment.safetensors"))


def test_every_runner_key_works_or_is_refused() -> None:
    """A new key is to be added to one of the tables."""
    stages = ("instance", "network", "startup", "runner", "terminal")
    of_stages = {f"{stage}_{what}" for stage in stages for what in ("class_path", "args")}
    known = {*REFUSED, *WORKS, *SHOWN_ELSEWHERE, *of_stages, "save_checkpoint_path"}

    assert set(RunnerSchema.model_fields) == known
    assert not {*WORKS, *SHOWN_ELSEWHERE} & set(REFUSED)
