"""A dataset may declare that it uses no random numbers; then nothing is seeded for its batches."""

from __future__ import annotations

import random
import sys
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset

from pipeline.data import rng
from pipeline.data.loader import make_loader
from pipeline.data.padded import pad
from pipeline.data.rng import get_states, sample_generator
from pipeline.errors import DataError

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    # where there are fewer processors than workers
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]


class Undeclared(Dataset[Tensor]):
    """Samples [1], of which nothing says whether they use random numbers."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index])


class Declared(Undeclared):
    uses_random_numbers = False


class DeclaredRandom(Undeclared):
    uses_random_numbers = True


class SubclassOfSubset(Subset[Tensor]):
    """May draw in whatever it overrides."""


class Forwarding(Undeclared):
    """Has all attributes of another dataset, and draws itself for all that is known."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getattr__(self, name: str) -> Any:
        return getattr(self.dataset, name)


class Collate:
    """A collate function that declares to use no random numbers."""

    uses_random_numbers = False

    def __call__(self, samples: list[Tensor]) -> Tensor:
        return torch.stack(samples)

    def method(self, samples: list[Tensor], **_: object) -> Tensor:
        return torch.stack(samples)

    method.uses_random_numbers = False  # type: ignore[attr-defined]


class Stream(IterableDataset[Tensor]):
    """Four samples, after ``place`` of them."""

    uses_random_numbers = False

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Any:
        while self.place < 4:
            self.place += 1
            yield torch.tensor([self.place])
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


def with_attribute(dataset: Any, value: Any) -> Any:
    dataset.uses_random_numbers = value
    return dataset


