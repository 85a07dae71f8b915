"""Writes the clicks once as CSV, as other tools want them."""

import csv
from pathlib import Path

from loguru import logger

from pipeline import Context, InstanceBase

from .data import Clicks


class PrepareClicks(InstanceBase):
    def __init__(self, context: Context, file: str, sizes: dict[str, int]) -> None:
        super().__init__(context)
        self.folder = Path(context["run_dir"]) / "prepared"
        self.file, self.sizes = file, sizes

    def instance(self, context: Context) -> None:
        self.folder.mkdir(exist_ok=True)
        for number, (name, size) in enumerate(self.sizes.items()):
            self._write(self.folder / f"{name}_{self.file}", Clicks(number, size))
        context["prepared"] = self.folder
        logger.info(f"{len(self.sizes)} files for {context['runner_name']}")

    def _write(self, path: Path, clicks: Clicks) -> None:
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(
                [*pair.tolist(), int(label)] for pair, label in zip(clicks.pairs, clicks.labels, strict=True)
            )
