"""A method of a stage that nobody calls, and a ``super()`` that leads nowhere, are told from source; unusual code is not."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from pipeline import GeneralTrainer
from pipeline.check.checker import check

RUNNER = "runner.train_runner"


def messages(linear: Path, code: str, stage: str, *, run: bool = False) -> list[str]:
    """What is wrong with the stage that ``own.py`` defines, from line 2 on; where nothing is, it is run if asked for."""
    text = f"from pipeline import Context, RunnerBase, StartupBase, stages\n{textwrap.dedent(code).strip()}\n"
    (linear.parent / "own.py").write_text(text, encoding="utf-8")
    overrides = [f"{RUNNER}.{stage}_class_path={{workspace}}/own.py", f"{RUNNER}.epochs=1"]
    found = [fault.message for fault in check(linear, overrides)]
    if run and not found:
        GeneralTrainer(linear, overrides).run()
    return found


HEAD = "class Runner(stages.Runner):\n    "
NOWHERE = [
    ("def warm_up(self, phase, context): super().warm_up(phase, context)",
     "Runner.warm_up (own.py:3) calls super().warm_up, which no class after it has; known: evaluate, "),
    ("def run(self, context):\n        super().run(context)\n        super().evalute(context)",
     "Runner.run (own.py:5) calls super().evalute, which no class after it has; did you mean 'evaluate'?"),
    ("def run(self, context):\n        for each in range(2):\n            super(Runner, self).rum(context)",
     "Runner.run (own.py:5) calls super().rum, which no class after it has; did you mean 'run'?"),
    ("def run(self, context):\n        with open('x') as file:\n            return super().context",
     "Runner.run (own.py:5) calls super().context, which no class after it has; did you mean 'from_context'?"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "message"), NOWHERE)
def test_a_super_that_leads_nowhere_is_a_fault(linear: Path, body: str, message: str) -> None:
    first, *_ = (each for each in messages(linear, HEAD + body, "runner") if "calls super()." in each)
    assert first.startswith(message)


def test_a_super_is_looked_up_in_the_order_of_the_bases_of_the_stage(linear: Path) -> None:
    classes = """
        class Said:
            def say(self): super().say()
        class Last:
            def say(self): pass
        class Startup(Said, {last}stages.Startup):
            def startup(self, context): self.say()
    """
    assert messages(linear, classes.format(last="Last, "), "startup", run=True) == []
    (found,) = messages(linear, classes.format(last=""), "startup")
    assert found.startswith("Said.say (own.py:3) calls super().say, which no class after it has; known: from_context")


UNCALLED = [
    ("runner", "trian(self, context)", "the trainer calls run(context)"),
    ("runner", "evalaute(self, phase, runner, context)", "did you mean 'evaluate'?"),
    ("network", "buidl_network(self, context)", "did you mean 'build_network'?"),
    ("network", "buidl_model(self, settings)", "did you mean 'build_model'?"),
    ("startup", "start_up(self, context)", "did you mean 'startup'?"),
    ("startup", "lod(self, context)", "did you mean 'load'?"),
    ("terminal", "abrot(self, context, error)", "did you mean 'abort'?"),
]


@pytest.mark.parametrize(("stage", "method", "remedy"), UNCALLED)
def test_a_method_near_one_of_the_stage_that_nobody_calls_is_a_fault(
    linear: Path, stage: str, method: str, remedy: str
) -> None:
    name = stage.capitalize()
    (found,) = messages(linear, f"class {name}(stages.{name}):\n    def {method}: pass", stage)
    assert found == f"{name}.{method.partition('(')[0]} (own.py:3) is called by nobody; {remedy}"


VALID = {
    "called by another method": "def startup(self, context): self.lod(context)\n    def lod(self, context): pass",
    "asked for by name": "def startup(self, context): getattr(self, 'l' + 'od')(context)\n    def lod(self, context): pass",
    "asked for by a string": "def startup(self, context): methodcaller('lod')(self)\n    def lod(self): pass",
    "a callback": "def startup(self, context): context['resources'].callback(self.lod)\n    def lod(self): pass",
    "of a partial": "def startup(self, context): partial(self.lod, 1)()\n    def lod(self, one): pass",
    "called by a helper": "def startup(self, context): help_with(self)\n    def lod(self): pass",
    "called by a parent": "def lod(self): pass",
    "through its class": "def startup(self, context): type(self).__dict__['l' + 'od'](self)\n    def lod(self): pass",
    "a property": "@property\n    def lod(self): return 1",
    "decorated": "@noted\n    def lod(self): pass",
    "called by the decorator of another": "@around\n    def startup(self, context): pass\n    def lod(self): pass",
    "by __getattr__": "def __getattr__(self, name): return self.__class__.__dict__['lod']\n    def lod(*rest): pass",
    "private": "def _lod(self, context): pass",
    "far from any": "def weights_of_the_first_layer(self, context): pass",
    "abort": "def abort(self, context, error): pass",
    "override": "def load(self, context): super().load(context)",
    "super where it is": "def startup(self, context):\n        if hasattr(super(), 'lod'): super().lod(context)",
    "super tried": "def startup(self, context):\n        try: super().lod(context)\n        except AttributeError: pass",
    "super left out": "def startup(self, context):\n        if context['is_infer']: return\n        super().load(context)",
    "super in one way": "def startup(self, context): return super().lod(context) if context['is_infer'] else None",
    "super after a return": "def startup(self, context):\n        if not context['is_infer']: return\n        super().lod(context)",
    "super of object": "def __repr__(self): return super().__repr__()",
    "super of an attribute": "def startup(self, context): return super().noise",
    "super of another": "def startup(self, context):\n        class A(list):\n            def add(self): super().append(1)\n        A().add()",
    "super later": "def startup(self, context): context['later'] = lambda: super(Startup, self).lod(1)",
}  # fmt: skip
PARENT = """
from functools import partial, wraps
from operator import methodcaller
def help_with(stage): getattr(stage, "l" + "od")()
def noted(method): return method
def around(method):
    @wraps(method)
    def call(self, context): return getattr(self, "l" + "od")()
    return call
class Parent(stages.Startup):
    noise = 1
    def startup(self, context):
        super().startup(context)
        getattr(self, {name}, print)()
class Startup(Parent):
    """


@pytest.mark.slow
@pytest.mark.parametrize("case", VALID)
def test_code_that_works_is_no_fault(linear: Path, case: str) -> None:
    name = '"l" + "od"' if case == "called by a parent" else '"nothing"'
    assert messages(linear, PARENT.format(name=name) + VALID[case], "startup", run=True) == []


def test_a_trainer_of_ones_own_may_call_other_methods(linear: Path) -> None:
    trainer = "from pipeline import GeneralTrainer\nclass Trainer(GeneralTrainer): pass\n"
    (linear.parent / "trainer.py").write_text(trainer, encoding="utf-8")
    (linear.parent / "own.py").write_text(
        "from pipeline import stages\nclass Startup(stages.Startup):\n    def lod(self): pass\n"
    )
    overrides = [
        f"{RUNNER}.trainer_class={{workspace}}/trainer.py",
        f"{RUNNER}.startup_class_path={{workspace}}/own.py",
    ]
    assert check(linear, overrides) == []
