"""What the tests of data share: a dataset and a stream that draw from the global random generators."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest

NOISY = """
    import random
    import torch
    from torch.utils.data import IterableDataset

    def draws():
        return random.random(), torch.rand(()).item()

    class Noisy:
        def __init__(self, size):
            self.size = size
        def __len__(self):
            return self.size
        def __getitem__(self, index):
            return index, *draws()

    def noisy_collate(samples):
        return [*samples, draws()]

    class Shuffling(IterableDataset):
        def __init__(self, size):
            self.size = size
        def __iter__(self):
            order = list(range(self.size))
            random.shuffle(order)
            for index in order:
                yield index, *draws()

    class Resumable(IterableDataset):
        def __init__(self, size):
            self.size, self.given = size, 0
        def __iter__(self):
            while self.given < self.size:
                self.given += 1
                yield self.given - 1, *draws()
            self.given = 0
        def state_dict(self):
            return {"given": self.given}
        def load_state_dict(self, state):
            self.given = state["given"]
        def set_epoch(self, epoch):
            self.epoch = epoch
"""


@pytest.fixture
def noisy(workspace: Callable[..., object], tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module that spawned workers can import, too."""
    folder = workspace({"noisy_data.py": NOISY}, "importable")
    monkeypatch.syspath_prepend(folder)
    yield importlib.import_module("noisy_data")
    del sys.modules["noisy_data"]
