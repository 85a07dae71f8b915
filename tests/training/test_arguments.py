"""The command line of a training script. The first example is SpeechBrain's own."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import yaml

from pipeline import RunOptions, parse_arguments
from pipeline.errors import ConfigError
from tests.training.conftest import in_turn


def overrides(*words: str) -> str:
    return parse_arguments(["hyperparams.yaml", *words])[2]


def test_the_seed_example_gives_the_file_the_device_and_the_seed() -> None:
    filename, run_opts, overridden = parse_arguments(["hyperparams.yaml", "--device", "cuda:1", "--seed", "10"])
    assert (filename, run_opts["device"], overridden) == ("hyperparams.yaml", "cuda:1", "seed: 10")


def test_only_options_that_were_given_go_over_the_hyperparameters() -> None:
    _, run_opts, _ = parse_arguments(["--debug=false", "h.yaml", "--device=cpu"])
    assert run_opts.overridden_args == {"debug", "device"}
    assert (run_opts["debug"], run_opts["device"], run_opts["precision"]) == (False, "cpu", "fp32")
    options = RunOptions.resolve({"debug": True, "precision": "bf16"}, run_opts)
    assert (options.debug, options.precision) == (False, "bf16")


def test_without_a_list_the_command_line_of_the_process_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "h.yaml", "--seed", "1"])
    file, run_opts, lines = parse_arguments()
    assert (file, run_opts.overridden_args, lines) == ("h.yaml", set(), "seed: 1")


@in_turn(
    ("words", "name", "value"),
    [
        (["--debug"], "debug", True),
        (["--debug=true"], "debug", True),
        (["--debug=False"], "debug", False),
        (["--debug_batches", "5"], "debug_batches", 5),
        (["--ckpt_interval_minutes=0.5"], "ckpt_interval_minutes", 0.5),
        (["--max_grad_norm", "null"], "max_grad_norm", None),
        (["--precision", "16-mixed"], "precision", "fp16"),
        (["--eval_precision=32"], "eval_precision", "fp32"),
        (["--ckpt_interval_steps", "-1"], "ckpt_interval_steps", -1),
        (["--jit_module_keys", "encoder", "decoder", "--debug"], "jit_module_keys", ["encoder", "decoder"]),
        (["--compile_module_keys=encoder"], "compile_module_keys", ["encoder"]),
        (["--compile_module_keys=[encoder, decoder]"], "compile_module_keys", ["encoder", "decoder"]),
    ],
)
def test_a_run_option_gets_a_value_of_its_type(words: list[str], name: str, value: Any) -> None:
    found = parse_arguments(["h.yaml", *words])[1][name]
    assert (found, type(found)) == (value, type(value))


@in_turn(
    ("text", "value"),
    [
        ("10", 10),
        ("-5", -5),
        ("1e-3", 0.001),
        ("true", True),
        ("null", None),
        ("", None),
        ("[1, 2, 1e-3]", [1, 2, 0.001]),
        ("{a: {b: 1}}", {"a": {"b": 1}}),
        ("yes", "yes"),
        ("12:30", "12:30"),
        ("2020-01-01", "2020-01-01"),
        ("1_000", "1_000"),
        ("a: b", "a: b"),
        ("a # b", "a # b"),
        ("10 # b", "10 # b"),
        ("# b", "# b"),
        ("- a", "- a"),
        ("*a", "*a"),
        ("|", "|"),
        ("it's", "it's"),
        ("two\nlines", "two\nlines"),
        (" spaced ", " spaced "),
        ('"10"', "10"),
        ('"10" mm', '"10" mm'),
        ("a=b", "a=b"),
    ],
)
def test_any_other_name_gives_a_line_that_yaml_reads_as_the_value(text: str, value: Any) -> None:
    lines = overrides(f"--first={text}", "--second", "2")
    assert yaml.safe_load(lines) == {"first": value, "second": 2}
    assert len(lines.splitlines()) == 2
    assert overrides("--first", text) == lines.splitlines()[0]


@pytest.mark.parametrize("text", ["!ref <seed>", "[!ref <a>, 2]", "!new:torch.nn.Linear [1, 2]", "!name:os.system"])
def test_a_tag_is_left_to_whoever_loads_the_file(text: str) -> None:
    assert overrides("--model", text) == f"model: {text}"


def test_names_come_in_their_order_and_are_quoted_where_yaml_would_read_something_else() -> None:
    assert overrides("--z", "1", "--on", "2", "--a.b", "3") == "z: 1\n'on': 2\na.b: 3"


@in_turn(
    ("words", "message"),
    [
        ([], r"names no file of hyperparameters; write PARAM_FILE \[--NAME VALUE\]…, .*; the run options are test_only, "),
        (["--jit_module_keys", "encoder", "h.yaml"], "names no file of hyperparameters"),
        (["a.yaml", "b.yaml"], r"names 2 files \(a.yaml, b.yaml\); write PARAM_FILE"),
        (["--debug", "false", "h.yaml"], r"names 2 files \(false, h.yaml\); .* a truth value as --NAME or --NAME=false"),
        (["h.yaml", "--debug_batches", "two"], "debug_batches is 'two', a string; write an integer"),
        (["h.yaml", "--debug_batches", "0"], "debug_batches is 0; it must be greater than 0"),
        (["h.yaml", "--debug=no"], "debug is 'no', a string; write true or false"),
        (["h.yaml", "--device"], r"--device has no value; write --device VALUE$"),
        (["h.yaml", "--device", "--debug"], "--device has no value"),
        (["h.yaml", "--flag"], "--flag has no value; write --flag VALUE, or --flag=true for a truth value"),
        (["h.yaml", "--seed", "1", "--seed=2"], "--seed is given twice; keep one"),
        (["h.yaml", "--debug", "--debug=false"], "--debug is given twice; keep one"),
        (["h.yaml", "--debug-batches", "1"], r"no option 'debug-batches'; did you mean 'debug_batches'\?"),
        (["h.yaml", "--tqdm_colored_bar"], "tqdm_colored_bar is an option that is not taken: the bar is rich's .* noprogressbar"),
        (["h.yaml", "--data_parallel_backend"], "data_parallel_backend .* each GPU has a process of its own; .* start the script with torchrun"),
        (["h.yaml", "-d", "1"], "'-d' is neither a file nor an option; write --NAME VALUE"),
        (["h.yaml", "--"], "'--' is neither a file nor an option"),
        (["h.yaml", "--layers", "[1, 2"], r"--layers is '\[1, 2', which is no YAML: .*; mend or quote it"),
        (["h.yaml", "--jit_module_keys=[a"], r"expected ',' or '\]', but got '<stream end>'; mend the YAML"),
        (["h.yaml", "--jit_module_keys"], r"jit_module_keys is empty; name at least one"),
        (["h.yaml", "--help"], "asks for help; write PARAM_FILE"),
    ],
)  # fmt: skip
def test_a_wrong_command_line_is_told_and_ends_no_process(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^command line:.*{message}"):
        parse_arguments(words)
