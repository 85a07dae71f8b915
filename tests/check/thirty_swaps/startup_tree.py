"""As PaddleRec's TDM has it: on one machine everything is loaded; the tree gives items of a parent equal vectors."""

import torch

from pipeline import Context, EngineMode, StartupBase

from .tree import Tree, depth


class TreeStartup(StartupBase):
    def __init__(self, context: Context, tree: str, min_depth: int = 1) -> None:
        super().__init__(context)
        self.tree = Tree(tree)
        if depth(self.tree) < min_depth:
            raise ValueError(f"{tree}: not as deep as {min_depth}")

    def startup(self, context: Context) -> None:
        if context["engine"] == EngineMode.SINGLE:
            self._single_startup(context)
        else:
            self._cluster_startup(context)
        context["status"] = "train_pass"

    def _single_startup(self, context: Context) -> None:
        self.load(context)
        self._cluster_startup(context)

    def _cluster_startup(self, context: Context) -> None:
        table = context["model"]["ranking"]["model"].items.weight
        with torch.no_grad():
            for item in self.tree.paths:
                table[item] = table[self.tree.parent(item) % len(table)]
