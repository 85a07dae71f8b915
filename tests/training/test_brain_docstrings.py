"""The examples in the docstrings of the package ``pipeline.brain`` run."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import pipeline
from pipeline.brain.main_process import main_process_only, run_on_main
from pipeline.brain.module_brain import ModuleBrain
from pipeline.brain.recipes import RecipeMethods
from pipeline.brain.run_options import RunOptions, parse_arguments
from pipeline.brain.script import create_experiment_directory, end_log

DOCUMENTED = [
    pipeline.Brain,
    RecipeMethods,
    ModuleBrain,
    RunOptions,
    parse_arguments,
    create_experiment_directory,
    main_process_only,
    run_on_main,
]


@pytest.mark.parametrize("documented", DOCUMENTED, ids=lambda documented: documented.__name__)
def test_docstring_example_runs(
    documented: Callable[..., object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _, example = inspect.cleandoc(documented.__doc__ or "").split("Example::\n")
    names = {name: getattr(pipeline, name) for name in pipeline.__all__}
    exec(textwrap.dedent(example), {**names, "torch": torch, "Path": Path, "ModuleBrain": ModuleBrain})
    end_log()
