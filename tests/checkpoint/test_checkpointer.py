"""Saving and loading the weights of a run's phases."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping
from concurrent import futures
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_disks import Failing, Recorder
from checkpoint_power import models, number_of
from safetensors import safe_open
from torch import Tensor, nn

from pipeline import Brain
from pipeline.brain.checkpointer import Checkpointer
from pipeline.checkpoint import safetensors_io
from pipeline.checkpoint.checkpoint_store import CheckpointStore
from pipeline.checkpoint.reader import problems_of
from pipeline.checkpoint.run_checkpointer import RunCheckpointer
from pipeline.checkpoint.storage import Buffer, Disk
from pipeline.errors import CheckpointError, ExitCode, StorageError


def entries(**models: nn.Module) -> dict[str, dict[str, nn.Module]]:
    """Phase -> what the network stage builds, as far as it matters here."""
    return {phase: {"model": model} for phase, model in models.items()}


def equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_what_a_user_sees_of_a_checkpointer_is_documented(tmp_path: Path) -> None:
    seen = {name for name in dir(RunCheckpointer(CheckpointStore(tmp_path))) if not name.startswith("_")}
    assert seen == {"add_recoverable", "all", "best", "load_weights", "newest", "recoverables", "save", "store"}
    seen |= {name for name in dir(Checkpointer(tmp_path)) if not name.startswith("_")}
    page = (Path(__file__).parents[2] / "pipeline" / "checkpoint" / "README.md").read_text(encoding="utf-8")
    assert all(f"`{name}" in page or f".{name}(" in page for name in seen)


def test_a_checkpoint_is_a_folder_named_after_its_iteration_in_twelve_digits(saved: Path) -> None:
    assert saved.name == "step-000000000012"
    assert sorted(path.name for path in saved.iterdir()) == ["main.safetensors", "manifest.json", "state.json"]
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]


def test_its_tensors_are_those_of_the_model_bit_for_bit(saved: Path, model: nn.Module) -> None:
    with safe_open(saved / "main.safetensors", framework="pt") as file:
        read = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert equal(read, model.state_dict())
    assert read["1.num_batches_tracked"].dtype == torch.int64


def test_its_state_has_the_counters_and_the_numbers(saved: Path) -> None:
    state = json.loads((saved / "state.json").read_text())
    assert state == {
        "train_state": {"iteration": 12},
        "metrics": {"main": {"loss": 0.25}},
        "iterations": {"main": {"loss": 12}},
    }


def test_saving_the_same_step_and_content_again_keeps_what_is_there(saved: Path, model: nn.Module) -> None:
    before = (saved.stat().st_ino, (saved / "main.safetensors").stat().st_ino)
    checkpointer = Checkpointer(saved.parent)
    assert checkpointer.save(entries(main=model), {"iteration": 12}, {"main": {"loss": 0.25}}) == saved
    assert (saved.stat().st_ino, (saved / "main.safetensors").stat().st_ino) == before
    assert checkpointer.store.poll() == []


def test_saving_the_same_step_with_another_content_takes_its_place(saved: Path, model: nn.Module) -> None:
    checkpointer = Checkpointer(saved.parent)
    assert checkpointer.save(entries(main=model), {"iteration": 12, "epoch": 1}, {}) == saved
    assert json.loads((saved / "state.json").read_text())["train_state"] == {"iteration": 12, "epoch": 1}
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]
    assert checkpointer.store.poll() == [saved]


def test_a_damaged_checkpoint_makes_place_for_the_same_content(saved: Path, model: nn.Module) -> None:
    (saved / "main.safetensors").write_bytes(b"")
    Checkpointer(saved.parent).save(entries(main=model), {"iteration": 12}, {"main": {"loss": 0.25}})
    assert problems_of(saved) == []


@pytest.mark.parametrize("phase", ["training", "a/b", "../a"])
def test_a_phase_whose_name_cannot_be_a_file_of_its_own_is_refused(tmp_path: Path, phase: str) -> None:
    with pytest.raises(
        CheckpointError, match=f"phase '{phase}': {phase}.safetensors cannot be the file .*; rename the"
    ):
        Checkpointer(tmp_path).save({phase: {"model": nn.Linear(1, 1)}}, {"iteration": 1}, {})


def test_of_a_brain_all_modules_are_saved(tmp_path: Path) -> None:
    brain = Brain({"encoder": nn.Linear(2, 2), "decoder": nn.Linear(2, 1)})
    path = Checkpointer(tmp_path).save({"main": {"model": brain, "brain": brain}}, {"iteration": 1}, {})
    with safe_open(path / "main.safetensors", framework="pt") as file:
        assert set(file.keys()) == {"encoder.weight", "encoder.bias", "decoder.weight", "decoder.bias"}


@pytest.mark.parametrize("steps", [[1, 2, 10], [10, 2, 1], [999, 1000]])
def test_the_newest_checkpoint_is_that_of_the_highest_step(tmp_path: Path, steps: list[int]) -> None:
    checkpointer = Checkpointer(tmp_path / "checkpoints")
    for step in steps:
        checkpointer.save(entries(main=nn.Linear(1, 1)), {"iteration": step}, {})
    (tmp_path / "checkpoints" / ".tmp-step-000000009999-abcd").mkdir()
    (tmp_path / "checkpoints" / "step-best").mkdir()
    newest = checkpointer.newest()
    assert newest
    assert newest.name == f"step-{max(steps):012d}"


def test_where_nothing_was_saved_there_is_no_newest(tmp_path: Path) -> None:
    assert Checkpointer(tmp_path / "checkpoints").newest() is None


# Storage that refuses.


def test_a_folder_that_cannot_be_made_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    message = r"step-000000000003: cannot be written: (Not a directory|File exists); free or repair the storage"
    with pytest.raises(StorageError, match=message) as caught:
        Checkpointer(tmp_path / "checkpoints").save(entries(main=nn.Linear(1, 1)), {"iteration": 3}, {})
    assert caught.value.exit_code == ExitCode.STORAGE == 74


def test_a_write_that_fails_leaves_neither_a_checkpoint_nor_a_temporary_folder(tmp_path: Path) -> None:
    phases = entries(first=nn.Linear(1, 1), **{"x" * 250: nn.Linear(1, 1)})
    with pytest.raises(StorageError, match="cannot be written: File name too long; free or repair the storage"):
        Checkpointer(tmp_path / "checkpoints").save(phases, {"iteration": 3}, {})
    assert list((tmp_path / "checkpoints").iterdir()) == []


# Loading.


def fresh() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))


def test_loading_a_checkpoint_gives_the_weights_and_buffers_that_were_saved(saved: Path, model: nn.Module) -> None:
    other = fresh()
    Checkpointer(saved.parent).load_weights(saved, entries(main=other))
    assert equal(other.state_dict(), model.state_dict())


def test_loading_a_safetensors_file_does_too_whatever_the_phase_is_called(
    saved: Path, model: nn.Module, tmp_path: Path
) -> None:
    other, file = fresh(), tmp_path / "weights.safetensors"
    file.write_bytes((saved / "main.safetensors").read_bytes())
    Checkpointer(tmp_path).load_weights(str(file), entries(anything=other))
    assert equal(other.state_dict(), model.state_dict())


def test_each_phase_takes_the_weights_under_its_name(tmp_path: Path) -> None:
    trained = entries(left=nn.Linear(2, 1), right=nn.Linear(2, 1))
    path = Checkpointer(tmp_path).save(trained, {"iteration": 1}, {})
    loaded = entries(right=nn.Linear(2, 1), left=nn.Linear(2, 1))
    Checkpointer(tmp_path).load_weights(path, loaded)
    assert all(equal(loaded[name]["model"].state_dict(), trained[name]["model"].state_dict()) for name in trained)


def test_one_of_several_saved_phases_is_found_by_name(tmp_path: Path) -> None:
    trained = entries(left=nn.Linear(2, 1), right=nn.Linear(2, 1))
    path = Checkpointer(tmp_path).save(trained, {"iteration": 1}, {})
    right = nn.Linear(2, 1)
    Checkpointer(tmp_path).load_weights(path, entries(right=right))
    assert torch.equal(right.weight, trained["right"]["model"].weight)


def test_where_both_sides_have_one_phase_its_name_may_differ(saved: Path, model: nn.Module) -> None:
    other = fresh()
    Checkpointer(saved.parent).load_weights(saved, entries(renamed=other))
    assert equal(other.state_dict(), model.state_dict())


def test_a_phase_that_is_not_in_the_checkpoint_is_refused_with_those_that_are(tmp_path: Path) -> None:
    saved = Checkpointer(tmp_path).save(entries(left=nn.Linear(2, 1), right=nn.Linear(2, 1)), {"iteration": 1}, {})
    with pytest.raises(CheckpointError, match="has no weights for phase 'middle', but for left, right; name the phase"):
        Checkpointer(tmp_path).load_weights(saved, entries(middle=nn.Linear(2, 1)))


def test_a_phase_without_weights_loads_as_it_was_saved(tmp_path: Path) -> None:
    phases = entries(ranker=nn.Linear(2, 1), filter=nn.ReLU())
    path = Checkpointer(tmp_path).save(phases, {"iteration": 1}, {})
    Checkpointer(tmp_path).load_weights(path, phases)
    assert path.is_dir()


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1)), r"has no '2\.bias'; has no '2\.weight'"),
        (nn.Sequential(nn.Linear(3, 2)), r"has '1\.bias', which the model does not; .*'1\.weight'"),
        (
            nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)),
            r"'0\.weight' has shape \(2, 3\), the model's has \(2, 4\)",
        ),
        (nn.ModuleList(nn.Linear(1, 1) for _ in range(9)), r"and \d+ more"),
    ],
    ids=["missing", "unexpected", "shape", "many"],
)
def test_weights_that_do_not_fit_are_refused_with_what_is_missing_unexpected_or_of_another_shape(
    saved: Path, other: nn.Module, message: str
) -> None:
    before = {name: value.clone() for name, value in other.state_dict().items()}
    wanted = rf"step-000000000012: phase 'main': does not fit the model: .*{message}.*; load it into the model that"
    with pytest.raises(CheckpointError, match=wanted):
        Checkpointer(saved.parent).load_weights(saved, entries(main=other))
    assert equal(other.state_dict(), before)


def test_a_damaged_checkpoint_gives_nothing_to_the_model(saved: Path) -> None:
    content = bytearray((saved / "main.safetensors").read_bytes())
    content[-1] ^= 1
    (saved / "main.safetensors").write_bytes(content)
    other = fresh()
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"main.safetensors: is damaged: .*; use another checkpoint"):
        Checkpointer(saved.parent).load_weights(saved, entries(main=other))
    assert equal(other.state_dict(), before)


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing", None, "missing: no such checkpoint; check the path"),
        ("weights.pt", b"PK", r"weights.pt: cannot be loaded as weights \(.*\); save a state_dict"),
        (
            "weights.h5",
            b"HDF",
            r"weights.h5: is neither a checkpoint folder nor a file of weights \(.safetensors, .pt.*convert",
        ),
        ("empty.safetensors", b"", r"empty.safetensors: is no safetensors data \(.*\); use another"),
        ("text.safetensors", b"not the format", r"text.safetensors: is no safetensors data \(.*\); use another"),
        ("huge.safetensors", b"\xff" * 16, r"huge.safetensors: is no safetensors data \(.*\); use another"),
        (
            "short.safetensors",
            safetensors_io.encode_tensors({"a": torch.ones(4)})[:-1],
            r"short.safetensors: cannot be read \(.*file not fully covered\); use another",
        ),
    ],
)
def test_what_is_no_checkpoint_is_refused_with_what_to_do(
    tmp_path: Path, name: str, content: Any, message: str
) -> None:
    path = tmp_path / name
    if content is not None:
        write(path, content)
    with pytest.raises(CheckpointError, match=message):
        Checkpointer(tmp_path).load_weights(path, entries(main=nn.Linear(1, 1)))


def test_a_number_that_is_not_finite_is_null_in_the_state(tmp_path: Path) -> None:
    model = {"model": torch.nn.Linear(1, 1)}
    saved = Checkpointer(tmp_path).save({"main": model}, {"iteration": 1}, {"main": {"auc": math.nan, "loss": 1.0}})
    assert json.loads((saved / "state.json").read_text())["metrics"] == {"main": {"auc": None, "loss": 1.0}}


def checkpoints(folder: Path, *numbers: dict[str, dict[str, Any]], of: tuple[int, ...] = ()) -> Checkpointer:
    """Checkpoints 1, 2, … with these numbers: phase -> name -> number; ``of``: the iteration of each one's numbers."""
    made = Checkpointer(folder / "checkpoints")
    for iteration, each in enumerate(numbers, 1):
        iterations = {phase: dict.fromkeys(some, of[iteration - 1]) for phase, some in each.items()} if of else None
        models = {"main": {"model": nn.Linear(1, 1)}}
        made.save(models, {"iteration": iteration}, each, iterations=iterations)
    return made


