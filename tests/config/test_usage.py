"""What nobody read of a config is told after the run."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline import GeneralTrainer
from pipeline.config.usage import TrackedDict, UsageTracker

RUNNER = "runner.train_runner"
OWN = """
from pipeline import stages

class Runner(stages.Runner):
    def run(self, context):
        {line}
"""


def unread(linear: Path, log_lines: list[str], *overrides: str) -> list[str]:
    """The addresses that the log names as read by nobody, with what it advises."""
    GeneralTrainer(linear, overrides).run()
    found = [line.removeprefix("WARNING ").strip() for line in log_lines if "nobody read it" in line]
    return [line.split(": ", 1)[1].replace(": nobody read it, so it had no effect", "") for line in found]


def with_runner(linear: Path, line: str) -> str:
    (linear.parent / "own.py").write_text(OWN.format(line=line), encoding="utf-8")
    return f"{RUNNER}.runner_class_path={{workspace}}/own.py"


def test_a_config_that_is_read_whole_is_not_mentioned(linear: Path, log_lines: list[str]) -> None:
    assert unread(linear, log_lines) == []


BATCHES = """
from pipeline import hookimpl
from loguru import logger

class Plugin:
    @hookimpl
    def before_batch(self, context, batch):
        logger.info("a batch")
"""


def test_a_hyper_parameter_without_effect_is_told_once_before_the_first_batch(
    linear: Path, log_lines: list[str]
) -> None:
    (linear.parent / "my_plugin.py").write_text(BATCHES, encoding="utf-8")
    linear.write_text(linear.read_text().replace("hyper_parameters:\n", "hyper_parameters:\n  bais: false\n"))
    GeneralTrainer(linear, ["plugins=['{workspace}/my_plugin.py']", with_runner(linear, "super().run(context)")]).run()
    first, *others = [line for line in log_lines if "a batch" in line or "bais" in line]
    message = "hyper_parameters.bais: nobody has read it before the first batch; did you mean 'bias'?"
    assert first == f"WARNING {linear}:3: {message}\n"
    assert set(others) == {"INFO a batch\n"}


@pytest.mark.parametrize(
    "line",
    [
        "context['hyper_parameters']['zz']; super().run(context)",
        "super().run(context); context['hyper_parameters']['zz']",
        "[context['hyper_parameters'][key] for key in context['hyper_parameters']]",
        "context['env']",
        "own(**context['hyper_parameters'])",
    ],
)
def test_a_hyper_parameter_that_a_stage_reads_is_not_told(linear: Path, log_lines: list[str], line: str) -> None:
    runner = with_runner(linear, f"own = lambda zz, optimizer: None; {line}")
    assert not [each for each in unread(linear, log_lines, "+hyper_parameters.zz=1", runner) if "zz" in each]


def test_what_only_the_stage_of_a_runner_left_out_reads_is_not_told(linear: Path, log_lines: list[str]) -> None:
    with_runner(linear, "context['hyper_parameters']['zz']")
    second = "  - {name: second, class: train, epochs: 1, runner_class_path: '{workspace}/own.py'}\n"
    linear.write_text(linear.read_text().replace("phase:\n", f"{second}phase:\n"))
    assert unread(linear, log_lines, "mode=train_runner", "+hyper_parameters.zz=1") == []


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("+hyper_parameters.bias=false", []),
        (f"{RUNNER}.write_predictions=false", []),
        (f"{RUNNER}.seed=3", []),
    ],
)
def test_what_the_default_stages_read_is_known(
    linear: Path, log_lines: list[str], override: str, expected: list[str]
) -> None:
    assert unread(linear, log_lines, override) == expected


def test_a_reference_reads_what_it_names(linear: Path, log_lines: list[str]) -> None:
    overrides = ["+hyper_parameters.count=3", f"{RUNNER}.epochs=${{hyper_parameters.count}}"]
    assert unread(linear, log_lines, *overrides) == []


@pytest.mark.parametrize(
    ("line", "ignored"),
    [
        ("pass", ["epochs", "print_interval"]),
        ("context['config'].get('runner.train_runner.epochs')", ["print_interval"]),
        ("context['config'].runners[0].print_interval", ["epochs"]),
        ("context['config'].get('runner.train_runner')", []),
        ("context['env']", []),
    ],
)
def test_what_a_stage_of_ones_own_ignores_is_told(
    linear: Path, log_lines: list[str], line: str, ignored: list[str]
) -> None:
    found = unread(linear, log_lines, with_runner(linear, line))
    assert [each.split(";")[0] for each in found] == [f"{RUNNER}.{key}" for key in ignored]


def test_a_key_that_has_its_default_is_no_hint_for_another(linear: Path, log_lines: list[str]) -> None:
    told = unread(linear, log_lines, with_runner(linear, "context['config'].runners[0].debug_epochs"))
    assert f"{RUNNER}.epochs; take it out, or check its name" in told


PHASE = "  - {name: other, model: torch.nn.Linear, loss: torch.nn.functional.l1_loss, dataset_name: train_data}\n"


def test_a_phase_that_no_runner_runs_is_told_once(linear: Path, log_lines: list[str]) -> None:
    linear.write_text(f"{linear.read_text().rstrip()}\n{PHASE}")
    found = unread(linear, log_lines, f"{RUNNER}.phases=line")
    assert found == ["phase.other; take it out, or check its name"]


def test_what_only_a_runner_that_was_left_out_uses_is_not_told(linear: Path, log_lines: list[str]) -> None:
    text = linear.read_text()
    runner = next(line for line in text.splitlines() if "name: train_runner" in line)
    second = runner.replace("train_runner", "second").replace("epochs: 2", "epochs: 2, phases: other")
    linear.write_text(f"{text.replace(runner, f'{runner}{chr(10)}{second}').rstrip()}\n{PHASE}")
    assert unread(linear, log_lines, "mode=train_runner", f"{RUNNER}.phases=line") == []


USES: list[tuple[Callable[[TrackedDict], object], set[str], set[str]]] = [
    (lambda values: values["a"], {"h.a"}, set()),
    (lambda values: values.get("b"), {"h.b"}, set()),
    (lambda values: values.get("c"), set(), {"h.c"}),
    (lambda values: "a" in values, {"h.a"}, set()),
    (lambda values: "c" in values, set(), {"h.c"}),
    (lambda values: values.pop("a"), {"h.a"}, set()),
    (list, set(), set()),
    (lambda values: {**values}, {"h.a", "h.b"}, set()),
    (dict, {"h.a", "h.b"}, set()),
    (lambda values: list(values.items()), {"h"}, set()),
    (lambda values: list(values.values()), {"h"}, set()),
    (json.dumps, {"h"}, set()),
]


@pytest.mark.parametrize(("use", "found", "missed"), USES)
def test_every_way_to_read_a_mapping_is_noted(
    use: Callable[[TrackedDict], object], found: set[str], missed: set[str]
) -> None:
    reads = UsageTracker()
    use(TrackedDict({"a": 1, "b": 2}, "h", reads))
    assert (reads.addresses, reads.missing) == (found, missed)


def test_a_copy_of_the_mapping_is_a_plain_dict() -> None:
    copy = pickle.loads(pickle.dumps(TrackedDict({"a": 1}, "h", UsageTracker())))
    assert (type(copy), copy) == (dict, {"a": 1})
