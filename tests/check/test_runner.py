"""Whether the keys of a runner agree: what would be ignored, what contradicts, and what cannot be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.check.checker import check, inspect

Workspace = Callable[..., Path]
Faults = Callable[..., list[str]]

CONFIG = """\
hyper_parameters: {optimizer: {class: SGD, learning_rate: 0.1}}
dataset: [{name: points, class_path: "{workspace}/data.py:Points"}]
phase:
  - {name: line, model: torch.nn.Linear, model_args: {in_features: 1, out_features: 1}, loss: torch.nn.MSELoss, dataset_name: points,
     valid_dataset_name: points, metrics: {accuracy: {class: Accuracy}}}
runner:
  - name: learn
    class: train
    epochs: 2
    {}
  - name: judge
    class: infer
    {other}
"""
FILES = {
    "data.py": "class Points: ...\n",
    "own.py": """\
from pipeline import Brain, RunnerBase, hookimpl, stages

class Model(Brain):
    def compute_forward(self, batch, stage): ...
    def compute_objectives(self, predictions, batch, stage): ...

class Run(RunnerBase):
    def run(self, context): ...

class Longer(stages.Runner):
    def run(self, context): super().run(context)

class Net(stages.Network):
    def build_brain(self, model, phase, context): return super().build_brain(model, phase, context)

class Plugin:
    @hookimpl
    def after_validation(self, metrics): metrics["bleu"] = 1.0
