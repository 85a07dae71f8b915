"""SpeechBrain's functions for rank 0, on two real processes and on one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import distributed

from pipeline import (
    Checkpointer,
    create_experiment_directory,
    ddp_init_group,
    if_main_process,
    main_process_only,
    run_on_main,
)
from pipeline.distributed.world import PeerError, current_world
from pipeline.errors import ConfigError
from tests.distributed.ranks import Ranks


def write_once(folder: Path) -> str:
    """Rank 0 writes; the others read what it has written."""
    read: list[str] = []
    file = folder / "vocabulary.txt"
    arguments: dict[str, Any] = {"post_args": [file], "run_post_on_main": True}
    run_on_main(file.write_text, [f"rank {current_world().rank}"], {"encoding": "utf-8"}, lambda path: read.append(path.read_text()), **arguments)  # fmt: skip
    return read[0]


def test_what_rank_0_has_written_is_there_for_the_others(two_ranks: Ranks, tmp_path: Path) -> None:
    assert two_ranks(write_once, tmp_path) == ["rank 0", "rank 0"]


def others_only() -> list[int]:
    called: list[int] = []
    run_on_main(lambda: None, post_func=called.append, post_args=[current_world().rank])
    return called


def test_the_second_function_is_called_on_the_other_ranks_alone(two_ranks: Ranks) -> None:
    assert two_ranks(others_only) == [[], [1]]


@main_process_only
def rank_of_caller() -> int:
    run_on_main(lambda: None)
    # Within a function of rank 0 nothing waits for the others.
    assert if_main_process()
    return current_world().rank


def nested() -> tuple[int, bool]:
    return rank_of_caller(), if_main_process()


def test_all_get_what_rank_0_returns(two_ranks: Ranks) -> None:
    assert two_ranks(nested) == [(0, True), (0, False)]


def save_alone(folder: Path) -> tuple[int, bool]:
    sizes: list[int] = []

    def save() -> None:
        sizes.append(current_world().size)
        Checkpointer(folder).save({}, {"iteration": 1, "update": 1, "epoch": 0, "samples": 1}, {})

    run_on_main(save)
    return sum(sizes), distributed.is_initialized() and current_world().size == 2


def test_what_rank_0_does_alone_asks_no_other(two_ranks: Ranks, tmp_path: Path) -> None:
    assert two_ranks(save_alone, tmp_path) == [(1, True), (0, True)]
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-000000000001"]


def failing() -> str:
    try:
        run_on_main(lambda: 1 / 0)
    except (ZeroDivisionError, PeerError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_all_fail_where_rank_0_does_and_none_waits(two_ranks: Ranks) -> None:
    own, other = two_ranks(failing)
    assert own == "ZeroDivisionError: division by zero"
    assert other == "PeerError: rank 0 failed: ZeroDivisionError: division by zero"


def directory(folder: Path) -> list[str]:
    create_experiment_directory(folder / "results", save_env_desc=False)
    return sorted(path.name for path in (folder / "results").iterdir())


def test_rank_0_makes_the_experiment_directory_and_the_others_wait(two_ranks: Ranks, tmp_path: Path) -> None:
    assert two_ranks(directory, tmp_path) == [["log.txt", "test_main_process.py"]] * 2


def test_a_single_process_is_the_main_one(tmp_path: Path) -> None:
    ddp_init_group({"distributed_backend": "nccl"})
    assert write_once(tmp_path) == "rank 0"
    assert nested() == (0, True)
    assert others_only() == []
    with pytest.raises(ZeroDivisionError):
        run_on_main(lambda: 1 / 0)


def test_a_launch_that_did_not_happen_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ConfigError, match=r"no launcher has started this process; start the script with torchrun"):
        ddp_init_group({"distributed_launch": True})
