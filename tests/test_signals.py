"""Signals that ask a run to end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from forked_runs import Zygote

from pipeline.checkpoint.storage import write
from pipeline.run.directory import RunDirectory
from pipeline.signals import GracefulShutdown, StoppedError

Done = subprocess.CompletedProcess[str]
Run = Callable[..., Done]
PLUGIN = """
import os, signal, time
from pathlib import Path
from pipeline import hookimpl
import pipeline.signals
from pipeline.signals import SHUTDOWN

class Plugin:
    def __init__(self, signals, at, to_group=False, grace=None, pause=0, notice=1.0):
        self.signals, self.at, self.to_group, self.grace, self.pause = signals, at, to_group, grace, pause
        pipeline.signals._NOTICE = notice

    @hookimpl
    def before_batch(self, context):
        if context["train_state"]["iteration"] != self.at or Path("asked").exists():
            return
        Path("asked").touch()
        SHUTDOWN.grace = self.grace or SHUTDOWN.grace
        for name in self.signals:
            number = getattr(signal, name)
            os.killpg(0, number) if self.to_group else os.kill(os.getpid(), number)
        time.sleep(self.pause)
"""


@pytest.fixture
def run(process: Callable[..., Done], linear: Path) -> Callable[..., Done]:
    """A run in a process group of its own, to which the plugin sends signals once, before the batch ``at``."""

    def run(*more: str, **plugin: object) -> Done:
        (linear.parent / "signals.py").write_text(PLUGIN, encoding="utf-8")
        return process("run", linear, "plugins=" + json.dumps([{"{workspace}/signals.py": plugin}]), *more)

    return run


def status() -> dict[str, object]:
    status: dict[str, object] = json.loads(Path("runs/workspace/latest/status.json").read_text(encoding="utf-8"))
    return status


def steps() -> list[str]:
    return sorted(path.name[-2:] for path in Path("runs/workspace/latest/train_runner/checkpoints").glob("step-*"))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("name", "code", "state"),
    [("SIGTERM", 75, "stopped"), ("SIGUSR1", 75, "stopped"), ("SIGHUP", 75, "stopped"), ("SIGINT", 130, "interrupted")],
)
def test_a_signal_lets_the_step_be_finished_and_saved(run: Run, name: str, code: int, state: str) -> None:
    done = run(signals=[name], at=7)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert steps() == ["06", "08"]
    told = status()
    assert (told["state"], told["exit_code"], told["resumable"], told["iteration"]) == (state, code, True, 8)


@pytest.mark.parametrize(("at", "workers"), [(0, 0), (5, 2), (6, 0), (10, 2)])
@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_bit_for_bit(run: Run, at: int, workers: int) -> None:
    loaders = f"dataset.train_data.num_workers={workers}"
    assert run(loaders, signals=["SIGTERM"], at=at, to_group=True).returncode == 75
    resumed = run(loaders, "--resume", "auto", signals=["SIGTERM"], at=at, to_group=True)
    assert resumed.returncode == 0, resumed.stderr
    whole = run(loaders, "output_dir=whole", signals=[], at=-1)
    assert whole.returncode == 0, whole.stderr
    for file in ("metrics.jsonl", "checkpoints/step-000000000012/line.safetensors"):
        ours, theirs = (Path(each, "workspace/latest/train_runner", file).read_bytes() for each in ("runs", "whole"))
        assert ours == theirs


@pytest.mark.parametrize(("names", "code"), [(["SIGTERM", "SIGUSR1"], 143), (["SIGTERM", "SIGINT"], 130)])
def test_a_second_signal_ends_the_process_at_once(run: Run, names: list[str], code: int) -> None:
    assert run(signals=names, at=7).returncode == code
    # What was being written at that moment may not be there; the step is not finished and saved.
    assert steps() in ([], ["06"])


def test_a_second_signal_says_how_to_go_on(run: Run) -> None:
    done = run(signals=["SIGTERM", "SIGINT"], at=7)
    path = Path("runs/workspace/latest").resolve()
    assert done.stderr.endswith(f"ended at once; to go on from its newest checkpoint:\n  pipeline resume {path}\n")


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("notice", "pause", "said"), [(20, 0, 0), (0.1, 1, 1)])
def test_a_step_that_takes_long_is_announced(run: Run, notice: float, pause: float, said: int) -> None:
    done = run(signals=["SIGTERM"], at=7, pause=pause, notice=notice)
    text = "INFO    SIGTERM: the run ends after this step, or in 25 s; a second one ends it at once\n"
    assert (done.returncode, done.stderr.count(text)) == (75, said)


def test_a_log_that_takes_no_line_does_not_hold_up_the_deadline() -> None:
    script = """
        import os, sys, time
        from loguru import logger
        from pipeline import signals
        from pipeline.signals import GracefulShutdown

        signals._NOTICE = 0.1
        logger.remove()
        logger.add(lambda line: time.sleep(60))
        os.dup2(os.pipe()[0], 0)
        with GracefulShutdown(grace=0.5).handling():
            os.system("kill -TERM $PPID; read nothing")
    """
    assert ended(textwrap.dedent(script)).returncode == 75


def ended(script: str, *arguments: str) -> Done:
    """How a process ends that runs a script as a module."""
    Path("script.py").write_text(script, encoding="utf-8")
    command = [sys.executable, "-m", "script", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


IN_C = """
import os
from pipeline.signals import GracefulShutdown

