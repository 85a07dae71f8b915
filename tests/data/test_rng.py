"""The random generators, seeded and given back."""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.data._utils import worker as torch_worker

from pipeline.checkpoint.random_state import cpu_random_state, restore_cpu_random_state
from pipeline.data import rng
from pipeline.data.rng import (
    RngStream,
    get_states,
    mix,
    permutation,
    sample_generator,
    seed_generators,
    seeding,
    set_states,
)
from pipeline.errors import DataError


def draw() -> tuple[float, float]:
    return random.random(), torch.rand(()).item()


def by_hand(text: str) -> tuple[float, float]:
    """The first draws after seeding from a text."""
    digest = hashlib.sha256(text.encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[8:16], "big"))
    return random.Random(int.from_bytes(digest[:8], "big")).random(), torch.rand((), generator=generator).item()


def forget_layouts() -> None:
    """Let the layouts of the generators in memory be looked at again."""
    rng._memory_of.cache_clear()
    rng._python_memory.cache_clear()


@pytest.fixture(params=["as it is", "before 1.24", "another layout"])
def numpy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Numpy, that of the `dev` extra, or with what it had before, or with an MT19937 of another layout.

    Its generator is seeded with 1.
    """
    found = pytest.importorskip("numpy")
    if request.param == "before 1.24":
        monkeypatch.delattr(found.random, "get_bit_generator")
    if request.param == "another layout":
        monkeypatch.setattr(rng, "_MT19937_SIZE", 4 * 624)
        forget_layouts()
    before = found.random.get_state()
    found.random.seed(1)
    yield found
    found.random.set_state(before)
    forget_layouts()


@pytest.fixture
def pcg64() -> Iterator[Any]:
    """``numpy.random`` with a PCG64 that has the seed 1 in place of its MT19937."""
    found = pytest.importorskip("numpy").random
    before = found.get_bit_generator()
    found.set_bit_generator(found.PCG64(1))
    yield found
    found.set_bit_generator(before)


def python_seed(text: str) -> int:
    """The seed of Python's generator."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


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


@pytest.fixture(params=["as it is", "another layout"])
def python_layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Python's generator in memory as in CPython 3.11, or as in one that has changed it."""
    if request.param == "another layout":
        monkeypatch.setattr(rng, "_MT19937_SIZE", 4 * 624)
        forget_layouts()
    yield
    forget_layouts()


@pytest.mark.usefixtures("python_layout")
@pytest.mark.parametrize("outside", [0, 1, 2, 1249])
@pytest.mark.parametrize("inside", [0, 1, 2, 1249])
def test_python_draws_after_a_block_as_if_it_had_not_been(outside: int, inside: int) -> None:
    """gauss makes its numbers in pairs too, and keeps the second one apart from the state."""
    random.seed(1)
    alone, block = random.Random(1), random.Random(python_seed("3:5"))
    assert [random.gauss() for _ in range(outside)] == [alone.gauss() for _ in range(outside)]
    with seeding(3, 5):
        assert [random.gauss() for _ in range(inside)] == [block.gauss() for _ in range(inside)]
    assert random.getstate() == alone.getstate()
    assert [random.gauss() for _ in range(3)] == [alone.gauss() for _ in range(3)]


def test_the_generators_have_the_layout_that_is_expected() -> None:
    """Without it nothing is wrong, but each batch takes the slow way, which nothing else would show."""
    assert rng._python_memory() is not None
    numpy = pytest.importorskip("numpy")
    assert rng._memory_of(numpy.random.get_bit_generator()) is not None


