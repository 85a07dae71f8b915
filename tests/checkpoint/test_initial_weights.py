"""Loading a part of what was saved."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipeline.brain.checkpointer import Checkpointer
from pipeline.checkpoint import foreign, weights
from pipeline.checkpoint.initial_weights import TrainRunner, checkpoint_of_run, first_valid, resolve
from pipeline.checkpoint.state import TrainingState
from pipeline.checkpoint.weights import LoadReport, freeze, match_names, suggest_names, summary, unmatched_pattern
from pipeline.config.schema import BestSettings
from pipeline.errors import CheckpointError, ConfigError, ExitCode, NoCheckpointError
from pipeline.optim.schedules import Constant


def net(outputs: int = 2, fill: float = 0.0) -> nn.ModuleDict:
    model = nn.ModuleDict({"encoder": nn.Linear(3, 3), "head": nn.Linear(3, outputs)})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(fill)
    return model


def entries(**models: nn.Module) -> dict[str, dict[str, nn.Module]]:
    return {phase: {"model": model} for phase, model in models.items()}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A checkpoint whose weights are all 1."""
    return Checkpointer(tmp_path / "c").save(entries(main=net(fill=1)), {"iteration": 1}, {})


def ones(model: nn.Module) -> set[str]:
    return {name for name, value in model.state_dict().items() if bool((value == 1).all())}


def load_part(path: Path, models: Any, only: Sequence[str] = ("*",)) -> LoadReport:
    return weights.load_part(foreign.read_weights(path).weights, models, str(path), only)


ENCODER = {"encoder.weight", "encoder.bias"}


@pytest.mark.parametrize(
    ("only", "wanted"),
    [
        (["encoder"], ENCODER),
        (["*.bias"], {"encoder.bias", "head.bias"}),
        (["encoder", "head.bias"], {*ENCODER, "head.bias"}),
        (["*"], {*ENCODER, "head.weight", "head.bias"}),
    ],
)
def test_modules_and_patterns_choose_what_is_loaded(path: Path, only: list[str], wanted: set[str]) -> None:
    model = net()
    report = load_part(path, entries(main=model), only)
    assert ones(model) == wanted == set(report["loaded"])


def test_what_was_not_loaded_is_reported_with_the_reason(path: Path) -> None:
    model = net(outputs=5)
    model["extra"] = nn.Linear(1, 1)
    report = load_part(path, entries(main=model))
    assert set(report["loaded"]) == ENCODER
    assert report["not saved"] == ["extra.weight", "extra.bias"]
    assert report["of another shape"] == [
        "'head.weight' has shape (2, 3), the model's has (5, 3)",
        "'head.bias' has shape (2,), the model's has (5,)",
    ]
    assert "; 2 not saved (extra.weight, extra.bias); 2 of another shape ('head.weight' has shape (2, 3)" in summary(
        report
    )


def test_what_no_model_has_is_reported(path: Path) -> None:
    report = load_part(path, entries(main=nn.ModuleDict({"encoder": nn.Linear(3, 3)})))
    assert report["in no model"] == ["head.weight", "head.bias"]


def test_a_pattern_that_names_nothing_is_an_error_and_nothing_changes(path: Path) -> None:
    model = net()
    message = "step-000000000001: 'encodr' names nothing in it or in the models; did you mean 'encoder'"
    with pytest.raises(CheckpointError, match=message):
        load_part(path, entries(main=model), ["head", "encodr"])
    assert ones(model) == set()


def test_what_cannot_be_frozen_is_an_error_and_nothing_changes() -> None:
    model = net()
    message = "x: 'encodr' names no parameter of the models; did you mean 'encoder'"
    with pytest.raises(ConfigError, match=message):
        freeze(entries(main=model), ["head", "encodr"], "x")
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_where_nothing_can_be_loaded_it_is_an_error(path: Path) -> None:
    with pytest.raises(
        CheckpointError,
        match=r"nothing that 'other' names can be loaded \(2 not saved .*other.*; name what both have",
    ):
        load_part(path, entries(main=nn.ModuleDict({"other": nn.Linear(1, 1)})), ["other"])


def test_each_pattern_has_to_give_something(path: Path) -> None:
    model = net(outputs=5)
    with pytest.raises(
        CheckpointError, match=r"nothing that 'head' names .*2 loaded \(encoder.*\); 2 of another shape"
    ):
        load_part(path, entries(main=model), ["encoder", "head"])
    assert ones(model) == set()


