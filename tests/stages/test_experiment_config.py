"""The settings of an experiment, whatever they are made of."""

from __future__ import annotations

import copy
import json
import math
import struct
import sys
import wave
from argparse import Namespace
from http import HTTPStatus
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import yaml

from pipeline import Context
from pipeline.config import yaml_tree
from pipeline.config.load import ConfigBuilder
from pipeline.config.schema import Interval
from pipeline.errors import ConfigError, StageError, StorageError
from pipeline.experiment import experiment_config
from pipeline.experiment.experiment_config import MissingSettingError, Settings
from pipeline.experiment.visualizers import JsonLines, PluginNumbers
from pipeline.hookspecs import hookimpl
from pipeline.user_code.plugins import plugin_manager


@pytest.fixture
def config() -> Settings:
    return Settings({"lr": 0.1, "training": {"max_iteration": 7, "steps": [1]}, "values": 3}, "config")


def test_keys_are_attributes_at_any_depth(config: Settings) -> None:
    assert (config.lr, config.training.max_iteration) == (0.1, 7)
    assert config["training"]["steps"] == [1]
    assert dict(**config.training) == {"max_iteration": 7, "steps": [1]}
    assert (len(config), list(config), config["values"]) == (3, ["lr", "training", "values"], 3)


def test_a_missing_key_names_itself_and_the_nearest(config: Settings) -> None:
    message = r"config.training.max_iteratoin: there is no such setting; did you mean 'max_iteration'\?"
    with pytest.raises(MissingSettingError, match=message):
        _ = config.training.max_iteratoin
    with pytest.raises(ConfigError, match=r"config.xy: there is no such setting; known: lr, training, values"):
        _ = config["xy"]


def test_a_missing_key_is_one_for_python_too(config: Settings) -> None:
    assert not hasattr(config, "xy")
    assert "xy" not in config
    assert (config.get("xy"), getattr(config, "xy", 1)) == (None, 1)


def test_settings_may_be_copied_and_shown(config: Settings) -> None:
    assert copy.deepcopy(config).training.max_iteration == 7
    assert repr(Settings({"lr": 1}, "config")) == "Settings({'lr': 1})"


def test_what_becomes_of_the_mapping_is_seen() -> None:
    training: dict[str, int] = {}
    config = Settings({"training": training}, "config")
    training["max_iteration"] = 3
    assert config.training.max_iteration == 3


def test_what_is_set_is_seen_and_stands_in_the_mapping() -> None:
    values: dict[str, Any] = {"training": {"max_iteration": 7}}
    config = Settings(values, "config")
    config.training.max_iteration = 5
    config["lr"] = 0.1
    assert (config.training.max_iteration, config.lr) == (5, 0.1)
    assert values == {"training": {"max_iteration": 5}, "lr": 0.1}


def test_a_mapping_that_cannot_be_changed_says_so() -> None:
    config = Settings(MappingProxyType({}), "config")
    with pytest.raises(
        ConfigError, match=r"config.lr = 1: this mappingproxy cannot be changed; change config.clone\(\)"
    ):
        config.lr = 1
    clone = config.clone()
    clone.lr = 1
    assert (clone.lr, "lr" in config) == (1, False)


class Node(dict[str, Any]):
    """Has ``is_frozen``, as a CfgNode of yacs has, which only refuses attributes by itself."""

    frozen = False

    def is_frozen(self) -> bool:
        return self.frozen


def test_a_config_that_its_owner_has_frozen_stays_as_it_is() -> None:
    node = Node(lr=0.1, training=Node(noise=1))
    config = Settings(node, "config")
    config.lr = 0.2
    node.frozen = node["training"].frozen = True
    for settings, name in ((config, "config.lr"), (config.training, "config.training.lr")):
        with pytest.raises(ConfigError, match=rf"{name} = 0.3: this Node cannot be changed; change config.clone\(\)"):
            settings.lr = 0.3
    assert node == {"lr": 0.2, "training": {"noise": 1}}


