"""Checkpoints of several ranks: who writes what, in which order, and what other numbers of ranks go on with."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import replace
from errno import ENOSPC
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from loguru import logger
from safetensors.torch import load_file
from torch import nn

from pipeline import Brain, Updater
from pipeline.brain.checkpointer import Checkpointer
from pipeline.checkpoint import layout, reader, store
from pipeline.checkpoint.random_state import random_state
from pipeline.checkpoint.state import VERSION, RandomState, TrainingState, own_parts
from pipeline.checkpoint.storage import Disk
from pipeline.distributed.world import Failure, PeerError, World, current_world
from pipeline.errors import CheckpointError, ExitCode, PipelineError
from tests.distributed.ranks import Ranks

STEP = "step-000000000003"


def models() -> dict[str, Any]:
    """The same on all ranks."""
    torch.manual_seed(0)
    return {"main": {"model": nn.Linear(2, 1)}}


class Counts:
    """A recoverable that has another number on each rank."""

    def __init__(self) -> None:
        self.number = 10 * current_world().rank

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]


def save(folder: Path, *, asynchronous: bool = True, iteration: int = 3, disk: Disk | None = None) -> list[str]:
    """Save as the loop does; the names of the checkpoints that this rank was told of."""
    own, rank = models(), current_world().rank
    seed(100 + rank)
    gradients = {"main": {"weight": torch.full([1, 2], 1.0 + rank)}}
    saver = Checkpointer(folder, asynchronous=asynchronous, **({"disk": disk} if disk else {}))
    saver.add_recoverable("counts", Counts())
    counters = {"iteration": iteration, "update": 3, "epoch": 0, "samples": 12}
    saver.save(own, counters, {}, saver.store.capture(own, gradients=gradients).to_tree())
    saver.store.wait()
    return [path.name for path in saver.store.poll()]


def seed(number: int) -> None:
    random.seed(number)
    torch.manual_seed(number)


def draws(number: int) -> list[float]:
    """What the generators draw that were seeded with a number."""
    seed(number)
    return [random.random(), torch.rand(()).item()]


def restored(folder: Path) -> tuple[list[float], int, list[float], list[float]]:
    """What a rank goes on with: what it draws, its recoverable, its gradient, and its weights."""
    seed(900)
    checkpoint = Checkpointer(folder).store.newest_valid()
    assert checkpoint
    assert checkpoint.state
    state, counts = checkpoint.state, Counts()
    counts.load_state_dict(state.recoverables["counts"])
    random.setstate(state.random.python)
    torch.set_rng_state(state.random.torch)
    drawn, weights = [random.random(), torch.rand(()).item()], checkpoint.weights["main"]["weight"]
    return drawn, counts.number, state.gradients["main"]["weight"].flatten().tolist(), weights.flatten().tolist()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


# Who writes what.


def test_each_rank_writes_its_own_and_rank_0_the_rest(two_ranks: Ranks, folder: Path) -> None:
    assert two_ranks(save, folder) == [[STEP]] * 2
    files = layout.listed_files(folder / STEP)
    assert [*files] == ["main.safetensors", "rank-00001-of-00002.safetensors", "state.json", "training.safetensors"]
    assert reader.problems_of(folder / STEP) == []


def test_three_ranks_write_two_files_of_their_own(three_ranks: Ranks, folder: Path) -> None:
    three_ranks(save, folder, asynchronous=False)
    assert layout.rank_files(layout.listed_files(folder / STEP)) == [
        "rank-00001-of-00003.safetensors",
        "rank-00002-of-00003.safetensors",
    ]


def test_an_equal_checkpoint_stays_on_all_ranks(two_ranks: Ranks, folder: Path) -> None:
    two_ranks(save, folder)
    before = (folder / STEP).stat().st_ino
    assert two_ranks(save, folder) == [[], []]
    assert (folder / STEP).stat().st_ino == before
    assert os.listdir(folder) == [STEP]


def test_one_process_writes_what_it_always_has(folder: Path) -> None:
    save(folder)
    assert [*layout.listed_files(folder / STEP)] == ["main.safetensors", "state.json", "training.safetensors"]


def keys_left(folder: Path) -> int:
    for iteration in range(5):
        save(folder, iteration=iteration)
    world = current_world()
    world.all_gather(None)
    return int(world.store.num_keys())


def test_a_save_leaves_nothing_in_the_store(two_ranks: Ranks, folder: Path) -> None:
    first = two_ranks(keys_left, folder / "first")
    assert two_ranks(keys_left, folder / "second") == first


def connections(folder: Path) -> int:
    """How many connections to the store a rank keeps for its saves after three of them."""
    for iteration in range(3):
        save(folder, iteration=iteration)
    return len(current_world()._idle_stores)


def test_one_connection_to_the_store_serves_all_saves(two_ranks: Ranks, folder: Path) -> None:
    assert two_ranks(connections, folder) == [1, 1]


def look_early(folder: Path) -> list[list[str]]:
    """What a rank is told of before it waits for a save, and after."""
    saver = Checkpointer(folder, asynchronous=True)
    saver.save(models(), {"iteration": 3}, {})
    assert saver.store._saving
    futures.wait([saver.store._saving])
    early = saver.store.poll()
    saver.store.wait()
    return [[path.name for path in found] for found in (early, saver.store.poll())]


def test_no_rank_is_told_of_a_save_before_all_wait_for_it(two_ranks: Ranks, folder: Path) -> None:
    assert two_ranks(look_early, folder) == [[[], [STEP]]] * 2


# What the ranks go on with.


def test_as_many_ranks_go_on_with_what_each_had(two_ranks: Ranks, folder: Path) -> None:
    two_ranks(save, folder)
    weights = models()["main"]["model"].weight.flatten().tolist()
    expected = [(draws(100), 0, [1.0, 1.0], weights), (draws(101), 10, [2.0, 2.0], weights)]
    assert two_ranks(restored, folder) == expected


def test_more_ranks_go_on_with_all_gradients_on_the_first(two_ranks: Ranks, three_ranks: Ranks, folder: Path) -> None:
    two_ranks(save, folder)
    first, second, third = three_ranks(restored, folder)
    assert first[:3] == (draws(100), 0, [3.0, 3.0])
    assert second[:3] == (draws(101), 10, [0.0, 0.0])
    # It was not there: its generators stay as they were, and its recoverable is as that of rank 0.
    assert third[:3] == (draws(900), 0, [0.0, 0.0])


def test_fewer_ranks_go_on_with_the_gradients_of_all(two_ranks: Ranks, three_ranks: Ranks, folder: Path) -> None:
    three_ranks(save, folder)
    assert [own[2] for own in two_ranks(restored, folder)] == [[6.0, 6.0], [0.0, 0.0]]
    assert restored(folder)[:3] == (draws(100), 0, [6.0, 6.0])


def test_several_ranks_go_on_from_one_process(two_ranks: Ranks, folder: Path) -> None:
    save(folder)
    first, second = two_ranks(restored, folder)
    assert (first[:3], second[:3]) == ((draws(100), 0, [1.0, 1.0]), (draws(900), 0, [0.0, 0.0]))


def saved_with_object(folder: Path) -> None:
    """Save a phase whose updater holds an object with another number on each rank."""
    brain = Brain({"net": models()["main"]["model"]})
    updater = Updater(brain)
    updater.counts = Counts()  # type: ignore[attr-defined]
    phases = {"main": {"model": brain, "brain": brain, "updater": updater, "optim_schedulers": {}}}
    saver = Checkpointer(folder)
    saver.store.begin(phases)
    saver.save(
        phases, {"iteration": 3, "update": 3, "epoch": 0, "samples": 12}, {}, saver.store.capture(phases).to_tree()
    )


def number_of_object(folder: Path) -> int:
    checkpoint = Checkpointer(folder).store.newest_valid()
    assert checkpoint
    assert checkpoint.state
    return int(checkpoint.state.objects["phase.main.updater.counts"]["number"])


def test_objects_of_the_user_are_saved_by_each_rank(two_ranks: Ranks, folder: Path) -> None:
    two_ranks(saved_with_object, folder)
    assert two_ranks(number_of_object, folder) == [0, 10]


def state_of(rank: int) -> dict[str, Any]:
    """A training state as a rank has it in an open window: of its own are samples, a metric, a place and a number."""
    meter = dict.fromkeys(("batches", "samples", "nonfinite", "_total", "_count", "_recent_total", "_recent_count"), 0)
    cursor = {
        "epoch": 0, "taken": 4, "stand_ins": rank, "place": {"place": rank}, "begun": None, "ahead": None, "is_own": False,
    }  # fmt: skip
    passed = {
        "step": 4, "cursor": cursor, "began": 0, "train_loss": {**meter, "first": None},
        "logged": {}, "discarded": [], "metrics": {"mae": {"samples": 10 + rank}}, "average": None, "nonfinite": 0,
    }  # fmt: skip
    entry = {
        "kind": "pass", "phase": "main", "over": False, "number": 0, "repeat": False, "first": 0, "numbers": {},
        "validated": False, "done": 4, "state": passed, "epochs": None,
    }  # fmt: skip
    engine = {
        "outer": [], "inner": [entry], "leader": 0, "passes": {"main": 1}, "iterations": {},
        "validation": {"validated": {}, "running": False, "best": None},
        "asked_updates": None, "epoch_began": {"iteration": 0, "update": 0}, "generators": {"noise": rank},
    }  # fmt: skip
    window = {"real_step": 1, "batches": 2, "samples": 8 + rank, "discards": rank == 1}
    seed(rank)
    return {
        "version": VERSION, "updaters": {}, "optim_schedulers": {"main": {"a": {"class": "A of B", "state": {"window": window}}}},
        "gradients": {"main": {"weight": torch.tensor([1.0 + rank]), **({"bias": torch.ones(1)} if rank else {})}},
        "random": random_state(), "metrics": {}, "engine": engine, "experiment": None,
        "recoverables": {"plugin:a": {"rank": rank}}, "parts": {}, "objects": {"a": rank}, "frozen": None, "modes": None,
        "stopped": None, "requested": [], "seconds": None,
    }  # fmt: skip


def gone_on(rank: int, *, size: int = 3) -> TrainingState:
    """The state of three ranks, as one rank of another number goes on with it."""
    others = [own_parts(state_of(other)) for other in range(1, size)]
    return TrainingState.from_tree(state_of(0), "a checkpoint").on_rank(rank, others, "a checkpoint", same=False)


def window_of(state: TrainingState) -> tuple[int, int, bool]:
    window = state.optim_schedulers["main"]["a"].state["window"]
    return window["samples"], window["batches"], window["discards"]


def test_the_window_of_all_ranks_is_that_of_the_first() -> None:
    # 8 + 9 + 10 samples; rank 1 has had a loss that is not finite, and all discard alike.
    assert [window_of(gone_on(rank)) for rank in range(4)] == [(27, 2, True), *[(0, 2, True)] * 3]


def test_gradients_of_other_ranks_are_zeros_of_the_same_names() -> None:
    of_first, of_second = (gone_on(rank).gradients["main"] for rank in range(2))
    assert {name: gradient.tolist() for name, gradient in of_first.items()} == {"weight": [6.0], "bias": [2.0]}
    assert {name: gradient.tolist() for name, gradient in of_second.items()} == {"weight": [0.0], "bias": [0.0]}


def test_the_first_rank_goes_on_with_the_metrics_of_all() -> None:
    engines = [gone_on(rank).engine for rank in range(2)]
    passes = [entry.state for engine in engines if engine for entry in engine.inner or []]
    metrics = [{"samples": 10}, {"samples": 11}, {"samples": 12}]
    assert [own and own.metrics for own in passes] == [{"mae": metrics}, {}]


def test_objects_and_generators_stay_with_their_rank() -> None:
    expected = [RandomState(**state_of(rank)["random"]).python for rank in range(3)]
    seed(900)
    own = [gone_on(rank) for rank in range(3)]
    assert [state.recoverables["plugin:a"]["rank"] for state in own] == [0, 1, 2]
    assert [state.objects["a"] for state in own] == [0, 1, 2]
    assert [state.random.python for state in own] == expected
    assert [state.engine and state.engine.generators for state in own] == [{"noise": rank} for rank in range(3)]
    assert gone_on(3).recoverables == {"plugin:a": {"rank": 0}}


def test_a_rank_that_is_new_is_told_of(caplog_of_loguru: list[str]) -> None:
    gone_on(3)
    assert "was saved by 3 processes; the random generators of rank 3 begin anew" in caplog_of_loguru[-1]


@pytest.fixture
def caplog_of_loguru() -> Iterator[list[str]]:
    messages: list[str] = []
    sink = logger.add(messages.append, format="{message}")
    yield messages
    logger.remove(sink)


# What reads them.


def test_a_damaged_file_of_another_rank_is_noticed(two_ranks: Ranks, folder: Path) -> None:
    two_ranks(save, folder)
    two_ranks(save, folder, iteration=4)
    file = folder / "step-000000000004" / layout.rank_file(1, 2)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert two_ranks(newest, folder) == [STEP] * 2
    assert [path.name[:9] for path in layout.bad_checkpoints(folder)] == [".bad-step"]


def newest(folder: Path) -> str:
    checkpoint = Checkpointer(folder).store.newest_valid()
    assert checkpoint
    return checkpoint.path.name


def test_where_none_is_valid_all_ranks_say_so(two_ranks: Ranks, folder: Path) -> None:
    two_ranks(save, folder)
    (folder / STEP / layout.rank_file(1, 2)).unlink()
    assert two_ranks(no_checkpoint, folder) == [ExitCode.NO_CHECKPOINT] * 2


def no_checkpoint(folder: Path) -> int:
    with pytest.raises(PipelineError, match="none of its 1 checkpoints is valid") as caught:
        Checkpointer(folder).store.newest_valid()
    return caught.value.exit_code


def test_the_commands_read_them(two_ranks: Ranks, folder: Path, pipeline: Callable[..., Result]) -> None:
    two_ranks(save, folder)
    assert "main.safetensors" in pipeline("checkpoint", "show", str(folder)).output
    assert pipeline("checkpoint", "verify", str(folder)).exit_code == 0
    assert "newest" in pipeline("checkpoint", "ls", str(folder)).output
    exported = folder.parent / "weights.safetensors"
    assert pipeline("checkpoint", "export", str(folder), "-o", str(exported)).exit_code == 0
    assert {*load_file(exported)} == {"weight", "bias"}
    one = folder.parent / "one"
    save(one)
    assert "training of rank 1" in pipeline("checkpoint", "diff", str(folder / STEP), str(one / STEP)).output
    assert pipeline("checkpoint", "diff", str(folder / STEP), str(folder / STEP)).exit_code == 0


@pytest.mark.parametrize("name", ["rank-00001-of-00002", "training"])
def test_no_phase_has_the_name_of_such_a_file(folder: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match=f"phase '{name}': .* rename the phase"):
        Checkpointer(folder).save({name: {"model": nn.Linear(2, 1)}}, {"iteration": 3}, {})


# What fails, and what is killed.


class FailingDisk(Disk):
    """Fails at one operation; ``dies``: from then on at each, as if the process was killed there."""

    def __init__(self, at: int, *, dies: bool = False) -> None:
        self.at, self.dies, self.done = at, dies, 0

    def __getattribute__(self, name: str) -> Any:
        operation = super().__getattribute__(name)
        if name in {"mkdir", "write", "fsync", "rename", "fsync_folder", "remove"}:
            self.done += 1
            if self.dies and self.done >= self.at:
                raise KilledError
            if self.done == self.at:
                raise OSError(ENOSPC, "No space left on device")
        return operation


class KilledError(BaseException):
    """In the place of SIGKILL: nothing catches it."""


def save_failing(folder: Path, rank: int, at: int, *, dies: bool) -> tuple[str, str]:
    """Save with a disk that fails on one rank: the error, and its message."""
    world = current_world()
    disk = FailingDisk(at, dies=dies)
    dead = f"dead/{folder}/{at}"
    with pytest.MonkeyPatch.context() as patch:
        notice_death(patch, dead)
        try:
            save(folder, iteration=4, disk=disk if world.rank == rank else None)
        except (PipelineError, KilledError) as error:
            if isinstance(error, KilledError):
                world.store.set(dead, "")
            return type(error).__name__, str(error)
    return "", ""


def notice_death(patch: pytest.MonkeyPatch, key: str) -> None:
    """Make the saving threads notice at once that a rank has died: then this key is in the store.

    In a run, the launcher ends the other ranks, or they time out.
    """

    class Notified(World):
        def first_failure(self) -> Failure | None:
            return Failure(self.rank, ExitCode.FAILED, "has died") if self.store.check([key]) else None

    def in_thread(self: World) -> World:
        return Notified(self.rank, self.local_rank, self.size, self.local_size, self.store.clone(), self.timeout)

    patch.setattr(store, "ANSWER", 0.0)
    patch.setattr(World, "in_thread", in_thread)


def unanswered() -> str:
    """Wait for a value that no rank puts into the store, and return the error."""
    world = replace(current_world(), timeout=0.01)
    with pytest.raises(PeerError) as caught:
        world.get("unanswered")
    return str(caught.value)


def test_a_rank_does_not_wait_forever_for_an_answer(two_ranks: Ranks) -> None:
    assert two_ranks(unanswered) == [
        f"rank {rank} failed: nobody has answered with unanswered for 0.01 seconds" for rank in range(2)
    ]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_at_any_point_of_a_save_is_that_of_all_ranks(two_ranks: Ranks, folder: Path, rank: int) -> None:
    two_ranks(save, folder)
    at, failed = 1, 0
    while True:
        first, second = two_ranks(save_failing, folder, rank, at, dies=False)
        assert first == second
        names = [path.name for path in layout.committed_checkpoints(folder)]
        assert names in ([STEP], [STEP, "step-000000000004"])
        assert not any(reader.problems_of(folder / name) for name in names)
        if "step-000000000004" in names:
            break
        at, failed = at + 1, failed + bool(first[0])
        kind, message = first
        assert kind == "StorageError"
        assert "No space left on device" in message
        assert ("rank 1: " in message) == (rank == 1)
    assert failed == at - 1 >= (2 if rank else 10)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_save_that_a_rank_dies_in_leaves_the_newest_whole(two_ranks: Ranks, folder: Path, rank: int) -> None:
    two_ranks(save, folder)
    at, found = 1, ("", "")
    while True:
        found = tuple(kind for kind, _ in two_ranks(save_failing, folder, rank, at, dies=True))
        newest = layout.committed_checkpoints(folder)[-1]
        assert reader.problems_of(newest) == []
        if found == ("", ""):
            break
        assert found[rank] == "KilledError"
        assert found[1 - rank] == "PeerError"
        assert [own[0] for own in two_ranks(restored, folder)] == [draws(100), draws(101)]
        at += 1
    assert at > (2 if rank else 12)
    assert not layout.leftovers(folder)
