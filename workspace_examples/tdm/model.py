"""TDM: Zhu et al., "Learning Tree-based Deep Model for Recommender Systems", KDD 2018."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeline import Brain, Stage

from .build_tree import build, node_vectors
from .tree import Tree


class Scorer(nn.Module):
    """How much a user will like what is below a node.

    Args:
        nodes: how many the tree has.
        size: of their embeddings.
        history: how many films of a user it looks at.
    """

    def __init__(self, nodes: int, size: int, history: int) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(nodes, size, padding_idx=0)
        self.bias = nn.Embedding(nodes, 1, _weight=torch.zeros(nodes, 1))
        self.query = nn.Linear(size, size, bias=False)
        self.recency = nn.Parameter(torch.zeros(history))
        self.user = nn.Linear(size, size)

    def forward(self, history: Tensor, nodes: Tensor) -> Tensor:
        """The leaves of the films that were seen, 0 for none [batch, history], and nodes [batch, n] -> logits [batch, n]."""
        seen, candidates = self.embeddings(history), self.embeddings(nodes)
        attention = self.query(candidates) @ seen.mT / seen.shape[2] ** 0.5 + self.recency
        attention = attention.masked_fill((history == 0)[:, None], -1e9).softmax(dim=2)
        logits: Tensor = (self.user(attention @ seen) * candidates).sum(dim=2) + self.bias(nodes).squeeze(2)
        return logits


class Model(Brain):
    """Trains on the nodes on the way to the film that was seen, and on others of each layer; searches the tree for films.

    The constructor's arguments come from ``hyper_parameters`` by name.

    Args:
        leaf_node_nums: how many films there are.
        node_emb_size: length of a node's vector.
        history: how many films of a user it looks at.
        neg_sampling_list: how many other nodes it trains on, for each layer below the root.
        beam_width: how many nodes of a layer a search in a validation goes on from.
    """

    def __init__(
        self, leaf_node_nums: int, node_emb_size: int, history: int, neg_sampling_list: list[int], beam_width: int
    ) -> None:
        self.tree = Tree(leaf_node_nums)
        self.scorer = Scorer(len(self.tree.info), node_emb_size, history)
        super().__init__({"tree": self.tree, "scorer": self.scorer})
        self.neg_sampling_list, self.beam_width = neg_sampling_list, beam_width

    def compute_forward(self, batch: tuple[Tensor, ...], stage: Stage) -> tuple[Tensor, Tensor] | Tensor:
        """In training, the logits of some nodes and their labels; else the scores of all films, as ``search``."""
        if stage is not Stage.TRAIN:
            history, _, seen = batch
            return self.search(history, seen, self.beam_width)
        history, film = batch
        nodes, labels = self.tree.sample(film, self.neg_sampling_list)
        return self.score(history, nodes), labels

    def compute_objectives(
        self, predictions: tuple[Tensor, Tensor] | Tensor, batch: tuple[Tensor, ...], stage: Stage
    ) -> Tensor:
        """The binary cross-entropy over the sampled nodes; in an evaluation, over all leaves."""
        if isinstance(predictions, Tensor):
            predictions = self.score_all(batch[0]), batch[1].float()
        return functional.binary_cross_entropy_with_logits(*predictions)

    def target(self, batch: tuple[Tensor, ...]) -> Tensor:
        """What metrics compare the scores of films with: which of them the user sees next, [batch, films]."""
        return batch[1]

    def search(self, history: Tensor, seen: Tensor, width: int) -> Tensor:
        """The scores of the films [batch, films] that a beam finds; -inf for others, and for those that were seen."""
        leaves, scores = self.tree.search(partial(self.score, history), len(history), width)
        nodes = torch.full((len(history), len(self.tree.info)), -torch.inf, device=scores.device)
        return nodes.scatter(1, leaves, scores)[:, self.tree.leaves].masked_fill(seen, -torch.inf)

    def score_all(self, history: Tensor) -> Tensor:
        """The logits of all films, [batch, films]."""
        return self.score(history, self.tree.leaves.expand(len(history), -1))

    def score(self, history: Tensor, nodes: Tensor) -> Tensor:
        """The logits [batch, n] of nodes [batch, n]; in the history [batch, history] a film is its number + 1, or 0."""
        leaves = functional.pad(self.tree.leaves, (1, 0))[history]
        logits: Tensor = self.scorer(leaves, nodes)
        return logits

    @torch.no_grad()
    def rebuild_tree(self) -> None:
        """Build a new tree of what was learnt of the films: a leaf keeps its vector, an inner node has a mean of leaves."""
        vectors = self.scorer.embeddings.weight[self.tree.leaves].cpu()
        tables = build(functional.normalize(vectors))
        self.tree.arrange(tables)
        self.scorer.embeddings.weight.copy_(node_vectors(vectors, tables.travel, len(tables.info)))
