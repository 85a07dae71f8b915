"""The graph as a table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from pipeline.check.graph import Graph, table

Drawn = Callable[..., list[Graph]]


def rows(graph: Graph) -> dict[str, list[str]]:
    """Stage -> class, reads and writes, as they stand in the table, its lines joined."""
    found: dict[str, list[str]] = {}
    for line in [line for line in text(graph).splitlines() if line.startswith("│")]:
        stage, *cells = (cell.strip() for cell in line[1:-1].split("│"))
        name = stage if stage not in ("", "at fault") else next(reversed(found))
        before = found.setdefault(name, [""] * 3)
        found[name] = [f"{old} {new}".strip() for old, new in zip(before, cells, strict=True)]
    return found


def text(graph: Graph, *, coloured: bool = False) -> str:
    console = Console(width=1000, force_terminal=coloured, color_system="standard" if coloured else None)
    with console.capture() as captured:
        console.print(table(graph))
    return captured.get()


def test_the_example_of_five_stages(drawn: Drawn) -> None:
    assert rows(drawn("five_stages")[0]) == {
        "instance": ["custom your_instance.py:8", "", "points"],
        "network": ["custom your_network.py:8", "from the trainer: device", "model, optimizer"],
        "startup": [
            "custom your_startup.py:8",
            "from network: model from the trainer: engine",
            "to the trainer: status",
        ],
        "runner": [
            "custom your_runner.py:8",
            "from instance: points from network: model, optimizer from the trainer: config, runner_name",
            "loss to plugins: current_epoch",
        ],
        "terminal": [
            "custom your_terminal.py:8",
            "from network: model from runner: loss from the trainer: run_dir",
            "",
        ],
    }


def test_a_missing_key_comes_from_nobody_and_its_stage_is_at_fault(missing: list[Graph]) -> None:
    assert rows(missing[0])["runner"][1] == "from nobody: optimizer"
    assert rows(missing[0])["network"][2] == "to nobody known: optimiser"
    assert "│ at fault │" in text(missing[0])


def test_what_is_at_fault_is_red(drawn: Drawn, missing: list[Graph]) -> None:
    assert "\x1b[1;31mfrom nobody: optimizer" in text(missing[0], coloured=True)
    assert "\x1b[1;31m" not in text(drawn("five_stages")[0], coloured=True)


def test_what_is_perhaps_read_is_said_to_be(drawn: Drawn) -> None:
    (graph,) = drawn("first_steps")
    assert rows(graph)["terminal"][1].startswith("perhaps from runner: metrics, best from the trainer: ")


def test_what_cannot_be_told_is_in_question(unclear: list[Graph]) -> None:
    assert rows(unclear[0])["instance"][1] == "may do more: stages.py:4 cannot be followed"
    assert rows(unclear[0])["startup"][:2] == ["?", "may do more: its class cannot be told"]


@pytest.mark.parametrize("name", ["first_steps", "movielens_deepfm", "crowd"])
def test_the_table_is_straight_and_fits_a_screen(drawn: Drawn, crowd: list[Graph], name: str) -> None:
    graph = crowd[0] if name == "crowd" else drawn(name)[0]
    widths = {cell_len(line) for line in text(graph).splitlines()}
    assert len(widths) == 1
    assert max(widths) <= 120


def test_a_line_break_in_a_name_is_written_out(staged: Callable[..., Path], drawn: Drawn) -> None:
    (graph,) = drawn(staged(instance="context['a\\nb'] = 1", network="context['a\\nb']", runner="context['c\\x07']"))
    assert rows(graph)["network"][1] == "from instance: a\\nb"
    assert rows(graph)["runner"][1] == "from nobody: c\\x07"