@pytest.mark.parametrize(
    ("values", "mode", "step"),
    [
        ([3.0, 1.0, 2.0], "min", 2),
        ([3.0, 1.0, 2.0], "max", 1),
        ([1.0, 2.0, 1.0], "min", 3),
        ([2.0, 2.0, 1.0], "max", 2),
        ([-3.0, -1.0, -2.0], "max", 2),
        ([math.nan, 2.0, math.nan], "min", 2),
        ([None, 2, 5.0], "max", 3),
    ],
)
def test_the_best_has_the_lowest_or_highest_number_and_is_the_newest_of_equals(
    tmp_path: Path, values: list[Any], mode: str, step: int
) -> None:
    made = checkpoints(tmp_path, *({"main": {"loss": 9.0 - at, "score": value}} for at, value in enumerate(values)))
    assert made.best("score", mode) == tmp_path / "checkpoints" / f"step-{step:012d}"


def test_the_number_may_be_of_any_phase_and_be_missing_in_some_checkpoints(tmp_path: Path) -> None:
    made = checkpoints(tmp_path, {"one": {"loss": 1.0}}, {"one": {"loss": 2.0}, "two": {"auc": 0.5}}, {})
    best = made.best("auc", "max")
    assert best is not None
    assert best.name == "step-000000000002"