def test_what_is_frozen_cannot_be_set_at_any_depth_and_its_clone_can(config: Settings) -> None:
    training = config.training
    experiment_config.freeze(config)
    message = r"comes after config.yaml was written; set it before setup\(\), or change config.clone\(\)"
    for settings, name in (
        (config, "config.lr"),
        (training, "config.training.lr"),
        (config.training, "config.training.lr"),
    ):
        with pytest.raises(ConfigError, match=rf"{name} = 2: {message}"):
            settings.lr = 2
    clone = config.clone()
    clone.lr = clone.training.lr = 2
    clone.training.steps.append(3)
    assert (clone.lr, clone.training.lr, clone.training.steps) == (2, 2, [1, 3])
    assert (config.lr, dict(training)) == (0.1, {"max_iteration": 7, "steps": [1]})
    experiment_config.freeze(clone)
    with pytest.raises(ConfigError, match=rf"config.training.lr = 3: {message}"):
        clone.training.lr = 3


def test_a_config_prints_as_yaml(config: Settings) -> None:
    assert str(config) == "lr: 0.1\ntraining:\n  max_iteration: 7\n  steps:\n  - 1\nvalues: 3"
    assert yaml.safe_load(f"{config}") == {"lr": 0.1, "training": {"max_iteration": 7, "steps": [1]}, "values": 3}


@pytest.mark.parametrize("kind", [SimpleNamespace, Namespace, dict])
def test_a_setting_is_found_in_objects_and_mappings_alike(kind: Any) -> None:
    config = experiment_config.attribute_view(
        kind(training=kind(max_iteration=7, valid_interval=[2, "1 epoch"])), "config"
    )
    assert experiment_config.max_iteration(config) == 7
    assert experiment_config.intervals(config, "valid_interval") == [Interval(2, "iteration"), Interval(1, "epoch")]
    with pytest.raises(ConfigError, match=r"config.training.save_interval: there is no such setting"):
        experiment_config.intervals(config, "save_interval")


@pytest.mark.parametrize("value", [0, -1, True, "7", None])
def test_max_iteration_is_a_positive_number(value: Any) -> None:
    config = Settings({"training": {"max_iteration": value}}, "config")
    with pytest.raises(ConfigError, match=rf"config.training.max_iteration: is {value!r}; write a positive number"):
        experiment_config.max_iteration(config)


def test_a_wrong_interval_says_where_and_what_to_write() -> None:
    config = Settings({"training": {"valid_interval": "1 epohc"}}, "config")
    with pytest.raises(ConfigError, match=r"config.training.valid_interval: is '1 epohc'; write a positive number"):
        experiment_config.intervals(config, "valid_interval")


def test_plain_data_is_made_of_mappings_and_objects() -> None:
    config = SimpleNamespace(lr=0.1, model=Settings({"layers": (1, Path("a"))}, "model"), kind=int, none=None)
    assert experiment_config.plain(config) == {
        "lr": 0.1,
        "model": {"layers": [1, "a"]},
        "kind": "<class 'int'>",
        "none": None,
    }


def test_numbers_of_other_libraries_are_plain_numbers() -> None:
    config = {
        "a": numpy.float32(0.5),
        "b": numpy.float64(0.5),
        "c": HTTPStatus.OK,
        "d": torch.tensor([1, 2]),
        "e": torch.relu,
    }
    text = yaml_tree.dump(experiment_config.plain(config))
    assert yaml.safe_load(text) == {"a": 0.5, "b": 0.5, "c": 200, "d": [1, 2], "e": str(torch.relu)}


# As a stage.


def context(hyper_parameters: dict[str, Any] | None = None, **runner: Any) -> Context:
    """What the settings of a stage are made of."""
    named = {"name": "train", "class": "train", **runner}
    draft = ConfigBuilder({"runner": [named], "phase": [], "hyper_parameters": hyper_parameters or {}})
    run = {"device": torch.device("cpu"), "world_size": 1, "run_dir": Path("/run"), "runner_name": "train"}
    return Context(runner=draft.config.runner("train"), hyper_parameters=hyper_parameters or {}, **run)


