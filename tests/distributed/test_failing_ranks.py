"""What fails on one process ends all of them, with its code, and is told as its."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline import GeneralTrainer
from pipeline.distributed import world as world_module
from pipeline.distributed.world import PeerError, current_world, describe, exit_code, joined
from pipeline.errors import DataError, PipelineError
from pipeline.run import directory, session
from pipeline.run.directory import RunDirectory
from pipeline.testing import Workspace
from tests.distributed.ranks import Ranks

# Seconds within which all ranks end, on a busy machine too. Without word of a failure they would wait for ten minutes.
SOON = 60

# What ``WHAT`` names happens on rank 1, in its eighth step or where it says.
FILES = {
    "acts.py": """
        import os, signal, time
        from pathlib import Path
        from pipeline import RunnerBase, hookimpl, stages
        from pipeline.errors import DivergedError
        from .data import Line

        def act(where):
            if os.environ.get("WHAT") == where and os.environ["RANK"] == "1":
                Path(os.environ["WHEN"]).touch()
                if where == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                if where == "hangs":
                    time.sleep(1000)
                raise DivergedError("not finite") if where == "diverges" else RuntimeError("broken on purpose")

        class Acting(Line):
            def __getitem__(self, index):
                act("data")
                return super().__getitem__(index)

        class Runner(stages.Runner):
            def train_batch(self, context, phase, batch):
                if context["train_state"]["iteration"] == 7:
                    for where in ("killed", "hangs", "diverges", "abort"):
                        act(where)
                return super().train_batch(context, phase, batch)

        class Terminal(stages.Terminal):
            def terminal(self, context):
                act("terminal")
                super().terminal(context)

            def abort(self, context, error):
                if os.environ.get("WHAT") == "abort" and os.environ["RANK"] == "0":
                    time.sleep(1000)

        class Metric:
            def reset(self):
                pass
            def update(self, predictions, target):
                act("metric")
            def merge(self, states):
                pass
            def compute(self):
                return 0.0
            def state_dict(self):
                return {}
            def load_state_dict(self, state):
                pass

        class Plugin:
            every_rank = True
            @hookimpl
            def after_epoch(self, context):
                act("plugin")

        class Status(stages.Startup):
            def startup(self, context):
                super().startup(context)
                who = os.environ.get("WRITES", "")
                if os.environ["RANK"] in who.split():
                    context["status"] = "terminal_pass"
                if who == "exit" and os.environ["RANK"] == "1":
                    context["is_exit"] = True

    """,
}


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path / "workspace", FILES)


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    """Two processes of their own: a failure leaves them out of step."""
    ranks = Ranks(2)
    yield ranks
    ranks.stop()


def attempt(world_may_fail: bool) -> str:
    world = current_world()

    def fail() -> int:
        if world_may_fail and world.rank > 0:
            raise DataError(f"there is no file on {world.rank}")
        return world.rank

    try:
        return f"{world.attempt(fail)}"
    except PipelineError as error:
        return f"{type(error).__name__}: {error}"


def test_what_one_process_cannot_do_ends_all(three_ranks: Ranks) -> None:
    first, other = "DataError: there is no file on 1", "PeerError: rank 1 failed: there is no file on 1"
    assert three_ranks(attempt, True) == [other, first, other]
    assert three_ranks(attempt, False) == ["0", "1", "2"]


def download() -> str:
    try:
        current_world().once_per_host(lambda: {}["nothing"])
    except (KeyError, PeerError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_download_that_fails_fails_on_all(two_ranks: Ranks) -> None:
    assert two_ranks(download) == ["KeyError: 'nothing'", "PeerError: rank 0 failed: KeyError: 'nothing'"]


def wait_for_rank_1() -> str:
    with pytest.MonkeyPatch.context() as patch, joined(1) as world:
        patch.setattr(world_module, "ANSWER", 0.5)
        world.put(f"seen/{world.rank}", 7)
        if world.rank == 1:
            while not world.store.check(["failure"]):
                time.sleep(0.05)
            return ""
        try:
            world.all_gather(None)
        except PeerError as error:
            return str(error)
    return "no error"


@pytest.mark.slow
def test_whoever_hangs_is_named_with_where_it_was_seen_last() -> None:
    ranks = Ranks(3)
    told, _, also = ranks(wait_for_rank_1)
    assert told == also
    assert re.fullmatch(r"rank 1 hangs: .* within 1 seconds, last seen at iteration 7; see its log", told)
    ranks.stop()


def run(config: Path, overrides: list[str], resume: str = "never") -> str:
    try:
        context = GeneralTrainer(config, [*overrides, "plugins=[{progress_bar: false}]"], resume=resume).run()
    except PipelineError as error:
        return f"{type(error).__name__} {int(error.exit_code)}: {error}"
    return f"{context['status']} {context['is_exit']}"


def run_dir_of(workspace: Workspace) -> Path:
    return (workspace.config.parent / "runs" / "workspace" / "latest").resolve()


def status_of(workspace: Workspace) -> Any:
    return json.loads((run_dir_of(workspace) / "status.json").read_text())


def overrides(workspace: Workspace, *more: str) -> list[str]:
    return [f"output_dir={workspace.config.parent / 'runs'}", *more]


def test_rank_0_writes_the_run_directory_and_each_other_its_log(two_ranks: Ranks, workspace: Workspace) -> None:
    assert two_ranks(run, workspace.config, overrides(workspace)) == ["terminal_pass False"] * 2
    run_dir = run_dir_of(workspace)
    assert [str(path.relative_to(run_dir)) for path in (run_dir / "ranks").rglob("*.*")] == ["ranks/00001/log.txt"]
    processes = json.loads((run_dir / "environment.json").read_text())["ranks"]
    assert len({process["pid"] for process in processes}) == 2
    assert [process["devices"] for process in processes] == [{"train_runner": "cpu"}] * 2
    assert (status_of(workspace)["ranks"], status_of(workspace).get("failed_rank")) == (2, None)


def run_and_write(config: Path, overrides: list[str], who: str) -> str:
    os.environ["WRITES"], os.environ["RANK"] = who, str(current_world().rank)
    return run(config, [*overrides, "runner.train_runner.startup_class_path={workspace}/acts.py:Status"])


def test_the_status_that_rank_0_alone_writes_is_that_of_all(two_ranks: Ranks, workspace: Workspace) -> None:
    assert two_ranks(run_and_write, workspace.config, overrides(workspace), "0") == ["terminal_pass False"] * 2
    assert status_of(workspace)["iteration"] == 0


def test_is_exit_on_one_rank_ends_all(two_ranks: Ranks, workspace: Workspace) -> None:
    assert two_ranks(run_and_write, workspace.config, overrides(workspace), "exit") == ["startup_pass True"] * 2
    assert re.search(r"is_exit'\] was set in startup \(acts.py:\d+\)", status_of(workspace)["reason"])


def test_a_rank_that_writes_another_status_is_named(ranks: Ranks, workspace: Workspace) -> None:
    first, second = ranks(run_and_write, workspace.config, overrides(workspace), "1")
    what = re.escape("context['status'] of startup (acts.Status, ")
    for end, error in ((first, "PeerError"), (second, "ConfigError")):
        told = rf"{error} \d: .*rank 1 on \S+: {what}.*\) is terminal_pass, and None on rank 0 on .*; write the same on all"
        assert re.match(told, end), end
    assert status_of(workspace)["failed_rank"] == 1


def run_locked(config: Path, overrides: list[str], path: Path) -> str:
    return run(config, overrides, resume=str(path))


def test_a_second_run_in_the_directory_ends_all_with_73(two_ranks: Ranks, workspace: Workspace) -> None:
    assert two_ranks(run, workspace.config, overrides(workspace)) == ["terminal_pass False"] * 2
    with RunDirectory(run_dir_of(workspace)).locked():
        told = two_ranks(run_locked, workspace.config, overrides(workspace), run_dir_of(workspace))
    assert [message.split(":")[0] for message in told] == ["LockedError 73", "PeerError 73"]
    assert all("is in use by host" in message for message in told)


def run_with_own_config(config: Path, overrides: list[str]) -> str:
    return run(config, [*overrides, f"hyper_parameters.optimizer.learning_rate=0.{current_world().rank + 1}"])


def test_a_rank_with_another_config_is_named(two_ranks: Ranks, workspace: Workspace) -> None:
    first, second = two_ranks(run_with_own_config, workspace.config, overrides(workspace))
    assert re.match(r"PeerError 2: rank 1 on \S+: 'hyper_parameters' of the config is \w+, and \w+ on rank 0", first)
    assert second.startswith("ConfigError 2: rank 1 on ")


def run_elsewhere(config: Path, overrides: list[str]) -> str:
    with pytest.MonkeyPatch.context() as patch:
        if current_world().rank:
            patch.setattr(directory, "PATIENCE", 0.3)
            patch.setattr(RunDirectory, "holder", lambda _: "")
        return run(config, overrides)


def test_a_rank_that_does_not_see_the_directory_is_named(two_ranks: Ranks, workspace: Workspace) -> None:
    first, second = two_ranks(run_elsewhere, workspace.config, overrides(workspace))
    assert "PeerError 2: rank 1 on " in first
    assert re.search(r"is not the folder that rank 0 has there \(host .*\); set output_dir to a folder", second)


def run_on_own_data(config: Path, overrides: list[str], key: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        if current_world().rank and key == "data":
            patch.setattr(session, "dataset_digest", lambda _: "of another file")
        if current_world().rank and key == "shape":
            patch.setattr(session.weights, "is_entry", lambda _: False)
        return run(config, overrides)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("key", "what"),
    [("data", "the digest of dataset train_data is of another file"), ("shape", "parameter bias of line is None")],
)
def test_a_rank_that_builds_something_else_is_named(ranks: Ranks, workspace: Workspace, key: str, what: str) -> None:
    first, second = ranks(run_on_own_data, workspace.config, overrides(workspace), key)
    assert re.match(rf"PeerError 2: rank 1 on \S+: {what}, and .* on rank 0", first)
    assert second.startswith("ConfigError 2: rank 1 on ")
    assert status_of(workspace)["failed_rank"] == 1


# Where -> exit code, and what rank 0 says of it.
FAILURES = {
    "data": (1, r"failed in __getitem__|RuntimeError: broken on purpose"),
    "metric": (1, r"RuntimeError: broken on purpose"),
    "plugin": (1, r"plugin 'acts', hook after_epoch \(acts.py:\d+\).*RuntimeError: broken on purpose"),
    "diverges": (5, r"failed in train_batch \(acts.py:\d+\): DivergedError: not finite"),
    "terminal": (1, r"terminal \(acts.Terminal, .*failed in terminal \(acts.py:\d+\): RuntimeError: broken"),
    "abort": (1, r"failed in train_batch \(acts.py:\d+\): RuntimeError: broken on purpose"),
    "killed": (137, "was killed, or has left without a word: .* last seen at iteration [67]"),
    "hangs": (1, "hangs: it has not come to .* within 4 seconds, last seen at iteration [67]"),
}


def failing(workspace: Workspace, where: str) -> list[str]:
    """The overrides of a run in which rank 1 fails."""
    return overrides(
        workspace,
        "plugins=[{progress_bar: false}, '{workspace}/acts.py:Plugin']",
        "dataset.train_data.class_path={workspace}/acts.py:Acting",
        "phase.line.metrics={own: {class: '{workspace}/acts.py:Metric'}}",
        "runner.train_runner.runner_class_path={workspace}/acts.py",
        "runner.train_runner.terminal_class_path={workspace}/acts.py",
        "runner.train_runner.epochs=4",
        f"runner.train_runner.collective_timeout={4 if where == 'hangs' else 60}",
    )


def run_failing(config: Path, overrides: list[str], where: str, when: Path) -> str:
    """How a run ends on this rank."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WHAT", where)
        patch.setenv("WHEN", str(when))
        if where in {"hangs", "abort"}:
            # The rank that does not end by itself is ended after so many seconds.
            patch.setattr(world_module, "GRACE", 1.0)
        try:
            GeneralTrainer(config, overrides).run()
        except Exception as error:
            return f"{exit_code(error):d} {describe(error)}"
    return "no error"


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "where",
    [pytest.param(where, marks=[] if where in {"diverges", "killed"} else pytest.mark.slow) for where in FAILURES],
)
def test_failure_on_one_rank_ends_all_ranks(workspace: Workspace, tmp_path: Path, where: str) -> None:
    """No launcher ends the others."""
    code, what = FAILURES[where]
    when = tmp_path / "when"
    if where in {"killed", "hangs", "abort"}:
        # One of them is ended while its answer is awaited.
        with pytest.raises(EOFError):
            Ranks(2).run_to_end(run_failing, workspace.config, failing(workspace, where), where, when)
    else:
        first, second = Ranks(2).run_to_end(run_failing, workspace.config, failing(workspace, where), where, when)
        assert re.search(rf"^{code} rank 1 .*{what}", first, re.DOTALL)
        assert re.search(rf"^{code} .*(broken on purpose|not finite)", second, re.DOTALL)
    assert time.time() - when.stat().st_mtime < SOON
    status = status_of(workspace)
    assert (status["failed_rank"], status["exit_code"]) == (1, 1 if where == "killed" else code)
    assert re.search(f"^rank 1 .*{what}", status["reason"])