def test_numbers_of_an_earlier_iteration_do_not_count(tmp_path: Path) -> None:
    made = checkpoints(
        tmp_path, *({"main": {"loss": value}} for value in (3.0, 1.0, 1.0, 2.0, 0.5)), of=(1, 2, 2, 4, 4)
    )
    best = made.best("loss", "min")
    assert best is not None
    assert best.name == "step-000000000002"


def test_where_all_numbers_are_of_earlier_iterations_it_is_said_when_to_save(tmp_path: Path) -> None:
    made = checkpoints(tmp_path, {"main": {"loss": 3.0}}, of=(0,))
    message = "no checkpoint is of an iteration in which 'loss' was reported; save where it is validated, as keep_best"
    with pytest.raises(CheckpointError, match=message):
        made.best("loss", "min")


def test_without_a_checkpoint_there_is_no_best(tmp_path: Path) -> None:
    assert Checkpointer(tmp_path / "checkpoints").best("loss", "min") is None


def test_a_number_that_no_checkpoint_knows_is_told_with_the_nearest_else_all(tmp_path: Path) -> None:
    made = checkpoints(tmp_path, {"main": {"loss": 1.0, "valid_auc": 0.5}})
    with pytest.raises(
        CheckpointError, match=r"checkpoints: no checkpoint knows 'valid_acu'; did you mean 'valid_auc'\?"
    ):
        made.best("valid_acu", "max")
    with pytest.raises(CheckpointError, match="no checkpoint knows 'bleu'; known: loss, valid_auc"):
        made.best("bleu", "max")


