"""Each answer of "How do I ..." in ``workspace_examples/README.md`` is done as it says, on ``first_steps``."""

from __future__ import annotations

import json
import math
import re
import runpy
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file
from torch import Tensor

from pipeline import Context, GeneralTrainer
from pipeline.cli import group

EXAMPLES = Path(__file__).parents[1] / "workspace_examples"
ANSWERS = re.split(
    r"^### ", (EXAMPLES / "README.md").read_text(encoding="utf-8").partition("## How do I")[2], flags=re.MULTILINE
)
FEW = "runner.train_runner.epochs=2"


def blocks(answer: str, language: str) -> list[str]:
    """The code of an answer, whose heading begins with these words."""
    [text] = [text for text in ANSWERS if text.startswith(answer)]
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of ``first_steps``, in which commands are run."""
    copied = tmp_path / "first_steps"
    shutil.copytree(EXAMPLES / "first_steps", copied, ignore=shutil.ignore_patterns("runs", "__pycache__"))
    monkeypatch.chdir(copied)
    return copied


Answered = Callable[..., Context]


@pytest.fixture
def answered(folder: Path) -> Answered:
    """Does what an answer shows: its files beside the config, its YAML in one that has the config as its base, and a run."""

    def run(answer: str, *overrides: str, resume: str = "never") -> Context:
        for text in blocks(answer, "python"):
            if file := re.match(r"# (\w+\.py)\n", text):
                (folder / file[1]).write_text(text, encoding="utf-8")
        config = folder / "answer.yaml"
        config.write_text("_base_: config.yaml\n" + "".join(blocks(answer, "yaml")), encoding="utf-8")
        return GeneralTrainer(config, overrides, resume).run()

    return run


def trained(*overrides: str) -> Context:
    return GeneralTrainer("config.yaml", [FEW, *overrides]).run()


def lines(context: Context, event: str) -> list[dict[str, Any]]:
    """What the run wrote to ``metrics.jsonl`` at an event."""
    text = (context["run_dir"] / context["runner_name"] / "metrics.jsonl").read_text(encoding="utf-8")
    return [line for line in map(json.loads, text.splitlines()) if line["event"] == event]


def command(line: str, *replaced: tuple[str, str]) -> Result:
    """Run a command line of the README; ``replaced`` makes a long training a short one."""
    for old, new in replaced:
        line = line.replace(old, new)
    result = CliRunner().invoke(group, shlex.split(line)[1:])
    assert result.exit_code == 0, result.output
    return result


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_every_question_has_an_answer() -> None:
    questions = re.findall(r"^- \[(.*)\]\(#", ANSWERS[0], flags=re.MULTILINE)
    assert [text.splitlines()[0].lower() for text in ANSWERS[1:]] == [question.lower() for question in questions]


def test_stop_early_ends_the_training_once_the_loss_has_not_improved(answered: Answered) -> None:
    # A rate so high that the loss soon gets worse.
    context = answered("Stop early", "hyper_parameters.optimizer.learning_rate=0.3")
    losses = [line["valid_loss"] for line in lines(context, "epoch")]
    assert 2 < len(losses) < 20
    assert min(losses[-2:]) >= min(losses[:-2])
    assert all(min(losses[at - 2 : at]) < min([math.inf, *losses[: at - 2]]) for at in range(2, len(losses)))
    status = json.loads((context["run_dir"] / "status.json").read_text())
    assert (status["state"], status["reason"].partition(";")[0]) == (
        "done",
        "valid_loss has not improved in 2 validations",
    )


def test_stop_early_ends_the_training_once_the_loss_is_low_enough(answered: Answered) -> None:
    context = answered("Stop early")
    losses = [line["valid_loss"] for line in lines(context, "epoch")]
    assert [loss <= 0.1 for loss in losses] == [*[False] * (len(losses) - 1), True]
    status = json.loads((context["run_dir"] / "status.json").read_text())
    assert (status["state"], status["reason"]) == ("done", f"valid_loss is {losses[-1]:.4f}")


def test_a_number_that_is_logged_is_in_the_metrics_of_training_and_validation(answered: Answered) -> None:
    [line] = lines(answered("Log a number", "runner.train_runner.epochs=1"), "epoch")
    assert 0.5 < line["confidence"] < line["valid_confidence"] < 1


def test_a_number_of_a_plugin_is_in_metrics_jsonl(answered: Answered) -> None:
    context = answered("Add a number", FEW)
    norm = torch.cat([tensor.flatten() for tensor in context["model"]["spirals"]["model"].parameters()]).norm().item()
    assert lines(context, "epoch")[-1]["weight_norm"] == pytest.approx(norm, rel=1e-5)


def test_a_loss_over_tokens_is_a_mean_over_all_tokens(answered: Answered) -> None:
    size = "dataset.valid_data.batch_size=7"
    context = answered("Average a loss", "runner.train_runner.epochs=1", size)
    sentences = runpy.run_path("sentences.py")["Sentences"](seed=2).sentences
    model = context["model"]["spirals"]["model"].eval()
    total = 0.0
    for own in sentences:
        scores = model(own[None, :-1])
        loss = torch.nn.functional.cross_entropy(scores, own[None, 1:], reduction="sum")
        total += loss.item()
    tokens = sum(len(own) - 1 for own in sentences)
    assert context["metrics"]["spirals"]["valid_loss"] == pytest.approx(total / tokens, rel=1e-5)


def test_a_schedule_with_its_arguments_gives_the_rate_of_a_cosine(answered: Answered) -> None:
    context = answered("Give a schedule", FEW)
    rate = context["model"]["spirals"]["optim_schedulers"]["main"].get_lr()
    assert rate == pytest.approx(0.01 * (1 + math.cos(math.pi * (64 - 20) / (640 - 20))) / 2)


def test_a_plugin_that_changes_the_rate_changes_it_for_good(answered: Answered) -> None:
    large = "dataset.train_data.batch_size=500"
    context = answered("Change the learning rate", "runner.train_runner.epochs=16", large)
    checkpoint = f"{context['run_dir']}/train_runner/checkpoints/step-000000000032"
    assert context["model"]["spirals"]["optim_schedulers"]["main"].get_lr() == pytest.approx(0.001)
    resumed = answered("Change the learning rate", "runner.train_runner.epochs=17", large, resume=checkpoint)
    assert resumed["model"]["spirals"]["optim_schedulers"]["main"].get_lr() == pytest.approx(0.001)


def test_a_plugin_that_multiplies_the_rate_of_an_update_does_so_for_that_one(answered: Answered) -> None:
    context = answered(
        "Change the learning rate",
        "runner.train_runner.print_interval=1",
        FEW,
        "plugins=['{workspace}/warm_up.py': {steps: 8}]",
    )
    rates = [line["learning_rate"] for line in lines(context, "train")]
    assert rates[:10] == pytest.approx([0.01 * min(1, step / 8) for step in range(1, 11)])


def test_predictions_on_new_data_are_those_of_the_trained_model(folder: Path) -> None:
    model = trained()["model"]["spirals"]["model"].eval()
    (folder / "predict.yaml").write_text(blocks("Predict on", "yaml")[0], encoding="utf-8")
    points = runpy.run_path(str(folder / "data.py"))["Spirals"](seed=3).points
    for line in blocks("Predict on", "sh"):
        command(line)
    for file in ("predictions.jsonl", "runs/predict/latest/predict/spirals_predictions.jsonl"):
        rows = [json.loads(line) for line in (folder / file).read_text(encoding="utf-8").splitlines()]
        torch.testing.assert_close(torch.tensor([row["prediction"] for row in rows]), model(points))


def test_a_trained_model_is_loaded_in_python(folder: Path) -> None:
    weights = trained()["model"]["spirals"]["model"].state_dict()
    names: dict[str, Any] = {}
    exec(blocks("Load a trained", "python")[0], names)
    assert same(names["model"].state_dict(), weights)
    assert names["scores"].shape == (1, 2)
    command(blocks("Load a trained", "sh")[0])
    assert same(load_file(folder / "spirals.safetensors"), weights)


@pytest.mark.slow
def test_several_values_are_tried_and_ranked(folder: Path) -> None:
    [line] = blocks("Try several values", "sh")[0].splitlines()
    rows = [row.split() for row in command(f"{line} -o {FEW}").stdout.splitlines() if "trial-" in row]
    assert {tuple(row[1:3]) for row in rows} == {(rate, size) for rate in ("0.1", "0.01") for size in ("16", "64")}
    values = []
    for row in rows:
        text = (folder / row[-1] / "train_runner/metrics.jsonl").read_text(encoding="utf-8")
        numbers = [number for number in map(json.loads, text.splitlines()) if number["event"] == "validate"]
        values.append(min(number["loss"] for number in numbers))
        assert row[3] == f"{values[-1]:.5g}"
    assert values == sorted(values)


@pytest.mark.slow
def test_runs_are_found_again_and_compared(folder: Path) -> None:
    trained()
    run, runs, compare, report = blocks("Find a run", "sh")[0].splitlines()
    command(f"{run} {FEW}")
    assert command(runs).stdout.count("lr=0.1") == 1
    # Two of the same second are in no order.
    paths = sorted(Path("runs/first_steps").glob("*-*"), key=lambda path: (path / "command.txt").stat().st_mtime_ns)
    both = " ".join(map(str, paths))
    difference = command(compare, ("runs/first_steps/*-*", both)).stdout.splitlines()[-1]
    [answer] = [text for text in ANSWERS if text.startswith("Find a run")]
    assert difference in answer.replace("\n", " ")
    assert command(report, ("runs/first_steps/*-*", both)).stdout == "report.html\n"


def test_the_best_weights_of_another_run_are_the_first_of_the_next(answered: Answered, folder: Path) -> None:
    first = answered("Take the best", "name=first_steps", FEW)
    best = first["checkpointer"].store.path_of(first["best"]["iteration"])
    ls, run = blocks("Take the best", "sh")[0].splitlines()
    assert re.search(rf"^ *{first['best']['iteration']} .*best$", command(ls).stdout, flags=re.MULTILINE)
    limit = "runner.train_runner.init_model_path", "runner.train_runner.max_steps=1 runner.train_runner.init_model_path"
    second = "pipeline run config.yaml name=second hyper_parameters.optimizer.learning_rate=0.0"
    command(run, ("step-000000000640", best.name), limit, ("pipeline run config.yaml", second))
    [end] = (folder / "runs" / "second" / "latest" / "train_runner" / "checkpoints").iterdir()
    assert same(load_file(end / "spirals.safetensors"), load_file(best / "spirals.safetensors"))


def test_a_finished_run_is_trained_further_as_if_it_had_never_ended(folder: Path) -> None:
    weights = trained("runner.train_runner.epochs=3", "name=whole")["model"]["spirals"]["model"].state_dict()
    run_dir = trained()["run_dir"]
    command(blocks("Train a finished", "sh")[0], ("epochs=30", "epochs=3"))
    assert same(
        load_file(run_dir / "train_runner" / "checkpoints" / "step-000000000096" / "spirals.safetensors"), weights
    )


def test_a_loop_of_ones_own_is_the_default_and_is_trained_further(folder: Path) -> None:
    weights = trained("runner.train_runner.epochs=3", "name=whole")["model"]["spirals"]["model"].state_dict()
    for language, name in (("python", "own_loop.py"), ("yaml", "own_loop.yaml")):
        (folder / name).write_text(blocks("Write a loop", language)[0], encoding="utf-8")
    first = GeneralTrainer("own_loop.yaml", [FEW]).run()
    last = first["checkpointer"].newest()
    further = GeneralTrainer("own_loop.yaml", ["runner.train_runner.epochs=3"], last).run()
    assert same(further["model"]["spirals"]["model"].state_dict(), weights)
    assert [line["epoch"] for line in lines(further, "epoch")] == [0, 1, 2]


def test_an_experiment_of_ones_own_is_resumed_as_if_it_had_never_ended(folder: Path) -> None:
    for language, name in (("python", "experiment.py"), ("yaml", "experiment.yaml")):
        (folder / name).write_text(blocks("Write a loop", language)[1], encoding="utf-8")
    first, last = ("runner.train_runner.max_steps=40", "runner.train_runner.max_steps=50")
    straight = GeneralTrainer("experiment.yaml", [last, "name=straight"]).run()
    run_dir = GeneralTrainer("experiment.yaml", [first]).run()["run_dir"]
    resumed = GeneralTrainer(
        "experiment.yaml", [last], run_dir / "train_runner" / "checkpoints" / "step-000000000040"
    ).run()
    ends = [context["model"]["experiment"]["model"].state_dict() for context in (straight, resumed)]
    assert same(*ends)
    assert [line["accuracy"] for line in lines(resumed, "validate")][-1] > 0.5


def test_what_a_file_of_the_run_contains_is_read_as_the_readme_says(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    context = trained()
    capsys.readouterr()
    exec(blocks("Find what", "python")[0], {})
    assert capsys.readouterr().out == f"1 {context['metrics']['spirals']['valid_loss']}\n"
