"""An error in a batch tells what the batch was, and where the config names what has met in it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from pipeline import GeneralTrainer

New = Callable[..., Path]


@pytest.fixture
def new(pipeline: Callable[..., Result]) -> New:
    """A workspace of ``pipeline new``, with some texts in its files replaced; its config."""

    def new(kind: str, **changes: tuple[str, str]) -> Path:
        pipeline("new", "mine", "--kind", kind)
        for name, (old, text) in changes.items():
            file = Path("mine", f"{name}.py")
            source = file.read_text(encoding="utf-8")
            assert old in source
            file.write_text(source.replace(old, text), encoding="utf-8")
        return Path("mine", "config.yaml")

    return new


def report(log: list[str]) -> list[str]:
    """The lines about the batch, without the numbers of the lines of code."""
    [text] = [line for line in log if line.startswith("ERROR")]
    lines = text.splitlines()
    first = next(index for index, line in enumerate(lines) if re.match(r"(batch \d+|a batch) of the ", line))
    return [re.sub(r"(\.\w+):\d+", r"\1:…", line.strip()) for line in lines[first:]]


def failing(config: Path, error: type[Exception], *overrides: str) -> None:
    with pytest.raises(error):
        GeneralTrainer(config, overrides).run()


PLAIN = [
    "model: mine/config.yaml:…: phase.circle.model: {here}/mine/model.py",
    "loss: mine/config.yaml:…: phase.circle.loss: torch.nn.functional.cross_entropy",
    "data: mine/config.yaml:…: dataset.train_data.class_path: {here}/mine/data.py:Points",
]


def plain() -> list[str]:
    return [line.format(here=Path.cwd()) for line in PLAIN]


@pytest.mark.slow
def test_wrong_in_features(new: New, log_lines: list[str]) -> None:
    failing(new("plain", model=("nn.Linear(2, width)", "nn.Linear(3, width)")), RuntimeError)
    assert report(log_lines) == [
        "batch 1 of the training of phase 'circle':",
        "inputs: float32 [32, 2]",
        "target: int64 [32] of 0 to 1",
        "in forward (model.py:…): points: float32 [32, 2]",
        *plain(),
    ]
    # The user's own traceback comes before it.
    assert re.search(r"model\.py\", line \d+, in forward\n(.*\n)+RuntimeError: mat1 and mat2", "".join(log_lines))


@pytest.mark.parametrize(
    ("labels", "error", "target"),
    [
        (".long() + 1", IndexError, "int64 [32] of 1 to 2"),
        (".float()", RuntimeError, "float32 [32]"),
        (".long()[:, None]", RuntimeError, "int64 [32, 1] of 0 to 1"),
    ],
    ids=["a class that is not there", "float for long", "another shape"],
)
def test_wrong_targets(new: New, log_lines: list[str], labels: str, error: type[Exception], target: str) -> None:
    failing(new("plain", data=("0.6).long()", f"0.6){labels}")), error)
    batch = ["inputs: float32 [32, 2]", f"target: {target}", "predictions: float32 [32, 2]"]
    assert report(log_lines) == ["batch 1 of the training of phase 'circle':", *batch, *plain()]


def test_ids_beyond_an_embedding(new: New, log_lines: list[str]) -> None:
    failing(new("ctr"), IndexError, "dataset.train_data.args={seed: 1, user_count: 200, item_count: 120}")
    assert "inputs['item']: int64 [256] of 0 to 119" in report(log_lines)


def test_a_missing_key_of_a_mapping(new: New, log_lines: list[str]) -> None:
    failing(new("ctr", data=('"item": self', '"itm": self')), Exception)
    assert "inputs['itm']: int64 [256] of 0 to 99" in report(log_lines)
    assert any(line.startswith("model: ") for line in report(log_lines))


def test_too_many_parts(new: New, log_lines: list[str]) -> None:
    failing(new("plain", data=("return self.points[index],", "return self.points[index], 1, ")), Exception)
    lines = report(log_lines)
    assert lines[1:3] == ["batch[0]: float32 [32, 2]", "batch[1]: int64 [32], all 1"]


def test_single_number_in_a_failing_batch_has_no_range(new: New, log_lines: list[str]) -> None:
    model = (
        "scores: Tensor = self.layers(points)",
        "count = points.new_tensor(8).long()\n        scores = count @ points",
    )
    failing(new("plain", model=model), RuntimeError)
    assert report(log_lines)[3].endswith(": points: float32 [32, 2], count: int64 [] of 8")


def test_a_brain(new: New, log_lines: list[str]) -> None:
    failing(
        new("brain", model=("nn.functional.mse_loss(waves, batch)", "(waves - batch[:, :3]).square().mean()")),
        RuntimeError,
    )
    lines = report(log_lines)
    assert lines[1:4] == [
        "batch: float32 [32, 16]",
        "predictions[0]: float32 [32, 16]",
        "predictions[1]: float32 [32, 2]",
    ]
    assert lines[4].startswith("in compute_objectives (model.py:…): predictions[0]: float32 [32, 16]")
    assert [line.partition(":")[0] for line in lines[5:]] == ["model", "data"]


def test_an_updater_of_ones_own(new: New, log_lines: list[str]) -> None:
    config = new("plain")
    updater = """
