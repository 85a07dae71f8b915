"""Weights of an older model: names were others, and the head is left out."""

import torch
from loguru import logger

from pipeline import Context, stages
from pipeline.errors import CheckpointError


class Startup(stages.Startup):
    def __init__(self, context: Context, path: str, renamed: dict[str, str]) -> None:
        super().__init__(context)
        self.path = path
        self.renamed = renamed

    def startup(self, context: Context) -> None:
        super().startup(context)
        weights = torch.load(self.path, map_location=context["device"], weights_only=True)
        for old, new in self.renamed.items():
            weights = {key.replace(old, new): value for key, value in weights.items()}
        model = context["model"]["ranking"]["model"]
        kept = {key: value for key, value in weights.items() if not key.startswith("head.")}
        wrong = model.load_state_dict(kept, strict=False)
        if wrong.unexpected_keys:
            raise CheckpointError(f"{self.path}: the model has no {wrong.unexpected_keys}; see startup_args.renamed")
        logger.info(f"new: {wrong.missing_keys}")
