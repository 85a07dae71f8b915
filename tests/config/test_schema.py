"""Every key of the schema takes what it should, has its default, and refuses the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pipeline.config.load import Config
from pipeline.config.schema import SECTIONS, ConfigSchema, Interval, parse_intervals

Configs = Callable[..., Config]
Faults = Callable[..., list[str]]

TEXTS = {
    "dataset": "dataset:\n  - name: x\n    class_path: a.B\n    {}\n",
    "phase": "phase:\n  - name: x\n    {}\n",
    "runner": "runner:\n  - name: x\n    class: train\n    {}\n",
    "": "# the top\n{}\n",
}
"""Section -> a config without faults, with room for one more line in that section."""

INTERVAL = "write a positive number of iterations, or '5 update', '2 epoch', '30 second', '10 minute', '1 hour'; null for never"
CLASS_PATH = "write a class path such as '{workspace}/file.py:Name' or 'package.module:Name'"
STAGES = ("instance", "network", "startup", "runner", "terminal")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("device", "auto"), ("epochs", None), ("max_steps", None), ("print_interval", 50), ("save_interval", "1 epoch"),
        ("init_model_path", None), ("init_modules", None), ("freeze", None), ("predictions", None), ("seed", 0), ("grad_clip", None),
        ("nonfinite_patience", 3), ("phases", None), ("trainer_class", "pipeline.trainer:GeneralTrainer"),
        ("max_stage_repeats", 100), ("precision", "fp32"), ("eval_precision", "fp32"), ("optimizer_step_limit", None), ("max_time", None),
        ("valid_interval", "1 epoch"), ("keep_best", None), ("deterministic", False), ("check_gradients", False),
        ("compile", False), ("compile_module_keys", None), ("compile_mode", "default"), ("compile_using_fullgraph", False),
        ("compile_using_dynamic_shape_tracing", None), ("jit", False), ("jit_module_keys", None), ("limit_batches", None),
        ("overfit_batches", None), ("debug", False), ("debug_batches", 2), ("debug_epochs", 2), ("debug_persistently", False),
        ("save_checkpoint_path", None), ("save_inference_interval", None), ("save_inference_path", None),
        ("save_inference_export", False), ("threads", None), ("noprogressbar", False), ("profile_training", False),
        ("profile_warmup", 5), ("profile_steps", 5),
        *((f"{stage}_class_path", f"pipeline.stages.{stage}:{stage.capitalize()}") for stage in STAGES),
        *((f"{stage}_args", {}) for stage in STAGES),
    ],
)  # fmt: skip
def test_a_runner_key_has_its_default(config: Configs, key: str, value: Any) -> None:
    found = config("runner: [{name: x, class: train}]")
    assert found.get(f"runner.x.{key}", "absent") == value
    assert (f"runner.x.{key}", "default") in [(address, str(node.origin)) for address, node in found.tree.walk()]


def test_every_other_key_has_its_default(config: Configs) -> None:
    found = config("dataset: [{name: d, class_path: a.B}]\nphase: [{name: p}]")
    assert found.get("dataset") == [
        {"name": "d", "class_path": "a.B", "data_converter": None, "reader_class_name": None, "type": None, "args": {}, "batch_size": 1, "global_batch_size": None,
         "shuffle": False, "shuffle_buffer": 0, "drop_last": False, "sampler": None, "batch_sampler": None, "whole_batches": False, "resume": None, "num_workers": 0,
         "multiprocessing_context": None, "timeout": None, "persistent_workers": False, "prefetch_factor": None,
         "worker_init_fn": None, "pin_memory": None, "collate_fn": None, "collate_args": {}, "limit_batches": None,
         "data_path": None, "sparse_slots": None, "dense_slots": None, "ignored_slots": None, "delimiter": None, "columns": None, "padding": None, "target": None,
         "hash_size": None, "on_bad_line": None, "shuffle_filelist": None, "cache": None}
    ]  # fmt: skip
    assert found.get("phase") == [
        {"name": "p", "model": None, "model_args": {}, "modules": {}, "model_of": None, "loss": None, "count_samples": None, "metrics": {}, "train_metrics": {},
         "optim_schedulers": {}, "updater": None, "dataset_name": None, "valid_dataset_name": None}
    ]  # fmt: skip
    assert {key: found.get(key) for key in ("mode", "output_dir", "plugins", "hyper_parameters")} == {
        "mode": None, "output_dir": "runs", "plugins": [], "hyper_parameters": {}
    }  # fmt: skip


def test_defaults_of_two_configs_are_not_shared(config: Configs) -> None:
    first = config("phase: [{name: p}]")
    first.settings.phase[0].model_args["x"] = 1
    assert config("phase: [{name: p}]").settings.phase[0].model_args == {}


@pytest.mark.parametrize(
    ("section", "line", "message"),
    [
        ("", "workspace: 5", "workspace: is 5, a whole number; write a string"),
        ("", "mode: 5", "mode: is 5, a whole number; write a list"),
        ("", "mode: [5]", "mode.0: is 5, a whole number; write a string"),
        ("", "output_dir: [a]", "output_dir: is ['a'], a list; write a string"),
        ("", "plugins: progress_bar", "plugins: is 'progress_bar', a string; write a list"),
        ("", "plugins: [5]", "plugins.0: is 5, a whole number; write a string"),
        ("", "hyper_parameters: [a]", "hyper_parameters: is ['a'], a list; write a mapping"),
        ("", "hyper_parameters:", "hyper_parameters: is None, a null; write a mapping"),
        ("", "dataset: {name: x}", "dataset: is {'name': 'x'}, a mapping; write a list"),
        ("", "dataset: [x]", "dataset.0: is 'x', a string; write a mapping"),
        ("", "phase: p", "phase: is 'p', a string; write a list"),
        ("dataset", "args: [1]", "dataset.x.args: is [1], a list; write a mapping"),
        ("dataset", "batch_size: 0", "dataset.x.batch_size: is 0; it must be greater than 0"),
        ("dataset", "batch_size: 1.5", "dataset.x.batch_size: is 1.5, a fraction; write an integer"),
        ("dataset", "batch_size: 2.0", "dataset.x.batch_size: is 2.0, a fraction; write an integer"),
        ("dataset", "batch_size: true", "dataset.x.batch_size: is True, a truth value; write an integer"),
        ("dataset", "batch_size: '4'", "dataset.x.batch_size: is '4', a string; write an integer"),
        ("dataset", "shuffle: yes", "dataset.x.shuffle: is 'yes', a string; write true or false"),
        ("dataset", "drop_last: 1", "dataset.x.drop_last: is 1, a whole number; write true or false"),
        ("dataset", "num_workers: -1", "dataset.x.num_workers: is -1; it must be at least 0"),
        ("dataset", "timeout: -1", "dataset.x.timeout: is -1; it must be at least 0"),
        ("dataset", "multiprocessing_context: spwan",
         "dataset.x.multiprocessing_context: is 'spwan'; did you mean 'spawn'?"),
        ("dataset", "multiprocessing_context: 7",
         "dataset.x.multiprocessing_context: is 7; known: fork, forkserver, spawn"),
        ("dataset", "collate_fn: 5", f"dataset.x.collate_fn: is 5; {CLASS_PATH}"),
        ("phase", "model: 5", f"phase.x.model: is 5; {CLASS_PATH}"),
        ("phase", "model: ''", f"phase.x.model: is ''; {CLASS_PATH}"),
        ("phase", "model_args: 5", "phase.x.model_args: is 5, a whole number; write a mapping"),
        ("phase", "loss: [a]", f"phase.x.loss: is ['a']; {CLASS_PATH}"),
        ("phase", "metrics: [AUC]", "phase.x.metrics: is ['AUC'], a list; write a mapping"),
        ("phase", "metrics: {auc: AUC}", "phase.x.metrics.auc: is 'AUC', a string; write a mapping"),
        ("phase", "modules: {encoder: Linear}", "phase.x.modules.encoder: is 'Linear', a string; write a mapping"),
        ("phase", "model_of: 5", "phase.x.model_of: is 5, a whole number; write a string"),
        ("phase", "updater: a.B", "phase.x.updater: is 'a.B', a string; write a mapping"),
        ("phase", "updater: {args: {}}", "phase.x.updater.class_path: required key is missing; add `class_path:`"),
        ("phase", "updater: {class_path: 5}", f"phase.x.updater.class_path: is 5; {CLASS_PATH}"),
        ("phase", "updater: {class_path: a.B, args: 5}", "phase.x.updater.args: is 5, a whole number; write a mapping"),
        ("phase", "dataset_name: [a]", "phase.x.dataset_name: is ['a'], a list; write a string"),
        ("phase", "valid_dataset_name: 5", "phase.x.valid_dataset_name: is 5, a whole number; write a string"),
        ("runner", "device: cuda:x", "runner.x.device: is 'cuda:x'; write auto, cpu, gpu, cuda or cuda:N"),
        ("runner", "device: 0", "runner.x.device: is 0; write auto, cpu, gpu, cuda or cuda:N"),
        ("runner", "epochs: 0", "runner.x.epochs: is 0; it must be greater than 0"),
        ("runner", "epochs: two", "runner.x.epochs: is 'two', a string; write an integer"),
        ("runner", "max_steps: -1", "runner.x.max_steps: is -1; it must be greater than 0"),
        ("runner", "print_interval: 0", "runner.x.print_interval: is 0; it must be greater than 0"),
        ("runner", "init_model_path: 5", "runner.x.init_model_path: is 5, a whole number; write a string"),
        ("runner", "save_checkpoint_path: 5", "runner.x.save_checkpoint_path: is 5, a whole number; write a string"),
        ("runner", "save_inference_interval: 0", f"runner.x.save_inference_interval: is 0; {INTERVAL}"),
        ("runner", "save_inference_path: [a]", "runner.x.save_inference_path: is ['a'], a list; write a string"),
        ("runner", "save_inference_export: 1", "runner.x.save_inference_export: is 1, a whole number; write true or false"),
        ("runner", "write_predictions: on", "runner.x.predictions: is 'on', a string; write a mapping"),
        ("", "phase: [{name: training}]",
         "phase.training.name: is 'training', which a checkpoint uses itself beside the weights; choose another name"),
        ("runner", "seed: -1", "runner.x.seed: is -1; it must be at least 0"),
        ("runner", "seed: 4294967296", "runner.x.seed: is 4294967296; it must be less than 4294967296"),
        ("runner", "grad_clip: 0", "runner.x.grad_clip: is 0; it must be greater than 0"),
        ("runner", "grad_clip: .nan", "runner.x.grad_clip: is nan; it must be greater than 0"),
        ("runner", "grad_clip: big", "runner.x.grad_clip: is 'big', a string; write a number"),
        ("runner", "nonfinite_patience: -1", "runner.x.nonfinite_patience: is -1; it must be at least 0"),
        ("runner", "max_time: 2", "runner.x.max_time: is 2; write a time such as '90 second', '30 minute' or '2 hour'"),
        ("runner", "max_time: 2 epoch", "runner.x.max_time: is '2 epoch'; write a time such as '90 second', '30 minute' or '2 hour'"),
        ("runner", "max_time: 0 hour", "runner.x.max_time: is '0 hour'; write a time such as '90 second', '30 minute' or '2 hour'"),
        ("runner", "optimizer_step_limit: 0", "runner.x.optimizer_step_limit: is 0; it must be greater than 0"),
        ("runner", "valid_interval: 0 epoch", f"runner.x.valid_interval: is '0 epoch'; {INTERVAL}"),
        ("runner", "keep_best: valid_loss", "runner.x.keep_best: is 'valid_loss', a string; write a mapping"),
        ("runner", "keep_best: {metric: valid_loss}", "runner.x.keep_best.mode: required key is missing; add `mode:`"),
        ("runner", "keep_best: {mode: min}", "runner.x.keep_best.metric: required key is missing; add `metric:`"),
        ("runner", "keep_best: {metric: 5, mode: min}", "runner.x.keep_best.metric: is 5, a whole number; write a string"),
        ("runner", "keep_best: {metric: valid_loss, mode: mim}", "runner.x.keep_best.mode: is 'mim'; did you mean 'min'?"),
        ("runner", "keep_best: {metric: q, mode: min, count: 0}", "runner.x.keep_best.count: is 0; it must be greater than 0"),
        ("runner", "on_save_error: wran", "runner.x.on_save_error: is 'wran'; did you mean 'warn'?"),
        ("runner", "deterministic: 1", "runner.x.deterministic: is 1, a whole number; write true or false"),
        ("runner", "compile_mode: max-autotun", "runner.x.compile_mode: is 'max-autotun'; did you mean 'max-autotune'?"),
        ("runner", "compile_module_keys: []", "runner.x.compile_module_keys: is empty; name at least one, or leave it out"),
        ("runner", "compile_using_dynamic_shape_tracing: x",
         "runner.x.compile_using_dynamic_shape_tracing: is 'x', a string; write true or false"),
        ("runner", "jit_module_keys: [a, a]", "runner.x.jit_module_keys: names a twice; name each once"),
        ("runner", "limit_batches: 0", "runner.x.limit_batches: is 0; it must be greater than 0"),
        ("runner", "overfit_batches: 1.5", "runner.x.overfit_batches: is 1.5, a fraction; write an integer"),
        ("runner", "debug: yes", "runner.x.debug: is 'yes', a string; write true or false"),
        ("runner", "debug_batches: 0", "runner.x.debug_batches: is 0; it must be greater than 0"),
        ("runner", "debug_epochs: -1", "runner.x.debug_epochs: is -1; it must be greater than 0"),
        ("runner", "phases: 5", "runner.x.phases: is 5, a whole number; write a list"),
        ("runner", "phases: [a, b, a]", "runner.x.phases: names a twice; name each once"),
        ("runner", "threads: 0", "runner.x.threads: is 0; it must be greater than 0"),
        ("runner", "threads: 1025", "runner.x.threads: is 1025; it must be at most 1024"),
        ("runner", "threads: all", "runner.x.threads: is 'all', a string; write an integer"),
        ("runner", "max_stage_repeats: 0", "runner.x.max_stage_repeats: is 0; it must be greater than 0"),
        ("runner", "trainer_class: 5", f"runner.x.trainer_class: is 5; {CLASS_PATH}"),
        *(("runner", f"{stage}_class_path: 5", f"runner.x.{stage}_class_path: is 5; {CLASS_PATH}") for stage in STAGES),
        *(("runner", f"{stage}_args: 5", f"runner.x.{stage}_args: is 5, a whole number; write a mapping")
          for stage in STAGES),
    ],
)  # fmt: skip
def test_a_wrong_value_is_reported_with_the_value_and_what_to_write(
    faults: Faults, section: str, line: str, message: str
) -> None:
    (fault,) = faults(TEXTS[section].replace("{}", line))
    assert fault.partition(": ")[2].startswith(message)


@pytest.mark.parametrize(
    ("section", "key", "nearest"),
    [
        ("", "outptu_dir", "output_dir"),
        ("", "hyperparameters", "hyper_parameters"),
        ("", "modes", "mode"),
        ("dataset", "batchsize", "batch_size"),
        ("dataset", "shufle", "shuffle"),
        ("dataset", "classpath", "class_path"),
        ("phase", "dataset", "dataset_name"),
        ("phase", "metric", "metrics"),
        ("runner", "startup_class_paht", "startup_class_path"),
        ("runner", "Epochs", "epochs"),
        ("runner", "init_model_pth", "init_model_path"),
    ],
)
def test_an_unknown_key_is_reported_with_the_nearest_right_one(
    faults: Faults, section: str, key: str, nearest: str
) -> None:
    (fault,) = faults(TEXTS[section].replace("{}", f"{key}: x"))
    address = f"{section}.x.{key}" if section else key
    assert fault.endswith(f": {address}: unknown key; did you mean '{nearest}'?")


@pytest.mark.parametrize("section", [*SECTIONS, ""])
def test_an_unknown_key_that_is_near_to_none_is_reported_with_those_there_are(faults: Faults, section: str) -> None:
    (fault,) = faults(TEXTS[section].replace("{}", "zzzz: 1"))
    model = SECTIONS[section] if section else ConfigSchema
    first = next(iter(model.model_fields))
    assert f"zzzz: unknown key; known: {first}, " in fault


def test_hyper_parameters_and_arguments_are_free(config: Configs) -> None:
    text = "hyper_parameters: {anything: [1], ünïcode: {a b: 2}}\nrunner: [{name: x, class: infer, startup_args: {any: 1}}]"
    assert config(text).get("hyper_parameters") == {"anything": [1], "ünïcode": {"a b": 2}}


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("mode: null\nrunner: []", "config.yaml:2:9: runner: is empty; add at least one item"),
        ("runner:", "config.yaml:1:8: runner: is None, a null; write a list, such as [{name: train_runner, class: train}]"),
        ("runner: [{class: train}]", "config.yaml:1:10: runner.0.name: required key is missing; add `name:`"),
        ("runner: [{name: x}]", "config.yaml:1:10: runner.x.class: required key is missing; add `class:`"),
        ("runner: [{name: x, kind: train, class: train}]",
         ("config.yaml:1:20: runner.x.kind: unknown key; known: name, class, device, precision, eval_precision, epochs, "
         "max_steps, optimizer_step_limit, max_time, print_interval, valid_interval, save_interval, …")),
        ("runner: [{name: 5, class: train}]", "config.yaml:1:17: runner.0.name: is 5, a whole number; write a string"),
        ("dataset: [{name: d}]", "config.yaml:1:11: dataset.d.class_path: required key is missing; add `class_path:`"),
        ("phase: [{model: a.B}]", "config.yaml:1:9: phase.0.name: required key is missing; add `name:`"),
    ],
)  # fmt: skip
def test_a_missing_part_is_named(faults: Faults, text: str, fault: str) -> None:
    assert faults(text) == [fault]


def test_without_any_runner_the_config_says_so(faults: Faults) -> None:
    found = faults("output_dir: x  # no runner: here")
    assert found == ["config.yaml:1:1: runner: required key is missing; add `runner:`"]


@pytest.mark.parametrize("name", ["a b", "a.b", "größe", "", "a/b"])
def test_a_name_has_only_letters_digits_and_dashes(faults: Faults, name: str) -> None:
    (fault,) = faults(f"runner: [{{class: train, name: {name or repr('')}}}]")
    assert fault.endswith(f"is '{name}'; use letters, digits, '_' and '-' only")


def test_a_good_name_is_taken(config: Configs) -> None:
    assert config("runner: [{name: Az_0-9, class: infer}]").runners[0].name == "Az_0-9"


@pytest.mark.parametrize(
    ("section", "rest"), [("runner", "class: infer"), ("dataset", "class_path: a.B"), ("phase", "")]
)
def test_a_name_that_is_taken_is_reported_with_both_places(faults: Faults, section: str, rest: str) -> None:
    text = f"{section}:\n  - {{name: a, {rest}}}\n  - {{name: b, {rest}}}\n  - {{name: a, {rest}}}\n"
    assert faults(text) == [
        f"config.yaml:4:5: {section}.a: the name is taken, first by config.yaml:2; give each its own"
    ]


@pytest.mark.parametrize(
    ("written", "kind"),
    [("train", "train"), ("single_train", "train"), ("infer", "infer"), ("single_infer", "infer")],
)
def test_single_train_means_train(config: Configs, written: str, kind: str) -> None:
    found = config(f"runner: [{{name: x, class: {written}}}]")
    assert (found.runners[0].kind, found.get("runner.x.class")) == (kind, kind)


@pytest.mark.parametrize(
    ("written", "message"),
    [("trian", "is 'trian'; did you mean 'train'?"), ("xyz", "is 'xyz'; known: infer, train")],
)
def test_another_class_of_runner_is_refused(faults: Faults, written: str, message: str) -> None:
    (fault,) = faults(f"runner: [{{name: x, class: {written}}}]")
    assert fault == f"config.yaml:1:27: runner.x.class: {message}"


@pytest.mark.parametrize("device", ["auto", "cpu", "gpu", "cuda", "cuda:3"])
def test_a_device_is_taken_as_written(config: Configs, device: str) -> None:
    assert config(f"runner: [{{name: x, class: infer, device: {device}}}]").runners[0].device == device


@pytest.mark.parametrize(
    ("value", "intervals"),
    [
        ("100", [Interval(100, "iteration")]),
        ("'100'", [Interval(100, "iteration")]),
        ("2 epoch", [Interval(2, "epoch")]),
        ("2 epochs", [Interval(2, "epoch")]),
        ("30 second", [Interval(30, "second")]),
        ("10 minutes", [Interval(10, "minute")]),
        ("1 hour", [Interval(1, "hour")]),
        ("7 updates", [Interval(7, "update")]),
        ("5 iteration", [Interval(5, "iteration")]),
        ("[3, 1 epoch]", [Interval(3, "iteration"), Interval(1, "epoch")]),
        ("null", []),
        ("[]", []),
    ],
)
def test_an_interval_counts_in_any_unit(config: Configs, value: str, intervals: list[Interval]) -> None:
    found = config(TEXTS["runner"].replace("{}", f"save_interval: {value}")).runners[0]
    assert parse_intervals(found.save_interval) == intervals


@pytest.mark.parametrize(
    ("value", "intervals"),
    [
        ("null", []),
        ("[9, 2 epoch]", [Interval(9, "iteration"), Interval(2, "epoch")]),
        ("[start, 9 update]", [Interval(0, "start"), Interval(9, "update")]),
    ],
)
def test_validation_has_intervals_of_its_own(config: Configs, value: str, intervals: list[Interval]) -> None:
    found = config(TEXTS["runner"].replace("{}", f"valid_interval: {value}")).runners[0]
    saving = parse_intervals(found.save_interval)
    assert (parse_intervals(found.valid_interval, starts=True), saving) == (intervals, [Interval(1, "epoch")])


@pytest.mark.parametrize(
    ("value", "intervals"),
    [
        ("null", []), ("3", [Interval(3, "epoch")]), ("'3'", [Interval(3, "epoch")]), ("3 iteration", [Interval(3, "iteration")]),
        ("[2, 30 second, 1 minute]", [Interval(2, "epoch"), Interval(30, "second"), Interval(1, "minute")]),
    ],
)  # fmt: skip
def test_a_bare_number_of_the_inference_interval_means_epochs(
    config: Configs, value: str, intervals: list[Interval]
) -> None:
    found = config(TEXTS["runner"].replace("{}", f"save_inference_interval: {value}")).runners[0]
    assert parse_intervals(found.save_inference_interval, "epoch") == intervals


def test_without_an_interval_it_is_one_epoch(config: Configs) -> None:
    found = config("").runners[0]
    intervals = [parse_intervals(value) for value in (found.save_interval, found.valid_interval)]
    assert intervals == [[Interval(1, "epoch")]] * 2


def test_the_best_checkpoint_and_the_updater_are_objects_with_their_defaults(config: Configs) -> None:
    text = "runner: [{name: x, class: train, keep_best: {metric: valid_auc, mode: max}}]\nphase: [{name: p, updater: {class_path: a.B}}]"
    found = config(text)
    best, updater = found.runners[0].keep_best, found.settings.phase[0].updater
    assert (best and best.metric, best and best.mode) == ("valid_auc", "max")
    assert (updater and updater.class_path, updater and updater.args) == ("a.B", {})
    assert found.get("phase.p.updater") == {"class_path": "a.B", "args": {}}


def test_one_name_of_a_module_does_for_a_list(config: Configs) -> None:
    found = config(TEXTS["runner"].replace("{}", "compile_module_keys: encoder"))
    assert found.runners[0].compile_module_keys == ["encoder"] == found.get("runner.x.compile_module_keys")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("0", "0"), ("-5", "-5"), ("0 epoch", "'0 epoch'"), ("-1 epoch", "'-1 epoch'"), ("2 days", "'2 days'"), ("start", "'start'"),
        ("epoch", "'epoch'"), ("1.5", "1.5"), ("1.5 epoch", "'1.5 epoch'"), ("true", "True"), ("{a: 1}", "{'a': 1}"),
        ("[4, 0]", "0"), ("[[4]]", "[4]"), ("2epoch", "'2epoch'"),
    ],
)  # fmt: skip
def test_what_is_no_interval_is_refused(faults: Faults, value: str, shown: str) -> None:
    assert faults(TEXTS["runner"].replace("{}", f"save_interval: {value}")) == [
        f"config.yaml:4:20: runner.x.save_interval: is {shown}; {INTERVAL}"
    ]


@pytest.mark.parametrize(
    ("key", "value"), [("print_interval", None), ("seed", None), ("grad_clip", None), ("phases", None)]
)
def test_null_is_taken_where_it_has_a_meaning(config: Configs, key: str, value: Any) -> None:
    assert getattr(config(TEXTS["runner"].replace("{}", f"{key}: null")).runners[0], key) is value


def test_a_whole_number_does_for_a_fraction(config: Configs) -> None:
    assert config(TEXTS["runner"].replace("{}", "grad_clip: 2")).runners[0].grad_clip == 2.0


@pytest.mark.parametrize("name", ["lock", "workspace"])
def test_a_runner_may_not_have_the_name_of_what_the_run_directory_holds(faults: Faults, name: str) -> None:
    message = f"runner.{name}.name: is '{name}', which the run directory uses itself; choose another name"
    found = faults(f"runner: [{{name: {name}, class: train, epochs: 1}}]")
    assert [fault.split(": ", 1)[1] for fault in found] == [message]
