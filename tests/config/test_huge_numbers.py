"""Numbers of thousands of digits are faults like any other, and no tracebacks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pipeline.check.checker import check

Faults = Callable[..., list[str]]

HEX = "0x" + "f" * 5000


@pytest.mark.parametrize(
    "number",
    [HEX, "0o" + "7" * 6000, "9" * 5000, "-" + "9" * 400],
    ids=["hex", "octal", "decimal", "negative"],
)
def test_integer_of_too_many_digits_is_a_fault(faults: Faults, number: str) -> None:
    fault = faults(f"hyper_parameters: {{size: {number}}}")[0]
    assert fault.startswith("config.yaml:1:26: ")
    assert "more than 1000 bits" in fault


def test_integer_that_fits_a_float_is_allowed(faults: Faults) -> None:
    assert faults(f"hyper_parameters: {{size: {'9' * 300}, mask: 0xffffffffffffffff}}") == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seed", HEX),
        ("max_steps", "9" * 5000 + " update"),
        ("save_interval", "9" * 5000 + " epoch"),
        ("max_time", "9" * 5000 + " hour"),
        ("collective_timeout", "1e400"),
    ],
)
def test_runner_key_with_a_huge_number_is_a_fault(faults: Faults, key: str, value: str) -> None:
    (fault,) = faults("", f"runner.train_runner.{key}={value}")
    assert f": runner.train_runner.{key}: " in fault
    assert "set_int_max_str_digits" not in fault


def test_dict_config_with_a_huge_integer_is_a_fault() -> None:
    (fault,) = check({"hyper_parameters": {"size": 10**5000}, "runner": []})
    assert "more than 1000 bits" in fault.message


def test_escape_of_no_character_is_a_fault(faults: Faults) -> None:
    (fault,) = faults('note: "\\Uffffffff"')
    assert fault.startswith("config.yaml: is no YAML")
