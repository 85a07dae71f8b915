"""Twelve Runners of one's own, killed at random moments: ``python tests/faults/own_runners.py [KILLS [SEED [RUNNER…]]]``.

Nine of them are in ``tests/stages/twelve_runners``, three are examples. Each is killed by SIGKILL so often, one to three
times in a run, anywhere between its first line and its last, and resumed to the end. A run passes if all that it has come
to is bit for bit what an unbroken one comes to.
"""

from __future__ import annotations

import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import forked_run
from forked_run import ForkedRun, until

from pipeline.checkpoint.comparison import differences
from pipeline.errors import PipelineError

REPOSITORY = Path(__file__).parents[2]
FOLDER = REPOSITORY / "tests" / "stages" / "twelve_runners"
EXAMPLES = REPOSITORY / "workspace_examples"
PLUGINS = f'plugins=[metric_log, {{progress_bar: {{live: false}}}}, "{FOLDER / "watching.py"}:Watching"]'
RUNNER = "train_runner"
SLOW_BATCH = "0.004"
"""Seconds that each batch waits: then most kills fall into the training."""


class Job(NamedTuple):
    """A config, and what makes its run a short one."""

    config: Path
    overrides: tuple[str, ...] = ()


def example(name: str, *overrides: str) -> Job:
    """An example, with 40 samples at the most, and what is due at odd places as in ``base.yaml``."""
    every = ("print_interval=5", "valid_interval=[7, 1 epoch]", "save_interval=[6, 1 epoch]")
    return Job(EXAMPLES / name / "config.yaml", (*(f"runner.{RUNNER}.{each}" for each in every), *overrides))


def short(name: str) -> Job:
    """One of ``tests/stages/twelve_runners``."""
    return Job(FOLDER / f"{name}.yaml")


RUNNERS = {
    "gan": short("gan"),
    "two_phases": short("two_phases"),
    "curriculum": short("curriculum"),
    "sam": example(
        "sam", f"runner.{RUNNER}.epochs=4", "dataset.train_data.args.size=40", "dataset.train_data.batch_size=4"
    ),
    "distillation": example(
        "distillation",
        f"runner.{RUNNER}.epochs=4",
        f"runner.{RUNNER}.runner_args.teacher_epochs=2",
        "dataset.train_data.args.size=40",
        "dataset.train_data.batch_size=4",
    ),
    "self_training": example(
        "self_training",
        f"runner.{RUNNER}.epochs=6",
        f"runner.{RUNNER}.runner_args.confidence=0.9",
        "hyper_parameters.optimizer.learning_rate=0.03",
        "dataset.train_data.args.size=80",
        "dataset.train_data.batch_size=5",
    ),
    "k_fold": short("k_fold"),
    "rollouts": short("rollouts"),
    "lbfgs": short("lbfgs"),
    "gradient_surgery": short("gradient_surgery"),
    "evaluate_only": short("evaluate_only"),
    "until_metric": short("until_metric"),
}


def overrides(name: str) -> list[str]:
    """What a run of one of the twelve is given besides its config."""
    return [*RUNNERS[name].overrides, PLUGINS, "output_dir=runs"]


def end(folder: Path, name: str) -> dict[str, Any]:
    """What the newest run in a folder has come to: its last checkpoint, numbers and status."""
    config = RUNNERS[name].config
    run_dir = folder / "runs" / (config.parent.name if config.stem == "config" else config.stem) / "latest"
    status = json.loads((run_dir / "status.json").read_text(encoding="utf-8"))
    shown = {key: status[key] for key in ("state", "exit_code", "iteration", "epoch")}
    return {**forked_run.end(run_dir / RUNNER), "status": shown}


def start(folder: Path, name: str) -> ForkedRun:
    """Begin a run, or go on with the one that is there."""
    slow = {"SLOW_BATCH": SLOW_BATCH}
    return ForkedRun(folder, RUNNERS[name].config, overrides(name), "auto", environment=slow)


class Unbroken(NamedTuple):
    """A run that nothing interrupts: what it comes to, and how many seconds it takes."""

    end: dict[str, Any]
    seconds: float


def unbroken(folder: Path, name: str) -> Unbroken:
    """Run it once."""
    place = Path(tempfile.mkdtemp(dir=folder))
    before = time.monotonic()
    run = start(place, name)
    assert run.wait() == 0, run.told()
    return Unbroken(end(place, name), time.monotonic() - before)


def killed(place: Path, name: str, expected: Unbroken, kills: int, chance: random.Random) -> tuple[int, list[str]]:
    """How often a run was killed, which may end before, and where it comes to another end."""
    done, run = 0, start(place, name)
    while done < kills and not until(run.over, chance.uniform(0, 1.1 * expected.seconds / kills)):
        run.send(signal.SIGKILL)
        if run.wait() == -signal.SIGKILL:
            done += 1
            run = start(place, name)
    if code := run.wait():
        return done, [f"left with {code}: {run.told().strip()[-300:]}"]
    try:
        return done, [str(each) for each in differences(end(place, name), expected.end)]
    except (OSError, IndexError, PipelineError) as error:
        return done, [repr(error)]


def experiment(folder: Path, kills: int = 10, seed: int = 0, *names: str) -> tuple[Counter[str], list[str]]:
    """Kill each of the Runners so often; what was counted, and the faults."""
    chance, counts, faults = random.Random(seed), Counter({"kills": 0, "unlike": 0}), []
    for name in names or RUNNERS:
        counts["runners"] += 1
        expected, left = unbroken(folder, name), kills
        while left:
            done, unlike = killed(
                Path(tempfile.mkdtemp(dir=folder)), name, expected, chance.randint(1, min(3, left)), chance
            )
            left -= done
            counts.update(kills=done, runs=1, unlike=bool(unlike))
            faults += [f"{name}, {done} kills: {each}" for each in unlike]
    return counts, faults


if __name__ == "__main__":
    numbers, chosen = [int(each) for each in sys.argv[1:3]], sys.argv[3:]
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        result, told = experiment(Path(scratch), *numbers, *chosen)
    print(*told, sep="\n", end="\n" if told else "")
    print(json.dumps({**result, "seconds": round(time.monotonic() - began)}))
    sys.exit(bool(told))
