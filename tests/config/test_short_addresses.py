"""An override or key whose address is too short is answered with the full one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

Faults = Callable[..., list[str]]

CONFIG = """\
hyper_parameters: {optimizer: {class: Adam, learning_rate: 0.1}, width: 3}
dataset:
  - {name: a, class_path: "x:A", args: {seed: 1}, batch_size: 3}
  - {name: b, class_path: "x:B", args: {seed: 2}, batch_size: 3}
runner:
  - {name: train_runner, class: train, epochs: 2}
  - {name: infer_runner, class: infer}
"""


@pytest.mark.parametrize(
    ("override", "full"),
    [
        ("epochs=3", "runner.train_runner.epochs"),
        ("runner.epochs=3", "runner.train_runner.epochs"),
        ("train_runner.threads=3", "runner.train_runner.threads"),
        ("optimizer.lr=0.1", "hyper_parameters.optimizer.lr"),
        ("lr=0.1", "hyper_parameters.optimizer.lr"),
        ("hyper_parameters.lr=0.1", "hyper_parameters.optimizer.lr"),
        ("a.args.seed=3", "dataset.a.args.seed"),
        ("+width=4", "hyper_parameters.width"),
    ],
)
def test_short_override_is_answered_with_the_full_address(
    faults: Faults,
    override: str,
    full: str,
) -> None:
    (fault,) = faults(CONFIG, override)
    assert f"; did you mean '{full}'?" in fault


def test_override_with_two_full_addresses_names_both(faults: Faults) -> None:
    (fault,) = faults(CONFIG, "dataset.batch_size=5")
    assert fault.endswith("; did you mean 'dataset.a.batch_size' or 'dataset.b.batch_size'?")


def test_key_in_the_wrong_section_is_answered_with_its_place(faults: Faults) -> None:
    text = CONFIG.replace("hyper_parameters:", "epochs: 3\nhyper_parameters:")
    (fault,) = faults(text)
    assert fault.startswith("config.yaml:1:1: epochs: ")
    assert fault.endswith("; did you mean 'runner.train_runner.epochs'?")


def test_unknown_key_of_an_item_is_not_answered_with_itself(faults: Faults) -> None:
    (fault,) = faults(CONFIG, "runner.train_runner.zzz=3")
    assert "did you mean" not in fault
