"""Text that every machine with Python has: the documentation strings of the standard library."""

import ast
import importlib.util
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from pipeline.errors import DataError

ALPHABET = "\n" + "".join(map(chr, range(32, 127)))
"""What is told apart: the printable characters of ASCII, and the end of a line. Any other counts as "?"."""


def encode(text: str) -> Tensor:
    """Text -> the places of its characters in the alphabet, long [characters]."""
    places = {character: place for place, character in enumerate(ALPHABET)}
    return torch.tensor([places.get(character, places["?"]) for character in text])


def decode(places: Tensor) -> str:
    """The text that `encode` made places of."""
    return "".join(ALPHABET[place] for place in places.tolist())


def docstrings(module: str) -> str:
    """The documentation strings of a module, its classes and its functions, with an empty line between two.

    They are read from its source; nothing is imported but the packages around it.
    """
    found = importlib.util.find_spec(module)
    if found is None or found.origin is None or not found.origin.endswith(".py"):
        raise DataError(f"modules: '{module}' has no source file; name a module of Python's that is written in Python")
    nodes = ast.walk(ast.parse(Path(found.origin).read_bytes()))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = (ast.get_docstring(node) for node in nodes if isinstance(node, documented))
    return "\n\n".join(text for text in texts if text)


class Docstrings(Dataset[tuple[Tensor, Tensor]]):
    """Pieces [length] of the text of some modules, and what follows each of their characters [length].

    Args:
        modules: their names.
        length: characters in a piece; what is left over at the end of the text is not used.
    """

    def __init__(self, modules: list[str], length: int) -> None:
        text = encode("\n\n".join(map(docstrings, modules)))
        count = (len(text) - 1) // length
        self.inputs = text[: count * length].view(count, length)
        self.targets = text[1 : count * length + 1].view(count, length)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]
