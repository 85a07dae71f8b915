"""What the swap report says of a stage that stands in the place of the default, line by line."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from pipeline.check.checker import inspect
from pipeline.check.stage import swap_report

RUNNER = "runner.train_runner"


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


def test_keys_arguments_and_methods_are_held_against_the_default(linear: Path) -> None:
    lines = report(linear, network=NETWORK, terminal=TERMINAL)
    assert [line for line in lines if "does not have" not in line] == [
        "train_runner: network is network.py:Network, in the place of pipeline.stages.network:Network",
        "  reads: device",
        "  no longer writes: dataset (needed by runner)",
        "  also writes: points (needed by terminal)",
        "  arguments: width, depth (optional)",
        "train_runner: terminal is terminal.py:Terminal, in the place of pipeline.stages.terminal:Terminal",
        "  reads: points, metrics",
    ]
    (network, terminal) = (line for line in lines if "does not have" in line)
    assert network.startswith(
        "  derives from the base, not from the default: does not have build_brain, build_dataset, "
    )
    assert terminal == "  derives from the base, not from the default: does not have newest"


HEAD = "from pipeline import stages\nclass Startup(stages.Startup):\n    def "
FIRST = "train_runner: startup is startup.py:Startup, in the place of pipeline.stages.startup:Startup"


@pytest.mark.parametrize(
    ("methods", "expected"),
    [
        ("startup(self, context): super().startup(context)", ["calls super().startup()"]),
        ("startup(self, context): stages.Startup.startup(self, context)", ["calls super().startup()"]),
        ("startup(self, context):\n        if self.x: super().startup(context)",
         ["may call super().startup(): on some ways what the default does there is left out"]),
        ("startup(self, context): pass", ["does not call super().startup(): what the default does there is left out"]),
        ("load(self, context): pass", []),
        ("startup(self, context): self.lod(context)\n    def lod(self, context): pass",
         ["does not call super().startup(): what the default does there is left out"]),
        ("startup(self, context): unknown(context)",
         ["may do more to the context: startup.py:3 cannot be followed",
          "does not call super().startup(): what the default does there is left out"]),
    ],
)  # fmt: skip
def test_what_a_subclass_makes_of_the_default_is_told(linear: Path, methods: str, expected: list[str]) -> None:
    first, *others = report(linear, startup=HEAD + methods)
    assert first == FIRST
    assert [line for line in others if not line.startswith("  reads: ")] == [f"  {line}" for line in expected]


def test_with_the_default_left_out_its_keys_are_named(linear: Path) -> None:
    network = "from pipeline import stages\nclass Network(stages.Network):\n    def build_network(self, context): unknown(context)"
    assert report(linear, network=network)[1:] == [
        "  no longer writes, as far as can be told: dataset (needed by runner), model (needed by runner, may be read by startup)",
        "  may do more to the context: network.py:3 cannot be followed",
        "  does not call super().build_network(): what the default does there is left out",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("context['points'] = 1", "also writes: points (read by no later stage)"),
        ("context['is_exit'] = True", "also writes: is_exit (needed by terminal)"),
        ("context['metrics'] = {}", "also writes: metrics (may be read by terminal)"),
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
    assert len(report(linear, terminal=f"{head}abort(self, context, error): pass")) == 2


def test_a_stage_that_is_not_there_is_reported_as_such(linear: Path) -> None:
    path = f"{RUNNER}.startup_class_path={{workspace}}/gone.py"
    expected = "train_runner: startup is not the default, and what it is cannot be told from its source\n"
    assert swap_report(inspect(linear, [path]).flows) == expected
