"""The random generators of a process and of a dataset: seeded for a fetch, and restored after it."""

from __future__ import annotations

import ctypes
import hashlib
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pipeline.checkpoint.random_state import restore_states, seed_generator, states_of
from pipeline.errors import DataError

# (seed, epoch) of the batches being fetched in this process, the innermost last.
_seeds: list[tuple[int, int]] = []

# Bytes of numpy's generator in memory: 624 words of 32 bits; then comes its place in them, as many bits.
_SIZE = 4 * (624 + 1)


def mix(seed: int, *parts: int | str) -> int:
    """A seed of 63 bits made of ``seed`` and ``parts``: neighbouring epochs share nothing."""
    return int.from_bytes(_digest(seed, *parts)[:8], "big") >> 1


def _digest(*parts: int | str) -> bytes:
    return hashlib.sha256(":".join(map(str, parts)).encode()).digest()


def permutation(count: int, generator: torch.Generator) -> Tensor:
    """What ``torch.randperm`` draws, in 4 bytes a number where they suffice."""
    return torch.randperm(count, generator=generator, dtype=torch.int32 if count < 2**31 else torch.int64)


def seed_generators(seed: int, *parts: int | str) -> None:
    """Seed python's ``random``, torch's generator of the CPU and, if it is imported, numpy's.

    Each gets bytes of its own: they are the same generator, and from one seed they would draw the same.
    """
    digest = _digest(seed, *parts)
    random.seed(int.from_bytes(digest[:8], "big"))
    # torch.manual_seed would seed the GPU's as well, which nobody gives back, and takes 100 times as long.
    torch.default_generator.manual_seed(int.from_bytes(digest[8:16], "big"))
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(int.from_bytes(digest[16:20], "big"))


def get_states() -> tuple[Any, ...]:
    """The states of the generators."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), torch.default_generator.get_state(), numpy and _numpy_state(numpy)


def _numpy_state(numpy: Any) -> Any:
    """What ``numpy.random.get_state`` gives; its memory alone, at a tenth of the time, where that says all."""
    address = _address(numpy)
    if address is None:
        return numpy.random.get_state()
    state = ctypes.string_at(address, _SIZE)
    # Normals come in pairs, and memory does not show whether the second one of a pair is kept for the next who draws.
    normal = numpy.random.standard_normal()
    if ctypes.string_at(address, _SIZE) == state:
        kept = (*numpy.random.get_state()[:3], 1, normal)
        numpy.random.set_state(kept)
        return kept
    _restore_memory(numpy, address, state)
    return state


def _address(numpy: Any) -> int | None:
    """Where numpy's generator has its state; None where it is one of another kind, or numpy does not say (before 1.24)."""
    get_bit_generator = getattr(numpy.random, "get_bit_generator", None)
    return _checked_address(get_bit_generator()) if get_bit_generator else None


@cache
def _checked_address(generator: Any) -> int | None:
    state = generator.state
    if state["bit_generator"] != "MT19937":
        return None
    address: int = generator.ctypes.state_address
    expected = state["state"]["key"].tobytes() + state["state"]["pos"].to_bytes(4, sys.byteorder)
    return address if ctypes.string_at(address, _SIZE) == expected else None


def _restore_memory(numpy: Any, address: int, state: bytes) -> None:
    numpy.random.seed(0)  # forgets the normal that is kept
    with numpy.random.get_bit_generator().lock:
        ctypes.memmove(address, state, _SIZE)


def set_states(states: tuple[Any, ...]) -> None:
    """Put the generators into these states."""
    of_python, of_torch, of_numpy = states
    random.setstate(of_python)
    torch.default_generator.set_state(of_torch)
    if of_numpy:
        numpy = sys.modules["numpy"]
        address = _address(numpy) if isinstance(of_numpy, bytes) else None
        if address is None:
            numpy.random.set_state(of_numpy)
        else:
            _restore_memory(numpy, address, of_numpy)


@contextmanager
def seeding(seed: int | None, epoch: int, *parts: int | str, own: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Seed the generators from the arguments until the block ends; then restore them.

    Args:
        seed: the run's; None leaves the generators alone.
        epoch: from 0.
        parts: what tells this block from the others of the epoch.
        own: further generators, by name, which are seeded from their names as well.
    """
    if seed is None:
        yield
        return
    states = get_states()
    own_states = states_of(own) if own else {}
    seed_generators(seed, epoch, *parts)
    if own:
        for name, generator in own.items():
            seed_generator(generator, mix(seed, epoch, *parts, name))
    _seeds.append((seed, epoch))
    try:
        yield
    finally:
        _seeds.pop()
        set_states(states)
        if own:
            restore_states(own, own_states)


class RngStream:
    """The same over several blocks: each continues the random numbers of the one before it.

    Args:
        seed: the run's; None leaves the generators alone.
        epoch: from 0.
        parts: what tells these draws from the others of the epoch.
        own: further generators, by name.

    Attributes:
        states: those of the generators after the last block; None before the first, or without a seed.
        own_states: their states after the last block.
    """

    def __init__(self, seed: int | None, epoch: int, *parts: int | str, own: Mapping[str, Any] | None = None) -> None:
        self.seed, self.epoch, self.parts = seed, epoch, parts
        self.states: tuple[Any, ...] | None = None
        self.own: Mapping[str, Any] = own or {}
        self.own_states: Mapping[str, Any] = {}

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """One block; after it the generators are restored."""
        with seeding(self.seed, self.epoch, *self.parts, own=self.own):
            if self.states:
                set_states(self.states)
            if self.own and self.own_states:
                restore_states(self.own, self.own_states)
            yield
            if self.seed is not None:
                self.states = get_states()
            if self.own and self.seed is not None:
                self.own_states = states_of(self.own)

    def adopt(self, own: Mapping[str, Any], states: Mapping[str, Any]) -> None:
        """Replace the further generators, within a block.

        Args:
            own: those of a dataset that has just been made.
            states: those with which they continue; the others are seeded.
        """
        if self.seed is None:
            return
        self.own = own
        for name, generator in own.items():
            seed_generator(generator, mix(self.seed, self.epoch, *self.parts, name))
        restore_states(own, states)


def sample_generator(index: int) -> torch.Generator:
    """A generator for one sample: seeded from (seed, epoch, index), so whatever is drawn for others changes nothing.

    For the ``__getitem__`` of a dataset, whose draws from it are the same at any batch size and order of samples::

        def __getitem__(self, index):
            return self.x[index] + torch.randn(3, generator=sample_generator(index))

    Args:
        index: of the sample in the dataset.

    Raises:
        DataError: no batch is being fetched, or by a loader that has no seed.
    """
    if not _seeds:
        what = f"sample_generator({index}): no loader with a seed is fetching a batch"
        raise DataError(f"{what}; call it in a dataset, and give make_loader(dataset, seed=...) or the runner a seed")
    seed, epoch = _seeds[-1]
    return torch.Generator().manual_seed(mix(seed, epoch, "sample", index))
