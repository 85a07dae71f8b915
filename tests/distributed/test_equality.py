"""The same config on 1, 2, 3 and 4 processes: the same weights, numbers and predictions, but for rounding."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from pipeline import GeneralTrainer
from pipeline.testing import write_files
from tests.conftest import Workspace
from tests.distributed.ranks import Ranks

# The jobs compute in float64, so that what is wrong is not taken for rounding.
# Of a weight, in parts of the largest of its tensor; of a number, in parts of itself.
CLOSE = 1e-6

FILES = {
    "data.py": """
        import torch
        from torch.utils.data import Dataset, IterableDataset

        class Waves(Dataset):
            def __init__(self, samples=70, seed=0):
                generator = torch.Generator().manual_seed(seed)
                self.x = torch.randn(samples, 4, generator=generator, dtype=torch.float64)
                self.y = 1 + torch.sin(self.x.sum(1, keepdim=True))
            def __len__(self):
                return len(self.x)
            def __getitem__(self, index):
                return self.x[index], self.y[index]
    """,
    "model.py": """
        from torch import nn
        from torch.optim import SGD
        from pipeline import Brain, Stage

        class Model(nn.Sequential):
            def __init__(self):
                super().__init__(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
                self.double()

        class TwoLosses(Brain):
            def __init__(self):
                super().__init__({"body": nn.Sequential(nn.Linear(4, 8), nn.Tanh()), "head": nn.Linear(8, 1)})
                self.modules.double()
            def compute_forward(self, batch, stage):
                return self.modules.head(self.modules.body(batch[0]))
            def compute_objectives(self, predictions, batch, stage):
                error = predictions - batch[1]
                self.log("error", error.detach().abs().mean())
                return {"loss": error.square().mean(), "smooth": error.abs().pow(1.5).mean()}
            def target(self, batch):
                return batch[1]

        class OwnSteps(TwoLosses):
            def init_optimizers(self):
                parts = self.modules.body, self.modules.head
                self.first, self.second = (SGD(own.parameters(), 0.1, momentum=0.9) for own in parts)
            def fit_batch(self, batch):
                for name, optimizer in (("smooth", self.first), ("loss", self.second)):
                    optimizer.zero_grad()
                    losses = self.compute_objectives(self.compute_forward(batch, Stage.TRAIN), batch, Stage.TRAIN)
                    losses[name].backward()
                    nn.utils.clip_grad_norm_(self.modules.parameters(), 0.5)
                    optimizer.step()
                return losses["loss"].detach()
    """,
    "runner.py": """
        from pipeline import RunnerBase, optimize, stages
        from torch.nn.functional import mse_loss

        class Verb(stages.Runner):
            def train_batch(self, context, phase, batch):
                loss = mse_loss(phase.model(batch[0]), batch[1])
                optimize(loss, phase.optim_schedulers)
                return loss

        class Epoch(stages.Runner):
            def train_epoch(self, context, epoch):
                super().train_epoch(context, epoch)

        class Loop(RunnerBase):
            def run(self, context):
                phase = context["model"]["waves"]
                for epoch in context.epochs():
                    for batch in context.batches(phase):
                        loss = mse_loss(phase.model(batch[0]), batch[1])
                        optimize(loss, phase.optim_schedulers)
                    context.validate(phase)

        class FitBatch(RunnerBase):
            def run(self, context):
                phase = context["model"]["waves"]
                for epoch in context.epochs():
                    for batch in context.batches(phase):
                        phase.brain.fit_batch(batch)
    """,
    "metric.py": """
        class Worst:
            def reset(self):
                self.worst = 0.0
            def update(self, predictions, target):
                self.worst = max(self.worst, float((predictions - target).abs().max()))
            def compute(self):
                return self.worst
            def state_dict(self):
                return {"worst": self.worst}
            def load_state_dict(self, state):
                self.worst = state["worst"]
    """,
    "config.yaml": """
        plugins: [{progress_bar: false}]
        hyper_parameters: {optimizer: {class: SGD, learning_rate: 0.1, momentum: 0.9}}
        dataset:
          - {name: train, class_path: "{workspace}/data.py:Waves", global_batch_size: 16, shuffle: true}
          - {name: valid, class_path: "{workspace}/data.py:Waves", args: {samples: 33, seed: 1}, global_batch_size: 10}
        runner:
          - {name: train, class: train, device: cpu, epochs: 3, print_interval: 2, seed: 3}
          - {name: test, class: infer, device: cpu, predictions: {format: jsonl}}
        phase:
          - name: waves
            model: "{workspace}/model.py"
            loss: torch.nn.functional.mse_loss
            metrics: {mae: {class: MAE}, worst: {class: "{workspace}/metric.py:Worst"}}
            dataset_name: train
            valid_dataset_name: valid
    """,
}

WITHOUT = "hyper_parameters={}"
TWO = [
    WITHOUT,
    "phase.waves.model={workspace}/model.py:TwoLosses",
    "phase.waves.loss=null",
    "phase.waves.optim_schedulers={body: {class: constant, args: {optim_type: SGD, optim_conf: {lr: 0.05}, "
    "optim_loss: smooth, updated_modules: body}}, head: {class: constant, args: {optim_type: SGD, "
    "optim_conf: {lr: 0.1}, updated_modules: head}}}",
]
OWN = [WITHOUT, "phase.waves.model={workspace}/model.py:OwnSteps", "phase.waves.loss=null"]
NOAM = [
    WITHOUT,
    "phase.waves.optim_schedulers={main: {class: noam, args: {optim_type: SGD, optim_conf: {lr: 0.1}, "
    "warmup_steps: 4, accum_grad: 2, grad_clip: 0.5}}}",
]

EVERY_SECOND = [
    WITHOUT,
    "phase.waves.optim_schedulers={main: {class: constant, args: {optim_type: SGD, optim_conf: {lr: 0.1}, "
    "step_per_update: 2}}}",
]

# What it is -> overrides.
JOBS: dict[str, list[str]] = {
    "plain": [],
    "accumulation": ["runner.train.accum_grad=3"],
    "clipping": ["runner.train.grad_clip=0.01"],
    "clipping of values": ["runner.train.grad_clip_value=0.001"],
    "two losses": TWO,
    "a Noam rate": NOAM,
    "a step for every second batch": EVERY_SECOND,
    "a fit_batch that steps two optimizers itself": [*OWN, "dataset.train.args={samples: 65}"],
    "limit_batches": ["runner.train.limit_batches=2"],
    "overfit_batches": ["runner.train.overfit_batches=2"],
    "a frozen part": ["runner.train.freeze=['0.*']"],
    "batch_size on each process, in order": ["dataset.train.shuffle=false"],
    "a last batch of one sample": ["dataset.train.args={samples: 65}", "dataset.valid.args={samples: 31, seed: 1}"],
    "a last batch of two samples": ["dataset.train.args={samples: 66}", "runner.train.accum_grad=2"],
    "a last batch of three samples": ["dataset.train.args={samples: 67}"],
    "the last batch dropped": ["dataset.train.drop_last=true"],
    "workers": ["dataset.train.num_workers=2"],
    "metrics of the training": ["phase.waves.train_metrics={mae: {class: MAE}}"],
    "validation within an epoch": ["runner.train.valid_interval=2", "runner.train.save_interval=3"],
    "keep_best": ["runner.train.keep_best={metric: valid_mae, mode: min}"],
    "a verb of its own": ["runner.train.runner_class_path={workspace}/runner.py:Verb"],
    "an epoch of its own": ["runner.train.runner_class_path={workspace}/runner.py:Epoch"],
    "a loop of its own": ["runner.train.runner_class_path={workspace}/runner.py:Loop"],
    "a loop of its own with fit_batch": ["runner.train.runner_class_path={workspace}/runner.py:FitBatch"],
}

QUICK = ["plain", "a Noam rate", "a last batch of one sample", "a verb of its own"]
# On four ranks, one of which has no sample of the last batch.
ON_FOUR = ["accumulation", "two losses", "a last batch of one sample", "a loop of its own with fit_batch"]


def run_job(config: Path, overrides: list[str]) -> str:
    """The run directory of a run, on whichever rank this is."""
    return str(GeneralTrainer(config, overrides).run()["run_dir"])


def weights(run_dir: str) -> dict[str, Tensor]:
    """The weights that a training has come to."""
    last = max(Path(run_dir, "train", "checkpoints").glob("step-*"))
    return load_file(last / "waves.safetensors")


def numbers(run_dir: str) -> list[dict[str, Any]]:
    """All that a run has reported."""
    lines = [path.read_text() for path in sorted(Path(run_dir).glob("*/metrics.jsonl"))]
    return [json.loads(line) for text in lines for line in text.splitlines()]


def predictions(run_dir: str) -> list[dict[str, Any]]:
    """The predictions of the infer runner, in their order."""
    return [json.loads(line) for line in Path(run_dir, "test", "waves_predictions.jsonl").read_text().splitlines()]


def assert_close(found: Any, expected: Any) -> None:
    """Numbers in the same place are nearly the same, all else is the same."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name in expected:
            assert_close(found[name], expected[name])
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=CLOSE, abs=1e-7)
    else:
        assert found == expected


