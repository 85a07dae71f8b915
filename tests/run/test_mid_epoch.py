"""What may change when a run is resumed in the middle of an epoch, and what may not."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline import Context, GeneralTrainer, hookimpl
from pipeline.config.schema import RunnerSchema
from pipeline.data.loader import make_loader
from pipeline.errors import CheckpointError, DataError
from pipeline.run.mid_epoch import MidEpoch
from pipeline.stages.runner import Runner

STEPS_OF_EPOCH = 6


class Stop:
    """A plugin that fails before a batch."""

    at = 0

    @hookimpl
    def before_batch(self, context: Context) -> None:
        if self.at and context["train_state"]["iteration"] == self.at:
            raise ValueError("stopped")


def stopped(monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], at: int) -> Path:
    """The directory of a run that failed before its batch of this number, whose newest checkpoint is of that moment."""
    monkeypatch.setattr(Stop, "at", at)
    with pytest.raises(ValueError, match="stopped"):
        GeneralTrainer(config).run()
    monkeypatch.setattr(Stop, "at", 0)
    return Path("runs/config/latest").resolve()


@pytest.fixture
def config(linear: Path) -> dict[str, Any]:
    """The linear config, its data shuffled, with a checkpoint after each batch."""
    return {
        "name": "config",
        "workspace": str(linear.parent),
        "plugins": [Stop],
        "hyper_parameters": {"optimizer": {"class": "SGD", "learning_rate": 0.1}},
        "dataset": [
            {"name": "train_data", "class_path": "{workspace}/data.py:Line", "args": {"size": 24}, "batch_size": 4, "shuffle": True}
        ],
        "runner": [{"name": "t", "class": "train", "device": "cpu", "epochs": 2, "save_interval": 1}],
        "phase": [
            {
                "name": "line",
                "model": "torch.nn.Linear",
                "model_args": {"in_features": 1, "out_features": 1},
                "loss": "torch.nn.functional.mse_loss",
                "dataset_name": "train_data",
            }
        ],
    }  # fmt: skip


CHANGES = [
    ("dataset.train_data.batch_size=3", "dataset.train_data.batch_size: 4 -> 3"),
    ("dataset.train_data.args.size=48", "dataset.train_data.samples: 24 -> 48"),
    (
        "dataset.train_data.shuffle=false",
        "dataset.train_data.shuffle: true -> false; dataset.train_data.seed: 0 -> null",
    ),
    ("dataset.train_data.drop_last=true", "dataset.train_data.drop_last: false -> true"),
    ("runner.t.seed=1", "dataset.train_data.seed: 0 -> 1"),
    ("runner.t.overfit_batches=2", "runner.t.overfit_batches: null -> 2"),
]


MIDDLE = "has changed in the middle of an epoch, and samples would come twice, and others not at all; set it back until"


@pytest.mark.slow
@pytest.mark.parametrize(("override", "told"), CHANGES)
def test_another_order_of_samples_is_refused_in_the_middle_of_an_epoch(
    override: str, told: str, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped(monkeypatch, config, at=2)
    message = f"{told}: {MIDDLE} the epoch is over, or resume from a checkpoint between two epochs"
    with pytest.raises((CheckpointError, DataError), match=message):
        GeneralTrainer(config, [override], resume="auto").run()
    # And again: the checkpoint says what it was, and not the config that was kept last.
    with pytest.raises((CheckpointError, DataError), match=message):
        GeneralTrainer(config, [override], resume="auto").run()


@pytest.mark.slow
@pytest.mark.parametrize("override", [override for override, _ in CHANGES])
def test_another_order_of_samples_is_taken_between_two_epochs(
    override: str, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = stopped(monkeypatch, config, at=STEPS_OF_EPOCH + 2)
    config["runner"][0]["save_interval"] = "1 epoch"
    whole = GeneralTrainer(config).run()["checkpointer"].store.path_of(STEPS_OF_EPOCH)
    chosen = run_dir / "t" / "checkpoints" / whole.name
    (chosen.rename(run_dir / "old"), whole.rename(chosen))
    context = GeneralTrainer(config, [override], resume=chosen).run()
    assert context["train_state"]["epoch"] == 2


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "override", ["dataset.train_data.num_workers=1", "runner.t.epochs=3", "runner.t.limit_batches=5"]
)
def test_what_changes_no_order_may_change_at_any_time(
    override: str, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped(monkeypatch, config, at=2)
    context = GeneralTrainer(config, [override], resume="auto").run()
    assert context["train_state"]["iteration"] == {"runner.t.epochs=3": 18, "runner.t.limit_batches=5": 10}.get(
        override, 12
    )


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("accum_grad", [1, 2, 4])
def test_another_length_of_an_open_window_is_refused(
    accum_grad: int, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config["runner"][0]["accum_grad"] = 3
    stopped(monkeypatch, config, at=2)
    message = (
        rf"step-\d+: phase 'line': 'main': accum_grad: 3 -> {accum_grad}: has changed, and a window .* is open; set"
    )
    with pytest.raises(CheckpointError, match=message):
        GeneralTrainer(config, [f"runner.t.accum_grad={accum_grad}"], resume="auto").run()


def test_another_length_is_taken_where_no_window_is_open(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config["runner"][0]["accum_grad"] = 3
    stopped(monkeypatch, config, at=3)
    context = GeneralTrainer(config, ["runner.t.accum_grad=1"], resume="auto").run()
    assert context["train_state"]["update"] == 1 + 9


def two_phases(config: dict[str, Any]) -> dict[str, Any]:
    second = {**config["phase"][0], "name": "second"}
    return {**config, "phase": [*config["phase"], second]}


@pytest.mark.parametrize("at", [2, STEPS_OF_EPOCH + 2])
def test_phases_in_another_order_are_refused_in_the_middle_of_an_epoch(
    at: int, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped(monkeypatch, two_phases(config), at)
    message = r"step-\d+: batches\('second'\), where the run that saved it had batches\('line'\) next; .* phases back"
    with pytest.raises(CheckpointError, match=message):
        GeneralTrainer(two_phases(config), ["runner.t.phases=[second, line]"], resume="auto").run()


def test_a_phase_that_is_gone_is_refused(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    stopped(monkeypatch, two_phases(config), at=2)
    with pytest.raises(CheckpointError, match="phases line, second, and the run has line"):
        GeneralTrainer(config, resume="auto").run()


def test_a_phase_that_is_gone_with_the_model_of_another_is_refused(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    second = {"name": "second", "dataset_name": "train_data", "model_of": "line"}
    sharing = {**config, "phase": [*config["phase"], second]}
    stopped(monkeypatch, sharing, at=STEPS_OF_EPOCH * 2)
    with pytest.raises(
        CheckpointError, match="has the phase 'second', and the run has none such; resume with the conf"
    ):
        GeneralTrainer(config, resume="auto").run()


class Growing(Runner):
    """A sample more before each epoch; a resumed run has as many as it had."""

    growth = 1

    def train_epoch(self, context: Context, epoch: int) -> None:
        samples = context["dataset"]["train_data"].dataset
        samples.x = samples.y = torch.linspace(-1, 1, 24 + self.growth * epoch)[:, None]
        super().train_epoch(context, epoch)


def test_data_may_grow_in_the_runner_stage(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    config["runner"][0]["runner_class_path"] = Growing
    whole = GeneralTrainer(config).run()["model"]["line"]["model"].state_dict()
    stopped(monkeypatch, config, at=STEPS_OF_EPOCH + 2)
    resumed = GeneralTrainer(config, resume="auto").run()["model"]["line"]["model"].state_dict()
    assert all(torch.equal(resumed[name], tensor) for name, tensor in whole.items())
    stopped(monkeypatch, config, at=STEPS_OF_EPOCH + 2)
    monkeypatch.setattr(Growing, "growth", 2)
    with pytest.raises(DataError, match=r"dataset\.train_data\.samples: 25 -> 26: has changed in the middle"):
        GeneralTrainer(config, resume="auto").run()


def drawn() -> Context:
    """A loader whose order is sampled at random."""
    torch.seed()
    return Context(dataset={"seedless": make_loader(list(range(24)), seed=None, shuffle=True)})


def test_loaders_keep_what_they_have_drawn_between_two_epochs() -> None:
    before, after = drawn(), drawn()
    settings = RunnerSchema.model_validate({"name": "t", "class": "train"})
    MidEpoch(after, settings).load_state_dict(MidEpoch(before, settings).state_dict())
    for name, loader in before["dataset"].items():
        assert torch.cat(list(loader)).tolist() == torch.cat(list(after["dataset"][name])).tolist()


def test_an_order_that_chance_decided_stays_that_of_the_epoch(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float] = []

    class See(Stop):
        @hookimpl
        def before_batch(self, context: Context, batch: Any) -> None:
            seen.extend(batch[0].flatten().tolist())
            Stop.before_batch(self, context)

    config["runner"][0] |= {"seed": None, "epochs": 1}
    stopped(monkeypatch, config | {"plugins": [See]}, at=2)
    del seen[8:]
    torch.manual_seed(7)
    random.seed(7)
    GeneralTrainer(config | {"plugins": [See]}, resume="auto").run()
    assert sorted(seen) == pytest.approx(torch.linspace(-1, 1, 24).tolist())
