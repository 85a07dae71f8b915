"""How several ranks evaluate: their numbers, and what is gathered of them, beside those of one process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.utils.data import DataLoader, TensorDataset

from pipeline import GeneralTrainer
from pipeline.brain.module_brain import ModuleBrain
from pipeline.compute.evaluation import evaluate, no_batch
from pipeline.compute.stage import Stage
from pipeline.data.batch import EmptySlice
from pipeline.data.loader import for_evaluation
from pipeline.distributed.world import current_world
from pipeline.errors import DataError
from pipeline.metrics import AUC, GAUC, RMSE, Mean
from pipeline.metrics.base import FromBatch
from pipeline.metrics.ranks import Judges, join
from tests.conftest import Workspace
from tests.distributed.ranks import Ranks
from tests.distributed.test_equality import FILES, assert_close, run_job
from tests.distributed.test_equality import numbers as lines_of


class Pair(NamedTuple):
    """Predictions of a model."""

    scores: Tensor
    hidden: Any


def evaluated_samples() -> list[int]:
    """How many samples the batches have of a loader that leaves the last one out in training."""
    loader = DataLoader(TensorDataset(torch.arange(5)), batch_size=2, drop_last=True)
    return [len(batch) for (batch,) in for_evaluation(loader, every_sample=True)]


def test_where_every_sample_is_evaluated_no_loader_drops_its_last_batch(two_ranks: Ranks) -> None:
    assert two_ranks(evaluated_samples) == [[2, 2, 1]] * 2


class Middle:
    """The median of all predictions: a user's metric, which cannot be merged."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def update(self, predictions: Tensor, target: Tensor) -> None:
        self.seen.append(predictions.flatten())

    def compute(self) -> Tensor:
        return torch.cat(self.seen).median()

    def reset(self) -> None:
        self.seen = []


class Synced(Middle):
    """Calls the other ranks where torch.distributed is initialised, as metrics of torchmetrics do."""

    def compute(self) -> Tensor:
        value = super().compute()
        if distributed.is_initialized():
            distributed.all_reduce(value)
        return value


class Regression(ModuleBrain):
    """Logs a number in each batch, and one at the end."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__(nn.Linear(3, 1), nn.functional.mse_loss)
        self.ends: list[float] = []

    def compute_forward(self, batch: Any, stage: Stage) -> Any:
        predictions = super().compute_forward(batch, stage)
        self.log("spread", predictions.mean())
        return predictions

    def on_stage_end(self, stage: Stage, stage_loss: float, epoch: int | None = None) -> None:
        self.ends.append(stage_loss)


def data() -> list[tuple[Tensor, Tensor]]:
    """Global batches of 5, 5, 5 and 1 samples: with 3 ranks two slices of the last are empty."""
    draw = torch.Generator().manual_seed(2)
    inputs, target = torch.randn(16, 3, generator=draw), torch.randint(2, (16, 1), generator=draw).float()
    return list(zip(inputs.split(5), target.split(5), strict=True))


def slices(batches: Iterable[Any]) -> list[Any]:
    """This rank's part of each batch."""
    world, own = current_world(), []
    for inputs, target in batches:
        part = inputs.tensor_split(world.size)[world.rank], target.tensor_split(world.size)[world.rank]
        own.append(part if len(part[0]) else EmptySlice((inputs[:1], target[:1])))
    return own


METRICS: dict[str, Callable[[], Any]] = {"rmse": RMSE, "auc": AUC, "mean": Mean, "middle": Middle, "synced": Synced}


def numbers_of(batches: list[Any], names: Iterable[str] = METRICS) -> tuple[dict[str, float], list[float], list[Any]]:
    """The numbers, what ``on_stage_end`` was called with, and what was written."""
    brain, written = Regression(), list[Any]()
    metrics = {name: METRICS[name]() for name in names}
    observe = lambda predictions, target, batch: written.append((predictions, target, batch))  # noqa: E731
    return evaluate(brain, batches, Stage.VALID, metrics, observe), brain.ends, written


def numbers_of_slices(*names: str) -> Any:
    return numbers_of(slices(data()), names or METRICS)


@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_have_the_numbers_of_one_process(request: pytest.FixtureRequest, size: int) -> None:
    ranks: Ranks = request.getfixturevalue({2: "two_ranks", 3: "three_ranks"}[size])
    expected, ends, written = numbers_of(data())
    answers = ranks(numbers_of_slices)
    for numbers, own_ends, _ in answers:
        assert list(numbers) == list(expected)
        assert numbers == pytest.approx(expected, rel=1e-6)
        assert own_ends == pytest.approx(ends, rel=1e-6)
    assert len({tuple(numbers.values()) for numbers, *_ in answers}) == 1
    # Whole batches in order, on rank 0 alone.
    assert not any(others for *_, others in answers[1:])
    for mine, theirs in zip(answers[0][2], written, strict=True):
        torch.testing.assert_close(mine[:2], theirs[:2])