@pytest.fixture
def seeded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the generators of this process were seeded with, for each time."""
    calls: list[Any] = []
    seed_generators = rng.seed_generators

    def note(*parts: Any) -> None:
        calls.append(parts)
        seed_generators(*parts)

    monkeypatch.setattr(rng, "seed_generators", note)
    return calls


TENSORS = [torch.tensor([7])]


@pytest.mark.parametrize(
    ("dataset", "collate"),
    [
        (Declared(), None),
        (with_attribute(Undeclared(), False), None),
        (Subset(Declared(), [1, 0]), None),
        (with_attribute(Subset(Undeclared(), [1, 0]), False), None),
        (ConcatDataset([Declared(), Subset(Declared(), [1])]), None),
        (ConcatDataset([Declared(), TENSORS]), None),
        (Declared(), pad),
        (Declared(), partial(pad, padding=1)),
        (Declared(), Collate()),
        (Declared(), Collate().method),
        (Declared(), partial(Collate().method, other=1)),
        (Stream(), None),
    ],
    ids=[
        "class", "instance", "subset", "declared subset", "concatenated", "with slices", "pad", "partial", "object",
        "method", "partial method", "stream",
    ],
)  # fmt: skip
def test_a_declared_dataset_is_fetched_without_seeding(seeded: list[Any], dataset: Any, collate: Any) -> None:
    given = list(make_loader(dataset, seed=0, batch_size=2, collate_fn=collate))
    assert seeded == []
    assert str(given) == str(list(make_loader(dataset, seed=None, batch_size=2, collate_fn=collate)))


@pytest.mark.parametrize(
    ("dataset", "collate"),
    [
        (Undeclared(), Collate()),
        (DeclaredRandom(), None),
        (Declared(), torch.stack),
        (Declared(), partial(torch.stack, dim=0)),
        (SubclassOfSubset(Declared(), [0]), None),
        (with_attribute(Subset(Declared(), [0]), True), None),
        (ConcatDataset([Declared(), Undeclared()]), None),
        (Forwarding(Declared()), None),
        (with_attribute(Stream(), True), None),
    ],
    ids=[
        "undeclared", "declared random", "collate", "partial", "own subset", "declared subset", "concatenated",
        "forwarded", "stream",
    ],
)  # fmt: skip
def test_whatever_is_not_declared_is_seeded(seeded: list[Any], dataset: Any, collate: Any) -> None:
    loader = make_loader(dataset, seed=0, batch_size=2, collate_fn=collate)
    batches = len(list(loader))
    assert len(seeded) >= batches


@pytest.mark.parametrize("value", [0, "no", None])
def test_a_declaration_that_is_not_a_bool_is_refused_at_once(value: Any) -> None:
    dataset = ConcatDataset([Undeclared(), with_attribute(Undeclared(), value)])
    with pytest.raises(DataError, match=rf"^dataset\.x: Undeclared\.uses_random_numbers is {value!r}; set it to"):
        make_loader(dataset, seed=0, where="dataset.x")
    collate = with_attribute(Collate(), value)
    with pytest.raises(DataError, match=rf"^dataset\.x: Collate\.uses_random_numbers is {value!r}; set it to"):
        make_loader(Undeclared(), seed=0, collate_fn=collate, where="dataset.x")


class Drawing(Declared):
    """Draws all the same, from one generator, in all epochs from ``first`` on."""

    def __init__(self, generator: str, first: int = 0) -> None:
        self.generator = generator
        self.first = first
        self.epoch = 0
        self.noise = torch.Generator().manual_seed(1)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> Tensor:
        if self.epoch >= self.first:
            self.draw()
        return torch.tensor([index])

    def draw(self) -> None:
        if self.generator == "Python's random":
            random.random()
        elif self.generator == "torch":
            torch.rand(())
        elif self.generator == "numpy.random":
            pytest.importorskip("numpy").random.standard_normal()
        else:
            torch.rand((), generator=self.noise)


@pytest.mark.parametrize(("workers", "in_worker"), [(0, ""), (2, ", in worker 0")])
@pytest.mark.parametrize("generator", ["Python's random", "torch", "numpy.random", "noise"])
def test_a_declared_dataset_that_draws_is_refused(generator: str, workers: int, in_worker: str) -> None:
    loader = make_loader(Drawing(generator), seed=0, batch_size=2, num_workers=workers, where="dataset.x")
    batches = iter(loader)
    states = get_states()
    with pytest.raises(DataError) as raised:
        next(batches)
    text = str(raised.value)
    assert text.startswith("dataset.x: uses_random_numbers is False, ")
    assert f"the samples 0, 1 (from place 0 of epoch 0 on){in_worker}" in text
    assert f"used random numbers of {generator};" in text
    assert "set it to True" in text
    assert get_states().python == states.python
    assert torch.equal(get_states().torch, states.torch)
    assert get_states().numpy == states.numpy


@pytest.mark.parametrize("workers", [{}, {"num_workers": 1}])
def test_the_first_batch_of_every_epoch_is_checked(workers: dict[str, Any]) -> None:
    loader = make_loader(Drawing("torch", first=1), seed=0, batch_size=2, **workers)
    assert len(list(loader)) == 3
    loader.set_epoch(1)
    with pytest.raises(DataError, match="used random numbers of torch"):
        list(loader)


def test_a_persistent_worker_checks_the_first_batch_of_every_epoch() -> None:
    class Counting(Declared):
        """Draws from the second epoch on; a persistent worker has one copy for all of them."""

        fetched = 0

        def __getitem__(self, index: int) -> Tensor:
            self.fetched += 1
            return torch.rand(1) if self.fetched > len(self) else torch.zeros(1)

    loader = make_loader(Counting(), seed=0, batch_size=2, num_workers=1, persistent_workers=True)
    assert len(list(loader)) == 3
    loader.set_epoch(1)
    with pytest.raises(DataError, match="epoch 1 on"):
        list(loader)
    loader.end_workers()


def test_a_declared_collate_function_that_draws_is_refused() -> None:
    class Drops(Collate):
        def __call__(self, samples: list[Tensor]) -> Tensor:
            return torch.rand(2)

    with pytest.raises(DataError, match="used random numbers of torch"):
        list(make_loader(Declared(), seed=0, batch_size=2, collate_fn=Drops()))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_declared_stream_that_draws_is_refused(workers: int) -> None:
    class DrawingStream(Stream):
        def __iter__(self) -> Any:
            yield torch.rand(1)

    with pytest.raises(DataError, match=r"batch 0 in epoch 0.* used random numbers of torch"):
        list(make_loader(DrawingStream(), seed=0, batch_size=2, num_workers=workers))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_declared_stream_continues_from_its_state(workers: int) -> None:
    loader = make_loader(Stream(), seed=0, batch_size=1, num_workers=workers)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    again = make_loader(Stream(), seed=0, batch_size=1, num_workers=workers)
    again.load_state_dict(state)
    assert torch.cat(list(again)).flatten().tolist() == [2, 3, 4]
    assert state["states"][0]["draws"] is None


def test_a_declared_dataset_has_no_generator_for_a_sample() -> None:
    class Augmented(Declared):
        def __getitem__(self, index: int) -> Tensor:
            return torch.rand(1, generator=sample_generator(index))

    with pytest.raises(DataError, match="a dataset that calls it uses random numbers"):
        list(make_loader(Augmented(), seed=0))


def test_a_batch_of_a_declared_dataset_costs_what_it_costs_without_a_seed() -> None:
    assert calls_per_batch(Declared(), seed=0) == calls_per_batch(Declared(), seed=None)
    assert calls_per_batch(Undeclared(), seed=0) > calls_per_batch(Undeclared(), seed=None)


def calls_per_batch(dataset: Any, seed: int | None) -> float:
    """Calls of Python and C between the second batch of an epoch and the last."""
    batches = iter(make_loader(dataset, seed=seed, batch_size=1))
    next(batches)
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in {"call", "c_call"}

    sys.setprofile(count)
    try:
        for _ in range(len(dataset) - 1):
            next(batches)
    finally:
        sys.setprofile(None)
    return calls / (len(dataset) - 1)


def test_slices_of_tensors_are_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(rng, "_take_states")
    assert len(list(make_loader(TensorDataset(torch.zeros(2)), seed=0))) == 2
    assert len(list(make_loader(list(torch.zeros(2)), seed=0))) == 2