def test_training_has_the_runners_keys_and_those_of_hyper_parameters() -> None:
    made = context({"training": {"noise": 2}}, max_steps=7, valid_interval=3, save_interval=[5, "1 epoch"])
    assert experiment_config.training_of(made) == {
        "noise": 2, "valid_interval": 3, "save_interval": [5, "1 epoch"], "max_iteration": 7,
    }  # fmt: skip


def test_max_iteration_is_missing_while_it_depends_on_an_epoch() -> None:
    assert experiment_config.training_of(context(max_steps=7, epochs=2)) == {
        "valid_interval": "1 epoch", "save_interval": "1 epoch"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("training", "message"),
    [
        (3, "hyper_parameters.training: is 3; write a mapping such as {max_iteration: 1000}, or give it another name"),
        ({"max_iteration": 3}, "hyper_parameters.training.max_iteration: would be ignored: the runner's `max_steps`"),
        ({"save_interval": 3}, "hyper_parameters.training.save_interval: would be ignored: the runner's `save_interval`"),
    ],
)  # fmt: skip
def test_a_training_that_the_runner_contradicts_is_refused(training: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        experiment_config.training_of(context({"training": training}, max_steps=7))


def test_the_config_of_a_stage_is_the_hyper_parameters_and_training() -> None:
    config = experiment_config.config_of(
        context({"lr": 0.1, "training": {"noise": 1}}), {"noise": 1, "max_iteration": 7}
    )
    assert (config.lr, config.training.max_iteration, config.training.noise) == (0.1, 7, 1)
    with pytest.raises(ConfigError, match=r"hyper_parameters.lrr: there is no such setting; did you mean 'lr'"):
        _ = config.lrr


@pytest.mark.parametrize(
    ("name", "key"),
    [("max_iteration", "max_steps"), ("valid_interval", "valid_interval"), ("save_interval", "save_interval")],
)
def test_what_the_runner_says_cannot_be_set_in_a_stage(name: str, key: str) -> None:
    config = experiment_config.config_of(context({"lr": 0.1}), {"max_iteration": 7})
    message = rf"hyper_parameters.training.{name} = 5: would be ignored: the runner's `{key}` says it; write it there"
    with pytest.raises(ConfigError, match=message):
        setattr(config.training, name, 5)
    with pytest.raises(ConfigError, match=r"training = {}: would be ignored: the config says it; write it there"):
        config.training = {}


def test_the_config_of_a_stage_freezes_whole() -> None:
    config = experiment_config.config_of(Context(hyper_parameters={"lr": 0.1}), {"noise": 0.5})
    experiment_config.freeze(config)
    for settings in (config, config.training):
        with pytest.raises(ConfigError, match=r"lr = 2: comes after config.yaml was written"):
            settings.lr = 2
    clone = config.clone()
    clone.training.max_iteration = 3
    assert str(clone) == "lr: 0.1\ntraining:\n  noise: 0.5\n  max_iteration: 3"


def test_what_else_is_set_in_a_stage_is_seen() -> None:
    made = context({"lr": 0.1, "training": {"noise": 1}})
    config = experiment_config.config_of(made, experiment_config.training_of(made))
    config.lr, config.training.noise = 0.2, 2
    assert (config.lr, config.training.noise) == (0.2, 2)


def test_the_args_of_a_stage_are_the_runs() -> None:
    made = vars(experiment_config.args_of(context(init_model_path="/weights.safetensors")))
    assert made == {
        "device": "cpu", "nprocs": 1, "output": "/run/train", "checkpoint_path": "/weights.safetensors",
    }  # fmt: skip


def test_iterations_without_epochs_and_max_steps_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"runner.train: does not say how long to train; add `epochs:` or"):
        experiment_config.iterations_of(context(), [])


