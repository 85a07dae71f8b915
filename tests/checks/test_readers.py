"""Who reads a value of the config is told from the source of the config, of the user's files and of ours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.checks.readers import readers
from pipeline.config.load import Draft

Workspace = Callable[..., Path]
STAGES = """\
from pipeline import stages
from .tree import depth


class Startup(stages.Startup):
    def __init__(self, context, path):
        super().__init__(context)

    def startup(self, context):
        config, name = context["config"], context["runner_name"]
        {}
"""
TREE = """\
def depth(context):
    return context["hyper_parameters"]["depth"]
"""


def told(linear: Path, address: str, line: str = "pass", *overrides: str) -> list[str]:
    """The readers of an address that are not ours, where the startup stage holds this line."""
    (linear.parent / "own.py").write_text(STAGES.format(line), encoding="utf-8")
    (linear.parent / "tree.py").write_text(TREE, encoding="utf-8")
    path = "runner.train_runner.startup_class_path={workspace}/own.py:Startup"
    draft = Draft(linear, [path, "hyper_parameters.depth=3", "hyper_parameters.o={a: {b: 1}}", *overrides])
    assert draft.tree is not None
    return [each for each in readers(draft.tree, draft.workspace, address) if not each.startswith("pipeline")]


@pytest.mark.parametrize(
    ("address", "line"),
    [
        ("runner.train_runner.epochs", 'config.get(f"runner.{name}.epochs")'),
        ("runner.train_runner.epochs", 'config.get("runner.train_runner.epochs", 1)'),
        ("runner.train_runner.epochs", 'context["env"]["runner"][0]["epochs"]'),
        ("runner.train_runner.epochs", "config.runners[0].epochs"),
        ("phase.line.dataset_name", 'context["phases"][0]["dataset_name"]'),
        ("dataset.train_data.batch_size", "[dataset.batch_size for dataset in config.settings.dataset]"),
        ("output_dir", "config.settings.output_dir"),
        ("hyper_parameters.depth", 'context["hyper_parameters"]["depth"]'),
        ("hyper_parameters.depth", 'context["hyper_parameters"].get("depth", 1)'),
        ("hyper_parameters.depth", 'context["env"]["hyper_parameters"]["depth"]'),
        ("hyper_parameters.depth", 'config.get("hyper_parameters.depth")'),
        ("hyper_parameters.o.a.b", 'context["hyper_parameters"]["o"]["a"]["b"]'),
        ("hyper_parameters.o.a.b", 'context["hyper_parameters"]["o"]'),
        ("hyper_parameters.o", 'context["hyper_parameters"]["o"]["a"]'),
    ],
)
def test_a_line_that_reads_the_value_is_named(linear: Path, address: str, line: str) -> None:
    assert f"own.py:11: {line}" in told(linear, address, line)


@pytest.mark.parametrize(
    ("address", "line"),
    [
        ("runner.train_runner.epochs", 'config.get(f"runner.{name}.max_steps")'),
        ("runner.train_runner.epochs", 'config.get(f"runner.{name}")'),
        ("runner.train_runner.epochs", 'f"dataset.{name}.epochs"'),
        ("runner.train_runner.epochs", "self.epochs"),
        ("runner.train_runner.epochs", 'context["epochs"]'),
        ("hyper_parameters.o.a.b", 'context["hyper_parameters"]["o"]["c"]'),
        ("hyper_parameters.o", 'context["o"]'),
        ("hyper_parameters.o", 'context["hyper_parameters"].items()'),
    ],
)
def test_a_line_that_reads_something_else_is_not(linear: Path, address: str, line: str) -> None:
    assert [each for each in told(linear, address, line) if each.startswith("own.py:11")] == []


def test_a_file_that_is_imported_relatively_is_searched_too(linear: Path) -> None:
    assert told(linear, "hyper_parameters.depth") == ['tree.py:2: return context["hyper_parameters"]["depth"]']


@pytest.mark.parametrize(
    ("address", "reader"),
    [
        ("runner.train_runner.startup_args.path", "own.py:5: Startup takes it as its argument 'path'"),
        ("dataset.train_data.args.size", "data.py:5: Line takes it as its argument 'size'"),
        ("phase.line.model_args.in_features", "Linear takes it as its argument 'in_features'"),
        ("phase.line.metrics.m.args.from_logits", "LogLoss takes it as its argument 'from_logits'"),
        ("hyper_parameters.bias", "Linear takes it as its argument 'bias'"),
    ],
)
def test_a_class_that_takes_it_as_an_argument_is_named(linear: Path, address: str, reader: str) -> None:
    more = ["phase.line.metrics={m: {class: LogLoss, args: {from_logits: true}}}", "hyper_parameters.bias=true"]
    assert any(each.endswith(reader) for each in told(linear, address, "pass", *more))


def test_what_model_args_give_hyper_parameters_do_not_fill(linear: Path) -> None:
    assert (
        told(linear, "hyper_parameters.bias", "pass", "phase.line.model_args.bias=true", "hyper_parameters.bias=true")
        == []
    )


@pytest.mark.parametrize("target", ["hyper_parameters.o.a.b", "hyper_parameters.o"])
def test_a_reference_reads_what_it_takes(linear: Path, target: str) -> None:
    override = f"runner.train_runner.startup_args.path=${{{target}}}"
    place = f"override '{override}': runner.train_runner.startup_args.path is ${{{target}}}"
    assert told(linear, "hyper_parameters.o.a.b", "pass", override) == [place]


@pytest.mark.parametrize(
    ("address", "file", "words"),
    [
        ("runner.train_runner.epochs", "pipeline/training/agenda.py", "min(runner.epochs or NEVER"),
        ("runner.train_runner.save_interval", "pipeline/training/agenda.py", "runner.intervals"),
        ("runner.train_runner.class", "pipeline/opening.py", 'settings.kind == "infer"'),
        ("runner.train_runner.seed", "pipeline/stages/instance.py", ".seed"),
        ("runner.train_runner.startup_class_path", "pipeline/loading.py", "_class_path"),
        ("runner.train_runner.startup_args", "pipeline/open_runner.py", "_args"),
        ("dataset.train_data.num_workers", "pipeline/data/loader.py", "settings.num_workers"),
        ("phase.line.metrics", "pipeline/training/validation.py", "phase.metrics"),
        ("hyper_parameters.optimizer.learning_rate", "pipeline/stages/network.py", '["optimizer"]'),
        ("output_dir", "pipeline/opening.py", "config.settings.output_dir"),
        ("mode", "pipeline/config/load.py", "self.settings.mode"),
        ("plugins", "pipeline/discovery.py", 'tree.child("plugins")'),
    ],
)
def test_a_line_of_ours_that_reads_the_key_is_named(linear: Path, address: str, file: str, words: str) -> None:
    tree = Draft(linear).tree
    assert tree is not None
    assert any(each.startswith(f"{file}:") and words in each for each in readers(tree, None, address))


def test_a_value_of_which_nothing_tells_has_no_reader(linear: Path) -> None:
    assert told(linear, "hyper_parameters.unread", "pass", "hyper_parameters.unread=1") == []


@pytest.mark.parametrize("path", ["own.py:(", "nowhere.py", "no.such:Name", "5"])
def test_a_class_path_that_leads_nowhere_is_left_to_the_check(linear: Path, path: str) -> None:
    (linear.parent / "broken.py").write_text("def (", encoding="utf-8")
    more = [
        f"runner.train_runner.network_class_path={path}",
        "runner.train_runner.terminal_class_path={workspace}/broken.py",
    ]
    assert told(linear, "hyper_parameters.depth", "pass", *more) == [
        'tree.py:2: return context["hyper_parameters"]["depth"]'
    ]
