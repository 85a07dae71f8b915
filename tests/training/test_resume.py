"""A run that is interrupted and resumed, against one that is not: equal bit for bit."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from pipeline import Context, ExperimentBase, GeneralTrainer, hookimpl
from pipeline.data.loader import make_loader
from pipeline.errors import CheckpointError, ConfigError
from pipeline.signals import StoppedError
from tests.training.conftest import with_release

STEPS = 16


class KilledError(BaseException):
    """Stands for the end of the process."""


class Kill:
    """A plugin that ends the run before a batch; it also keeps a state of its own."""

    at = 0

    def __init__(self) -> None:
        self.batches = 0

    @hookimpl
    def before_batch(self, context: Context) -> None:
        if self.at and context["train_state"]["iteration"] == self.at:
            raise KilledError
        self.batches += 1

    def state_dict(self) -> int:
        return self.batches

    def load_state_dict(self, state: int) -> None:
        self.batches = state


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Samples with noise of the global generators."""

    def __init__(self, length: int = 23) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.tensor([index, 1.0, random.random()]) + torch.randn(3) * 0.1, torch.tensor([index / 10.0])


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (Noisy()[index] for index in range(23))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Any:
        return self.layers(x)


def config(workers: int = 0, **runner: Any) -> dict[str, Any]:
    """Two epochs of 8 batches: AdamW, Noam, clipping, accumulation over 3 batches, validation every 5 iterations."""
    schedule = {"optim_type": "AdamW", "optim_conf": {"lr": 0.01}, "warmup_steps": 3, "accum_grad": 3, "grad_clip": 1.0}
    train = {"name": "train", "class_path": Noisy, "batch_size": 3, "shuffle": True, "num_workers": workers}
    settings = {
        "epochs": 2,
        "print_interval": 3,
        "save_interval": [1, "1 epoch"],
        "valid_interval": [5, "1 epoch"],
        "keep_best": {"metric": "valid_loss", "mode": "min"},
    }
    return {
        "name": "config",
        "plugins": [{"progress_bar": False}, Kill],
        "dataset": [train, {"name": "valid", "class_path": Noisy, "args": {"length": 7}, "batch_size": 4}],
        "runner": [{"name": "t", "class": "train", "device": "cpu", **settings, **runner}],
        "phase": [
            {
                "name": "p",
                "model": Net,
                "loss": nn.functional.mse_loss,
                "dataset_name": "train",
                "valid_dataset_name": "valid",
                "optim_schedulers": {"main": {"class": "noam", "args": schedule}},
            }
        ],
    }


def end(context: Context) -> dict[str, Any]:
    """Everything that could differ."""
    entry, run_dir = context["model"]["p"], context["run_dir"]
    return {
        "weights": entry["model"].state_dict(),
        "optimizer": entry["optim_schedulers"]["main"].state_dict(),
        "metrics": context["metrics"],
        "best": context["best"],
        "counters": dict(context["train_state"]),
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "lines": (run_dir / "t" / "metrics.jsonl").read_text(encoding="utf-8"),
        "plugin": context["checkpointer"].recoverables["plugin:Kill"].state_dict(),
        "checkpoints": [path.name for path in context["checkpointer"].all()],
        "numbers": [(path / "state.json").read_text() for path in context["checkpointer"].all()[-1:]],
    }


def differences(one: Any, other: Any, place: str = "") -> list[str]:
    """Where two nested states are not equal bit for bit."""
    if isinstance(one, dict):
        missing = [f"{place}.{key}" for key in one.keys() ^ other.keys()]
        return missing + [
            each for key in one.keys() & other.keys() for each in differences(one[key], other[key], f"{place}.{key}")
        ]
    if isinstance(one, list | tuple):
        pairs = enumerate(zip(one, other, strict=True))
        return [each for index, (a, b) in pairs for each in differences(a, b, f"{place}[{index}]")]
    same = torch.equal(one, other) if isinstance(one, Tensor) else one == other
    return [] if same else [f"{place}: {one!r} and {other!r}"]


