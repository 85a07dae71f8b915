"""Who takes a value of the config: the values that refer to it, and the classes with an argument of its name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from pipeline_plugins.explain.usages import usages

from pipeline.config.load import ConfigBuilder

Workspace = Callable[..., Path]
STARTUP = """\
from pipeline import stages


class Startup(stages.Startup):
    def __init__(self, context, path):
        super().__init__(context)
"""


def told(linear: Path, address: str, *overrides: str) -> list[str]:
    """Who takes the value at an address, where the startup stage has an argument ``path``."""
    (linear.parent / "own.py").write_text(STARTUP, encoding="utf-8")
    path = "runner.train_runner.startup_class_path={workspace}/own.py:Startup"
    draft = ConfigBuilder(linear, [path, "hyper_parameters.o={a: {b: 1}}", *overrides])
    assert draft.tree is not None
    return usages(draft.tree, draft.workspace, address)


@pytest.mark.parametrize(
    ("address", "reader"),
    [
        ("runner.train_runner.startup_args.path", "own.py:4: Startup takes it as its argument 'path'"),
        ("dataset.train_data.args.size", "data.py:8: Line takes it as its argument 'size'"),
        ("phase.line.model_args.in_features", "Linear takes it as its argument 'in_features'"),
        ("phase.line.metrics.m.args.from_logits", "LogLoss takes it as its argument 'from_logits'"),
        ("hyper_parameters.bias", "Linear takes it as its argument 'bias'"),
    ],
)
def test_a_class_that_takes_it_as_an_argument_is_named(linear: Path, address: str, reader: str) -> None:
    more = ["phase.line.metrics={m: {class: LogLoss, args: {from_logits: true}}}", "hyper_parameters.bias=true"]
    assert any(each.endswith(reader) for each in told(linear, address, *more))


def test_what_model_args_give_hyper_parameters_do_not_fill(linear: Path) -> None:
    assert told(linear, "hyper_parameters.bias", "phase.line.model_args.bias=true", "hyper_parameters.bias=true") == []


@pytest.mark.parametrize("target", ["hyper_parameters.o.a.b", "hyper_parameters.o"])
def test_a_reference_reads_what_it_takes(linear: Path, target: str) -> None:
    override = f"runner.train_runner.startup_args.path=${{{target}}}"
    place = f"override '{override}': runner.train_runner.startup_args.path is ${{{target}}}"
    assert told(linear, "hyper_parameters.o.a.b", override) == [place]


@pytest.mark.parametrize("address", ["hyper_parameters.unread", "runner.train_runner.epochs", "output_dir"])
def test_what_nothing_takes_has_no_usage(linear: Path, address: str) -> None:
    assert told(linear, address, "hyper_parameters.unread=1") == []


@pytest.mark.parametrize("path", ["own.py:(", "nowhere.py", "no.such:Name", "5", "{workspace}/broken.py"])
def test_a_class_path_that_leads_nowhere_is_left_to_the_check(linear: Path, path: str) -> None:
    (linear.parent / "broken.py").write_text("def (", encoding="utf-8")
    assert told(linear, "phase.line.model_args.in_features", f"phase.line.model={path}") == []
