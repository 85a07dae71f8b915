"""A fault that asks for a mapping shows one, and the one that it shows is accepted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.check.checker import check
from pipeline.config.yaml_tree import DEFAULT, parse


def fault_of(tmp_path: Path, key: str, value: object) -> str:
    """Return the messages for a value of one key."""
    section, _, name = key.rpartition(".")
    runner = {"name": "t", "class": "train", "epochs": 1}
    phase = {"name": "p", "model": "torch.nn.Identity", "loss": "model", "dataset_name": "d"}
    dataset = {"name": "d", "class_path": "torch.utils.data.TensorDataset"}
    items = {"runner": runner, "phase": phase, "dataset": dataset}
    items[section][name] = value
    config = {"workspace": str(tmp_path), **{part: [item] for part, item in items.items()}}
    address = f"{section}.{items[section]['name']}.{name}"
    return "\n".join(fault.message for fault in check(config) if fault.address == address)


@pytest.mark.parametrize(
    ("key", "example"),
    [
        ("runner.keep_best", {"metric": "valid_top1", "mode": "max"}),
        ("runner.startup_args", {"path": "file.txt"}),
        ("runner.rename", {"module.": ""}),
        ("phase.metrics", {"accuracy": {"class": "Accuracy"}}),
        ("phase.model_args", {"width": 32}),
        ("dataset.sampler", {"class_path": "{workspace}/data.py:Sampler", "args": {"seed": 1}}),
    ],
)
def test_value_that_is_no_mapping_is_shown_one(tmp_path: Path, key: str, example: object) -> None:
    message = fault_of(tmp_path, key, 5)
    shown = message.partition("; write a mapping, such as ")[2]
    assert parse(shown.splitlines()[0], DEFAULT).plain() == example
    assert "a mapping" not in fault_of(tmp_path, key, example)


def test_named_class_that_is_no_mapping_is_shown_one(faults: Callable[..., list[str]]) -> None:
    text = "phase: [{name: p, model: torch.nn.Identity, metrics: {top1: Accuracy}}]"
    (fault,) = faults(text)
    assert fault.endswith("; write a mapping, such as {class: Accuracy}")
