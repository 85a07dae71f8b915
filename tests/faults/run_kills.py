"""Whole runs killed or stopped at random moments and resumed to the end: ``python tests/faults/run_kills.py 20 [SEED]``.

The model has dropout, batch norm, AdamW, Noam, accumulation, clipping and noisy data. Each run is killed up to four
times, by SIGKILL or SIGTERM, somewhere between its first import and its end. It passes if weights, optimizer, random
generators, counters and ``metrics.jsonl`` are bit for bit those of a run that nothing interrupted.
"""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import torch

from pipeline.checkpoint import saved

FILES = {
    "data.py": """
        import random, time, torch
        from torch.utils.data import Dataset

        class Noisy(Dataset):
            def __init__(self, length=120):
                self.length = length
            def __len__(self):
                return self.length
            def __getitem__(self, index):
                time.sleep(0.003)
                return torch.tensor([index / 10, 1.0, random.random()]) + torch.randn(3) * 0.1, torch.tensor([index / 10])
    """,
    "model.py": """
        from torch import nn

        class Model(nn.Sequential):
            def __init__(self):
                super().__init__(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
    """,
    "config.yaml": """
        dataset:
          - {name: train, class_path: data.py:Noisy, batch_size: 3, shuffle: true}
          - {name: valid, class_path: data.py:Noisy, args: {length: 30}, batch_size: 10}
        runner:
          - name: train
            class: train
            device: cpu
            epochs: 3
            save_interval: [5, 1 epoch]
            valid_interval: [25, 1 epoch]
            keep_last: 2
            keep_best: {metric: valid_loss, mode: min}
        phase:
          - name: net
            model: model.py
            loss: torch.nn.functional.mse_loss
            dataset_name: train
            valid_dataset_name: valid
            optim_schedulers:
              main:
                class: noam
                args: {optim_type: AdamW, optim_conf: {lr: 0.01}, warmup_steps: 9, accum_grad: 3, grad_clip: 1.0}
    """,
}
LAST = "train/checkpoints/step-000000000120"
CLOCK = ".recoverables.plugin:metric_log.timing"
"""What depends on the clock: the length of timing.jsonl."""


def start(folder: Path, *more: str) -> subprocess.Popen[bytes]:
    """A run in a process of its own."""
    command = [sys.executable, "-m", "pipeline", "run", "-q", str(folder / "config.yaml"), *more]
    return subprocess.Popen(command, cwd=folder, stderr=subprocess.DEVNULL)


def differences(one: Any, other: Any, place: str = "") -> list[str]:
    """The places at which two nested states are not equal bit for bit."""
    if isinstance(one, dict):
        if one.keys() != other.keys():
            return [place]
        return [each for key in one for each in differences(one[key], other[key], f"{place}.{key}")]
    if isinstance(one, list | tuple):
        pairs = enumerate(zip(one, other, strict=True))
        return [each for index, (a, b) in pairs for each in differences(a, b, f"{place}[{index}]")]
    same = torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    return [] if same else [place]


def end(run_dir: Path) -> dict[str, Any]:
    """Everything that a run has come to."""
    last = saved.read(run_dir / LAST)
    lines = (run_dir / "train/metrics.jsonl").read_bytes()
    left = sorted(path.name for path in (run_dir / "train/checkpoints").iterdir())
    return {"weights": last.weights, "": last.training, "counters": last.train_state, "lines": lines, "left": left}


def interrupted(folder: Path, chance: random.Random) -> int:
    """Run to the end, killed up to four times on the way; how often it was."""
    kills = 0
    while True:
        process = start(folder, "output_dir=broken", "--resume", "auto")
        try:
            code = process.wait(timeout=chance.uniform(1.5, 4.5) if kills < 4 else None)
        except subprocess.TimeoutExpired:
            process.send_signal(chance.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM]))
            process.wait()
            kills += 1
            continue
        assert code == 0, f"a resumed run left with {code}"
        return kills


def main(runs: int, seed: int) -> int:
    """Do it so often; 1 if any run ended otherwise than the unbroken one."""
    chance, bad, kills = random.Random(seed), 0, 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "job"
        folder.mkdir()
        for file, text in FILES.items():
            (folder / file).write_text(textwrap.dedent(text), encoding="utf-8")
        assert start(folder, "output_dir=whole").wait() == 0
        expected = end((folder / "whole/job/latest").resolve())
        for _ in range(runs):
            shutil.rmtree(folder / "broken", ignore_errors=True)
            kills += interrupted(folder, chance)
            found = differences(end((folder / "broken/job/latest").resolve()), expected)
            wrong = [place for place in found if place.removeprefix(".") != CLOCK]
            bad += bool(wrong)
            for place in wrong:
                print(f"not equal: {place}")
    print(f"{runs} runs, {kills} times killed or stopped: {bad} ended otherwise than the unbroken run")
    return min(bad, 1)


if __name__ == "__main__":
    given = [int(each) for each in sys.argv[1:]]
    sys.exit(main(given[0] if given else 20, given[1] if len(given) > 1 else 0))
