"""What an experiment sets up, in which order, by hand and out of what the trainer has made."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from loguru import logger
from torch import nn

from pipeline import Context, ExperimentBase, GeneralTrainer
from pipeline.brain.checkpointer import Checkpointer
from pipeline.errors import ConfigError, StageError, StorageError
from pipeline.experiment.visualizers import JsonLines, PluginNumbers

STEPS = (
    "setup_device", "init_parallel", "setup_output_dir", "dump_config", "setup_visualizer", "setup_logger",
    "setup_checkpointer", "setup_dataloader", "setup_model",
)  # fmt: skip


class Line(ExperimentBase):
    """Trains on nothing, one batch to an epoch."""

    def __init__(self, config: Any, args: Any, width: int = 1) -> None:
        super().__init__(config, args)
        self.width = width

    def setup_dataloader(self) -> None:
        self.train_loader = [torch.zeros(2, 3)]

    def setup_model(self) -> None:
        self.model = nn.Linear(3, self.width)

    def train_batch(self) -> None:
        self.read_batch()

    def valid(self) -> None:
        pass


def args(**given: Any) -> Namespace:
    return Namespace(**{"device": "cpu", "nprocs": 1, "output": "out", "checkpoint_path": None, **given})


def config(**runner: Any) -> dict[str, Any]:
    """A runner named ``train`` whose runner stage is the experiment."""
    named = {"name": "train", "class": "train", "device": "cpu", "runner_class_path": Line, "max_steps": 2, **runner}
    return {"plugins": [{"progress_bar": False}], "runner": [named], "hyper_parameters": {"lr": 0.1}}


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The steps that are taken, in their order; joining other processes does nothing."""
    names: list[str] = []

    def noted(name: str, step: Callable[[Any], None]) -> Callable[[Any], None]:
        def take(self: Any) -> None:
            names.append(name)
            return None if name == "init_parallel" else step(self)

        return take

    for name in STEPS:
        monkeypatch.setattr(Line, name, noted(name, getattr(Line, name)))
    return names


@pytest.mark.parametrize("nprocs", [1, 2])
def test_the_steps_come_in_their_order_and_parallel_ones_where_there_are_several(
    called: list[str], nprocs: int
) -> None:
    experiment = Line({"training": {}}, args(nprocs=nprocs))
    experiment.setup()
    experiment.close()
    assert called == [name for name in STEPS if nprocs > 1 or name != "init_parallel"]
    assert (experiment.iteration, experiment.epoch) == (0, 0)


def test_as_a_stage_the_steps_come_in_the_same_order(called: list[str]) -> None:
    GeneralTrainer(config()).run()
    assert called == [name for name in STEPS if name != "init_parallel"]


def test_by_hand_everything_is_in_the_output_folder() -> None:
    experiment = Line(SimpleNamespace(training=SimpleNamespace(max_iteration=2), lr=0.1), args(output="a/b"))
    experiment.setup()
    experiment.logger.info("a line")
    experiment.logger.info("%d of %s", 1, "two")
    experiment.logger.info("%.2f%%", torch.tensor(0.125))
    experiment.logger.warning("{:.0%} left", 0.5)
    experiment.visualizer.add_scalar("loss", 1.0, 1)
    experiment.save()
    experiment.close()
    assert yaml.safe_load(Path("a/b/config.yaml").read_text()) == {"training": {"max_iteration": 2}, "lr": 0.1}
    lines = Path("a/b/worker_0.log").read_text().splitlines()
    assert [line.rpartition(" - ")[2] for line in lines] == ["a line", "1 of two", "0.12%", "50% left"]
    assert all(f"{__name__}:test_by_hand_everything" in line for line in lines)
    made = {str(path.relative_to("a/b")) for path in Path("a/b").glob("*")}
    assert made == {"config.yaml", "worker_0.log", "metrics.jsonl", "checkpoints"}
    assert isinstance(experiment.visualizer, JsonLines)