os.dup2(os.pipe()[0], 0)
with GracefulShutdown(grace=2).handling():
    # Until the process ends there is nothing to read.
    os.system("kill -TERM $PPID; {second}; read nothing")
"""


@pytest.mark.parametrize("second", ["kill -USR1 $PPID", "sleep 0.3; kill -TERM $PPID"])
def test_a_second_signal_ends_the_process_at_once_also_where_the_main_thread_does_not_hear_it(second: str) -> None:
    assert ended(IN_C.format(second=second)).returncode == 143


IN_A_CHILD = """
import os, signal
# Called before our own.
os.register_at_fork(after_in_child=lambda: signal.raise_signal(signal.SIGTERM))
os.register_at_fork(after_in_child=lambda: signal.raise_signal(signal.SIGUSR1))
from pipeline.signals import GracefulShutdown

with GracefulShutdown().handling():
    child = os.fork()
    if not child:
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says which process has written to a socket")
def test_what_a_process_receives_that_was_just_forked_is_no_signal_to_the_run() -> None:
    done = ended(IN_A_CHILD)
    assert (done.stdout, done.returncode) == ("143\n", 0)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", ["SIGHUP", "SIGTERM"])
def test_a_signal_that_comes_twice_at_once_is_one_as_a_closed_terminal_and_timeout_send_it(run: Run, name: str) -> None:
    assert run(signals=[name, name], at=7).returncode == 75
    assert steps() == ["06", "08"]


@pytest.mark.slow
def test_a_signal_that_the_caller_has_set_to_be_ignored_stays_ignored(linear: Path) -> None:
    (linear.parent / "signals.py").write_text(PLUGIN, encoding="utf-8")
    plugins = json.dumps([{"{workspace}/signals.py": {"signals": ["SIGHUP", "SIGINT"], "at": 7}}])
    command = ["sh", "-c", "trap '' HUP INT; exec \"$@\"", "sh", sys.executable, "-m", "pipeline", "run", str(linear)]
    assert subprocess.run([*command, f"plugins={plugins}"], check=False).returncode == 0
    assert (status()["state"], status()["iteration"]) == ("done", 12)


def test_a_step_that_takes_longer_than_the_grace_is_not_waited_for(run: Run) -> None:
    done = run(signals=["SIGTERM"], at=7, grace=0.2, pause=60)
    assert done.returncode == 75
    assert steps() == ["06"]


def test_outside_of_a_loop_a_signal_ends_the_run_at_once() -> None:
    stop = GracefulShutdown()
    with pytest.raises(StoppedError, match="asked to end by SIGUSR1"), stop.handling():
        signal.raise_signal(signal.SIGUSR1)


def test_a_loop_is_made_to_look_and_handlers_are_put_back() -> None:
    stop, woken = GracefulShutdown(), []
    before = signal.getsignal(signal.SIGTERM)
    with stop.handling(), stop.defer(lambda: woken.append(stop.requested)):
        signal.raise_signal(signal.SIGTERM)
        assert woken == [signal.SIGTERM]
        with pytest.raises(StoppedError, match="asked to end by SIGTERM"):
            stop.raise_if_requested()
    assert signal.getsignal(signal.SIGTERM) is before
    stop.raise_if_requested()


