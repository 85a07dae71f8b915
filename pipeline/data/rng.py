"""The random generators of a process and of a dataset: seeded for a fetch, and restored after it."""

from __future__ import annotations

import ctypes
import hashlib
import random
import struct
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from pipeline.checkpoint.random_state import plain_state, restore_states, seed_generator, states_of
from pipeline.errors import DataError

# (seed, epoch) of the batches being fetched in this process, the innermost last.
_seeds: list[tuple[int, int]] = []

# Bytes of an MT19937 in memory, of Python's generator and of numpy's: 624 words of 32 bits and the position in them,
# which has as many bits.
_MT19937_SIZE = 4 * (624 + 1)

# The object whose methods the functions of ``random`` are.
_PYTHON: Any = random._inst


def mix(seed: int, *parts: int | str) -> int:
    """A seed of 63 bits made of ``seed`` and ``parts``: neighbouring epochs share nothing."""
    return int.from_bytes(_digest(seed, *parts)[:8], "big") >> 1


def _digest(*parts: int | str) -> bytes:
    """Return the SHA-256 of the parts with colons between them."""
    hashed = _hash_of_prefix(*parts[:-1]).copy()
    hashed.update(str(parts[-1]).encode())
    return hashed.digest()


# Of the batches of an epoch only the last part differs.
@lru_cache(maxsize=8, typed=True)
def _hash_of_prefix(*parts: int | str) -> hashlib._Hash:
    return hashlib.sha256("".join(f"{part}:" for part in parts).encode())


def permutation(count: int, generator: torch.Generator) -> Tensor:
    """What ``torch.randperm`` draws, in 4 bytes a number where they suffice."""
    return torch.randperm(count, generator=generator, dtype=torch.int32 if count < 2**31 else torch.int64)


# Two of 64 bits and one of 32.
_THREE_SEEDS = struct.Struct(">QQI")


def seed_generators(seed: int, *parts: int | str) -> None:
    """Seed python's ``random``, torch's generator of the CPU and, if it is imported, numpy's.

    Each gets bytes of its own: they are the same generator, and from one seed they would draw the same.
    """
    of_python, of_torch, of_numpy = _THREE_SEEDS.unpack_from(_digest(seed, *parts))
    random.seed(of_python)
    # torch.manual_seed would seed the GPU's as well, which nobody gives back, and takes 100 times as long.
    torch.default_generator.manual_seed(of_torch)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(of_numpy)


class NumpyState(NamedTuple):
    """The state of numpy's global generator.

    Attributes:
        bit_generator: the object that draws; None for numpy before 1.24, which does not name it.
        state: the bytes of an MT19937, or what ``numpy.random.get_state`` returns, with lists in place of arrays.
        normal: the normal that ``numpy.random`` has drawn and keeps for the next call, if ``state`` has bytes.
    """

    bit_generator: Any
    state: Any
    normal: float | None = None


class States(NamedTuple):
    """The states of the global generators of the CPU.

    Attributes:
        python: the bytes of the generator and its ``gauss_next``, or what ``random.getstate`` returns.
        torch: uint8.
        numpy: None if numpy is not imported.
    """

    python: Any
    torch: Tensor
    numpy: NumpyState | None


def get_states() -> States:
    """Return the states of the generators."""
    states = _take_states()
    if states.numpy:
        _set_numpy_state(sys.modules["numpy"].random, states.numpy)
    return states


def set_states(states: States) -> None:
    """Put the generators into these states."""
    _set_python_state(states.python)
    torch.default_generator.set_state(states.torch)
    if states.numpy:
        _set_numpy_state(sys.modules["numpy"].random, states.numpy)


def _take_states() -> States:
    """Return the states of the generators; numpy's can be seeded after it, and has to be seeded or restored."""
    numpy = sys.modules.get("numpy")
    of_numpy = _take_numpy_state(numpy.random) if numpy else None
    return States(_python_state(), torch.default_generator.get_state(), of_numpy)


def _python_state() -> Any:
    memory = _python_memory()
    return random.getstate() if memory is None else (memory.raw, _PYTHON.gauss_next)


def _set_python_state(state: Any) -> None:
    memory = _python_memory()
    if memory is None:
        random.setstate(state)
    else:
        memory.raw, _PYTHON.gauss_next = state


@cache
def _python_memory() -> Any:
    """The memory of Python's generator, to copy it in 0.2 µs; ``getstate`` makes 625 numbers of it, in 10 µs.

    Returns:
        An array of ctypes; None where the memory does not have the layout of CPython.
    """
    owner: Any = random.Random.__base__
    if sys.implementation.name != "cpython" or owner.__basicsize__ < object.__basicsize__ + _MT19937_SIZE:
        return None
    memory = (ctypes.c_char * _MT19937_SIZE).from_address(id(_PYTHON) + object.__basicsize__)
    *words, position = random.getstate()[1]
    return memory if memory.raw == struct.pack("@625I", position, *words) else None


