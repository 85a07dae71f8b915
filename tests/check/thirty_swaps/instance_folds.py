"""Cross-validation: which samples belong to which fold, kept beside the run."""

import json

import torch

import pipeline
from pipeline import stages


class Folds(stages.Instance):
    def __init__(self, context: pipeline.Context, count: int, fold: int) -> None:
        super().__init__(context)
        if not 0 <= fold < count:
            raise ValueError(f"instance_args.fold is {fold}; it must be 0 to {count - 1}")
        self.count, self.fold = count, fold

    def instance(self, context: pipeline.Context) -> None:
        super().instance(context)
        order = torch.randperm(64, generator=torch.Generator().manual_seed(0)).tolist()
        held_out = order[self.fold :: self.count]
        context["folds"] = {"valid": held_out, "train": [index for index in order if index not in held_out]}
        with open(context["run_dir"] / "folds.json", "w", encoding="utf-8") as file:
            json.dump(context["folds"], file)
