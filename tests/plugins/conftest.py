"""What the tests of the conversion share, and those of the trackers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import Result
from pipeline_plugins.paddlerec.convert import convert
from pipeline_plugins.resume_test import runs

from tests.conftest import Process

# Read when they are imported: mlflow and wandb tell their makers how they are used, and what fails.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("WANDB_ERROR_REPORTING", "false")

Numbers = dict[str, list[tuple[int, float]]]


@pytest.fixture
def converted() -> Callable[[str], tuple[str, list[str]]]:
    """Converts a config: its text -> (the new text, the notes without where they stand)."""

    def call(text: str) -> tuple[str, list[str]]:
        config = Path("config.yaml")
        config.write_text(text, encoding="utf-8")
        done = convert(config, Path())
        return done.text, [f"{note.address}: {note.message}" for note in done.notes]

    return call


@pytest.fixture(scope="session")
def _stores(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"


@pytest.fixture(autouse=True)
def database(_stores: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The store of MLflow that runs log to unless they say otherwise: to make one takes seconds, so tests share it."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", _stores)
    return _stores


@pytest.fixture
def without_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the charts out of the pages of ``report``, since Bokeh takes half a second for those of a page."""
    monkeypatch.setattr("pipeline_plugins.report.page.chart", lambda *_: {})


@pytest.fixture
def resume_test(
    process: Process, pipeline: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Result]:
    """Return a function that calls ``resume-test`` and forks its runs instead of starting new interpreters."""

    def run(
        command: Sequence[str], *, env: Mapping[str, str], stdout: int, check: bool
    ) -> subprocess.CompletedProcess[str]:
        assert command[:3] == [sys.executable, "-m", "pipeline"]
        assert (stdout, check) == (2, False)
        done = process(*command[3:], **env)
        print(done.stdout + done.stderr, end="", file=sys.stderr, flush=True)
        return done

    monkeypatch.setattr(runs, "subprocess", SimpleNamespace(run=run))
    return lambda *arguments: pipeline("resume-test", *arguments)


KILL = """
    import os
    import signal
    import time
    from pipeline import hookimpl

    class Plugin:
        def kill(self, hook, context):
            if os.environ.get("KILL") == f"{hook} {context['train_state']['iteration']}":
                time.sleep(float(os.environ["SECONDS"]))
                os.kill(os.getpid(), signal.SIGKILL)

        @hookimpl
        def before_batch(self, context):
            self.kill("before_batch", context)

        @hookimpl
        def after_validation(self, context):
            self.kill("after_validation", context)
"""


@pytest.fixture
def tracked(linear: Path) -> Callable[[str], Path]:
    """The path of a small config with a tracker, which may be killed: 6 batches to an epoch, and a checkpoint every 3."""

    def write(tracker: str) -> Path:
        text = linear.read_text(encoding="utf-8")
        text = text.replace("print_interval: 3", 'print_interval: 3, save_interval: "3 iteration"')
        linear.write_text(f'{text}plugins: [{tracker}, "{{workspace}}/kill.py"]\n', encoding="utf-8")
        (linear.parent / "kill.py").write_text(textwrap.dedent(KILL), encoding="utf-8")
        return linear

    return write


@pytest.fixture
def killed(process: Process) -> Callable[..., Path]:
    """Kills a run of a config before its first checkpoint, amid an epoch, and between a checkpoint and a validation of the
    same iteration; lets it come to its end, and returns the run directory."""

    def run(config: Path, seconds: float = 0) -> Path:
        for kill in ("before_batch 2", "before_batch 5", "after_validation 6", "before_batch 10", "before_batch 11"):
            assert process("run", config, "--resume", "auto", KILL=kill, SECONDS=str(seconds)).returncode == -9
        assert process("run", config, "--resume", "auto").returncode == 0
        return (Path("runs") / "workspace" / "latest").resolve()

    return run


PHASES = """[
    {name: a, model: torch.nn.Linear, model_args: {in_features: 1, out_features: 1},
     loss: torch.nn.functional.mse_loss, dataset_name: train_data, valid_dataset_name: train_data},
    {name: b, model: torch.nn.Linear, model_args: {in_features: 1, out_features: 1},
     loss: torch.nn.functional.l1_loss, dataset_name: train_data, valid_dataset_name: train_data}]"""
"""Two phases, for the config of ``tracked``."""

RUNNERS = """[
    {name: train_runner, class: train, device: cpu, epochs: 1, print_interval: 3},
    {name: infer_runner, class: infer, device: cpu}]"""
"""A runner that trains, and one that evaluates what it has trained."""


def reported(run_dir: Path, runner: str = "train_runner", *, several: bool = False) -> Numbers:
    """What metric_log says that a runner has measured, by the names that the trackers give it: [(iteration, number)]."""
    numbers: Numbers = {}
    for file in ("metrics.jsonl", "timing.jsonl"):
        for text in (run_dir / runner / file).read_text(encoding="utf-8").splitlines():
            line = json.loads(text)
            if line["event"] == "stage":
                continue
            phase = f"{line.pop('phase', '')}." if several else ""
            prefix = {"train": "", "epoch": "epoch_", "validate": "valid_", "evaluate": ""}[line.pop("event")]
            iteration, _, _ = line.pop("iteration"), line.pop("epoch"), line.pop("phase", None)
            for name, value in line.items():
                # At the end of an epoch the numbers of its validation are repeated.
                if not (prefix == "epoch_" and name.startswith("valid_")) and name != "seconds":
                    numbers.setdefault(f"{phase}{prefix}{name}", []).append((iteration, value))
    return numbers


EXPERIMENT = """
import struct
import zlib

import torch
from torch import nn

from pipeline import ExperimentBase


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


class Figure:
    def savefig(self, file, format):
        size = struct.pack(">IIBBBBB", 3, 2, 8, 0, 0, 0, 0)
        pixels = zlib.compress(b"\\0abc" * 2)
        file.write(b"\\x89PNG\\r\\n\\x1a\\n" + chunk(b"IHDR", size) + chunk(b"IDAT", pixels) + chunk(b"IEND", b""))


class Showing(ExperimentBase):
    def setup_dataloader(self):
        self.train_loader = [torch.ones(2, 1)] * 3

    def setup_model(self):
        self.model = nn.Linear(1, 1)

    def train_batch(self):
        self.read_batch()

    def valid(self):
        self.visualizer.add_scalar("norm", self.iteration, self.iteration)
        self.visualizer.add_figure("valid/picture", Figure(), self.iteration)
        self.visualizer.add_audio("valid/tone", [0.0, 0.5, -1.0], self.iteration, sample_rate=8000)
"""
"""It shows a picture of 3 x 2 pixels and a sound of 3 samples in each validation."""


@pytest.fixture
def showing(tmp_path: Path) -> Callable[[str], Path]:
    """The path of a config with a tracker, whose experiment is validated at iterations 2 and 4."""

    def write(tracker: str) -> Path:
        (tmp_path / "showing.py").write_text(EXPERIMENT, encoding="utf-8")
        keys = "class: train, device: cpu, max_steps: 4, valid_interval: 2, save_interval: 2"
        runner = f'{{name: train_runner, {keys}, runner_class_path: "{{workspace}}/showing.py:Showing"}}'
        (tmp_path / "showing.yaml").write_text(f"runner: [{runner}]\nplugins: [{tracker}]\n", encoding="utf-8")
        return tmp_path / "showing.yaml"

    return write
