"""When a run is validated, and what is kept as its best."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from pipeline import Brain, Stage, hookimpl
from pipeline.compute.best_tracker import BestTracker
from pipeline.context import Context
from pipeline.errors import ConfigError, DataError

Config = Callable[..., dict[str, Any]]
Run = Callable[[dict[str, Any]], Context]
Table = Callable[..., TensorDataset]
mse = nn.functional.mse_loss


def validating(config: Config, recorder: Any, *, phases: int = 1, **runner: Any) -> dict[str, Any]:
    """A run whose phases (3 batches each) are validated, with a plugin that notes when."""
    chosen = config(**runner)
    first = chosen["phase"][0] | {"valid_dataset_name": "data"}
    chosen["phase"] = [{**first, "name": f"line{number}"} for number in range(phases)]
    chosen["plugins"].append(recorder)
    return chosen


def validated(recorder: Any) -> list[tuple[int, str]]:
    return [(at, values["phase"]) for hook, at, values in recorder.calls if hook == "before_validation"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("runner", "iterations"),
    [
        ({}, [3, 6, 9, 12]),
        ({"valid_interval": "2 epoch"}, [6, 12]),
        ({"valid_interval": "3 epochs"}, [9, 12]),
        ({"valid_interval": 2}, [2, 4, 6, 8, 10, 12]),
        ({"valid_interval": 5}, [5, 10, 12]),
        ({"valid_interval": [5, "2 epoch"]}, [5, 6, 10, 12]),
        ({"valid_interval": [3, "1 epoch"]}, [3, 6, 9, 12]),
        ({"valid_interval": "10 minute"}, [12]),
        ({"valid_interval": 100, "debug": True}, [4]),
        ({"valid_interval": None}, []),
        ({"max_steps": 7}, [3, 6, 7]),
        ({"max_steps": 7, "valid_interval": 7}, [7]),
        ({"max_steps": 7, "valid_interval": 4}, [4, 7]),
        ({"max_steps": 6, "valid_interval": "5 epoch"}, [6]),
        ({"max_steps": 7, "valid_interval": None}, []),
        ({"optimizer_step_limit": 4}, [3, 4]),
    ],
)
def test_validation_comes_at_its_intervals_and_at_the_end_but_once_in_an_iteration(
    config: Config, run: Run, recorder: Any, runner: dict[str, Any], iterations: list[int]
) -> None:
    run(validating(config, recorder, **{"epochs": 4, **runner}))
    assert [at for at, _ in validated(recorder)] == iterations


@pytest.mark.parametrize(
    ("runner", "expected"),
    [
        ({}, [(3, "line0"), (6, "line1"), (9, "line0"), (12, "line1")]),
        ({"valid_interval": 4}, [(4, "line1"), (8, "line0"), (12, "line1"), (12, "line0")]),
        ({"valid_interval": 100}, [(12, "line0"), (12, "line1")]),
        ({"max_steps": 8}, [(3, "line0"), (6, "line1"), (8, "line0")]),
        ({"max_steps": 8, "valid_interval": 100}, [(8, "line0"), (8, "line1")]),
    ],
)
def test_each_of_several_phases_is_validated_in_its_turn_and_those_trained_since_at_the_end(
    config: Config, run: Run, recorder: Any, runner: dict[str, Any], expected: list[tuple[int, str]]
) -> None:
    run(validating(config, recorder, phases=2, epochs=2, **runner))
    assert validated(recorder) == expected


def test_a_phase_whose_model_another_has_trained_since_is_validated_at_the_end(
    config: Config, run: Run, recorder: Any
) -> None:
    chosen = validating(config, recorder, epochs=1)
    chosen["phase"].append({"name": "same", "model_of": "line0", "dataset_name": "data"})
    run(chosen)
    assert validated(recorder) == [(3, "line0"), (6, "line0")]


@pytest.mark.parametrize("runner", [{"max_steps": 9}, {"epochs": 3, "valid_interval": 100}])
def test_the_last_numbers_are_those_of_the_last_weights_wherever_they_stand(
    config: Config, run: Run, by_hand: Any, make_table: Table, runner: dict[str, Any]
) -> None:
    best = {"metric": "valid_loss", "mode": "min"}
    chosen = config(**{"epochs": None, "valid_interval": 5, "keep_best": best, **runner})
    chosen["phase"][0]["valid_dataset_name"] = "data"
    del chosen["plugins"]
    context = run(chosen)
    last, folder = context["train_state"]["iteration"], context["run_dir"] / "train"
    weights = by_hand(lambda parameters: torch.optim.SGD(parameters, 0.1), epochs=3, steps=last)
    x, y = make_table(10).tensors
    expected = pytest.approx(mse(x @ weights["weight"].T + weights["bias"], y).item(), rel=1e-5)
    results, state = (
        json.loads((folder / name).read_text()) for name in ("results.json", f"checkpoints/step-{last:012d}/state.json")
    )
    line = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    found = [line, results["metrics"]["line"], state["metrics"]["line"]]
    assert [results["best"]["value"], *(each["valid_loss"] for each in found)] == [expected] * 4
    assert (line["event"], line["iteration"], results["best"]["iteration"]) == ("epoch", last, last)


class Logging(Brain):
    """Logs the first input of each batch, weighted by samples, in training and validation."""

    def __init__(self) -> None:
        super().__init__({"net": nn.Linear(3, 1)})

    def compute_forward(self, batch: Any, stage: Stage) -> Any:
        self.log("first", batch[0][0, 0])
        self.log("fixed", 5.0, batch_size=1)
        return self.modules.net(batch[0])

    def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> Any:
        loss = mse(predictions, batch[1])
        return {"loss": loss, "twice": 2 * loss}


def test_a_validation_in_the_middle_of_an_epoch_loses_nothing_that_training_logged(
    config: Config, run: Run, make_table: Table
) -> None:
    chosen = config(valid_interval=2, epochs=1)
    chosen["phase"] = [{"name": "line", "model": Logging, "dataset_name": "data", "valid_dataset_name": "data"}]
    numbers, x = run(chosen)["metrics"]["line"], make_table(10).tensors[0]
    first = pytest.approx((4 * x[0, 0] + 4 * x[4, 0] + 2 * x[8, 0]).item() / 10, rel=1e-6)
    assert list(numbers) == [
        "loss",
        "first",
        "fixed",
        "twice",
        "valid_loss",
        "valid_first",
        "valid_fixed",
        "valid_twice",
    ]
    assert numbers["first"] == numbers["valid_first"] == first
    assert numbers["fixed"] == 5.0
    assert numbers["twice"] == pytest.approx(2 * numbers["loss"], rel=1e-6)
    assert numbers["valid_twice"] == pytest.approx(2 * numbers["valid_loss"], rel=1e-6)


def test_what_is_logged_is_printed_as_the_mean_since_the_last_print(
    config: Config, run: Run, make_table: Table
) -> None:
    class Printed:
        numbers: list[float] = []  # noqa: RUF012

        @hookimpl
        def on_print_interval(self, metrics: dict[str, float]) -> None:
            self.numbers.append(metrics["first"])

    chosen = config(print_interval=1, epochs=1)
    chosen["phase"] = [{"name": "line", "model": Logging, "dataset_name": "data"}]
    chosen["plugins"].append(Printed)
    run(chosen)
    assert Printed.numbers == pytest.approx(make_table(10).tensors[0][[0, 4, 8], 0].tolist(), rel=1e-6)


# The best.


class Scored:
    """A metric whose value in each validation is the next of a list."""

    def __init__(self, values: list[float]) -> None:
        self.values = iter(values)

    def update(self, predictions: Tensor, target: Tensor) -> None:
        pass

    def compute(self) -> float:
        return next(self.values)

    def reset(self) -> None:
        pass


def scored(
    config: Config, values: list[float], mode: str, metric: str = "valid_score", **runner: Any
) -> dict[str, Any]:
    """A run whose score is the next of ``values`` in each validation, and which keeps the best."""
    chosen = config(
        **{"epochs": len(values), "save_interval": None, "keep_last": None, **runner},
        keep_best={"metric": metric, "mode": mode},
    )
    chosen["phase"][0] |= {
        "valid_dataset_name": "data",
        "metrics": {"score": {"class": Scored, "args": {"values": values}}},
    }
    return chosen


def steps(context: Context) -> list[int]:
    folder = context["run_dir"] / context["runner_name"] / "checkpoints"
    return sorted(int(path.name.removeprefix("step-")) for path in folder.iterdir())


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("values", "mode", "value", "iteration"),
    [
        ([3.0, 1.0, 2.0], "min", 1.0, 6),
        ([3.0, 1.0, 2.0], "max", 3.0, 3),
        ([-3.0, -1.0, -2.0], "max", -1.0, 6),
        ([math.nan, 2.0, 5.0], "min", 2.0, 6),
        ([4.0, math.nan, 5.0], "max", 5.0, 9),
        ([2.0, 2.0, 3.0], "min", 2.0, 3),
    ],
)
def test_the_best_is_known_with_its_iteration_and_the_checkpoint_of_that_iteration_is_there(
    config: Config, run: Run, values: list[float], mode: str, value: float, iteration: int
) -> None:
    context = run(scored(config, values, mode))
    expected = {"metric": "valid_score", "mode": mode, "value": value, "iteration": iteration}
    assert context["best"] == expected
    assert iteration in steps(context)
    results = json.loads((context["run_dir"] / "train" / "results.json").read_text())
    assert results["best"] == expected


def test_a_checkpoint_is_saved_only_where_it_is_the_best_so_far_and_at_the_end(config: Config, run: Run) -> None:
    assert steps(run(scored(config, [5.0, 4.0, 6.0, 3.0, 7.0], "min"))) == [3, 6, 12, 15]


def test_the_best_may_be_found_in_the_middle_of_an_epoch(config: Config, run: Run) -> None:
    context = run(scored(config, [3.0, 1.0, 2.0], "min", epochs=2, valid_interval=2))
    assert (context["best"]["iteration"], steps(context)) == (4, [2, 4, 6])


def test_the_weights_of_the_best_checkpoint_are_those_that_were_judged(config: Config, run: Run, by_hand: Any) -> None:
    context = run(scored(config, [3.0, 1.0, 2.0], "min"))
    model = context["model"]["line"]["model"]
    context["checkpointer"].load_weights(context["checkpointer"].best("valid_score", "min"), context["model"])
    expected = by_hand(lambda parameters: torch.optim.SGD(parameters, 0.1), epochs=2)
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


def test_each_number_of_a_checkpoint_is_of_the_iteration_in_which_it_was_reported(
    config: Config, run: Run, recorder: Any
) -> None:
    context = run(validating(config, recorder, phases=2, epochs=1, valid_interval=2, save_interval=5))
    state = json.loads((context["checkpointer"].store.path_of(5) / "state.json").read_text())
    assert state["iterations"] == {"line0": {"loss": 3, "valid_loss": 2}, "line1": {"valid_loss": 4}}


def test_numbers_of_weights_that_were_not_trained_since_are_a_later_checkpoint_s_own(
    config: Config, run: Run, recorder: Any
) -> None:
    chosen = validating(config, recorder, phases=2)
    chosen["phase"][0]["metrics"] = {"score": {"class": Scored, "args": {"values": [1.0, 0.0]}}}
    context = run(chosen)
    assert context["checkpointer"].best("valid_score", "max") == context["checkpointer"].store.path_of(6)


def test_without_a_finite_number_there_is_no_best(config: Config, run: Run) -> None:
    context = run(scored(config, [math.nan, math.nan], "min"))
    assert context["best"] is None
    assert json.loads((context["run_dir"] / "train" / "results.json").read_text())["best"] is None


@pytest.mark.parametrize(
    ("metric", "remedy"),
    [
        ("valid_frist", r"; did you mean 'valid_first'\?"),
        ("loss", "; known: valid_first, valid_fixed, valid_loss"),
        ("auc", "; known: "),
    ],
)
def test_a_metric_that_nothing_reports_is_told_with_the_nearest_after_the_first_validation(
    config: Config, run: Run, metric: str, remedy: str
) -> None:
    chosen = config(keep_best={"metric": metric, "mode": "min"})
    chosen["phase"] = [{"name": "line", "model": Logging, "dataset_name": "data", "valid_dataset_name": "data"}]
    with pytest.raises(
        DataError, match=f"phase.line: keep_best watches '{metric}', which no validation reports{remedy}"
    ):
        run(chosen)


def test_a_number_of_two_phases_cannot_be_the_best(config: Config, run: Run, recorder: Any) -> None:
    chosen = validating(config, recorder, phases=2, keep_best={"metric": "valid_loss", "mode": "min"})
    message = (
        "keep_best watches 'valid_loss', which phases 'line0' and 'line1' both report; name a metric that only one"
    )
    with pytest.raises(DataError, match=message):
        run(chosen)


def test_the_best_of_several_phases_is_judged_by_the_one_that_reports_the_number(
    config: Config, run: Run, recorder: Any
) -> None:
    chosen = validating(
        config, recorder, phases=2, save_interval=None, keep_best={"metric": "valid_score", "mode": "max"}
    )
    chosen["phase"][0]["metrics"] = {"score": {"class": Scored, "args": {"values": [1.0, 0.0]}}}
    context = run(chosen)
    assert context["best"] == {"metric": "valid_score", "mode": "max", "value": 1.0, "iteration": 3}
    assert steps(context) == [3, 12]


@pytest.mark.parametrize(
    ("mode", "values", "better"),
    [
        ("min", [3.0, 4.0, 2.0, 2.0, 1.0], [True, False, True, False, True]),
        ("max", [3.0, 2.0, 4.0, 4.0, 5.0], [True, False, True, False, True]),
        ("max", [-3.0, -2.0, -4.0], [True, True, False]),
        ("min", [math.nan, 2.0, math.nan, 1.0], [False, True, False, True]),
        ("min", [math.inf, 2.0], [True, True]),
    ],
)
def test_a_number_improves_if_it_is_better_than_all_before(mode: str, values: list[float], better: list[bool]) -> None:
    best = BestTracker("valid_loss", mode)
    assert [best.improves("line", {"valid_loss": value}, at) for at, value in enumerate(values, 1)] == better
    last = max(at for at, each in enumerate(better) if each)
    assert best.as_dict() == {"metric": "valid_loss", "mode": mode, "value": values[last], "iteration": last + 1}


def test_numbers_without_the_one_that_is_watched_change_nothing() -> None:
    best = BestTracker("valid_auc", "max")
    assert not best.improves("line", {"valid_loss": 1.0}, 3)
    assert (math.isnan(best.value), best.iteration) == (True, 0)


def test_a_number_that_was_reported_is_known_even_where_it_is_nan() -> None:
    best = BestTracker("valid_auc", "max")
    best.improves("line", {"valid_auc": math.nan}, 3)
    best.check_reported()
    assert best.iteration == 0


def test_a_number_that_nothing_reported_is_told_with_the_nearest_else_all() -> None:
    best = BestTracker("accuracy", "max")
    best.improves("one", {"valid_bleu": 1.0}, 3)
    message = "keep_best watches 'accuracy', which no validation reports; "
    with pytest.raises(DataError, match=rf"{message}known: valid_bleu"):
        best.check_reported()
    best.improves("two", {"valid_accuracy": 0.5}, 3)
    with pytest.raises(DataError, match=rf"{message}did you mean 'valid_accuracy'\?"):
        best.check_reported()


def test_the_numbers_of_two_phases_are_not_compared() -> None:
    best = BestTracker("valid_loss", "min")
    best.improves("one", {"valid_loss": 1.0}, 3)
    with pytest.raises(DataError, match="'valid_loss', which phases 'one' and 'two' both report; name a metric that"):
        best.improves("two", {"valid_loss": 0.5}, 6)


def test_a_moment_deserves_a_checkpoint_until_it_is_saved_or_a_later_one_is() -> None:
    best = BestTracker("valid_loss", "min", count=2)
    for at, value in enumerate([3.0, 1.0, 2.0], 1):
        best.improves("line", {"valid_loss": value}, at)
        assert best.deserves_checkpoint(at)
    best.mark_saved(1)
    assert [best.deserves_checkpoint(at) for at in (1, 2, 3)] == [False, True, True]
    best.mark_saved(3)
    assert not best.deserves_checkpoint(2)
    assert [each.iteration for each in best.kept] == [3, 1]


def test_a_number_deserves_none_if_enough_better_ones_have_or_will_have_one() -> None:
    best = BestTracker("valid_auc", "max", count=2)
    for at, value in enumerate([0.5, 0.7, 0.6, 0.6, 0.55], 1):
        best.improves("line", {"valid_auc": value}, at)
    assert [best.deserves_checkpoint(at) for at in range(1, 6)] == [True, True, True, False, False]


def test_a_state_knows_of_the_checkpoint_that_carries_it() -> None:
    best, resumed = BestTracker("valid_loss", "min"), BestTracker("valid_loss", "min")
    best.improves("line", {"valid_loss": 3.0}, 4)
    resumed.load_state_dict(best.state_dict(4))
    assert [each.iteration for each in resumed.kept] == [4]
    assert resumed.as_dict() == best.as_dict()
    assert best.state_dict(5)["kept"] == []


# Without a loss.


class WithoutLoss(Logging):
    """Returns a loss in training alone."""

    nothing: Any = None

    def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> Any:
        return mse(predictions, batch[1]) if stage is Stage.TRAIN else self.nothing


class WithEmpty(WithoutLoss):
    """Returns a dict without a loss."""

    nothing: Any = {}  # noqa: RUF012


def unjudged(config: Config, model: type[Brain] = WithoutLoss, **runner: Any) -> dict[str, Any]:
    chosen = config(**{"epochs": 1, **runner})
    chosen["phase"][0] |= {"model": model, "valid_dataset_name": "data", "metrics": {"mae": {"class": "MAE"}}}
    del chosen["phase"][0]["loss"]
    return chosen


@pytest.mark.parametrize("model", [WithoutLoss, WithEmpty])
def test_a_validation_without_a_loss_reports_its_metrics_and_what_is_logged_alone(
    config: Config, run: Run, by_hand: Any, make_table: Table, model: type[Brain]
) -> None:
    numbers = run(unjudged(config, model))["metrics"]["line"]
    assert list(numbers) == ["loss", "first", "fixed", "valid_mae", "valid_first", "valid_fixed"]
    weights = by_hand(lambda parameters: torch.optim.SGD(parameters, 0.1), epochs=1)
    x, y = make_table(10).tensors
    predictions = x @ weights["weight"].T + weights["bias"]
    assert numbers["valid_mae"] == pytest.approx((predictions - y).abs().mean().item(), rel=1e-5)


def test_an_evaluation_without_a_loss_reports_the_metrics_alone(config: Config, run: Run) -> None:
    chosen = unjudged(config)
    chosen["runner"].append({"name": "test", "class": "infer", "device": "cpu"})
    assert list(run(chosen)["metrics"]["line"]) == ["mae", "first", "fixed"]


NO_LOSS = "compute_objectives returned none there: return one, or watch another number"


def test_the_best_of_a_loss_that_is_not_computed_says_so(config: Config, run: Run) -> None:
    with pytest.raises(DataError, match=f"'valid_loss', which no validation reports; {NO_LOSS}"):
        run(unjudged(config, keep_best={"metric": "valid_loss", "mode": "min"}))


def test_a_plateau_on_a_loss_that_is_not_computed_says_so(config: Config, run: Run) -> None:
    chosen = unjudged(config)
    args = {"optim_type": "SGD", "optim_conf": {"lr": 0.1}}
    chosen["phase"][0]["optim_schedulers"] = {"main": {"class": "plateau", "args": args}}
    del chosen["hyper_parameters"]
    with pytest.raises(ConfigError, match=f"'valid_loss', and the validation reports valid_mae, .*; {NO_LOSS}"):
        run(chosen)


def test_early_stopping_on_a_loss_that_is_not_computed_says_so(config: Config, run: Run) -> None:
    chosen = unjudged(config)
    chosen["plugins"].append("early_stopping")
    with pytest.raises(DataError, match=f"'valid_loss', which no validation reports; {NO_LOSS}"):
        run(chosen)


def test_a_training_without_a_loss_is_an_error(config: Config, run: Run) -> None:
    class Never(WithoutLoss):
        def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> Any:
            return None

    with pytest.raises(DataError, match="compute_objectives returned None; return a scalar tensor"):
        run(unjudged(config, Never))
