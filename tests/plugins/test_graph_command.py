"""``pipeline graph`` draws the stages with the keys that flow between them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from pipeline.check.checker import check

Call = Callable[..., Result]
EXAMPLE = Path(__file__).parents[2] / "workspace_examples" / "five_stages" / "config.yaml"
READER = """
from pipeline import stages

class Startup(stages.Startup):
    def startup(self, context):
        context["weights"]
"""


@pytest.fixture
def faulty(linear: Path) -> Path:
    """A config whose startup stage reads what nobody writes."""
    (linear.parent / "startup.py").write_text(READER, encoding="utf-8")
    line = '{name: train_runner, startup_class_path: "{workspace}/startup.py", '
    linear.write_text(linear.read_text(encoding="utf-8").replace("{name: train_runner, ", line), encoding="utf-8")
    return linear


def test_the_graph_is_a_table_on_stdout_without_colours(pipeline: Call) -> None:
    done = pipeline("graph", EXAMPLE)
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.startswith("train_runner ")
    assert "\x1b" not in done.stdout


def test_an_override_changes_the_graph(pipeline: Call, linear: Path) -> None:
    assert "│ startup  │ default │" in pipeline("graph", linear).stdout
    (linear.parent / "startup.py").write_text(READER.replace('context["weights"]', "pass"), encoding="utf-8")
    done = pipeline("graph", linear, "-o", "runner.train_runner.startup_class_path={workspace}/startup.py")
    assert "│ startup  │ custom startup.py:4 │" in done.stdout


def test_it_is_printed_as_mermaid(pipeline: Call) -> None:
    done = pipeline("graph", "--mermaid", EXAMPLE)
    assert (done.exit_code, done.stdout.splitlines()[0], done.stderr) == (0, "flowchart TD", "")


@pytest.mark.parametrize(
    ("words", "line"), [((), "from nobody: weights"), (("--mermaid",), '-->|"weights"| r0_startup')]
)
def test_with_faults_it_is_printed_all_the_same_and_exits_2(
    pipeline: Call, faulty: Path, words: tuple[str, ...], line: str
) -> None:
    done = pipeline("graph", faulty, *words)
    (fault,) = check(faulty)
    assert (done.exit_code, done.stderr) == (2, f"{fault}\n1 fault; nothing was run\n")
    assert line in done.stdout


@pytest.mark.parametrize("text", ["a: [", "runer: 1"])
def test_where_there_is_nothing_to_draw_only_the_faults_are_said(pipeline: Call, text: str) -> None:
    Path("config.yaml").write_text(text, encoding="utf-8")
    done = pipeline("graph", "config.yaml")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("config.yaml:1:")


def test_two_configs_are_refused(pipeline: Call) -> None:
    done = pipeline("graph", "a.yaml", "b.yaml")
    assert done.exit_code == 2
    assert "name one config, not 2: a.yaml b.yaml" in done.stderr