from pipeline import UpdaterBase

class Updater(UpdaterBase):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def update(self, batch):
        points, labels = batch
        scores = self.model(points)
        return (scores - labels[:, None, None]).view(3)
"""
    (config.parent / "own.py").write_text(updater, encoding="utf-8")
    failing(config, RuntimeError, 'phase.circle.updater={class_path: "{workspace}/own.py:Updater"}')
    lines = report(log_lines)
    assert any(line.startswith("in update (own.py:…): ") and "scores: float32 [32, 2]" in line for line in lines)
    assert any(line.startswith("updater: override") and line.endswith("mine/own.py:Updater") for line in lines)


def test_an_experiment(new: New, log_lines: list[str]) -> None:
    failing(new("experiment", experiment=("nn.Linear(1, self", "nn.Linear(4, self")), RuntimeError)
    assert report(log_lines)[:3] == ["batch 1 of the training:", "inputs: float32 [50, 1]", "target: float32 [50, 1]"]
    assert report(log_lines)[-1].endswith("runner_class_path: " + str(Path.cwd() / "mine/experiment.py:Experiment"))


def test_a_loop_of_ones_own(new: New, log_lines: list[str]) -> None:
    config = new("plain")
    runner = """
from pipeline import stages

class Runner(stages.Runner):
    def run(self, context):
        for points, labels in context.batches("circle"):
            context["model"]["circle"].model(points[:, :1])
"""
    (config.parent / "own.py").write_text(runner, encoding="utf-8")
    failing(config, RuntimeError, 'runner.train_runner.runner_class_path="{workspace}/own.py"')
    assert report(log_lines)[:2] == ["batch 1 of the training of phase 'circle':", "inputs: float32 [32, 2]"]


def test_the_first_validation_batch(new: New, log_lines: list[str]) -> None:
    config = new("plain", data=("self.labels = ", "self.labels = (seed - 1) * 5 + "))
    failing(config, IndexError)
    lines = report(log_lines)
    assert lines[:3] == [
        "a batch of the evaluation of phase 'circle':",
        "inputs: float32 [200, 2]",
        "target: int64 [200] of 5 to 6",
    ]
    assert lines[-1].startswith("data: mine/config.yaml:…: dataset.valid_data.class_path")


def test_what_has_no_batch_has_no_report(new: New, log_lines: list[str]) -> None:
    failing(new("plain", data=("self.points = ", "self.points = 1 / 0 * ")), Exception)
    assert "batch 1 " not in "".join(log_lines)


def test_the_headline_stays_one_line(new: New, log_lines: list[str]) -> None:
    with pytest.raises(IndexError) as caught:
        GeneralTrainer(new("plain", data=("0.6).long()", "0.6).long() + 1"))).run()
    assert caught.value.__notes__[-1].endswith("IndexError: Target 2 is out of bounds. (phase.circle)")


def test_check_steps_says_the_same(new: New, pipeline: Callable[..., Result]) -> None:
    done = pipeline("check", new("plain", data=("0.6).long()", "0.6).float()")), "--steps", "1")
    assert (
        "batch 1 of the training of phase 'circle':\n  inputs: float32 [32, 2]\n  target: float32 [32]\n" in done.stderr
    )
    assert done.exit_code == 2


def test_of_many_tensors_the_first_are_told(new: New, log_lines: list[str]) -> None:
    forward = "scores: Tensor = self.layers(points)"
    failing(
        new("plain", model=(forward, f"many = 20 * [points]\n        raise ValueError\n        {forward}")), ValueError
    )
    [line] = [line for line in report(log_lines) if line.startswith("in forward")]
    own = [f"many[{index}]: float32 [32, 2]" for index in range(11)]
    assert line.partition(": ")[2] == ", ".join(["points: float32 [32, 2]", *own, "and more"])