SLOW = """
import random, time
from pathlib import Path
import torch
from torch.utils.data import Dataset

class Slow(Dataset):
    def __init__(self, at=-1):
        self.at = at
    def __len__(self):
        return 24
    def __getitem__(self, index):
        if index == self.at and not Path("waiting").exists():
            Path("waiting").touch()
            time.sleep(600)
        return torch.rand(1) + random.random(), torch.ones(1)
"""


TRAINED = """
from pathlib import Path
from pipeline import hookimpl

class Plugin:
    @hookimpl
    def after_batch(self, context):
        Path(f"trained {context['train_state']['iteration']}").touch()
"""


def slow(config: Path, at: int, *more: str) -> list[str]:
    """The arguments of a run whose workers come to a sample that takes ten minutes, once."""
    (config.parent / "slow.py").write_text(SLOW, encoding="utf-8")
    (config.parent / "trained.py").write_text(TRAINED, encoding="utf-8")
    return [
        "run",
        str(config),
        "dataset.train_data.class_path={workspace}/slow.py:Slow",
        f"dataset.train_data.args={{at: {at}}}",
        "dataset.train_data.num_workers=2",
        "runner.train_runner.save_interval=null",
        "phase.line.valid_dataset_name=null",
        'plugins=["{workspace}/trained.py"]',
        *more,
    ]


def stopped_while_it_waits(zygote: Zygote, command: list[str], batches: int, number: signal.Signals) -> int | None:
    """What a run leaves with that gets a signal once it has trained on the batches before that sample."""
    trained = Path(f"trained {batches}")
    with zygote.start(Path.cwd(), command, Path("printed"), {}) as process:
        while not (Path("waiting").exists() and (trained.exists() or not batches)):
            time.sleep(0.01)
        # It is about to wait for the next batch.
        time.sleep(0.3)
        process.send(number, to_group=True)
        return process.wait()


@pytest.mark.parametrize(("at", "batch"), [(1, 0), (13, 3)])
@pytest.mark.slow
def test_a_wait_for_workers_is_ended_by_a_signal_with_all_steps_saved(
    zygote: Zygote, process: Callable[..., Done], linear: Path, at: int, batch: int
) -> None:
    assert stopped_while_it_waits(zygote, slow(linear, at), batch, signal.SIGTERM) == 75
    assert (steps(), status()["iteration"]) == ([f"{batch:02}"], batch)
    for more in (["--resume", "auto"], ["output_dir=whole"]):
        done = process(*slow(linear, at, *more))
        assert done.returncode == 0, done.stderr
    for file in ("metrics.jsonl", "checkpoints/step-000000000012/line.safetensors"):
        ours, theirs = (Path(each, "workspace/latest/train_runner", file).read_bytes() for each in ("runs", "whole"))
        assert ours == theirs


def test_ctrl_c_ends_the_wait_too(zygote: Zygote, linear: Path) -> None:
    assert stopped_while_it_waits(zygote, slow(linear, 13), 3, signal.SIGINT) == 130
    assert steps() == ["03"]


def go_over(stop: GracefulShutdown, batches: Iterator[int], saved: list[object], *, asking: int = 0) -> list[int]:
    """What is done before a signal ends it; at one of the batches a signal comes."""
    done: list[int] = []
    with suppress(StoppedError), stop.handling(), stop.defer(lambda: None):
        for each in stop.interruptible(batches, lambda: saved.append(stop.requested)):
            if each == asking:
                signal.raise_signal(signal.SIGTERM)
            done.append(each)
        done.append(-1)
    return done


def waiting_after(batches: int) -> Iterator[int]:
    """Some batches; while the next is waited for, a signal comes."""
    yield from range(1, batches + 1)
    signal.raise_signal(signal.SIGTERM)
    yield 99


def test_a_signal_ends_a_wait_after_what_is_to_be_saved_is() -> None:
    saved: list[object] = []
    assert go_over(GracefulShutdown(), waiting_after(2), saved) == [1, 2]
    assert saved == [signal.SIGTERM]


def test_a_signal_during_a_step_does_not_interrupt_it() -> None:
    saved: list[object] = []
    assert go_over(GracefulShutdown(), iter([1, 2, 3]), saved, asking=2) == [1, 2]
    assert saved == [signal.SIGTERM]


