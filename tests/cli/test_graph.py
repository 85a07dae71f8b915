"""``pipeline graph`` draws the stages with the keys that flow between them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import Result

from pipeline.check import check

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


def test_the_graph_is_text_on_stdout_without_colours(pipeline: Call) -> None:
    done = pipeline("graph", EXAMPLE)
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.startswith("train_runner\n┏━ instance ━")
    assert "\x1b" not in done.stdout


def test_an_override_changes_the_graph(pipeline: Call, linear: Path) -> None:
    assert "╭─ startup ─" in pipeline("graph", linear).stdout
    (linear.parent / "startup.py").write_text(READER.replace('context["weights"]', "pass"), encoding="utf-8")
    done = pipeline("graph", linear, "runner.train_runner.startup_class_path={workspace}/startup.py")
    assert "┏━ startup ━━━━━━━━━━━━━━━━━━ custom startup.py:4 ━┓" in done.stdout


def test_o_writes_a_drawing_by_its_suffix(pipeline: Call) -> None:
    done = pipeline("graph", EXAMPLE, "-o", "a.svg")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "", "a.svg written\n")
    assert ElementTree.parse("a.svg").getroot().tag == "{http://www.w3.org/2000/svg}svg"
    assert pipeline("graph", "-o", "a.mmd", EXAMPLE).exit_code == 0
    assert Path("a.mmd").read_text(encoding="utf-8").startswith("flowchart TD\n")


def test_a_drawing_that_is_there_is_written_anew(pipeline: Call) -> None:
    Path("a.mmd").write_text("old", encoding="utf-8")
    assert pipeline("graph", EXAMPLE, "-o", "a.mmd").exit_code == 0
    assert "old" not in Path("a.mmd").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "suffix"), [("a.png", ".png"), ("a", ""), ("a.svg.txt", ".txt"), ("x.epochs=3", ".epochs=3")]
)
def test_another_suffix_is_refused(pipeline: Call, name: str, suffix: str) -> None:
    done = pipeline("graph", EXAMPLE, "-o", name)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.endswith(f"Error: {name}: a graph cannot be drawn as '{suffix}'; write .svg or .mmd\n")


def test_a_file_that_cannot_be_written_is_named(pipeline: Call) -> None:
    done = pipeline("graph", EXAMPLE, "-o", "nowhere/a.svg")
    assert done.exit_code == 2
    assert done.stderr.endswith("nowhere/a.svg: cannot be written: No such file or directory; check the path\n")


def test_with_faults_it_is_drawn_all_the_same_and_exits_2(pipeline: Call, faulty: Path) -> None:
    done = pipeline("graph", faulty)
    (fault,) = check(faulty)
    assert (done.exit_code, done.stderr) == (2, f"{fault}\n1 fault; nothing was run\n")
    assert "weights ◄─✗ " in done.stdout


def test_with_faults_a_file_is_written_all_the_same(pipeline: Call, faulty: Path) -> None:
    done = pipeline("graph", faulty, "-o", "a.mmd")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("a.mmd written\n")
    assert '-->|"weights"| r0_startup' in Path("a.mmd").read_text(encoding="utf-8")


@pytest.mark.parametrize("text", ["a: [", "runer: 1"])
def test_where_there_is_nothing_to_draw_only_the_faults_are_said(pipeline: Call, text: str) -> None:
    Path("config.yaml").write_text(text, encoding="utf-8")
    done = pipeline("graph", "config.yaml", "-o", "a.svg")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("config.yaml:1:")
    assert not Path("a.svg").exists()


def test_two_configs_are_refused(pipeline: Call) -> None:
    done = pipeline("graph", "a.yaml", "b.yaml")
    assert done.exit_code == 2
    assert "name one config, not 2: a.yaml b.yaml" in done.stderr


def test_neither_torch_nor_user_code_is_imported() -> None:
    code = f"""if True:
        import sys
        from click.testing import CliRunner
        from pipeline.cli import group
        assert CliRunner().invoke(group, ["graph", {str(EXAMPLE)!r}, "-o", "a.svg"]).exit_code == 0
        print([name for name in sys.modules if name == "torch" or name.startswith("pipeline.workspaces.")])
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
