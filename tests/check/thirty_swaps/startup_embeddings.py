"""Pretrained item embeddings, from a text file with a name and numbers in each line."""

from pathlib import Path

import torch
from loguru import logger

from pipeline import Context, stages
from pipeline.errors import DataError


class Startup(stages.Startup):
    def __init__(self, context: Context, path: str, freeze: bool = False) -> None:
        super().__init__(context)
        self.path = Path(path)
        self.freeze = freeze

    def startup(self, context: Context) -> None:
        super().startup(context)
        rows = [line.split()[1:] for line in self.path.read_text(encoding="utf-8").splitlines()]
        vectors = torch.tensor([[float(number) for number in row] for row in rows])
        table = context["model"]["ranking"]["model"].items
        if table.weight.shape != vectors.shape:
            raise DataError(f"{self.path}: {tuple(vectors.shape)}, but the table is {tuple(table.weight.shape)}")
        with torch.no_grad():
            table.weight.copy_(vectors)
        table.weight.requires_grad_(not self.freeze)
        logger.info(f"{len(vectors)} embeddings of {context['runner_name']} from {self.path.name}")
