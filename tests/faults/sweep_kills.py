"""Whole sweeps killed at random moments and resumed to the end: ``python tests/faults/sweep_kills.py [KILLS [SEED [KIND]]]``.

Each sweep, a grid with two jobs or a search by TPE (``grid`` or ``tpe`` alone, where KIND says so), is killed by SIGKILL
one to three times, anywhere between its first line and its last: alone, so that its trials go on without it, or together
with them. Then it is resumed, while they may still be running. It passes if its trials, their words, values and
``metrics.jsonl`` are those of a sweep that nothing interrupts.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

EXAMPLE = Path(__file__).parents[2] / "workspace_examples" / "first_steps"
COMMON = ["-o", "runner.train_runner.epochs=6", "-o", "runner.train_runner.save_interval=8 iteration"]
RATE = "hyper_parameters.optimizer.learning_rate"
KINDS = {
    "grid": [f"{RATE}=0.1,0.01", "+hyper_parameters.width=8,16", "--jobs", "2"],
    "tpe": [f"{RATE}=1e-3..1e-1:log", "+hyper_parameters.width=8,16", "--search", "tpe", "--trials", "3"],
}
SMALL = {
    "grid": [f"{RATE}=0.1,0.01", "--jobs", "2"],
    "tpe": [f"{RATE}=1e-3..1e-1:log", "--search", "tpe", "--trials", "2"],
}
"""The same with two trials each."""


class Killed(NamedTuple):
    """A sweep that is over.

    Attributes:
        kills: how often it was killed.
        orphans: how many of its trials went on without it.
        faults: what is otherwise than in the unbroken sweep.
    """

    kills: int
    orphans: int
    faults: list[str]


def start(folder: Path, arguments: list[str]) -> subprocess.Popen[bytes]:
    """Begin a sweep in a process of its own."""
    with (folder / "printed").open("ab") as output:
        command = [sys.executable, "-m", "pipeline", "sweep", *arguments]
        return subprocess.Popen(command, cwd=folder, stdout=output, stderr=output)


def begun(folder: Path) -> list[str]:
    """The arguments that go on with the sweep; none where it was killed before it had a file."""
    return [word for file in folder.glob("runs/*/sweeps/*/sweep.json") for word in ("--resume", str(file.parent))]


def end(folder: Path) -> dict[str, Any]:
    """What a sweep has come to: trial -> its words, its end, its value, and its numbers."""
    [file] = folder.glob("runs/*/sweeps/*/sweep.json")
    trials = json.loads(file.read_text(encoding="utf-8"))["trials"]
    return {
        f"trial-{number:03d}": {
            **trial,
            "metrics": (file.parent / f"trial-{number:03d}/train_runner/metrics.jsonl").read_bytes(),
            "status": json.loads((file.parent / f"trial-{number:03d}/status.json").read_bytes())["state"],
        }
        for number, trial in enumerate(trials)
    }


def children(process: subprocess.Popen[bytes]) -> list[int]:
    """The processes that a process has started."""
    try:
        return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def kill(process: subprocess.Popen[bytes], *, alone: bool) -> int:
    """Kill a sweep, alone or with its trials; how many of them go on."""
    # Stopped, it starts none while we look.
    process.send_signal(signal.SIGSTOP)
    trials = children(process)
    process.kill()
    for pid in () if alone else trials:
        subprocess.run(["kill", "-KILL", str(pid)], check=False)
    process.wait()
    return len(trials) if alone else 0


def killed_sweep(folder: Path, words: list[str], kills: int, seconds: float, chance: random.Random) -> tuple[int, int]:
    """One sweep, killed so often, or less often where it is quicker, and resumed to the end: (kills, orphans)."""
    done = orphans = 0
    code: int | None = None
    while code is None:
        process = start(folder, begun(folder) or [str(EXAMPLE), *words, *COMMON])
        if done < kills:
            try:
                code = process.wait(chance.uniform(0, 1.2 * seconds / kills))
            except subprocess.TimeoutExpired:
                orphans += kill(process, alone=chance.random() < 0.5)
                done += 1
        else:
            code = process.wait()
    assert code == 0, (folder / "printed").read_text(encoding="utf-8")
    return done, orphans


def experiment(
    folder: Path, kills: int = 20, seed: int = 0, kinds: Mapping[str, list[str]] = KINDS
) -> tuple[Counter[str], list[str]]:
    """So many kills, one to three a sweep; what was counted, and the faults."""
    chance, expected, seconds = random.Random(seed), {}, {}
    for kind, words in kinds.items():
        place, before = folder / f"unbroken-{kind}", time.monotonic()
        place.mkdir()
        killed_sweep(place, words, 0, 0, chance)
        expected[kind], seconds[kind] = end(place), time.monotonic() - before
    sweeps: list[Killed] = []
    while left := kills - sum(sweep.kills for sweep in sweeps):
        place, kind = Path(tempfile.mkdtemp(dir=folder)), chance.choice([*kinds])
        done, orphans = killed_sweep(place, kinds[kind], min(left, chance.randint(1, 3)), seconds[kind], chance)
        found, wanted = end(place), expected[kind]
        unlike = [f"{place} {kind}: {name}" for name in found.keys() | wanted if found.get(name) != wanted.get(name)]
        sweeps.append(Killed(done, orphans, unlike))
    faults = [fault for sweep in sweeps for fault in sweep.faults]
    orphans, broken = sum(sweep.orphans for sweep in sweeps), sum(bool(sweep.faults) for sweep in sweeps)
    return Counter({"kills": kills, "orphans": orphans, "sweeps": len(sweeps), "unlike": broken}), faults


if __name__ == "__main__":
    began = time.monotonic()
    numbers, chosen = [int(each) for each in sys.argv[1:3]], sys.argv[3:] or [*KINDS]
    with tempfile.TemporaryDirectory() as scratch:
        result, told = experiment(Path(scratch), *numbers, kinds={kind: KINDS[kind] for kind in chosen})
    print(*told, sep="\n", end="\n" if told else "")
    print(json.dumps({**result, "seconds": round(time.monotonic() - began)}))
    sys.exit(bool(told))