""",
}


@pytest.fixture
def faults(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> Faults:
    """The faults of the config with these keys in its train runner, and others in its infer runner."""

    def found(keys: str, *overrides: str, other: str = "device: auto", valid: str = "points") -> list[str]:
        text = CONFIG.replace("{}", keys.replace("; ", "\n    ")).replace("{other}", other)
        text = text.replace("valid_dataset_name: points", f"valid_dataset_name: {valid}")
        monkeypatch.chdir(workspace({**FILES, "config.yaml": text}))
        return [str(fault).splitlines()[0] for fault in check("config.yaml", overrides)]

    return found


@pytest.mark.parametrize(
    "keys",
    [
        "precision: bf16; eval_precision: bf16; device: cpu",
        "precision: fp16; eval_precision: fp16",
        "use_amp: true; device: cuda",
        "max_steps: 5; optimizer_step_limit: 3; check_gradients: true; deterministic: true",
        "valid_interval: [2 epoch, 50]",
        "valid_interval: null",
        "keep_best: {metric: valid_loss, mode: min}",
        "keep_best: {metric: valid_accuracy, mode: max}",
        "compile: true; compile_module_keys: [model]; compile_mode: max-autotune; compile_using_fullgraph: true",
        "compile: true; compile_module_keys: a; jit: true; jit_module_keys: b",
        "jit: true",
        "limit_batches: 3",
        "sync_batchnorm: true; find_unused_parameters: true; fleet_mode: collective; worker_num: 2",
        "overfit_batches: 3",
        "compile_mode: default; debug_batches: 2; debug_epochs: 2; accum_grad: 1; valid_interval: 1 epoch",
        "compile: false; debug: false; debug_persistently: false; overfit_batches: null; keep_best: null",
    ],
)
def test_keys_that_agree_are_no_fault(faults: Faults, keys: str) -> None:
    assert faults(keys) == []


@pytest.mark.parametrize(
    ("keys", "fault"),
    [
        ("limit_batches: 3; overfit_batches: 2",
         "config.yaml:11:22: runner.learn.overfit_batches: contradicts limit_batches: 3; keep one of the two"),
        ("debug_batches: 3", "config.yaml:10:20: runner.learn.debug_batches: would be ignored: debug is off; remove it, or set debug: true"),
        ("debug: false; debug_epochs: 3",
         "config.yaml:11:19: runner.learn.debug_epochs: would be ignored: debug is off; remove it, or set debug: true"),
        ("debug_persistently: true",
         "config.yaml:10:25: runner.learn.debug_persistently: would be ignored: debug is off; remove it, or set debug: true"),
        ("compile_module_keys: [model]",
         "config.yaml:10:26: runner.learn.compile_module_keys: would be ignored: compile is off; remove it, or set compile: true"),
        ("compile_mode: max-autotune",
         "config.yaml:10:19: runner.learn.compile_mode: would be ignored: compile is off; remove it, or set compile: true"),
        ("compile_using_fullgraph: true",
         "config.yaml:10:30: runner.learn.compile_using_fullgraph: would be ignored: compile is off; remove it, or set compile: true"),
        ("compile_using_dynamic_shape_tracing: true",
         "config.yaml:10:42: runner.learn.compile_using_dynamic_shape_tracing: would be ignored: compile is off; remove it, or set compile: true"),
        ("compile: true; jit_module_keys: model",
         "config.yaml:11:22: runner.learn.jit_module_keys: would be ignored: jit is off; remove it, or set jit: true"),
        ("compile: true; jit: true", "config.yaml:11:10: runner.learn.jit: is on for all modules, and so is compile; "
         "name others in jit_module_keys than in compile_module_keys, or turn one of them off"),
        ("jit: true; compile: true; compile_module_keys: [b, a]", "config.yaml:10:10: runner.learn.jit: is on for a, b, and so is compile; "
         "name others in jit_module_keys than in compile_module_keys, or turn one of them off"),
        ("jit: true; jit_module_keys: [c, a]; compile: true; compile_module_keys: [b, a]",
         "config.yaml:10:10: runner.learn.jit: is on for a, and so is compile; "
         "name others in jit_module_keys than in compile_module_keys, or turn one of them off"),
        ("device: cpu; sync_batchnorm: true", "config.yaml:11:21: runner.learn.sync_batchnorm: is true, and device is 'cpu'; use GPUs, or remove it"),
        ("worker_num: 4", "config.yaml:10:17: runner.learn.worker_num: is the number of processes of a local_cluster_train; "
         "write that class, or remove it"),
        ("device: cpu; precision: fp16",
         "config.yaml:11:16: runner.learn.precision: is 'fp16', and device is 'cpu': fp16 needs a GPU; use bf16 or fp32"),
        ("device: cpu; use_amp: true",
         "config.yaml:11:14: runner.learn.precision: is 'fp16', and device is 'cpu': fp16 needs a GPU; use bf16 or fp32"),
        ("eval_precision: 16-mixed; device: cpu",
         "config.yaml:10:21: runner.learn.eval_precision: is 'fp16', and device is 'cpu': fp16 needs a GPU; use bf16 or fp32"),
        ("keep_best: {metric: valid_los, mode: min}",
         "config.yaml:10:25: runner.learn.keep_best.metric: nothing reports 'valid_los'; did you mean 'valid_loss'?"),
        ("keep_best: {metric: accuracy, mode: max}",
         "config.yaml:10:25: runner.learn.keep_best.metric: nothing reports 'accuracy'; did you mean 'valid_accuracy'?"),
        ("keep_best: {metric: q, mode: max}",
         "config.yaml:10:25: runner.learn.keep_best.metric: nothing reports 'q'; known: valid_accuracy, valid_loss"),
        ("keep_best: {metric: valid_loss, mode: min, mdoe: max}",
         "config.yaml:10:48: runner.learn.keep_best.mdoe: unknown key; did you mean 'mode'?"),
        ("keep_best: {metric: valid_loss, mode: min, counts: 2}",
         "config.yaml:10:48: runner.learn.keep_best.counts: unknown key; did you mean 'count'?"),
        ("valid_interval: null; keep_best: {metric: valid_loss, mode: min}",
         "config.yaml:11:16: runner.learn.keep_best: would be ignored: valid_interval is null; set it, or remove this"),
        ("valid_interval: []; eval_precision: bf16",
         "config.yaml:11:21: runner.learn.eval_precision: would be ignored: valid_interval is null; set it, or remove this"),
    ],
)  # fmt: skip
def test_keys_that_contradict_are_told_at_the_line_of_one_of_them(faults: Faults, keys: str, fault: str) -> None:
    assert faults(keys) == [fault]


@pytest.mark.parametrize(
    ("arguments", "valid", "hint"),
    [
        ("{metric: valid_acuracy}", "points", "which nothing reports; did you mean 'valid_accuracy'?"),
        ("{metric: line.valid_acuracy}", "points", "which nothing reports; did you mean 'line.valid_accuracy'?"),
        ("{}", "[points, others]", "watches 'valid_loss', which nothing reports"),
        ("{}", "null", "and no phase of learn is validated; add valid_dataset_name to one"),
    ],
)
def test_metric_of_plugin_that_nothing_reports_is_a_fault(
    faults: Faults, arguments: str, valid: str, hint: str
) -> None:
    """Without an argument it is the default of the constructor, which several datasets do not report."""
    found = faults("", f"plugins=[{{early_stopping: {arguments}}}]", valid=valid)
    assert [fault for fault in found if "plugin 'early_stopping' watches" in fault and hint in fault]


@pytest.mark.parametrize("metric", ["valid_accuracy", "line.valid_loss"])
def test_metric_of_plugin_that_a_phase_reports_is_no_fault(faults: Faults, metric: str) -> None:
    assert faults("", f"plugins=[{{early_stopping: {{metric: {metric}}}}}]") == []


@pytest.mark.parametrize(
    ("keys", "place"),
    [
        ("valid_interval: 10", "config.yaml:10:21: runner.learn.valid_interval"),
        ("eval_precision: bf16", "config.yaml:10:21: runner.learn.eval_precision"),
        ("keep_best: {metric: valid_loss, mode: min}", "config.yaml:10:16: runner.learn.keep_best"),
    ],
)
def test_what_needs_validation_needs_a_phase_with_data_for_it(faults: Faults, keys: str, place: str) -> None:
    why = "would be ignored: no phase of this runner has valid_dataset_name; add one, or remove this"
    assert faults(keys, valid="null") == [f"{place}: {why}"]


@pytest.mark.parametrize(
    ("keys", "override"),
    [
        ("valid_interval: 10", "phase.line.valid_dataset_name=null"),
        ("keep_best: {metric: valid_loss, mode: min}", "runner.learn.valid_interval=null"),
        ("compile: true; compile_mode: max-autotune", "runner.learn.compile=false"),
        ("save_inference_interval: 1; save_inference_export: true", "runner.learn.save_inference_interval=null"),
        ("debug: true; debug_persistently: true", "runner.learn.debug=false"),
        ("init_model_path: last.safetensors; init_modules: [model]", "runner.learn.init_model_path=null"),
    ],
)
def test_a_key_that_an_override_switches_off_is_a_note(faults: Faults, keys: str, override: str) -> None:
    assert faults(keys, override) == []
    notes = inspect("config.yaml", [override]).config.notes
    assert len([note for note in notes if "would be ignored" in note]) == 1


def test_a_key_that_the_config_itself_switches_off_is_a_fault_whatever_else_is_overridden(faults: Faults) -> None:
    found = faults("compile: false; compile_mode: max-autotune", "runner.learn.epochs=3")
    assert [fault.rpartition("would be")[2] for fault in found] == [
        " ignored: compile is off; remove it, or set compile: true"
    ]


@pytest.mark.parametrize(
    ("key", "column"),
    [
        ("max_steps: 5", 16), ("optimizer_step_limit: 5", 27), ("valid_interval: 5", 21), ("save_interval: 5", 20),
        ("keep_best: {metric: valid_loss, mode: min}", 16), ("grad_clip: 5", 16), ("accum_grad: 5", 17),
        ("nonfinite_patience: 5", 25), ("check_gradients: true", 22), ("overfit_batches: 5", 22), ("debug_epochs: 5", 19),
    ],
)  # fmt: skip
def test_what_is_about_training_would_be_ignored_by_an_infer_runner(faults: Faults, key: str, column: int) -> None:
    name = key.partition(":")[0]
    why = "would be ignored: an infer runner makes one pass; remove it"
    assert faults("seed: 1", other=key) == [f"config.yaml:13:{column}: runner.judge.{name}: {why}"]


def test_an_infer_runner_has_a_precision_of_its_own(faults: Faults) -> None:
    why = "would be ignored: an infer runner computes in eval_precision; set that"
    assert faults("seed: 1", other="precision: bf16") == [f"config.yaml:13:16: runner.judge.precision: {why}"]
    assert faults("seed: 1", other="eval_precision: bf16\n    limit_batches: 3\n    compile: true") == []
    why = "is 'fp16', and device is 'cpu': fp16 needs a GPU; use bf16 or fp32"
    assert faults("seed: 1", other="device: cpu\n    eval_precision: fp16") == [
        f"config.yaml:14:21: runner.judge.eval_precision: {why}"
    ]


@pytest.mark.parametrize(
    ("keys", "other", "fault"),
    [
        ("debug: true", "device: auto", "config.yaml:10:12: runner.learn.debug: is on here, and off for judge"),
        ("debug: false", "debug: true", "config.yaml:13:12: runner.judge.debug: is on here, and off for learn"),
        ("debug: true; debug_persistently: true", "debug: true",
         "config.yaml:11:25: runner.learn.debug_persistently: is on here, and off for judge"),
    ],
)  # fmt: skip
def test_runners_that_share_a_run_directory_are_debugged_together(
    faults: Faults, keys: str, other: str, fault: str
) -> None:
    why = "set it for all: all runners share one run directory, and that of a debug run is temporary"
    assert faults(keys, other=other) == [f"{fault}; {why}"]


def test_a_runner_that_mode_leaves_out_need_not_be_debugged(faults: Faults) -> None:
    assert faults("debug: true; debug_batches: 3; debug_epochs: 1; debug_persistently: true", "mode=learn") == []
    assert faults("debug: true", "mode=[learn, judge]", other="debug: true\n    debug_batches: 1") == []


@pytest.mark.parametrize(
    "overrides",
    [
        ["phase.line.model={workspace}/own.py", "phase.line.model_args={}", "phase.line.loss=null"],
        ["runner.learn.runner_class_path={workspace}/own.py:Longer"],
        ["runner.learn.network_class_path={workspace}/own.py:Net"],
        ["plugins=['{workspace}/own.py:Plugin']"],
        ["plugins=[{'{workspace}/own.py:Plugin': {}}]"],
    ],
)
def test_who_may_report_more_is_not_told_that_nothing_does(faults: Faults, overrides: list[str]) -> None:
    assert faults("keep_best: {metric: valid_bleu, mode: max}", *overrides) == []


def test_the_plugins_that_come_along_report_nothing(faults: Faults) -> None:
    place = "config.yaml:10:25: runner.learn.keep_best.metric"
    found = faults("keep_best: {metric: valid_bleu, mode: max}", "plugins=[progress_bar, {metric_log: false}]")
    assert found == [f"{place}: nothing reports 'valid_bleu'; did you mean 'valid_loss'?"]


def test_the_keys_of_a_runner_stage_of_ones_own_are_its_own_but_for_the_run_directory(faults: Faults) -> None:
    keys = (
        "limit_batches: 3; overfit_batches: 2; compile_mode: max-autotune; keep_best: {metric: q, mode: max, counts: 2}"
    )
    own = "runner.learn.runner_class_path={workspace}/own.py:Run"
    assert faults(f"{keys}; precision: fp16; device: cpu", own) == []
    (found,) = faults("debug_persistently: true", own)
    assert found.endswith("would be ignored: debug is off; remove it, or set debug: true")


def test_a_number_of_updates_says_how_long_to_train(faults: Faults) -> None:
    assert faults("optimizer_step_limit: 7", "runner.learn.epochs=null") == []


def test_the_best_may_be_of_each_of_several_datasets(faults: Faults) -> None:
    several = "phase.line.valid_dataset_name=[points, more]"
    more = 'dataset=[{name: points, class_path: "{workspace}/data.py:Points"}, {name: more, class_path: "{workspace}/data.py:Points"}]'
    assert faults("keep_best: {metric: more/accuracy, mode: max}", several, more) == []
    [fault] = faults("keep_best: {metric: valid_accuracy, mode: max}", several, more)
    assert fault.endswith("keep_best.metric: nothing reports 'valid_accuracy'; did you mean 'points/accuracy'?")


def test_a_dataset_of_several_that_is_not_there_is_a_fault(faults: Faults) -> None:
    found = faults("", "phase.line.valid_dataset_name=[points, pints]")
    assert [fault.partition(": ")[2] for fault in found] == [
        "phase.line.valid_dataset_name: there is no dataset 'pints'; did you mean 'points'?"
    ]


@pytest.mark.parametrize("plugin", ["early_stopping", "ema", "{name: stop, class_path: early_stopping}"])
def test_a_shipped_plugin_reports_no_number_of_its_own(faults: Faults, plugin: str) -> None:
    [fault] = faults("keep_best: {metric: valid_los, mode: min}", f"plugins=[{plugin}]")
    assert fault.endswith("runner.learn.keep_best.metric: nothing reports 'valid_los'; did you mean 'valid_loss'?")
