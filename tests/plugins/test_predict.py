"""``pipeline predict`` against a plain loop over the model, and what it says where it cannot."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from safetensors.torch import load_file
from torch import Tensor, nn

from pipeline import testing

Call = Callable[..., Result]
Train = Callable[..., Path]

OWN = """
import torch
from pipeline import hookimpl, stages


class Unlabelled(torch.utils.data.Dataset):
    def __init__(self, size=5):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return {"input": torch.tensor([float(index)]), "id": f"sample {index}"}


class Failing(Unlabelled):
    def __getitem__(self, index):
        raise ZeroDivisionError(index)


def doubled(predictions, batch):
    return {"y": 2 * predictions, "x": batch["input"]}


class Training(stages.Runner):
    def run(self, context):
        if context["is_infer"]:
            raise AssertionError("this trains")
        super().run(context)


class Doubling(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, input):
        return 2 * self.inner(input)


class Wrapping:
    @hookimpl
    def wrap_model(self, context, phase, model):
        return Doubling(model)


class Watching:
    def __init__(self):
        from pathlib import Path
        Path("watched").write_text("")

    @hookimpl
    def before_epoch(self, context):
        pass
"""
DATA = ("dataset.train_data.class_path={workspace}/own.py:Unlabelled", "dataset.train_data.args={}")
FROM = "{workspace}/own.py:doubled"
INFER = f"""
  - {{name: infer, class: infer, device: cpu, print_interval: 2, predictions: {{from: "{FROM}"}}}}