@pytest.mark.parametrize("outside", [0, 1])
@pytest.mark.parametrize("inside", [0, 1])
def test_another_bit_generator_of_numpy_returns_after_a_block(pcg64: Any, outside: int, inside: int) -> None:
    """In the block numpy draws from the seed as ever, so that a batch does not depend on the kind outside."""
    alone, block = pcg64.RandomState(pcg64.PCG64(1)), pcg64.RandomState(numpy_seed("3:5"))
    bit_generator = pcg64.get_bit_generator()
    assert pcg64.standard_normal(outside).tolist() == alone.standard_normal(outside).tolist()
    with seeding(3, 5):
        assert pcg64.standard_normal(inside).tolist() == block.standard_normal(inside).tolist()
    assert pcg64.get_bit_generator() is bit_generator
    assert pcg64.standard_normal(3).tolist() == alone.standard_normal(3).tolist()


def test_a_normal_that_one_block_leaves_does_not_reach_the_next(numpy: Any) -> None:
    for number in range(2):
        expected = numpy.random.RandomState(numpy_seed(f"3:5:{number}")).standard_normal(3).tolist()
        with seeding(3, 5, number):
            assert numpy.random.standard_normal(3).tolist() == expected


def test_a_block_within_a_block_restores_the_outer_one(numpy: Any) -> None:
    expected = numpy.random.RandomState(numpy_seed("3:5")).standard_normal(4).tolist()
    with seeding(3, 5):
        drawn = [numpy.random.standard_normal()]
        with seeding(3, 5, "inner"):
            numpy.random.standard_normal(3)
        drawn += numpy.random.standard_normal(3).tolist()
    assert drawn == expected


@pytest.mark.parametrize("before", [0, 1])
def test_states_can_be_read_and_restored_whatever_was_drawn(numpy: Any, before: int) -> None:
    alone = numpy.random.RandomState(1)
    alone.standard_normal(before)
    numpy.random.standard_normal(before)
    states = get_states()
    expected = alone.standard_normal(3).tolist()
    assert numpy.random.standard_normal(3).tolist() == expected
    set_states(states)
    assert numpy.random.standard_normal(3).tolist() == expected


@pytest.fixture
def in_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a worker of a DataLoader."""
    monkeypatch.setattr(torch_worker, "_worker_info", SimpleNamespace(id=0))


@pytest.mark.usefixtures("in_worker")
def test_a_worker_saves_no_state_for_its_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in it draws between two blocks, and each block seeds the generators."""
    monkeypatch.delattr(rng, "_take_states")
    with seeding(3, 5, "batch", 8):
        assert draw() == by_hand("3:5:batch:8")
    with seeding(3, 5, "batch", 9):
        assert draw() == by_hand("3:5:batch:9")


@pytest.mark.usefixtures("in_worker")
def test_a_block_within_a_block_restores_the_outer_one_in_a_worker_too() -> None:
    with seeding(3, 5):
        expected = [draw(), draw()]
    with seeding(3, 5):
        drawn = [draw()]
        with seeding(3, 5, "inner"):
            draw()
        drawn.append(draw())
    assert drawn == expected


WITHOUT_NUMPY = """
    import sys
    sys.modules["numpy"] = None  # torch would import it
    import torch
    del sys.modules["numpy"]
    from torch.utils.data import IterableDataset
    from pipeline.checkpoint.random_state import random_state, restore_random_state
    from pipeline.data.loader import first_batch, make_loader
    from pipeline.data.rng import get_states, set_states

    class Stream(IterableDataset):
        def __iter__(self):
            return iter([1.0, 2.0])
        def state_dict(self):
            return {}
        def load_state_dict(self, state):
            pass

    for dataset in ([1.0, 2.0], Stream()):
        loader = make_loader(dataset, seed=0)
        first_batch(loader)
        batches = iter(loader)
        next(batches)
        states = loader.state_dict().get("states")
    states = [get_states().numpy, random_state()["numpy"], states[0]["draws"]["numpy"]]
    set_states(get_states())
    restore_random_state(random_state())
    assert states == [None, None, None], states
    assert "numpy" not in sys.modules
"""


def test_numpy_is_neither_imported_nor_saved_if_the_process_has_not_imported_it() -> None:
    pytest.importorskip("numpy")
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(WITHOUT_NUMPY)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


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
