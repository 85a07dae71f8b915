"""Configs whose five stages are written in a test, and the graphs of configs."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from pipeline_plugins.graph.graph import Box, Graph, graphs, mermaid, table
from rich.cells import cell_len
from rich.console import Console

from pipeline.check.checker import inspect
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


Staged = Callable[..., Path]
Drawn = Callable[..., list[Graph]]


def edges(graph: Graph) -> list[str]:
    """``network model startup`` for each key of an edge, with a ``?`` behind where it is only perhaps read."""
    return [f"{each.writer} {key} {each.reader}{'' if each.sure else '?'}" for each in graph.edges for key in each.keys]


def box(graph: Graph, stage: str) -> Box:
    """The box of a stage."""
    return next(each for each in graph.boxes if each.stage == stage)


def notes(box: Box) -> dict[str, list[str]]:
    """All that is said of a box beside its edges."""
    return {**box.reads, **box.writes, **box.doubts}


DEFAULT = [
    "network model startup?",
    "network dataset runner",
    "network model runner",
    "runner metrics terminal?",
    "runner best terminal?",
]


@pytest.mark.parametrize(
    ("example", "runner", "expected"),
    [
        (
            "five_stages",
            "train_runner",
            [
                "network line startup",
                "instance points runner",
                "network line runner",
                "network optimizer runner",
                "network line terminal",
                "runner loss terminal",
            ],
        ),
        ("custom_startup", "train_runner", ["network model startup", *DEFAULT[1:]]),
        ("first_steps", "train_runner", DEFAULT),
        ("movielens_deepfm", "train_runner", DEFAULT),
        ("movielens_deepfm", "infer_runner", DEFAULT),
    ],
)
def test_a_key_goes_from_its_writer_to_each_reader(
    drawn: Drawn, example: str, runner: str, expected: list[str]
) -> None:
    graph = next(each for each in drawn(example) if each.runner == runner)
    assert sorted(edges(graph)) == sorted(expected)


def test_each_box_says_whose_class_it_is(drawn: Drawn) -> None:
    (graph,) = drawn("custom_startup")
    captions = [each.caption for each in graph.boxes]
    assert captions == ["custom pretrain.py:12", "default", "custom startup.py:10", "default", "default"]


def test_the_other_keys_are_noted_in_the_boxes(drawn: Drawn) -> None:
    (graph,) = drawn("five_stages")
    assert {each.stage: notes(each) for each in graph.boxes} == {
        "instance": {},
        "network": {"from the trainer": ["device"]},
        "startup": {"from the trainer": ["engine"], "to the trainer": ["status"]},
        "runner": {"from the trainer": ["runner"], "to plugins": ["current_epoch"]},
        "terminal": {"from the trainer": ["run_dir", "world"]},
    }


@pytest.mark.parametrize(
    ("bodies", "expected"),
    [
        ({"instance": "context['x'] = 1", "network": "context['x'] = 2", "runner": "context['x']"},
         ["network x runner"]),
        ({"instance": "context['x'] = 1", "network": "if context['rank']: context['x'] = 2", "runner": "context['x']"},
         ["instance x runner", "network x runner"]),
        ({"instance": "context['x'] = 1", "network": "context['x']['y'] = 2", "runner": "context['x']"},
         ["instance x network", "instance x runner"]),
        ({"instance": "context['x'] = 1", "network": "context['x'] = 2\ncontext['x']"}, []),
        ({"instance": "context['x'] = 1", "network": "if context['rank']: context['x'] = 2\ncontext.get('x')"},
         ["instance x network?"]),
        ({"instance": "context['x'] = 1", "network": "del context['x']", "runner": "context.get('x')"},
         ["instance x network"]),
        ({"instance": "context['device'] = 1", "network": "context['device']"}, ["instance device network"]),
        ({"network": "context['x']", "runner": "context['x'] = 1"}, []),
    ],
)  # fmt: skip
def test_it_comes_from_the_last_stage_that_always_writes_it_and_from_those_behind_it_that_may(
    staged: Staged, drawn: Drawn, bodies: dict[str, str], expected: list[str]
) -> None:
    (graph,) = drawn(staged(**bodies))
    assert edges(graph) == expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("context['rank']", {"from the trainer": ["rank"]}),
        ("context.get('x')", {"from nobody known": ["x"]}),
        ("context['seen']", {"from plugins": ["seen"]}),
        ("context['x'] = 1", {"to nobody known": ["x"]}),
        ("context['loss'] = 1", {"to plugins": ["loss"]}),
        ("context['is_exit'] = True", {"to the trainer": ["is_exit"]}),
        ("for i in range(3):\n  context['loss'] = 1\n  print(context['loss'])", {"to plugins": ["loss"]}),
        ("context['rank']['a'] = 1", {"from the trainer": ["rank"]}),
        ("getattr(json, 'dumps')(context)", {"may do more": ["stages.py:10 cannot be followed"]}),
    ],
)
def test_a_key_without_an_edge_is_noted(
    staged: Staged, drawn: Drawn, body: str, expected: dict[str, list[str]]
) -> None:
    (graph,) = drawn(staged(startup=body, top='plugins: ["{workspace}/plugin.py"]'))
    assert notes(box(graph, "startup")) == expected


def test_a_key_that_nobody_writes_is_missing_and_its_stage_at_fault(missing: list[Graph]) -> None:
    runner = box(missing[0], "runner")
    assert (runner.missing, notes(runner)) == (["optimizer"], {})
    assert [fault.partition(";")[0] for fault in runner.faults] == ["runner (stages.py:13) reads context['optimizer']"]


def test_a_key_that_is_written_only_after_it_was_read_is_missing_too(staged: Staged, drawn: Drawn) -> None:
    (graph,) = drawn(staged(network="context['x']\ncontext['x'] = 1"))
    assert (box(graph, "network").missing, notes(box(graph, "network"))) == (["x"], {"to nobody known": ["x"]})


def test_a_name_within_a_key_may_be_missing(staged: Staged, drawn: Drawn) -> None:
    (graph,) = drawn(staged(runner="context['train_state']['iteratoin']"))
    assert box(graph, "runner").missing == ["train_state['iteratoin']"]


def test_what_is_no_fault_is_not_missing(staged: Staged, drawn: Drawn) -> None:
    # A trainer of one's own may write it, and may run the stages in another order.
    (graph,) = drawn(staged(runner="context['x']", more=", trainer_class: pipeline.trainer:GeneralTrainer"))
    assert (box(graph, "runner").missing, notes(box(graph, "runner"))) == ([], {"from nobody known": ["x"]})


def test_a_stage_whose_class_cannot_be_told_is_in_question(unclear: list[Graph]) -> None:
    startup = box(unclear[0], "startup")
    assert (startup.caption, notes(startup)) == ("?", {"may do more": ["its class cannot be told"]})
    assert startup.faults == []
    assert notes(box(unclear[0], "runner")) == {"from nobody known": ["optimizer"]}


def test_a_fault_of_the_class_path_is_one_of_the_stage(staged: Staged, drawn: Drawn) -> None:
    (graph,) = drawn(staged(), "runner.mine.startup_class_path={workspace}/stages.py:Startpu")
    assert [(each.stage, each.caption) for each in graph.boxes if each.faults] == [("startup", "?")]
    assert box(graph, "startup").faults[0].endswith("did you mean 'Startup'?")


def test_a_fault_of_the_arguments_is_one_of_the_stage(staged: Staged, drawn: Drawn) -> None:
    (graph,) = drawn(staged(more=", startup_args: {depth: 3}"))
    assert [each.stage for each in graph.boxes if each.faults] == ["startup"]
    assert box(graph, "startup").faults == ["Startup has no argument 'depth'; it takes no arguments"]


def test_another_runners_faults_are_not_drawn(staged: Staged, drawn: Drawn) -> None:
    path = staged(runner="context['x']")
    text = path.read_text()
    trainer = ", trainer_class: pipeline.trainer:GeneralTrainer}"
    path.write_text(
        text + text.splitlines()[-1].replace("mine", "mine2").replace("}\n", "").removesuffix("}") + trainer
    )
    assert [(each.runner, box(each, "runner").missing) for each in drawn(path)] == [("mine", ["x"]), ("mine2", [])]


CUSTOM_STARTUP = """\
flowchart TD
  subgraph r0["train_runner"]
    r0_instance["<b>instance</b><br>custom pretrain.py:12<br>from the trainer: runner, world, hyper_parameters, run_dir"]:::custom
    r0_network["<b>network</b><br>default<br>from the trainer: config, runner_name, device, runner, is_infer, hyper_parameters, hooks"]:::default
    r0_startup["<b>startup</b><br>custom startup.py:10<br>from the trainer: runner, is_infer, config, run_dir, checkpoints, train_state, world"]:::custom
    r0_runner["<b>runner</b><br>default<br>from the trainer: is_infer, train_state<br>to plugins: current_epoch"]:::default
    r0_terminal["<b>terminal</b><br>default<br>from the trainer: run_dir, runner_name, train_state, checkpointer, is_infer, world"]:::default
    r0_network -->|"model"| r0_startup
    r0_network -->|"dataset, model"| r0_runner
    r0_runner -.->|"metrics, best"| r0_terminal
    r0_instance ~~~ r0_network
    r0_network ~~~ r0_startup
    r0_startup ~~~ r0_runner
    r0_runner ~~~ r0_terminal
  end
  classDef default fill:#f8fafc,stroke:#64748b,color:#0f172a
  classDef custom fill:#eef2ff,stroke:#4f46e5,stroke-width:2px,color:#0f172a
  classDef unknown fill:#fff,stroke:#64748b,stroke-dasharray:4 3,color:#0f172a
  classDef fault fill:#fef2f2,stroke:#dc2626,stroke-width:2px,color:#991b1b
