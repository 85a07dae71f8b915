"""A class that cannot stand as a stage is told from source: its method, its constructor, what it declares."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline import GeneralTrainer
from pipeline.check.checker import check, inspect
from pipeline.check.swap_report import swap_report
from pipeline.errors import ConfigError

RUNNER = "runner.train_runner"
Workspace = Callable[..., Path]


def messages(linear: Path, body: str, arguments: str = "{}", stage: str = "startup") -> list[str]:
    """What is wrong with a stage of this body, in ``own.py`` from line 3 on."""
    name = stage.capitalize()
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    text = f"from pipeline import {name}Base, stages\nclass {name}(stages.{name}):\n{lines}"
    (linear.parent / "own.py").write_text(text, encoding="utf-8")
    overrides = [f"{RUNNER}.{stage}_class_path={{workspace}}/own.py", f"{RUNNER}.{stage}_args={arguments}"]
    return [fault.message for fault in check(linear, overrides)]


METHODS = [
    ("def startup(self): pass", "takes (self), and is called with the context alone; write `def startup(self, context)`"),
    ("def startup(self, context, extra): pass", "takes (self, context, extra), and is called with the context alone; write"),
    ("def startup(self, *, context): pass", "takes (self, *, context), and is called with the context alone; write"),
    ("@staticmethod\ndef startup(self, context): pass", "takes (self, context), and is called with the context alone; write `def startup(context)`"),
    ("@property\ndef startup(self): pass", "is a property, and is called as startup(context); take @property away"),
    ("async def startup(self, context): pass", "is async, and nobody would await it: it would do nothing; write `def startup(self, context)`"),
    ("def startup(self, context):\n    for _ in range(3): yield", "has a yield: called, it would do nothing; take the yield out"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "message"), METHODS)
def test_a_method_that_the_trainer_cannot_call_is_a_fault(linear: Path, body: str, message: str) -> None:
    (found,) = messages(linear, body)
    line = 3 if not body.startswith("@") else 4
    assert found.startswith(f"Startup.startup (own.py:{line}) {message}")


@pytest.mark.parametrize(
    "body",
    [
        "def startup(self, ctx): pass",
        "def startup(self, *rest): pass",
        "@staticmethod\ndef startup(context): pass",
        "def startup(self, context):\n    def numbers(): yield 1\n    list(numbers())",
        pytest.param("def startup(self, context, extra=1): pass", marks=pytest.mark.slow),
        pytest.param("def startup(self, context, **rest): pass", marks=pytest.mark.slow),
        pytest.param("def startup(self, context, /): pass", marks=pytest.mark.slow),
        pytest.param("def helper(self): pass", marks=pytest.mark.slow),
    ],
)
def test_a_method_that_can_be_called_is_none_and_runs(linear: Path, body: str) -> None:
    assert messages(linear, body) == []
    GeneralTrainer(linear, [f"{RUNNER}.startup_class_path={{workspace}}/own.py"]).run()


@pytest.mark.parametrize("name", ["reads", "writes"])
def test_a_declaration_without_its_comma_is_a_fault(linear: Path, name: str) -> None:
    (found,) = messages(linear, f'{name} = ("model")')
    assert found == f"Startup (own.py:3): `{name}` is 'model', a string; write {name} = (\"model\",)"


def test_a_constructor_without_the_context_is_told_from_a_misspelt_argument(linear: Path) -> None:
    (found,) = messages(linear, "def __init__(self, path, part='a'): pass", "{path: x}")
    assert found == ("Startup's parameter 'path' is given the context; write `def __init__(self, context, path, …)`")


def test_a_constructor_that_takes_no_context_is_a_fault(linear: Path) -> None:
    (found,) = messages(linear, "def __init__(self): pass")
    assert found == (
        "Startup.__init__ (own.py:3) takes (self), and is called with context; write `def __init__(self, context, …)`"
    )


@pytest.mark.parametrize("taken", ["self, *args", "self, ctx", "*args, **kwargs", "self, context, /, path=1"])
def test_a_constructor_that_takes_the_context_somehow_is_none(linear: Path, taken: str) -> None:
    assert messages(linear, f"def __init__({taken}): pass") == []


ENVS = "path = envs.get_global_env('runner.' + context['runner_name'] + '.init_model_path', None)"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (ENVS, "calls envs.get_global_env, which is PaddleRec's; "
         "write context['config'].get('runner.' + context['runner_name'] + '.init_model_path', None)"),
        ("envs.get_global_env('a.b', default_value=3)", "calls envs.get_global_env, which is PaddleRec's; write context['config'].get('a.b', 3)"),
        ("fluid.io.load_persistables(context['device'])",
         "uses fluid, and paddle is not used here; write it with torch, or take the line out"),
    ],
)  # fmt: skip
def test_what_is_left_of_paddle_is_named_with_what_to_write_instead(linear: Path, line: str, message: str) -> None:
    (found,) = messages(linear, f"def startup(self, context):\n    {line}")
    assert found == f"Startup.startup (own.py:4) {message}"


@pytest.mark.parametrize(
    "line", ["envs = context; envs.get_global_env", "fluid = 1; fluid + 1", "(lambda fluid: fluid)(1)"]
)
def test_a_name_of_paddles_that_is_the_users_own_is_no_fault(linear: Path, line: str) -> None:
    assert messages(linear, f"def startup(self, context):\n    {line}") == []


def test_imports_of_paddle_are_named_beside_what_uses_them(linear: Path) -> None:
    (linear.parent / "own.py").write_text(
        "import paddle.fluid as fluid\nfrom paddlerec.core.utils import envs\nfrom pipeline import StartupBase\n"
        "class Startup(StartupBase):\n    def startup(self, context):\n        fluid.io.x(envs.get_global_env('a.b'))\n"
    )
    found = [fault.message for fault in check(linear, [f"{RUNNER}.startup_class_path={{workspace}}/own.py"])]
    assert [re.sub(r"^'.*?': |\S*/|;.*", "", message) for message in found] == [
        "own.py:1 imports 'paddle', which is not used here",
        "own.py:2 imports 'paddlerec', which is not used here",
        "Startup.startup (own.py:6) calls envs.get_global_env, which is PaddleRec's",
        "Startup.startup (own.py:6) uses fluid, and paddle is not used here",
    ]


def test_a_network_that_writes_another_key_than_it_declares_is_a_fault(linear: Path) -> None:
    body = "writes = ('dataset', 'model', 'tree')\ndef build_network(self, context): context.update(datasat=1, model=2)"
    assert messages(linear, body, stage="network") == [
        "network (own.py:2) declares that it writes context['dataset'], and writes context['datasat']; "
        "write one name in both places, or declare both"
    ]


def test_a_network_that_does_not_write_what_the_default_does_is_a_fault_where_the_runner_reads_it(linear: Path) -> None:
    found = messages(linear, "def build_network(self, context): pass", stage="network")
    assert [re.sub(r":\d+|; if a stage .*", "", each) for each in found] == [
        f"runner (runner.py) reads context['{key}']; no earlier stage writes it. "
        "The default network, which own.py replaces, writes it: call super().build_network(context) before it is read (own.py)"
        for key in ("dataset", "model")
    ]


@pytest.mark.parametrize(
    "body",
    [
        "def build_network(self, context): super().build_network(context)",
        "def build_network(self, context): stages.Network.build_network(self, context)",
        "def build_network(self, context): context.update(globals()['made'](context))",
        "def needed(self, phases, runner): return super().needed(phases, runner)",
    ],
)
def test_a_network_that_may_well_write_it_is_none(linear: Path, body: str) -> None:
    assert messages(linear, body, stage="network") == []


def test_a_key_that_a_stage_removes_is_named_with_that_stage(linear: Path) -> None:
    (linear.parent / "own.py").write_text(
        "from pipeline import stages\nclass Startup(stages.Startup):\n    def startup(self, context):\n"
        "        del context['dataset']\n"
    )
    (fault,) = check(linear, [f"{RUNNER}.startup_class_path={{workspace}}/own.py"])
    removed = r"which startup \(own.py:2\) removes; leave it, or write it again"
    assert re.fullmatch(rf"runner \(runner.py:\d+\) reads context\['dataset'\], {removed}", fault.message)


def test_a_stage_that_cannot_be_read_is_not_called_the_default(linear: Path) -> None:
    (linear.parent / "own.py").write_text(
        "from pipeline import stages\ndef make(): return type('Startup', (stages.Startup,), {})\nStartup = make()\n"
    )
    run = GeneralTrainer(linear, [f"{RUNNER}.startup_class_path={{workspace}}/own.py"]).run()["run_dir"]
    assert (run / "swaps.txt").read_text() == (
        "train_runner: startup is not the default, and what it is cannot be told from its source\n"
    )


def test_nothing_of_it_runs(linear: Path) -> None:
    (linear.parent / "own.py").write_text("from pipeline import stages\nclass Startup(stages.Startup):\n"
                                          "    async def startup(self, context): pass\n")  # fmt: skip
    with pytest.raises(ConfigError, match="is async"):
        GeneralTrainer(linear, [f"{RUNNER}.startup_class_path={{workspace}}/own.py"])
    assert not Path("runs").exists()


def report(config: Path, **files: str) -> list[str]:
    """The lines on the runner, its stages replaced by the given files."""
    paths = []
    for stage, code in files.items():
        (config.parent / f"{stage}.py").write_text(textwrap.dedent(code), encoding="utf-8")
        paths.append(f"{RUNNER}.{stage}_class_path={{workspace}}/{stage}.py")
    return swap_report(inspect(config, paths).flows).splitlines()


def test_without_a_swap_there_is_nothing_to_say(linear: Path) -> None:
    assert report(linear) == []


NETWORK = """
    from pipeline import NetworkBase
    class Network(NetworkBase):
        def __init__(self, context, width, depth=2): super().__init__(context)
        def build_network(self, context):
            context["model"] = {}
            context["points"] = context["device"]
