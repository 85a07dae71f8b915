"""Source files with encodings and numbers that Python cannot decode or print."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.check.checker import check

HUGE = "0x" + "f" * 5000

STAGES = f"""\
from pipeline import stages


class Startup(stages.Startup):
    reads = ({HUGE},)

    def startup(self, context, size: {HUGE} = {HUGE}):
        context[{HUGE}] = {HUGE}
        super().startup(context)
"""


def config_of(folder: Path, **runner: str) -> dict[str, Any]:
    return {
        "workspace": str(folder),
        "runner": [{"name": "train_runner", "class": "train", **runner}],
        "dataset": [{"name": "data", "class_path": "torch.utils.data.TensorDataset"}],
    }


@pytest.mark.parametrize("encoding", ["rot13", "hex", "nonsense"])
def test_encoding_that_holds_no_text_is_a_fault(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "startup.py").write_text(f"# coding: {encoding}\nclass Startup: ...\n")
    config = config_of(tmp_path, startup_class_path="{workspace}/startup.py")
    faults = {fault.address: fault.message for fault in check(config)}
    assert encoding in faults["runner.train_runner.startup_class_path"]


def test_source_with_a_huge_number_is_checked(workspace: Callable[..., Path]) -> None:
    """Python accepts the number, but refuses to print it."""
    folder = workspace({"startup.py": STAGES})
    config = config_of(folder, startup_class_path="{workspace}/startup.py")
    addresses = {fault.address for fault in check(config)}
    assert "runner.train_runner.startup_class_path" not in addresses