PARAKEETS = (
    "model", "optimizer", "train_loader", "valid_loader", "iterator", "logger", "visualizer", "output_dir", "checkpoint_dir",
)  # fmt: skip
"""The attributes that Parakeet's constructor sets to None."""


def test_the_attributes_are_there_before_setup_and_none() -> None:
    experiment = Line({"training": {}}, args())
    assert [getattr(experiment, name) for name in PARAKEETS] == [None] * len(PARAKEETS)
    assert (experiment.iteration, experiment.epoch) == (0, 0)


def test_setup_sets_them_and_the_iterator_is_there_from_the_first_epoch_on() -> None:
    experiment = Line({"training": {}}, args())
    experiment.setup()
    assert [name for name in PARAKEETS if getattr(experiment, name) is None] == [
        "optimizer",
        "valid_loader",
        "iterator",
    ]
    assert (experiment.checkpoint_dir, Path("out/checkpoints").is_dir()) == (Path("out/checkpoints"), True)
    experiment.new_epoch()
    assert [batch.shape for batch in experiment.iterator] == [(2, 3)]
    assert next(experiment.iterator, None) is None
    experiment.close()


def test_an_iterator_that_is_assigned_while_it_is_set_up_begins_no_epoch() -> None:
    class Early(Line):
        def setup_dataloader(self) -> None:
            super().setup_dataloader()
            self.iterator = iter(self.train_loader)

    states = [GeneralTrainer(config(runner_class_path=cls, max_steps=3)).run()["train_state"] for cls in (Line, Early)]
    assert states[0] == states[1]
    assert states[0]["epoch"] == 3


def test_checkpoints_go_to_a_checkpoint_dir_of_ones_own() -> None:
    class Elsewhere(Line):
        def setup_checkpointer(self) -> None:
            self.checkpoint_dir = self.output_dir / "kept"

    config = {"training": {"max_iteration": 1, "valid_interval": None, "save_interval": None}}
    experiment = Elsewhere(config, args())
    experiment.setup()
    experiment.run()
    assert [path.name for path in Path("out/kept").iterdir()] == ["step-000000000001"]


def test_the_config_may_be_set_until_it_is_written_and_not_after(monkeypatch: pytest.MonkeyPatch) -> None:
    class Setting(Line):
        def setup_output_dir(self) -> None:
            super().setup_output_dir()
            self.config.lr = 0.2

        def setup_model(self) -> None:
            super().setup_model()
            self.config.training.noise = 1

    experiment = Setting({"training": {"max_iteration": 2}}, args())
    message = r"config.training.noise = 1: comes after config.yaml was written; set it before setup\(\), or change config.clone"
    with pytest.raises(ConfigError, match=message):
        experiment.setup()
    experiment.close()
    assert yaml.safe_load(Path("out/config.yaml").read_text()) == {"training": {"max_iteration": 2}, "lr": 0.2}
    with pytest.raises(ConfigError, match=r"hyper_parameters.training.noise = 1: comes after config.yaml was written"):
        GeneralTrainer(config(runner_class_path=Setting)).run()


class Figure:
    """Writes one line."""

    def savefig(self, file: Any, **options: str) -> None:
        file.write(b"a figure")


def test_as_a_stage_figures_and_sounds_are_in_the_folder_of_the_runner() -> None:
    class Showing(Line):
        def valid(self) -> None:
            self.visualizer.add_figure("valid/plot", Figure(), self.iteration)
            self.visualizer.add_audio("tone", torch.zeros(4), self.iteration)

    run_dir = GeneralTrainer(config(runner_class_path=Showing, valid_interval=2)).run()["run_dir"]
    folder = run_dir / "train" / "visuals"
    names = [str(path.relative_to(folder)) for path in sorted(folder.rglob("*.*"))]
    assert names == ["tone-000000000002.wav", "valid/plot-000000000002.png"]


def test_by_hand_the_model_stands_in_a_context_of_its_own() -> None:
    experiment = Line({"training": {}}, args())
    experiment.setup()
    experiment.close()
    assert experiment.context["model"] == {"experiment": {"model": experiment.model}}
    assert experiment.device == torch.device("cpu")


