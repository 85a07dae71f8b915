"""The graph as text."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from rich.cells import cell_len

from pipeline.graph.edges import Graph
from pipeline.graph.text import text

Staged = Callable[..., Path]
Drawn = Callable[..., list[Graph]]

FIVE_STAGES = """\
train_runner
┏━ instance ━━━━━━━━━━━ custom your_instance.py:8 ━┓
┃                                           points ┠─────╮
┗━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━┛     │
┏━ network ━━━━━━━━━━━━━ custom your_network.py:8 ━┓     │
┃ from the trainer: device                   model ┠─────│─╮
┃                                        optimizer ┠───╮ │ │
┗━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━┛   │ │ │
┏━ startup ━━━━━━━━━━━━━ custom your_startup.py:8 ━┓   │ │ │
┃ from the trainer: engine                   model ◄───│─│─┤
┃ to the trainer: status                           ┃   │ │ │
┗━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━┛   │ │ │
┏━ runner ━━━━━━━━━━━━━━━ custom your_runner.py:8 ━┓   │ │ │
┃ from the trainer: config, runner_name  optimizer ◄───╯ │ │
┃ to plugins: current_epoch                 points ◄─────╯ │
┃                                            model ◄───────┤
┃                                             loss ┠───╮   │
┗━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━┛   │   │
┏━ terminal ━━━━━━━━━━━ custom your_terminal.py:8 ━┓   │   │
┃ from the trainer: run_dir                   loss ◄───╯   │
┃                                            model ◄───────╯
┗━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━┛
"""
MISSING = """\
mine
┏━ instance ━━ custom stages.py:2 ━┓
┗━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━┛
┏━ network ━━━ custom stages.py:5 ━┓
┃ to nobody known: optimiser       ┃
┗━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━┛
┏━ startup ━━━ custom stages.py:8 ━┓
┗━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━┛
┏━ ! runner ━ custom stages.py:11 ━┓
┃                        optimizer ◄─✗
┗━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━┛
┏━ terminal ━ custom stages.py:14 ━┓
┗━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━┛
✗ nobody writes it  ! at fault
"""


def red(drawing: str) -> list[str]:
    """What is drawn in red."""
    return re.findall("\x1b\\[31m\x1b\\[1m(.*?)\x1b\\[0m", drawing)


def test_the_example_of_five_stages(drawn: Drawn) -> None:
    assert click.unstyle(text(drawn("five_stages"))) == FIVE_STAGES


def test_a_missing_key_comes_from_nowhere(missing: list[Graph]) -> None:
    assert click.unstyle(text(missing)) == MISSING


def test_a_missing_key_and_the_stage_at_fault_are_red(missing: list[Graph]) -> None:
    found = red(text(missing))
    assert "optimizer ◄─✗" in found
    assert [each for each in found if "custom" in each] == ["┏━ ! runner ━ custom stages.py:11 ━┓"]


def test_nothing_is_red_without_a_fault(drawn: Drawn) -> None:
    assert red(text(drawn("five_stages"))) == []


def test_a_default_stage_has_another_frame_than_a_custom_one(drawn: Drawn) -> None:
    lines = click.unstyle(text(drawn("custom_startup"))).splitlines()
    headings = [line.split()[0] + line.split()[1] for line in lines if " default " in line or " custom " in line]
    assert headings == ["┏━instance", "╭─network", "┏━startup", "╭─runner", "╭─terminal"]


def test_what_is_perhaps_read_is_dashed_and_said_so(drawn: Drawn) -> None:
    lines = click.unstyle(text(drawn("first_steps"))).splitlines()
    assert [re.sub(".*  ", "", line) for line in lines if "◄" in line] == [
        "model ◄╌╌╌┤ │",
        "model ◄───╯ │",
        "dataset ◄─────╯",
        "metrics ◄╌╌╌╯ │",
        "best ◄╌╌╌╌╌╯",
    ]
    assert lines[-1] == "╌ perhaps read"


def test_what_cannot_be_told_is_in_question(unclear: list[Graph]) -> None:
    drawing = click.unstyle(text(unclear))
    assert "┃ may do more: stages.py:4 cannot be followed ┃" in drawing
    assert "┌╌ startup ╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌ ? ╌┐\n┆ may do more: its class cannot be told       ┆" in drawing


def test_two_runners_stand_below_each_other(drawn: Drawn) -> None:
    drawing = click.unstyle(text(drawn("movielens_deepfm")))
    first, second = drawing.split("\n\n")
    assert first.startswith("train_runner\n")
    assert second.startswith("infer_runner\n")


def test_a_long_note_goes_on_in_the_next_line(drawn: Drawn) -> None:
    drawing = click.unstyle(text(drawn("first_steps")))
    assert "│ from the trainer: config, runner_name,   dataset ├" in drawing
    assert "│   device, hyper_parameters, is_infer       model ├" in drawing


def test_the_frames_are_straight_with_wide_letters_too(crowd: list[Graph]) -> None:
    lines = click.unstyle(text(crowd)).splitlines()[1:-1]
    ends = [re.split("(?<=[┓┠┛])|(?<=[┃◄])(?=[ ─╌]|$)", line[1:], maxsplit=1)[0] for line in lines]
    assert {cell_len(each) for each in ends} == {40}
    assert f"┃ from the trainer: rank      größe数据 ◄─✗{' ' * 13}│ │   │ │" in lines


@pytest.mark.parametrize("example", ["five_stages", "first_steps", "movielens_deepfm"])
def test_no_line_is_longer_than_it_has_to_be(drawn: Drawn, example: str) -> None:
    lines = click.unstyle(text(drawn(example))).splitlines()
    assert all(line == line.rstrip() for line in lines)
    assert max(map(cell_len, lines)) < 64