def interrupted(monkeypatch: pytest.MonkeyPatch, kills: list[int], chosen: dict[str, Any]) -> Context:
    """Run, be killed before each of these batches, and go on each time; other generators at the start of each."""
    resume = "never"
    for at in kills:
        monkeypatch.setattr(Kill, "at", at)
        with pytest.raises(KilledError):
            GeneralTrainer(chosen, resume=resume).run()
        torch.manual_seed(at + 100)
        random.seed(at + 100)
        resume = "auto"
    monkeypatch.setattr(Kill, "at", 0)
    return GeneralTrainer(chosen, resume=resume).run()


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The end of a run that nothing interrupts."""
    return end(GeneralTrainer({**config(), "output_dir": str(tmp_path_factory.mktemp("unbroken"))}).run())


QUICK = {1, 5, 8, 12}
"""In a window, after a validation, at the end of an epoch, and after an update."""
SLOW = {3, 10, 15}


def mark(at: int) -> Any:
    if at in QUICK:
        return ()
    return pytest.mark.slow if at in SLOW else pytest.mark.release


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("at", [pytest.param(at, marks=mark(at)) for at in range(1, STEPS)])
def test_a_run_resumed_after_any_step_ends_like_one_that_was_never_interrupted(
    at: int, unbroken: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert differences(end(interrupted(monkeypatch, [at], config())), unbroken) == []


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_workers_change_nothing_of_it(workers: int, unbroken: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert differences(end(interrupted(monkeypatch, [4, 11], config(workers))), unbroken) == []


def test_a_run_may_be_interrupted_several_times_in_an_epoch(
    unbroken: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert differences(end(interrupted(monkeypatch, [2, 3, 7, 9], config())), unbroken) == []


def test_what_came_after_the_newest_checkpoint_is_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = config(save_interval=[4, "1 epoch"])
    expected = end(GeneralTrainer(chosen).run())
    assert "step-000000000006" not in expected["checkpoints"]
    assert differences(end(interrupted(monkeypatch, [7], chosen)), expected) == []


def test_a_run_killed_before_its_first_checkpoint_begins_again(
    unbroken: dict[str, Any], monkeypatch: pytest.MonkeyPatch, log_lines: list[str]
) -> None:
    chosen = config(save_interval="1 epoch")
    ended = end(interrupted(monkeypatch, [3], chosen))
    assert any("no checkpoint was ever saved; beginning again" in line for line in log_lines)
    assert differences(ended["weights"], unbroken["weights"]) == []
    assert ended["lines"] == unbroken["lines"]


def test_a_finished_run_has_nothing_to_do(monkeypatch: pytest.MonkeyPatch, log_lines: list[str]) -> None:
    done = GeneralTrainer(config()).run()
    before = {path: path.stat().st_mtime_ns for path in (done["run_dir"] / "t").rglob("*")}
    context = GeneralTrainer(config(), resume="auto").run()
    assert not context
    assert any("t is finished already" in line for line in log_lines)
    assert {path: path.stat().st_mtime_ns for path in (done["run_dir"] / "t").rglob("*")} == before


@pytest.mark.slow
def test_a_finished_run_goes_on_with_more_epochs_like_one_that_had_them_from_the_beginning() -> None:
    plateau = {"class": "plateau", "args": {"optim_type": "Adam", "optim_conf": {"lr": 0.1}, "patience": 0}}
    chosen = {**config(keep_best=None, valid_interval="2 epoch", epochs=3)}
    chosen["phase"][0]["optim_schedulers"] = {"main": plateau}
    done = GeneralTrainer(chosen).run()
    chosen["runner"][0]["epochs"] = 6
    whole = end(GeneralTrainer({**chosen, "output_dir": "whole"}).run())
    ours = end(GeneralTrainer(chosen, resume=done["checkpointer"].newest()).run())
    assert differences(ours, {**whole, "lines": ours["lines"]}) == []
    validated = [json.loads(line)["iteration"] for line in ours["lines"].splitlines() if '"validate"' in line]
    assert validated == [16, 24, 32, 48]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("lowered", [{"max_steps": 9}, {"epochs": 1}])
def test_a_limit_lowered_below_the_present_step_ends_the_run_there_with_its_weights_validated(
    lowered: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Kill, "at", 11)
    with pytest.raises(KilledError):
        GeneralTrainer(config()).run()
    context = GeneralTrainer(config(**lowered), resume="auto").run()
    validations = [line for line in end(context)["lines"].splitlines() if '"validate"' in line]
    assert (context["train_state"]["iteration"], json.loads(validations[-1])["iteration"]) == (11, 11)


def test_resume_auto_without_a_run_begins_one(log_lines: list[str]) -> None:
    context = GeneralTrainer(config(epochs=1), resume="auto").run()
    assert context["train_state"]["iteration"] == 8
    assert any("there is no run to go on with; beginning one" in line for line in log_lines)


def test_a_folder_that_is_no_run_directory_cannot_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is no run directory, which has a config.yaml and a lock; check the path"):
        GeneralTrainer(config(), resume=tmp_path).run()


def test_what_of_the_config_has_changed_is_logged(monkeypatch: pytest.MonkeyPatch, log_lines: list[str]) -> None:
    monkeypatch.setattr(Kill, "at", 5)
    with pytest.raises(KilledError):
        GeneralTrainer(config()).run()
    monkeypatch.setattr(Kill, "at", 0)
    context = GeneralTrainer(config(epochs=3), resume="auto").run()
    assert context["train_state"]["epoch"] == 3
    told = next(line for line in log_lines if "the config is not as it was" in line)
    assert told.splitlines()[1:] == ["  runner.t.epochs: 2 -> 3"]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"optim_type": "SGD"}, "phase 'p': 'main' was Noam of AdamW, and is now Noam of SGD; resume with the config"),
        ({"name": "other"}, r"phase 'p': has the optim_schedulers main, and the run has other; resume with the config"),
    ],
)
def test_another_optimizer_cannot_go_on(change: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Kill, "at", 5)
    with pytest.raises(KilledError):
        GeneralTrainer(config()).run()
    chosen = config()
    schedule = chosen["phase"][0]["optim_schedulers"].pop("main")
    if "optim_type" in change:
        schedule["args"] = {**schedule["args"], **change}
    chosen["phase"][0]["optim_schedulers"][change.get("name", "main")] = schedule
    with pytest.raises(CheckpointError, match=message):
        GeneralTrainer(chosen, resume="auto").run()


def test_another_model_cannot_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Kill, "at", 5)
    with pytest.raises(KilledError):
        GeneralTrainer(config()).run()
    chosen = config()
    chosen["phase"][0]["model"] = lambda: nn.Linear(3, 1)
    with pytest.raises(CheckpointError, match=r"does not fit the model: has 'layers.0.bias', which the model does not"):
        GeneralTrainer(chosen, resume="auto").run()


@pytest.mark.slow
def test_phases_that_share_a_model_and_phases_of_their_own_are_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    def two() -> dict[str, Any]:
        chosen = config(keep_best=None)
        own = {**chosen["phase"][0], "name": "own", "dataset_name": "valid"}
        shared = {"name": "shared", "model_of": "p", "dataset_name": "valid"}
        return {**chosen, "phase": [*chosen["phase"], own, shared]}

    expected = GeneralTrainer(two()).run()["model"]
    ours = interrupted(monkeypatch, [3, 9, 11, 20], two())["model"]
    for name in expected:
        assert differences(ours[name]["model"].state_dict(), expected[name]["model"].state_dict()) == []


def test_a_stream_is_read_again_up_to_its_place(monkeypatch: pytest.MonkeyPatch, log_lines: list[str]) -> None:
    def stream() -> dict[str, Any]:
        chosen = config()
        chosen["dataset"][0] = {"name": "train", "class_path": Stream, "batch_size": 3}
        return chosen

    expected = end(GeneralTrainer(stream()).run())
    assert differences(end(interrupted(monkeypatch, [5], stream())), expected) == []
    assert any("reading 5 batches of the epoch again" in line for line in log_lines)


class ByHand(ExperimentBase):
    """The same model in an experiment; a signal comes in the batch or validation of an iteration, as ``stops`` says."""

    stops: tuple[str, int] | None = None

    def setup_dataloader(self) -> None:
        self.train_loader = make_loader(Noisy(), seed=0, shuffle=True, batch_size=3)

    def setup_model(self) -> None:
        self.model = Net()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 0.01)
        self.kill = Kill()
        self.checkpointer.add_recoverable("own", self.kill)

    def train_batch(self) -> None:
        if Kill.at and self.iteration == Kill.at:
            raise KilledError
        x, y = self.read_batch()
        self.optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.model(x), y)
        torch.autograd.backward(loss)
        self.optimizer.step()
        self.visualizer.add_scalar("loss", loss, self.iteration)
        self.kill.batches += 1
        self.sometimes("batch")

    def valid(self) -> None:
        self.visualizer.add_scalar("judged", self.model.layers[0].bias.sum() + torch.rand(()), self.iteration)
        self.sometimes("valid")

    def sometimes(self, where: str) -> None:
        """A signal comes while the step, or its validation, is running; or it asks itself to end."""
        if self.stops == (where, self.iteration):
            self.ask()

    def ask(self) -> None:
        signal.raise_signal(signal.SIGTERM)


class Unread(ByHand):
    """The same, with batches of its own: no epoch ends."""

    def read_batch(self) -> Any:
        return torch.randn(3, 3), torch.randn(3, 1)


def by_hand(cls: type[ByHand] = ByHand, **runner: Any) -> dict[str, Any]:
    """15 steps, validated and told every few, saved every other; without anything in epochs."""
    intervals = {"max_steps": 15, "print_interval": 4, "valid_interval": 6, "save_interval": 2}
    named = {"name": "t", "class": "train", "device": "cpu", "runner_class_path": cls, **intervals, **runner}
    return {"name": "config", "plugins": [{"progress_bar": False}], "runner": [named]}


def reported(context: Context) -> list[Any]:
    """The weights, and all the numbers."""
    folder = context["run_dir"] / "t"
    files = [
        (folder / name).read_text()
        for name in ("metrics.jsonl", "results.json", "checkpoints/step-000000000015/state.json")
    ]
    weights = repr(context["model"]["experiment"]["model"].state_dict())
    return [weights, context["checkpointer"].recoverables["own"].batches, context["metrics"], *files]


@pytest.fixture(scope="module")
def unbroken_by_hand(tmp_path_factory: pytest.TempPathFactory) -> dict[type, Any]:
    """The ends of experiments that nothing interrupts."""
    folder = str(tmp_path_factory.mktemp("unbroken"))
    return {cls: reported(GeneralTrainer({**by_hand(cls), "output_dir": folder}).run()) for cls in (ByHand, Unread)}


@pytest.mark.parametrize(
    ("cls", "kills"),
    with_release(
        [(ByHand, [3]), (Unread, [6]), (ByHand, [8, 9, 10]), (Unread, [15])],
        [(Unread, [11]), (ByHand, [15])],
        pytest.mark.slow,
    ),
)
def test_an_experiment_that_is_resumed_reports_the_same_numbers(
    cls: type[ByHand], kills: list[int], unbroken_by_hand: dict[type, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert reported(interrupted(monkeypatch, kills, by_hand(cls))) == unbroken_by_hand[cls]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("cls", "stops"),
    [
        (ByHand, ("batch", 5)),
        pytest.param(Unread, ("batch", 8), marks=pytest.mark.slow),
        pytest.param(ByHand, ("batch", 15), marks=pytest.mark.slow),
        (Unread, ("valid", 6)),
        (ByHand, ("valid", 15)),
    ],
)
def test_an_experiment_that_a_signal_ends_reports_the_same_numbers(
    cls: type[ByHand], stops: tuple[str, int], unbroken_by_hand: dict[type, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ByHand, "stops", stops)
    with pytest.raises(StoppedError):
        GeneralTrainer(by_hand(cls)).run()
    monkeypatch.setattr(ByHand, "stops", None)
    torch.manual_seed(100)
    assert reported(GeneralTrainer(by_hand(cls), resume="auto").run()) == unbroken_by_hand[cls]


@pytest.mark.parametrize(
    "stops",
    [
        ("batch", 5),
        pytest.param(("batch", 15), marks=pytest.mark.slow),
        pytest.param(("valid", 6), marks=pytest.mark.slow),
        ("valid", 15),
    ],
)
def test_an_experiment_that_is_exit_ends_reports_the_same_numbers(
    stops: tuple[str, int], unbroken_by_hand: dict[type, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ByHand, "stops", stops)
    monkeypatch.setattr(ByHand, "ask", lambda experiment: experiment.context.update(is_exit=True))
    assert GeneralTrainer(by_hand()).run()["train_state"]["iteration"] == stops[1]
    monkeypatch.setattr(ByHand, "stops", None)
    torch.manual_seed(100)
    assert reported(GeneralTrainer(by_hand(), resume="auto").run()) == unbroken_by_hand[ByHand]


def test_an_experiment_beside_phases_is_resumed_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    class Both(ByHand):
        def train_batch(self) -> None:
            super().train_batch()
            self.context["model"]["p"]["brain"].fit_batch(self.read_batch())

    def ended(context: Context) -> str:
        entry = context["model"]["p"]
        return repr([reported(context), entry["model"].state_dict(), entry["optim_schedulers"]["main"].state_dict()])

    chosen = {**config(), "runner": by_hand(Both)["runner"]}
    expected = ended(GeneralTrainer({**chosen, "output_dir": "unbroken"}).run())
    assert ended(interrupted(monkeypatch, [5], chosen)) == expected


def test_a_limit_lowered_below_the_present_step_ends_an_experiment_validated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Kill, "at", 11)
    with pytest.raises(KilledError):
        GeneralTrainer(by_hand()).run()
    context = GeneralTrainer(by_hand(max_steps=9), resume="auto").run()
    lines = (context["run_dir"] / "t" / "metrics.jsonl").read_text().splitlines()
    validated = [json.loads(line)["iteration"] for line in lines if '"validate"' in line]
    assert (context["train_state"]["iteration"], validated) == (10, [6, 10])


def test_the_newest_and_the_best_are_kept_also_by_a_run_that_is_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = config(keep_last=2, keep_best={"metric": "valid_loss", "mode": "max"})
    context = interrupted(monkeypatch, [12], chosen)
    best = context["best"]["iteration"]
    assert best < 12
    kept = [int(path.name.removeprefix("step-")) for path in context["checkpointer"].all()]
    assert kept == [best, STEPS - 1, STEPS]
