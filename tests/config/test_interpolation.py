"""``${address}`` and ``${env:NAME}`` take values that stand elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.load import Config, ConfigBuilder

Configs = Callable[..., Config]
Faults = Callable[..., list[str]]
RUNNER = "runner: [{name: train_runner, class: train, epochs: 2}]\n"


@pytest.mark.parametrize("value", ["16", "0.5", "true", "null", "[1, {a: 2}]", "{a: {b: 1}}", "text"])
def test_a_reference_takes_the_value_with_its_type(config: Configs, value: str) -> None:
    found = config(f'hyper_parameters: {{a: {value}, b: "${{hyper_parameters.a}}"}}').get("hyper_parameters")
    assert found["b"] == found["a"]
    assert type(found["b"]) is type(found["a"])


def test_within_a_text_true_and_null_are_written_as_yaml_does(config: Configs) -> None:
    values = "${hyper_parameters.yes}-${hyper_parameters.none}-${hyper_parameters.one}"
    text = f'hyper_parameters: {{yes: true, none: null, one: 1, s: "{values}"}}'
    assert config(text).get("hyper_parameters.s") == "true-null-1"


def test_within_a_text_the_value_is_written_out(config: Configs) -> None:
    text = 'hyper_parameters: {n: 16, f: 0.5, s: "d${hyper_parameters.n}-${hyper_parameters.f}/${hyper_parameters.n}"}'
    assert config(text).get("hyper_parameters.s") == "d16-0.5/16"


def test_references_stand_in_lists_and_mappings_and_refer_on(config: Configs) -> None:
    text = 'hyper_parameters: {l: ["${hyper_parameters.b}", {x: "${hyper_parameters.b}"}], b: "${hyper_parameters.a}", a: 3}'
    assert config(text).get("hyper_parameters.l") == [3, {"x": 3}]


def test_an_item_is_referred_to_by_its_name_and_by_its_index(config: Configs) -> None:
    text = 'hyper_parameters: {l: [5, 6], a: "${hyper_parameters.l.1}", b: "${runner.train_runner.epochs}"}'
    assert config(text).get("hyper_parameters") == {"l": [5, 6], "a": 6, "b": 2}


def test_a_mapping_that_is_referred_to_is_a_copy(config: Configs) -> None:
    text = 'hyper_parameters: {a: {x: 1}, b: "${hyper_parameters.a}"}'
    assert config(text, "hyper_parameters.a.x=2").get("hyper_parameters") == {"a": {"x": 2}, "b": {"x": 2}}


def test_a_reference_in_an_override_sees_the_other_overrides(config: Configs) -> None:
    found = config(
        "hyper_parameters: {a: 1}", "runner.train_runner.epochs=${hyper_parameters.a}", "hyper_parameters.a=7"
    )
    assert found.settings.runner[0].epochs == 7


@pytest.mark.parametrize(
    ("text", "value"),
    [("42", 42), ("1e-3", 0.001), ("true", True), ("yes", "yes"), ("abc", "abc"), ("", None), ("[1, 2]", "[1, 2]"),
     ("a: b: c", "a: b: c"), ("${hyper_parameters.other}", "${hyper_parameters.other}")],
)  # fmt: skip
def test_an_environment_variable_is_typed_as_yaml_but_within_a_text_it_stays_as_it_is(
    config: Configs, monkeypatch: pytest.MonkeyPatch, text: str, value: Any
) -> None:
    monkeypatch.setenv("PIPELINE_X", text)
    found = config('hyper_parameters: {a: "${env:PIPELINE_X}", s: "v${env:PIPELINE_X}", other: 1}')
    assert found.get("hyper_parameters.a") == value
    assert found.get("hyper_parameters.s") == f"v{text}"


def test_an_environment_variable_that_is_not_set_is_named(faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIPELINE_X", raising=False)
    assert faults('hyper_parameters: {a: ["${env:PIPELINE_X}"]}') == [
        "config.yaml:1:24: hyper_parameters.a.0: the environment variable 'PIPELINE_X' is not set; set it, or write a value"
    ]


def test_the_plain_config_can_keep_environment_variables_unexpanded(
    config: Configs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPELINE_X", "secret")
    text = """
        hyper_parameters:
          a: ${env:PIPELINE_X}
          b: x ${env:PIPELINE_X} y
          c: ${hyper_parameters.a}
          d: x ${hyper_parameters.b}
          e: ["${hyper_parameters}"]
          f: plain
    """.replace('e: ["${hyper_parameters}"]', "e: [{x: '${env:PIPELINE_X}'}]\n          g: ${hyper_parameters.e}")
    found = config(text)
    assert found.get("hyper_parameters.d") == "x x secret y"
    assert "secret" not in str(found.plain(expanded=False))
    assert found.plain(expanded=False)["hyper_parameters"] == {
        "a": "${env:PIPELINE_X}",
        "b": "x ${env:PIPELINE_X} y",
        "c": "${env:PIPELINE_X}",
        "d": "x ${hyper_parameters.b}",
        "e": [{"x": "${env:PIPELINE_X}"}],
        "f": "plain",
        "g": [{"x": "${env:PIPELINE_X}"}],
    }


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ('a: "${hyper_parameters.a}"', "a: refers to itself: hyper_parameters.a -> hyper_parameters.a; give one of them a value"),
        ('a: "${hyper_parameters.b}", b: "x${hyper_parameters.c}", c: "${hyper_parameters.a}"',
         ("c: refers to itself: hyper_parameters.a -> hyper_parameters.b -> hyper_parameters.c -> hyper_parameters.a; "
         "give one of them a value")),
        ('a: {b: "${hyper_parameters.a}"}', "a.b: '${hyper_parameters.a}' holds itself; refer to one value of it"),
        ('a: "${hyper_parameters}"', "a: '${hyper_parameters}' holds itself; refer to one value of it"),
        ('width: 1, a: "${hyper_parameters.widht}"',
         "a: '${hyper_parameters.widht}' refers to nothing; did you mean 'hyper_parameters.width'?"),
        ('a: "${}"', "a: '${}' refers to nothing; check the address"),
        ('m: {x: 1}, a: "to ${hyper_parameters.m}"',
         "a: '${hyper_parameters.m}' is a dict and cannot stand within a string; refer to one value of it"),
        ('l: [1], a: "to ${hyper_parameters.l}"',
         "a: '${hyper_parameters.l}' is a list and cannot stand within a string; refer to one value of it"),
    ],
)  # fmt: skip
def test_a_reference_that_leads_nowhere_is_named(faults: Faults, values: str, fault: str) -> None:
    (found,) = faults(f"hyper_parameters: {{{values}}}")
    assert found.endswith(f": hyper_parameters.{fault}")


def test_every_bad_reference_is_reported_where_it_stands(faults: Faults) -> None:
    text = 'hyper_parameters:\n  a: "${hyper_parameters.x}"\n  b: [1, "${hyper_parameters.y}"]\n'
    assert [fault.partition(": ")[0] for fault in faults(text)] == ["config.yaml:2:6", "config.yaml:3:10"]


@pytest.mark.parametrize(
    ("target", "value"),
    [
        ("runner.train_runner.print_interval", 50),
        ("runner.train_runner.startup_args", {}),
        ("output_dir", "runs"),
        ("mode", None),
        ("runner.train_runner.max_steps", 4),
        ("runner.train_runner.max_iteration", 4),
    ],
)
def test_a_reference_sees_defaults_and_other_names(config: Configs, target: str, value: Any) -> None:
    text = f"hyper_parameters: {{a: '${{{target}}}'}}\nrunner: [{{name: train_runner, class: train, max_iteration: 4}}]"
    assert config(text).get("hyper_parameters.a") == value


def test_a_reference_sees_the_workspace_that_is_not_written(config: Configs) -> None:
    assert config('hyper_parameters: {a: "${workspace}/x"}').get("hyper_parameters.a") == f"{Path.cwd()}/x"


def test_a_folder_called_like_a_reference_is_taken_for_none_and_refused(workspace: Callable[..., Path]) -> None:
    folder = workspace({"config.yaml": RUNNER}, "${x}")
    (fault,) = ConfigBuilder(folder / "config.yaml").faults
    assert (
        fault.message
        == f"'{folder}/config.yaml' has '${{x}}' in its name, which a config takes for another value; rename it"
    )


@pytest.mark.parametrize(
    ("path", "taken"),
    [("${hyper_parameters.path}", "far/x.py"), ("${hyper_parameters.folder}/x.py", "far/code/x.py"),
     ("own/${hyper_parameters.path}", "own/x.py"), ("./${hyper_parameters.path}", "x.py")],
)  # fmt: skip
def test_a_relative_path_that_is_referred_to_belongs_to_the_file_that_wrote_its_beginning(
    config: Configs, path: str, taken: str
) -> None:
    base = f"hyper_parameters: {{path: x.py, folder: code}}\n{RUNNER}"
    text = f'_base_: far/base.yaml\nrunner: [{{name: train_runner, startup_class_path: "{path}"}}]'
    found = config(text, files={"far/base.yaml": base})
    assert found.get("runner.train_runner.startup_class_path") == str(Path.cwd() / taken)


def test_sixty_references_in_a_row_are_followed(config: Configs) -> None:
    row = "\n".join(f"  a{n}: ${{hyper_parameters.a{n + 1}}}" for n in range(60))
    assert config(f"hyper_parameters:\n{row}\n  a60: 5").get("hyper_parameters.a0") == 5