def test_with_several_phases_a_name_begins_with_the_phase(tmp_path: Path) -> None:
    saved = entries(left=net(fill=1), right=net(fill=1))
    path = Checkpointer(tmp_path).save(saved, {"iteration": 1}, {})
    left, right = net(), net()
    load_part(path, entries(left=left, right=right), ["left.encoder", "right.head.bias"])
    assert (ones(left), ones(right)) == (ENCODER, {"head.bias"})


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    def tied(fill: float) -> nn.Module:
        model = nn.ModuleDict({"in": nn.Embedding(4, 3), "out": nn.Linear(3, 4, bias=False)})
        model["out"].weight = model["in"].weight
        nn.init.constant_(model["in"].weight, fill)
        return model

    path = Checkpointer(tmp_path).save(entries(main=tied(1)), {"iteration": 1}, {})
    model = tied(0)
    load_part(path, entries(main=model), ["out"])
    assert model["out"].weight is model["in"].weight
    assert ones(model) == {"in.weight", "out.weight"}


# Parts that are not trained


def trained(model: nn.Module, **more: Any) -> dict[str, Any]:
    """What the network stage builds of a model, as far as it matters here."""
    return {"model": model, "optim_schedulers": {"main": Constant("SGD", {"lr": 0.1}, model, **more)}}


def test_what_is_frozen_is_asked_for_no_gradient_any_more() -> None:
    model = net()
    entry = trained(model)
    assert freeze({"main": entry}, ["encoder", "*.bias"], "x") == ["encoder.weight", "encoder.bias", "head.bias"]
    model["head"](model["encoder"](torch.ones(1, model["encoder"].in_features))).sum().backward()
    assert [name for name, each in model.named_parameters() if each.grad is not None] == ["head.weight"]
    assert [name for name, each in model.named_parameters() if each.requires_grad] == ["head.weight"]


def test_to_freeze_all_that_an_optimizer_trains_is_an_error_and_nothing_changes() -> None:
    model = net()
    entry = trained(model, updated_modules="encoder")
    with pytest.raises(ConfigError, match="x: leaves nothing for 'main' of phase 'main' to train; freeze less"):
        freeze({"main": entry}, ["encoder"], "x")
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_with_several_phases_what_is_frozen_is_named_with_the_phase() -> None:
    left, right = net(), net()
    assert freeze({"left": trained(left), "right": trained(right)}, ["left.encoder"], "x") == [
        "left.encoder.weight",
        "left.encoder.bias",
    ]
    assert all(parameter.requires_grad for parameter in right.parameters())


def test_phases_that_share_a_model_count_as_one(path: Path) -> None:
    shared = trained(net())
    models = {"main": shared, "other": {**shared}}
    load_part(path, models, ["encoder"])
    assert ones(shared["model"]) == ENCODER
    assert freeze(models, ["encoder"], "x") == ["encoder.weight", "encoder.bias"]


def test_a_tied_parameter_is_frozen_by_either_of_its_names() -> None:
    model = nn.ModuleDict({"in": nn.Embedding(4, 3), "out": nn.Linear(3, 4)})
    model["out"].weight = model["in"].weight
    freeze({"main": trained(model)}, ["out.weight"], "x")
    assert not model["in"].weight.requires_grad


def test_phases_that_share_a_module_are_saved_once_and_loaded_into_it(tmp_path: Path) -> None:
    module, other = nn.Linear(2, 1), nn.Linear(2, 1)
    path = Checkpointer(tmp_path).save({"one": {"model": module}, "same": {"model": module}}, {"iteration": 1}, {})
    assert sorted(each.name for each in path.iterdir()) == ["manifest.json", "one.safetensors", "state.json"]
    Checkpointer(tmp_path).load_weights(path, {"one": {"model": other}, "same": {"model": other}})
    assert torch.equal(other.weight, module.weight)


NAMES = ["encoder.0.weight", "encoder.0.bias", "encoder.10.weight", "encoders.weight", "head.bias"]


@pytest.mark.parametrize(
    ("patterns", "wanted"),
    [
        (["encoder"], NAMES[:3]),
        (["encoder.1"], []),
        (["encoder.10"], NAMES[2:3]),
        (["*.bias"], [NAMES[1], NAMES[4]]),
        (["head", "encoder.0"], [*NAMES[:2], NAMES[4]]),
        (["head.bias"], NAMES[4:]),
        (["HEAD"], []),
        (["*"], NAMES),
    ],
)
def test_a_module_covers_what_is_in_it_and_a_pattern_what_it_fits(patterns: list[str], wanted: list[str]) -> None:
    assert match_names(patterns, NAMES) == wanted


