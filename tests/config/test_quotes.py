"""A value with braces or a special character that needs quotes in YAML."""

from __future__ import annotations

from collections.abc import Callable

import pytest

Faults = Callable[..., list[str]]


@pytest.mark.parametrize(
    ("text", "place", "quoted"),
    [
        ("note: {workspace}/notes.txt", "1:18", '"{workspace}/notes.txt"'),
        ("note: {workspace}", "1:7", '"{workspace}"'),
        ("tags: [{run_dir}/a, b]", "1:17", '"{run_dir}/a"'),
        ("plugins:\n  - {workspace}/watch.py: {every: 5}", "2:16", '"{workspace}/watch.py"'),
        ("hyper_parameters: {rate: ${env:RATE}}", "1:27", '"${env:RATE}"'),
        ("hyper_parameters:\n  names: [x, a-${name}.txt]", "2:17", '"a-${name}.txt"'),
        ('hyper_parameters: {a: "{run_dir}", b: {workspace}/x}  # {run_dir}', "1:50", '"{workspace}/x"'),
    ],
)
def test_braces_without_quotes_are_shown_in_quotes(
    faults: Faults,
    text: str,
    place: str,
    quoted: str,
) -> None:
    fault = faults(text)[0]
    assert fault.startswith(f"config.yaml:{place}: ")
    assert fault.endswith(f"put the value in quotes: {quoted}")


def test_braces_in_an_override_are_shown_in_quotes(faults: Faults) -> None:
    (fault,) = faults("", "hyper_parameters={rate: ${env:RATE}}")
    assert fault.endswith('put the value in quotes: "${env:RATE}"')


@pytest.mark.parametrize("value", ["*.bias", "[*norm*]", "@home", "%x"])
def test_a_special_first_character_needs_quotes(faults: Faults, value: str) -> None:
    (fault,) = faults(f"note: {value}")
    assert fault.endswith("; put the value in quotes")


def test_a_mapping_with_a_placeholder_as_key_is_allowed(faults: Faults) -> None:
    assert faults("hyper_parameters: {workspace: null, run_dir: 3}") == []


def test_braces_in_quotes_beside_an_error_are_not_named(faults: Faults) -> None:
    (fault,) = faults("note: ['{workspace}/x' y]")
    assert fault.endswith("; mend the YAML")
