"""A phase that is validated on several datasets: each has numbers of its own, by which anything may be steered."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from pipeline import GeneralTrainer, Stage, Trigger, hookimpl
from pipeline.brain.module_brain import ModuleBrain
from pipeline.context import Context
from pipeline.errors import DataError
from pipeline.stages import Runner

Config = Callable[..., dict[str, Any]]
Run = Callable[[dict[str, Any]], Context]
Table = Callable[..., TensorDataset]
mse, mae = nn.functional.mse_loss, nn.functional.l1_loss
SETS = ["valid", "test_2024"]


@pytest.fixture
def several(config: Config, make_table: Table) -> Config:
    """A config whose phase is validated on ``valid`` (7 samples) and ``test_2024`` (5 samples)."""

    def make(**runner: Any) -> dict[str, Any]:
        chosen = config(**runner)
        for number, (name, samples) in enumerate(zip(SETS, (7, 5), strict=True)):
            dataset = {"class_path": lambda samples=samples, number=number: make_table(samples, seed=number + 5)}
            chosen["dataset"].append({"name": name, "batch_size": 3, **dataset})
        chosen["phase"][0] |= {"valid_dataset_name": SETS, "metrics": {"mae": {"class": "MAE"}}}
        return chosen

    return make


def expected(weights: dict[str, Tensor], make_table: Table, prefix: str = "{}/") -> dict[str, Any]:
    numbers = {}
    for number, (name, samples) in enumerate(zip(SETS, (7, 5), strict=True)):
        x, y = make_table(samples, seed=number + 5).tensors
        predictions = x @ weights["weight"].T + weights["bias"]
        numbers[f"{prefix.format(name)}loss"] = mse(predictions, y).item()
        numbers[f"{prefix.format(name)}mae"] = mae(predictions, y).item()
    return pytest.approx(numbers, rel=1e-5)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1)


def lines(context: Context, event: str) -> list[dict[str, Any]]:
    text = (context["run_dir"] / context["runner_name"] / "metrics.jsonl").read_text()
    return [line for line in map(json.loads, text.splitlines()) if line["event"] == event]


def of_sets(numbers: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in numbers.items() if "/" in name}


def test_each_set_has_its_numbers_wherever_the_numbers_of_a_validation_are(
    several: Config, run: Run, by_hand: Any, make_table: Table
) -> None:
    chosen = several(epochs=2)
    del chosen["plugins"]
    context = run(chosen)
    first, last = (expected(by_hand(sgd, epochs=epochs), make_table) for epochs in (1, 2))
    found = [of_sets(line) for event in ("validate", "epoch") for line in lines(context, event)]
    assert found == [first, last, first, last]
    results = json.loads((context["run_dir"] / "train" / "results.json").read_text())
    state = json.loads((context["checkpointer"].newest() / "state.json").read_text())
    assert [of_sets(each["metrics"]["line"]) for each in (results, state)] == [last, last]
    assert list(context["metrics"]["line"]) == ["loss", "valid/loss", "valid/mae", "test_2024/loss", "test_2024/mae"]


def test_what_is_logged_of_an_epoch_names_the_sets(several: Config, run: Run, log_lines: list[str]) -> None:
    chosen = several(epochs=1)
    del chosen["plugins"]
    numbers = run(chosen)["metrics"]["line"]
    assert any(
        f"line  loss {numbers['loss']:.4f}  valid/loss {numbers['valid/loss']:.4f}" in line for line in log_lines
    )


@pytest.mark.parametrize("name", ["valid", ["valid"]])
def test_with_one_set_the_names_are_without_it(several: Config, run: Run, name: Any) -> None:
    chosen = several(epochs=1)
    chosen["phase"][0]["valid_dataset_name"] = name
    assert list(run(chosen)["metrics"]["line"]) == ["loss", "valid_loss", "valid_mae"]


def test_the_best_is_that_of_the_set_that_keep_best_names(several: Config, run: Run) -> None:
    chosen = several(epochs=3, keep_best={"metric": "test_2024/mae", "mode": "min"})
    del chosen["plugins"]
    context = run(chosen)
    scores = {line["iteration"]: line["test_2024/mae"] for line in lines(context, "validate")}
    best = min(scores, key=lambda iteration: scores[iteration])
    assert (context["best"]["iteration"], context["best"]["value"]) == (best, scores[best])
    assert context["checkpointer"].best("test_2024/mae", "min") == context["checkpointer"].store.path_of(best)


def test_a_name_without_its_set_is_told_with_the_nearest(several: Config, run: Run) -> None:
    with pytest.raises(DataError, match="watches 'valid_loss', which no validation reports; did you mean 'valid/loss'"):
        run(several(keep_best={"metric": "valid_loss", "mode": "min"}))


def test_each_set_is_evaluated_as_far_as_its_own_limit_says(several: Config, run: Run) -> None:
    seen: list[int] = []

    class Counts(ModuleBrain):
        def __init__(self) -> None:
            super().__init__(nn.Linear(3, 1), mse)

        def compute_forward(self, batch: Any, stage: Stage) -> Any:
            if stage is Stage.VALID:
                seen.append(len(batch[0]))
            return super().compute_forward(batch, stage)

    chosen = several(epochs=1, limit_batches=3)
    chosen["dataset"][2]["limit_batches"] = 1
    chosen["phase"][0]["model"] = Counts
    del chosen["phase"][0]["loss"]
    run(chosen)
    assert seen == [3, 3, 1, 3]


class Scored:
    """A metric whose values are 1 and then 2 for the first set, 5 and then 4 for the second."""

    def __init__(self) -> None:
        self.values = iter([1.0, 5.0, 2.0, 4.0])

    def update(self, predictions: Tensor, target: Tensor) -> None:
        pass

    def compute(self) -> float:
        return next(self.values)

    def reset(self) -> None:
        pass


@pytest.mark.parametrize(("metric", "rate"), [("valid/score", 0.05), ("test_2024/score", 0.1)])
def test_a_plateau_watches_the_set_that_it_names(several: Config, run: Run, metric: str, rate: float) -> None:
    chosen = several(epochs=2)
    args = {"optim_type": "SGD", "optim_conf": {"lr": 0.1}, "patience": 0, "factor": 0.5, "metric": metric}
    scheduler = {"main": {"class": "plateau", "args": args}}
    chosen["phase"][0] |= {"metrics": {"score": {"class": Scored}}, "optim_schedulers": scheduler}
    del chosen["hyper_parameters"]
    assert run(chosen)["model"]["line"]["optim_schedulers"]["main"].update_lr(0, 0) == rate


def test_early_stopping_watches_the_set_that_it_names(several: Config, run: Run, log_lines: list[str]) -> None:
    chosen = several(epochs=9)
    chosen["plugins"].append({"early_stopping": {"metric": "line.test_2024/mae", "min_delta": 100.0, "patience": 2}})
    assert run(chosen)["train_state"]["epoch"] == 3
    assert any("line.test_2024/mae has not improved in 2 validations" in line for line in log_lines)


def test_early_stopping_tells_the_names_of_all_sets(several: Config, run: Run) -> None:
    chosen = several(epochs=9)
    chosen["plugins"].append({"early_stopping": {"metric": "test/mae"}})
    with pytest.raises(DataError, match="'test/mae', which no validation reports"):
        run(chosen)


def test_a_trigger_fires_where_the_number_of_its_set_improves(several: Config, run: Run) -> None:
    class Asks:
        fired: list[bool] = []  # noqa: RUF012
        scores: list[float] = []  # noqa: RUF012
        trigger = Trigger(improves="test_2024/mae")

        @hookimpl
        def after_epoch(self, context: Context) -> None:
            self.fired.append(self.trigger.fires(context))
            self.scores.append(context["metrics"]["line"]["test_2024/mae"])

    chosen = several(epochs=4)
    chosen["plugins"].append(Asks)
    run(chosen)
    assert Asks.fired == [score < min(Asks.scores[:at], default=9.0) for at, score in enumerate(Asks.scores)]


def test_a_trigger_on_a_number_of_no_set_is_told_with_the_nearest(several: Config, run: Run) -> None:
    class Asks:
        trigger = Trigger(improves="test_2024/meo")

        @hookimpl
        def after_epoch(self, context: Context) -> None:
            self.trigger.fires(context)

    chosen = several(epochs=4)
    chosen["plugins"].append(Asks)
    with pytest.raises(DataError, match="'test_2024/meo', which no phase reports; did you mean 'test_2024/mae'"):
        run(chosen)


def test_an_infer_runner_evaluates_each_set_and_writes_its_predictions(
    several: Config, run: Run, by_hand: Any, make_table: Table
) -> None:
    chosen = several(epochs=1)
    chosen["runner"].append({"name": "test", "class": "infer", "device": "cpu", "predictions": {}})
    context = run(chosen)
    weights = by_hand(sgd, epochs=1)
    assert context["metrics"]["line"] == expected(weights, make_table)
    folder: Path = context["run_dir"] / "test"
    assert json.loads((folder / "results.json").read_text())["metrics"]["line"] == expected(weights, make_table)
    for name, samples in zip(SETS, (7, 5), strict=True):
        rows = (folder / f"line.{name}_predictions.jsonl").read_text().splitlines()
        assert len(rows) == samples
    assert context["dataset"].keys() == {*SETS}


def test_a_validation_that_code_asks_for_gives_the_numbers_of_each_set(
    several: Config, run: Run, by_hand: Any, make_table: Table
) -> None:
    def validate_at_once(context: Context) -> None:
        for _ in context.batches("line"):
            pass
        found.append(context.validate("line"))

    found: list[dict[str, Any]] = []
    chosen = several(epochs=None)
    chosen["runner"][0]["runner_class_path"] = _runner(validate_at_once)
    run(chosen)
    assert [list(numbers) for numbers in found] == [["valid/loss", "valid/mae", "test_2024/loss", "test_2024/mae"]]


def _runner(body: Callable[[Context], None]) -> type:
    class Own(Runner):
        def run(self, context: Context) -> None:
            body(context)

    return Own


def test_a_number_that_a_plugin_adds_is_one_of_the_validation(several: Config, run: Run) -> None:
    class Adds:
        @hookimpl
        def extend_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
            return {"gap": metrics["test_2024/loss"] - metrics["valid/loss"]} if "valid/loss" in metrics else {}

    chosen = several(epochs=1)
    chosen["plugins"].append(Adds)
    numbers = run(chosen)["metrics"]["line"]
    assert numbers["valid_gap"] == pytest.approx(numbers["test_2024/loss"] - numbers["valid/loss"])


def test_a_run_that_overfits_validates_on_its_training_batches_under_the_names_of_the_sets(
    several: Config, run: Run
) -> None:
    numbers = run(several(epochs=1, overfit_batches=1))["metrics"]["line"]
    assert numbers["valid/loss"] == numbers["test_2024/loss"]


def test_the_first_batches_of_each_set_are_looked_at_before_the_first_step(several: Config, run: Run) -> None:
    seen: list[int] = []

    class Counts(ModuleBrain):
        def __init__(self) -> None:
            super().__init__(nn.Linear(3, 1), mse)

        def compute_forward(self, batch: Any, stage: Stage) -> Any:
            if stage is Stage.VALID:
                seen.append(len(batch[0]))
            return super().compute_forward(batch, stage)

    chosen = several(epochs=1, valid_interval=None)
    chosen["phase"][0] |= {"model": Counts}
    del chosen["phase"][0]["loss"]
    chosen["plugins"].append({"sanity_validation": {"batches": 3}})
    run(chosen)
    assert seen == [3, 3, 1, 3, 2]


class KilledError(BaseException):
    """Stands for the end of the process."""


def test_a_run_interrupted_between_two_sets_ends_as_one_that_was_not(several: Config, run: Run) -> None:
    class Stop:
        """Ends the process once the first set is evaluated."""

        @hookimpl
        def before_validation(self, context: Context) -> None:
            brain = context["model"]["line"]["brain"]
            if context["train_state"]["iteration"] == 4:
                brain.on_stage_end = end

    def end(stage: Stage, *_: Any) -> None:
        raise KilledError

    keys = {"epochs": 2, "valid_interval": 2, "save_interval": 1, "keep_best": {"metric": "valid/mae", "mode": "min"}}
    chosen = several(**keys)
    whole = run(several(**keys))
    chosen["plugins"].append(Stop)
    with pytest.raises(KilledError):
        GeneralTrainer(chosen).run()
    resumed = GeneralTrainer(several(**keys), resume="auto").run()
    assert (resumed["metrics"], resumed["best"]) == (whole["metrics"], whole["best"])
