"""The processes of a world: what they tell each other."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from pipeline.distributed.world import SINGLE, PeerError, World, current_world, joined
from pipeline.errors import ConfigError, ExitCode, PipelineError
from tests.distributed.ranks import Ranks


def ranks_and_sizes() -> tuple[int, int, int, bool]:
    world = current_world()
    return world.rank, world.local_rank, world.size, world.is_main


def test_each_process_knows_its_rank(three_ranks: Ranks) -> None:
    assert three_ranks(ranks_and_sizes) == [(0, 0, 3, True), (1, 1, 3, False), (2, 2, 3, False)]


def broadcast_rank() -> dict[str, int]:
    return current_world().broadcast({"rank": current_world().rank})


def test_all_get_the_value_of_rank_0(three_ranks: Ranks) -> None:
    assert three_ranks(broadcast_rank) == [{"rank": 0}] * 3


def gather_rank() -> list[int]:
    return current_world().all_gather(10 * current_world().rank)


def test_all_get_the_values_by_rank(three_ranks: Ranks) -> None:
    assert three_ranks(gather_rank) == [[0, 10, 20]] * 3


def download(folder: Path) -> str:
    def write() -> str:
        (folder / str(current_world().rank)).touch()
        return "the file"

    return current_world().once_per_host(write)


def test_one_process_of_a_host_calls_the_function(three_ranks: Ranks, tmp_path: Path) -> None:
    assert three_ranks(download, tmp_path) == ["the file"] * 3
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["0"]


def compare_versions(own: list[str]) -> str:
    try:
        current_world().require_equal({"torch": own[current_world().rank]}, "install the same")
    except PipelineError as error:
        return f"{type(error).__name__} {int(error.exit_code)}: {error}"
    return ""


def test_a_process_with_another_value_is_named(three_ranks: Ranks) -> None:
    messages = three_ranks(compare_versions, ["2.13", "2.13", "2.12"])
    assert all("2: rank 2 on " in message and "torch is 2.12, and 2.13 on rank 0" in message for message in messages)
    assert [message.split()[0] for message in messages] == ["PeerError", "PeerError", "ConfigError"]


def wait_for_a_failure() -> str:
    world = current_world()
    if world.rank == 1:
        world.report_failure(ValueError(), ExitCode.DIVERGED, "the loss is nan")
        world.report_failure(ValueError(), ExitCode.FAILED, "a second one")
        return ""
    try:
        world.get("something")
    except PeerError as error:
        return f"{error} ({int(error.exit_code)})"
    return "no error"


def test_whoever_waits_hears_of_the_first_failure() -> None:
    ranks = Ranks(3)
    assert ranks(wait_for_a_failure) == ["rank 1 failed: the loss is nan (5)", "", "rank 1 failed: the loss is nan (5)"]
    ranks.stop()


def test_what_was_begun_before_a_failure_may_wait_a_moment_for_its_end() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True)
    world = World(0, 0, 2, 2, store)
    world.report_failure(ValueError(), ExitCode.FAILED, "broken")
    timer = threading.Timer(0.2, world.in_thread().put, ["something", 3])
    timer.start()
    with pytest.raises(PeerError, match="broken"):
        world.get("something")
    assert world.get("something", grace=20) == 3
    with pytest.raises(PeerError, match="broken"):
        world.get("something else", grace=0.1)
    timer.join()


def test_whoever_waits_when_the_store_is_gone_says_that_and_not_that_its_time_is_over() -> None:
    server: TCPStore | None = TCPStore("127.0.0.1", 0, is_master=True)
    assert server
    world = World(1, 1, 2, 2, TCPStore("127.0.0.1", server.port, is_master=False))
    server = None
    with pytest.raises(
        PeerError, match=r"^rank 0 was killed, or its launcher: the connection to the store broke off \("
    ):
        world.get("something")


def test_a_single_process_is_a_world() -> None:
    with joined() as world:
        assert (world.broadcast(3), world.all_gather(3), world.once_per_host(lambda: 3)) == (3, [3], 3)
    assert world is SINGLE


@pytest.mark.parametrize("missing", ["RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_half_of_a_launch_says_what_is_missing(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(missing)
    with (
        pytest.raises(ConfigError, match=f"WORLD_SIZE=2: {missing} is not set; start the processes with torchrun"),
        joined(),
    ):
        pass
