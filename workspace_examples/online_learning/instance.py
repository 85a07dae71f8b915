"""The instance stage makes the data: clicks of two days, in windows of six hours, as lines of slots."""

from __future__ import annotations

import math
import random
from datetime import datetime, timedelta
from pathlib import Path

from pipeline import Context
from pipeline.stages import Instance as DefaultInstance

START, WINDOWS, HOURS = datetime(2026, 11, 1), 8, 6
LINES, USERS, ITEMS = 4000, 50, 40


class Instance(DefaultInstance):
    """Seeds, as the default does, and writes the windows into the run directory."""

    def instance(self, context: Context) -> None:
        """Write ``logs/<day>/<hour>/part-0`` and then, beside it, ``<hour>.done``; the same lines each time."""
        super().instance(context)
        for window in range(WINDOWS):
            begin = START + timedelta(hours=window * HOURS)
            folder = context["run_dir"] / "logs" / f"{begin:%Y%m%d}" / f"{begin:%H}"
            write_window(folder, random.Random(window))
            folder.with_name(f"{folder.name}.done").touch()


def write_window(folder: Path, chance: random.Random) -> None:
    """Write the lines of one window."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for _ in range(LINES):
        user, item = chance.randrange(USERS), chance.randrange(ITEMS)
        click = chance.random() < probability(user, item)
        lines.append(f"click:{click:d} user:{user} item:{item}\n")
    (folder / "part-0").write_text("".join(lines), encoding="utf-8")


def probability(user: int, item: int) -> float:
    """That of a click: items with the user's remainder by 4 are liked."""
    return 1 / (1 + math.exp(1.5 - 3.0 * (user % 4 == item % 4)))