@pytest.mark.parametrize(
    "where",
    [pytest.param(where, marks=pytest.mark.slow if where == "killed" else pytest.mark.release) for where in FAILURES],
)
def test_a_failure_of_one_rank_ends_all_and_is_told_as_its(workspace: Workspace, tmp_path: Path, where: str) -> None:
    code, what = FAILURES[where]
    when, words = tmp_path / "when", failing(workspace, where)
    command = [sys.executable, "-m", "pipeline", "run", workspace.config, "--nproc", "2", *words]
    environment = {**os.environ, "WHAT": where, "WHEN": str(when), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == code, ended.stderr
    assert time.time() - when.stat().st_mtime < SOON
    status = status_of(workspace)
    assert (status["failed_rank"], status["exit_code"]) == (1, 1 if where == "killed" else code)
    assert re.search(f"^rank 1 .*{what}", status["reason"])
    assert re.search(f"ERROR   rank 1.*{what}", ended.stderr)
    if where == "killed":
        assert "rank 1 was the first to leave, with exit code 137: Signal 9 (SIGKILL) received by PID" in ended.stderr
        assert "Traceback" not in ended.stderr
    for process in json.loads((run_dir_of(workspace) / "environment.json").read_text())["ranks"]:
        with pytest.raises(ProcessLookupError):
            os.kill(process["pid"], 0)


@pytest.mark.slow
def test_torchrun_names_the_rank_that_failed_first(workspace: Workspace, tmp_path: Path) -> None:
    words = overrides(
        workspace, "runner.train_runner.epochs=4", "runner.train_runner.runner_class_path={workspace}/acts.py"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "pipeline", "run"]
    environment = {**os.environ, "WHAT": "diverges", "WHEN": str(tmp_path / "when"), "OMP_NUM_THREADS": "1"}
    run = [*command, workspace.config, *words]
    ended = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1
    assert re.search(r"Root Cause.*?rank\s*: 1 .*?exitcode\s*: 5", ended.stderr, re.DOTALL)
