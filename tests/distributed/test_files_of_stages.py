"""The stages that we show write their files from one rank, since every rank runs them."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from pipeline import GeneralTrainer
from tests.conftest import REPOSITORY
from tests.distributed.ranks import Ranks

STAGES = REPOSITORY / "plugins" / "stages" / "examples"
EXAMPLES = REPOSITORY / "workspace_examples"


def files_written(config: Path, name: str, overrides: list[str]) -> int:
    """Run a config, and return how often this rank has opened a file of a name to write it."""
    opened: list[str] = []

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        if event == "open" and str(arguments[0]).endswith(name) and str(arguments[1]) in {"w", "wb"}:
            opened.append(name)

    sys.addaudithook(watch)
    GeneralTrainer(config, overrides).run()
    return len(opened)


@pytest.mark.parametrize(
    ("example", "name", "overrides"),
    [
        ("terminal.py", "report.txt", ["runner.train_runner.terminal_class_path={workspace}/terminal.py"]),
        ("five_stages", "line.txt", ["runner.train_runner.epochs=1"]),
        pytest.param(
            "char_lm",
            "sample.txt",
            ["runner.train_runner.max_steps=2", "runner.train_runner.valid_interval=2"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_file_of_example_stage_is_written_by_rank_0_alone(
    two_ranks: Ranks, linear: Path, example: str, name: str, overrides: list[str]
) -> None:
    config = EXAMPLES / example / "config.yaml"
    if example == "terminal.py":
        shutil.copy(STAGES / example, linear.parent)
        config = linear
    first, second = two_ranks(files_written, config, name, [*overrides, f"output_dir={linear.parent / 'runs'}"])
    assert (first > 0, second) == (True, 0)