def test_as_a_stage_what_the_trainer_has_made_is_adopted() -> None:
    seen = {}

    class Looking(Line):
        def train_batch(self) -> None:
            super().train_batch()
            seen.update(vars(self))

    context = GeneralTrainer(config(runner_class_path=Looking, runner_args={"width": 4})).run()
    assert seen["context"] is context
    assert seen["checkpointer"] is context["checkpointer"]
    assert seen["device"] is context["device"]
    assert seen["output_dir"] == context["run_dir"] / "train"
    assert seen["logger"].add == logger.add
    assert isinstance(seen["visualizer"], PluginNumbers)
    assert (seen["width"], seen["config"].lr, seen["args"].nprocs) == (4, 0.1, 1)


def test_as_a_stage_it_leaves_no_files_of_its_own() -> None:
    run_dir = GeneralTrainer(config()).run()["run_dir"]
    made = {path.name for path in (run_dir / "train").iterdir()}
    assert made == {"checkpoints", "done.json", "metrics.jsonl", "timing.jsonl", "results.json"}


def test_as_a_stage_it_keeps_what_the_network_stage_has_built() -> None:
    chosen = config()
    chosen["dataset"] = [{"name": "data", "class_path": lambda: [(torch.zeros(3), torch.zeros(1))]}]
    chosen["hyper_parameters"]["optimizer"] = {"class": "SGD", "lr": 0.1}
    mse = nn.functional.mse_loss
    chosen["phase"] = [{"name": "line", "model": lambda: nn.Linear(3, 1), "loss": mse, "dataset_name": "data"}]
    context = GeneralTrainer(chosen).run()
    assert list(context["model"]) == ["line", "experiment"]
    newest = Checkpointer(context["run_dir"] / "train" / "checkpoints").newest()
    assert newest
    assert {"line.safetensors", "experiment.safetensors"} <= {path.name for path in newest.iterdir()}


def test_several_processes_are_started_by_a_launcher() -> None:
    message = "args.nprocs: is 2, and there is one; start the script with torchrun --nproc-per-node 2"
    with pytest.raises(ConfigError, match=message):
        Line({"training": {}}, args(nprocs=2)).setup()


def test_a_device_that_is_not_there_is_told() -> None:
    with pytest.raises(ConfigError, match=r"args.device: is 'cuda:99', and this machine has \d+ GPU"):
        Line({"training": {}}, args(device="cuda:99")).setup()


@pytest.mark.parametrize("name", ["device", "nprocs", "output"])
def test_a_missing_argument_is_named(name: str) -> None:
    given = args()
    delattr(given, name)
    with pytest.raises(ConfigError, match=rf"args.{name}: there is no such setting; add it to the Namespace"):
        Line({"training": {}}, given).setup()


def test_an_output_folder_that_cannot_be_made_is_told() -> None:
    Path("out").write_text("")
    with pytest.raises(
        StorageError, match=r"out: cannot be written: File exists; free or repair the storage, or set args.output"
    ):
        Line({"training": {}}, args()).setup()


def test_a_loader_that_is_not_set_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Line, "setup_dataloader", lambda self: None)
    with pytest.raises(StageError, match=r"Line.setup_dataloader: has to set self.train_loader; give it batches"):
        GeneralTrainer(config()).run()


@pytest.mark.parametrize(("model", "kind"), [(None, "NoneType"), ({}, "dict")])
def test_a_model_that_is_no_module_is_told(monkeypatch: pytest.MonkeyPatch, model: Any, kind: str) -> None:
    monkeypatch.setattr(Line, "setup_model", lambda self: setattr(self, "model", model))
    message = f"Line.setup_model: self.model is a {kind}, not an nn.Module; set it to one, to an nn.ModuleDict"
    with pytest.raises(StageError, match=message):
        GeneralTrainer(config()).run()


def test_an_infer_runner_is_refused() -> None:
    context = Context(is_infer=True, runner_name="test")
    with pytest.raises(ConfigError, match=r"runner.test.class: is infer, and Line is an experiment, which trains"):
        Line.from_context(context)
