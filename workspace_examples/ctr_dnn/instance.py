"""The instance stage makes the data: who clicks on what, as lines of slots."""

from __future__ import annotations

import math
import random
from pathlib import Path

from pipeline import Context, run_on_main
from pipeline.stages import Instance as DefaultInstance

USERS, ITEMS, TASTES = 150, 60, 3
LINES = {"train": 24_000, "valid": 6_000}


class Instance(DefaultInstance):
    """Seeds, as the default does, and writes the lines into the run directory."""

    def instance(self, context: Context) -> None:
        """Write ``data/train`` and ``data/valid``, with the same lines each time."""
        super().instance(context)
        run_on_main(write_lines, kwargs={"folder": context["run_dir"] / "data"})


def write_lines(folder: Path) -> None:
    """Write some files of each part; in every one, each line has a click that is drawn from its probability."""
    for part, count in LINES.items():
        chance = random.Random(part)
        (folder / part).mkdir(parents=True, exist_ok=True)
        for number in range(3):
            lines = [line(chance) for _ in range(count // 3)]
            (folder / part / f"part-{number}.txt").write_text("".join(lines), encoding="utf-8")


def line(chance: random.Random) -> str:
    """One line: a user sees an item at a price, after some others that were clicked on."""
    user, item, price = chance.randrange(USERS), int(ITEMS * chance.random() ** 2), chance.random()
    history = [chance.randrange(ITEMS) for _ in range(chance.randrange(4))]
    click = chance.random() < probability(user, item, price, history)
    slots = [f"click:{click:d}", f"user:u{user}", f"item:i{item}", *(f"history:i{other}" for other in history)]
    return " ".join([*slots, f"price:{price:.3f}"]) + "\n"


def probability(user: int, item: int, price: float, history: list[int]) -> float:
    """That of a click: items of a user's taste are liked, cheap ones, and those like the ones before."""
    likes = user % TASTES == item % TASTES
    similar = sum(other % TASTES == item % TASTES for other in history)
    return 1 / (1 + math.exp(2.0 - 3.0 * likes - similar + 2.0 * price))