"""
METRIC = "phase.line.metrics={rmse: {class: RMSE}}"
LINE = torch.linspace(-1, 1, 24).unsqueeze(1)
FIVE = torch.arange(5.0).unsqueeze(1)


@pytest.fixture
def trained(tmp_path: Path) -> Callable[..., Path]:
    """Trains the small job with these overrides; its run directory."""

    def run(*overrides: str, runners: str = "", name: str = "job") -> Path:
        text = testing.SMALL["config.yaml"].replace(
            "phase:\n", f"{runners.strip(chr(10))}\nphase:\n" if runners else "phase:\n"
        )
        workspace = testing.Workspace(tmp_path / name, {"own.py": OWN, "config.yaml": text})
        config = workspace.config
        from pipeline import GeneralTrainer  # noqa: PLC0415 - torch has to find OMP_NUM_THREADS

        path: Path = GeneralTrainer(config, overrides).run()["run_dir"]
        return path.absolute()

    return run


def rows(path: str = "out.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def predictions(path: str = "out.jsonl") -> Tensor:
    return torch.tensor([row["prediction"] for row in rows(path)])


def by_hand(run_dir: Path, step: int, x: Tensor) -> Tensor:
    """What a plain loop over batches of 4 predicts with the weights of a checkpoint."""
    model = nn.Linear(1, 1)
    file = run_dir / "train_runner" / "checkpoints" / f"step-{step:012d}" / "line.safetensors"
    model.load_state_dict({name.removeprefix("inner."): value for name, value in load_file(file).items()})
    with torch.no_grad():
        return torch.cat([model(some) for some in x.split(4)])


def content(folder: Path) -> dict[str, Any]:
    """Path -> time and content of all that is in a folder."""
    return {
        str(path): (path.lstat().st_mtime_ns, path.read_bytes() if path.is_file() else None)
        for path in folder.rglob("*")
    }


def test_a_train_runner_predicts_its_validation_data_and_the_run_directory_stays_as_it_is(
    trained: Callable[..., Path], pipeline: Call
) -> None:
    run_dir = trained("runner.train_runner.grad_clip=1.0", "runner.train_runner.max_steps=12")
    before = content(run_dir.parent)
    result = pipeline("predict", run_dir, "-o", "out.jsonl")
    path = run_dir / "train_runner" / "checkpoints" / "step-000000000012"
    assert (result.exit_code, result.stdout) == (0, f"out.jsonl: the predictions of phase 'line', by {path}\n")
    assert torch.equal(predictions(), by_hand(run_dir, 12, LINE))
    assert [row["target"] for row in rows()] == (3 * LINE - 1).tolist()
    assert content(run_dir.parent) == before
    assert sorted(path.name for path in Path().iterdir()) == ["out.jsonl", "runs"]


def test_all_samples_are_predicted_unless_the_command_line_limits_them(
    trained: Callable[..., Path], pipeline: Call
) -> None:
    limits = ["runner.train_runner.limit_batches=2", "dataset.train_data.limit_batches=1"]
    run_dir = trained(*limits, "runner.train_runner.max_steps=2")
    assert pipeline("predict", run_dir, "-o", "out.jsonl").exit_code == 0
    assert len(rows()) == len(LINE)
    assert pipeline("predict", run_dir, limits[1], "-o", "less.jsonl").exit_code == 0
    assert len(rows("less.jsonl")) == 4


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_other_data_need_no_labels_whatever_metrics_the_phase_has(
    trained: Callable[..., Path], pipeline: Call, workers: int
) -> None:
    run_dir = trained(METRIC)
    result = pipeline("predict", run_dir, *DATA, f"dataset.train_data.num_workers={workers}", "-o", "out.jsonl")
    assert result.exit_code == 0, result.output
    assert torch.equal(predictions(), by_hand(run_dir, 12, FIVE))
    assert [row["id"] for row in rows()] == [f"sample {index}" for index in range(5)]
    assert "loss" not in result.stdout


def test_predict_run_with_batch_sampler_has_all_predictions(trained: Train, pipeline: Call) -> None:
    """The saved config spells out `batch_size: 1`, which the batch sampler does not use."""
    lengths = ", ".join(["2"] * len(LINE))
    arguments = f"{{max_elements: 8, lengths: [{lengths}], width: 1}}"
    sampler = f"{{class_path: pipeline.data.buckets:LengthBuckets, args: {arguments}}}"
    overrides = ["dataset.train_data.batch_size=1", f"dataset.train_data.batch_sampler={sampler}"]

    run_dir = trained(*overrides)
    result = pipeline("predict", run_dir, "-o", "out.jsonl")

    assert result.exit_code == 0, result.output
    assert torch.equal(predictions(), by_hand(run_dir, 12, LINE))


def test_predict_run_with_train_metrics_has_all_predictions(trained: Train, pipeline: Call) -> None:
    """The only runner predicts, so nothing is trained that `train_metrics` could judge."""
    run_dir = trained("phase.line.train_metrics={rmse: {class: RMSE}}")
    result = pipeline("predict", run_dir, "-o", "out.jsonl")

    assert result.exit_code == 0, result.output
    assert torch.equal(predictions(), by_hand(run_dir, 12, LINE))


def test_an_infer_runner_predicts_as_it_does_and_the_suffix_says_the_format(
    trained: Callable[..., Path], pipeline: Call
) -> None:
    run_dir = trained("mode=train_runner", runners=INFER)
    result = pipeline("predict", run_dir, "--runner", "infer", *DATA, "-o", "new/out.safetensors")
    assert result.exit_code == 0, result.output
    tensors = load_file("new/out.safetensors")
    assert torch.equal(tensors["prediction.y"], 2 * by_hand(run_dir, 12, FIVE))
    assert torch.equal(tensors["prediction.x"], FIVE)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("which", "step"), [([], 6), (["--which", "best"], 6), (["--which", "last"], 12), (["--which", "12"], 12)]
)
def test_the_best_checkpoint_is_taken_or_any_other(
    trained: Callable[..., Path], pipeline: Call, which: list[str], step: int
) -> None:
    # The loss rises with a rate that is too high.
    rising = "hyper_parameters.optimizer.learning_rate=3.0"
    run_dir = trained("runner.train_runner.keep_best={metric: valid_loss, mode: min}", rising)
    result = pipeline("predict", run_dir, *which, "-o", "out.jsonl")
    assert result.exit_code == 0, result.output
    assert torch.equal(predictions(), by_hand(run_dir, step, LINE))


def test_a_checkpoint_of_a_run_may_be_named_itself(trained: Callable[..., Path], pipeline: Call) -> None:
    run_dir = trained()
    path = run_dir / "train_runner" / "checkpoints" / "step-000000000006"
    assert pipeline("predict", path, "-o", "out.jsonl").exit_code == 0
    assert torch.equal(predictions(), by_hand(run_dir, 6, LINE))
    both = pipeline("predict", path, "--which", "12", "-o", "out.jsonl")
    assert (both.exit_code, "is a checkpoint, and --which 12 names another" in both.stderr) == (2, True)


def test_a_plugin_that_wraps_the_model_does_so_and_no_other_is_built(
    trained: Callable[..., Path], pipeline: Call
) -> None:
    run_dir = trained("plugins=['{workspace}/own.py:Wrapping', '{workspace}/own.py:Watching']")
    Path("watched").unlink()
    assert pipeline("predict", run_dir, *DATA, "-o", "out.jsonl").exit_code == 0
    assert torch.equal(predictions(), 2 * by_hand(run_dir, 12, FIVE))
    assert not Path("watched").exists()


def test_the_stage_that_trains_is_not_run(trained: Callable[..., Path], pipeline: Call) -> None:
    run_dir = trained("runner.train_runner.runner_class_path={workspace}/own.py:Training")
    result = pipeline("predict", run_dir, "-o", "out.jsonl")
    assert result.exit_code == 0, result.output


def test_code_that_has_changed_is_shown(trained: Callable[..., Path], pipeline: Call, tmp_path: Path) -> None:
    run_dir = trained()
    with (tmp_path / "job" / "data.py").open("a") as file:
        file.write("# changed\n")
    result = pipeline("predict", run_dir, "-o", "out.jsonl")
    assert result.exit_code == 0
    assert f"config {run_dir}/config.yaml, workspace {tmp_path}/job\n" in result.stderr
    assert "workspace/data.py: is not as it was:" in result.stderr
    assert "+# changed" in result.stderr


REFUSED = {
    "--which bets": "--which bets: write best, last or the iteration of a checkpoint",
    "--which 7": "has no checkpoint of iteration 7; there are: 6, 12; name one of them, best or last",
    "--which best": "has no keep_best, so none of its checkpoints is the best; add it, or name `last`",
    "--runner trian_runner": "the run has no such runner; did you mean 'train_runner'?",
    "word": "word: is no override; write KEY=VALUE",
    "phase.line.bla=1": "phase.line.bla: unknown key",
    "runner.train_runner.phases=lien": "there is no phase 'lien'; did you mean 'line'?",
    "mode=train": "there is no runner 'train'; there are train_runner",
    "phase.line.valid_dataset_name=[train_data,other]": "phase line: has the datasets train_data, other; choose one: "
    "phase.line.valid_dataset_name=train_data",
    "dataset.train_data.class_path={workspace}/own.py:Unlabeled": "own.py defines no 'Unlabeled'",
}


def test_what_cannot_be_predicted_is_refused_with_what_to_write(trained: Callable[..., Path], pipeline: Call) -> None:
    run_dir = trained()
    for words, message in REFUSED.items():
        result = pipeline("predict", run_dir, *words.split(" "), "-o", "out.jsonl")
        assert (bool(result.exit_code), message in f"{result.stderr}{result.exception}") == (True, True), words
        assert not Path("out.jsonl").exists()


def test_what_is_no_run_directory_or_may_be_written_by_others_is_refused(
    trained: Callable[..., Path], pipeline: Call
) -> None:
    run_dir = trained()
    nowhere = pipeline("predict", run_dir.parent, "-o", "out.jsonl")
    assert (nowhere.exit_code, "is no run directory, nor a checkpoint in one" in nowhere.stderr) == (2, True)
    gone = pipeline("predict", run_dir / "train_runner/checkpoints/step-000000000007", "-o", "out.jsonl")
    assert (gone.exit_code, "there is no such checkpoint; see them with: pipeline checkpoint" in gone.stderr) == (
        2,
        True,
    )
    run_dir.chmod(0o777)
    strange = pipeline("predict", run_dir, "-o", "out.jsonl")
    assert (strange.exit_code, "others may write to it, and it names code to run" in strange.stderr) == (2, True)


def test_data_that_fail_leave_no_file_and_are_an_error_of_the_run(trained: Callable[..., Path], pipeline: Call) -> None:
    failing = "dataset.train_data.class_path={workspace}/own.py:Failing"
    result = pipeline("predict", trained(), failing, "dataset.train_data.args={}", "-o", "out.jsonl")
    assert (result.exit_code, "ZeroDivisionError" in result.stderr) == (1, True)
    assert not Path("out.jsonl").exists()


def test_a_run_without_a_phase_has_nothing_to_predict(pipeline: Call, tmp_path: Path) -> None:
    own = """
    from pipeline import NetworkBase, RunnerBase, stages
    class Network(NetworkBase):
        def build_network(self, context): context["model"], context["dataset"] = {}, {}
    class Runner(RunnerBase):
        def run(self, context): ...
    """
    config = """
    runner:
      - {name: mine, class: train, device: cpu, network_class_path: "{workspace}/own.py", runner_class_path: "{workspace}/own.py"}
    """
    path = testing.write_files(tmp_path / "own", {"own.py": own, "config.yaml": config}) / "config.yaml"
    assert pipeline("run", path).exit_code == 0
    result = pipeline("predict", "runs/own/latest", "-o", "out.jsonl")
    assert (result.exit_code, "runner mine: has no phase, so there is no dataset to predict" in result.stderr) == (
        2,
        True,
    )
