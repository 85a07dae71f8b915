"""The runner stages: one trains the tree and the model by turns, the other compares the search with what it replaces."""

import torch
from loguru import logger
from torch import Tensor

from pipeline import Context, Phase, stages

from .model import Model


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
            model: Model = context["model"]["tdm"].model
            model.rebuild_tree()
            logger.info(f"epoch {epoch} begins with a new tree")
        super().train_epoch(context, epoch)


class Retrieval(stages.Runner):
    """Reports the recall of searches in the tree, of scoring all films, and of the most popular films.

    Args:
        context: the run's.
        k: how many films are recommended to a user.
        beam_widths: of the searches.
    """

    def __init__(self, context: Context, k: int, beam_widths: list[int]) -> None:
        super().__init__(context)
        self.k, self.beam_widths = k, beam_widths

    def evaluate(self, context: Context, phase: Phase) -> dict[str, float]:
        model: Model = phase.model
        model.modules.eval()
        history, last, seen = (part.to(context["device"]) for part in context["dataset"]["valid_data"].dataset.tensors)
        parts = list(zip(history.split(64), seen.split(64), strict=True))
        with torch.no_grad():
            scores = {
                f"beam_{width}": torch.cat([model.search(*part, width) for part in parts]) for width in self.beam_widths
            }
            scores["all_films"] = torch.cat([model.score_all(part) for part, _ in parts])
        scores["popular_films"] = seen.sum(dim=0).float().expand(len(seen), -1)
        return {f"recall_of_{name}": self.recall(of_films, last, seen) for name, of_films in scores.items()}

    def recall(self, scores: Tensor, last: Tensor, seen: Tensor) -> float:
        """The share of the films that users saw last among the ``k`` best scored that they had not seen before."""
        best = scores.masked_fill(seen, -torch.inf).topk(self.k)
        found = last.gather(1, best.indices) & best.values.isfinite()
        return (found.sum(dim=1) / last.sum(dim=1)).mean().item()
