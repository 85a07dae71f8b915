"""The options of a Brain: names and defaults are SpeechBrain's, values are checked, and each has its rank."""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from pipeline import RunOptions, parse_arguments
from pipeline.brain.option_values import NOT_TAKEN, check_options, values_of
from pipeline.errors import ConfigError
from tests.training.conftest import in_turn

DEFAULTS = {
    "test_only": False, "debug": False, "debug_batches": 2, "debug_epochs": 2, "debug_persistently": False,
    "device": None, "distributed_backend": "nccl", "distributed_launch": False, "find_unused_parameters": False, "jit": False,
    "jit_module_keys": None, "compile": False, "compile_module_keys": None, "compile_mode": "default",
    "compile_using_fullgraph": False, "compile_using_dynamic_shape_tracing": False, "precision": "fp32",
    "eval_precision": "fp32", "auto_mix_prec": False, "bfloat16_mix_prec": False, "max_grad_norm": 5.0,
    "skip_nonfinite_grads": False, "nonfinite_patience": 3, "noprogressbar": False, "ckpt_interval_minutes": 0,
    "ckpt_interval_steps": 0, "grad_accumulation_factor": 1, "optimizer_step_limit": None,
    "remove_vector_weight_decay": False, "profile_training": False, "profile_warmup": 5, "profile_steps": 5,
}  # fmt: skip


def test_the_names_and_defaults_are_those_of_speechbrain() -> None:
    assert dict(RunOptions()) == DEFAULTS


def test_every_default_is_a_value_that_may_be_given() -> None:
    assert RunOptions(**DEFAULTS) == RunOptions()


def test_what_was_given_is_known() -> None:
    options = RunOptions(debug=True, precision="fp32")
    assert options.model_fields_set == {"debug", "precision"}
    assert RunOptions().model_fields_set == set()


def test_options_are_a_mapping_of_all_of_them_and_know_which_were_given() -> None:
    options = RunOptions(debug=True, auto_mix_prec=False)
    assert isinstance(options, Mapping)
    assert (options["debug"], options["debug_batches"], options.get("seed", 7)) == (True, 2, 7)
    assert ("max_grad_norm" in options, "seed" in options, len(options)) == (True, False, len(DEFAULTS))
    assert options.as_dict() == dict(options) == {**options} == {**DEFAULTS, "debug": True}
    assert [*options] == [*options.keys()] == [*DEFAULTS]
    assert options.overridden_args == {"debug", "precision"}
    with pytest.raises(KeyError, match="seed"):
        options["seed"]


def test_options_of_a_dictionary_are_those_given_and_the_device_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    options = RunOptions.from_dictionary({"debug": True})
    assert (options["device"], options.device, options.overridden_args) == ("cpu", "cpu", {"debug"})
    assert RunOptions.from_dictionary({"device": "cuda:7"})["device"] == "cuda:7"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("LOCAL_RANK", "3")
    options = RunOptions.from_dictionary({})
    assert options["device"] == "cuda:3"
    # It was not given: that of the hyperparameters goes over it.
    assert RunOptions.resolve({"device": "cpu"}, options).device == "cpu"


def test_options_of_a_command_line_are_what_parse_arguments_returns() -> None:
    words = ["h.yaml", "--debug", "--device=cpu", "--seed", "3"]
    file, options, overrides = RunOptions.from_command_line_args(words)
    assert (
        (file, options, overrides)
        == parse_arguments(words)
        == ("h.yaml", RunOptions(debug=True, device="cpu"), "seed: 3")
    )
    assert options.overridden_args == {"debug", "device"}


def test_options_cannot_be_changed() -> None:
    options = RunOptions(compile_module_keys=["encoder"], precision="bf16")
    with pytest.raises(ValidationError, match="Instance is frozen"):
        options.debug = True  # type: ignore[misc]


def test_options_come_through_a_pickle_with_what_was_given() -> None:
    options = RunOptions(debug=True)
    back = pickle.loads(pickle.dumps(options))
    assert (back, back.model_fields_set) == (options, {"debug"})


def test_run_options_go_over_hyperparameters_and_these_over_defaults() -> None:
    hparams = {"precision": "bf16", "max_grad_norm": 1.0, "debug": True, "lr": 0.1, "model": torch.nn.Linear(1, 1)}
    options = RunOptions.resolve(hparams, {"debug": False, "max_grad_norm": None, "device": "cpu"})
    assert (options.precision, options.max_grad_norm, options.debug, options.debug_batches) == ("bf16", None, False, 2)


def test_ready_made_options_go_over_hyperparameters_where_they_were_given() -> None:
    hparams = {"precision": "bf16", "max_grad_norm": 1.0}
    options = RunOptions.resolve(hparams, RunOptions(precision="fp32", device="cpu"))
    assert (options.precision, options.max_grad_norm) == ("fp32", 1.0)


def test_resolved_options_are_the_same_when_resolved_again() -> None:
    options = RunOptions.resolve({"auto_mix_prec": False, "jit": True}, {"debug": True, "device": "cpu"})
    assert RunOptions.resolve({"jit": False, "device": "cuda"}, options) == options


