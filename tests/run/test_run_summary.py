"""What a run says at its beginning: the numbers are those that it then comes to."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler

from pipeline import GeneralTrainer, hookimpl, stages
from pipeline.context import Context
from tests.training.conftest import KilledError, linear_config, table

Call = Callable[..., Result]


class Kill:
    """Ends the run before its fifth batch: in epochs of three, before the second of the second."""

    @hookimpl
    def before_batch(self, context: Context) -> None:
        if context["train_state"]["iteration"] == 4 and not context["checkpointer"].store.resumed:
            raise KilledError


def lines(log: list[str]) -> list[str]:
    """The two lines that follow on that of the run directory."""
    texts = [line.removeprefix("INFO ").strip() for line in log]
    [first] = [index for index, text in enumerate(texts) if re.match(r"\w+ on cpu", text)]
    return texts[first : first + 2]


def who_and_what(log: list[str]) -> tuple[str, str]:
    """What the line of the device says before its first phase, and from there on."""
    who, _, what = lines(log)[0].partition("; line: ")
    return who, f"line: {what}"


def to_come(log: list[str]) -> str:
    [line] = [line for line in log if " to come" in line]
    return line.removeprefix("INFO ").strip().partition("; ")[0]


def with_phases(config: dict[str, Any], *phases: dict[str, Any]) -> dict[str, Any]:
    return {**config, "phase": [{**config["phase"][0], **phase} for phase in phases]}


def test_a_run_says_where_it_is_what_it_trains_on_what_and_for_how_long(log_lines: list[str]) -> None:
    run_dir = GeneralTrainer(linear_config()).run()["run_dir"]
    assert log_lines[0] == f"INFO run directory {run_dir}\n"
    # 10 samples in batches of 4; a weight for each of 3 features, and a bias.
    assert lines(log_lines) == [
        "train on cpu; 4 parameters; line: data 10 samples in 3 batches",
        "6 iterations to come: 2 epochs of 3 batches; "
        "saved in train: a checkpoint every epoch (the newest 3 are kept), results.json",
    ]
    assert log_lines[1] == f"INFO {lines(log_lines)[0]}\n"
    assert not [line for line in log_lines if log_lines.count(line) > 1]


def test_each_further_phase_has_a_line_of_its_own(log_lines: list[str]) -> None:
    config = with_phases(linear_config(), {}, {"name": "other"}, {"name": "third"})
    GeneralTrainer(config).run()
    assert log_lines[1:4] == [
        "INFO train on cpu; 12 parameters; line: data 10 samples in 3 batches\n",
        "INFO other: data 10 samples in 3 batches\n",
        "INFO third: data 10 samples in 3 batches\n",
    ]
    assert " to come" in log_lines[4]


def test_quiet_says_nothing_of_it(pipeline: Call, linear: Path) -> None:
    assert pipeline("run", "-q", linear, "plugins=[{progress_bar: false}]").stderr == ""
    assert "parameters" in (Path("runs/workspace/latest") / "log.txt").read_text(encoding="utf-8")


def test_an_infer_runner_says_what_it_evaluates(linear: Path, log_lines: list[str]) -> None:
    text = linear.read_text(encoding="utf-8").replace(
        "phase:\n", "  - {name: judge, class: infer, device: cpu}\nphase:\n"
    )
    linear.write_text(text, encoding="utf-8")
    GeneralTrainer(linear).run()
    assert "INFO judge on cpu; 2 parameters; line: train_data 24 samples in 6 batches\n" in log_lines
    assert "INFO one pass to come; saved in judge: metrics.jsonl, results.json\n" in log_lines
    assert len([line for line in log_lines if "iterations to come" in line]) == 1


# Parameters


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.last = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.second(self.first(x)))


def test_a_parameter_that_is_used_twice_counts_once(log_lines: list[str]) -> None:
    config = with_phases(linear_config(), {"model": Tied}, {"name": "again", "model_of": "line", "model": None})
    config["phase"][1].pop("model")
    config["phase"][1].pop("loss")
    GeneralTrainer(config).run()
    assert who_and_what(log_lines)[0] == f"train on cpu; {3 * 3 + 3 + 3 + 3 + 1} parameters"
    assert to_come(log_lines) == "12 iterations to come: 2 epochs of 6 batches"


def test_parameters_that_are_not_trained_are_told_apart(log_lines: list[str]) -> None:
    config = with_phases(linear_config(freeze=["first"]), {"model": Tied})
    GeneralTrainer(config).run()
    assert who_and_what(log_lines)[0] == "train on cpu; 19 parameters, 7 of them trained"


def test_the_parameters_of_two_models_are_added(log_lines: list[str]) -> None:
    GeneralTrainer(with_phases(linear_config(), {}, {"name": "other", "model": Tied})).run()
    assert who_and_what(log_lines)[0] == f"train on cpu; {4 + 19} parameters"


def test_parameters_without_a_shape_are_unknown(log_lines: list[str]) -> None:
    GeneralTrainer(with_phases(linear_config(), {"model": lambda: nn.LazyLinear(1)})).run()
    assert who_and_what(log_lines)[0] == "train on cpu; an unknown number of parameters"


# Data


class Endless(IterableDataset[tuple[Tensor, Tensor]]):
    """Ten samples, which say nothing of their number."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(table(10))


