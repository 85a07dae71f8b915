"""Length buckets, against what is promised of them."""

from __future__ import annotations

import random
from itertools import groupby, pairwise
from typing import Any

import pytest

from pipeline.data.buckets import LengthBuckets
from pipeline.errors import DataError


class Texts:
    """Has lengths."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def sizes(self) -> list[int]:
        return [2 * length for length in self.lengths]


@pytest.fixture(params=range(20))
def case(request: Any) -> tuple[list[int], dict[str, Any]]:
    """Lengths by chance, and arguments that they fit."""
    chance = random.Random(request.param)
    lengths = [chance.randint(0, 40) for _ in range(chance.randint(1, 80))]
    arguments = {
        "max_elements": chance.randint(40, 200),
        "width": chance.randint(1, 50),
        "shuffle": chance.random() < 0.7,
    }
    return lengths, arguments


def test_every_sample_comes_once_an_epoch_in_batches_that_are_small_enough(case: Any) -> None:
    lengths, arguments = case
    sampler, counts = LengthBuckets(Texts(*lengths), **arguments, seed=5), set()
    for epoch in range(3):
        sampler.set_epoch(epoch)
        batches = list(sampler)
        counts |= {len(batches), len(sampler)}
        assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
        assert (
            max(len(batch) * max(lengths[index] for index in batch) for batch in batches) <= arguments["max_elements"]
        )
    assert len(counts) == 1


def test_with_buckets_of_one_length_no_batch_could_take_the_next_sample(case: Any) -> None:
    lengths, arguments = case
    sampler = LengthBuckets(Texts(*lengths), arguments["max_elements"], width=1)
    batches = [[lengths[index] for index in batch] for batch in sampler]
    assert [length for batch in batches for length in batch] == sorted(lengths)
    for batch, after in pairwise(batches):
        assert (len(batch) + 1) * after[0] > arguments["max_elements"]


def test_an_epoch_mixes_the_samples_of_a_bucket_and_the_batches() -> None:
    sampler = LengthBuckets(Texts(*[3, 9] * 40), 60, width=4, shuffle=True, seed=1)
    orders = []
    for epoch in (0, 1, 0):
        sampler.set_epoch(epoch)
        orders.append(list(sampler))
    assert orders[0] == orders[2] != orders[1]
    assert len([index for index, _ in groupby(len(batch) for batch in orders[0])]) > 2
    assert {frozenset(batch) for batch in orders[0]} != {frozenset(batch) for batch in orders[1]}
    assert list(LengthBuckets(Texts(*[3, 9] * 40), 60, width=4, shuffle=True, seed=2)) != orders[0]


def test_lengths_may_be_an_attribute_a_method_or_a_list() -> None:
    texts = Texts(1, 2, 3)
    assert list(LengthBuckets(texts, 6, width=1)) == [[0, 1], [2]]
    assert list(LengthBuckets(texts, 6, "sizes", width=1)) == [[0], [1], [2]]
    assert list(LengthBuckets(texts, 6, [3, 2, 2])) == [[0], [1], [2]]
    assert list(LengthBuckets(texts, 6, [3, 2, 2], width=1)) == [[1, 2], [0]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_elements": 2}, "sample 1 has the length 7, and max_elements is 2; raise it, or cut the sample"),
        (
            {"max_elements": 9, "lengths": [1]},
            "1 lengths for the 3 samples of Texts; give the dataset a `lengths` with",
        ),
        ({"max_elements": 9, "lengths": "length"}, "0 lengths for the 3 samples of Texts; give the dataset"),
    ],
)
def test_lengths_that_fit_nothing_are_an_error(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=f"LengthBuckets: {message}"):
        LengthBuckets(Texts(1, 7, 3), **arguments)
