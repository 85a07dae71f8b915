"""What the tests of the config share: drafts, configs and faults of a text that is written into a folder of its own."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.config.load import Config, ConfigBuilder

RUNNER = "runner: [{name: train_runner, class: train, epochs: 2}]\n"


@pytest.fixture
def draft(workspace: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Callable[..., ConfigBuilder]:
    """``draft("hyper_parameters: {…}", "a.b=1", files={"base.yaml": "…"})``; a runner is added where there is none.

    The folder becomes the current one, so that the file is called as a user would type it.
    """

    def make(
        text: str, *overrides: str, files: dict[str, str] | None = None, name: str = "config.yaml"
    ) -> ConfigBuilder:
        text = textwrap.dedent(text)
        folder = workspace(
            {name: text if "runner:" in text or "_base_" in text else f"{text}\n{RUNNER}", **(files or {})}
        )
        monkeypatch.chdir(folder)
        return ConfigBuilder(name, overrides)

    return make


@pytest.fixture
def config(draft: Callable[..., ConfigBuilder]) -> Callable[..., Config]:
    """The resolved config of a text without faults."""

    def make(text: str, *overrides: str, files: dict[str, str] | None = None, name: str = "config.yaml") -> Config:
        made = draft(text, *overrides, files=files, name=name)
        assert made.config is not None, "\n".join(map(str, made.faults))
        return made.config

    return make


@pytest.fixture
def faults(draft: Callable[..., ConfigBuilder]) -> Callable[..., list[str]]:
    """The first lines of the faults of a text: ``config.yaml:12:5: address: message``."""

    def make(text: str, *overrides: str, files: dict[str, str] | None = None, name: str = "config.yaml") -> list[str]:
        found = draft(text, *overrides, files=files, name=name).faults
        return [str(fault).splitlines()[0] for fault in found]

    return make