def test_the_first_that_covers_nothing_is_found() -> None:
    assert unmatched_pattern(["head", "haed", "body"], NAMES) == "haed"
    assert unmatched_pattern(["head"], NAMES) is None


@pytest.mark.parametrize(
    ("pattern", "remedy"),
    [
        ("haed", "; did you mean 'head'?"),
        ("encoder.1", "; did you mean 'encoder.10'?"),
        ("xyz", "; known: encoder, encoders, head"),
    ],
)
def test_what_may_be_meant_is_at_any_depth_else_all_at_the_top_are_named(pattern: str, remedy: str) -> None:
    assert suggest_names(pattern, NAMES) == remedy


LOWEST = BestSettings(metric="valid_loss", mode="min")


def model(fill: float) -> dict[str, Any]:
    linear = nn.Linear(2, 1)
    nn.init.constant_(linear.weight, fill)
    return {"main": {"model": linear}}


def with_best(kept: Any) -> TrainingState:
    """The state of an engine that has kept these."""
    best = {"value": 0.0, "iteration": 0, "kept": kept, "reported": {}}
    validation = {"validated": {}, "running": False, "best": best}
    engine = {
        "outer": [],
        "inner": None,
        "leader": None,
        "passes": {},
        "validation": validation,
        "iterations": {},
        "asked_updates": None,
        "epoch_began": {"iteration": 0, "update": 0},
        "generators": {},
    }
    return TrainingState.capture({}, {}, None, engine=engine)


def saved(folder: Path, *iterations: int, losses: tuple[float, ...] = (), best: Any = None) -> list[Path]:
    """Checkpoints whose weights are their iterations; ``best``: the pairs of number and iteration that are kept."""
    paths = []
    for iteration, loss in zip(iterations, losses or iterations, strict=True):
        training = {} if best is None else with_best(best).to_tree()
        numbers = {"main": {"valid_loss": float(loss)}}
        counters = {"iteration": iteration, "update": 0, "epoch": 0, "samples": 0}
        paths.append(Checkpointer(folder).save(model(iteration), counters, numbers, training))
    return paths


