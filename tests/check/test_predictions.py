"""What an infer runner is to write, checked from source, under each of the names of the key."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.check.checker import check
from pipeline.config.load import ConfigBuilder

Workspace = Callable[..., Path]
OUTPUTS = """\
def readable(predictions, batch):
    return predictions
"""
CONFIG = """\
dataset: [{{name: points, class_path: "{{workspace}}/own.py:Points"}}, {{name: more, class_path: "{{workspace}}/own.py:Points"}}]
phase:
  - {{name: line, model: torch.nn.Linear, model_args: {{in_features: 1, out_features: 1}}, loss: torch.nn.MSELoss,
     dataset_name: points}}
runner:
  - name: judge
    class: infer
    init_model_path: .
    {keys}
"""
ADDRESS = "runner.judge.predictions"


@pytest.fixture
def config(workspace: Workspace) -> Callable[[str], Path]:
    """The path of a config whose infer runner has these keys."""

    def made(keys: str) -> Path:
        files = {"outputs.py": OUTPUTS, "own.py": "class Points: ...\n", "config.yaml": CONFIG.format(keys=keys)}
        return workspace(files) / "config.yaml"

    return made


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("write_predictions: true", {"format": "jsonl"}),
        ("write_predictions: false", None),
        ('runner_result_dump_path: "{workspace}/d"', {"path": "{folder}/d"}),
        ("runner_result_dump_path: d", {"path": "{folder}/d"}),
        ("runner_result_dump_path:", None),
        ("predictions: {path: d, format: safetensors}", {"path": "{folder}/d", "format": "safetensors"}),
        ('predictions: {from: "{workspace}/outputs.py"}', {"from": "{folder}/outputs.py"}),
        ("predictions: {from: outputs.py:readable}", {"from": "{folder}/outputs.py:readable"}),
    ],
)
def test_every_name_of_the_key_says_the_same_and_its_paths_belong_to_the_file(
    config: Callable[[str], Path], keys: str, expected: dict[str, str] | None
) -> None:
    path = config(keys)
    assert check(path) == []
    found = ConfigBuilder(path).config
    assert found is not None
    whole: dict[str, Any] = {"format": "jsonl", "path": None, "from": None}
    filled = expected and {name: text.replace("{folder}", str(path.parent)) for name, text in expected.items()}
    assert found.get(ADDRESS) == (filled and whole | filled)


def test_an_override_under_any_name_takes_the_place_of_the_key(config: Callable[[str], Path]) -> None:
    path = config("predictions: {format: safetensors}")
    found = ConfigBuilder(path, ["runner.judge.write_predictions=true"]).config
    assert found is not None
    assert found.get(f"{ADDRESS}.format") == "jsonl"


@pytest.mark.parametrize(
    ("keys", "fault"),
    [
        ("predictions: {}\n    write_predictions: true",
         "10:5: runner.judge.write_predictions: means the same as 'predictions', which is set too; keep one"),
        ("write_predictions: false\n    runner_result_dump_path: d",
         "10:5: runner.judge.runner_result_dump_path: means the same as 'predictions', which is set too; keep one"),
        ("predictions: {format: josnl}", f"9:27: {ADDRESS}.format: there is no format 'josnl'; did you mean 'jsonl'?"),
        ("predictions: {pth: d}", f"9:19: {ADDRESS}.pth: unknown key; did you mean 'path'?"),
        ("predictions: {path: 3}", f"9:25: {ADDRESS}.path: is 3, a whole number; write a string"),
        ('predictions: {from: "{workspace}/outputs.py:raedable"}',
         f"9:25: {ADDRESS}.from: '{{folder}}/outputs.py:raedable': outputs.py defines no 'raedable'; it defines readable; "
         "did you mean 'readable'?"),
        ("predictions: {path: d}\nphase.line.valid_dataset_name=[points,more]",
         f"9:25: {ADDRESS}.path: is one file, and there are 2 datasets to predict, with a file each; remove it, or name one "
         "phase in `phases`, and one dataset in it"),
    ],
)  # fmt: skip
def test_what_cannot_be_written_is_a_fault_with_its_place(config: Callable[[str], Path], keys: str, fault: str) -> None:
    keys, _, override = keys.partition("\nphase.")
    path = config(keys)
    [found] = check(path, [f"phase.{override}"] if override else [])
    expected = fault.replace("{folder}", str(path.parent))
    assert str(found).splitlines()[0].removeprefix(f"{path}:") == expected
