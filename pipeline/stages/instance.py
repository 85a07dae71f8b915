"""The default instance stage."""

from __future__ import annotations

import random
import sys

import torch

from pipeline.context import Context
from pipeline.stages.base import InstanceBase


class Instance(InstanceBase):
    """Seeds the random generators of Python, torch, and numpy if it is in use."""

    def instance(self, context: Context) -> None:
        """Seed with the runner's ``seed``; null leaves everything to chance."""
        seed = context["runner"].seed
        if seed is None:
            return
        random.seed(seed)
        torch.manual_seed(seed)
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed(seed)