@contextmanager
def signal_at(place: int) -> Iterator[None]:
    """Before an instruction of Python in the block, counted from 0, a signal comes."""
    instructions = count()

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode" and next(instructions) == place:
            sys.settrace(None)
            signal.raise_signal(signal.SIGTERM)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def test_at_whatever_instruction_a_signal_comes_a_wait_raises_only_what_the_run_expects() -> None:
    for place in count():
        stop, done = GracefulShutdown(), list[int]()
        with stop.handling(), stop.defer(lambda: None):
            with suppress(StoppedError), signal_at(place):
                done += stop.interruptible(iter([1, 2]))
            if stop.requested is None:
                break
    assert (done, place > 30) == ([1, 2], True)


def test_without_a_signal_all_batches_come() -> None:
    stop = GracefulShutdown()
    assert list(stop.interruptible([1, 2, 3])) == [1, 2, 3]


AT_IMPORT = """
import os, signal
from pipeline import hookimpl
os.kill(os.getpid(), signal.{name})

class Plugin:
    @hookimpl
    def before_epoch(self):
        pass
"""
AT_FORK = """
import os, signal
from pipeline import hookimpl
asked = [True]

def ask():
    if not asked:
        asked.append(True)  # Before the signal, which may end this function.
        os.killpg(0, signal.{name})

os.register_at_fork(after_in_parent=ask)

class Plugin:
    @hookimpl
    def before_validation(self):
        asked.clear()
"""


Process = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 75), ("SIGUSR1", 75), ("SIGINT", 130)])
def test_a_signal_before_the_first_stage_ends_the_run_with_its_code(
    process: Process, linear: Path, name: str, code: int
) -> None:
    (linear.parent / "ask.py").write_text(AT_IMPORT.format(name=name), encoding="utf-8")
    done = process("run", linear, 'plugins=["{workspace}/ask.py"]')
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr


WHERE_A_FILE_IS_OPENED = """
import signal, sys

def interrupt(event, arguments):
    if event == "open" and {name!r} in str(arguments[0]):
        try:
            {interrupt}
        except BaseException:
            pass

sys.addaudithook(interrupt)
from pipeline.cli import main
main()
"""


def test_ctrl_c_ends_a_command_that_is_still_imported_though_torch_swallows_it() -> None:
    script = WHERE_A_FILE_IS_OPENED.format(name="checker.", interrupt="signal.raise_signal(signal.SIGINT)")
    done = ended(script, "check", "none.yaml")
    assert (done.returncode, done.stderr) == (130, "interrupted before anything was run\n")


def test_an_interrupt_that_left_an_exec_does_not_change_the_exit_code() -> None:
    script = WHERE_A_FILE_IS_OPENED.format(name="none.yaml", interrupt="exec('raise KeyboardInterrupt')")
    assert ended(script, "check", "none.yaml").returncode == 2


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 75), ("SIGINT", 130)])
@pytest.mark.slow
def test_a_signal_to_the_group_while_workers_are_started_is_the_runs_to_heed(
    process: Process, linear: Path, name: str, code: int
) -> None:
    (linear.parent / "ask.py").write_text(AT_FORK.format(name=name), encoding="utf-8")
    workers = "dataset.train_data.num_workers=2"
    done = process("run", linear, 'plugins=["{workspace}/ask.py"]', workers)
    assert done.returncode == code, done.stderr
    assert json.loads(Path("runs/workspace/latest/status.json").read_bytes())["exit_code"] == code


@pytest.mark.slow
def test_a_run_that_was_killed_right_before_it_said_that_it_is_done_says_so_when_resumed(
    process: Process, linear: Path
) -> None:
    assert process("run", linear).returncode == 0
    status = Path("runs/workspace/latest/status.json")
    done = status.read_bytes()
    status.write_bytes(done.replace(b'"done"', b'"running"'))
    assert process("run", linear, "--resume", "auto").returncode == 0
    assert status.read_bytes() == done


def test_a_run_that_was_killed_before_latest_named_it_is_named_when_it_goes_on(
    tmp_path: Path,
) -> None:
    path = RunDirectory.new(tmp_path, "job").path
    (tmp_path / "job" / "latest").rename(tmp_path / "job" / f".latest-{path.name}")
    assert RunDirectory.newest(tmp_path, "job")
    assert sorted(os.listdir(tmp_path / "job")) == [path.name, "latest"]
    assert (tmp_path / "job" / "latest").resolve() == path


def test_nothing_of_a_file_stays_whose_writing_a_signal_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: Path, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "status.json", "{}")
    assert list(tmp_path.glob(".*")) == []
