"""Padded batches, against loops by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.data.loader import make_loader
from pipeline.data.padded import pad

LENGTHS = [3, 1, 4]


def sequences(*shape: int) -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    return [torch.rand(length, *shape, generator=random) for length in LENGTHS]


def by_hand(tensors: list[Tensor], number: float = 0) -> list[Any]:
    """Rows of nested lists, filled up."""
    filler = torch.full_like(tensors[0][0], number).tolist()
    return [tensor.tolist() + [filler] * (max(map(len, tensors)) - len(tensor)) for tensor in tensors]


@pytest.mark.parametrize("shape", [(), (2,), (2, 3)])
def test_tensors_are_filled_up_to_the_longest(shape: tuple[int, ...]) -> None:
    tensors = sequences(*shape)
    batch, lengths = pad(tensors, padding=7)
    assert batch.tolist() == by_hand(tensors, 7)
    assert lengths.tolist() == LENGTHS


def test_pairs_give_the_input_with_its_lengths() -> None:
    tensors = sequences(2)
    (batch, lengths), target = pad(list(zip(tensors, [5, 6, 7], strict=True)))
    assert batch.tolist() == by_hand(tensors)
    assert (lengths.tolist(), target.tolist()) == (LENGTHS, [5, 6, 7])


def test_a_target_may_have_a_padding_of_its_own() -> None:
    tensors, labels = sequences(), [torch.arange(length) for length in LENGTHS]
    expected = by_hand(labels, -100)
    (batch, _), target = pad(list(zip(tensors, labels, strict=True)), 0.5, target_padding=-100)
    assert (batch.tolist(), target.tolist(), target.dtype) == (by_hand(tensors, 0.5), expected, torch.int64)
    samples = [{"x": tensor, "labels": label} for tensor, label in zip(tensors, labels, strict=True)]
    assert pad(samples, 0.5, target_padding=-100)["labels"].tolist() == expected


def test_mappings_give_a_mapping_with_the_lengths_of_their_first_sequence() -> None:
    tensors = sequences()
    samples = [{"id": str(len(each)), "x": each, "y": each.new_tensor([1.0, 2.0])} for each in tensors]
    batch = pad(samples)
    assert batch["x"].tolist() == by_hand(tensors)
    assert batch["lengths"].tolist() == LENGTHS
    assert (batch["id"], batch["y"].tolist()) == (["3", "1", "4"], [[1.0, 2.0]] * 3)
    assert pad([{"lengths": 9, **sample} for sample in samples])["lengths"].tolist() == [9] * 3
    assert pad([{"x": 1}, {"x": 2}])["lengths"] is None


def test_a_mapping_may_be_the_input_of_a_pair() -> None:
    inputs, target = pad([({"x": each}, 1.0) for each in sequences()])
    assert inputs["lengths"].tolist() == LENGTHS
    assert target.tolist() == [1.0] * 3


def test_samples_without_a_length_are_told_with_their_dataset() -> None:
    with pytest.raises(TypeError) as raised:
        list(make_loader([(torch.tensor(1.0), 2)], seed=0, where="x", collate_fn=pad))
    assert (
        "x: collate_fn failed on sample 0 (from place 0 of epoch 0 on): a tuple of 2 (a tensor of"
        in raised.value.__notes__[0]
    )
