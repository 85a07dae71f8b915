"""The verbs of the default stages, overridden: what they may not take, and which keys they read and write."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from pipeline import GeneralTrainer
from pipeline.check.checker import CheckResult, inspect
from pipeline.errors import ConfigError
from pipeline.user_code.context_flow import Flow

PATH = ["runner.train_runner.runner_class_path={workspace}/own.py", "runner.train_runner.epochs=1"]


def inspected(linear: Path, body: str, stage: str = "Runner") -> CheckResult:
    """The check of a stage that derives from the default, and whose body begins in line 3."""
    head = f"from pipeline import stages\nclass {stage}(stages.{stage}):\n"
    (linear.parent / "own.py").write_text(head + textwrap.indent(textwrap.dedent(body).strip(), " " * 4))
    return inspect(linear, [path.replace("runner_class", f"{stage.lower()}_class") for path in PATH])


def messages(linear: Path, body: str, stage: str = "Runner") -> list[str]:
    return [fault.message.partition("; if a stage")[0] for fault in inspected(linear, body, stage).faults]


def flow(linear: Path, body: str) -> Flow:
    stage = inspected(linear, body).flows["train_runner"].stages["runner"]
    assert stage
    return stage.flow


SIGNATURES = [
    ("Runner", "train_epoch(self, epoch)", "context and epoch", "train_epoch(self, context, epoch)"),
    ("Runner", "train_phase(self, context)", "context and phase", "train_phase(self, context, phase)"),
    ("Runner", "train_batch(self, batch)", "context, phase and batch", "train_batch(self, context, phase, batch)"),
    ("Runner", "validate(self)", "context and phase", "validate(self, context, phase)"),
    ("Runner", "evaluate(self, phase, runner, context)", "context and phase", "evaluate(self, context, phase)"),
    ("Runner", "is_over(self)", "the context alone", "is_over(self, context)"),
    ("Network", "needed(self, phases)", "phases and runner", "needed(self, phases, runner)"),
    ("Network", "build_dataset(self, settings, context)", "settings, runner and context",
     "build_dataset(self, settings, runner, context)"),
    ("Network", "build_phase(self, phase)", "phase, runner and context", "build_phase(self, phase, runner, context)"),
    ("Network", "build_model(self, phase)", "phase and context", "build_model(self, phase, context)"),
    ("Network", "build_brain(self, model)", "model, phase and context", "build_brain(self, model, phase, context)"),
    ("Network", "build_optim_scheduler(self, module)", "module, runner and context",
     "build_optim_scheduler(self, module, runner, context)"),
    ("Network", "build_updater(self, phase, brain, context)", "phase, model, brain, optim_schedulers and context",
     "build_updater(self, phase, model, brain, optim_schedulers, context)"),
    ("Terminal", "newest(self)", "the context alone", "newest(self, context)"),
    ("Terminal", "abort(self, context)", "context and error", "abort(self, context, error)"),
]  # fmt: skip


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(("stage", "written", "arguments", "right"), SIGNATURES)
def test_a_verb_with_other_parameters_is_a_fault(
    linear: Path, stage: str, written: str, arguments: str, right: str
) -> None:
    verb, _, taken = written.removesuffix(")").partition("(")
    (found,) = messages(linear, f"def {written}: pass", stage)
    assert found == f"{stage}.{verb} (own.py:3) takes ({taken}), and is called with {arguments}; write `def {right}`"


@pytest.mark.parametrize(
    ("stage", "body"),
    [
        ("Network", "def build_model(self, *given): return super().build_model(*given)"),
        ("Network", "def build_model(self, phase, context, scale=1.0): return super().build_model(phase, context)"),
        # What leads to it is the class's own, or the default comes to it in no run of this config.
        (
            "Network",
            """
            def build_phase(self, phase, runner, context):
                return {"model": self.build_model(phase), "brain": None}
            def build_model(self, phase): return phase
            """,
        ),
        (
            "Network",
            """
            def build_model(self, phase, context):
                self.build_modules(2)
                return super().build_model(phase, context)
            def build_modules(self, count): print(count)
            """,
        ),
        ("Terminal", "def abort(self, *given): print(given)"),
    ],
)
def test_one_of_a_network_or_terminal_that_can_be_called_is_none(linear: Path, stage: str, body: str) -> None:
    assert messages(linear, body, stage) == []


def test_the_wrong_verb_of_a_network_is_what_the_run_stops_at(linear: Path) -> None:
    assert messages(linear, "def build_model(self, phase): pass", "Network")
    with pytest.raises(ConfigError, match=re.escape("build_model (own.py:3) takes (self, phase), and is called with")):
        GeneralTrainer(linear, [PATH[0].replace("runner_class", "network_class"), PATH[1]]).run()


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
