"""Loops of one's own: what the context's methods for them read and write, and what costs a Runner its resume."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from pipeline import GeneralTrainer
from pipeline.check.checker import CheckResult, inspect
from pipeline.user_code.context_flow import Flow

PATH = ["runner.train_runner.runner_class_path={workspace}/own.py", "runner.train_runner.epochs=1"]
LOOP = """
    for epoch in context.epochs():
        for batch in context.batches("line"):
            context["model"]["line"]["updater"].update(batch)
        context.validate()
        if not context.resuming:
            context.save()
"""


def inspected(linear: Path, body: str, base: str = "RunnerBase") -> CheckResult:
    """The check of a Runner whose ``run`` has a body, which begins in line 5."""
    head = f"from pipeline import RunnerBase, stages\n\nclass Runner({base}):\n    def run(self, context):\n"
    (linear.parent / "own.py").write_text(head + textwrap.indent(textwrap.dedent(body).strip(), " " * 8))
    return inspect(linear, PATH)


def flow(linear: Path, body: str) -> Flow:
    stage = inspected(linear, body).flows["train_runner"].stages["runner"]
    assert stage
    return stage.flow


def messages(linear: Path, body: str) -> list[str]:
    return [fault.message.partition("; if a stage")[0] for fault in inspected(linear, body).faults]


def notes(linear: Path, body: str, base: str = "RunnerBase") -> list[str]:
    result = inspected(linear, body, base)
    assert result.config, result.faults
    return [note.partition("runner_class_path: ")[2] for note in result.config.notes]


def test_a_loop_over_the_contexts_batches_reads_and_writes_what_the_default_does(linear: Path) -> None:
    found = flow(linear, LOOP)
    assert (found.unknown, found.reads(), found.writes()[:2]) == (
        "",
        ["dataset", "model"],
        ["current_epoch", "metrics"],
    )


def test_a_method_for_loops_may_be_kept_under_a_name(linear: Path) -> None:
    found = flow(
        linear, "batches, validate = context.batches, context.validate\nfor batch in batches('line'): validate()"
    )
    assert (found.unknown, found.reads()) == ("", ["dataset", "model"])


def test_stop_neither_hides_what_a_stage_does_nor_makes_a_loop_of_it(linear: Path) -> None:
    body = "stop = context.stop\nstop('why')\ncontext.stop('why')\ncontext['x'] = context.stop_reason"
    found = flow(linear, body)
    assert (found.unknown, found.reads(), found.writes()) == ("", [], ["x"])
    [note] = notes(linear, body)
    assert "heeds no limit, saves nothing, calls no hook" in note


def test_a_misspelt_stop_is_a_fault(linear: Path) -> None:
    [found] = messages(linear, f"{LOOP}context.stopp('why')")
    assert found.endswith("calls context.stopp, which the context does not have; did you mean 'stop'?")


def test_what_such_a_loop_lacks_is_a_fault(linear: Path) -> None:
    assert messages(linear, LOOP.replace("context.validate()", "context['wieght']")) == [
        "runner (own.py:8) reads context['wieght']; no earlier stage writes it; written by then: dataset, model"
    ]


@pytest.mark.parametrize("call", ["batches('lien')", "validate('lien')", "batches(phase='lien', repeat=True)"])
def test_a_misspelt_phase_is_a_fault(linear: Path, call: str) -> None:
    (found,) = messages(linear, f"context.{call}")
    assert found.startswith("runner (own.py:5) reads context['model']['lien']; network (network.py:")
    assert found.endswith("writes context['model'] without it; did you mean 'line'?")


@pytest.mark.parametrize(
    ("use", "message"),
    [
        ("context['runner'].epoch", "context['runner'].epoch; the trainer writes context['runner'] without it; did you mean 'epochs'?"),
        ("self.a = context['runner']; self.a.maxsteps", "context['runner'].maxsteps; the trainer writes context['runner'] without it; did you mean 'max_steps'?"),
        ("context['runner']['epochs']", "context['runner']['epochs']; the trainer writes context['runner'] without it; did you mean 'epochs'?"),
    ],
)  # fmt: skip
def test_a_setting_that_the_runner_does_not_have_is_a_fault(linear: Path, use: str, message: str) -> None:
    # Whole: a stage of the user's does not write the settings, and can declare nothing.
    assert [fault.message for fault in inspected(linear, use).faults] == [f"runner (own.py:5) reads {message}"]


@pytest.mark.parametrize(
    "use",
    [
        "context['runner'].epochs, context['runner'].kind, context['runner'].model_dump()",
        "if hasattr(context['runner'], 'epoch'): context['runner'].epoch",
        "context['runner'] = self; context['runner'].epoch = 1; context['runner'].epoch",
    ],
)
def test_a_setting_that_it_has_or_may_have_is_none_and_runs(linear: Path, use: str) -> None:
    assert messages(linear, use) == []
    GeneralTrainer(linear, PATH).run()


LOST = "Runner (own.py:3) heeds no limit, saves nothing, calls no hook: not resumable; "
OWN_LOOP = """
    for epoch in range(context["runner"].epochs):
        for batch in context["dataset"]["train_data"]:
            context["model"]["line"]["updater"].update(batch)
