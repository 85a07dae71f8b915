"""Which keys go from which stage to which, and what is said of the others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.check.graph import Box, Graph

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
                "network model startup",
                "instance points runner",
                "network model runner",
                "network optimizer runner",
                "network model terminal",
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
        "runner": {"from the trainer": ["config", "runner_name"], "to plugins": ["current_epoch"]},
        "terminal": {"from the trainer": ["run_dir"]},
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


def test_a_key_within_a_key_may_be_missing(staged: Staged, drawn: Drawn) -> None:
    (graph,) = drawn(staged(network="context['model'] = {'a': 1}", runner="context['model']['b']"))
    assert (box(graph, "runner").missing, edges(graph)) == (["model['b']"], ["network model runner"])


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
