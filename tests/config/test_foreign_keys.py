"""A key of Hydra, Lightning or Hugging Face is answered with ours."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pipeline.check.checker import check
from pipeline.config.foreign_keys import FOREIGN_KEYS
from pipeline.config.keys import fields, key_of
from pipeline.config.schema import SECTIONS, ConfigSchema

Faults = Callable[..., list[str]]


@pytest.mark.parametrize(
    ("override", "ours"),
    [
        ("max_epochs=3", "`epochs` of the runner"),
        ("trainer.max_epochs=3", "`epochs` of the runner"),
        ("runner.train_runner.num_train_epochs=3", "`epochs` of the runner"),
        ("runner.train_runner.callbacks=[x]", "`plugins` of the config"),
        ("per_device_train_batch_size=8", "`batch_size` of the dataset"),
        ("runner.train_runner.gradient_clip_val=1", "`grad_clip` of the runner"),
    ],
)
def test_foreign_key_is_answered_with_ours(faults: Faults, override: str, ours: str) -> None:
    (fault,) = faults("", override)
    assert f"; write {ours} instead of " in fault


@pytest.mark.parametrize(
    ("text", "ours"),
    [
        ("dataset: [{name: a, _target_: 'x:A'}]", "class_path"),
        ("phase: [{name: p, _target_: 'x:A'}]", "model"),
        ("phase: [{name: p, metrics: {top: {_target_: AUC}}}]", "class"),
        ("hyper_parameters: {optimizer: {_target_: Adam}}\nphase: [{name: p}]", "class"),
    ],
)
def test_target_of_hydra_is_answered_with_the_key_of_its_place(
    faults: Faults,
    text: str,
    ours: str,
) -> None:
    faults(text)
    found = [fault.message for fault in check("config.yaml")]
    assert f"unknown key; write `{ours}` instead of Hydra's name" in found


def test_ours_of_each_foreign_key_exists() -> None:
    for foreign in FOREIGN_KEYS.values():
        section, _, key = foreign.address.rpartition(".")
        address = f"{section}.item.{key}" if section in SECTIONS else foreign.address
        assert foreign.address == "_base_" or key_of(address), foreign.address


def test_no_foreign_key_is_ours() -> None:
    ours = {name for model in (ConfigSchema, *SECTIONS.values()) for name in fields(model)}
    assert ours.isdisjoint(FOREIGN_KEYS)
