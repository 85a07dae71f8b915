"""A tree of items, read from a file with a line for each leaf: the item, and the nodes above it."""

from pathlib import Path


class Tree:
    """Item -> the nodes from the root to its leaf."""

    def __init__(self, path: str) -> None:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        rows = [[int(word) for word in line.split()] for line in lines]
        self.paths = {row[0]: row[1:] for row in rows}

    def parent(self, item: int) -> int:
        return self.paths[item][-1]


def depth(tree: Tree) -> int:
    """How many nodes are above a leaf."""
    return max(map(len, tree.paths.values()))
