"""Checkpoints outside the run directory, which a link in it leads to."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_disks import Recorder
from checkpoint_power import models
from torch import nn
from torch.utils.data import TensorDataset

from pipeline import Context, GeneralTrainer, hookimpl
from pipeline.brain.checkpointer import Checkpointer
from pipeline.checkpoint import storage, store
from pipeline.checkpoint.reader import problems_of
from pipeline.checkpoint.store import later_checkpoints, quarantine, verify
from pipeline.config.schema import RunnerSchema
from pipeline.errors import ConfigError, ExitCode, NoCheckpointError, StorageError

RUN = "20240101-000000-abcdef"


def runner(path: Path | None, **keys: Any) -> RunnerSchema:
    elsewhere = None if path is None else str(path)
    return RunnerSchema.model_validate({"name": "t", "class": "train", "save_checkpoint_path": elsewhere, **keys})


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run directory with the folder of its one runner."""
    (tmp_path / "runs" / RUN / "t").mkdir(parents=True)
    return tmp_path / "runs" / RUN


def save(folder: Path, *steps: int, keep_last: int | None = None) -> Checkpointer:
    """Save a model at each of these iterations, its weight being the iteration."""
    checkpointer = Checkpointer(folder, keep_last=keep_last)
    for step in steps:
        model = nn.Linear(1, 1)
        nn.init.constant_(model.weight, step)
        checkpointer.save({"main": {"model": model}}, {"iteration": step}, {})
    return checkpointer


def test_without_a_path_nothing_is_made(run_dir: Path) -> None:
    store.link_checkpoint_dir(run_dir, runner(None))
    assert list((run_dir / "t").iterdir()) == []


def test_a_link_leads_to_a_folder_of_the_run_and_the_runner(run_dir: Path, tmp_path: Path) -> None:
    store.link_checkpoint_dir(run_dir, runner(tmp_path / "far" / "away"))
    assert os.readlink(run_dir / "t" / "checkpoints") == str(tmp_path / "far" / "away" / RUN / "t")
    save(run_dir / "t" / "checkpoints", 3)
    assert (tmp_path / "far" / "away" / RUN / "t" / "step-000000000003" / "manifest.json").is_file()


def test_runs_and_runners_with_the_same_path_have_folders_of_their_own(run_dir: Path, tmp_path: Path) -> None:
    for run in (RUN, "other"):
        for name in ("t", "u"):
            (run_dir.parent / run / name).mkdir(parents=True, exist_ok=True)
            store.link_checkpoint_dir(run_dir.parent / run, runner(tmp_path / "far", name=name))
    found = {os.readlink(run_dir.parent / run / name / "checkpoints") for run in (RUN, "other") for name in ("t", "u")}
    assert found == {str(tmp_path / "far" / run / name) for run in (RUN, "other") for name in ("t", "u")}


@pytest.mark.parametrize(("persistently", "is_link"), [(False, False), (True, True)])
def test_a_debug_run_of_which_nothing_is_kept_leaves_nothing_there(
    run_dir: Path, tmp_path: Path, persistently: bool, is_link: bool
) -> None:
    store.link_checkpoint_dir(run_dir, runner(tmp_path / "far", debug=True, debug_persistently=persistently))
    assert (run_dir / "t" / "checkpoints").is_symlink() is (tmp_path / "far").exists() is is_link


class Recorded(storage.Disk):
    """Notes which folders were waited for."""

    def __init__(self, link: Path) -> None:
        self.link = link
        self.waited: list[tuple[Path, bool]] = []

    def fsync_folder(self, path: Path) -> None:
        self.waited.append((path, self.link.is_symlink()))
        super().fsync_folder(path)


