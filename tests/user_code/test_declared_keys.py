"""What stages say that they read and write, held against each other and against the context."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline import Context, GeneralTrainer, StartupBase
from pipeline.check.checker import check
from pipeline.check.data_flow import flow_of_stage
from pipeline.errors import ContextError
from pipeline.user_code import classes, context_flow, source
from pipeline.workspaces import package_name

Workspace = Callable[..., Path]


def definition(folder: Path, name: str) -> source.Definition:
    module = source.read(f"{package_name(folder)}.stages")
    assert module
    found = source.define(module, name)
    assert found
    return found


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("reads = ('a', 'b')", ("a", "b")),
        ("reads = ['a']", ("a",)),
        ("reads: tuple[str, ...] = ('a',)", ("a",)),
        ("reads = ()", ()),
        ("reads = ('a',)\n    reads = ('b',)", ("b",)),
        ("reads = KEYS", ()),
        ("reads = ('a', *KEYS)", ()),
        ("reads = ('a',)\n    if KEYS:\n        reads = ()", ()),
        ("reads: tuple[str, ...]", ()),
    ],
)
def test_what_a_class_declares_is_read_from_its_source(
    workspace: Workspace, body: str, expected: tuple[str, ...]
) -> None:
    text = f"KEYS = ('k',)\nclass Base:\n    {body}\n    def run(self): pass\nclass Stage(Base): pass\n"
    assert classes.declared_keys(definition(workspace({"stages.py": text}), "Stage"), "reads", "run") == expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("pass", ("a",)),
        ("reads = ('b',)", ("b",)),
        ("def run(self): pass", ()),
        ("reads = ('b',)\n    def run(self): pass", ("b",)),
    ],
)
def test_what_a_class_declares_or_overrides_hides_what_its_base_declares(
    workspace: Workspace, body: str, expected: tuple[str, ...]
) -> None:
    text = f"class Base:\n    reads = ('a',)\n    def run(self): pass\nclass Stage(Base):\n    {body}\n"
    assert classes.declared_keys(definition(workspace({"stages.py": text}), "Stage"), "reads", "run") == expected


DECLARES = """
    from pipeline import StartupBase
    class Stage(StartupBase):
        reads = ("declared", "both")
        writes = ("promised", "done")
        def startup(self, context):
            context["both"], context["found"]
            context["done"] = 1
"""


def test_a_stage_does_what_it_declares_and_what_its_source_shows(workspace: Workspace) -> None:
    stage = definition(workspace({"stages.py": DECLARES}), "Stage")
    flow = flow_of_stage(stage, "startup")
    needed = {use.key: use.place for use in flow.demands()}
    assert needed == {"declared": "stages.py:3", "both": "stages.py:7", "found": "stages.py:7"}
    assert flow.writes() == ["done", "promised"]


def test_a_key_that_is_declared_and_whose_write_cannot_be_seen_may_be_there_at_any_time(workspace: Workspace) -> None:
    text = DECLARES.replace('context["found"]', 'context["promised"], context["done"]')
    flow = flow_of_stage(definition(workspace({"stages.py": text}), "Stage"), "startup")
    assert [use.key for use in flow.demands()] == ["declared", "both", "done"]


class Reader(StartupBase):
    reads = ("modle",)
    writes = ("weights",)

    def startup(self, context: Context) -> None:
        pass


def test_a_stage_is_not_run_without_what_it_declares_to_read() -> None:
    context = Context(model=1)
    expected = r"startup \(x.yaml:3\) declares that it reads context\['modle'\], .* far: model; did you mean 'model'\?"
    with pytest.raises(ContextError, match=expected):
        context_flow.check_reads(Reader(context), "startup", "startup (x.yaml:3)", context)


def test_a_stage_that_did_not_write_what_it_declares_is_told() -> None:
    context = Context(modle=1)
    context_flow.check_reads(Reader(context), "startup", "startup", context)
    with pytest.raises(
        ContextError, match=r"writes context\['weights'\] but did not; write it, or take it out of `writes`"
    ):
        context_flow.check_writes(Reader(context), "startup", "startup", context)


def test_a_stage_that_keeps_its_word_passes() -> None:
    context = Context(modle=1, weights=2)
    context_flow.check_reads(Reader(context), "startup", "startup", context)
    context_flow.check_writes(Reader(context), "startup", "startup", context)
    assert [access.key for access in context.accesses] == ["modle", "weights"]


OWN = """
    from pipeline import InstanceBase, StartupBase, stages

    class Instance(InstanceBase):
        writes = ("points",)
        def instance(self, context):
            {instance}
    class Startup(stages.Startup):
        reads = {reads}
        def startup(self, context):
            context["ran"] = True
