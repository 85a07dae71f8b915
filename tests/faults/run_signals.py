"""Whole runs stopped by signals at random moments, and resumed: ``python tests/faults/run_signals.py [SIGNALS [SEED]]``.

SIGTERM, SIGUSR1 or SIGINT comes to the process or to its group, with no workers or two: in a stage before the runner, in a
step, while it waits for data, in a validation, in a save, in the stages after, or at any moment. The run has to leave with
75, or 130 after SIGINT, to say how it stands, and to end bit for bit like an unbroken one when it is resumed. Now and then
a second signal follows: where a step hangs, that one has to end the process at once, with 143, or 130 for SIGINT.

A signal counts from when the run hears signals until it is over: before and after, it does what it does to any process.
"""

from __future__ import annotations

import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from forked_runs import Forked, Moment, Moments, Zygote, several, side_by_side
from whole_runs import RUN_DIR, arguments, last_line, unbroken, write_job, wrong

from pipeline.signals import GRACE

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
PLACES = {
    "batch": 90,
    "waiting for data": 90,
    "validation": 7,
    "save": 300,
    "instance": 2,
    "network": 2,
    "startup": 2,
    "stuck": 1,
    "terminal": 2,
    "test": 1,
    "fork": 20,
    "begun": 1,
    "train-over": 1,
    "test-over": 1,
    "any moment": 0,
}
"""Where the first signal comes -> how often a run tells that it is there."""
TOO_EARLY, TOO_LATE, STOPPED, AT_ONCE = "too early", "too late", "stopped", "ended at once"


class Plan(NamedTuple):
    """What is done to a run.

    Attributes:
        place: where the first signal comes.
        count: the how manieth time that it is there.
        pause: seconds from then on.
        numbers: the signals, one or two.
        between: seconds between two.
        to_group: whether they go to the workers as well.
        workers: how many there are.
    """

    place: str
    count: int
    pause: float
    numbers: list[signal.Signals]
    between: float
    to_group: bool
    workers: int


class Sent(NamedTuple):
    """What a run did when it was sent its signals.

    Attributes:
        told: where it was.
        at: when the first signal was there.
        code: what it left with.
        seconds: how long after the first signal.
    """

    told: list[Moment]
    at: float
    code: int
    seconds: float

    def had_been(self, name: str) -> bool:
        """Whether the run may have been at a place before the signal was there."""
        return any(moment.name == name and moment.at < self.at for moment in self.told)


def plan(place: str, chance: random.Random) -> Plan:
    """A random one for a place."""
    twice = place == "stuck" or chance.random() < 0.2
    return Plan(
        place,
        count=chance.randint(1, PLACES[place]) if PLACES[place] else 0,
        pause=chance.uniform(0, chance.choice((0.002, 0.02)) if PLACES[place] else 3.0),
        numbers=[chance.choice(SIGNALS) for _ in range(1 + twice)],
        between=chance.uniform(0, 0.03),
        to_group=chance.random() < 0.5,
        workers=2 if place in {"fork", "waiting for data"} else chance.choice((0, 2)),
    )


def send(process: Forked, moments: Moments, chosen: Plan) -> Sent:
    """Send the signals at their moment, and wait for the end."""
    told = moments.until("batch" if chosen.place == "waiting for data" else chosen.place, chosen.count, process)
    process.wait(chosen.pause)
    process.send(chosen.numbers[0], chosen.to_group)
    at = time.monotonic()
    for number in chosen.numbers[1:]:
        # What is pending makes one of two alike, and so does a run for a moment.
        while number == chosen.numbers[0] and is_pending(process.pid, number):
            process.wait(0.01)
        process.wait(chosen.between + 0.2 * (number == chosen.numbers[0]))
        process.send(number, chosen.to_group)
    code = process.wait()
    assert code is not None
    return Sent(told + moments.told(), at, code, time.monotonic() - at)


