"""Loads the tree into the model, as the startup stage of PaddleRec's TDM does."""

from pathlib import Path

import torch
from loguru import logger
from safetensors.torch import load_file
from torch import Tensor

from pipeline import Context, EngineMode, stages
from pipeline.errors import DataError

TREE = ("tree.layers", "tree.travel", "tree.info", "scorer.embeddings.weight")


class Startup(stages.Startup):
    """A single process loads the tree from its files; of several, rank 0 does, or takes it alone from ``init_model_path``.

    Args:
        context: the run's.
        tree_layer_path: a line for each layer below the root, with its nodes.
        tree_travel_path: a line for each item, with the nodes on the way to it.
        tree_info_path: a line for each node: item + 1 or 0, layer, parent, children.
        tree_emb_path: the vectors of the nodes.
    """

    def __init__(
        self, context: Context, tree_layer_path: str, tree_travel_path: str, tree_info_path: str, tree_emb_path: str
    ) -> None:
        super().__init__(context)
        self.tree_layer_path, self.tree_travel_path = tree_layer_path, tree_travel_path
        self.tree_info_path, self.tree_emb_path = tree_info_path, tree_emb_path

    def startup(self, context: Context) -> None:
        if context["engine"] == EngineMode.SINGLE:
            self._single_startup(context)
        else:
            self._cluster_startup(context)
        context["status"] = "train_pass"

    def _single_startup(self, context: Context) -> None:
        """A model that was trained before brings its tree along; else the files have it."""
        super().startup(context)
        if context["runner"].init_model_path or context["is_infer"]:
            return
        tree = self.read_files()
        for phase in context["model"].values():
            phase.brain.modules.load_state_dict(tree, strict=False)

    def _cluster_startup(self, context: Context) -> None:
        """All processes need the same tree: rank 0 reads it. The other weights are as the model's constructor makes them."""
        path, world = context["runner"].init_model_path, context["world"]
        for name, phase in context["model"].items():
            tree: dict[str, Tensor] = {}
            if world.is_main and path:
                weights = load_file(Path(str(path)) / f"{name}.safetensors")
                tree = {tensor: weights[tensor] for tensor in TREE}
                logger.info(f"the tree of {name} is loaded from {path}")
            elif world.is_main:
                tree = self.read_files()
            phase.brain.modules.load_state_dict(world.broadcast(tree), strict=False)

    def read_files(self) -> dict[str, Tensor]:
        """The tree that the files hold, by the names that it has in the model."""
        layers, travel, info = map(read_table, (self.tree_layer_path, self.tree_travel_path, self.tree_info_path))
        embeddings = torch.load(self.tree_emb_path, weights_only=True)["weight"]
        logger.info(f"a tree of {len(layers)} layers and {len(travel)} items is loaded from {self.tree_layer_path}")
        return dict(zip(TREE, (torch.cat(layers), torch.stack(travel), torch.stack(info), embeddings), strict=True))


def read_table(path: str) -> list[Tensor]:
    """The numbers of each line of a file.

    Raises:
        DataError: it is not there.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError as error:
        raise DataError(f"{path}: is not there; run `python build_tree.py {Path(path).parent}`") from error
    return [torch.tensor([int(node) for node in line.split(",")]) for line in lines]