def assert_same_training(run_dir: str, expected: str) -> None:
    """Weights and numbers of two runs are those of one, but for rounding."""
    ours, theirs = weights(run_dir), weights(expected)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert float((ours[name] - tensor).abs().max()) <= CLOSE * float(tensor.abs().max()), name
    assert_close(numbers(run_dir), numbers(expected))


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[Ranks]:
    ranks = Ranks(4)
    yield ranks
    ranks.stop()


@pytest.fixture
def config(workspace: Workspace) -> Path:
    return workspace(FILES) / "config.yaml"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Return the run directory of a job in one process, which trains once for all tests."""
    folder = tmp_path_factory.mktemp("alone")
    config = write_files(folder / "workspace", FILES) / "config.yaml"
    return cache(lambda job: run_job(config, [*JOBS[job], f"output_dir={folder / 'runs'}"]))


def compare(ranks: Ranks, config: Path, overrides: list[str], alone: str | None = None) -> str:
    """Train as ranks; compare with the run of one process, and return the run directory."""
    together = ranks(run_job, config, [*overrides, f"output_dir={config.parent / 'together'}"])
    assert len(set(together)) == 1
    alone = alone or run_job(config, [*overrides, f"output_dir={config.parent / 'alone'}"])
    assert_same_training(together[0], alone)
    return together[0]


SINGLE_PRECISION = {
    name: text.replace("dtype=torch.float64", "").replace("self.double()", "") for name, text in FILES.items()
}


@pytest.mark.slow
def test_in_single_precision_weights_differ_by_rounding_alone(two_ranks: Ranks, workspace: Workspace) -> None:
    compare(
        two_ranks,
        workspace(SINGLE_PRECISION) / "config.yaml",
        ["hyper_parameters.optimizer={class: SGD, learning_rate: 0.05}"],
    )


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("job", QUICK + [pytest.param(job, marks=pytest.mark.slow) for job in JOBS if job not in QUICK])
def test_two_ranks_train_as_one_process(two_ranks: Ranks, config: Path, job: str, alone: Callable[[str], str]) -> None:
    together = compare(two_ranks, config, JOBS[job], alone(job))
    assert_close(predictions(together), predictions(alone(job)))


@pytest.mark.parametrize(
    "job",
    [
        "a last batch of one sample",
        pytest.param("two losses", marks=pytest.mark.slow),
        *(pytest.param(job, marks=pytest.mark.release) for job in ("plain", "a Noam rate", "a verb of its own")),
    ],
)
def test_three_ranks_train_as_one_process(
    three_ranks: Ranks, config: Path, job: str, alone: Callable[[str], str]
) -> None:
    compare(three_ranks, config, JOBS[job], alone(job))


@pytest.mark.parametrize(
    "job", [pytest.param(job, marks=pytest.mark.slow if job in ON_FOUR else pytest.mark.release) for job in JOBS]
)
def test_four_ranks_train_as_one_process(
    four_ranks: Ranks, config: Path, job: str, alone: Callable[[str], str]
) -> None:
    together = compare(four_ranks, config, JOBS[job], alone(job))
    assert_close(predictions(together), predictions(alone(job)))


def test_two_equal_runs_come_to_the_same_bits(three_ranks: Ranks, config: Path) -> None:
    first = three_ranks(run_job, config, [f"output_dir={config.parent / 'first'}"])[0]
    second = three_ranks(run_job, config, [f"output_dir={config.parent / 'second'}"])[0]
    theirs = weights(second)
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in weights(first).items())
    assert numbers(first) == numbers(second)
    assert predictions(first) == predictions(second)


def test_two_ranks_predict_a_subset_in_its_order(two_ranks: Ranks, config: Path) -> None:
    """The last batch has one sample, so that one rank has none of it."""
    indices = [30, 4, 17, 5, 9]
    sampler = {"class_path": "torch.utils.data:SubsetRandomSampler", "args": {"indices": indices}}
    subset = [f"dataset.valid.sampler={json.dumps(sampler)}", "dataset.valid.global_batch_size=2"]
    output = f"output_dir={config.parent / 'together'}"

    run_dir = two_ranks(run_job, config, ["runner.train.epochs=1", *subset, output])[0]

    rows = predictions(run_dir)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(33, 4, generator=generator, dtype=torch.float64)
    targets = (1 + torch.sin(x.sum(1))).tolist()
    assert [row["index"] for row in rows] == sorted(indices)
    assert [row["target"][0] for row in rows] == [targets[index] for index in sorted(indices)]


LYING_SAMPLER = """
    class Lying:
        def __init__(self, dataset):
            self.count = len(dataset)

        def __len__(self):
            return 4

        def __iter__(self):
            return iter([list(range(first, first + 10)) for first in range(0, self.count, 10)])
"""


@pytest.mark.slow
def test_two_ranks_accumulate_over_unannounced_batches(two_ranks: Ranks, workspace: Workspace) -> None:
    """The batch sampler claims 4 batches, and has 7."""
    config = workspace({**FILES, "sampler.py": LYING_SAMPLER}) / "config.yaml"
    sampler = 'dataset.train.batch_sampler={class_path: "{workspace}/sampler.py:Lying"}'
    order = [sampler, "dataset.train.global_batch_size=null", "dataset.train.shuffle=false"]

    compare(two_ranks, config, [*order, "runner.train.accum_grad=3"])
