"""The verbs of the default Runner, overridden: what they may not take, and which keys they read and write."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from pipeline import GeneralTrainer
from pipeline.check.checker import CheckResult, inspect
from pipeline.user_code.context_flow import Flow

PATH = ["runner.train_runner.runner_class_path={workspace}/own.py", "runner.train_runner.epochs=1"]


def inspected(linear: Path, body: str) -> CheckResult:
    """The check of a Runner whose body begins in line 3."""
    head = "from pipeline import stages\nclass Runner(stages.Runner):\n"
    (linear.parent / "own.py").write_text(head + textwrap.indent(textwrap.dedent(body).strip(), " " * 4))
    return inspect(linear, PATH)


def messages(linear: Path, body: str) -> list[str]:
    return [fault.message.partition("; if a stage")[0] for fault in inspected(linear, body).faults]


def flow(linear: Path, body: str) -> Flow:
    stage = inspected(linear, body).flows["train_runner"].stages["runner"]
    assert stage
    return stage.flow


SIGNATURES = [
    ("train_epoch(self, epoch)", "context and epoch", "train_epoch(self, context, epoch)"),
    ("train_phase(self, context)", "context and phase", "train_phase(self, context, phase)"),
    ("train_batch(self, batch)", "context, phase and batch", "train_batch(self, context, phase, batch)"),
    ("validate(self)", "context and phase", "validate(self, context, phase)"),
    ("evaluate(self, phase, runner, context)", "context and phase", "evaluate(self, context, phase)"),
    ("is_over(self)", "the context alone", "is_over(self, context)"),
]


@pytest.mark.parametrize(("written", "arguments", "right"), SIGNATURES)
def test_a_verb_with_other_parameters_is_a_fault(linear: Path, written: str, arguments: str, right: str) -> None:
    taken = written.partition("(")[2].removesuffix(")")
    (found,) = messages(linear, f"def {written}: pass")
    assert found == (
        f"Runner.{written.partition('(')[0]} (own.py:3) takes ({taken}), and is called with {arguments}; write `def {right}`"
    )


@pytest.mark.parametrize(
    "body",
    [
        "def train_batch(self, *given): return super().train_batch(*given)",
        "def train_batch(self, context, entry, batch, scale=1.0): return super().train_batch(context, entry, batch)",
        # Whoever writes ``run`` anew may give them what he likes.
        """
        def run(self, context):
            for epoch in context.epochs():
                self.train_epoch(epoch)
        def train_epoch(self, epoch): print(epoch)
        """,
        """
        def train_epoch(self, context, epoch): self.train_phase(epoch)
        def train_phase(self, epoch): print(epoch)
        """,
    ],
)
def test_one_that_can_be_called_is_none_and_runs(linear: Path, body: str) -> None:
    assert messages(linear, body) == []
    GeneralTrainer(linear, PATH).run()


def test_a_verb_in_which_a_yield_makes_nothing_happen_is_a_fault(linear: Path) -> None:
    (found,) = messages(linear, "def train_epoch(self, context, epoch): yield epoch")
    assert found == "Runner.train_epoch (own.py:3) has a yield: called, it would do nothing; take the yield out"


@pytest.mark.parametrize(
    ("name", "right"),
    [("train_bach", "train_batch"), ("validat", "validate"), ("trainepoch", "train_epoch"), ("isover", "is_over")],
)
def test_a_misspelt_verb_is_a_fault(linear: Path, name: str, right: str) -> None:
    (found,) = messages(linear, f"def {name}(self, context, phase): pass")
    assert found == f"Runner.{name} (own.py:3) is called by nobody; did you mean '{right}'?"


@pytest.mark.parametrize("verb", ["train_epoch(self, context, epoch)", "train_phase(self, context, phase)"])
def test_what_a_verb_lacks_is_a_fault(linear: Path, verb: str) -> None:
    (found,) = messages(linear, f"def {verb}: context['wieght']")
    assert found.startswith("runner (own.py:3) reads context['wieght']; no earlier stage writes it")


def test_what_a_verb_lacks_that_may_not_be_called_is_none(linear: Path) -> None:
    assert messages(linear, "def evaluate(self, context, phase): return context['wieght']") == []
    assert (
        messages(linear, "def run(self, context): print(1)\ndef train_epoch(self, context, epoch): context['a']") == []
    )


@pytest.mark.parametrize("verb", ["train_batch(self, context, phase, batch)", "validate(self, context, phase)"])
def test_what_a_verb_reads_and_writes_is_the_stages(linear: Path, verb: str) -> None:
    method = verb.partition("(")[0]
    call = f"return super().{method}({verb.partition('self, ')[2]}"
    found = flow(linear, f"def {verb}:\n    context['seen'] = context['device']\n    {call}")
    assert found.unknown == ""
    assert {"dataset", "model", "device"} <= set(found.reads())
    assert {"current_epoch", "metrics", "seen"} <= set(found.writes())
    assert inspected(linear, f"def {verb}: pass").config


@pytest.mark.parametrize(("base", "reads"), [("stages.Runner", True), ("RunnerBase", False)])
def test_a_method_of_the_name_of_a_verb_is_one_in_a_class_that_derives_from_the_default_alone(
    linear: Path, base: str, reads: bool
) -> None:
    head = f"from pipeline import RunnerBase, stages\nclass Runner({base}):\n"
    loop = "    def run(self, context):\n        for _ in context.epochs(): pass\n"
    verb = "    def is_over(self, context): return context['device'] is None\n"
    (linear.parent / "own.py").write_text(head + loop + verb)
    stage = inspect(linear, PATH).flows["train_runner"].stages["runner"]
    assert stage
    assert ("device" in stage.flow.reads()) == reads
