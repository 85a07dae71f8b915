"""What holds of every plugin that comes along; one that is added is tested here by its entry point alone."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import pipeline_plugins
import pytest
import torch
from click.testing import Result

from pipeline import ExperimentBase, GeneralTrainer, make_loader, testing
from pipeline.errors import ConfigError, PipelineError

POINTS = [point for point in entry_points(group="pipeline.plugins") if point.value.startswith("pipeline_plugins.")]
ARGUMENTS: dict[str, dict[str, Any]] = {
    "early_stopping": {"metric": "valid_loss", "patience": 2, "min_delta": 0.01},
    "ema": {"decay": 0.9, "every": 2, "start_epoch": 1},
    "metric_log": {"csv": True, "gradient_norm": True},
    "profiler": {"wait": 1, "active": 2},
}
"""Those with which a plugin does all that it can; of the others the defaults."""


def source_of(point: EntryPoint) -> str:
    """The text of its file."""
    return (
        Path(pipeline_plugins.__path__[0], *point.module.split(".")[1:]).with_suffix(".py").read_text(encoding="utf-8")
    )


STATEFUL = [point for point in POINTS if "def state_dict(" in source_of(point)]

CONFIG = """
    hyper_parameters: {optimizer: {class: SGD, learning_rate: 0.1, momentum: 0.9}}
    dataset:
      - {name: data, class_path: "{workspace}/data.py:Line", args: {size: 24}, batch_size: 4}
    runner:
      - {name: t, class: train, device: cpu, epochs: 3, print_interval: 4}
    phase:
      - name: line
        model: torch.nn.Linear
        model_args: {in_features: 1, out_features: 1}
        loss: torch.nn.functional.mse_loss
        dataset_name: data
        valid_dataset_name: data
"""


NEED_A_PHASE = {"ema", "lr_finder"}


def class_of(point: EntryPoint) -> type:
    """The class, where what it needs is installed."""
    try:
        plugin: type = point.load()
    except (ImportError, PipelineError) as error:
        pytest.skip(str(error))
    return plugin


@pytest.fixture
def config(linear: Path) -> Path:
    """A small training that every plugin can be added to."""
    linear.write_text(inspect.cleandoc(CONFIG), encoding="utf-8")
    return linear


every_plugin = pytest.mark.parametrize("point", POINTS, ids=[point.name for point in POINTS])


@every_plugin
def test_it_says_whether_every_process_has_one(point: EntryPoint) -> None:
    assert isinstance(vars(class_of(point)).get("every_rank"), bool)


@every_plugin
def test_plugin_is_in_a_module_of_its_name(point: EntryPoint) -> None:
    # One that has the name of a command is beside that command.
    assert point.module in {f"pipeline_plugins.{point.name}", f"pipeline_plugins.{point.name}.plugin"}


def files(config: Path, point: EntryPoint, *names: str) -> set[str]:
    """What a run with plugins of these names leaves; "#" for what may differ from run to run."""
    arguments = ARGUMENTS.get(point.name, {})
    plugins = [{"name": name, "class_path": point.name, "args": arguments} for name in names]
    folder = GeneralTrainer(config, [f"plugins={plugins}"]).run()["run_dir"]
    return {
        re.sub(r"[0-9a-f]{6,}|\d+", "#", str(path.relative_to(folder))) for path in folder.rglob("*") if path.is_file()
    }


@pytest.fixture(scope="module")
def plain_files(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """What a run without another plugin leaves."""
    folder = tmp_path_factory.mktemp("plain")
    config = testing.Workspace(folder / "workspace").config
    config.write_text(inspect.cleandoc(CONFIG), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return files(config, POINTS[0])


@pytest.mark.slow
@every_plugin
def test_two_of_a_kind_write_each_its_own_files(point: EntryPoint, config: Path, plain_files: set[str]) -> None:
    class_of(point)
    first, second, both = (files(config, point, *names) for names in (("a",), ("b",), ("a", "b")))
    assert both == first | second
    assert first & second == plain_files


@pytest.mark.slow
@every_plugin
def test_it_goes_with_an_experiment_that_is_written_by_hand_or_says_that_it_does_not(
    point: EntryPoint, pipeline: Callable[..., Result]
) -> None:
    class_of(point)
    assert pipeline("new", "mine", "--kind", "experiment").exit_code == 0
    plugins = [{"name": point.name, "class_path": point.name, "args": ARGUMENTS.get(point.name, {})}]
    trainer = GeneralTrainer("mine/config.yaml", [f"plugins={plugins}", "runner.train_runner.epochs=2"])
    if point.name in NEED_A_PHASE:
        with pytest.raises(ConfigError, match=f"take {point.name} out, or train with a phase"):
            trainer.run()
    else:
        assert trainer.run()["train_state"]["epoch"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("point", STATEFUL, ids=[point.name for point in STATEFUL])
def test_one_with_a_state_passes_the_test_of_resume(
    point: EntryPoint, config: Path, resume_test: Callable[..., Result]
) -> None:
    class_of(point)
    plugins = [{"name": point.name, "class_path": point.name, "args": ARGUMENTS.get(point.name, {})}]
    result = resume_test(config, f"plugins={plugins}", "runner.t.save_interval=1", "--at", "8")
    assert result.exit_code == 0, result.output
    assert "began anew" not in result.output


class ByHand(ExperimentBase):
    """Makes its updates itself, with no phase."""

    def setup_dataloader(self) -> None:
        self.train_loader = make_loader(torch.ones(8, 1), seed=0, batch_size=4)

    def setup_model(self) -> None:
        self.model = torch.nn.Linear(1, 1)

    def train_batch(self) -> None:
        self.model(self.read_batch())

    def valid(self) -> None: ...


@pytest.mark.parametrize(("name", "lack"), [("ema", "no phase of t has optim_schedulers"), ("lr_finder", "no updater")])
def test_one_that_needs_a_phase_says_so_in_an_experiment(name: str, lack: str) -> None:
    runner = {"name": "t", "class": "train", "device": "cpu", "epochs": 1, "runner_class_path": ByHand}
    with pytest.raises(ConfigError, match=f"{lack}.*; take {name} out, or train with a phase"):
        GeneralTrainer({"runner": [runner], "plugins": [name]}).run()