def damage(path: Path) -> None:
    file = path / "main.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def weight(found: Any) -> float:
    value: float = found.weights["main"]["weight"][0, 0].item()
    return value


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory; the checkpoints of its runner ``train`` are of iterations 5 and 10, saved in the other order."""
    saved(tmp_path / "run" / "train" / "checkpoints", 10, 5)
    (tmp_path / "run" / "infer").mkdir()
    return tmp_path / "run"


@pytest.mark.parametrize("below", ["train/checkpoints", "train", "."])
def test_a_folder_of_checkpoints_a_runner_and_a_run_name_each_checkpoint_in_step_order(run: Path, below: str) -> None:
    folder = run / "train" / "checkpoints"
    assert resolve(run / below) == [folder / "step-000000000005", folder / "step-000000000010"]


@pytest.mark.parametrize(
    "name", ["train/checkpoints/step-000000000005", "train/checkpoints/step-000000000005/main.safetensors"]
)
def test_a_checkpoint_and_a_file_name_themselves(run: Path, name: str) -> None:
    assert resolve(run / name) == [run / name]


def test_a_checkpoint_under_another_name_is_one_still(run: Path) -> None:
    path = (run / "train" / "checkpoints" / "step-000000000005").rename(run / "mine")
    assert resolve(path) == [path]
    assert weight(foreign.read_weights(path)) == 5


def test_of_one_and_another_that_was_to_take_its_place_the_first_counts_and_else_the_second(run: Path) -> None:
    folder = run / "train" / "checkpoints"
    saved(folder, 7)
    (folder / "step-000000000007").rename(folder / "step-000000000010.new")
    (folder / "step-000000000005").rename(folder / "step-000000000005.new")
    assert [path.name for path in resolve(folder)] == ["step-000000000005.new", "step-000000000010"]


def test_a_run_of_several_trained_runners_is_refused_with_their_names(run: Path) -> None:
    saved(run / "other" / "checkpoints", 3)
    message = r"run: holds checkpoints of several runners \(other, train\); name the folder of one of them"
    with pytest.raises(CheckpointError, match=message):
        resolve(run)


def test_a_folder_without_checkpoints_is_refused(run: Path) -> None:
    with pytest.raises(CheckpointError, match="infer: holds no checkpoint; name a step-… folder, a folder of them or"):
        resolve(run / "infer")


def test_a_file_of_weights_is_read_as_one_without_counters(run: Path) -> None:
    found = foreign.read_weights(run / "train" / "checkpoints" / "step-000000000005" / "main.safetensors")
    assert (found.train_state, list(found.weights)) == ({}, ["main.safetensors"])
    assert torch.equal(found.weights["main.safetensors"]["weight"], torch.full((1, 2), 5.0))


def test_a_path_to_nothing_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="gone: no such checkpoint; check the path"):
        foreign.read_weights(tmp_path / "gone")


def test_what_is_damaged_is_left_out_with_a_warning_and_stays_as_it_is(run: Path, log_lines: list[str]) -> None:
    paths = resolve(run)
    damage(paths[0])
    before = sorted(run.rglob("*"))
    assert first_valid(paths).path == paths[1]
    assert sorted(run.rglob("*")) == before
    assert [line for line in log_lines if line.startswith("WARNING") and "000005/main.safetensors" in line]


def test_where_none_is_valid_it_is_an_error_that_names_them(run: Path) -> None:
    paths = resolve(run)
    for path in paths:
        damage(path)
    message = "checkpoints: none of step-000000000005, step-000000000010 is valid; .*name another in init_model_path"
    with pytest.raises(NoCheckpointError, match=message) as caught:
        first_valid(paths)
    assert caught.value.exit_code == ExitCode.NO_CHECKPOINT


# Of a train runner of the same run


def test_the_newest_of_a_runner_is_the_newest_valid_one_and_damaged_ones_are_set_aside(
    tmp_path: Path, log_lines: list[str]
) -> None:
    folder = tmp_path / "checkpoints"
    damage(saved(folder, 1, 2, 3)[2])
    assert weight(TrainRunner("train", folder, None).newest()) == 2
    assert sorted(path.name[:21] for path in folder.iterdir()) == [
        ".bad-step-00000000000", "step-000000000001", "step-000000000002",
    ]  # fmt: skip
    assert any("000003/main.safetensors" in line and "the one before it is used" in line for line in log_lines)


def test_a_runner_all_of_whose_checkpoints_are_damaged_is_told_so(tmp_path: Path) -> None:
    for path in saved(tmp_path, 1, 2):
        damage(path)
    with pytest.raises(NoCheckpointError, match="none of its 2 checkpoints is valid"):
        TrainRunner("train", tmp_path, None).newest()


def test_the_best_of_a_runner_is_the_one_that_it_kept_though_a_later_one_has_the_same_number(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3, losses=(5, 4, 4), best=[[4.0, 2], [5.0, 1]])
    assert weight(TrainRunner("train", tmp_path, LOWEST).best()) == 2


def test_where_the_best_is_damaged_the_second_best_that_was_kept_is_used(tmp_path: Path, log_lines: list[str]) -> None:
    damage(saved(tmp_path, 1, 2, 3, best=[[4.0, 2], [5.0, 1]])[1])
    assert weight(TrainRunner("train", tmp_path, LOWEST).best()) == 1
    assert any(line.startswith("WARNING") and "000002/main.safetensors" in line for line in log_lines)


def test_where_the_only_best_is_damaged_no_other_is_taken_for_it(tmp_path: Path) -> None:
    damage(saved(tmp_path, 1, 2, 3, best=[[4.0, 2]])[1])
    with pytest.raises(NoCheckpointError, match="none of step-000000000002 is valid"):
        TrainRunner("train", tmp_path, LOWEST).best()


def test_of_a_runner_stage_that_keeps_no_best_the_numbers_of_the_checkpoints_tell_it(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3, losses=(5, 4, 6))
    assert weight(TrainRunner("train", tmp_path, LOWEST).best()) == 2


def test_where_the_number_was_never_one_there_is_no_best(tmp_path: Path) -> None:
    saved(tmp_path, 1, best=[])
    with pytest.raises(CheckpointError, match="'valid_loss' was never a number, so none is the best; name `last`"):
        TrainRunner("train", tmp_path, LOWEST).best()


def test_without_keep_best_there_is_no_best(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"runner.train: has no keep_best, .*; add it"):
        TrainRunner("train", tmp_path, None).best()


# Of another run

KEEP_BEST = "{metric: valid_loss, mode: min}"


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A run directory of two train runners: ``first`` keeps the best, 5; ``second`` keeps none."""
    saved(tmp_path / "other" / "first" / "checkpoints", 5, 10, losses=(1, 2), best=[[1.0, 5]])
    saved(tmp_path / "other" / "second" / "checkpoints", 3)
    (tmp_path / "other" / "config.yaml").write_text(
        f"runner: [{{name: first, class: train, keep_best: {KEEP_BEST}}}, {{name: test, class: infer}}, "
        "{name: second, class: train}, {name: third, class: train}]\nmode: null\n"
    )
    return tmp_path / "other"


