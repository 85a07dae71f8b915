"""The runner stages: one trains the tree and the model by turns, the other compares the search with what it replaces."""

from typing import Any

import torch
from loguru import logger
from torch import Tensor

from pipeline import Context, stages


class JointTraining(stages.Runner):
    """Between epochs, builds a new tree from what the model has learnt of the films; the model goes on with it.

    The tree is part of the model, so a checkpoint keeps it.

    Args:
        context: the run's.
        tree_interval: after how many epochs there is a new tree; null keeps the first one.
    """

    def __init__(self, context: Context, tree_interval: int | None) -> None:
        super().__init__(context)
        self.tree_interval = tree_interval

    def train_epoch(self, context: Context, epoch: int) -> None:
        # An epoch that is resumed has its tree from the checkpoint.
        if self.tree_interval and epoch and epoch % self.tree_interval == 0 and not context.resuming:
            context["model"]["tdm"].model.rebuild_tree()
            logger.info(f"epoch {epoch} begins with a new tree")
        super().train_epoch(context, epoch)


class Retrieval(stages.Runner):
    """Reports the recall of the search in the tree, of scoring all films, and of the most popular films.

    Args:
        context: the run's.
        k: how many films are recommended.
    """

    def __init__(self, context: Context, k: int) -> None:
        super().__init__(context)
        self.k = k

    def evaluate(self, context: Context, phase: Any) -> dict[str, float]:
        model = phase.model
        history, last, seen = (part.to(context["device"]) for part in context["dataset"]["valid_data"].dataset.tensors)
        model.modules.eval()
        with torch.no_grad():
            all_films = torch.cat([model.score_all(part) for part in history.split(64)])
        popularity = seen.sum(dim=0).expand(len(seen), -1)
        return {
            **super().evaluate(context, phase),
            "recall_of_all_films": self.recall(all_films, last, seen),
            "recall_of_popular_films": self.recall(popularity.float(), last, seen),
        }

    def recall(self, scores: Tensor, last: Tensor, seen: Tensor) -> float:
        """The share of the films that users saw last among the ``k`` best scored ones that they had not seen before."""
        best = scores.masked_fill(seen, -torch.inf).topk(self.k).indices
        return (last.gather(1, best).sum(dim=1) / last.sum(dim=1)).mean().item()