@pytest.mark.parametrize("device", [None, "auto"])
def test_without_a_gpu_the_device_is_the_cpu(device: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert RunOptions.resolve(None, {"device": device}).device == "cpu"


def test_with_gpus_the_device_is_that_of_the_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert RunOptions.resolve().device == "cuda"
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert RunOptions.resolve().device == "cuda:3"
    assert RunOptions.resolve({"device": "cuda:1"}).device == "cuda:1"


def test_a_device_may_be_given_as_torch_has_it() -> None:
    assert RunOptions.resolve(None, {"device": torch.device("cpu")}).device == "cpu"


def test_a_device_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(
        ConfigError, match="run options: device is 'cuda:1', and this machine has 1 GPU; write cpu or auto"
    ):
        RunOptions.resolve(None, {"device": "cuda:1"})


@pytest.mark.parametrize("name", ["precision", "eval_precision"])
def test_fp16_on_a_cpu_is_refused(name: str) -> None:
    message = f"{name} is fp16, which needs a GPU, and device is cpu; use bf16 or fp32"
    with pytest.raises(ConfigError, match=message):
        RunOptions(device="cpu", **{name: "fp16"})
    with pytest.raises(ConfigError, match=message):
        RunOptions.resolve({name: "fp16"}, {"device": "cpu"})


def test_fp16_on_a_gpu_is_as_good_as_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    options = RunOptions.resolve({"precision": "16-mixed"}, {"device": "cuda"})
    assert (options.precision, options.device) == ("fp16", "cuda")


@in_turn(
    ("hparams", "run_opts", "precision"),
    [
        ({"bfloat16_mix_prec": True}, {}, "bf16"),
        ({"bfloat16_mix_prec": True, "auto_mix_prec": False}, {}, "bf16"),
        ({"bfloat16_mix_prec": True, "precision": "bf16"}, {}, "bf16"),
        ({"bfloat16_mix_prec": False, "precision": "bf16"}, {}, "bf16"),
        ({"auto_mix_prec": True}, {"precision": "bf16"}, "bf16"),
        ({"precision": "bf16"}, {"bfloat16_mix_prec": False}, "fp32"),
        ({"precision": "fp32"}, RunOptions(bfloat16_mix_prec=True), "bf16"),
    ],
)
def test_the_deprecated_spellings_set_the_precision(hparams: Any, run_opts: Any, precision: str) -> None:
    options = RunOptions.resolve({"device": "cpu", **hparams}, run_opts)
    assert (options.precision, options.auto_mix_prec, options.bfloat16_mix_prec) == (precision, False, False)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"auto_mix_prec": True, "precision": "bf16"}, "precision, auto_mix_prec say bf16 and fp16"),
        ({"auto_mix_prec": True, "bfloat16_mix_prec": True}, "auto_mix_prec, bfloat16_mix_prec say bf16 and fp16"),
        ({"bfloat16_mix_prec": True, "precision": "fp32"}, "precision, bfloat16_mix_prec say bf16 and fp32"),
    ],
)
def test_two_precisions_at_once_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=f"RunOptions: {said}; keep precision alone"):
        RunOptions(**options)


NAMES = ["encoder", "decoder", "head"]


@pytest.mark.parametrize(
    ("options", "chosen"),
    [
        ({}, []),
        ({"compile": True}, NAMES),
        ({"compile": True, "compile_module_keys": ["head", "encoder"]}, ["encoder", "head"]),
        ({"compile_module_keys": ["head"]}, ["head"]),
        ({"compile_module_keys": {"head"}}, ["head"]),
    ],
)
def test_all_modules_are_compiled_or_those_that_are_named(options: dict[str, Any], chosen: list[str]) -> None:
    assert RunOptions(**options).modules_to("compile", NAMES) == chosen
    assert RunOptions(**options).modules_to("jit", NAMES) == []


def test_run_options_turn_on_and_off_what_hyperparameters_say_of_compiling() -> None:
    named = {"device": "cpu", "jit": True, "jit_module_keys": ["head"]}
    assert RunOptions.resolve(named, {"jit": False}).modules_to("jit", NAMES) == []
    assert RunOptions.resolve(named, {"jit": True}).modules_to("jit", NAMES) == ["head"]
    assert RunOptions.resolve({"jit": False}, {"jit_module_keys": ["head"]}).modules_to("jit", NAMES) == ["head"]


def test_a_key_that_names_no_module_is_told() -> None:
    with pytest.raises(ConfigError, match=r"jit_module_keys: there is no module 'encodr'; did you mean 'encoder'\?"):
        RunOptions(jit_module_keys=["encodr"]).modules_to("jit", NAMES)


@pytest.mark.parametrize(
    ("options", "which"),
    [
        ({"jit": True, "compile": True}, "all of them"),
        ({"jit": True, "compile_module_keys": ["a"]}, "a"),
        ({"jit_module_keys": ["a", "b"], "compile": True}, "a, b"),
        ({"jit_module_keys": ["a", "b"], "compile_module_keys": ["b", "c"]}, "b"),
    ],
)
def test_a_module_cannot_be_scripted_and_compiled(options: dict[str, Any], which: str) -> None:
    with pytest.raises(ConfigError, match=rf"for the same modules \({which}\); keep compile, or name others in jit_"):
        RunOptions(**options)


