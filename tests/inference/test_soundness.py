"""A false fault is worse than a missed one: what runs has no fault, however oddly it is written."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline import GeneralTrainer
from pipeline.check.checker import check
from pipeline.stages.base import METHODS
from tests.inference.stages_that_read import PAIRS, READERS
from tests.inference.stages_that_write import NESTED, WRITERS, WRITERS_WITH_LIB

Workspace = Callable[..., Path]
HEAD = "import torch\nfrom pipeline import InstanceBase, NetworkBase, RunnerBase, StartupBase, TerminalBase\n"
X = "context['x']"


def file(stage: str, text: str) -> str:
    """A file with the stage: the text itself, or a class with the text as its method's body."""
    text, name = textwrap.dedent(text), stage.capitalize()
    if f"class {name}" in text:
        return HEAD + text
    head = f"{HEAD}class {name}({name}Base):\n    def {METHODS[stage][1]}(self, context):\n"
    return head + textwrap.indent(text.strip("\n"), " " * 8)


def run(workspace: Workspace, network: str, runner: str, **files: str) -> None:
    """Check and run five stages of the user's own, which do nothing but for these two."""
    stages = dict.fromkeys(METHODS, "pass") | {"network": network, "runner": runner}
    texts = {f"{name}.py": text for name, text in files.items()}
    folder = workspace(texts | {f"{stage}.py": file(stage, text) for stage, text in stages.items()})
    paths = {f"{stage}_class_path": f"{{workspace}}/{stage}.py" for stage in METHODS}
    settings = {"name": "r", "class": "train", "device": "cpu", "epochs": 1, **paths}
    config = {"workspace": str(folder), "runner": [settings]}
    assert check(config) == []
    GeneralTrainer(config).run()


@pytest.mark.parametrize("text", WRITERS.values(), ids=WRITERS)
def test_a_key_that_is_written_in_whatever_way_is_not_missing(workspace: Workspace, text: str) -> None:
    run(workspace, network=text, runner=X)


@pytest.mark.parametrize(("text", "lib"), WRITERS_WITH_LIB.values(), ids=WRITERS_WITH_LIB)
def test_a_key_that_a_neighbouring_file_writes_is_not_missing(workspace: Workspace, text: str, lib: str) -> None:
    run(workspace, network=text, runner=X, lib=lib)


@pytest.mark.parametrize(("text", "read"), NESTED.values(), ids=NESTED)
def test_a_key_within_a_value_that_is_written_in_whatever_way_is_not_missing(
    workspace: Workspace, text: str, read: str
) -> None:
    run(workspace, network=text, runner=read)


@pytest.mark.parametrize("text", READERS.values(), ids=READERS)
def test_a_key_that_is_not_read_is_not_missing(workspace: Workspace, text: str) -> None:
    run(workspace, network="pass", runner=text)


@pytest.mark.parametrize(("network", "runner"), PAIRS.values(), ids=PAIRS)
def test_what_one_stage_does_to_the_other_is_followed(workspace: Workspace, network: str, runner: str) -> None:
    run(workspace, network=network, runner=runner)


def test_nothing_passes_that_certainly_fails(workspace: Workspace) -> None:
    with pytest.raises(AssertionError, match=r"reads context\['x'\]; no earlier stage writes it"):
        run(workspace, network="pass", runner=X)