def is_pending(pid: int, number: signal.Signals) -> bool:
    """Whether a process has not received a signal yet that was sent to it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return False
    masks = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith(("SigPnd", "ShdPnd"))]
    return any(mask >> (number - 1) & 1 for mask in masks)


def kind(sent: Sent, chosen: Plan) -> str:
    """What an end counts as; "" if it is none that there may be."""
    # Of two that come together, Python hears the lower first.
    soft = {130 if number == signal.SIGINT else 75 for number in chosen.numbers}
    hard = {130 if number == signal.SIGINT else 143 for number in chosen.numbers}
    unheard = sent.code in {-number for number in chosen.numbers}
    if sent.had_been("test-over") and (sent.code == 0 or unheard):
        return TOO_LATE
    if unheard and not sent.had_been("begun"):
        return TOO_EARLY
    if chosen.place == "stuck" and sent.had_been("stuck"):
        return AT_ONCE if sent.code in hard and sent.seconds < GRACE / 2 else ""
    if sent.code in soft:
        return STOPPED
    # A second one that comes when the run has stopped, and Python ends, does what it does to any process.
    return AT_ONCE if len(chosen.numbers) == 2 and (sent.code in hard or unheard) else ""


def said(run_dir: Path, code: int) -> list[str]:
    """What is wrong with how a stopped run says that it stands."""
    status = json.loads((run_dir / "status.json").read_bytes())
    saved = any(run_dir.glob("*/checkpoints/step-*")) or any(run_dir.glob("*/done.json"))
    expected = ("interrupted" if code == 130 else "stopped", code, saved)
    found = (status["state"], status["exit_code"], status["resumable"])
    return [] if found == expected else [f"status.json says {found} instead of {expected}"]


def stopped_run(
    zygote: Zygote, config: Path, scratch: Path, expected: dict[int, Any], chosen: Plan
) -> tuple[str, list[str]]:
    """Stop one run and resume it; what that counts as, and the faults."""
    folder = Path(tempfile.mkdtemp(dir=scratch))
    slow = {"waiting for data": {"SLOW_DATA": "0.01"}, "stuck": {"STUCK_AT": "33"}}
    command = arguments(config, chosen.workers)
    with Moments(folder) as moments:
        environment = {"SLOW_DISK": "0.002", **slow.get(chosen.place, {}), **moments.environment}
        sent = send(zygote.start(folder, command, folder / "printed", environment), moments, chosen)
    counted = kind(sent, chosen)
    faults = [] if counted else [f"left with {sent.code}: {last_line(folder)}"]
    alone = len(chosen.numbers) == 1
    if counted == STOPPED and alone and sent.had_been("instance") and not sent.had_been("test-over"):
        faults += said(folder / RUN_DIR, sent.code)
    code = zygote.start(folder, command, folder / "printed", {}).wait()
    # When it is stopped it saves, and so the newest two may be others.
    resumed = wrong(folder / RUN_DIR, expected[chosen.workers], but="checkpoints")
    faults += resumed if code == 0 else [f"resumed, left with {code}: {last_line(folder)}"]
    return counted, [f"{chosen}: {fault}" for fault in faults]


def experiment(
    folder: Path, zygotes: Sequence[Zygote], signals: int = 100, seed: int = 0
) -> tuple[Counter[str], list[str]]:
    """So many that count, in one place after the other; what was counted, and the faults."""
    config, chance = write_job(folder / "job"), random.Random(seed)
    expected = unbroken(zygotes[0], folder, config)
    counts, faults = Counter(signals=0, unlike=0), list[str]()
    while (left := signals - counts["signals"]) > 0:
        places = [list(PLACES)[(counts["signals"] + each) % len(PLACES)] for each in range(left)]
        plans = [plan(place, chance) for place in places]
        ends = side_by_side(
            lambda zygote, chosen: stopped_run(zygote, config, folder, expected, chosen), plans, zygotes
        )
        for chosen, (counted, found) in zip(plans, ends, strict=True):
            faults += found
            counts[counted or "wrong end"] += 1
            counts["unlike"] += bool(found)
            if counted not in {TOO_EARLY, TOO_LATE}:
                counts.update(["signals", chosen.place])
    return counts, faults


if __name__ == "__main__":
    given = [int(each) for each in sys.argv[1:]]
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch, several() as zygotes:
        result, told = experiment(Path(scratch), zygotes, *given)
    print(*told, sep="\n", end="\n" if told else "")
    print(json.dumps({**result, "seconds": round(time.monotonic() - began)}))
    sys.exit(bool(told))
