"""The tree as a part of the model: a checkpoint keeps it with the weights."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .build_tree import Tables, layer_sizes


class Tree(nn.Module):
    """A binary tree whose leaves are the items; empty until ``arrange``.

    Attributes:
        sizes: how many nodes each layer below the root has.
        layers: the nodes layer by layer, [nodes - 2].
        travel: of each item the nodes on the way from the root to its leaf, [items, layers].
        info: of each node its item + 1 or 0, its layer, its parent, and its children, two at most; [nodes, 5].
    """

    layers: Tensor
    travel: Tensor
    info: Tensor

    def __init__(self, items: int) -> None:
        super().__init__()
        self.sizes = layer_sizes(items)
        self.register_buffer("layers", torch.zeros(sum(self.sizes), dtype=torch.long))
        self.register_buffer("travel", torch.zeros(items, len(self.sizes), dtype=torch.long))
        self.register_buffer("info", torch.zeros(sum(self.sizes) + 2, 5, dtype=torch.long))

    @property
    def leaves(self) -> Tensor:
        """The leaf of each item, [items]."""
        return self.travel[:, -1]

    def arrange(self, tables: Tables) -> None:
        """Become the tree of these tables."""
        self.layers.copy_(torch.cat(tables.layers))
        self.travel.copy_(tables.travel)
        self.info.copy_(tables.info)

    def sample(self, items: Tensor, counts: list[int]) -> tuple[Tensor, Tensor]:
        """For each item the nodes on its way, and of each layer as many others as ``counts`` says, drawn by chance.

        Returns:
            Nodes [batch, layers + sum of counts], and for each 1.0 if it is on the way, else 0.0.
        """
        sizes = torch.tensor(self.sizes, device=items.device)
        layer = torch.arange(len(sizes), device=items.device).repeat_interleave(torch.tensor(counts).to(items.device))
        place = torch.empty(len(self.info), dtype=torch.long, device=items.device)
        place[self.layers] = torch.arange(len(self.layers), device=items.device)
        way = self.travel[items]
        drawn = torch.rand(len(items), len(layer), device=items.device) * (sizes[layer] - 1)
        others = (sizes.cumsum(0) - sizes)[layer] + drawn.long()
        # Those from the node on the way on move up by one, so that it is never among them.
        others += others >= place[way][:, layer]
        labels = torch.cat([torch.ones_like(way), torch.zeros_like(others)], dim=1)
        return torch.cat([way, self.layers[others]], dim=1), labels.float()

    def search(self, score: Callable[[Tensor], Tensor], batch: int, width: int) -> tuple[Tensor, Tensor]:
        """Go down from the root, in each layer to the children of the ``width`` best nodes only.

        Args:
            score: called with nodes [batch, n], returns their scores [batch, n].
            batch: how many searches there are.
            width: of the beam.

        Returns:
            The leaves at which it arrives [batch, n] with their scores; where there is no leaf, 0 and -inf.
        """
        nodes = self.layers[: self.sizes[0]].expand(batch, -1)
        for _ in self.sizes[1:]:
            if nodes.shape[1] > width:
                best = score(nodes).masked_fill(nodes == 0, -torch.inf).topk(width).indices
                nodes = nodes.gather(1, best)
            nodes = self.info[nodes][..., 3:].flatten(1)
        return nodes, score(nodes).masked_fill(nodes == 0, -torch.inf)
