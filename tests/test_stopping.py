"""Signals that ask a run to end."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.stopping import Stop, StoppedError

PLUGIN = """
import os, signal, time
from pathlib import Path
from pipeline import hookimpl
from pipeline.stopping import STOP

class Plugin:
    def __init__(self, signals, at, to_group=False, grace=None, pause=0):
        self.signals, self.at, self.to_group, self.grace, self.pause = signals, at, to_group, grace, pause

    @hookimpl
    def before_batch(self, context):
        if context["train_state"]["iteration"] != self.at or Path("asked").exists():
            return
        Path("asked").touch()
        STOP.grace = self.grace or STOP.grace
        for name in self.signals:
            number = getattr(signal, name)
            os.killpg(0, number) if self.to_group else os.kill(os.getpid(), number)
        time.sleep(self.pause)
"""


def run(config: Path, *more: str, **plugin: object) -> subprocess.CompletedProcess[str]:
    """A run in a process group of its own, to which the plugin sends signals once, before the batch ``at``."""
    (config.parent / "signals.py").write_text(PLUGIN, encoding="utf-8")
    plugins = json.dumps([{"{workspace}/signals.py": plugin}])
    command = [sys.executable, "-m", "pipeline", "run", str(config), f"plugins={plugins}", *more]
    return subprocess.run(command, capture_output=True, text=True, check=False, start_new_session=True)


def status() -> dict[str, object]:
    status: dict[str, object] = json.loads(Path("runs/workspace/latest/status.json").read_text(encoding="utf-8"))
    return status


def steps() -> list[str]:
    return sorted(path.name[-2:] for path in Path("runs/workspace/latest/train_runner/checkpoints").glob("step-*"))


@pytest.mark.parametrize(
    ("name", "code", "state"), [("SIGTERM", 75, "stopped"), ("SIGUSR1", 75, "stopped"), ("SIGINT", 130, "interrupted")]
)
def test_a_signal_lets_the_step_be_finished_and_saved(linear: Path, name: str, code: int, state: str) -> None:
    done = run(linear, signals=[name], at=7)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert steps() == ["06", "08"]
    told = status()
    assert (told["state"], told["exit_code"], told["resumable"], told["iteration"]) == (state, code, True, 8)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("at", [0, 5, 6, 10])
def test_a_run_that_was_stopped_goes_on_bit_for_bit(linear: Path, at: int, workers: int) -> None:
    loaders = f"dataset.train_data.num_workers={workers}"
    assert run(linear, loaders, signals=["SIGTERM"], at=at, to_group=True).returncode == 75
    resumed = run(linear, loaders, "--resume", "auto", signals=["SIGTERM"], at=at, to_group=True)
    assert resumed.returncode == 0, resumed.stderr
    whole = run(linear, loaders, "output_dir=whole", signals=[], at=-1)
    assert whole.returncode == 0, whole.stderr
    for file in ("metrics.jsonl", "checkpoints/step-000000000012/line.safetensors"):
        ours, theirs = (Path(each, "workspace/latest/train_runner", file).read_bytes() for each in ("runs", "whole"))
        assert ours == theirs


@pytest.mark.parametrize(("names", "code"), [(["SIGTERM", "SIGTERM"], 143), (["SIGTERM", "SIGINT"], 130)])
def test_a_second_signal_ends_the_process_at_once(linear: Path, names: list[str], code: int) -> None:
    assert run(linear, signals=names, at=7).returncode == code
    # What was being written at that moment may not be there; the step is not finished and saved.
    assert steps() in ([], ["06"])


def test_a_step_that_takes_longer_than_the_grace_is_not_waited_for(linear: Path) -> None:
    done = run(linear, signals=["SIGTERM"], at=7, grace=0.2, pause=60)
    assert done.returncode == 75
    assert steps() == ["06"]


def test_outside_of_a_loop_a_signal_ends_the_run_at_once() -> None:
    stop = Stop()
    with pytest.raises(StoppedError, match="asked to end by SIGUSR1"), stop.heeded():
        signal.raise_signal(signal.SIGUSR1)


def test_a_loop_is_made_to_look_and_handlers_are_put_back() -> None:
    stop, hurried = Stop(), []
    before = signal.getsignal(signal.SIGTERM)
    with stop.heeded(), stop.deferred(lambda: hurried.append(stop.asked)):
        signal.raise_signal(signal.SIGTERM)
        assert hurried == [signal.SIGTERM]
        with pytest.raises(StoppedError, match="asked to end by SIGTERM"):
            stop.end()
    assert signal.getsignal(signal.SIGTERM) is before
    stop.end()