class Heard:
    """A plugin that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, dict[str, float]]] = []
        self.shown: list[Any] = []

    @hookimpl
    def on_print_interval(self, phase: str, metrics: dict[str, float]) -> None:
        self.told.append((phase, metrics))

    @hookimpl
    def on_visual(self, phase: str, tag: str, path: Path, step: int) -> None:
        self.shown.append((phase, tag, path, step))


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def numbers(heard: Heard) -> PluginNumbers:
    """In an epoch, with no iteration done."""
    plugins = plugin_manager()
    plugins.register(heard)
    made = PluginNumbers(Context(hooks=plugins.hook, train_state={"iteration": 0}), Path())
    made.begin_epoch()
    return made


def test_each_number_is_a_json_line() -> None:
    lines = JsonLines(Path("metrics.jsonl"))
    for step, value in enumerate([0.5, torch.tensor(2.0, requires_grad=True), math.nan, 3]):
        lines.add_scalar("loss", value, numpy.int64(step))  # type: ignore[arg-type]
    lines.close()
    written = [json.loads(line) for line in Path("metrics.jsonl").read_text().splitlines()]
    assert written == [{"step": step, "name": "loss", "value": value} for step, value in enumerate([0.5, 2, None, 3])]


def test_json_lines_are_added_to_what_is_there_also_after_closing() -> None:
    for steps in ((1, 2), (3,)):
        lines = JsonLines(Path("metrics.jsonl"))
        for step in steps:
            lines.add_scalar("loss", 0, step)
            lines.close()
    assert [json.loads(line)["step"] for line in Path("metrics.jsonl").read_text().splitlines()] == [1, 2, 3]


def test_plugins_are_told_the_mean_since_the_last_time(numbers: PluginNumbers, heard: Heard) -> None:
    for values in ([1.0, torch.tensor(3.0)], [5.0]):
        for value in values:
            numbers.add_scalar("loss", value, 1)
        numbers.print()
    assert heard.told == [("experiment", {"loss": 2.0}), ("experiment", {"loss": 5.0})]


def test_the_epoch_has_the_means_of_all_its_numbers(numbers: PluginNumbers) -> None:
    for value in (1.0, 3.0, 5.0):
        numbers.add_scalar("loss", value, 1)
        numbers.print()
    assert numbers.of_training() == {"loss": 3.0}
    numbers.begin_epoch()
    assert numbers.of_training() == {}


def test_a_validation_has_its_own_numbers(numbers: PluginNumbers, heard: Heard) -> None:
    def valid() -> None:
        numbers.add_scalar("loss", 4.0, 0)
        numbers.add_scalar("loss", 6.0, 0)

    numbers.add_scalar("loss", 1.0, 1)
    assert numbers.of_validation(valid) == {"loss": 5.0}
    numbers.print()
    assert heard.told == [("experiment", {"loss": 1.0})]


def test_a_validation_that_fails_is_over(numbers: PluginNumbers) -> None:
    def valid() -> None:
        raise OverflowError

    with pytest.raises(OverflowError):
        numbers.of_validation(valid)
    assert numbers.validation is None


def test_a_step_that_is_no_iteration_is_warned_of_once(numbers: PluginNumbers, log_lines: list[Any]) -> None:
    for step in (0, 1):
        numbers.add_scalar("loss", 1.0, step)
    assert log_lines == []
    for step in (5, 6):
        numbers.add_scalar("rate", 1.0, step)
    assert [line.strip() for line in log_lines] == [
        "WARNING visualizer: 'rate' is given for step 5; the plugins are told iteration 0"
    ]


# Figures and sounds.


class Figure:
    """Writes what it is asked for."""

    def savefig(self, file: Any, **options: str) -> None:
        file.write(options["format"].encode())


def test_a_figure_is_written_by_its_own_savefig() -> None:
    JsonLines(Path("metrics.jsonl")).add_figure("valid/alignment", Figure(), 12)
    assert Path("visuals/valid/alignment-000000000012.png").read_bytes() == b"png"
    assert not Path("metrics.jsonl").exists()


def test_a_figure_of_pyplot_is_closed_and_another_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[Any] = []
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", SimpleNamespace(Figure=Figure, close=closed.append))
    figures = [Figure(), SimpleNamespace(savefig=Figure().savefig)]
    for step, figure in enumerate(figures):
        JsonLines(Path("metrics.jsonl")).add_figure("plot", figure, step)
    assert closed == figures[:1]


@pytest.mark.parametrize("of", [list, torch.tensor, lambda values: torch.tensor([values], requires_grad=True)])
def test_a_sound_is_a_wav_of_16_bits_as_visualdl_has_it(of: Any) -> None:
    JsonLines(Path("metrics.jsonl")).add_audio("tone", of([0.0, 0.5, -0.5, 1.0, -1.0, 2.0]), 3, sample_rate=22050)
    with wave.open("visuals/tone-000000000003.wav") as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 2, 22050)
        # int(32767 * x), of what is clipped to -1 .. 1.
        assert struct.unpack("<6h", file.readframes(9)) == (0, 16383, -16383, 32767, -32767, 32767)


def test_a_sound_of_numpys_may_run_backwards() -> None:
    JsonLines(Path("metrics.jsonl")).add_audio("tone", numpy.array([0.5, 1.0])[::-1], 3)
    with wave.open("visuals/tone-000000000003.wav") as file:
        assert struct.unpack("<2h", file.readframes(9)) == (32767, 16383)


def test_the_rate_of_a_sound_is_8000_unless_it_is_said() -> None:
    JsonLines(Path("metrics.jsonl")).add_audio("tone", [0.0, 0.1], 3)
    with wave.open("visuals/tone-000000000003.wav") as file:
        assert file.getframerate() == 8000


@pytest.mark.parametrize(
    ("sound", "what"),
    [
        (torch.zeros(2, 3), r"torch.float32 and of the shape \[2, 3\]"),
        (torch.zeros(3, dtype=torch.int16), r"torch.int16 and of the shape \[3\]"),
        ([0.0, math.nan], r"torch.float32 and of the shape \[2\]"),
    ],
)
def test_what_is_no_sound_is_refused(sound: Any, what: str) -> None:
    message = f"visualizer.add_audio: 'tone' is of {what}; give it one channel of finite floats from -1 to 1"
    with pytest.raises(StageError, match=message):
        JsonLines(Path("metrics.jsonl")).add_audio("tone", sound, 1)
    assert not Path("visuals").exists()


def test_what_is_no_figure_is_refused() -> None:
    message = (
        "visualizer.add_figure: 'plot' is a list, which has no savefig; give it a figure, such as one of matplotlib's"
    )
    with pytest.raises(StageError, match=message):
        JsonLines(Path("metrics.jsonl")).add_figure("plot", [], 1)


@pytest.mark.parametrize("tag", ["../plot", "/tmp/plot", "a/../../plot"])
def test_a_tag_does_not_lead_out_of_the_folder(tag: str) -> None:
    with pytest.raises(StageError, match=rf"visualizer: '{tag}-0+1.png' is outside of visuals; take / and .. out"):
        JsonLines(Path("metrics.jsonl")).add_figure(tag, Figure(), 1)


def test_storage_that_refuses_a_figure_is_told() -> None:
    Path("visuals").write_text("")
    with pytest.raises(StorageError, match=r"visuals.*; free or repair the storage, or set output_dir or args.output"):
        JsonLines(Path("metrics.jsonl")).add_figure("plot", Figure(), 1)


def test_plugins_are_told_of_what_was_written(numbers: PluginNumbers, heard: Heard) -> None:
    numbers.add_figure("plot", Figure(), 4)
    numbers.add_audio("tone", [0.0, 0.5], 5)
    assert heard.shown == [
        ("experiment", "plot", Path("visuals/plot-000000000004.png"), 4),
        ("experiment", "tone", Path("visuals/tone-000000000005.wav"), 5),
    ]
