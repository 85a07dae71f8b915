"""The examples in docstrings run, and print what they say."""

from __future__ import annotations

import ast
import doctest
import re
import textwrap
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch

import pipeline
from pipeline.brain.script import end_log

PACKAGE = Path(pipeline.__file__).parent
SOURCES = {path: path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}
INTERACTIVE = [path.relative_to(PACKAGE).with_suffix("").as_posix() for path, text in SOURCES.items() if ">>> " in text]


def scripts() -> Iterator[tuple[str, str, str]]:
    """Yield the module, the object and the code of each ``Example::`` block."""
    for path, text in SOURCES.items():
        if "Example::" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                block = re.search(r"Example::\n((?:\n| +.*\n?)+)", ast.get_docstring(node) or "")
                if block:
                    module = path.relative_to(PACKAGE).with_suffix("").as_posix()
                    yield module, node.name, textwrap.dedent(block.group(1))


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("module", INTERACTIVE)
def test_interactive_examples_print_what_they_say(module: str) -> None:
    result = doctest.testmod(import_module(f"pipeline.{module.replace('/', '.')}"))
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize(("module", "name", "code"), [pytest.param(*case, id=case[1]) for case in scripts()])
def test_script_examples_run(module: str, name: str, code: str) -> None:
    documented = import_module(f"pipeline.{module.replace('/', '.')}")
    public = {name: getattr(pipeline, name) for name in pipeline.__all__}
    exec(code, {**vars(documented), **public, "torch": torch, "Path": Path})
    end_log()