"""
TERMINAL = """
    from pipeline import TerminalBase
    class Terminal(TerminalBase):
        def terminal(self, context): context["points"], context.get("metrics")
"""


def test_keys_and_arguments_are_held_against_the_default(linear: Path) -> None:
    assert report(linear, network=NETWORK, terminal=TERMINAL) == [
        "train_runner: network is network.py:Network, in the place of stages.Network",
        "  derives from NetworkBase: no method of stages.Network runs",
        "  arguments: width, depth (optional)",
        "  also writes: points (needed by terminal)",
        "  no longer writes: dataset (needed by runner)",
        "train_runner: terminal is terminal.py:Terminal, in the place of stages.Terminal",
        "  derives from TerminalBase: no method of stages.Terminal runs",
        "  also reads: points",
    ]


@pytest.mark.parametrize("made", ["stages.Network(context)", "Default(context)"])
def test_a_stage_that_makes_the_default_is_not_said_to_do_without_it(linear: Path, made: str) -> None:
    head = "from pipeline import NetworkBase, stages\nfrom pipeline.stages import Network as Default\n"
    network = f"class Network(NetworkBase):\n    def build_network(self, context): {made}.build_network(context)"
    assert "no method of" not in "".join(report(linear, network=head + network))


HEAD = "from pipeline import stages\nclass {0}(stages.{0}):\n    def "
VERB = "train_batch(self, context, phase, batch): "
OVERRIDES = [
    ("startup", "startup(self, context): super().startup(context)", "startup (with super())"),
    ("startup", "startup(self, context): stages.Startup.startup(self, context)", "startup (with super())"),
    ("startup", "startup(self, context):\n        if self.x: super().startup(context)", "startup (sometimes without super())"),
    ("startup", "startup(self, context): pass", "startup (without super())"),
    ("startup", "load(self, context, is_fleet=False, main_program=None): pass", "load (without super())"),
    ("startup", "helper(self): pass", "nothing"),
    ("startup", "startup(self, context): self.lod(context)\n    def lod(self, context): pass", "startup (without super())"),
    ("runner", VERB + "return phase.brain.fit_batch(batch)", "train_batch (without super())"),
    ("runner", VERB + "return super().train_batch(context, phase, batch)\n    def is_over(self, context): return False",
     "train_batch (with super()), is_over (without super())"),
    ("runner", "is_over(self, context): return context['rank'] > 1 or super().is_over(context)", "is_over (sometimes without super())"),
    ("runner", "__init__(self, context): pass", "nothing"),
]  # fmt: skip


@pytest.mark.parametrize(("stage", "methods", "overrides"), OVERRIDES)
def test_the_methods_that_a_subclass_overrides_are_named(
    linear: Path, stage: str, methods: str, overrides: str
) -> None:
    name = stage.capitalize()
    assert report(linear, **{stage: HEAD.format(name) + methods}) == [
        f"train_runner: {stage} is {stage}.py:{name}, in the place of stages.{name}",
        f"  overrides: {overrides}",
    ]


def test_a_method_of_two_classes_is_with_super_where_both_call_it(linear: Path) -> None:
    text = HEAD.format("Startup").replace("class Startup", "class First") + "startup(self, context): {}\n"
    text += "class Startup(First):\n    def startup(self, context): super().startup(context)"
    assert report(linear, startup=text.format("pass"))[1] == "  overrides: startup (without super())"
    assert report(linear, startup=text.format("super().startup(context)"))[1] == "  overrides: startup (with super())"


def test_one_swap_of_two_runners_is_reported_once(linear: Path) -> None:
    text = linear.read_text()
    runner = next(line for line in text.splitlines() if "train_runner" in line)
    path = 'instance_class_path: "{workspace}/instance.py"}'
    both = [runner.replace("}", f", {path}").replace("train_runner", name) for name in ("first", "second")]
    linear.write_text(text.replace(runner, "\n".join(both)))
    (linear.parent / "instance.py").write_text(HEAD.format("Instance") + "instance(self, context): pass")
    assert swap_report(inspect(linear).flows).splitlines() == [
        "first, second: instance is instance.py:Instance, in the place of stages.Instance",
        "  overrides: instance (without super())",
    ]


def test_with_the_default_left_out_its_keys_are_named(linear: Path) -> None:
    network = "from pipeline import stages\nclass Network(stages.Network):\n    def build_network(self, context): unknown(context)"
    assert report(linear, network=network)[1:] == [
        "  overrides: build_network (without super())",
        "  no longer writes, as far as can be told: dataset (needed by runner), model (needed by runner, may be read by startup)",
        "  may do more to the context: network.py:3 cannot be followed",
    ]  # fmt: skip


def test_keys_that_are_written_on_some_ways_alone_are_named_with_who_reads_them(linear: Path) -> None:
    network = (
        HEAD.format("Network") + "build_network(self, context):\n        if self.x: super().build_network(context)"
    )
    assert report(linear, network=network)[1:] == [
        "  overrides: build_network (sometimes without super())",
        "  may no longer write: dataset (needed by runner), model (needed by runner, may be read by startup)",
    ]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("context['points'] = 1", "also writes: points (read by nobody after it)"),
        ("context['is_exit'] = True", "also writes: is_exit (read by the trainer)"),
        ("context['metrics'] = {}", "also writes: metrics (may be read by terminal and plugins)"),
        ("context['status'] = 'terminal_pass'", "also writes: status (leads to terminal)"),
        (
            "\n        if context['rank']: context['status'] = 'startup_pass'",
            "also writes: status (may lead to startup)",
        ),
    ],
)
def test_a_new_key_is_named_with_who_reads_it(linear: Path, body: str, expected: str) -> None:
    startup = f"from pipeline import StartupBase\nclass Startup(StartupBase):\n    def startup(self, context): {body}"
    assert f"  {expected}" in report(linear, startup=startup)


def test_what_cannot_be_followed_may_write_what_the_default_does(linear: Path) -> None:
    network = "from pipeline import NetworkBase\nclass Network(NetworkBase):\n    def build_network(self, context): unknown(context)"
    lost = "  no longer writes, as far as can be told: dataset (needed by runner), model (needed by runner, may be read by startup)"
    assert lost in report(linear, network=network)


def test_abort_may_be_added_to_a_terminal_stage(linear: Path) -> None:
    head = "from pipeline import stages\nclass Terminal(stages.Terminal):\n    def "
    assert report(linear, terminal=f"{head}abort(self, context, error): pass")[1:] == [
        "  overrides: nothing",
        "  adds: abort",
    ]


def test_a_stage_that_is_not_there_is_reported_as_such(linear: Path) -> None:
    path = f"{RUNNER}.startup_class_path={{workspace}}/gone.py"
    expected = "train_runner: startup is not the default, and what it is cannot be told from its source\n"
    assert swap_report(inspect(linear, [path]).flows) == expected


ALIKE = [("phase1", "phase2"), ("x_train", "y_train"), ("model_a", "model_b"), ("folds", "fold"), ("left", "right")]


@pytest.mark.parametrize(("written", "read"), ALIKE)
def test_a_key_that_may_be_left_out_is_no_misspelt_one_of_another(linear: Path, written: str, read: str) -> None:
    body = f"def startup(self, context): context['{written}'] = context.get('{read}')"
    assert messages(linear, body, stage="startup") == []


@pytest.mark.parametrize("key", ["mode", "test", "stats"])
def test_a_short_key_with_a_default_is_no_misspelt_one(linear: Path, key: str) -> None:
    assert messages(linear, f"def startup(self, context): context.get('{key}', 1)", stage="startup") == []


SLIPS = [("attempt", "atttempt"), ("attempt", "atempt"), ("attempt", "attempz"), ("attempt", "attmept")]


@pytest.mark.parametrize(("written", "read"), SLIPS)
def test_a_key_that_may_be_left_out_is_a_misspelt_one_with_one_other_letter(
    linear: Path, written: str, read: str
) -> None:
    body = f"def startup(self, context): context['{written}'] = context.get('{read}')"
    (found,) = messages(linear, body, stage="startup")
    assert f"reads context['{read}'], which nobody writes; did you mean '{written}'?" in found


ATTRIBUTES = {
    "assigned elsewhere": "def startup(self, context):\n    self.toll\ndef toul(self, other): other.toll = 1",
    "asked for": "def startup(self, context):\n    if hasattr(self, 'toll'): self.toll()\ndef toul(self): pass",
    "of another object": "def startup(self, context): context['device'].typ\ndef type(self): pass",
    "far from any": "def startup(self, context):\n    if context['is_infer']: self.nothing_like_it()",
}


@pytest.mark.parametrize("case", ATTRIBUTES)
def test_an_attribute_that_may_be_there_is_no_misspelt_one(linear: Path, case: str) -> None:
    assert messages(linear, ATTRIBUTES[case], stage="startup") == []
