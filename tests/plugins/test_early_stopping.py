"""``early_stopping``: a training ends once its validation gets no better, at the same step straight and killed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from pipeline_plugins.early_stopping import EarlyStopping
from torch import Tensor, nn

from pipeline import Context, GeneralTrainer, hookimpl
from pipeline.errors import ConfigError, DataError


class Scripted:
    """A metric that reports one number of ``script`` after the other, whatever the predictions are."""

    script: Sequence[float] = ()
    calls = 0

    def reset(self) -> None: ...

    def update(self, predictions: Tensor, target: Tensor) -> None: ...

    def compute(self) -> float:
        Scripted.calls += 1
        return self.script[Scripted.calls - 1]


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Context]:
    """Runs a training of 10 epochs of 2 batches, each of which is validated with the next number."""

    def run(script: Sequence[float], **arguments: Any) -> Context:
        monkeypatch.setattr(Scripted, "script", script)
        monkeypatch.setattr(Scripted, "calls", 0)
        chosen = config(["p"], {"metric": "valid_score", **arguments})
        return GeneralTrainer(chosen).run()

    return run


def config(phases: Sequence[str], arguments: dict[str, Any], **runner: Any) -> dict[str, Any]:
    data = torch.utils.data.TensorDataset(torch.ones(4, 1), torch.ones(4, 1))
    dataset = {"name": "data", "class_path": lambda: data, "batch_size": 2}
    phase = {"model": lambda: nn.Linear(1, 1), "loss": nn.functional.mse_loss, "dataset_name": "data"}
    phase |= {"valid_dataset_name": "data", "metrics": {"score": {"class": Scripted}}}
    return {
        "hyper_parameters": {"optimizer": {"class": "SGD", "lr": 0.01}},
        "plugins": [{"progress_bar": False}, {"early_stopping": arguments}],
        "dataset": [dataset],
        "runner": [{"name": "t", "class": "train", "device": "cpu", "epochs": 10, **runner}],
        "phase": [{"name": name, **phase} for name in phases],
    }


NAN = float("nan")
CURVES: list[tuple[list[float], dict[str, Any], int]] = [
    ([5, 4, 3, 3, 3, 3, 3, 3, 3, 3], {}, 6),
    ([5, 4, 3, 3, 3, 3, 3, 3, 3, 3], {"patience": 1}, 4),
    ([5, 6, 6, 4, 6, 6, 6, 1, 1, 1], {}, 7),
    ([1, 2, 3, 2, 2, 2, 9, 9, 9, 9], {"mode": "max"}, 6),
    ([5, 4.6, 4.2, 3.8, 3.4, 3, 3, 3, 3, 3], {"min_delta": 0.5, "patience": 2}, 7),
    ([5, 4.5, 4.5, 4, 4, 4, 4, 4, 4, 4], {"min_delta": 0.5, "patience": 2}, 3),
    ([1, 9, 9, 8, 8, 8, 8, 8, 8, 8], {"start_epoch": 2}, 7),
    ([NAN, NAN, NAN, 1, 1, 1, 1, 1, 1, 1], {}, 3),
    ([NAN, 2, NAN, 1, NAN, NAN, NAN, 0, 0, 0], {}, 7),
    ([9, 8, 7, 6, 5, 4, 3, 2, 1, 0], {"patience": 1}, 10),
]


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(("script", "arguments", "epochs"), CURVES)
def test_it_stops_after_so_many_validations_without_an_improvement(
    script: list[float], arguments: dict[str, Any], epochs: int, stopped: Callable[..., Context]
) -> None:
    context = stopped(script, **arguments)
    assert context["train_state"]["epoch"] == epochs


def test_the_reason_is_in_status_json(stopped: Callable[..., Context]) -> None:
    context = stopped([5, 3, 4, 4, 4, 4, 4, 4, 4, 4])
    status = json.loads((context["run_dir"] / "status.json").read_text(encoding="utf-8"))
    assert (status["state"], status["exit_code"], status["resumable"]) == ("done", 0, False)
    assert status["reason"] == "valid_score has not improved in 3 validations; the best was 3, of iteration 4"


class KilledError(BaseException):
    """Stands for the end of the process."""


class Kills:
    """A plugin that ends the process in these iterations, each once."""

    at: list[int] = []  # noqa: RUF012

    @hookimpl
    def before_batch(self, context: Context) -> None:
        if self.at and context["train_state"]["iteration"] == self.at[0]:
            del self.at[0]
            raise KilledError


@pytest.mark.slow
@pytest.mark.parametrize("kills", [[3], [7], [9], [2, 5, 8]])
def test_it_stops_at_the_same_step_straight_and_killed(kills: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    # With this momentum the loss swings: it falls first, and then rises.
    chosen = config(["p"], {"metric": "valid_loss", "patience": 2}, save_interval="1 iteration", max_steps=40)
    chosen["hyper_parameters"]["optimizer"] = {"class": "SGD", "lr": 0.01, "momentum": 1.0}
    chosen |= {"name": "config", "phase": [{**chosen["phase"][0], "metrics": {}}]}
    chosen["plugins"].append(Kills)

    def numbers(context: Context) -> str:
        text: str = (context["run_dir"] / "t" / "metrics.jsonl").read_text(encoding="utf-8")
        return text

    straight = GeneralTrainer({**chosen, "output_dir": "straight"}).run()
    assert 9 < straight["train_state"]["iteration"] < 20
    monkeypatch.setattr(Kills, "at", list(kills))
    for _ in kills:
        with pytest.raises(KilledError):
            GeneralTrainer(chosen, resume="auto").run()
    killed = GeneralTrainer(chosen, resume="auto").run()
    assert (killed["train_state"], numbers(killed)) == (straight["train_state"], numbers(straight))


def test_of_two_phases_it_watches_the_one_that_is_named(
    stopped: Callable[..., Context], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Scripted, "script", [3, 1, 2, 2, 1, 3, 0, 4, *[9] * 9])
    monkeypatch.setattr(Scripted, "calls", 0)
    context = GeneralTrainer(config(["a", "b"], {"metric": "b.valid_score", "patience": 2})).run()
    # b: 1, 2, 3; it stops after its third number, and epoch 2 with it.
    assert context["train_state"]["epoch"] == 3


FAULTS = [
    (
        ["a", "b"],
        {"metric": "valid_loss"},
        r"watches 'valid_loss', which phases 'a' and 'b' both report; write a\.valid_loss",
    ),
    (["a"], {"metric": "valid_los"}, r"watches 'valid_los', which no validation reports; did you mean 'valid_loss'\?"),
    (["a"], {"metric": "auc"}, r"watches 'auc', which no validation reports.*valid_loss, valid_score"),
    (
        ["a", "b"],
        {"metric": "c.valid_loss"},
        r"watches 'c\.valid_loss', which no validation reports; did you mean '[ab]\.valid_loss'",
    ),
]


@pytest.mark.parametrize(("phases", "arguments", "message"), FAULTS)
def test_a_number_that_no_phase_reports_or_several_do_is_an_error(
    phases: list[str], arguments: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Scripted, "script", range(100))
    with pytest.raises(DataError, match=message):
        GeneralTrainer(config(phases, arguments)).run()


def test_several_datasets_need_their_name_in_the_metric_before_anything_is_trained() -> None:
    chosen = config(["a"], {})
    chosen["dataset"].append({**chosen["dataset"][0], "name": "other"})
    del chosen["phase"][0]["metrics"]
    chosen["phase"][0]["valid_dataset_name"] = ["data", "other"]
    trainer = GeneralTrainer(chosen)
    with pytest.raises(ConfigError, match=r"watches 'valid_loss', and .* write metric: data/loss, for example"):
        trainer.run()
    assert trainer.contexts == {}
    chosen["plugins"] = [{"early_stopping": {"metric": "data/loss", "patience": 99}}]
    assert GeneralTrainer(chosen).run()["train_state"]["epoch"] == 10


def test_a_training_without_validation_is_an_error() -> None:
    chosen = config(["a"], {})
    del chosen["phase"][0]["valid_dataset_name"], chosen["phase"][0]["metrics"]
    with pytest.raises(
        ConfigError, match="watches 'valid_loss', and no phase of t is validated; add valid_dataset_name"
    ):
        GeneralTrainer(chosen).run()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"mode": "lowest"}, "mode is 'lowest'; write min or max"), ({"patience": 0}, "patience is 0; write 1 or more"),
     ({"min_delta": -0.1}, "min_delta is -0.1; write 0 or more"), ({"start_epoch": -1}, "start_epoch is -1; write 0")],
)  # fmt: skip
def test_an_argument_out_of_range_is_an_error(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"early_stopping: {message}"):
        EarlyStopping(**arguments)


def test_it_leaves_an_infer_runner_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scripted, "script", [1] * 100)
    chosen = config(["a"], {"metric": "valid_score", "patience": 2})
    chosen["runner"].append({"name": "i", "class": "infer", "device": "cpu"})
    trainer = GeneralTrainer(chosen)
    trainer.run()
    assert trainer.contexts["t"]["train_state"]["epoch"] == 3
    assert trainer.contexts["i"].stop_reason is None