@pytest.mark.parametrize("damage", ["no json", '{"train_state": {}}', '{"metrics": [1]}'])
def test_one_whose_numbers_cannot_be_read_is_refused(tmp_path: Path, damage: str) -> None:
    made = checkpoints(tmp_path, {"main": {"loss": 1.0}})
    (tmp_path / "checkpoints" / "step-000000000001" / "state.json").write_text(damage)
    with pytest.raises(
        CheckpointError, match=r"step-000000000001/state.json: makes no sense.*; use another checkpoint"
    ):
        made.best("loss", "min")


class Slow(Disk):
    """Writes once it is allowed to."""

    def __init__(self) -> None:
        self.allowed = threading.Event()

    def write(self, path: Path, parts: Iterable[Buffer]) -> int:
        self.allowed.wait()
        return super().write(path, parts)


def save(checkpointer: Checkpointer, step: int, number: int | None = None) -> Path:
    number = step if number is None else number
    return checkpointer.save(models(number), {"iteration": step}, {"main": {"number": number}}, {"number": number})


def test_a_save_returns_before_the_disk_has_it_and_wait_when_it_has(tmp_path: Path) -> None:
    disk = Slow()
    checkpointer = Checkpointer(tmp_path, asynchronous=True, disk=disk)
    path = save(checkpointer, 1)
    assert not path.exists()
    assert checkpointer.store.poll() == []
    disk.allowed.set()
    checkpointer.store.wait()
    assert checkpointer.store.poll() == [path]
    assert problems_of(path) == []


