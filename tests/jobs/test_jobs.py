"""Everyday trainings, each beside a script that does the same by hand: what they come to is equal, bit for bit."""

from __future__ import annotations

import ast
import importlib
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_run import end, unlike
from safetensors.torch import load_file
from torch import Tensor

import pipeline
from pipeline import GeneralTrainer
from pipeline.context import Context

FOLDER = Path(__file__).parent
REPOSITORY = FOLDER.parents[1]
JOBS = sorted(path.parent.name for path in FOLDER.glob("*/config.yaml"))
# A script for reinforcement learning is one loop; here the environment, the model and the loop are three files.
LONGER = {"ppo"}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The context of a job after its run."""

    @cache
    def run(job: str) -> Context:
        return GeneralTrainer(FOLDER / job / "config.yaml", [f"output_dir={tmp_path_factory.mktemp(job)}"]).run()

    return run


@cache
def by_hand(job: str) -> dict[str, Any]:
    """What the script of a job comes to."""
    module = importlib.import_module(f"tests.jobs.{job}.script")
    result: dict[str, Any] = module.main()
    return result


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def without_counters(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: weight for name, weight in weights.items() if weight.is_floating_point()}


def numbers(context: Context, event: str, name: str, runner: str = "train_runner") -> list[float]:
    """The values of a number in the lines of ``metrics.jsonl`` of an event."""
    lines = (context["run_dir"] / runner / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [line[name] for line in map(json.loads, lines) if line["event"] == event and name in line]


def code_lines(path: Path) -> int:
    """Lines of code: no blanks, comments, docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docstrings = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines = enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
    return sum(
        1 for number, line in lines if line.strip() and not line.strip().startswith("#") and number not in docstrings
    )


def imports(path: Path) -> list[ast.ImportFrom | ast.Import]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom | ast.Import)]


@pytest.mark.parametrize("job", JOBS)
def test_a_job_has_no_more_lines_of_python_than_its_script_and_what_that_uses(job: str) -> None:
    script = FOLDER / job / "script.py"
    used = {node.module for node in imports(script) if isinstance(node, ast.ImportFrom) and node.level}
    files = {path.stem: code_lines(path) for path in (FOLDER / job).glob("*.py")}
    own = sum(lines for name, lines in files.items() if name not in used and name != "script")
    assert own <= files["script"] or job in LONGER


@pytest.mark.parametrize("job", JOBS)
def test_a_job_imports_only_public_names_and_its_script_none(job: str) -> None:
    for path in (FOLDER / job).glob("*.py"):
        modules = [
            (name, node)
            for node in imports(path)
            for name in ([node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
        ]
        ours = [(name, node) for name, node in modules if name and name.split(".")[0] == "pipeline"]
        assert all(name == "pipeline" for name, _ in ours)
        assert {alias.name for _, node in ours for alias in node.names} <= {*pipeline.__all__, "stages"}
        assert not ours or path.name != "script.py"


@pytest.mark.slow
def test_a_small_gpt_has_the_weights_of_the_script_at_its_end_and_at_its_best(ran: Any) -> None:
    context, script = ran("nano_gpt"), by_hand("nano_gpt")
    assert numbers(context, "validate", "loss") == script["losses"]
    assert same(context["model"]["text"]["model"].state_dict(), script["weights"])
    best = context["checkpointer"].store.path_of(context["best"]["iteration"])
    assert same(load_file(best / "text.safetensors"), script["best"])
    assert (context["run_dir"] / "text.txt").read_text(encoding="utf-8") == script["text"]


@pytest.mark.slow
def test_a_resnet_with_mixup_and_averaged_weights_has_those_of_the_script(ran: Any) -> None:
    context, script = ran("resnet"), by_hand("resnet")
    ours = zip(*(numbers(context, "epoch", name) for name in ("valid_loss", "valid_accuracy")), strict=True)
    assert [*ours] == script["numbers"]
    weights = context["model"]["stripes"]["brain"].modules["net"].state_dict()
    # torch's averages have averaged the number of batches as well.
    assert same(without_counters(weights), without_counters(script["weights"]))


def test_two_towers_have_the_weights_the_recall_and_the_best_scores_of_the_script(ran: Any) -> None:
    context, script = ran("two_tower"), by_hand("two_tower")
    assert numbers(context, "epoch", "valid_recall") == pytest.approx(script["recalls"], abs=1e-12)
    last = context["run_dir"] / "train_runner" / "checkpoints" / "step-000000000128" / "towers.safetensors"
    assert same(load_file(last), {f"towers.{name}": weight for name, weight in script["weights"].items()})
    scores = load_file(context["run_dir"] / "infer_runner" / "towers_predictions.safetensors")
    assert torch.equal(scores["prediction"], script["best_scores"])


def test_a_policy_that_plays_and_learns_by_turns_has_the_weights_and_the_rewards_of_the_script(ran: Any) -> None:
    context, script = ran("ppo"), by_hand("ppo")
    assert context["reward"] == script["rewards"][-1] > script["rewards"][0] / 2
    assert same(context["model"]["policy"].brain.modules["policy"].state_dict(), script["weights"])


# Breaks the run where the environment says so.
BREAKING = f'"{REPOSITORY}/tests/stages/twelve_runners/watching.py:Watching"'
PLUGINS = {"resnet": f"plugins=[{{ema: {{decay: 0.98}}}}, {BREAKING}]"}


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS)
def test_a_job_that_breaks_off_and_is_resumed_ends_alike(
    job: str, ran: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = FOLDER / job / "config.yaml", [f"output_dir={tmp_path}", PLUGINS.get(job, f"plugins=[{BREAKING}]")]
    monkeypatch.setenv("END_AT", "after_batch 50 error")
    with pytest.raises(RuntimeError, match="killed"):
        GeneralTrainer(*given).run()
    monkeypatch.delenv("END_AT")
    run_dir = GeneralTrainer(*given, resume="auto").run()["run_dir"]
    assert unlike(run_dir / "train_runner", end(ran(job)["run_dir"] / "train_runner")) == []


@pytest.mark.release
@pytest.mark.parametrize("job", JOBS)
def test_a_job_that_is_killed_ends_as_one_that_is_not(job: str, pipeline: Any) -> None:
    done = pipeline("resume-test", FOLDER / job / "config.yaml", "--at", "50")
    assert done.exit_code == 0, done.output