"""


def test_the_example_of_a_custom_startup(drawn: Drawn) -> None:
    assert mermaid(drawn("custom_startup")) == CUSTOM_STARTUP


def test_a_missing_key_comes_from_nowhere(missing: list[Graph]) -> None:
    drawing = mermaid(missing)
    assert '    r0_runner_missing0(("✗")):::fault\n' in drawing
    assert '    r0_runner_missing0 -->|"optimizer"| r0_runner\n' in drawing
    assert '    r0_runner["<b>runner</b><br>custom stages.py:11"]:::fault\n' in drawing


def test_names_are_escaped(crowd: list[Graph]) -> None:
    drawing = mermaid(crowd)
    assert 'r0_instance -.->|"five, #60;x#62;#34;y#34;"| r0_network' in drawing
    assert '-->|"a#38;b, four"|' in drawing
    assert '-->|"no#92;nsuch"|' in drawing
    assert '-->|"größe数据"|' in drawing


def test_a_stage_in_question_is_drawn_as_one(drawn: Drawn, unclear: list[Graph]) -> None:
    drawing = mermaid(unclear)
    assert 'r0_startup["<b>startup</b><br>?<br>may do more: its class cannot be told"]:::unknown' in drawing
    assert "custom stages.py:2<br>may do more: stages.py:4 cannot be followed" in drawing


def test_two_runners_have_nodes_of_their_own(drawn: Drawn) -> None:
    drawing = mermaid(drawn("movielens_deepfm"))
    assert '  subgraph r0["train_runner"]\n' in drawing
    assert '  subgraph r1["infer_runner"]\n' in drawing
    nodes = re.findall(r'^ +(\w+)\["', drawing, re.MULTILINE)
    assert len(nodes) == len(set(nodes)) == 10


def rows(graph: Graph) -> dict[str, list[str]]:
    """Stage -> class, reads and writes, as they stand in the table, its lines joined."""
    found: dict[str, list[str]] = {}
    for line in [line for line in text(graph).splitlines() if line.startswith("│")]:
        stage, *cells = (cell.strip() for cell in line[1:-1].split("│"))
        name = stage if stage not in ("", "at fault") else next(reversed(found))
        before = found.setdefault(name, [""] * 3)
        found[name] = [f"{old} {new}".strip() for old, new in zip(before, cells, strict=True)]
    return found


def text(graph: Graph, *, coloured: bool = False) -> str:
    console = Console(width=1000, force_terminal=coloured, color_system="standard" if coloured else None)
    with console.capture() as captured:
        console.print(table(graph))
    return captured.get()


def test_the_example_of_five_stages(drawn: Drawn) -> None:
    assert rows(drawn("five_stages")[0]) == {
        "instance": ["custom your_instance.py:8", "", "points"],
        "network": ["custom your_network.py:8", "from the trainer: device", "line, optimizer"],
        "startup": [
            "custom your_startup.py:8",
            "from network: line from the trainer: engine",
            "to the trainer: status",
        ],
        "runner": [
            "custom your_runner.py:8",
            "from instance: points from network: line, optimizer from the trainer: runner",
            "loss to plugins: current_epoch",
        ],
        "terminal": [
            "custom your_terminal.py:8",
            "from network: line from runner: loss from the trainer: run_dir, world",
            "",
        ],
    }


def test_a_missing_key_comes_from_nobody_and_its_stage_is_at_fault(missing: list[Graph]) -> None:
    assert rows(missing[0])["runner"][1] == "from nobody: optimizer"
    assert rows(missing[0])["network"][2] == "to nobody known: optimiser"
    assert "│ at fault │" in text(missing[0])


def test_what_is_at_fault_is_red(drawn: Drawn, missing: list[Graph]) -> None:
    assert "\x1b[1;31mfrom nobody: optimizer" in text(missing[0], coloured=True)
    assert "\x1b[1;31m" not in text(drawn("five_stages")[0], coloured=True)


def test_what_is_perhaps_read_is_said_to_be(drawn: Drawn) -> None:
    (graph,) = drawn("first_steps")
    assert rows(graph)["terminal"][1].startswith("perhaps from runner: metrics, best from the trainer: ")


def test_what_cannot_be_told_is_in_question(unclear: list[Graph]) -> None:
    assert rows(unclear[0])["instance"][1] == "may do more: stages.py:4 cannot be followed"
    assert rows(unclear[0])["startup"][:2] == ["?", "may do more: its class cannot be told"]


@pytest.mark.parametrize("name", ["first_steps", "movielens_deepfm", "crowd"])
def test_the_table_is_straight_and_fits_a_screen(drawn: Drawn, crowd: list[Graph], name: str) -> None:
    graph = crowd[0] if name == "crowd" else drawn(name)[0]
    widths = {cell_len(line) for line in text(graph).splitlines()}
    assert len(widths) == 1
    assert max(widths) <= 120


def test_a_line_break_in_a_name_is_written_out(staged: Callable[..., Path], drawn: Drawn) -> None:
    (graph,) = drawn(staged(instance="context['a\\nb'] = 1", network="context['a\\nb']", runner="context['c\\x07']"))
    assert rows(graph)["network"][1] == "from instance: a\\nb"
    assert rows(graph)["runner"][1] == "from nobody: c\\x07"
