"""What the value of each run option may be."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from pipeline.errors import ConfigError
from pipeline.training.run_options import NOT_TAKEN, RULES, checked, checked_value

FLAGS = sorted(name for name, rule in RULES.items() if rule.remedy == "write true or false")
COUNT = "write a whole number above 0"
SEVERAL = "several processes are not yet possible; leave it out"


@pytest.mark.parametrize(
    ("name", "value", "canonical"),
    [
        ("precision", 32, "fp32"),
        ("precision", "16-mixed", "fp16"),
        ("eval_precision", "bf16-mixed", "bf16"),
        ("device", torch.device("cuda", 1), "cuda:1"),
        ("device", "auto", "auto"),
        ("device", None, None),
        ("jit_module_keys", ["a", "b"], ("a", "b")),
        ("compile_module_keys", None, None),
        ("max_grad_norm", 1, 1),
        ("max_grad_norm", math.inf, math.inf),
        ("max_grad_norm", None, None),
        ("debug_epochs", 0, 0),
        ("nonfinite_patience", 0, 0),
        ("nonfinite_patience", None, None),
        ("ckpt_interval_minutes", 0.5, 0.5),
        ("ckpt_interval_minutes", -1, -1),
        ("ckpt_interval_steps", -1, -1),
        ("optimizer_step_limit", 1, 1),
        ("compile_mode", "max-autotune", "max-autotune"),
    ],
)
def test_a_right_value_is_taken_in_its_canonical_form(name: str, value: Any, canonical: Any) -> None:
    found = checked_value(name, value, "x")
    assert (found, type(found)) == (canonical, type(canonical))


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        *((name, value, "write true or false") for name in FLAGS for value in (1, "true", None)),
        *(("debug_batches", value, COUNT) for value in (0, -1, 2.0, True, "2", None)),
        *(("grad_accumulation_factor", value, COUNT) for value in (0, 1.5, True)),
        *(("optimizer_step_limit", value, f"{COUNT}, or null for no limit") for value in (0, "9", 1.5)),
        *(("debug_epochs", value, "write a whole number") for value in ("2", 2.5, True, None)),
        *(("nonfinite_patience", value, "write a whole number, 0 or more, or null to look at no loss") for value in (-1, 1.5)),
        *(("max_grad_norm", value, "write a number above 0, or null not to clip") for value in (0, -1, math.nan, "5", True)),
        *(("ckpt_interval_minutes", value, "write a number of minutes, a second at least; 0 for never") for value in ("5", None, math.nan, math.inf, 0.01)),
        *(("ckpt_interval_steps", value, "write a whole number") for value in (0.5, None)),
        *(("precision", value, "write fp32, bf16 or fp16") for value in ("fp8", 16, None, True)),
        *(("device", value, "write auto, cpu, gpu, cuda or cuda:N") for value in ("cuda:x", "tpu", 0, "cuda:1 ")),
        *(("jit_module_keys", value, "write a list of names of modules, or null") for value in ("net", [], [1], [""])),
        ("compile_mode", "fast", "write default, reduce-overhead, max-autotune or max-autotune-no-cudagraphs"),
        ("distributed_backend", "gloo", SEVERAL),
        ("find_unused_parameters", True, SEVERAL),
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused_with_the_value_and_what_to_write(name: str, value: Any, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        checked({name: value}, "run_opts")
    shown = tuple(value) if isinstance(value, list) else value
    assert str(caught.value) == f"run_opts: {name} is {shown!r}; {remedy}"


@pytest.mark.parametrize(("name", "reason"), NOT_TAKEN.items())
def test_what_speechbrain_has_beside_is_refused_with_the_reason(name: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        checked({name: False}, "hparams")
    assert str(caught.value) == f"hparams: {name} is an option that is not taken: {reason}"


def test_a_misspelt_option_is_told_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"run_opts: there is no option 'devise'; did you mean 'device'\?"):
        checked({"devise": "cpu"}, "run_opts")


@pytest.mark.parametrize("flag", ["jit", "compile"])
def test_keys_with_a_flag_that_says_no_are_refused(flag: str) -> None:
    with pytest.raises(
        ConfigError, match=f"x: {flag}_module_keys names a, b, and {flag} is False; leave one of them out"
    ):
        checked({f"{flag}_module_keys": ["a", "b"], flag: False}, "x")
