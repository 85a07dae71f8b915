"""``pipeline explain`` says what a value means, what set it, and who takes it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

Call = Callable[..., Result]
BASE = """\
hyper_parameters:
  epochs: 9
runner:
  - {name: train_runner, epochs: 5, max_grad_norm: 2}
"""


@pytest.fixture
def config(linear: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The small complete config, which inherits from ``base.yaml``."""
    monkeypatch.chdir(linear.parent)
    Path("base.yaml").write_text(BASE, encoding="utf-8")
    text = linear.read_text(encoding="utf-8").replace("epochs: 2", "epochs: '${hyper_parameters.epochs}'")
    linear.write_text(f"_base_: base.yaml\n{text}", encoding="utf-8")
    return Path("config.yaml")


def row(done: Result, title: str) -> list[str]:
    """The lines under a title."""
    found = re.search(rf"^  {title} +(.*\n(?:   .*\n)*)", done.stdout, flags=re.MULTILINE)
    return [line.strip() for line in found[1].splitlines()] if found else []


def test_a_key_is_explained_whole(pipeline: Call, linear: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(linear.parent)
    done = pipeline("explain", "config.yaml", "runner.train_runner.max_steps")
    assert (done.exit_code, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines == [
        "runner.train_runner.max_steps",
        "  type     integer above 0, or string, or null",
        "  default  null",
        "  means    iterations over all phases, or updates as in `100 update`",
        "  same as  max_iteration",
        "  value    null",
        "  set by   default",
    ]


def test_every_place_that_set_a_value_is_listed_in_order(pipeline: Call, config: Path) -> None:
    done = pipeline("explain", config, "runner.train_runner.epochs=3", "runner.train_runner.epochs")
    line = next(n for n, text in enumerate(config.read_text().splitlines(), 1) if "train_runner" in text)
    assert row(done, "set by") == [
        "base.yaml:4: 5",
        f"config.yaml:{line}: ${{hyper_parameters.epochs}}",
        "${hyper_parameters.epochs}: base.yaml:2: 9",
        "override 'runner.train_runner.epochs=3': 3   <- this one counts",
    ]
    assert row(done, "value") == ["3"]


def test_a_reference_is_followed_to_where_the_value_stands(pipeline: Call, config: Path) -> None:
    done = pipeline("explain", config, "+hyper_parameters.epochs=4", "runner.train_runner.epochs")
    assert row(done, "value") == ["4"]
    assert row(done, "set by")[2:] == [
        "${hyper_parameters.epochs}: base.yaml:2: 9",
        "${hyper_parameters.epochs}: override '+hyper_parameters.epochs=4': 4   <- this one counts",
    ]


def test_who_takes_the_value_is_listed(pipeline: Call, config: Path) -> None:
    done = pipeline("explain", config, "+hyper_parameters.bias=true", "hyper_parameters.bias")
    assert [line.partition(": ")[2] for line in row(done, "used by")] == ["Linear takes it as its argument 'bias'"]
    done = pipeline("explain", config, "hyper_parameters.epochs")
    assert [line.partition(": ")[2] for line in row(done, "used by")] == [
        "runner.train_runner.epochs is ${hyper_parameters.epochs}"
    ]


@pytest.mark.parametrize("name", ["grad_clip", "max_grad_norm"])
def test_another_name_of_a_key_is_the_key(pipeline: Call, config: Path, name: str) -> None:
    done = pipeline("explain", config, f"runner.train_runner.{name}")
    assert done.stdout.splitlines()[0] == "runner.train_runner.grad_clip"
    assert (row(done, "same as"), row(done, "set by")) == (["max_grad_norm"], ["base.yaml:4: 2"])


@pytest.mark.parametrize(
    ("address", "kind", "means"),
    [
        ("hyper_parameters.optimizer", "free", "part of hyper_parameters: free values, except `optimizer`"),
        ("hyper_parameters.optimizer.class", "free", "part of hyper_parameters: free values, except `optimizer`"),
        ("dataset.train_data.args.size", "free", "part of args: keyword arguments of the dataset class"),
        ("runner.train_runner.seed", "integer from 0 below 4294967296, or null",
         "seed of weights and order of data; null is chance"),
        ("runner.train_runner.class", "train, infer, single_train, single_infer, local_cluster_train or cluster_train",
         "train or infer; single_train and single_infer mean the same"),
        ("runner.train_runner.save_interval", "interval, list of intervals or null",
         "how often to save, at the end too; null only at the end"),
        ("dataset.train_data.shuffle", "true or false", "a new order in each epoch of training, from the runner's seed"),
        ("phase.line.model", "class path, or null", "an nn.Module or a Brain (class Model)"),
        ("plugins", "list of plugins", "added to the default plugins; {name: false} removes one"),
        ("runner", "list", "the runners, each item with a name"),
        ("runner.train_runner", "free", "part of runner: the runners, each item with a name"),
    ],
)  # fmt: skip
def test_type_and_meaning_are_the_schema_s(pipeline: Call, linear: Path, address: str, kind: str, means: str) -> None:
    done = pipeline("explain", linear, address)
    assert (row(done, "type"), row(done, "means")) == ([kind], [means])


def test_a_required_key_has_no_default(pipeline: Call, linear: Path) -> None:
    assert row(pipeline("explain", linear, "dataset.train_data.class_path"), "default") == ["none: it is required"]


@pytest.mark.parametrize(
    ("address", "hint"),
    [
        ("runner.train_runner.epoch", "; did you mean 'runner.train_runner.epochs'?"),
        ("runner.train_runner.print_intervall", "; did you mean 'runner.train_runner.print_interval'?"),
        ("runner.train_runer.epochs", "; did you mean 'runner.train_runner.epochs'?"),
        ("outptu_dir", "; did you mean 'output_dir'?"),
        ("zzz", "; `pipeline show config.yaml` has all there are"),
    ],
)
def test_an_address_that_is_not_there_is_named_with_the_nearest(
    pipeline: Call, linear: Path, monkeypatch: pytest.MonkeyPatch, address: str, hint: str
) -> None:
    monkeypatch.chdir(linear.parent)
    done = pipeline("explain", "config.yaml", address)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.endswith(f"Error: config.yaml: there is no '{address}'{hint}\n")


def test_a_misspelt_key_that_is_written_is_none(pipeline: Call, linear: Path) -> None:
    done = pipeline("explain", linear, "runner.train_runner.epoch=3", "runner.train_runner.epoch")
    assert (done.exit_code, done.stdout) == (2, "")


def test_a_config_with_faults_is_explained_all_the_same(pipeline: Call, linear: Path) -> None:
    done = pipeline("explain", linear, "outptu_dir=x", "runner.train_runner.epochs")
    assert done.exit_code == 0
    assert row(done, "value") == ["2"]
    assert done.stderr == f"{linear} has faults; `pipeline check` names them\n"


def test_a_config_that_cannot_be_read_is_refused(pipeline: Call) -> None:
    Path("config.yaml").write_text("a: [1", encoding="utf-8")
    done = pipeline("explain", "config.yaml", "mode")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("config.yaml:1:6: expected ',' or ']', but got '<stream end>'; mend the YAML\n")


@pytest.mark.parametrize("words", [[], ["config.yaml"], ["runner.train_runner.epochs=3", "config.yaml"]])
def test_without_an_address_the_command_line_is_wrong(pipeline: Call, words: list[str]) -> None:
    done = pipeline("explain", *words)
    assert done.exit_code == 2
    assert "name an address, e.g. pipeline explain config.yaml runner.train_runner.epochs" in done.stderr


@pytest.mark.parametrize(
    "words", [["-m", "{}", "mode"], ["mode=train_runner", "{}", "mode"], ["{}", "mode", "-o", "mode=x"]]
)
def test_config_and_overrides_may_come_in_any_order(pipeline: Call, linear: Path, words: list[str]) -> None:
    done = pipeline("explain", *(word.replace("{}", str(linear)) for word in words))
    assert (done.exit_code, done.stdout.splitlines()[0]) == (0, "mode")


def test_a_secret_is_not_shown(pipeline: Call, linear: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPELINE_SECRET", "hidden")
    done = pipeline("explain", linear, "+hyper_parameters.key=${env:PIPELINE_SECRET}", "hyper_parameters.key")
    assert row(done, "value") == ["${env:PIPELINE_SECRET}"]
    assert "hidden" not in done.stdout


def test_a_circle_of_references_is_followed_once(pipeline: Call, linear: Path) -> None:
    circle = [
        "+hyper_parameters.a=${hyper_parameters.b}",
        "+hyper_parameters.b=x${hyper_parameters.a}${hyper_parameters.a}",
    ]
    done = pipeline("explain", linear, *circle, "+hyper_parameters.c=${hyper_parameters.a}", "hyper_parameters.c")
    assert (done.exit_code, row(done, "set by")) == (0, [
        "override '+hyper_parameters.c=${hyper_parameters.a}': ${hyper_parameters.a}",
        f"${{hyper_parameters.a}}: override '{circle[0]}': ${{hyper_parameters.b}}",
        f"${{hyper_parameters.b}}: override '{circle[1]}': x${{hyper_parameters.a}}${{hyper_parameters.a}}",
    ])  # fmt: skip


GROUPED = """\
hyper_parameters:
  optimizer:
    class: AdamW
    learning_rate: 0.01
    weight_decay: 0.1
    groups: [{params: "*.bias", weight_decay: 0}, {params: body, lr: 0.1x}]
dataset: [{name: data, class_path: torch.utils.data.TensorDataset}]
runner: [{name: train_runner, class: train, epochs: 1}]
phase: [{name: p, model: "{workspace}/model.py", loss: torch.nn.functional.mse_loss, dataset_name: data}]
"""
NET = """\
from torch import nn
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 1)
    def forward(self, x): return self.head(self.body(x))
"""
DIVIDED = [
    "phase p, lr 0.01, weight_decay 0: 2 parameters, 5 numbers", "body.bias [4]", "head.bias [1]",
    "phase p, lr 0.001: 1 parameter, 12 numbers", "body.weight [4, 3]",
    "phase p, lr 0.01: 1 parameter, 4 numbers", "head.weight [1, 4]",
]  # fmt: skip


@pytest.fixture
def grouped(workspace: Callable[..., Path]) -> Path:
    """A config with parameter groups."""
    return workspace({"config.yaml": GROUPED, "model.py": NET}) / "config.yaml"


@pytest.mark.parametrize("address", ["optimizer", "optimizer.groups", "optimizer.groups.1.params"])
def test_what_is_in_which_parameter_group_is_listed(pipeline: Call, grouped: Path, address: str) -> None:
    assert row(pipeline("explain", grouped, f"hyper_parameters.{address}"), "groups") == DIVIDED


def test_the_groups_of_a_scheduler_are_listed_likewise(pipeline: Call, grouped: Path) -> None:
    args = "{optim_type: AdamW, optim_conf: {lr: 0.01, weight_decay: 0.1}, remove_vector_weight_decay: true}"
    scheduler = f"phase.p.optim_schedulers={{main: {{class: constant, args: {args}}}}}"
    done = pipeline("explain", grouped, scheduler, "hyper_parameters={}", "phase.p.optim_schedulers.main")
    assert row(done, "groups") == [
        *DIVIDED[:3], "phase p, lr 0.01: 2 parameters, 16 numbers", "body.weight [4, 3]", "head.weight [1, 4]"
    ]  # fmt: skip


def test_what_does_not_divide_parameters_says_nothing_of_groups(pipeline: Call, grouped: Path, linear: Path) -> None:
    assert row(pipeline("explain", grouped, "hyper_parameters.optimizer.class"), "groups") == []
    assert row(pipeline("explain", linear, "hyper_parameters.optimizer"), "groups") == []


@pytest.mark.parametrize(("override", "why"), [
    ("hyper_parameters.optimizer.groups=[{params: bdoy}]", "'bdoy' matches no parameter that is trained; did you mean 'body'?"),
    ("phase.p.model=torch.nn.Linear", "Linear needs the arguments in_features, out_features"),
    ("phase.p.model=torch.nn.Flatten", "has no parameter that is trained"),
])  # fmt: skip
def test_why_the_groups_cannot_be_told_is_said(pipeline: Call, grouped: Path, override: str, why: str) -> None:
    (line,) = row(pipeline("explain", grouped, override, "hyper_parameters.optimizer"), "groups")
    assert line.startswith("cannot tell: ")
    assert why in line