class ByRow(Middle):
    """Gets the numbers of the samples, by the field of the batch."""

    def update(self, predictions: Tensor, target: Tensor, rows: Any = None) -> None:
        self.seen.append(rows * predictions.flatten())


def numbers_by_fields() -> dict[str, float]:
    """Numbers of three slices of mappings, of which two are empty at last."""
    brain, world, batches = Regression(), current_world(), list[Any]()
    brain.compute_forward = lambda batch, stage: brain.modules.model(batch["inputs"])  # type: ignore[method-assign]
    brain.compute_objectives = lambda scores, batch, stage: (scores - batch["target"]).square().mean()  # type: ignore[method-assign]
    for (inputs, target), rows in zip(data(), torch.arange(16).split(5), strict=True):
        batch = {"inputs": inputs, "target": target, "row": rows, "group": rows % 3}
        own = {name: value.tensor_split(world.size)[world.rank] for name, value in batch.items()}
        batches.append(own if len(own["row"]) else EmptySlice(batch))
    metrics: dict[str, Any] = {
        "gauc": FromBatch(GAUC(), {"users": "group"}, "gauc"),
        "by_row": FromBatch(ByRow(), {"rows": "row"}, "by_row"),
    }
    return evaluate(brain, batches, Stage.VALID, metrics)


def test_fields_of_a_batch_reach_metrics_that_are_merged_and_those_of_whole_batches(three_ranks: Ranks) -> None:
    alone = numbers_by_fields()
    for numbers in three_ranks(numbers_by_fields):
        assert numbers == pytest.approx(alone, rel=1e-6)


def observed_batch() -> list[Any]:
    """What an observer sees of batches whose texts are padded to another length on each rank."""
    world, seen = current_world(), list[Any]()
    judges = Judges({}, lambda *values: seen.append(values), world, torch.device("cpu"))
    rows = torch.arange(2 - world.rank)
    judges.judge(
        rows,
        rows + 1,
        {"x": rows, "id": [f"{world.rank}.{row}" for row in rows], "text": torch.ones(len(rows), 5 + world.rank)},
        rows,
    )
    return [repr(value) for values in seen for value in values]


def test_who_observes_finds_ids_in_a_batch_of_which_not_all_can_be_joined(two_ranks: Ranks) -> None:
    rows = torch.tensor([0, 1, 0])
    batch = {"x": rows, "id": ["0.0", "0.1", "1.0"]}
    assert two_ranks(observed_batch) == [[repr(rows), repr(rows + 1), repr(batch)], []]


def uneven(counts: list[int], names: list[str]) -> Any:
    """Streams: each rank has another number of whole batches."""
    world, batches = current_world(), iter(data())
    own = [[next(batches) for _ in range(count)] for count in counts]
    return numbers_of(own[world.rank], names)[0]


@pytest.mark.parametrize("names", [["rmse", "auc"], [*METRICS]])
@pytest.mark.parametrize("counts", [[1, 3], [4, 0], [0, 2]])
def test_streams_may_end_after_different_numbers_of_batches(
    two_ranks: Ranks, counts: list[int], names: list[str]
) -> None:
    expected = numbers_of(data()[: sum(counts)], names)[0]
    for numbers in two_ranks(uneven, counts, names):
        assert numbers == pytest.approx(expected, rel=1e-6)


def error_without_a_batch() -> str:
    with pytest.raises(DataError) as error:
        evaluate(Regression(), [], Stage.VALID, {"rmse": RMSE(), "middle": Middle()})
    return str(error.value)


def test_without_any_batch_all_ranks_say_so(two_ranks: Ranks) -> None:
    assert two_ranks(error_without_a_batch) == [no_batch("the evaluated dataset")] * 2


class Ragged(Regression):
    """Gives predictions that are as wide as the rank says."""

    def readable(self, predictions: Any, batch: Any) -> Any:
        return predictions.expand(-1, 2 + current_world().rank)


def error_of_ragged(observed: bool) -> str:
    """The error of the first batch, which only rank 0 has."""
    metrics, observe = ({}, lambda *_: None) if observed else ({"middle": Middle()}, None)
    judges = Judges(metrics, observe, current_world(), torch.device("cpu"))
    inputs, target = slices(data())[0]
    try:
        ragged = Ragged().readable(torch.ones(len(inputs), 1), inputs)
        judges.judge(ragged, target, (inputs, target), ragged)
    except DataError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("observed", "who"),
    [
        (False, "metric 'middle' (Middle) has no merge(states), and what it judges"),
        (True, "predictions: what is written"),
    ],
)
def test_what_cannot_be_joined_is_an_error_that_names_the_metric(two_ranks: Ranks, observed: bool, who: str) -> None:
    first, second = two_ranks(error_of_ragged, observed)
    assert first.startswith(f"{who} cannot be joined to whole batches: slices are a tensor of shape (3, 2) (")
    remedy = "return a row per sample along the first dimension"
    assert first.endswith(remedy if observed else f"{remedy}, or add merge to the metric")
    assert second == ""


