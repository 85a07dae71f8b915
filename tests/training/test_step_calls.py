"""A step costs as few calls as we promise, and nothing grows with the number of steps: counts, which no clock decides."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
BENCHMARKS = REPOSITORY / "tests" / "benchmarks"
pytestmark = pytest.mark.slow


def printed(program: str, *arguments: str) -> Any:
    command = [sys.executable, str(BENCHMARKS / program), *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    """The table of ``step_calls.py``."""
    found: list[dict[str, Any]] = printed("step_calls.py", "--json")
    return found


@pytest.fixture(scope="module")
def above(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Way to train -> calls a step above the raw loop with the same features."""
    return {row["way"]: row["above"] for row in rows if row["beside"].startswith("raw loop")}


def test_with_the_defaults_a_step_makes_at_most_20_calls_above_the_raw_loop(above: dict[str, float]) -> None:
    counts = {way: count for way, count in above.items() if "defaults" in way}
    assert {way: count for way, count in counts.items() if count > 20} == {}
    assert len(counts) == 7


def test_a_loop_of_ones_own_makes_at_most_20_calls_a_step_and_one_in_anothers_body_30(above: dict[str, float]) -> None:
    assert above["pipeline run, a loop of one's own"] <= 20
    assert above["pipeline run, two phases 3 : 1"] <= 30


OWN_DATASET = "pipeline run, DataLoader, a dataset of one's own"


def test_a_dataset_that_may_draw_costs_at_most_40_calls_a_step_more(above: dict[str, float]) -> None:
    assert above[OWN_DATASET] <= 20 + 40


def test_a_dataset_that_declares_to_draw_nothing_costs_as_without_a_seed(above: dict[str, float]) -> None:
    without_seed = above[f"{OWN_DATASET}, seed: null"]
    assert above[f"{OWN_DATASET}, uses_random_numbers = False"] == pytest.approx(without_seed, abs=0.5)


def test_with_everything_off_a_step_makes_at_most_12_calls_above_the_raw_loop(above: dict[str, float]) -> None:
    counts = {way: count for way, count in above.items() if "everything off" in way}
    assert {way: count for way, count in counts.items() if count > 12} == {}
    assert len(counts) == 4


def test_a_plugin_with_one_hook_per_batch_costs_its_own_call_and_at_most_two_of_ours(
    rows: list[dict[str, Any]],
) -> None:
    [costs] = [row["above"] for row in rows if row["way"] == "the same, a plugin with a hook per batch"]
    # A few of the calls are timed.
    assert 1 < costs < 1 + 2 + 0.5


def test_the_readme_gives_these_counts(above: dict[str, float]) -> None:
    text = (REPOSITORY / "tests" / "README.md").read_text(encoding="utf-8")
    told = dict(
        re.findall(
            r"^\| ((?:Brain\.fit|pipeline run)[^|]*) \| raw loop[^|]* \| ([+-][\d.]+) \|", text, flags=re.MULTILINE
        )
    )
    assert {way: float(count) for way, count in told.items()} == pytest.approx(above, abs=1.5)


def test_on_two_ranks_a_step_makes_at_most_40_calls_above_a_ddp_script_and_25_with_everything_off() -> None:
    rows = [row for row in printed("ddp_step_calls.py", "--json") if row["way"].startswith("pipeline run")]
    limits = {row["way"]: 25 if "everything off" in row["way"] else 40 for row in rows}
    assert len(rows) == 2 * 3
    assert [row for row in rows if row["above"] > limits[row["way"]]] == []
    text = (REPOSITORY / "tests" / "README.md").read_text(encoding="utf-8")
    told = re.findall(
        r"^\| (pipeline run[^|]*) \| DDP by hand[^|]* \| ([+-][\d.]+) \| ([+-][\d.]+) \|", text, flags=re.MULTILINE
    )
    counts = {(row["way"], row["rank"]): row["above"] for row in rows}
    assert {(way, rank): float(own) for way, *ranks in told for rank, own in enumerate(ranks)} == pytest.approx(
        counts, abs=1.5
    )


def test_what_python_holds_does_not_grow_with_the_number_of_steps() -> None:
    # An object kept for each step would be 5,400 blocks; once around, caches take a thousand or so.
    grown = printed("memory.py", "--steps", "6000")
    assert {way: held["blocks"] for way, held in grown.items() if held["blocks"] > 2700} == {}


def test_a_run_on_a_file_ten_times_as_large_takes_next_to_no_more_memory() -> None:
    # The order of a shuffled epoch as a list of Python's numbers would be 25 MB more, of about 450.
    assert printed("slot_memory.py", "--megabytes", "30", "300")["ratio"] <= 1.03
