"""The random generators, seeded and given back."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from pipeline.checkpoint.random_state import cpu_random_state, restore_cpu_random_state
from pipeline.data.rng import RngStream, get_states, mix, permutation, sample_generator, seed_generators, seeding
from pipeline.errors import DataError


def draw() -> tuple[float, float]:
    return random.random(), torch.rand(()).item()


def by_hand(text: str) -> tuple[float, float]:
    """The first draws after seeding from a text."""
    digest = hashlib.sha256(text.encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[8:16], "big"))
    return random.Random(int.from_bytes(digest[:8], "big")).random(), torch.rand((), generator=generator).item()


@pytest.fixture(params=["as it is", "before 1.24"])
def numpy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Numpy, that of the `dev` extra, or with what it had before; its generator is seeded with 1."""
    found = pytest.importorskip("numpy")
    if request.param == "before 1.24":
        monkeypatch.delattr(found.random, "get_bit_generator")
    before = found.random.get_state()
    found.random.seed(1)
    yield found
    found.random.set_state(before)


def numpy_seed(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[16:20], "big")


def test_mixed_seeds_of_neighbours_differ_and_fit_in_63_bits() -> None:
    seeds = {mix(seed, epoch) for seed in range(50) for epoch in range(50)}
    assert len(seeds) == 2500
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_in_a_block_the_generators_draw_from_all_of_its_arguments() -> None:
    with seeding(3, 5, "batch", 8):
        assert draw() == by_hand("3:5:batch:8")


def test_after_a_block_the_generators_go_on_as_if_it_had_not_been() -> None:
    seed_generators(1)
    expected = [draw(), draw()]
    seed_generators(1)
    first = draw()
    with seeding(3, 5):
        draw()
    assert [first, draw()] == expected


def test_a_block_that_raises_gives_the_generators_back_too() -> None:
    seed_generators(1)
    with pytest.raises(KeyError), seeding(3, 5):
        raise KeyError
    assert draw() == by_hand("1")
    with pytest.raises(DataError, match=r"no loader with a seed is fetching"):
        sample_generator(0)


@pytest.mark.parametrize("outside", [0, 1, 2, 1249])
@pytest.mark.parametrize("inside", [0, 1, 2, 1249])
def test_numpy_draws_in_a_block_from_a_seed_of_its_own_and_after_it_as_if_it_had_not_been(
    numpy: Any, outside: int, inside: int
) -> None:
    # Normals come in pairs: after an odd number of them one is kept, apart from the generator's state.
    numpy.random.seed(1)
    alone, block = numpy.random.RandomState(1), numpy.random.RandomState(numpy_seed("3:5"))
    assert numpy.random.standard_normal(outside).tolist() == alone.standard_normal(outside).tolist()
    with seeding(3, 5):
        assert numpy.random.standard_normal(inside).tolist() == block.standard_normal(inside).tolist()
    assert numpy.random.standard_normal(3).tolist() == alone.standard_normal(3).tolist()


def test_numpy_draws_on_from_block_to_block_and_from_what_a_checkpoint_holds(numpy: Any) -> None:
    expected = numpy.random.RandomState(numpy_seed("3:5:stream")).standard_normal(5).tolist()
    draws, drawn = RngStream(3, 5, "stream"), []
    for count in (1, 2, 2):
        numpy.random.standard_normal()
        with draws.drawing():
            drawn += numpy.random.standard_normal(count).tolist()
            state = cpu_random_state()
        draws = RngStream(3, 5, "stream")
        with draws.drawing():
            restore_cpu_random_state(state)
    assert drawn == expected


def test_numpy_is_not_imported_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "numpy", raising=False)
    with seeding(3, 5):
        assert get_states()[2] is None
    assert "numpy" not in sys.modules


def test_without_a_seed_a_block_draws_from_the_generators_as_they_are() -> None:
    seed_generators(1)
    with seeding(None, 5):
        assert draw() == by_hand("1")
    with RngStream(None, 5).drawing():
        assert draw() != by_hand("1")


def test_draws_go_on_from_block_to_block_whatever_is_drawn_between() -> None:
    with seeding(3, 5, "stream"):
        expected = [draw(), draw(), draw()]
    draws, drawn = RngStream(3, 5, "stream"), []
    for _ in range(3):
        draw()
        with draws.drawing():
            drawn.append(draw())
    assert drawn == expected


def test_a_sample_has_a_generator_of_its_own_whatever_is_drawn_for_others() -> None:
    with seeding(3, 5, "batch", 0):
        first = torch.rand(2, generator=sample_generator(7))
    with seeding(3, 5, "batch", 40):
        draw()
        torch.rand(2, generator=sample_generator(6))
        assert torch.equal(torch.rand(2, generator=sample_generator(7)), first)


def test_generators_of_samples_differ_by_sample_epoch_and_seed() -> None:
    drawn = set()
    for seed, epoch in [(0, 0), (0, 1), (1, 0)]:
        with seeding(seed, epoch):
            drawn |= {torch.rand((), generator=sample_generator(index)).item() for index in range(3)}
    assert len(drawn) == 9


def test_a_generator_asked_for_outside_of_a_fetch_is_refused_with_what_to_do() -> None:
    with pytest.raises(DataError, match=r"sample_generator\(4\): no loader .* make_loader\(dataset, seed=...\)"):
        sample_generator(4)


@pytest.mark.parametrize(("count", "dtype"), [(2**31 - 1, torch.int32), (2**31, torch.int64)])
def test_a_permutation_takes_four_bytes_a_number_as_long_as_they_suffice(count: int, dtype: torch.dtype) -> None:
    # Of tensors without memory.
    with FakeTensorMode():
        assert permutation(count, torch.Generator()).dtype is dtype