def test_the_disk_has_the_folder_before_there_is_a_link_and_then_the_link(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Recorded(run_dir / "t" / "checkpoints")
    monkeypatch.setattr(storage, "DISK", disk)
    store.link_checkpoint_dir(run_dir, runner(tmp_path / "far"))
    far = tmp_path / "far" / RUN
    assert {(far / "t", False), (far, False), (tmp_path / "far", False), (run_dir / "t", True)} <= set(disk.waited)


def test_a_path_below_a_file_is_refused_with_its_name(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "far").write_text("a file")
    with pytest.raises(StorageError, match=r"far/.*: cannot be written: Not a directory; .*choose another"):
        store.link_checkpoint_dir(run_dir, runner(tmp_path / "far" / "below"))
    assert not (run_dir / "t" / "checkpoints").is_symlink()


def test_a_run_goes_on_where_it_began_whatever_the_path_is_now(
    run_dir: Path, tmp_path: Path, log_lines: list[str]
) -> None:
    store.link_checkpoint_dir(run_dir, runner(tmp_path / "far"))
    store.link_checkpoint_dir(run_dir, runner(tmp_path / "far"))
    assert log_lines == []
    for path in (tmp_path / "near", None):
        store.link_checkpoint_dir(run_dir, runner(path))
        assert os.readlink(run_dir / "t" / "checkpoints") == str(tmp_path / "far" / RUN / "t")
        assert f"has changed, and the run goes on where it began: in {tmp_path}/far/{RUN}/t" in log_lines.pop()
    assert not (tmp_path / "near").exists()


def test_checkpoints_in_the_run_directory_stay_there(run_dir: Path, tmp_path: Path, log_lines: list[str]) -> None:
    save(run_dir / "t" / "checkpoints", 1)
    store.link_checkpoint_dir(run_dir, runner(tmp_path / "far"))
    assert (log_lines, (tmp_path / "far").exists()) == (
        [f"WARNING save_checkpoint_path has changed, and the run goes on where it began: in {run_dir}/t/checkpoints\n"],
        False,
    )


def test_a_folder_that_is_gone_is_named_and_nothing_begins_anew(run_dir: Path, tmp_path: Path) -> None:
    store.link_checkpoint_dir(run_dir, runner(tmp_path / "far"))
    (tmp_path / "far").rename(tmp_path / "unmounted")
    there = f"checkpoints: leads to {tmp_path}/far/{RUN}/t, which is not there; mount its disk"
    with pytest.raises(StorageError, match=there):
        store.link_checkpoint_dir(run_dir, runner(tmp_path / "far"))
    assert not (tmp_path / "far").exists()


def test_the_copy_of_a_run_directory_does_not_write_into_the_folder_of_the_first(run_dir: Path, tmp_path: Path) -> None:
    store.link_checkpoint_dir(run_dir, runner(tmp_path / "far"))
    shutil.copytree(run_dir, run_dir.with_name("copy"), symlinks=True)
    with pytest.raises(StorageError, match=f"the folder of the run {RUN}; give the run directory that name again, or"):
        store.link_checkpoint_dir(run_dir.with_name("copy"), runner(tmp_path / "far"))


@pytest.fixture
def linked(run_dir: Path, tmp_path: Path) -> Path:
    """A link to an empty folder for checkpoints."""
    store.link_checkpoint_dir(run_dir, runner(tmp_path / "far"))
    return run_dir / "t" / "checkpoints"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_through_the_link_old_ones_are_removed_and_the_newest_is_found(linked: Path) -> None:
    save(linked, 1, 2, 3, keep_last=2)
    assert names(linked.resolve()) == ["step-000000000002", "step-000000000003"]
    found = Checkpointer(linked).store.newest_valid()
    assert found is not None
    assert (found.path, found.weights["main"]["weight"].item()) == (linked / "step-000000000003", 3.0)


def test_through_the_link_a_damaged_one_is_set_aside_and_the_one_before_is_used(linked: Path) -> None:
    save(linked, 1, 2)
    (linked / "step-000000000002" / "main.safetensors").write_bytes(b"")
    found = Checkpointer(linked).store.newest_valid()
    assert found is not None
    assert found.path.name == "step-000000000001"
    assert [name[:22] for name in names(linked.resolve())] == [".bad-step-000000000002", "step-000000000001"]


def test_through_the_link_what_was_left_behind_is_tidied_up(linked: Path) -> None:
    save(linked, 1)
    (linked / ".tmp-step-000000000002-0123abcd").mkdir()
    assert Checkpointer(linked).store.newest_valid() is not None
    assert names(linked.resolve()) == ["step-000000000001"]


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Path]:
    """A good checkpoint somewhere else."""
    torch.manual_seed(0)
    save(tmp_path / "other", 9)
    yield tmp_path / "other" / "step-000000000009"
    assert (tmp_path / "other" / "step-000000000009" / "main.safetensors").is_file()


