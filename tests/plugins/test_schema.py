"""``pipeline schema`` writes a JSON Schema that takes what the config takes, and marks what it refuses."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from jsonschema import Draft7Validator
from pipeline_plugins.schema.document import document

from pipeline.check.checker import check
from pipeline.config import yaml_tree
from pipeline.config.aliases import RUNNER_ALIASES
from pipeline.config.keys import fields
from pipeline.config.schema import SECTIONS, ConfigSchema
from pipeline.config.yaml_tree import Origin

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = sorted((REPOSITORY / "workspace_examples").glob("*/config.yaml"))
Call = Callable[..., Result]
RUNNER = "runner: [{{name: r, class: train, {}}}]"


def marked(text: str) -> list[str]:
    """Where an editor would mark the text."""
    plain = yaml_tree.parse(text, Origin("config.yaml", Path())).plain()
    return [error.json_path for error in Draft7Validator(document()).iter_errors(plain)]


def test_it_is_a_json_schema_and_stdout_has_nothing_else(pipeline: Call) -> None:
    done = pipeline("schema")
    assert (done.exit_code, done.stderr) == (0, "")
    assert json.loads(done.stdout) == document()
    Draft7Validator.check_schema(document())


def test_it_can_be_written_into_a_file_that_a_config_names(pipeline: Call) -> None:
    done = pipeline("schema", "-o", "schema.json")
    assert json.loads(Path("schema.json").read_text(encoding="utf-8")) == document()
    assert (done.exit_code, done.stdout) == (0, "")
    assert done.stderr == "schema.json written; begin a config with: # yaml-language-server: $schema=schema.json\n"


def test_a_schema_is_written_anew(pipeline: Call) -> None:
    Path("schema.json").write_text(json.dumps({**document(), "properties": {}}), encoding="utf-8")
    assert pipeline("schema", "-o", "schema.json").exit_code == 0
    assert json.loads(Path("schema.json").read_text(encoding="utf-8")) == document()


@pytest.mark.parametrize("text", ["runner: []\n", '{"title": "mine"}', "[]", "\xff"])
def test_another_file_is_not_overwritten(pipeline: Call, text: str) -> None:
    Path("config.yaml").write_text(text, encoding="latin-1")
    done = pipeline("schema", "-o", "config.yaml")
    assert done.exit_code == 2
    assert "config.yaml: exists already, and is no schema of ours; name another file, or remove it" in done.stderr
    assert Path("config.yaml").read_text(encoding="latin-1") == text


def test_a_file_that_cannot_be_written_is_a_wrong_command_line(pipeline: Call) -> None:
    done = pipeline("schema", "-o", "nowhere/schema.json")
    assert done.exit_code == 2
    assert "nowhere/schema.json: cannot be written: No such file or directory; check the path" in done.stderr


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.parent.name)
def test_no_example_is_marked(path: Path) -> None:
    assert marked(path.read_text(encoding="utf-8")) == []


def test_the_config_of_the_tests_is_not_marked(linear: Path) -> None:
    assert marked(textwrap.dedent(linear.read_text(encoding="utf-8"))) == []


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    "text",
    [
        "_base_: base.yaml",
        "_base_: [a.yaml, b.yaml]\nrunner: [{name: r, epochs: 2}]\ndataset: [{name: d, batch_size: 2}]",
        "_base_: base.yaml\nhyper_parameters: {_delete_: true, a: 1}\nrunner: [{name: r, _delete_: true, class: infer}]",
        "hyper_parameters: {optimizer: {class: Adam, lr: 0.1, betas: [0.9, 0.99]}, any: {thing: [1]}}\n"
        + RUNNER.format("epochs: 1"),
        RUNNER.format(
            "epochs: '${hyper_parameters.e}', print_interval: null, write_predictions: '${hyper_parameters.w}', on_save_error: '${hyper_parameters.o}'"
        ),
        RUNNER.format(
            "startup_args: '${hyper_parameters.args}', phases: '${hyper_parameters.p}', device: 'cuda:${env:N}'"
        ),
        RUNNER.format("save_interval: [100, 2 epoch, '${hyper_parameters.n} minute'], device: 'cuda:1'"),
        "mode: r\nplugins: [progress_bar, {metric_log: false}, '{workspace}/p.py']\n" + RUNNER.format("phases: p"),
        "phase: [{name: p, metrics: {auc: {class: AUC, args: {from_logits: true}}}}]\n" + RUNNER.format("grad_clip: 2"),
        RUNNER.format("precision: bf16, eval_precision: 32, valid_interval: [2 epoch, 10], optimizer_step_limit: 5"),
        RUNNER.format("use_amp: true, keep_best: {metric: valid_loss, mode: min}, debug: '${hyper_parameters.d}'"),
        RUNNER.format("bfloat16_mix_prec: false, compile: true, compile_module_keys: a, compile_mode: max-autotune"),
        RUNNER.format(
            "compile: true, compile_using_dynamic_shape_tracing: null, keep_best: null, overfit_batches: null"
        ),
        "phase: [{name: p, model_of: q}, {name: q, updater: {class_path: a.B, args: {a: 1}}}]\n"
        + RUNNER.format("epochs: 1"),
        "phase: [{name: p, modules: {net: {class: Linear, args: {in_features: 1}}}}]\n" + RUNNER.format("epochs: 1"),
    ],
)
def test_what_the_config_takes_is_not_marked(text: str) -> None:
    assert marked(text) == []


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    ("text", "places"),
    [
        (RUNNER.format("epoch: 1"), ["$.runner[0]"]),
        (RUNNER.format("epochs: two"), ["$.runner[0].epochs"]),
        (RUNNER.format("epochs: 0"), ["$.runner[0].epochs"]),
        (RUNNER.format("device: cuda:x"), ["$.runner[0].device"]),
        (RUNNER.format("save_interval: 2 days"), ["$.runner[0].save_interval"]),
        (RUNNER.format("epochs: 1, profile_training: 1"), ["$.runner[0].profile_training"]),
        (RUNNER.format("epochs: 1, precision: fp8"), ["$.runner[0].precision"]),
        (RUNNER.format("epochs: 1, use_amp: 1"), ["$.runner[0].use_amp"]),
        (RUNNER.format("epochs: 1, valid_interval: 2 days"), ["$.runner[0].valid_interval"]),
        (RUNNER.format("epochs: 1, keep_best: {metric: valid_loss}"), ["$.runner[0].keep_best"]),
        (RUNNER.format("epochs: 1, keep_best: {metric: valid_loss, mode: min, cuont: 2}"), ["$.runner[0].keep_best"]),
        (RUNNER.format("epochs: 1, debug_batches: 0"), ["$.runner[0].debug_batches"]),
        (RUNNER.format("epochs: 1, compile_mode: fast"), ["$.runner[0].compile_mode"]),
        (f"phase: [{{name: p, updater: {{class: U}}}}]\n{RUNNER.format('epochs: 1')}", ["$.phase[0].updater"]),
        (f"phase: [{{name: p, modules: {{net: Linear}}}}]\n{RUNNER.format('epochs: 1')}", ["$.phase[0].modules"]),
        ("runner: [{name: r, class: trian}]", ["$.runner[0].class"]),
        ("runner: [{name: r}]", ["$.runner[0]"]),
        ("runner: [{class: train}]", ["$.runner[0]", "$.runner[0]"]),
        ("mode: r", ["$"]),
        (f"mod: r\n{RUNNER.format('epochs: 1')}", ["$"]),
        (f"dataset: [{{name: d}}]\n{RUNNER.format('epochs: 1')}", ["$.dataset[0]"]),
        (f"phase: [{{name: p, metrics: {{a: {{clas: AUC}}}}}}]\n{RUNNER.format('epochs: 1')}", ["$.phase[0].metrics"]),
        (f"hyper_parameters: {{optimizer: Adam}}\n{RUNNER.format('epochs: 1')}", ["$.hyper_parameters"]),
    ],
)
def test_what_the_config_refuses_is_marked_where_it_stands(text: str, places: list[str]) -> None:
    assert marked(text) == places
    Path("config.yaml").write_text(text, encoding="utf-8")
    assert check("config.yaml") != []


@pytest.mark.parametrize("section", ["", *SECTIONS])
def test_every_key_has_its_meaning_and_its_default(section: str) -> None:
    known: dict[str, Any] = (document()["definitions"][section] if section else document())["properties"]
    for name, info in fields(SECTIONS[section] if section else ConfigSchema).items():
        assert known[name]["description"] == info.description
        if not info.is_required() and info.default_factory is None:
            assert known[name]["default"] == info.default


def test_every_alias_says_what_it_is_the_same_as() -> None:
    known = document()["definitions"]["runner"]["properties"]
    for name, alias in RUNNER_ALIASES.items():
        assert known[name]["description"].startswith(f"the same as {alias.canonical}")
    assert known["use_amp"]["description"] == "the same as precision; true means 'fp16'"
    assert known["ckpt_interval_minutes"]["description"] == "the same as save_interval; 1 means '1 minute'"
