"""What the tests of the inference share: the flow of a stage whose source stands in the test."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.inference.flow import Flow, shown
from pipeline.inference.stage import flow_of
from pipeline.user_code import source
from pipeline.workspaces import package_name

FlowOf = Callable[..., Flow]
HEAD = "import torch\nfrom pipeline import RunnerBase\n"
METHOD = "class Runner(RunnerBase):\n    def run(self, context):\n"


@pytest.fixture
def flow(workspace: Callable[..., Path]) -> FlowOf:
    """The flow of a runner stage: of the body of its ``run``, or of a whole file with a class Runner."""

    def infer(
        text: str, arguments: dict[str, object] | None = None, facts: dict[str, object] | None = None, **files: str
    ) -> Flow:
        text = textwrap.dedent(text)
        if "class Runner" not in text:
            text = METHOD + textwrap.indent(text, " " * 8)
        folder = workspace({f"{name}.py": each for name, each in files.items()} | {"stage.py": HEAD + text})
        module = source.read(f"{package_name(folder)}.stage")
        definition = module and source.define(module, "Runner")
        assert definition
        return flow_of(definition, "run", arguments, facts)

    return infer


def needs(flow: Flow) -> str:
    """The reads that certainly fail without their key."""
    return " ".join(sorted({shown(use.path) for use in flow.demands()}))


def reads(flow: Flow) -> str:
    """The keys that are read, or may be."""
    return " ".join(sorted(flow.reads()))


def writes(flow: Flow) -> str:
    """The keys that are written, or may be."""
    return " ".join(sorted({shown(path) for path in flow.written()}))
