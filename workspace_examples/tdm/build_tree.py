"""Builds a tree over films from their vectors, and writes its four files: ``python build_tree.py FOLDER``.

Node 0 stands for no node and node 1 is the root. The inner nodes follow layer by layer, then one leaf for each item.
"""

from argparse import ArgumentParser
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor


class Tables(NamedTuple):
    """What a tree consists of.

    Attributes:
        layers: the nodes of each layer below the root.
        travel: of each item the nodes on the way from the root to its leaf, [items, layers].
        info: of each node its item + 1 or 0, its layer, its parent, and its children, two at most; [nodes, 5].
    """

    layers: list[Tensor]
    travel: Tensor
    info: Tensor


def layer_sizes(items: int) -> list[int]:
    """How many nodes each layer below the root has: all but the last are full, the last are the leaves."""
    return [*(2**layer for layer in range(1, (items - 1).bit_length())), items]


def build(vectors: Tensor) -> Tables:
    """A tree in which items whose vectors [items, size] are alike are under the same nodes."""
    sizes = layer_sizes(len(vectors))
    nodes = 2 + sum(sizes)
    groups = cluster(vectors, torch.arange(len(vectors)), len(sizes) - 1)
    parents = torch.empty(len(vectors), dtype=torch.long)
    for parent, group in enumerate(groups, len(groups)):
        parents[group] = parent
    ways = [torch.arange(nodes - len(vectors), nodes), *(parents >> step for step in range(len(sizes) - 1))]
    travel = torch.stack(ways[::-1], dim=1)
    layers = list(torch.split(torch.arange(2, nodes), sizes))
    return Tables(layers, travel, node_table(travel, nodes))


def cluster(vectors: Tensor, items: Tensor, steps: int) -> list[Tensor]:
    """Halve the items ``steps`` times, by 2-means with halves of equal size; the groups from left to right."""
    if steps == 0:
        return [items]
    points, middle = vectors[items], (len(items) + 1) // 2
    order = points[:, points.var(dim=0, correction=0).argmax()].argsort(stable=True)
    for _ in range(8):
        direction = points[order[middle:]].mean(dim=0) - points[order[:middle]].mean(dim=0)
        order = (points @ direction).argsort(stable=True)
    halves = items[order[:middle]], items[order[middle:]]
    return [group for half in halves for group in cluster(vectors, half, steps - 1)]


def node_table(travel: Tensor, nodes: int) -> Tensor:
    """The table of the nodes, [nodes, 5], that the ways of all items make."""
    info = torch.zeros(nodes, 5, dtype=torch.long)
    info[travel[:, -1], 0] = torch.arange(1, len(travel) + 1)
    ways = torch.nn.functional.pad(travel, (1, 0), value=1)
    for layer, (above, below) in enumerate(zip(ways.T, travel.T, strict=False), 1):
        info[below, 1], info[below, 2] = layer, above
        for parent, child in sorted(set(zip(above.tolist(), below.tolist(), strict=True))):
            info[parent, 4 if info[parent, 3] else 3] = child
    return info


def node_vectors(vectors: Tensor, travel: Tensor, nodes: int) -> Tensor:
    """The vectors of all nodes, [nodes, size]: a leaf has its item's, an inner node the mean of those below it."""
    size = vectors.shape[1]
    sums, counts = torch.zeros(nodes, size), torch.zeros(nodes, 1)
    for layer in travel.T:
        sums.index_add_(0, layer, vectors)
        counts.index_add_(0, layer, torch.ones(len(vectors), 1))
    return sums / counts.clamp(min=1)


def write(folder: Path, vectors: Tensor, by_chance: bool = False) -> None:
    """Build a tree from the vectors of the items, or by chance, and write its files."""
    tables = build(torch.rand(vectors.shape, generator=torch.Generator().manual_seed(0)) if by_chance else vectors)
    folder.mkdir(parents=True, exist_ok=True)
    write_table(folder / "layer_list.txt", tables.layers)
    write_table(folder / "travel_list.txt", tables.travel)
    write_table(folder / "tree_info.txt", tables.info)
    torch.save({"weight": node_vectors(vectors, tables.travel, len(tables.info))}, folder / "tree_emb.pt")


def write_table(path: Path, rows: Iterable[Tensor]) -> None:
    """Write a line for each row, with commas between its numbers."""
    lines = (",".join(map(str, row.tolist())) + "\n" for row in rows)
    path.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    parser = ArgumentParser(description="Build a tree over the films of MovieLens-100K.")
    parser.add_argument("folder", type=Path, help="where its files are written")
    parser.add_argument("--size", type=int, default=32, help="of the vectors: hyper_parameters.node_emb_size")
    parser.add_argument("--random", action="store_true", help="put the films under the nodes by chance")
    arguments = parser.parse_args()
    # A script belongs to no package, in which `from .data import …` would look.
    data = import_module("data")
    data.fetch()
    write(arguments.folder, data.film_vectors(arguments.size), by_chance=arguments.random)
