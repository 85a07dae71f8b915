"""The order of the samples."""

from __future__ import annotations

import torch

from pipeline.data.loader import EpochSampler
from pipeline.data.rng import mix


def order(seed: int, epoch: int, length: int = 50) -> list[int]:
    sampler = EpochSampler(length, shuffle=True, seed=seed)
    sampler.set_epoch(epoch)
    return list(sampler)


def test_a_shuffled_epoch_has_every_sample_once() -> None:
    assert sorted(order(seed=3, epoch=5)) == list(range(50))
    assert order(seed=3, epoch=5) != list(range(50))


def test_the_order_is_the_permutation_that_torch_makes_from_the_mixed_seed() -> None:
    generator = torch.Generator().manual_seed(mix(3, 5))
    assert order(seed=3, epoch=5) == torch.randperm(50, generator=generator).tolist()


def test_the_order_depends_on_seed_and_epoch_and_on_nothing_else() -> None:
    first = order(seed=3, epoch=5)
    torch.manual_seed(99)
    order(seed=3, epoch=4)
    assert order(seed=3, epoch=5) == first
    assert len({tuple(order(seed, epoch)) for seed in range(4) for epoch in range(4)}) == 16


def test_an_order_can_be_asked_for_again_and_draws_nothing_from_torch() -> None:
    sampler, state = EpochSampler(50, shuffle=True, seed=0), torch.get_rng_state()
    assert list(sampler) == list(sampler)
    assert torch.equal(torch.get_rng_state(), state)


def test_without_a_seed_the_order_is_drawn_from_torch() -> None:
    torch.manual_seed(1)
    first, second = EpochSampler(50, shuffle=True, seed=None), EpochSampler(50, shuffle=True, seed=None)
    torch.manual_seed(1)
    assert list(first) != list(second)
    assert list(EpochSampler(50, shuffle=True, seed=None)) == list(first)


def test_a_sampler_is_as_long_as_its_data() -> None:
    assert len(EpochSampler(7, shuffle=True, seed=0)) == 7
