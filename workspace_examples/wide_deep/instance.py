"""The instance stage makes the data: who clicks on which app, as lines of slots."""

from __future__ import annotations

import math
import random
from itertools import product
from pathlib import Path

from pipeline import Context, run_on_main
from pipeline.stages import Instance as DefaultInstance

USERS, APPS, KINDS = 150, 50, 3
LINES = {"train": 40_000, "valid": 6_000}
# Who has the first of two apps wants the second one, for no reason that another pair would tell.
TOGETHER = set(random.Random("pairs").sample(list(product(range(APPS), repeat=2)), APPS * APPS // 5))


class Instance(DefaultInstance):
    """Seeds, as the default does, and writes the lines into the run directory."""

    def instance(self, context: Context) -> None:
        """Write ``data/train`` and ``data/valid``, with the same lines each time."""
        super().instance(context)
        run_on_main(write_lines, kwargs={"folder": context["run_dir"] / "data"})


def write_lines(folder: Path) -> None:
    """Write a file of each part; in every one, each line has a click that is drawn from its probability."""
    for part, count in LINES.items():
        chance = random.Random(part)
        (folder / part).mkdir(parents=True, exist_ok=True)
        lines = [line(chance) for _ in range(count)]
        (folder / part / "part-0.txt").write_text("".join(lines), encoding="utf-8")


def line(chance: random.Random) -> str:
    """One line: a user who has installed some apps sees another one at a price. Its id has 63 bits, as a hash has."""
    user, app, price = chance.randrange(USERS), chance.randrange(APPS), chance.random()
    installed = [chance.randrange(APPS) for _ in range(chance.randrange(1, 4))]
    click = chance.random() < probability(user, app, installed, price)
    slots = [f"id:{chance.getrandbits(63)}", f"click:{click:d}", f"user_id:u{user}", f"app:a{app}"]
    return " ".join([*slots, *(f"installed:a{other}" for other in installed), f"price:{price:.3f}"]) + "\n"


def probability(user: int, app: int, installed: list[int], price: float) -> float:
    """That of a click: apps of the user's kind are liked, cheap ones, and those that go together with an installed one."""
    likes = user % KINDS == app % KINDS
    together = sum((other, app) in TOGETHER for other in installed)
    return 1 / (1 + math.exp(1.5 - 2.0 * likes - 1.5 * together + 2.0 * price))
