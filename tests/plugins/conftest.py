"""What the tests of the conversion share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from pipeline_plugins.paddlerec.convert import convert


@pytest.fixture
def converted() -> Callable[[str], tuple[str, list[str]]]:
    """Converts a config: its text -> (the new text, the notes without where they stand)."""

    def call(text: str) -> tuple[str, list[str]]:
        config = Path("config.yaml")
        config.write_text(text, encoding="utf-8")
        done = convert(config, Path())
        return done.text, [f"{note.address}: {note.message}" for note in done.notes]

    return call
