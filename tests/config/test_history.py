"""A value knows every place that set it, the first one first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pipeline.config.load import Config, ConfigBuilder

Configs = Callable[..., Config]
FILES = {
    "far/first.yaml": "hyper_parameters:\n  o: {a: 1, b: 1}\n  l: [1]\n",
    "second.yaml": "_base_: far/first.yaml\nhyper_parameters:\n  o: {a: 2}\nrunner: [{name: r, class: train, epochs: 1}]\n",
}
TEXT = "_base_: second.yaml\nhyper_parameters:\n  o: {a: 3}\n  l: [2]\n"


def history(config: Config, address: str) -> list[tuple[str, Any]]:
    node = config.tree.find(address)
    assert node is not None
    return [(str(each.origin), each.plain()) for each in (*node.earlier, node)]


def test_bases_files_and_overrides_are_all_remembered(config: Configs) -> None:
    found = config(TEXT, "hyper_parameters.o.a=4", "hyper_parameters.o.a=5", files=FILES)
    assert history(found, "hyper_parameters.o.a") == [
        ("far/first.yaml:2", 1),
        ("second.yaml:3", 2),
        ("config.yaml:3", 3),
        ("override 'hyper_parameters.o.a=4'", 4),
        ("override 'hyper_parameters.o.a=5'", 5),
    ]
    assert history(found, "hyper_parameters.o.b") == [("far/first.yaml:2", 1)]
    assert history(found, "hyper_parameters.l") == [("far/first.yaml:3", [1]), ("config.yaml:4", [2])]


def test_a_mapping_remembers_what_it_was(config: Configs) -> None:
    assert history(config(TEXT, files=FILES), "hyper_parameters.o") == [
        ("far/first.yaml:2", {"a": 1, "b": 1}),
        ("second.yaml:3", {"a": 2, "b": 1}),
        ("config.yaml:3", {"a": 3, "b": 1}),
    ]


@pytest.mark.parametrize("override", ["hyper_parameters.o={a: 4}", "hyper_parameters={o: {a: 4}}"])
def test_a_mapping_that_is_replaced_whole_leaves_its_values_their_history(config: Configs, override: str) -> None:
    places = history(config(TEXT, override, files=FILES), "hyper_parameters.o.a")
    assert [place for place, _ in places] == [
        "far/first.yaml:2",
        "second.yaml:3",
        "config.yaml:3",
        f"override '{override}'",
    ]


def test_a_mapping_that_deletes_the_base_s_remembers_it(config: Configs) -> None:
    found = config("_base_: second.yaml\nhyper_parameters: {o: {_delete_: true, a: 3}}", files=FILES)
    assert [value for _, value in history(found, "hyper_parameters.o.a")] == [1, 2, 3]


def test_a_key_remembers_what_it_was_under_another_name(config: Configs) -> None:
    found = config("runner: [{name: r, class: train, max_iteration: 5}]", "runner.r.max_steps=6")
    assert history(found, "runner.r.max_steps") == [("config.yaml:1", 5), ("override 'runner.r.max_steps=6'", 6)]


def test_each_key_that_adds_to_a_list_is_remembered(config: Configs) -> None:
    found = config("runner:\n- name: r\n  class: train\n  save_interval: 5\n  save_checkpoint_interval: 2\n")
    assert history(found, "runner.r.save_interval") == [("config.yaml:4", 5), ("config.yaml:5", [5, "2 epoch"])]


def test_a_null_that_an_override_fills_is_remembered(config: Configs) -> None:
    assert history(config("hyper_parameters:\n", "hyper_parameters.a=1"), "hyper_parameters") == [
        ("config.yaml:1", None), ("override 'hyper_parameters.a=1'", {"a": 1})
    ]  # fmt: skip


def test_a_copy_keeps_the_history_and_what_was_written(draft: Callable[..., ConfigBuilder]) -> None:
    tree = draft("hyper_parameters: {a: 1, b: 1}", "hyper_parameters.b=${hyper_parameters.a}").tree
    assert tree is not None
    copied = tree.copy().find("hyper_parameters.b")
    assert copied is not None
    assert (copied.written, [each.value for each in copied.earlier]) == ("${hyper_parameters.a}", [1])