ROWS, COLUMNS = [torch.arange(2), torch.arange(3)], [torch.arange(3), torch.arange(3)]


@pytest.mark.parametrize(
    ("parts", "counts", "whole"),
    [
        (([1, 2], ["x"]), (2, 1), [1, 2, "x"]),
        (({"id": ["a"]}, {"id": ["b"]}), (1, 1), {"id": ["a", "b"]}),
        # Tensors of two samples each, and two tensors of three samples each.
        ((ROWS, ROWS[:1]), (2, 1), [*ROWS, ROWS[0]]),
        ((COLUMNS, COLUMNS), (3, 3), [torch.arange(3).repeat(2), torch.arange(3).repeat(2)]),
        (
            ([{"box": torch.ones(4)}], [{"box": torch.ones(7)}]),
            (1, 1),
            [{"box": torch.ones(4)}, {"box": torch.ones(7)}],
        ),
        ((Pair(ROWS[0], None), Pair(ROWS[1], None)), (2, 3), Pair(torch.tensor([0, 1, 0, 1, 2]), None)),
    ],
)
def test_values_of_slices_are_joined_however_deep(parts: Any, counts: Any, whole: Any) -> None:
    joined = join(parts, counts)
    assert repr(joined) == repr(whole)


@pytest.mark.parametrize("value", [torch.tensor(1.0), 3.0, {"loss": torch.tensor(1.0)}, object()])
def test_what_has_no_row_per_sample_is_not_joined(value: Any) -> None:
    with pytest.raises(ValueError, match="has no row per sample"):
        join((value, value), (2, 2))


def evaluate_all(config: Path, *overrides: str) -> Any:
    """The numbers of an infer runner, by checkpoint."""
    context = GeneralTrainer(config, [*overrides]).run()
    checkpoints = {path.name: numbers for path, numbers in context["checkpoints"].items()}
    return checkpoints, context["metrics"], str(context["run_dir"])


@pytest.mark.slow
def test_a_damaged_one_of_several_checkpoints_is_left_out_by_all(two_ranks: Ranks, workspace: Workspace) -> None:
    config = workspace(FILES) / "config.yaml"
    trained = run_job(config, ["mode=train", f"output_dir={config.parent / 'trained'}"])
    second = sorted(Path(trained, "train", "checkpoints").glob("step-*"))[1]
    (second / "waves.safetensors").write_bytes(b"nothing")
    own = ["mode=test", f"runner.test.init_model_path={trained}"]
    both = two_ranks(evaluate_all, config, *own, f"output_dir={config.parent / 'together'}")
    (checkpoints, metrics, run_dir), others = both[0], both[1]
    alone = evaluate_all(config, *own, f"output_dir={config.parent / 'alone'}")
    assert others == both[0]
    assert_close(checkpoints, alone[0])
    assert_close(metrics, alone[1])
    assert [len(numbers) for numbers in checkpoints.values()] == [1, 0, 1]
    for name in (name for name in checkpoints if name != second.name):
        paths = [Path(own, "test", name, "waves_predictions.jsonl") for own in (run_dir, alone[2])]
        ours, theirs = ([json.loads(line) for line in path.read_text().splitlines()] for path in paths)
        assert len(ours) == 33
        assert_close(ours, theirs)


STREAM = """
    from torch.utils.data import IterableDataset
    from .data import Waves

    class Stream(IterableDataset):
        def __init__(self, samples):
            self.waves = Waves(samples, 1)
        def __iter__(self):
            for index in range(len(self.waves.x)):
                yield self.waves[index]
"""


@pytest.mark.parametrize("samples", [9, pytest.param(2, marks=pytest.mark.slow)])
def test_a_stream_is_validated_once_whatever_number_of_batches_ranks_have(
    three_ranks: Ranks, workspace: Workspace, samples: int
) -> None:
    config = workspace({**FILES, "stream.py": STREAM}) / "config.yaml"
    data = f"dataset.valid={{name: valid, class_path: '{{workspace}}/stream.py:Stream', args: {{samples: {samples}}}, batch_size: 2}}"
    own = [data, "mode=train", "runner.train.epochs=1"]
    together = three_ranks(run_job, config, [*own, f"output_dir={config.parent / 'together'}"])[0]
    alone = run_job(config, [*own, f"output_dir={config.parent / 'alone'}"])
    # Each sample once: the greatest error, which is gathered, and the mean, which is merged.
    assert_close(lines_of(together)[-1], lines_of(alone)[-1])