@pytest.mark.parametrize("what", ["main.safetensors", "manifest.json", ""])
def test_no_link_within_is_followed(linked: Path, other: Path, what: str) -> None:
    save(linked, 9)
    inside = linked / "step-000000000009" / what
    shutil.rmtree(inside) if inside.is_dir() else inside.unlink()
    inside.symlink_to(other / what)
    with pytest.raises(NoCheckpointError, match="none of its 1 checkpoints is valid"):
        Checkpointer(linked).store.newest_valid()


class KilledError(BaseException):
    """Stands for the end of the process."""


class Kill:
    """A plugin that ends the run before a batch."""

    at = 0

    @hookimpl
    def before_batch(self, context: Context) -> None:
        if self.at and context["train_state"]["iteration"] == self.at:
            raise KilledError


def config(path: Path | None, **runner: Any) -> dict[str, Any]:
    """A linear model, 3 iterations an epoch for 3 epochs."""
    keys = {"class": "train", "device": "cpu", "epochs": 3, "save_interval": 2, "keep_last": None, **runner}
    data = TensorDataset(torch.arange(12.0).view(12, 1), torch.zeros(12, 1))
    phase = {"name": "main", "model": lambda: nn.Linear(1, 1), "loss": nn.functional.mse_loss, "dataset_name": "data"}
    return {
        "name": "config",
        "plugins": [{"progress_bar": False}, Kill],
        "hyper_parameters": {"optimizer": {"class": "SGD", "lr": 0.001}},
        "dataset": [{"name": "data", "class_path": lambda: data, "batch_size": 4}],
        "runner": [{"name": "t", "save_checkpoint_path": None if path is None else str(path), **keys}],
        "phase": [phase],
    }


STEPS = [f"step-{step:012d}" for step in (2, 4, 6, 8, 9)]


