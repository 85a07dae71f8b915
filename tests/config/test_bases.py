"""A config inherits from others through ``_base_``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.load import Config

Configs = Callable[..., Config]
Faults = Callable[..., list[str]]
RUNNER = "runner: [{name: train_runner, class: train, epochs: 2}]\n"
BASE = """
    hyper_parameters: {optimizer: {class: Adam, learning_rate: 0.1}, sizes: [1, 2], width: 8}
    runner:
      - {name: train_runner, class: train, epochs: 2, device: cpu}
      - {name: infer_runner, class: infer}
"""


def test_a_mapping_merges_key_by_key(config: Configs) -> None:
    text = "_base_: base.yaml\nhyper_parameters: {optimizer: {learning_rate: 0.5}, depth: 3}"
    assert config(text, files={"base.yaml": BASE}).get("hyper_parameters") == {
        "optimizer": {"class": "Adam", "learning_rate": 0.5},
        "sizes": [1, 2],
        "width": 8,
        "depth": 3,
    }


def test_a_list_of_named_items_merges_by_name(config: Configs) -> None:
    text = "_base_: base.yaml\nrunner: [{name: infer_runner, device: cpu}, {name: more, class: infer}]"
    found = config(text, files={"base.yaml": BASE})
    assert [(each.name, each.kind, each.device) for each in found.settings.runner] == [
        ("train_runner", "train", "cpu"),
        ("infer_runner", "infer", "cpu"),
        ("more", "infer", "auto"),
    ]


def test_a_list_without_names_is_replaced(config: Configs) -> None:
    text = "_base_: base.yaml\nhyper_parameters: {sizes: [3]}"
    assert config(text, files={"base.yaml": BASE}).get("hyper_parameters.sizes") == [3]


@pytest.mark.parametrize(
    ("text", "address", "value"),
    [
        ("hyper_parameters: {_delete_: true, depth: 3}", "hyper_parameters", {"depth": 3}),
        ("hyper_parameters: {optimizer: {_delete_: true, class: SGD}}", "hyper_parameters.optimizer", {"class": "SGD"}),
        ("hyper_parameters: {_delete_: false, width: 9}", "hyper_parameters.sizes", [1, 2]),
        ("runner: [{name: train_runner, _delete_: true, class: infer}]", "runner.train_runner.epochs", None),
        ("hyper_parameters: {new: {_delete_: true, a: 1}}", "hyper_parameters.new", {"a": 1}),
    ],
)
def test_delete_replaces_what_the_base_has(config: Configs, text: str, address: str, value: Any) -> None:
    assert config(f"_base_: base.yaml\n{text}", files={"base.yaml": BASE}).get(address) == value


def test_a_base_may_have_a_base_in_a_folder_of_its_own(config: Configs) -> None:
    files = {"far/a.yaml": "_base_: ../near/b.yaml\nhyper_parameters: {width: 1}", "near/b.yaml": BASE}
    assert config("_base_: far/a.yaml", files=files).get("hyper_parameters.width") == 1


def test_two_files_may_share_a_base(config: Configs) -> None:
    files = {"a.yaml": "_base_: c.yaml", "b.yaml": "_base_: c.yaml", "c.yaml": BASE}
    assert config("_base_: [a.yaml, b.yaml]", files=files).get("hyper_parameters.width") == 8


def test_a_value_of_a_base_says_in_which_file_and_line_it_stands(config: Configs) -> None:
    found = config("_base_: far/base.yaml\nhyper_parameters:\n  width: 9", files={"far/base.yaml": BASE})
    assert str(found.origin("hyper_parameters.sizes")) == "far/base.yaml:2"
    assert str(found.origin("hyper_parameters.width")) == "config.yaml:3"


def test_a_fault_in_a_base_is_reported_there(faults: Faults) -> None:
    base = "runner:\n  - {name: train_runner, class: train, epoch: 2}"
    assert faults("_base_: far/base.yaml", files={"far/base.yaml": base}) == [
        "far/base.yaml:2:40: runner.train_runner.epoch: unknown key; did you mean 'epochs'?"
    ]


def test_a_relative_class_path_belongs_to_the_file_that_wrote_it(config: Configs) -> None:
    base = "dataset: [{name: a, class_path: data.py:A}]\nplugins: [my.py, {./your.py: {}}]\nphase: [{name: p, loss: l.py:L}]"
    found = config('_base_: far/base.yaml\ndataset: [{name: b, class_path: "../b.py:B"}]\nrunner: [{name: r, class: infer}]',
                   files={"far/base.yaml": base})  # fmt: skip
    here = Path.cwd()
    assert found.get("dataset.a.class_path") == str(here / "far/data.py:A")
    assert found.get("dataset.b.class_path") == str(here / "../b.py:B")
    assert found.get("plugins.my.class_path") == str(here / "far/my.py")
    assert found.get("plugins.your.class_path") == str(here / "far/your.py")
    assert found.get("phase.p.loss") == str(here / "far/l.py:L")


def test_a_workspace_in_a_base_is_relative_to_the_base(config: Configs) -> None:
    found = config("_base_: far/base.yaml", files={"far/base.yaml": f"workspace: .\n{RUNNER}"})
    assert found.workspace == Path.cwd() / "far"


def test_without_a_workspace_the_inheriting_config_has_its_own_folder(config: Configs) -> None:
    found = config('_base_: far/base.yaml\nhyper_parameters: {a: "{workspace}"}', files={"far/base.yaml": RUNNER})
    assert found.get("hyper_parameters.a") == str(Path.cwd())


def test_a_duplicate_key_hides_no_other_fault(faults: Faults) -> None:
    found = faults("output_dir: a\noutput_dir: b\nmod: x")
    assert [each.split(": ", 1)[1] for each in found] == [
        "output_dir: duplicate key, first on line 1; remove one",
        "mod: unknown key; did you mean 'mode'?",
    ]


LISTED = "_base_: [a.yaml, b.yaml]\n"
BOTH = "config.yaml inherits from both; set it in config.yaml"


@pytest.mark.parametrize(
    ("text", "later", "width"),
    [
        ("hyper_parameters: {width: 3}", "hyper_parameters: {width: 2}", 3),
        ("mode: null", "hyper_parameters: {width: 8}", 8),
        ("mode: null", "hyper_parameters: {_delete_: true, width: 2}", 2),
        ("hyper_parameters: {_delete_: true, width: 4}", "hyper_parameters: {width: 2}", 4),
    ],
    ids=["the file decides", "they agree", "one replaces the other", "the file replaces both"],
)
def test_two_bases_of_a_list_may_both_set_a_value(config: Configs, text: str, later: str, width: int) -> None:
    found = config(LISTED + text, files={"a.yaml": BASE, "b.yaml": later})
    assert found.get("hyper_parameters.width") == width


@pytest.mark.parametrize(("value", "other"), [("[1, 2, 3]", "[1, 2]"), ("{a: 1}", "[1, 2]"), ("1", "[1, 2]")])
def test_two_bases_of_a_list_may_not_differ_in_a_value_of_whatever_kind(faults: Faults, value: str, other: str) -> None:
    assert faults(LISTED, files={"a.yaml": BASE, "b.yaml": f"hyper_parameters: {{sizes: {value}}}"}) == [
        f"b.yaml:1:27: hyper_parameters.sizes: is {value}, but a.yaml:2 says {other}, and {BOTH}"
    ]


@pytest.mark.parametrize("order", ["[a.yaml, b.yaml]", "[b.yaml, a.yaml]"])
def test_what_two_bases_inherit_may_be_changed_by_one_of_them(config: Configs, order: str) -> None:
    files = {"a.yaml": "_base_: c.yaml\nhyper_parameters: {width: 9}", "b.yaml": "_base_: c.yaml", "c.yaml": BASE}
    assert config(f"_base_: {order}", files=files).get("hyper_parameters.width") == 9


def test_what_two_bases_inherit_may_not_be_changed_by_both(faults: Faults) -> None:
    own = "_base_: c.yaml\nhyper_parameters: {width: %d}"
    assert faults(LISTED, files={"a.yaml": own % 1, "b.yaml": own % 2, "c.yaml": BASE}) == [
        f"b.yaml:2:27: hyper_parameters.width: is 2, but a.yaml:2 says 1, and {BOTH}"
    ]


@pytest.mark.parametrize(("written", "over"), [("max_grad_norm", "grad_clip"), ("grad_clip", "max_grad_norm")])
def test_a_key_replaces_the_base_s_under_its_other_name(config: Configs, written: str, over: str) -> None:
    base = f"runner: [{{name: r, class: infer, {written}: 1}}]"
    found = config(f"_base_: base.yaml\nrunner: [{{name: r, {over}: 2}}]", files={"base.yaml": base})
    assert found.get("runner.r.grad_clip") == 2


def test_save_intervals_under_different_names_add_up_across_files(config: Configs) -> None:
    base = "runner: [{name: r, class: train, save_step_interval: 7, save_interval: 9}]"
    text = "_base_: base.yaml\nrunner: [{name: r, save_checkpoint_interval: 2, save_interval: 8}]"
    assert config(text, files={"base.yaml": base}).get("runner.r.save_interval") == [8, "2 epoch", 7]


LEVELS = 40


def test_a_base_that_is_named_again_and_again_is_read_once(config: Configs) -> None:
    files = {
        f"{level}.yaml": f"_base_: [{level - 1}.yaml, {level - 1}.yaml]\nhyper_parameters: {{l{level}: 1}}"
        for level in range(1, LEVELS)
    }
    found = config(
        f"_base_: [{LEVELS - 1}.yaml, {LEVELS - 1}.yaml]\n{RUNNER}",
        files={"0.yaml": "hyper_parameters: {x: 0}", **files},
    )
    assert found.get("hyper_parameters") == {"x": 0} | {f"l{level}": 1 for level in range(1, LEVELS)}


def test_two_bases_that_have_two_in_common_that_have_two_in_common_take_no_longer_each_time(config: Configs) -> None:
    both = "_base_: [a{0}.yaml, b{0}.yaml]\n"
    files = {f"{name}{level}.yaml": both.format(level - 1) for level in range(1, LEVELS) for name in "ab"}
    last = {"a0.yaml": "hyper_parameters: {x: 0, y: [1]}", "b0.yaml": "hyper_parameters: {z: {a: 2}}"}
    found = config(both.format(LEVELS - 1) + RUNNER, files={**last, **files})
    assert found.get("hyper_parameters") == {"x": 0, "y": [1], "z": {"a": 2}}
    assert all(len(each.earlier) < 5 * LEVELS for _, each in found.tree.walk())


def test_what_one_heir_of_a_base_changes_another_does_not_see(config: Configs) -> None:
    files = {"one.yaml": "_base_: base.yaml\nhyper_parameters: {optimizer: {class: SGD}}",
             "two.yaml": "_base_: base.yaml\nhyper_parameters: {depth: 3}", "base.yaml": BASE}  # fmt: skip
    found = config("_base_: [one.yaml, two.yaml]", files=files)
    assert found.get("hyper_parameters.optimizer") == {"class": "SGD", "learning_rate": 0.1}
    assert found.get("hyper_parameters.depth") == 3