def test_some_modules_may_be_scripted_and_others_compiled() -> None:
    options = RunOptions(jit_module_keys=["head"], compile_module_keys=["encoder"])
    assert [options.modules_to(how, NAMES) for how in ("jit", "compile")] == [["head"], ["encoder"]]


FLAGS = [name for name, value in DEFAULTS.items() if value is False]
ABOVE_0 = "; it must be greater than 0"


@in_turn(
    ("name", "value", "canonical"),
    [
        ("precision", 32, "fp32"),
        ("precision", "16-mixed", "fp16"),
        ("eval_precision", "bf16-mixed", "bf16"),
        ("device", torch.device("cuda", 1), "cuda:1"),
        ("device", "auto", "auto"),
        ("device", None, None),
        ("jit_module_keys", ("a", "b"), ["a", "b"]),
        ("jit_module_keys", "a", ["a"]),
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
    assert values_of({name: value}, "x") == {name: canonical}


WRONG = {
    **{(name, value): "; write true or false" for name in FLAGS for value in (1, "true")},
    **{("debug_batches", value): ABOVE_0 for value in (0, -1)},
    **{("debug_batches", value): "; write an integer" for value in (2.5, True, "2", None)},
    ("grad_accumulation_factor", 0): ABOVE_0,
    ("optimizer_step_limit", 0): ABOVE_0,
    ("optimizer_step_limit", "9"): "; write an integer",
    **{("debug_epochs", value): "; write an integer" for value in ("2", 2.5, True, None)},
    ("nonfinite_patience", -1): "; it must be at least 0",
    ("nonfinite_patience", 1.5): "; write an integer",
    **{("max_grad_norm", value): ABOVE_0 for value in (0, -1)},
    **{("max_grad_norm", value): "; write a number" for value in ("5", True)},
    **{("ckpt_interval_minutes", value): "; write a number" for value in ("5", None)},
    **{("ckpt_interval_minutes", value): "; write a number of minutes, a second at least; 0 for never" for value in (math.inf, 0.01)},
    **{("ckpt_interval_steps", value): "; write an integer" for value in (0.5, None)},
    **{("precision", value): "; known: bf16, fp16, fp32" for value in (None, True)},
    ("precision", 16): "; did you mean 'fp16'?",
    **{("device", value): "; write auto, cpu, gpu, cuda or cuda:N" for value in ("cuda:x", "tpu", 0, "cuda:1 ")},
    ("jit_module_keys", 1): "; write a list",
    ("compile_mode", "fast"): "; known: default, max-autotune, max-autotune-no-cudagraphs, reduce-overhead",
    ("distributed_backend", "mpi"): "; known: gloo, nccl",
}  # fmt: skip


@in_turn(("name", "value", "remedy"), [(*wrong, remedy) for wrong, remedy in WRONG.items()])
def test_a_wrong_value_is_refused_with_the_value_and_what_to_write(name: str, value: Any, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_options({name: value}, "run_opts")
    assert str(caught.value).startswith(f"run_opts: {name} is {value!r}")
    assert str(caught.value).endswith(remedy)


@pytest.mark.parametrize(("names", "remedy"), [([], "is empty; name at least one"), (["a", "a"], "names a twice")])
def test_names_of_modules_are_some_and_differ(names: list[str], remedy: str) -> None:
    with pytest.raises(ConfigError, match=f"x: jit_module_keys {remedy}"):
        check_options({"jit_module_keys": names}, "x")


@pytest.mark.parametrize("name", ["max_grad_norm", "ckpt_interval_minutes"])
def test_nan_is_no_number(name: str) -> None:
    with pytest.raises(ConfigError, match=f"x: {name} is nan; "):
        check_options({name: math.nan}, "x")


def test_all_wrong_values_are_reported_at_once() -> None:
    with pytest.raises(
        ConfigError, match=r"x: debug is 3, a whole number; .*\nx: debug_epochs is 'two', a string; write"
    ):
        check_options({"debug_epochs": "two", "debug": 3}, "x")


@pytest.mark.parametrize(("name", "reason"), NOT_TAKEN.items())
def test_what_speechbrain_has_beside_is_refused_with_the_reason(name: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_options({name: False}, "hparams")
    assert str(caught.value) == f"hparams: {name} is an option that is not taken: {reason}"


def test_a_misspelt_option_is_told_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"run_opts: there is no option 'devise'; did you mean 'device'\?"):
        check_options({"devise": "cpu"}, "run_opts")


@pytest.mark.parametrize("flag", ["jit", "compile"])
def test_keys_with_a_flag_that_says_no_are_refused(flag: str) -> None:
    with pytest.raises(
        ConfigError, match=f"x: {flag}_module_keys names a, b, and {flag} is False; leave one of them out"
    ):
        check_options({f"{flag}_module_keys": ["a", "b"], flag: False}, "x")