class Unread:
    """Samples of which the third is never asked for."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        raise KilledError


def data_of(dataset: Any, **keys: Any) -> dict[str, Any]:
    config = linear_config(**keys)
    config["dataset"][0]["class_path"] = dataset
    return config


def test_of_a_stream_the_size_is_unknown_and_the_iterations_too(log_lines: list[str]) -> None:
    GeneralTrainer(data_of(Endless)).run()
    assert who_and_what(log_lines)[1] == "line: data of unknown length"
    assert to_come(log_lines) == "an unknown number of iterations to come: 2 epochs"


def test_of_a_stream_max_steps_is_what_may_come_at_most(log_lines: list[str]) -> None:
    GeneralTrainer(data_of(Endless, max_steps=4)).run()
    assert to_come(log_lines) == "at most 4 iterations to come: 2 epochs, max_steps 4"


def test_no_sample_is_read_before_the_lines(log_lines: list[str]) -> None:
    with pytest.raises(KilledError):
        GeneralTrainer(data_of(Unread)).run()
    assert who_and_what(log_lines)[1] == "line: data 10 samples in 3 batches"


@pytest.mark.parametrize("key", ["limit_batches", "overfit_batches"])
def test_a_pass_over_a_part_of_the_data_says_so(log_lines: list[str], key: str) -> None:
    iterations = GeneralTrainer(linear_config(**{key: 2})).run()["train_state"]["iteration"]
    assert who_and_what(log_lines)[1] == "line: data 10 samples in 3 batches, 2 of them used"
    assert to_come(log_lines) == f"{iterations} iterations to come: 2 epochs of 2 batches"


def test_a_dataset_s_own_limit_is_above_the_runner_s(log_lines: list[str]) -> None:
    chosen = linear_config(limit_batches=1)
    chosen["dataset"][0]["limit_batches"] = 2
    iterations = GeneralTrainer(chosen).run()["train_state"]["iteration"]
    assert who_and_what(log_lines)[1] == "line: data 10 samples in 3 batches, 2 of them used"
    assert (iterations, to_come(log_lines)) == (4, "4 iterations to come: 2 epochs of 2 batches")


def test_a_debug_run_has_its_own_limits(log_lines: list[str]) -> None:
    iterations = GeneralTrainer(linear_config(debug=True, debug_epochs=1)).run()["train_state"]["iteration"]
    assert to_come(log_lines) == f"{iterations} iterations to come: 1 epoch of 2 batches"


def test_a_loader_of_ones_own_is_asked_for_what_it_knows(log_lines: list[str]) -> None:
    class Network(stages.Network):
        def build_network(self, context: Context) -> None:
            super().build_network(context)
            sampler = WeightedRandomSampler([1.0] * 10, 5)
            context["dataset"]["data"] = DataLoader(table(10), batch_size=2, sampler=sampler)

    GeneralTrainer(linear_config(network_class_path=Network)).run()
    assert lines(log_lines) == [
        "train on cpu; 4 parameters; network is test_run_summary.Network; line: data 5 samples in 3 batches",
        "6 iterations to come: 2 epochs of 3 batches; "
        "saved in train: a checkpoint every epoch (the newest 3 are kept), results.json",
    ]


# The iterations to come


@pytest.mark.parametrize(
    ("keys", "limits"),
    [
        ({"max_steps": 4}, "2 epochs of 3 batches, max_steps 4"),
        ({"max_steps": 40}, "2 epochs of 3 batches, max_steps 40"),
        ({"epochs": None, "max_steps": 5}, "max_steps 5"),
    ],
)
def test_what_comes_first_is_what_is_to_come(log_lines: list[str], keys: dict[str, Any], limits: str) -> None:
    iterations = GeneralTrainer(linear_config(**keys)).run()["train_state"]["iteration"]
    assert to_come(log_lines) == f"{iterations} iterations to come: {limits}"


def test_with_a_limit_of_updates_it_is_at_most(log_lines: list[str]) -> None:
    GeneralTrainer(linear_config(optimizer_step_limit=2)).run()
    assert to_come(log_lines) == "at most 6 iterations to come: 2 epochs of 3 batches, optimizer_step_limit 2"


@pytest.mark.parametrize(("save_interval", "done"), [(1, 4), ("1 epoch", 3)])
def test_a_resumed_run_says_what_is_left(log_lines: list[str], save_interval: Any, done: int) -> None:
    config = {**linear_config(epochs=3, save_interval=save_interval), "name": "mine"}
    with pytest.raises(KilledError):
        GeneralTrainer({**config, "plugins": [*config["plugins"], Kill]}).run()
    log_lines.clear()
    iterations = GeneralTrainer(config, resume="auto").run()["train_state"]["iteration"]
    assert to_come(log_lines) == f"{iterations - done} iterations to come, {done} done: 3 epochs of 3 batches"
    assert any(line.startswith(f"INFO going on after iteration {done}, from ") for line in log_lines)


def test_a_resumed_run_whose_epochs_are_shorter_now_counts_those_that_are_left(log_lines: list[str]) -> None:
    config = {**linear_config(epochs=3), "name": "mine"}
    with pytest.raises(KilledError):
        GeneralTrainer({**config, "plugins": [*config["plugins"], Kill]}).run()
    log_lines.clear()
    config["dataset"][0]["batch_size"] = 5
    iterations = GeneralTrainer(config, resume="auto").run()["train_state"]["iteration"]
    assert to_come(log_lines) == f"{iterations - 3} iterations to come, 3 done: 3 epochs of 2 batches"


def test_a_batch_trained_otherwise_counts_as_one(log_lines: list[str]) -> None:
    class Runner(stages.Runner):
        def train_batch(self, context: Context, phase: Any, batch: Any) -> Any:
            return super().train_batch(context, phase, batch)

    GeneralTrainer(linear_config(runner_class_path=Runner)).run()
    assert to_come(log_lines) == "6 iterations to come: 2 epochs of 3 batches"


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({}, "an unknown number of iterations to come: 2 epochs"),
        ({"max_steps": 5}, "at most 5 iterations to come: 2 epochs, max_steps 5"),
        ({"epochs": None}, "an unknown number of iterations to come: no limit"),
    ],
)
def test_how_long_a_loop_of_ones_own_takes_is_unknown(log_lines: list[str], keys: dict[str, Any], line: str) -> None:
    class Runner(stages.Runner):
        def run(self, context: Context) -> None:
            for _ in context.batches("line"):
                pass

    GeneralTrainer(linear_config(runner_class_path=Runner, **keys)).run()
    assert to_come(log_lines) == line


def test_what_the_lines_look_at_nobody_has_read(log_lines: list[str]) -> None:
    class Runner(stages.Runner):
        def run(self, context: Context) -> None:
            pass

    context = GeneralTrainer(linear_config(runner_class_path=Runner, limit_batches=2)).run()
    assert any("runner.train.limit_batches: nobody read it" in line for line in log_lines)
    assert not [access for access in context.accesses if access.where.startswith("run_summary.py")]


# What is saved


def saved(log: list[str]) -> str:
    """What the line of the iterations says after them."""
    return next(line for line in log if " to come" in line).strip().partition("; saved in ")[2]


@pytest.mark.parametrize(
    ("keys", "kept"),
    [
        ({}, "every epoch (the newest 3 are kept)"),
        ({"keep_last": 5}, "every epoch (the newest 5 are kept)"),
        ({"keep_last": None, "save_interval": None}, "at the end (all are kept)"),
        (
            {"keep_best": {"metric": "valid_loss", "mode": "min"}, "save_interval": ["2 epoch", 4, "1 hour"]},
            "every 2 epochs and every 4 iterations and every hour (the newest 3 and the best are kept)",
        ),
    ],
)
def test_a_run_says_how_often_it_saves_and_how_many_checkpoints_are_kept(
    log_lines: list[str], keys: dict[str, Any], kept: str
) -> None:
    config = with_phases(linear_config(**keys), {"valid_dataset_name": "data"})
    GeneralTrainer(config).run()
    assert saved(log_lines) == f"train: a checkpoint {kept}, results.json"


def test_it_says_what_plugins_and_keys_save_beside_them_and_where_checkpoints_are_elsewhere(
    log_lines: list[str], tmp_path: Path
) -> None:
    config = linear_config(save_inference_interval=2, save_checkpoint_path=str(tmp_path / "far"))
    run_dir = GeneralTrainer({**config, "plugins": [{"progress_bar": False}]}).run()["run_dir"]
    far = tmp_path / "far" / run_dir.name / "train"
    own = f"train: a checkpoint every epoch (the newest 3 are kept) in {far}, weights every 2 epochs"
    assert saved(log_lines) == f"{own}, metrics.jsonl, results.json"


@pytest.mark.parametrize("path", [None, "mine.jsonl"])
def test_an_infer_runner_says_where_its_predictions_will_be(
    log_lines: list[str], path: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As it is in a shell.
    monkeypatch.setenv("PWD", str(Path.cwd()))
    predictions = {"format": "jsonl", "path": path and str(Path.cwd() / path)}
    config = linear_config()
    config["runner"].append({"name": "judge", "class": "infer", "device": "cpu", "predictions": predictions})
    GeneralTrainer(config).run()
    line = [line for line in log_lines if " to come" in line][1]
    assert line == f"INFO one pass to come; saved in judge: results.json, {path or 'line_predictions.jsonl'}\n"


def test_of_a_debug_run_nothing_is_said_to_be_saved(log_lines: list[str]) -> None:
    GeneralTrainer(linear_config(debug=True)).run()
    assert saved(log_lines) == ""
