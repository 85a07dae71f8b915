"""What the tests of the command line share."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from click.testing import CliRunner, Result

from pipeline.cli import group


@pytest.fixture
def pipeline() -> Callable[..., Result]:
    """Calls a command in this process: ``pipeline("check", path)``."""

    def call(*arguments: object) -> Result:
        return CliRunner().invoke(group, [str(argument) for argument in arguments], prog_name="pipeline")

    return call