def test_what_is_saved_is_the_moment_of_the_save_whatever_changes_meanwhile(tmp_path: Path) -> None:
    disk, model = Slow(), nn.Linear(2, 2)
    wanted = model.weight.detach().clone()
    training = {"moments": torch.ones(3), "steps": [1, 2], "same memory": model.weight.data.T}
    checkpointer = Checkpointer(tmp_path, asynchronous=True, disk=disk)
    checkpointer.save({"main": {"model": model}}, {"iteration": 1}, {}, training)
    with torch.no_grad():
        model.weight.zero_()
    training["moments"].zero_()  # type: ignore[attr-defined]
    training["steps"].append(3)  # type: ignore[attr-defined]
    disk.allowed.set()
    found = checkpointer.store.newest_valid()
    assert found
    assert found.training
    assert torch.equal(found.weights["main"]["weight"], wanted)
    assert torch.equal(found.training["same memory"], wanted.T)
    assert (found.training["moments"].tolist(), found.training["steps"]) == ([1, 1, 1], [1, 2])


def test_save_after_save_each_has_its_own_content_though_the_memory_is_used_again(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, asynchronous=True)
    for step in range(1, 6):
        save(checkpointer, step)
    found = [number_of(Checkpointer(tmp_path)) for _ in checkpointer.all()]
    weights = [torch.zeros(2, 2) for _ in found]
    for path, weight in zip(checkpointer.all(), weights, strict=True):
        model = nn.Linear(2, 2)
        checkpointer.load_weights(path, {"main": {"model": model}})
        weight.copy_(model.weight.detach())
    assert [int(weight[0, 0]) for weight in weights] == [1, 2, 3, 4, 5]


def test_the_memory_of_a_snapshot_is_taken_once(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, asynchronous=True)
    places = set()
    for step in range(1, 4):
        save(checkpointer, step)
        places.add(tuple(memory.data_ptr() for memory in checkpointer.store._buffers.values()))
    checkpointer.store.wait()
    assert len(places) == 1


def failing() -> Failing:
    return Failing(12, lambda: OSError(28, "No space left on device"), lasting=True)


@pytest.mark.parametrize("asked", ["wait", "save", "poll", "newest"])
def test_a_failure_in_the_background_is_raised_wherever_one_asks_next(tmp_path: Path, asked: str) -> None:
    checkpointer = Checkpointer(tmp_path, asynchronous=True, disk=failing())
    save(checkpointer, 1)
    if checkpointer.store._saving:
        futures.wait([checkpointer.store._saving])
    actions = {"save": lambda: save(checkpointer, 2)}
    with pytest.raises(
        StorageError, match="step-000000000001: cannot be written: No space left on device; free or repair"
    ):
        actions.get(asked, getattr(checkpointer.store, asked))()
    assert checkpointer.store.poll() == []


ENDING = """
import sys, time
from pathlib import Path
sys.path[:0] = {folders!r}
from test_checkpointer import failing, save
from pipeline.brain.checkpointer import Checkpointer
from pipeline.checkpoint.storage import Disk

class Slow(Disk):
    def write(self, path, parts):
        time.sleep(0.2)
        return super().write(path, parts)

folder = Path({folder!r})
unasked = Checkpointer(folder / "unasked", asynchronous=True, disk=failing())
save(unasked, 1)
asked = Checkpointer(folder / "asked", asynchronous=True, disk=failing())
save(asked, 1)
try:
    asked.newest()
except Exception:
    pass
save(Checkpointer(folder / "slow", asynchronous=True, disk=Slow()), 3)
"""
"""Three saves: a failing one that is never asked for, a failing one that is asked for, and a slow one."""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder in which an interpreter has saved, and what it wrote to stderr until its end."""
    folder = tmp_path_factory.mktemp("ended")
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "faults")]
    code = ENDING.format(folders=folders, folder=str(folder))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return folder, done.stderr


@pytest.mark.slow
def test_a_failure_that_nobody_asks_for_is_logged_when_the_process_ends(ended: tuple[Path, str]) -> None:
    folder, errors = ended
    told = [line for line in errors.splitlines() if "in the background: " in line]
    assert len(told) == 1
    assert f"{folder}/unasked/" in told[0]
    assert "cannot be written: No space left on device" in told[0]


@pytest.mark.slow
def test_the_interpreter_ends_only_when_the_disk_has_what_was_saved(ended: tuple[Path, str]) -> None:
    folder, _ = ended
    assert number_of(Checkpointer(folder / "slow", disk=Recorder())) == 3
