"""The ancestors' names for a key become the canonical one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pipeline.config.aliases import NOT_YET
from pipeline.config.load import Config
from pipeline.config.schema import Interval, parse_intervals

Configs = Callable[..., Config]
Faults = Callable[..., list[str]]


NO_SERVERS = "a parameter server keeps a part of the model, and here every process has all of it"


def runner(keys: str) -> str:
    return f"runner:\n  - name: r\n    class: train\n    {keys.replace('; ', chr(10) + '    ')}\n"


@pytest.mark.parametrize(
    ("keys", "canonical", "value"),
    [
        ("max_grad_norm: 2.5", "grad_clip", 2.5),
        ("max_grad_norm: null", "grad_clip", None),
        ("max_iteration: 7", "max_steps", 7),
        ("save_checkpoint_interval: 2", "save_interval", "2 epoch"),
        ("save_checkpoint_interval: [2, '30 second']", "save_interval", ["2 epoch", "30 second"]),
        ("save_step_interval: 9", "save_interval", 9),
        ("ckpt_interval_steps: 9", "save_interval", 9),
        ("ckpt_interval_minutes: 4", "save_interval", "4 minute"),
        ("save_checkpoint_interval: null", "save_interval", None),
        ("save_step_path: /far", "save_checkpoint_path", "/far"),
    ],
)
def test_an_alias_becomes_the_canonical_key(config: Configs, keys: str, canonical: str, value: Any) -> None:
    found = config(runner(keys))
    assert found.get(f"runner.r.{canonical}") == value
    assert found.get(f"runner.r.{keys.partition(':')[0]}", "gone") == "gone"
    assert str(found.origin(f"runner.r.{canonical}")) == "config.yaml:4"


def test_each_save_interval_adds_to_the_list(config: Configs) -> None:
    keys = "save_interval: [7, 3 second]; save_checkpoint_interval: 2; save_step_interval: [9, 8]"
    keys += "; ckpt_interval_minutes: 4; ckpt_interval_steps: null"
    assert parse_intervals(config(runner(keys)).runners[0].save_interval) == [
        Interval(7, "iteration"),
        Interval(3, "second"),
        Interval(2, "epoch"),
        Interval(9, "iteration"),
        Interval(8, "iteration"),
        Interval(4, "minute"),
    ]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("max_iteration: 0", "runner.r.max_steps: is 0; it must be greater than 0"),
        ("max_grad_norm: big", "runner.r.grad_clip: is 'big', a string; write a number"),
        ("ckpt_interval_minutes: -5", "runner.r.save_interval: is '-5 minute'; write a positive number of iterations"),
        ("ckpt_interval_minutes: 2.5", "runner.r.save_interval: is 2.5; write a positive number of iterations"),
    ],
)
def test_a_wrong_value_of_an_alias_is_reported_where_it_stands(faults: Faults, keys: str, message: str) -> None:
    (fault,) = faults(runner(keys))
    assert fault.startswith(f"config.yaml:4:{7 + len(keys.partition(':')[0])}: {message}")


@pytest.mark.parametrize("keys", ["max_steps: 7 update", "max_steps: 7 updates", "max_iteration: 7 update"])
def test_steps_in_updates_are_a_limit_of_updates(config: Configs, keys: str) -> None:
    found = config(runner(keys))
    assert (found.runners[0].optimizer_step_limit, found.runners[0].max_steps) == (7, None)
    assert str(found.origin("runner.r.optimizer_step_limit")) == "config.yaml:4"


def test_a_limit_in_updates_beside_the_other_name_of_one_is_a_fault(faults: Faults) -> None:
    assert faults(runner("optimizer_step_limit: 9; max_steps: 100 update")) == [
        "config.yaml:5:5: runner.r.max_steps: in updates means the same as 'optimizer_step_limit', which is set too; keep one"
    ]


def test_steps_in_another_unit_are_a_fault(faults: Faults) -> None:
    (fault,) = faults(runner("max_steps: 2 epoch"))
    assert "runner.r.max_steps: is '2 epoch'; write a number of iterations, or of updates as in '100 update'" in fault


@pytest.mark.parametrize("key", NOT_YET["phase"])
def test_a_phase_key_that_is_still_to_come_is_refused(faults: Faults, key: str) -> None:
    assert faults(f"phase: [{{{key}: 1, name: x}}]")[0] == (
        f"config.yaml:1:10: phase.x.{key}: not yet: nothing reads this key so far; remove it"
    )


@pytest.mark.parametrize(
    ("keys", "class_path"),
    [
        ("data_converter: /w/r.py", "/w/r.py:Reader"),
        ("data_converter: /w/r.py, reader_class_name: Mine, type: QueueDataset", "/w/r.py:Mine"),
        ("data_converter: /w/r.py, class_path: '/w/r.py:Reader'", "/w/r.py:Reader"),
    ],
)
def test_a_data_converter_names_the_class(config: Configs, keys: str, class_path: str) -> None:
    loaded = config(runner("epochs: 1") + f"dataset: [{{name: d, {keys}}}]\n")
    assert loaded.settings.dataset[0].class_path == class_path


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("data_converter: /w/r.py, class_path: '/w/r.py:Mine'",
         "data_converter: means class_path, which is set too; keep one of the two"),
        ("data_converter: /w/r.py, sparse_slots: a b", "data_converter: reads the data, and so do the slots; keep one of the two"),
        ("reader_class_name: Mine, class_path: a.B",
         "reader_class_name: is a class in data_converter, which is not set; add that, or write class_path: FILE:CLASS"),
        ("type: Queue, class_path: a.B", "type: is 'Queue'; known: DataLoader, QueueDataset"),
    ],
)  # fmt: skip
def test_a_class_is_named_once(faults: Faults, keys: str, message: str) -> None:
    (fault,) = faults(runner("epochs: 1") + f"dataset: [{{name: d, {keys}}}]\n")
    assert fault.partition("dataset.d.")[2].startswith(message)


@pytest.mark.parametrize(
    ("keys", "precision"),
    [
        ("use_amp: true", "fp16"), ("use_amp: false", "fp32"), ("auto_mix_prec: true", "fp16"), ("use_amp: bf16", "bf16"),
        ("bfloat16_mix_prec: true", "bf16"), ("bfloat16_mix_prec: false", "fp32"), ("precision: 32", "fp32"),
        ("precision: '32'", "fp32"), ("precision: bf16-mixed", "bf16"), ("precision: 16-mixed", "fp16"),
    ],
)  # fmt: skip
def test_every_name_of_a_precision_becomes_ours(config: Configs, keys: str, precision: str) -> None:
    found = config(runner(keys))
    assert (found.get("runner.r.precision"), found.runners[0].precision) == (precision, precision)
    assert found.runners[0].eval_precision == "fp32"


def test_the_precision_of_evaluation_has_the_same_names(config: Configs) -> None:
    assert config(runner("eval_precision: bf16-mixed")).runners[0].eval_precision == "bf16"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            "use_amp: true; precision: fp16",
            "runner.r.use_amp: means the same as 'precision', which is set too; keep one",
        ),
        (
            "use_amp: true; auto_mix_prec: true",
            "runner.r.auto_mix_prec: means the same as 'precision', which is set too; keep one",
        ),
        (
            "save_checkpoint_path: /far; save_step_path: /far",
            "runner.r.save_step_path: means the same as 'save_checkpoint_path', which is set too; keep one",
        ),
        ("use_amp: fp61", "runner.r.precision: is 'fp61'; did you mean 'fp16'?"),
        ("precision: 16", "runner.r.precision: is 16; did you mean 'fp16'?"),
        ("precision: double", "runner.r.precision: is 'double'; known: bf16, fp16, fp32"),
        ("eval_precision: true", "runner.r.eval_precision: is True; known: bf16, fp16, fp32"),
    ],
)
def test_what_contradicts_or_is_no_precision_is_told(faults: Faults, keys: str, message: str) -> None:
    (fault,) = faults(runner(keys))
    assert fault.partition(": ")[2] == message


@pytest.mark.parametrize(
    ("keys", "workers"),
    [
        ("class: local_cluster_train, worker_num: 4", 4),
        ("class: Cluster_Train", None),
        ("class: cluster_train, fleet_mode: collective", None),
    ],
)
def test_a_runner_of_several_processes_is_a_train_runner(config: Configs, keys: str, workers: int | None) -> None:
    own = config(f"runner: [{{name: r, {keys}, epochs: 1, distribute_strategy: sync}}]").runners[0]
    assert (own.kind, own.worker_num, own.fleet_mode) == ("train", workers, "collective")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("class: local_cluster_train", "class: is local_cluster_train, of how many processes? add worker_num: N"),
        (
            "class: cluster_train, fleet_mode: ps",
            f"fleet_mode: is 'ps': there is collective alone: {NO_SERVERS}; write that, or remove it",
        ),
        ("class: cluster_train, server_num: 2", f"server_num: is 2: {NO_SERVERS}; remove it"),
        (
            "class: train, distribute_strategy: geo",
            f"distribute_strategy: is 'geo': {NO_SERVERS}, and takes the same step; write sync, or remove it",
        ),
        (
            "class: train, distributed_backend: nccl",
            "distributed_backend: is 'nccl': the device decides, nccl for GPUs and gloo for CPUs; remove it",
        ),
    ],
)
def test_what_several_processes_are_not_is_told(faults: Faults, keys: str, message: str) -> None:
    (fault,) = faults(f"runner: [{{name: r, {keys}, epochs: 1}}]")
    assert fault.partition(": ")[2] == f"runner.r.{message}"


@pytest.mark.parametrize(
    ("keys", "override", "sizes"),
    [
        ("batch_size: 4", "global_batch_size=8", (1, 8)),
        ("global_batch_size: 8", "batch_size=4", (4, None)),
        ("global_batch_size: 8", "global_batch_size=null", (1, None)),
        ("global_batch_size: 8", "batch_size=null", (None, None)),
    ],
)
def test_an_override_of_one_size_of_a_batch_replaces_the_other(
    config: Configs, keys: str, override: str, sizes: tuple[int | None, int | None]
) -> None:
    found = config(f"dataset: [{{name: d, class_path: a.B, {keys}}}]", f"dataset.d.{override}").settings.dataset[0]
    assert (found.batch_size, found.global_batch_size) == sizes


def test_a_size_of_a_batch_replaces_the_other_of_a_base(config: Configs) -> None:
    base = "dataset: [{name: d, class_path: a.B, batch_size: 4}]\nrunner: [{name: r, class: train}]"
    found = config("_base_: base.yaml\ndataset: [{name: d, global_batch_size: 8}]", files={"base.yaml": base})
    assert (found.settings.dataset[0].batch_size, found.settings.dataset[0].global_batch_size) == (1, 8)


@pytest.mark.parametrize(
    ("keys", "override", "limits"),
    [
        ("max_steps: 8 update", "optimizer_step_limit=12", (None, 12)),
        ("optimizer_step_limit: 8", "max_steps=12 update", (None, 12)),
        ("max_steps: 8 update", "optimizer_step_limit=null", (None, None)),
    ],
)
def test_an_override_of_a_limit_in_updates_replaces_it_under_either_name(
    config: Any, keys: str, override: str, limits: tuple[int | None, int | None]
) -> None:
    text = f"runner: [{{name: r, class: train, {keys}}}]"
    runner = config(text, f"runner.r.{override}").runner("r")
    assert (runner.max_steps, runner.optimizer_step_limit) == limits
