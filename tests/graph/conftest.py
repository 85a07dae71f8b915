"""Configs whose five stages are written in a test, and the graphs of configs."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.check.checker import inspect
from pipeline.check.graph import Graph, graphs
from pipeline.stages.base import METHODS

EXAMPLES = Path(__file__).parents[2] / "workspace_examples"
CROWD = {
    "instance": "context['a&b'] = context['<x>\"y\"'] = context['four'] = context['five'] = context['six_and_more'] = 1",
    "network": """
context["a&b"], context["four"], context.get("five"), context.get('<x>"y"')
context["größe数据"], context["no\\nsuch"], context["neither"]
context["model"] = context["dataset"] = context["tree"] = context["schedule"] = context["optimizer"] = 1
if context["rank"]:
    context["four"] = 5
""",
    "startup": """
context["a&b"], context["five"], context["model"], context["tree"], context["schedule"], context["optimizer"]
context["weights"] = context.get("dataset")
""",
    "runner": """
context["a&b"], context["five"], context["model"], context["tree"], context["schedule"], context["optimizer"]
context["four"], context["weights"], context.get("x")
context["loss"] = context.get("dataset")
""",
    "terminal": "context['loss'], context['four'], context['weights'], context['<x>\"y\"']",
}
"""The bodies of five stages between which much flows."""
PLUGIN = """
from pipeline import hookimpl
class Plugin:
    @hookimpl
    def after_epoch(self, context):
        context["seen"] = context["loss"]
"""


@pytest.fixture
def staged(workspace: Callable[..., Path]) -> Callable[..., Path]:
    """A config with five stages of its own: ``staged(instance="context['x'] = 1")``; one that isn't given does nothing.

    ``runner`` is the body of the runner stage; ``more`` goes into the runner of the config, ``top`` above it.
    """

    def write(more: str = "", top: str = "", **bodies: str) -> Path:
        lines = ["import json, pipeline", *(_stage(stage, bodies.get(stage, "pass")) for stage in METHODS)]
        paths = "".join(f', {stage}_class_path: "{{workspace}}/stages.py"' for stage in METHODS)
        config = f"{top}\nrunner:\n  - {{name: mine, class: train, epochs: 1{paths}{more}}}\n"
        files = {"config.yaml": config, "stages.py": "\n".join(lines), "plugin.py": PLUGIN}
        return workspace(files) / "config.yaml"

    return write


def _stage(stage: str, body: str) -> str:
    base, method = METHODS[stage]
    head = f"class {stage.capitalize()}(pipeline.{base.__name__}):\n  def {method}(self, context):\n"
    return head + textwrap.indent(body.strip(), "    ")


@pytest.fixture
def drawn() -> Callable[..., list[Graph]]:
    """The graphs of a config, or of the example of a name."""

    def draw(config: Path | str, *overrides: str) -> list[Graph]:
        checked = inspect(EXAMPLES / config / "config.yaml" if isinstance(config, str) else config, overrides)
        return graphs(checked.flows, checked.faults)

    return draw


@pytest.fixture
def crowd(staged: Callable[..., Path], drawn: Callable[..., list[Graph]]) -> list[Graph]:
    """A graph with many edges, with missing keys and with names that have to be escaped."""
    return drawn(staged(**CROWD))


@pytest.fixture
def missing(staged: Callable[..., Path], drawn: Callable[..., list[Graph]]) -> list[Graph]:
    """A graph whose runner stage reads a key that nobody writes."""
    return drawn(staged(network="context['optimiser'] = 1", runner="context['optimizer']"))


@pytest.fixture
def small(staged: Callable[..., Path], drawn: Callable[..., list[Graph]]) -> list[Graph]:
    """A small graph with each kind of line."""
    return drawn(staged(instance="context['x'] = 1", network="context.get('x')", runner="context['x'], context['y']"))


@pytest.fixture
def unclear(staged: Callable[..., Path], drawn: Callable[..., list[Graph]]) -> list[Graph]:
    """A graph with a stage that cannot be followed, and one whose class cannot be told."""
    path = staged(instance="getattr(json, 'dumps')(context)", runner="context['optimizer']")
    return drawn(path, "runner.mine.startup_class_path=os.path:Startup")