def killed(path: Path | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run, and be killed before the sixth batch."""
    monkeypatch.setattr(Kill, "at", 5)
    with pytest.raises(KilledError):
        GeneralTrainer(config(path)).run()
    monkeypatch.setattr(Kill, "at", 0)


def test_a_run_saves_there_and_later_runners_find_it(tmp_path: Path) -> None:
    chosen = config(tmp_path / "far")
    chosen["runner"].append({"name": "i", "class": "infer", "device": "cpu"})
    trainer = GeneralTrainer(chosen)
    run_dir = trainer.run()["run_dir"]
    assert names(tmp_path / "far" / run_dir.name / "t") == STEPS
    weights = [trainer.contexts[name]["model"]["main"]["model"].weight for name in ("t", "i")]
    assert torch.equal(*weights)


@pytest.mark.parametrize("now", ["near", *(pytest.param(now, marks=pytest.mark.slow) for now in ("far", None))])
def test_a_run_that_was_killed_goes_on_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, now: str | None) -> None:
    killed(tmp_path / "far", monkeypatch)
    run_dir = GeneralTrainer(config(now and tmp_path / now), resume="auto").run()["run_dir"]
    assert names(tmp_path / "far" / run_dir.name / "t") == STEPS
    assert not (tmp_path / "near").exists()


def test_a_run_is_not_resumed_from_scratch_where_the_disk_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed(tmp_path / "far", monkeypatch)
    (tmp_path / "far").rename(tmp_path / "unmounted")
    with pytest.raises(StorageError, match="which is not there; mount its disk") as caught:
        GeneralTrainer(config(tmp_path / "far"), resume="auto").run()
    assert caught.value.exit_code == ExitCode.STORAGE
    (tmp_path / "unmounted").rename(tmp_path / "far")
    run_dir = GeneralTrainer(config(tmp_path / "far"), resume="auto").run()["run_dir"]
    assert names(tmp_path / "far" / run_dir.name / "t") == STEPS


def test_a_finished_run_needs_its_disk_no_more(tmp_path: Path) -> None:
    GeneralTrainer(config(tmp_path / "far")).run()
    (tmp_path / "far").rename(tmp_path / "unmounted")
    assert GeneralTrainer(config(tmp_path / "far"), resume="auto").run() == {}


def test_a_path_that_cannot_be_is_told_before_any_stage_of_any_runner(tmp_path: Path) -> None:
    chosen = config(None)
    chosen["runner"].append({**chosen["runner"][0], "name": "late", "save_checkpoint_path": str(tmp_path / "file")})
    trainer = GeneralTrainer(chosen)
    (tmp_path / "file").write_text("a file, which was not there when the config was checked")
    with pytest.raises(StorageError, match=r"cannot be written: .*choose another save_checkpoint_path"):
        trainer.run()
    assert list(Path("runs/config/latest/t").iterdir()) == []


def copied(run_dir: Path) -> Path:
    """A copy of a run directory that has its name, elsewhere."""
    return shutil.copytree(run_dir, run_dir.parents[2] / "copied" / run_dir.name, symlinks=True)


def test_a_copy_of_a_run_does_not_write_among_the_checkpoints_of_the_original(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed(tmp_path / "far", monkeypatch)
    original = Path("runs/config/latest").resolve()
    copy = copied(original)
    for _ in range(2):
        with pytest.raises(StorageError, match=rf"and {copy} is a copy of that; go on with {original}, or put a copy"):
            GeneralTrainer(config(tmp_path / "far"), resume=copy).run()
    assert GeneralTrainer(config(tmp_path / "far"), resume=original).run()["run_dir"] == original


def test_a_copy_of_a_run_goes_on_with_a_copy_of_its_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed(tmp_path / "far", monkeypatch)
    copy = copied(Path("runs/config/latest").resolve())
    there = (copy / "t/checkpoints").resolve()
    (copy / "t/checkpoints").unlink()
    shutil.copytree(there, copy / "t/checkpoints")
    before = names(there)
    GeneralTrainer(config(tmp_path / "far"), resume=copy).run()
    assert (names(copy / "t/checkpoints"), names(there)) == (STEPS, before)


def test_a_run_that_was_moved_goes_on_where_its_checkpoints_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed(tmp_path / "far", monkeypatch)
    original = Path("runs/config/latest").resolve()
    moved = copied(original)
    shutil.rmtree(original)
    GeneralTrainer(config(tmp_path / "far"), resume=moved).run()
    assert names(tmp_path / "far" / moved.name / "t") == STEPS


def save_numbered(checkpointer: Checkpointer, *steps: int) -> None:
    for step in steps:
        checkpointer.save(models(step), {"iteration": step}, {"main": {"number": step}}, {"number": step})


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in folder.glob("step-*"))


@pytest.mark.parametrize(
    ("keep_last", "kept"), [(None, [1, 2, 3, 4, 5]), (2, [4, 5]), (3, [3, 4, 5]), (9, [1, 2, 3, 4, 5])]
)
def test_the_newest_are_kept(tmp_path: Path, keep_last: int | None, kept: list[int]) -> None:
    save_numbered(Checkpointer(tmp_path / "c", keep_last=keep_last), 1, 2, 3, 4, 5)
    assert steps(tmp_path / "c") == kept
    assert len(list((tmp_path / "c").iterdir())) == len(kept)


@pytest.mark.parametrize("keep_last", [1, 0, -1])
def test_fewer_than_two_are_refused(tmp_path: Path, keep_last: int) -> None:
    with pytest.raises(ConfigError, match=f"keep_last is {keep_last}; use 2 at least, since one may be damaged"):
        Checkpointer(tmp_path, keep_last=keep_last)


def test_a_protected_one_stays_until_others_are_protected(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path / "c", keep_last=2)
    save_numbered(checkpointer, 1, 2)
    checkpointer.store.protect([tmp_path / "c" / "step-000000000001"])
    save_numbered(checkpointer, 3, 4)
    assert steps(tmp_path / "c") == [1, 3, 4]
    checkpointer.store.protect([tmp_path / "c" / "step-000000000003"])
    save_numbered(checkpointer, 5, 6)
    assert steps(tmp_path / "c") == [3, 5, 6]


def test_nothing_is_removed_before_a_new_one_is_committed(tmp_path: Path) -> None:
    save_numbered(Checkpointer(tmp_path / "c"), 1, 2, 3)
    checkpointer = Checkpointer(tmp_path / "c", keep_last=2)
    assert checkpointer.store.newest_valid() is not None
    assert steps(tmp_path / "c") == [1, 2, 3]
    save_numbered(checkpointer, 4)
    assert steps(tmp_path / "c") == [3, 4]


def test_a_damaged_one_is_not_counted_and_not_removed(tmp_path: Path) -> None:
    save_numbered(Checkpointer(tmp_path / "c"), 1, 2, 3)
    (tmp_path / "c" / "step-000000000003" / "main.safetensors").write_bytes(b"")
    content = bytearray((tmp_path / "c" / "step-000000000002" / "state.json").read_bytes())
    content[-3] ^= 1
    (tmp_path / "c" / "step-000000000002" / "state.json").write_bytes(content)
    save_numbered(Checkpointer(tmp_path / "c", keep_last=2), 4)
    assert steps(tmp_path / "c") == [1, 2, 3, 4]


def test_the_one_just_saved_stays_where_older_ones_have_higher_steps(tmp_path: Path) -> None:
    save_numbered(Checkpointer(tmp_path / "c"), 10, 20, 30)
    save_numbered(Checkpointer(tmp_path / "c", keep_last=2), 11)
    assert steps(tmp_path / "c") == [11, 20, 30]


def test_what_a_link_leads_to_stays(tmp_path: Path) -> None:
    save_numbered(Checkpointer(tmp_path / "elsewhere"), 1)
    save_numbered(Checkpointer(tmp_path / "c"), 2, 3)
    (tmp_path / "c" / "step-000000000001").symlink_to(tmp_path / "elsewhere" / "step-000000000001")
    save_numbered(Checkpointer(tmp_path / "c", keep_last=2), 4, 5)
    assert (tmp_path / "elsewhere" / "step-000000000001" / "main.safetensors").is_file()


def test_one_is_renamed_before_any_of_it_is_removed_and_only_after_the_new_one_is_on_disk(tmp_path: Path) -> None:
    disk = Recorder()
    save_numbered(Checkpointer(tmp_path / "c", keep_last=2, disk=disk), 1, 2, 3)
    end = [(each.name, each.path.name.partition("-")[0]) for each in disk.operations[-5:]]
    assert end == [
        ("rename", ".tmp"),
        ("fsync_folder", "c"),
        ("rename", "step"),
        ("fsync_folder", "c"),
        ("remove", ".del"),
    ]


def test_one_that_cannot_be_removed_is_told_and_the_save_counts(tmp_path: Path, log_lines: list[str]) -> None:
    class Refusing(Recorder):
        def remove(self, path: Path) -> None:
            raise PermissionError(13, "Permission denied")

    checkpointer = Checkpointer(tmp_path / "c", keep_last=2, disk=Refusing())
    save_numbered(checkpointer, 1, 2, 3)
    assert [path.name[-1] for path in checkpointer.store.poll()] == ["1", "2", "3"]
    assert any("step-000000000001: cannot be removed (Permission denied); what is left" in line for line in log_lines)


@pytest.fixture
def saved() -> list[Path]:
    """Three checkpoints."""
    checkpointer, models = Checkpointer(Path("checkpoints")), {"p": {"model": nn.Linear(1, 1)}}
    return [checkpointer.save(models, {"iteration": step}, {}) for step in (2, 4, 6)]


def test_those_after_it_are_told_by_step(saved: list[Path]) -> None:
    saved[1].with_name(saved[1].name + ".new").mkdir()
    assert [path.name for path in later_checkpoints(saved[0])] == [
        "step-000000000004",
        "step-000000000004.new",
        "step-000000000006",
    ]


def test_what_is_set_aside_is_read_by_nobody_and_comes_back_by_its_name(saved: list[Path]) -> None:
    aside = quarantine(saved[2])
    checkpointer = Checkpointer(Path("checkpoints"), keep_last=2)
    found = checkpointer.store.newest_valid()
    assert found is not None
    assert found.path == saved[1]
    checkpointer.save({"p": {"model": nn.Linear(1, 1)}}, {"iteration": 7}, {})
    assert aside.name.startswith(".later-step-000000000006-")
    aside.rename(saved[2])
    assert problems_of(saved[2]) == []


def test_a_damaged_one_is_named(saved: list[Path]) -> None:
    (saved[1] / "p.safetensors").write_bytes(b"cut")
    with pytest.raises(NoCheckpointError, match=r"step-000000000004/p.safetensors: has 3 bytes, not the") as caught:
        verify(saved[1])
    assert caught.value.exit_code == ExitCode.NO_CHECKPOINT == 78


def test_one_that_cannot_be_renamed_is_a_storage_error(saved: list[Path]) -> None:
    with pytest.raises(StorageError, match=r"step-000000000009: cannot be written: No such file"):
        quarantine(saved[0].with_name("step-000000000009"))