"""
OVERRIDES = [f"runner.train_runner.{each}_class_path={{workspace}}/own.py" for each in ("instance", "startup")]


def own(linear: Path, instance: str, reads: str) -> None:
    text = textwrap.dedent(OWN).format(instance=instance, reads=reads)
    (linear.parent / "own.py").write_text(text)


def test_the_check_names_stage_class_and_line(linear: Path) -> None:
    own(linear, "context['points'] = 1", "('model', 'pionts')")
    (fault,) = check(linear, OVERRIDES)
    assert fault.address == "runner.train_runner.startup_class_path"
    assert fault.message.startswith(
        "startup (own.py:8) reads context['pionts']; no earlier stage writes it; did you mean 'points'?"
    )


def test_the_trainer_holds_a_stage_to_what_it_writes(linear: Path) -> None:
    own(linear, "exec('pass')", "('model',)")  # which the check does not follow
    expected = r"instance \(own.Instance, .*\) declares that it writes context\['points'\] but did not; write it"
    with pytest.raises(ContextError, match=expected):
        GeneralTrainer(linear, overrides=OVERRIDES).run()


def test_the_trainer_holds_a_stage_to_what_it_reads(linear: Path) -> None:
    own(linear, "context['points'] = 1", "tuple(['pionts'])")
    assert check(linear, OVERRIDES) == []
    expected = r"startup \(own.Startup, .*\) declares that it reads context\['pionts'\], .*; did you mean 'points'\?"
    with pytest.raises(ContextError, match=expected):
        GeneralTrainer(linear, overrides=OVERRIDES).run()


def test_stages_whose_declarations_agree_run(linear: Path) -> None:
    own(linear, "context['points'] = 1", "('model', 'points')")
    assert check(linear, OVERRIDES) == []
    assert GeneralTrainer(linear, overrides=OVERRIDES).run()["ran"] is True


UNCALLED = """
    from pipeline import stages

    class Network(stages.Network):
        def build_network(self, context):
            context["mine"] = 1
    class Runner(stages.Runner):
        def run(self, context):
            context["found"] = context["mine"]
"""


def test_a_stage_is_not_held_to_what_a_base_declares_whose_method_it_does_not_call(linear: Path) -> None:
    (linear.parent / "own.py").write_text(textwrap.dedent(UNCALLED), encoding="utf-8")
    overrides = [f"runner.train_runner.{each}_class_path={{workspace}}/own.py" for each in ("network", "runner")]
    assert check(linear, overrides) == []
    assert GeneralTrainer(linear, overrides).run()["found"] == 1


def test_what_it_writes_instead_is_what_later_stages_may_read(linear: Path) -> None:
    terminal = "    class Terminal(stages.Terminal):\n        def terminal(self, context): context['metrics']\n"
    (linear.parent / "own.py").write_text(textwrap.dedent(UNCALLED + terminal), encoding="utf-8")
    overrides = [
        f"runner.train_runner.{each}_class_path={{workspace}}/own.py" for each in ("network", "runner", "terminal")
    ]
    (fault,) = check(linear, overrides)
    assert fault.message.startswith(
        "terminal (own.py:11) reads context['metrics']; no earlier stage writes it. The default runner"
    )


class Heir(Reader):
    """Overrides the method for which its base declares."""

    def startup(self, context: Context) -> None:
        pass


class Silent(Reader):
    """Has the method of its base."""


class Polite(Reader):
    """Calls the method of its base."""

    def startup(self, context: Context) -> None:
        super().startup(context)


@pytest.mark.parametrize("stage", [Silent, Polite])
def test_a_stage_is_held_to_what_a_base_declares_whose_method_it_has_or_calls(
    stage: type[Reader], monkeypatch: pytest.MonkeyPatch
) -> None:
    # So that the source of this file is found by its name.
    monkeypatch.syspath_prepend(Path(__file__).parents[2])
    with pytest.raises(ContextError, match=r"declares that it writes context\['weights'\] but did not"):
        context_flow.check_writes(stage(Context()), "startup", "startup", Context())


def test_a_stage_that_overrides_the_method_is_held_to_what_it_declares_itself() -> None:
    context = Context()
    context_flow.check_reads(Heir(context), "startup", "startup", context)
    context_flow.check_writes(Heir(context), "startup", "startup", context)
