"""All faults of a config, in the order of the file, each with its line and a caret under it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.check.checker import check, check_or_raise
from pipeline.errors import ConfigError, Fault

SEED = """\
# the seed's config, with a typo
runner:
  - name: train_runner
    class: single_train
    epochs: 2
    device: cpu
    print_interval: 1
    instance_class_path: "{workspace}/stages.py"
    network_class_path: "{workspace}/stages.py"
    runner_class_path: "{workspace}/stages.py"
    terminal_class_path: "{workspace}/stages.py"
    startup_class_paht: "{workspace}/stages.py"
"""
STAGES = """
    from pipeline import stages
    class Instance(stages.Instance): pass
    class Network(stages.Network): pass
    class Runner(stages.Runner): pass
    class Terminal(stages.Terminal): pass
"""
MANY = """\
outptu_dir: x
mode: [train_runer]
plugins: [progres_bar]
hyper_parameters: {optimizer: {class: SGD}, a: "${hyper_parameters.b}"}
dataset:
  - {name: train_data, class_path: "{workspace}/data.py:Lin", batch_siz: 4}
runner:
  - name: train_runner
    class: train
    epochs: two
    fleet_mode: sync
    max_steps: 4
    max_iteration: 3
    startup_class_path: "{workspace}/nope.py"
  - {name: train_runner, class: trian}
phase:
  - name: line
    model: torch.nn.Nowhere
    dataset_name: train
"""


def pointed_at(fault: Fault) -> str:
    """What stands above the caret in the message, up to the end of the line."""
    _, source, caret = str(fault).splitlines()
    assert caret.strip() == "^"
    return source[caret.index("^") :]


def test_a_mistyped_class_path_key_is_named_with_line_caret_and_the_nearest_right_one(
    workspace: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(workspace({"config.yaml": SEED, "stages.py": STAGES}))
    (fault,) = [each for each in check("config.yaml") if "paht" in each.address]
    assert str(fault) == (
        "config.yaml:12:5: runner.train_runner.startup_class_paht: unknown key; did you mean 'startup_class_path'?\n"
        '        startup_class_paht: "{workspace}/stages.py"\n'
        "        ^"
    )


def test_the_file_is_called_as_the_user_typed_it(workspace: Callable[..., Path]) -> None:
    path = workspace({"config.yaml": SEED, "stages.py": STAGES}) / "config.yaml"
    assert {fault.where for fault in check(path)} == {str(path)}


def test_all_faults_are_reported_at_once_in_the_order_of_the_file(
    workspace: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(workspace({"config.yaml": MANY, "data.py": "class Line: pass"}))
    found = [(fault.line, fault.column, fault.address) for fault in check("config.yaml")]
    assert found == sorted(found, key=lambda each: each[:2])
    assert [(line, address) for line, _, address in found] == [
        (1, "outptu_dir"),
        (2, "mode"),
        (3, "plugins"),
        (4, "hyper_parameters.a"),
        (6, "dataset.train_data.batch_siz"),
        (10, "runner.train_runner.epochs"),
        (11, "runner.train_runner.fleet_mode"),
        (13, "runner.train_runner.max_iteration"),
        (15, "runner.train_runner"),
        (15, "runner.train_runner.class"),
        (18, "phase.line.model"),
        (19, "phase.line.dataset_name"),
    ]


def test_the_error_of_a_config_holds_all_faults(workspace: Callable[..., Path]) -> None:
    path = workspace({"config.yaml": MANY}) / "config.yaml"
    with pytest.raises(ConfigError) as raised:
        check_or_raise(path)
    assert [str(fault) for fault in raised.value.faults] == [str(fault) for fault in check(path)]
    assert str(raised.value) == "\n".join(map(str, check(path)))


@pytest.mark.parametrize(
    ("line", "above"),
    [
        ("typo: 1", "typo: 1"),
        ("  typo: 1", "typo: 1"),
        ("{größe: 日本, typo: 1}", "typo: 1}"),
        ("{'a\\tb': \"\t\", typo: 1}  # \t", "typo: 1}  #"),
        ("{🙂: 1, typo: 1}", "typo: 1}"),
    ],
)
def test_the_caret_points_at_the_key(line: str, above: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("config.yaml").write_text(f"# größe\t🙂\n{line}\n", encoding="utf-8")
    (fault,) = [each for each in check("config.yaml") if each.address == "typo"]
    assert (fault.line, pointed_at(fault)) == (2, above)


@pytest.mark.parametrize(
    ("line", "above"),
    [("    epochs:   two", "two"), ("    phases: [5]", "5]"), ('    "größe":\t1', "\"größe\":\t1")],
)  # fmt: skip
def test_the_caret_points_at_the_value_that_is_wrong(line: str, above: str) -> None:
    text = f"runner:\n  - name: r\n    class: train\n    max_steps: 1\n{line}\n"
    Path("config.yaml").write_text(text.replace("\t", " "), encoding="utf-8")
    (fault,) = [each for each in check("config.yaml") if each.line == 5]
    assert pointed_at(fault) == above.replace("\t", " ")


def test_a_fault_as_data_says_the_same() -> None:
    Path("config.yaml").write_text("runner: [{name: r, class: train, epoch: 1}]")
    (fault,) = [each for each in check("config.yaml") if each.address == "runner.r.epoch"]
    assert fault.as_dict() == {
        "where": "config.yaml",
        "line": 1,
        "column": 34,
        "address": "runner.r.epoch",
        "message": "unknown key; did you mean 'epochs'?",
        "source": "runner: [{name: r, class: train, epoch: 1}]",
    }


def test_a_long_value_is_cut() -> None:
    Path("config.yaml").write_text(f"output_dir: [{'x' * 100}]\nrunner: [{{name: r, class: infer}}]")
    (fault,) = [each for each in check("config.yaml") if each.address == "output_dir"]
    assert fault.message == f"is ['{'x' * 55}…, a list; write a string"


def test_faults_of_a_dict_name_the_address_alone() -> None:
    found = [str(fault) for fault in check({"runner": [{"name": "r", "class": "train", "epoch": 1}]})]
    assert "dict: runner.r.epoch: unknown key; did you mean 'epochs'?" in found


def test_a_runner_whose_class_is_wrong_is_not_judged_as_another(linear: Path) -> None:
    found = check(linear, ["runner.train_runner.class=trian", "runner.train_runner.epochs="])
    assert [fault.address for fault in found] == ["runner.train_runner.class"]
