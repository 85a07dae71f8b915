"""The shared dict: what it holds, what it says of a missing key, and what it remembers of who used which."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline import Context, EngineMode, GeneralTrainer, testing
from pipeline.context import KEYS
from pipeline.errors import ContextError

TRAINERS = [key.name for key in KEYS if key.writer == "trainer" and key.name != "error"]


def line_of(text: str) -> int:
    """The number of the only line of this file that ends with ``text``."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    (number,) = [number for number, line in enumerate(lines, 1) if line.endswith(text)]
    return number


def accesses(context: Context) -> list[tuple[str, str, str]]:
    """(stage, key, action) of each access so far."""
    return [(each["stage"], each["key"], each["action"]) for each in context.record()]


@pytest.mark.parametrize(
    "use",
    [
        lambda context: context["modle"],
        lambda context: context.pop("modle"),
        lambda context: context.__delitem__("modle"),
    ],
)
def test_a_missing_key_says_who_read_it_what_is_there_and_the_nearest(use: Callable[[Context], object]) -> None:
    context = Context(model={}, dataset={})
    context.enter("runner")
    message = r"context\['modle'\] was read by runner \(test_context\.py:\d+\) but nothing wrote it; "
    with pytest.raises(ContextError, match=message + "written so far: model, dataset; did you mean 'model'"):
        use(context)


def test_a_missing_key_names_the_line_that_read_it() -> None:
    with pytest.raises(ContextError, match=rf"\(test_context\.py:{line_of('# read here')}\)"):
        Context()["tree"]  # read here


def test_a_missing_key_of_the_framework_says_whose_it_is_to_write() -> None:
    with pytest.raises(
        ContextError, match=r"context\['model'\] .* \(it is network's to write\); written so far: points"
    ):
        Context(points=1)["model"]


def test_a_missing_key_that_the_stage_itself_owes_is_to_be_written_here() -> None:
    context = Context(points=1)
    context.enter("network")
    with pytest.raises(ContextError, match=r"written so far: points; write it here: context\['model'\] = …$"):
        context["model"]["line"] = 1


def test_a_missing_key_of_the_framework_is_right_and_not_meant_to_be_another() -> None:
    with pytest.raises(ContextError, match=r"datasets; write it in an earlier stage: context\['dataset'\] = …$"):
        Context(datasets=1)["dataset"]


def test_a_missing_key_that_is_near_to_none_says_how_to_write_it() -> None:
    with pytest.raises(
        ContextError, match=r"written so far: nothing; write it in an earlier stage: context\['tree'\] = "
    ):
        Context()["tree"]


def test_a_context_error_is_a_key_error_and_shows_its_message_as_it_is() -> None:
    with pytest.raises(KeyError) as caught:
        Context()["tree"]
    assert str(caught.value).startswith("context['tree'] was read by trainer (test_context.py:")


@pytest.mark.parametrize(
    ("use", "expected"),
    [
        (lambda context: context["tree"], ["read"]),
        (lambda context: context.get("tree"), ["read"]),
        (lambda context: "tree" in context, ["read"]),
        (lambda context: context.__setitem__("tree", 2), ["write"]),
        (lambda context: context.__delitem__("tree"), ["write"]),
        (lambda context: context.pop("tree"), ["write"]),
        (lambda context: context.pop("tree", None), ["write"]),
        (lambda context: context.setdefault("tree", 3), ["read"]),
        (lambda context: context.update(tree=4), ["write"]),
        (lambda context: context.update({"tree": 4}), ["write"]),
        (lambda context: context.__ior__({"tree": 4}), ["write"]),
        (lambda context: (context["tree"], context.update(tree=1)), ["read", "write"]),
        (lambda context: (list(context), len(context)), []),
    ],
)
def test_each_use_of_a_key_is_recorded(use: Callable[[Context], object], expected: list[str]) -> None:
    context = Context(tree=1)
    context.enter("startup")
    use(context)
    assert [action for stage, key, action in accesses(context) if (stage, key) == ("startup", "tree")] == expected


def test_setdefault_of_a_missing_key_is_a_write() -> None:
    context = Context()
    context.setdefault("tree", 3)
    assert accesses(context) == [("trainer", "tree", "write")]
    assert context.wrote("tree")


def test_get_of_a_missing_key_gives_the_default_and_is_recorded() -> None:
    context = Context()
    assert context.get("tree", 5) == 5
    assert accesses(context) == [("trainer", "tree", "read")]


@pytest.mark.parametrize("key", ["status", "other"])
def test_wrote_knows_only_what_the_stage_that_runs_now_has_written(key: str) -> None:
    context = Context(status="uninit")
    context.enter("instance")
    context[key] = dict.get(context, key)
    assert context.wrote(key)
    context.enter("network")
    assert not context.wrote(key)


def test_the_record_does_not_grow_when_a_key_is_used_in_a_loop() -> None:
    context = Context(total=0)
    before = len(context.record())
    for _ in range(1000):
        context["total"] += 1
    assert (context["total"], len(context.record()) - before) == (1000, 3)


