"""What is said of a key that is missing, and at which line of the config."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from pipeline.check.checker import check
from pipeline.check.data_flow import default_definition

RUNNER = "runner.train_runner"
UNSEEN = re.compile("; if a stage writes .* where check cannot see it, declare .* in the `writes` of that stage$")
"""The way out of a fault that is none, which each of them names."""
METHODS = {
    "instance": "instance",
    "network": "build_network",
    "startup": "startup",
    "runner": "run",
    "terminal": "terminal",
}


def faults(config: Path, **bodies: str) -> list[str]:
    """``address: message`` of each fault, stages replaced by ones with the given bodies; a body begins in line 5."""
    paths = []
    for stage, body in bodies.items():
        name = stage.capitalize()
        head = (
            f"from pipeline import {name}Base\n\nclass {name}({name}Base):\n    def {METHODS[stage]}(self, context):\n"
        )
        (config.parent / f"your_{stage}.py").write_text(head + textwrap.indent(textwrap.dedent(body), " " * 8))
        paths.append(f"{RUNNER}.{stage}_class_path={{workspace}}/your_{stage}.py")
    return [f"{fault.address}: {UNSEEN.sub('', fault.message)}" for fault in check(config, paths)]


DEFAULT = default_definition("network").location
WHOLE = "context['model'] = unknown(); context['dataset'] = unknown()"
"""A network stage that writes what the default does."""
MESSAGES: list[tuple[dict[str, str], str]] = [
    # Nobody writes it.
    ({"terminal": "context['weights']"},
     ("terminal (your_terminal.py:5) reads context['weights']; no earlier stage writes it; "
     "written by then: best, current_epoch, dataset, metrics, model")),
    ({"instance": "context['weights']"},
     ("instance (your_instance.py:5) reads context['weights']; no earlier stage writes it; "
     "written by then: nothing but what the trainer writes")),
    # It is misspelt: what the user wrote, what a default stage wrote, what the trainer wrote.
    ({"instance": "context['points'] = 1", "terminal": "context['pionts']"},
     "terminal (your_terminal.py:5) reads context['pionts']; no earlier stage writes it; did you mean 'points'?"),
    ({"terminal": "context['modle']"},
     "terminal (your_terminal.py:5) reads context['modle']; no earlier stage writes it; did you mean 'model'?"),
    ({"instance": "context['hyper_parameter']"},
     "instance (your_instance.py:5) reads context['hyper_parameter']; no earlier stage writes it; did you mean 'hyper_parameters'?"),
    # It is right, and what was written is misspelt.
    ({"network": "context['model'] = context['datasets'] = unknown()", "runner": "context['dataset']"},
     ("runner (your_runner.py:5) reads context['dataset']; no earlier stage writes it. "
     "The default network, which your_network.py replaces, writes it: write it there too")),
    # The stage itself is to write it.
    ({"network": f"context['model']['line'] = 1; {WHOLE}"},
     "network (your_network.py:5) reads context['model']; no earlier stage writes it; write it here, before it is read: context['model'] = …"),
    ({"terminal": "context['weights']\ncontext['weights'] = 1"},
     "terminal (your_terminal.py:5) reads context['weights']; no earlier stage writes it; write it here, before it is read: context['weights'] = …"),
    # The default wrote it, or something like it.
    ({"network": "context['model'] = unknown()", "runner": "context['dataset']"},
     ("runner (your_runner.py:5) reads context['dataset']; no earlier stage writes it. "
     "The default network, which your_network.py replaces, writes it: write it there too")),
    ({"network": WHOLE, "runner": "context['optimizer']"},
     ("runner (your_runner.py:5) reads context['optimizer']; no earlier stage writes it. The default network, which your_network.py "
     "replaces, writes model[…]['optim_schedulers']: write context['optimizer'] in your_network.py, or read what there is")),
    # It is written too late, or on a way that is not taken, or taken away.
    ({"startup": "context['weights']", "terminal": "context['weights'] = 1"},
     ("startup (your_startup.py:5) reads context['weights']; no earlier stage writes it. "
     "terminal (your_terminal.py:3) writes it, but later or not at all: write it before, or read it there")),
    ({"network": f"{WHOLE}; context['status'] = 'train_pass'", "startup": "context['weights'] = 1", "runner": "context['weights']"},
     ("runner (your_runner.py:5) reads context['weights']; no earlier stage writes it. "
     "startup (your_startup.py:3) writes it, but later or not at all: write it before, or read it there")),
    ({"startup": "del context['model']", "runner": "context['model']"},
     "runner (your_runner.py:5) reads context['model'], which startup (your_startup.py:3) removes; leave it, or write it again"),
    # The config names no such phase or dataset.
    ({"startup": "context['model']['lien']"},
     f"startup (your_startup.py:5) reads context['model']['lien']; network ({DEFAULT}) writes context['model'] without it; did you mean 'line'?"),
    ({"startup": "context['model']['line']['model']; context['dataset']['x']"},
     f"startup (your_startup.py:5) reads context['dataset']['x']; network ({DEFAULT}) writes context['dataset'] without it; it has train_data"),
    # So are the trainer's counters.
    ({"instance": "context['train_state']['iteraton']"},
     ("instance (your_instance.py:5) reads context['train_state']['iteraton']; "
     "the trainer writes context['train_state'] without it; did you mean 'iteration'?")),
]  # fmt: skip


@pytest.mark.parametrize(("bodies", "expected"), MESSAGES)
def test_a_missing_key_is_said_with_who_reads_it_and_what_to_do(
    linear: Path, bodies: dict[str, str], expected: str
) -> None:
    (found,) = faults(linear, **bodies)
    assert found.partition(": ")[2] == expected


def test_the_fault_stands_at_the_stage_that_reads(linear: Path) -> None:
    (found,) = faults(linear, network="context['model'] = unknown()", runner="context['dataset']")
    assert found.startswith(f"{RUNNER}.runner_class_path: runner (your_runner.py:5) reads context['dataset']; ")


def test_where_a_default_stage_reads_the_fault_stands_at_the_swapped_stage_that_no_longer_writes(linear: Path) -> None:
    (found,) = faults(linear, network="context['model'] = unknown()")
    assert found.startswith(f"{RUNNER}.network_class_path: runner (runner.py:")
    assert found.endswith("The default network, which your_network.py replaces, writes it: write it there too")


def test_the_line_is_that_of_the_class_path(linear: Path) -> None:
    (linear.parent / "mine.py").write_text(
        "from pipeline import stages\nclass Terminal(stages.Terminal):\n    def terminal(self, context): context['wieghts']\n"
    )
    text = linear.read_text().replace(
        "epochs: 2,", "epochs: 2,\n     terminal_class_path: '{workspace}/mine.py:Terminal',"
    )
    linear.write_text(text)
    (fault,) = check(linear)
    assert (fault.line, text.splitlines()[fault.line - 1].strip()[:20]) == (fault.line, "terminal_class_path:")


def test_a_fault_names_the_way_out(linear: Path) -> None:
    (linear.parent / "mine.py").write_text(
        "from pipeline import stages\nclass Terminal(stages.Terminal):\n    def terminal(self, context): context['speed']\n"
        "class Startup(stages.Startup):\n    writes = ('speed',)\n"
    )
    terminal = f"{RUNNER}.terminal_class_path={{workspace}}/mine.py"
    (fault,) = check(linear, [terminal])
    assert fault.message.endswith("where check cannot see it, declare it in the `writes` of that stage")
    assert check(linear, [terminal, f"{RUNNER}.startup_class_path={{workspace}}/mine.py"]) == []


def test_every_missing_key_is_told_once_with_its_first_line(linear: Path) -> None:
    found = faults(linear, terminal="context['one']\nfor epoch in range(2):\n    context['one'], context['two']")
    assert [each.partition(": ")[2].partition(";")[0] for each in found] == [
        "terminal (your_terminal.py:5) reads context['one']",
        "terminal (your_terminal.py:7) reads context['two']",
    ]


@pytest.mark.parametrize(
    "bodies",
    [
        # After what cannot be followed, nothing is certain.
        {"network": f"{WHOLE}; unknown(context)", "terminal": "context['weights']"},
        {"network": f"{WHOLE}; context['status'] = unknown()", "terminal": "context['weights']"},
        {"network": f"{WHOLE}; context['is_exit'] = unknown()", "runner": "context['weights']"},
        {"runner": "if unknown(): context['weights']"},
        {"runner": "if 'weights' in context: context['weights']"},
        {"runner": "if 'model' not in context: context['weights']"},
        {"runner": "context['mine'] = 1\nif 'mine' in context: pass\nelse: context['weights']"},
        {
            "instance": "if unknown(): context['mine'] = 1",
            "runner": "if 'mine' in context: pass\nelse: context['weights']",
        },
        {"runner": "if unknown():\n    if 'mine' in context: pass\n    else: context['weights']"},
        {"runner": "if 'mine' in context: pass\nelif unknown(): context['weights']"},
        {"runner": "if 'mine' not in context: return\ncontext['weights']"},
    ],
)
def test_what_is_not_certain_is_no_fault(linear: Path, bodies: dict[str, str]) -> None:
    assert faults(linear, **bodies) == []


@pytest.mark.parametrize("phases", ["0.5", "[line, {}]", "[lien]"])
def test_phases_that_stand_for_nothing_are_one_fault(linear: Path, phases: str) -> None:
    (linear.parent / "own.py").write_text("from pipeline import stages\nclass Startup(stages.Startup):\n    pass\n")
    overrides = [f"{RUNNER}.phases={phases}", f"{RUNNER}.startup_class_path={{workspace}}/own.py"]
    assert [fault.address.partition(".phases")[0] for fault in check(linear, overrides)] == [RUNNER]


REPOSITORY = Path(__file__).parents[2]

PROGRAM = Path(__file__).parents[1] / "faults" / "data_flow.py"


def count_missing_keys(count: int, seed: int = 0) -> str:
    """Run the program on generated workspaces, and return the numbers that it prints last."""
    command = [sys.executable, "-W", "ignore", str(PROGRAM), str(count), "--seed", str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"\d+ false faults; \d+ of \d+ missing keys found", done.stdout)
    assert found
    return found[0]


@pytest.mark.slow
def test_in_8_generated_workspaces_all_missing_keys_are_found() -> None:
    """Six of the eight have a mistake in them. How many keys are missing is what their runs end with."""
    assert count_missing_keys(8, seed=37) == "0 false faults; 6 of 6 missing keys found"


@pytest.mark.release
def test_of_100_generated_workspaces_the_missing_keys_are_found_and_no_others() -> None:
    assert count_missing_keys(100) in " ".join((REPOSITORY / "tests" / "README.md").read_text(encoding="utf-8").split())


def test_a_status_that_lacks_a_letter_is_a_fault_and_stats_is_a_key_of_ones_own(linear: Path) -> None:
    (fault,) = faults(linear, instance="context['stats'] = {}; context['sttus'] = 'train_pass'")
    assert "instance (your_instance.py:5) writes context['sttus'], which nobody reads; did you mean 'status'?" in fault