"""


@pytest.mark.parametrize(
    ("base", "other"),
    [("RunnerBase", "override verbs of stages.Runner"), ("stages.Runner", "call super().run(context)")],
)
def test_a_runner_that_takes_nothing_of_the_loop_is_told_what_it_loses(linear: Path, base: str, other: str) -> None:
    (note,) = notes(linear, "context['metrics'] = {}", base)
    assert note == f"{LOST}take its batches from context.batches(phase), or {other}"


def test_the_trainer_says_so_before_the_stage_starts(linear: Path) -> None:
    assert inspected(linear, "from loguru import logger\nlogger.info('it runs')").faults == []
    log = (GeneralTrainer(linear, PATH).run()["run_dir"] / "log.txt").read_text(encoding="utf-8")
    assert 0 < log.index(LOST) < log.index("it runs")


@pytest.mark.parametrize(
    ("body", "base"),
    [
        (LOOP, "RunnerBase"),
        ("super().run(context)", "stages.Runner"),
        ("if context['device']: super().run(context)", "stages.Runner"),
        ("unknown(context)", "RunnerBase"),
        ("getattr(context, 'batches')('line')", "RunnerBase"),
        ("context.loop.save()", "RunnerBase"),
        ("context['hooks'].before_epoch(context=context)", "RunnerBase"),
        ("context['checkpointer'].save()", "RunnerBase"),
        ("stages.Runner(context).run(context)", "RunnerBase"),
    ],
)
def test_one_that_takes_something_or_may_is_not(linear: Path, body: str, base: str) -> None:
    assert notes(linear, body, base) == []


@pytest.mark.parametrize(
    ("method", "faults"),
    [
        ("is_over(self, context): return True", 0),
        ("run(self, context): print(context.epochs(2))", 0),
        ("run(self, context): super().run(context)", 1),
        ("__init__(self, context): pass", 1),
    ],
)
def test_a_runner_that_ends_by_itself_needs_no_number_of_epochs(linear: Path, method: str, faults: int) -> None:
    (linear.parent / "own.py").write_text(
        f"from pipeline import stages\nclass Runner(stages.Runner):\n    def {method}\n"
    )
    found = [fault.message for fault in inspect(linear, [PATH[0], "runner.train_runner.epochs=null"]).faults]
    assert len([message for message in found if message.startswith("does not say how long to train")]) == faults


def test_an_infer_runner_has_nothing_to_save(linear: Path) -> None:
    text = linear.read_text(encoding="utf-8").replace("class: train", "class: infer, init_model_path: .")
    linear.write_text(text.replace(" epochs: 2,", ""), encoding="utf-8")
    assert notes(linear, "pass") == []


GAN = "real = {made}\n{head}: self.fit(next(real))"
INEXACT = [
    ("context.batches('line')", "for n in range(6)"),
    ("iter(context.batches('line', repeat=True))", "for n in range(context['runner'].epochs)"),
    ("self.real = context.batches('line')", "STEPS = 2\nfor n in range(1, STEPS)"),
]


@pytest.mark.parametrize(("made", "head"), INEXACT)
def test_a_next_in_a_counted_loop_is_named_with_what_resumes(linear: Path, made: str, head: str) -> None:
    (note,) = notes(linear, GAN.format(made=made, head=head))
    line = 6 + head.count("\n")
    assert note.startswith(f"own.py:{line}: a resumed run counts this loop from its start again")
    assert "context.batches(phase, count=N), or derive the count from `.done`" in note


def test_a_next_in_a_counted_comprehension_is_named_too(linear: Path) -> None:
    assert len(notes(linear, "real = context.batches('line')\nself.fit([next(real) for n in range(6)])")) == 1


@pytest.mark.parametrize(
    ("made", "head"),
    [
        ("context.batches('line', count=6)", "for n in range(6)"),
        ("context.batches('line')", "for n in range(real.done, 6)"),
        ("context.batches('line')", "for n in range(6 - real.done)"),
        ("context.batches('line')", "while real.done < 6"),
        ("context.batches('line')", "for other in context.batches('line')"),
        ("iter([1, 2]); context.save()", "for n in range(6)"),
    ],
)
def test_a_next_that_resumes_is_not(linear: Path, made: str, head: str) -> None:
    assert notes(linear, GAN.format(made=made, head=head)) == []