def test_the_record_says_file_and_line() -> None:
    context = Context()
    context["tree"] = 1  # written here
    expected = {"stage": "trainer", "key": "tree", "action": "write"}
    assert context.record() == [expected | {"where": f"test_context.py:{line_of('# written here')}"}]


def test_keys_and_values_are_those_of_a_dict() -> None:
    context = Context({"a": 1}, b=2)
    assert isinstance(context, dict)
    assert context == {"a": 1, "b": 2}
    assert (list(context), len(context), {**context}) == (["a", "b"], 2, {"a": 1, "b": 2})


RUNNER = """
    from pipeline import stages

    class Runner(stages.Runner):
        def run(self, context):
            for _ in range(100):
                context.setdefault("visited", 0)
                context["visited"] += 1
            super().run(context)
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """context.json of a run whose runner stage counts in ``visited``."""
    folder = tmp_path_factory.mktemp("recorded")
    config = testing.Workspace(folder / "workspace").config
    (config.parent / "own.py").write_text(RUNNER.replace("\n    ", "\n"))
    own = "runner.train_runner.runner_class_path={workspace}/own.py"
    run_dir = GeneralTrainer(config, [own, f"output_dir={folder}"]).run()["run_dir"]
    record: dict[str, list[dict[str, str]]] = json.loads((run_dir / "context.json").read_text())
    return record["train_runner"]


def test_context_json_has_each_use_per_runner_and_stage_with_its_line(recorded: list[dict[str, str]]) -> None:
    uses = {(each["action"], each["where"]) for each in recorded if each["key"] == "visited"}
    assert uses == {("write", "own.py:7"), ("read", "own.py:7"), ("read", "own.py:8"), ("write", "own.py:8")}
    assert {each["stage"] for each in recorded if each["key"] == "visited"} == {"runner"}


def test_context_json_has_nothing_twice_and_a_line_for_every_key_of_the_framework(
    recorded: list[dict[str, str]],
) -> None:
    assert len({tuple(each.values()) for each in recorded}) == len(recorded)
    writers = {(each["stage"], each["key"]) for each in recorded if each["action"] == "write"}
    assert {(key.writer, key.name) for key in KEYS if key.name != "error"} <= writers
    assert all(re.fullmatch(r"\w+\.py:\d+", each["where"]) for each in recorded)


def test_context_json_is_kept_of_a_failed_run_too(linear: Path) -> None:
    (linear.parent / "own.py").write_text(
        "from pipeline import stages\nclass Startup(stages.Startup):\n"
        "    def startup(self, context):\n        context['eert'[::-1]]\n"  # so that the check can't tell
    )
    with pytest.raises(ContextError, match=r"context\['tree'\] was read by startup \(own\.py:4\)"):
        GeneralTrainer(linear, ["runner.train_runner.startup_class_path={workspace}/own.py"]).run()
    record = json.loads(Path("runs/workspace/latest/context.json").read_text())["train_runner"]
    assert {"stage": "startup", "key": "tree", "action": "read", "where": "own.py:4"} in record


def test_the_trainer_writes_the_keys_of_the_table_before_the_first_stage(linear: Path) -> None:
    (linear.parent / "own.py").write_text(
        "from pipeline import stages\nclass Instance(stages.Instance):\n"
        "    def instance(self, context):\n        context['found'] = list(context)\n        super().instance(context)\n"
    )
    context = GeneralTrainer(linear, ["runner.train_runner.instance_class_path={workspace}/own.py"]).run()
    assert sorted(context["found"]) == sorted(TRAINERS)


@pytest.fixture(scope="module")
def after(tmp_path_factory: pytest.TempPathFactory) -> Context:
    """The context after a run of the linear config."""
    folder = tmp_path_factory.mktemp("after")
    return GeneralTrainer(testing.Workspace(folder / "workspace").config, [f"output_dir={folder}"]).run()


def test_after_a_run_the_keys_hold_what_the_table_says(after: Context) -> None:
    expected = {
        "is_exit": False,
        "runner_name": "train_runner",
        "hyper_parameters": {"optimizer": {"class": "SGD", "learning_rate": 0.1}},
        "engine": EngineMode.SINGLE,
        "is_fleet": False,
        "fleet_mode": "",
        "is_infer": False,
        "rank": 0,
        "local_rank": 0,
        "world_size": 1,
        "current_epoch": 1,
        "train_state": {"iteration": 12, "update": 12, "epoch": 2, "samples": 48, "phase_index": 0},
    }
    assert {key: after[key] for key in expected} == expected


def test_config_is_read_by_dotted_address_with_a_default(after: Context) -> None:
    assert after["config"].get("dataset.train_data.batch_size") == 4
    assert after["config"].get("dataset.train_data.batchsize", 7) == 7
    assert after["env"]["dataset"][0]["batch_size"] == 4
    assert Path(after["config_yaml"]).parts[-2:] == ("workspace", "config.yaml")
    assert after["device"].type == "cpu"
    assert [phase["name"] for phase in after["phases"]] == ["line"]
