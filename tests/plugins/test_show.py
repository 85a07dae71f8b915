"""``pipeline show`` prints the resolved config, each value with where it came from."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from pipeline.check.checker import check_or_raise
from pipeline.config import yaml_tree
from pipeline.config.yaml_tree import Origin

Call = Callable[..., Result]
AWKWARD = """
hyper_parameters:
  like_numbers: ["1e5", "08", .5e-7, "0o10", "1_000", 010, .inf, "1.", "null", "true", "yes", "2001-01-01", "<<", ""]
  "key: #": {"# c": [[1, [2, {a: b}]], [], {}]}
  lines: "a\\n  b\\n\\nc\\n"
  texts: ["x\\ny", {z: "tab\\there"}, "größe 日本", "it's", "back\\\\slash", "  edges  "]
  secret: ${env:PIPELINE_SECRET}
  around: "a ${env:PIPELINE_SECRET} b"
  through: "c ${hyper_parameters.around}"
  "1e3": null
"""


def read_back(text: str) -> object:
    return yaml_tree.parse(text, Origin("shown", Path())).plain()


def comments(text: str) -> dict[str, str]:
    """The key of each line with a value -> the comment after it."""
    lines = (re.fullmatch(r"[ -]*([\w-]+):? .*?  # (.*)", line) for line in text.splitlines())
    return {found[1]: found[2] for found in lines if found}


def test_what_is_shown_is_read_back_as_the_resolved_config(pipeline: Call, linear: Path) -> None:
    done = pipeline("show", linear, "runner.train_runner.epochs=3")
    assert (done.exit_code, done.stderr) == (0, "")
    assert read_back(done.stdout) == check_or_raise(linear, ["runner.train_runner.epochs=3"]).plain()


def test_awkward_values_are_read_back_too_and_secrets_stay_unexpanded(
    pipeline: Call, linear: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPELINE_SECRET", "hidden")
    text = linear.read_text(encoding="utf-8").replace("\nhyper_parameters:\n", AWKWARD)
    linear.write_text(text, encoding="utf-8")
    (linear.parent / "model.py").write_text("from torch.nn import Linear\ndef Model(**anything): return Linear(1, 1)\n")
    overrides = [
        "+hyper_parameters.block=|\n  a\n  b",
        "phase.line.model={workspace}/model.py",
        "phase.line.model_args={}",
    ]
    done = pipeline("show", linear, *overrides)
    shown = read_back(done.stdout)
    assert shown == check_or_raise(linear, overrides).plain(expanded=False)
    assert "hidden" not in done.stdout


def test_each_value_says_where_it_came_from(
    pipeline: Call, workspace: Callable[..., Path], linear: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(linear.parent)
    Path("wide.yaml").write_text(
        "_base_: config.yaml\nhyper_parameters:\n  optimizer:\n    momentum: 0.5\n", encoding="utf-8"
    )
    found = comments(pipeline("show", "wide.yaml", "runner.train_runner.seed=4").stdout)
    lines = linear.read_text(encoding="utf-8").splitlines()
    assert found["momentum"] == "wide.yaml:4"
    assert found["seed"] == "override 'runner.train_runner.seed=4'"
    assert found["max_stage_repeats"] == found["output_dir"] == "default"
    assert lines[int(found["loss"].removeprefix("config.yaml:")) - 1].strip().startswith("loss:")


def test_every_line_with_a_value_has_a_comment(pipeline: Call, linear: Path) -> None:
    lines = pipeline("show", linear).stdout.splitlines()
    assert [line for line in lines if "  # " not in line and not line.endswith(":")] == []


def test_a_config_with_faults_is_not_shown(pipeline: Call, linear: Path) -> None:
    done = pipeline("show", "-m", linear, "-o", "runner.train_runner.epoch=3")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "runner.train_runner.epoch: unknown key; did you mean 'epochs'?" in done.stderr