def _take_numpy_state(numpy_random: Any) -> NumpyState:
    get_bit_generator = getattr(numpy_random, "get_bit_generator", None)
    if get_bit_generator is None:
        return NumpyState(None, plain_state(numpy_random.get_state()))
    bit_generator = get_bit_generator()
    memory = _memory_of(bit_generator)
    if memory is None:
        saved = NumpyState(bit_generator, plain_state(numpy_random.get_state(legacy=False)))
        _replace_other_bit_generator(numpy_random)
        return saved
    state = memory.raw
    # Normals are drawn in pairs, and the second one is kept outside of the bit generator. Only get_state tells whether
    # there is one, but it takes 46 µs. A draw that leaves the bit generator as it is has returned the kept one.
    normal = numpy_random.standard_normal()
    return NumpyState(bit_generator, state, normal if memory.raw == state else None)


def _set_numpy_state(numpy_random: Any, saved: NumpyState) -> None:
    if saved.bit_generator is None:
        numpy_random.set_state(saved.state)
        return
    # This also forgets the normal that is kept.
    numpy_random.set_bit_generator(saved.bit_generator)
    if not isinstance(saved.state, bytes):
        numpy_random.set_state(saved.state)
        return
    if saved.normal is not None:
        numpy_random.set_state({**_ANY_MT19937, "has_gauss": 1, "gauss": saved.normal})
    memory = _memory_of(saved.bit_generator)
    with saved.bit_generator.lock:
        memory.raw = saved.state


# A state that is overwritten. numpy takes a list in 5 µs, and its own array in 46.
_ANY_MT19937 = {"bit_generator": "MT19937", "state": {"key": [0] * 624, "pos": 0}}


# A process has few of them. Each is kept here with its memory, so that neither is freed while it may be used.
@lru_cache(maxsize=8)
def _memory_of(bit_generator: Any) -> Any:
    """The memory of an MT19937, to copy it in 0.2 µs; numpy takes 46 µs for it, number by number.

    Returns:
        An array of ctypes; None for bit generators of other kinds, and if the memory does not have the expected layout.
    """
    state = bit_generator.state
    if state["bit_generator"] != "MT19937":
        return None
    memory = (ctypes.c_char * _MT19937_SIZE).from_address(bit_generator.ctypes.state_address)
    expected = state["state"]["key"].tobytes() + state["state"]["pos"].to_bytes(4, sys.byteorder)
    return memory if memory.raw == expected else None


def _replace_other_bit_generator(numpy_random: Any) -> None:
    """Replace numpy's global bit generator if it is not an MT19937, the only kind that ``numpy.random.seed`` takes."""
    get_bit_generator = getattr(numpy_random, "get_bit_generator", None)
    if get_bit_generator and not isinstance(get_bit_generator(), numpy_random.MT19937):
        numpy_random.set_bit_generator(_replacement(numpy_random.MT19937))


@cache
def _replacement(kind: Any) -> Any:
    return kind()


def seeding(
    seed: int | None, epoch: int, *parts: int | str, own: Mapping[str, Any] | None = None
) -> AbstractContextManager[None]:
    """Seed the generators from the arguments until the block ends; then restore them.

    A worker of a DataLoader does not restore them: all that it draws it draws in such blocks, and seeds them for each.

    Args:
        seed: the run's; None leaves the generators alone.
        epoch: from 0.
        parts: what tells this block from the others of the epoch.
        own: further generators, by name, which are seeded from their names as well.
    """
    return _NOT_SEEDED if seed is None else _SeededBlock(seed, epoch, parts, own)


_NOT_SEEDED = nullcontext()


class _SeededBlock:
    """The block of ``seeding``; as a generator function with ``contextmanager`` it would take 1 µs more."""

    __slots__ = ("epoch", "own", "own_states", "parts", "seed", "states")

    def __init__(self, seed: int, epoch: int, parts: tuple[int | str, ...], own: Mapping[str, Any] | None) -> None:
        self.seed = seed
        self.epoch = epoch
        self.parts = parts
        self.own = own
        self.states: States | None = None
        self.own_states: Mapping[str, Any] = {}

    def __enter__(self) -> None:
        # A block within another one restores the generators of that one, also in a worker.
        if _seeds or get_worker_info() is None:
            self.states = _take_states()
            if self.own:
                self.own_states = states_of(self.own)
        elif numpy := sys.modules.get("numpy"):
            _replace_other_bit_generator(numpy.random)
        seed_generators(self.seed, self.epoch, *self.parts)
        if self.own:
            for name, generator in self.own.items():
                seed_generator(generator, mix(self.seed, self.epoch, *self.parts, name))
        _seeds.append((self.seed, self.epoch))

    def __exit__(self, *_: object) -> None:
        _seeds.pop()
        if self.states:
            set_states(self.states)
        if self.own:
            restore_states(self.own, self.own_states)


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
        self.states: States | None = None
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
                self.states = _take_states()
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
        remedy = "call it in a dataset, and give make_loader(dataset, seed=...) or the runner a seed"
        raise DataError(
            f"{what}; {remedy}; a dataset that calls it uses random numbers, so it must not declare otherwise"
        )
    seed, epoch = _seeds[-1]
    return torch.Generator().manual_seed(mix(seed, epoch, "sample", index))