@pytest.mark.parametrize(
    ("which", "runner", "iteration"),
    [("last", None, 3), ("last", "first", 10), ("best", "first", 5), (10, "first", 10), (3, None, 3)],
)
def test_a_run_gives_the_best_the_last_or_any_checkpoint_of_its_last_train_runner_or_of_a_named_one(
    other: Path, which: str | int, runner: str | None, iteration: int
) -> None:
    path = checkpoint_of_run(other, which, runner)
    assert path == other / (runner or "second") / "checkpoints" / f"step-{iteration:012d}"


def test_a_damaged_checkpoint_of_another_run_is_left_out_and_nothing_there_changes(other: Path) -> None:
    damage(other / "first" / "checkpoints" / "step-000000000010")
    before = sorted(other.rglob("*"))
    assert checkpoint_of_run(other, "last", "first").name == "step-000000000005"
    assert sorted(other.rglob("*")) == before
    with pytest.raises(CheckpointError, match=r"10/main.safetensors: .*use another"):
        checkpoint_of_run(other, 10, "first")


@pytest.mark.parametrize(
    ("which", "runner", "message"),
    [
        (
            "best",
            None,
            "runner.second: has no keep_best, so none of its checkpoints is the best; add it, or name `last`",
        ),
        (4, "first", "has no checkpoint of iteration 4; there are: 5, 10; name one of them, best or last"),
        ("last", "frist", r"no train runner 'frist' has saved a checkpoint; did you mean 'first'\?"),
        ("last", "third", "no train runner 'third' has saved a checkpoint"),
    ],
)
def test_a_checkpoint_that_another_run_lacks_is_refused_with_what_it_has(
    other: Path, which: str | int, runner: str | None, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        checkpoint_of_run(other, which, runner)


@pytest.mark.parametrize("text", ["runner: [", "runner: 5", "[]"])
def test_a_folder_without_a_readable_config_is_no_run_directory(tmp_path: Path, text: str) -> None:
    for _ in range(2):
        with pytest.raises(
            CheckpointError, match=r"is no run directory, or its config.yaml cannot be read (.|\n)*; name a run"
        ):
            checkpoint_of_run(tmp_path, "last")
        (tmp_path / "config.yaml").write_text(text)


# Names that another program wrote


FOREIGN = {"main": dict.fromkeys(("module.bert.weight", "module.bert.bias", "module.head.weight"), torch.ones(1))}


@pytest.mark.parametrize(
    ("prefixes", "names"),
    [
        ({"module.": "", "bert.": "net.bert."}, ["net.bert.weight", "net.bert.bias", "head.weight"]),
        ({"module.bert.": "b."}, ["b.weight", "b.bias", "module.head.weight"]),
        ({"": "own."}, ["own.module.bert.weight", "own.module.bert.bias", "own.module.head.weight"]),
        (
            {"module.head": "spare", "module.bert": "module.head"},
            ["module.head.weight", "module.head.bias", "spare.weight"],
        ),
    ],
)
def test_prefixes_are_replaced_one_after_the_other(prefixes: dict[str, str], names: list[str]) -> None:
    assert list(weights.rename(FOREIGN, prefixes, "file")["main"]) == names


@pytest.mark.parametrize(
    ("prefixes", "message"),
    [
        ({"modul.": ""}, r"file: rename: no name begins with 'modul\.', only module.bert.weight, .*; write the prefix"),
        (
            {"module.": "", "module.bert.": ""},
            r"no name begins with 'module.bert.', only bert.weight, bert.bias, head.weight",
        ),
        (
            {"module.bert.": "module.head."},
            "with 'module.bert.' -> 'module.head.' two tensors get the same name; write a longer",
        ),
    ],
)
def test_a_prefix_that_does_nothing_or_too_much_is_an_error(prefixes: dict[str, str], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        weights.rename(FOREIGN, prefixes, "file")


def test_names_that_do_not_fit_are_told_on_both_sides_though_there_are_many() -> None:
    saved = {"main": {f"other.{number}": torch.ones(1) for number in range(9)}}
    message = (
        r"has 'other.0', which the model does not; .* and 4 more; has no 'encoder.bias'; .*, or `rename` the prefixes"
    )
    with pytest.raises(CheckpointError, match=message):
        weights.load_weights(saved, entries(main=net()), "file")
