"""A pass without training; how runs evaluate is tested in test_loop.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline import Brain, GeneralTrainer, Stage, hookimpl
from pipeline.brain.module_brain import ModuleBrain
from pipeline.compute.evaluation import evaluate, evaluating, predict
from pipeline.compute.trainable import trainable_of
from pipeline.context import Context
from pipeline.errors import ConfigError, DataError, DivergedError
from pipeline.metrics.base import MAE, Accuracy

mse = nn.functional.mse_loss


class Own(Brain):
    """Has an ``evaluate_batch`` that returns what it is told."""

    def __init__(self, returned: Any) -> None:
        super().__init__({"net": nn.Linear(1, 1)})
        self.returned = returned

    def evaluate_batch(self, batch: Any, stage: Stage) -> Any:
        return self.returned


PAIR = [(torch.ones(2, 1), torch.ones(2, 1))]


def test_what_is_logged_within_is_kept_apart_from_what_was_logged_before() -> None:
    brain = Brain({"net": nn.Linear(1, 1)})
    brain.log("loss", 1.0)
    with evaluating(brain):
        brain.log("loss", 9.0)
        assert trainable_of(brain).numbers.logged.means() == {"loss": 9.0}
    assert trainable_of(brain).numbers.logged.means() == {"loss": 1.0}


def test_modules_and_what_was_logged_are_as_they_were_even_after_an_error() -> None:
    brain = Brain({"net": nn.Dropout()})
    brain.log("loss", 1.0)
    with pytest.raises(ZeroDivisionError), evaluating(brain):
        brain.log("loss", 1 / 0)
    assert brain.modules.net.training
    assert torch.is_grad_enabled()
    assert trainable_of(brain).numbers.logged.means() == {"loss": 1.0}


class Logging(ModuleBrain):
    """Logs a number under each of some names."""

    def __init__(self, *names: str) -> None:
        super().__init__(nn.Linear(1, 2), nn.functional.cross_entropy)
        self.names = names

    def compute_forward(self, batch: Any, stage: Stage) -> Any:
        for name in self.names:
            self.log(name, 1.0)
        return super().compute_forward(batch, stage)


@pytest.mark.parametrize(("name", "replaced"), [("loss", "loss"), ("share", "metric")])
def test_what_is_logged_does_not_replace_the_loss_or_a_metric(name: str, replaced: str) -> None:
    batches = [(torch.ones(2, 1), torch.ones(2, dtype=torch.long))]
    with pytest.raises(ConfigError, match=rf"log\('{name}', …\) would replace the {replaced} .*; give it another"):
        evaluate(Logging("other", name), batches, Stage.VALID, {"share": Accuracy()})
    assert evaluate(Logging("other"), batches, Stage.VALID, {"share": Accuracy()})["other"] == 1.0


class Stepping(ModuleBrain):
    """Notes its step with each batch, and (``resets``) makes it another at the end of a training batch."""

    def __init__(self, resets: bool = False) -> None:
        super().__init__(nn.Linear(3, 1), mse)
        self.seen: list[tuple[str, int]] = []
        self.resets = resets

    def compute_forward(self, batch: Any, stage: Stage) -> Any:
        self.seen.append((stage.name, self.step))
        return super().compute_forward(batch, stage)

    def on_fit_batch_end(self, batch: Any, outputs: Any, loss: Tensor, should_step: bool) -> None:
        if self.resets:
            self.step = 0


def stepping(config: Any, resets: bool = False, **runner: Any) -> dict[str, Any]:
    """Two epochs of 3 batches, validated after every second one on 2 batches."""
    chosen: dict[str, Any] = config(valid_interval=2, **runner)
    chosen["dataset"].append({"name": "valid", "class_path": chosen["dataset"][0]["class_path"], "batch_size": 5})
    chosen["phase"] = [
        {"name": "line", "model": lambda: Stepping(resets), "dataset_name": "data", "valid_dataset_name": "valid"}
    ]
    return chosen


@pytest.mark.parametrize("alone", [True, False])
def test_step_counts_the_batches_of_a_validation_and_is_put_back_after_it(
    config: Any, make_table: Any, alone: bool
) -> None:
    valid, epoch = [("VALID", 1), ("VALID", 2)], [("TRAIN", 1), ("TRAIN", 2), ("TRAIN", 3)]
    if alone:
        brain, test = Stepping(), [("TEST", 1), ("TEST", 2)]
        brain.opt_class = lambda parameters: torch.optim.SGD(parameters, 0.1)
        brain.fit(range(2), make_table(10), make_table(10), False, {"batch_size": 4}, {"batch_size": 5})
        brain.evaluate(make_table(10), test_loader_kwargs={"batch_size": 5})
        assert (brain.seen, brain.step) == ([*epoch, *valid, *epoch, *valid, *test], 3)
        return
    brain = GeneralTrainer(stepping(config)).run()["model"]["line"]["brain"]
    assert brain.seen == [*epoch[:2], *valid, epoch[2], epoch[0], *valid, *epoch[1:], *valid]
    assert brain.step == 3


def test_whatever_a_brain_does_to_its_step_a_run_goes_on_at_its_place_in_the_data(config: Any) -> None:
    class Stop:
        @hookimpl
        def before_batch(self, context: Context) -> None:
            if context["train_state"]["iteration"] == 4 and context["checkpointer"].store.resumed is None:
                raise ZeroDivisionError

    unbroken = GeneralTrainer(stepping(config, resets=True)).run()["model"]["line"]["brain"]
    chosen = stepping(config, resets=True, save_interval=1)
    with pytest.raises(ZeroDivisionError):
        GeneralTrainer({**chosen, "plugins": [*chosen["plugins"], Stop]}).run()
    latest = Path("runs/config/latest").resolve()
    context = GeneralTrainer({**chosen, "plugins": [*chosen["plugins"], Stop]}, resume=latest).run()
    brain = context["model"]["line"]["brain"]
    assert torch.equal(brain.module.weight, unbroken.module.weight)
    assert brain.seen == unbroken.seen[-len(brain.seen) :]
    assert context["train_state"]["iteration"] == 6


def test_metrics_are_reset_first_and_see_predictions_with_their_target() -> None:
    scores, classes = torch.tensor([[2.0, 1.0], [0.0, 1.0]]), torch.tensor([0, 0])
    accuracy = Accuracy()
    accuracy.update(scores, torch.tensor([1, 0]))
    brain = ModuleBrain(nn.Identity(), nn.functional.cross_entropy)
    assert evaluate(brain, [(scores, classes)], Stage.TEST, {"accuracy": accuracy})["accuracy"] == 0.5


def test_an_observer_sees_predictions_and_target_of_each_batch() -> None:
    seen: list[Any] = []
    evaluate(ModuleBrain(nn.Identity(), mse), PAIR * 2, Stage.TEST, {}, lambda *each: seen.append(each))
    assert len(seen) == 2
    assert all(torch.equal(prediction, target) for prediction, target, _ in seen)


def test_without_metrics_and_observer_a_batch_needs_no_target() -> None:
    class Alone(Brain):
        def compute_forward(self, batch: Any, stage: Stage) -> Any:
            return batch

        def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> Tensor:
            return predictions.mean()

    assert evaluate(Alone(), [torch.full((3, 1), 2.0)], Stage.VALID, {}) == {"loss": 2.0}


@pytest.mark.parametrize("asked", [{"metrics": {"accuracy": Accuracy()}}, {"metrics": {}, "observe": print}])
def test_an_evaluate_batch_of_its_own_has_no_predictions_to_be_judged_or_written(asked: dict[str, Any]) -> None:
    message = "Own has its own evaluate_batch, which gives no predictions to judge or write; leave out metrics and"
    with pytest.raises(DataError, match=message):
        evaluate(Own(torch.tensor(1.0)), PAIR, Stage.TEST, **asked)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (1.5, "evaluate_batch returned a float; return a scalar tensor"),
        (torch.ones(2), r"evaluate_batch: the loss 'loss' has shape \(2,\); return a scalar"),
    ],
)
def test_what_an_evaluate_batch_of_its_own_returns_has_to_be_a_loss(returned: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        evaluate(Own(returned), PAIR, Stage.TEST, {})


def test_a_batch_without_a_tensor_is_refused_and_not_counted_as_nothing() -> None:
    with pytest.raises(
        DataError, match="a batch is a list of 1 with no tensor to count samples by; define count_samples"
    ):
        evaluate(Own(torch.tensor(1.0)), [["text"]], Stage.TEST, {})


# Predictions alone


class Scores(Brain):
    """Gives two scores, of which the greater is readable; it has no losses."""

    def __init__(self) -> None:
        super().__init__({"net": nn.Sequential(nn.Linear(3, 2), nn.Dropout())})
        self.steps: list[int] = []

    def compute_forward(self, batch: Any, stage: Stage) -> Tensor:
        assert (stage, torch.is_grad_enabled()) == (Stage.TEST, False)
        self.steps.append(self.step)
        scores: Tensor = self.modules.net(batch["x"])
        return scores


class Classes(Scores):
    def readable(self, predictions: Tensor, batch: Any) -> list[str]:
        return [f"{name}{int(index)}" for name, index in zip(batch["id"], predictions.argmax(1), strict=True)]


BATCHES = [{"x": x, "id": ["a", "b"]} for x in torch.randn(3, 2, 3, generator=torch.Generator().manual_seed(0))]


def test_predictions_are_those_of_the_module_in_evaluation_mode_batch_by_batch() -> None:
    brain = Scores()
    found = list(predict(brain, BATCHES, torch.device("cpu")))
    with torch.no_grad():
        expected = [brain.modules.net.eval()(batch["x"]) for batch in BATCHES]
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert brain.steps == [1, 2, 3]


def test_between_two_predictions_the_modules_are_as_they_were_and_there_are_gradients() -> None:
    brain = Scores()
    for _ in predict(brain, BATCHES, torch.device("cpu")):
        assert (brain.modules.net[1].training, torch.is_grad_enabled(), brain.step) == (True, True, 0)


def test_what_a_brain_makes_readable_is_what_predict_gives() -> None:
    brain = Classes()
    [first, *_] = predict(brain, BATCHES, torch.device("cpu"))
    with torch.no_grad():
        indices = brain.modules.net.eval()(BATCHES[0]["x"]).argmax(1).tolist()
    assert first == [f"a{indices[0]}", f"b{indices[1]}"]


def test_metrics_get_what_a_brain_makes_readable() -> None:
    class Doubling(ModuleBrain):
        def readable(self, predictions: Tensor, batch: Any) -> Tensor:
            return 2 * predictions

    brain = Doubling(nn.Identity(), mse)
    assert evaluate(brain, PAIR, Stage.TEST, {"mae": MAE()}) == {"loss": 0.0, "mae": 1.0}


@pytest.mark.parametrize("kind", ["train", "infer"])
def test_evaluation_without_batches_names_the_dataset(linear: Path, kind: str) -> None:
    """A dataset that is smaller than its batch size gives no batch with drop_last."""
    line = {"class_path": "{workspace}/data.py:Line", "args": {"size": 8}}
    train = {"name": "train_data", "batch_size": 4, **line}
    small = {"name": "small", "batch_size": 9, "drop_last": True, **line}
    overrides = [f"dataset={json.dumps([train, small])}", "phase.line.valid_dataset_name=small"]
    if kind == "infer":
        learn = {"name": "learn", "class": "train", "device": "cpu", "epochs": 1, "valid_interval": None}
        judge = {"name": "judge", "class": "infer", "device": "cpu"}
        overrides.append(f"runner={json.dumps([learn, judge])}")
    with pytest.raises(DataError, match=r"'small' gave no batch; .*drop_last"):
        GeneralTrainer(linear, overrides).run()


class Checking(ModuleBrain):
    """Refuses each loss."""

    def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> Tensor:
        raise DivergedError("the loss is nan")


def test_divergence_on_unlabelled_data_is_raised() -> None:
    """A ValueError for such a batch means that it has no target, and a DivergedError is one."""
    brain = Checking(nn.Linear(1, 1), mse)
    with pytest.raises(DivergedError, match="the loss is nan"):
        evaluate(brain, [torch.ones(2, 1)], Stage.TEST, {}, observe=lambda *_: None)
