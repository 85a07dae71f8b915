"""The package as users have it: the files of the wheel, and what mypy and pyright see of it from another folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from example_needs import missing_packages
from pipeline_plugins.new.command import KINDS

from pipeline.stages.base import METHODS

REPOSITORY = Path(__file__).parents[1]
PACKAGES = {"pipeline": "pipeline", "plugins": "pipeline_plugins"}
"""Folder -> the package that it is installed as."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `pip install .` builds and installs, from a copy of the tree in which an earlier version was built."""
    source = tmp_path_factory.mktemp("source")
    for name in PACKAGES:
        shutil.copytree(REPOSITORY / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    earlier = source / "build" / "lib" / "pipeline" / "removed.py"
    earlier.parent.mkdir(parents=True)
    earlier.touch()
    build = "from setuptools import build_meta; build_meta.build_wheel('.')"
    subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, check=True)
    return next(source.glob("*.whl"))


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that has the wheel, and for the rest what is installed here."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder)
    packages = next(folder.glob("lib/*/site-packages"))
    zipfile.ZipFile(wheel).extractall(packages)
    # What is put on the path by a line of a .pth has its own .pth files left out: an editable installation is not seen.
    others = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "others.pth").write_text("\n".join(others), encoding="utf-8")
    return folder / "bin" / "python"


def files(folder: str) -> set[str]:
    """The files of a package's folder but its READMEs, as the wheel has to name them."""
    paths = [path for path in (REPOSITORY / folder).rglob("*") if path.is_file() and path.suffix not in {".pyc", ".md"}]
    return {(PACKAGES[folder] / path.relative_to(REPOSITORY / folder)).as_posix() for path in paths}


def test_the_wheel_has_every_file_of_the_two_packages_and_no_other(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == files("pipeline") | files("plugins")


def test_from_another_folder_the_wheel_is_what_is_imported(python: Path) -> None:
    command = "import pipeline, pipeline_plugins; print(pipeline.__file__, pipeline_plugins.__file__)"
    said = subprocess.run([python, "-c", command], capture_output=True, text=True, check=True).stdout
    folder = next(python.parents[1].glob("lib/*/site-packages"))
    assert said.split() == [str(folder / name / "__init__.py") for name in PACKAGES.values()]


@pytest.fixture
def _workspaces(pipeline: Callable[..., Result]) -> None:
    """In the folder of the test: all that `pipeline new` writes, the examples, and those of `pipeline stages`."""
    for kind in KINDS:
        pipeline("new", kind, "--kind", kind)
    pipeline("new", "plain", "--plugin", *(argument for stage in METHODS for argument in ("--stage", stage)))
    for folder in ("workspace_examples", "plugins/stages/examples"):
        shutil.copytree(REPOSITORY / folder, folder, ignore=shutil.ignore_patterns("__pycache__"))
    for example in Path("workspace_examples").glob("*/config.yaml"):
        if missing_packages(example.parent):
            shutil.rmtree(example.parent)


@pytest.mark.slow
@pytest.mark.usefixtures("_workspaces")
def test_mypy_finds_no_error_in_templates_and_examples(python: Path, pytestconfig: pytest.Config) -> None:
    # Its cache is kept, since torch takes it ten seconds.
    kept = getattr(pytestconfig, "cache", None)
    command = [sys.executable, "-m", "mypy", "--strict", "--explicit-package-bases", "--config-file="]
    command += [f"--python-executable={python}", f"--cache-dir={kept.mkdir('mypy') if kept else 'mypy'}", "."]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == f"Success: no issues found in {len(list(Path().rglob('*.py')))} source files\n"


@pytest.mark.slow
@pytest.mark.usefixtures("_workspaces")
def test_pyright_finds_no_error_in_templates_and_examples(python: Path) -> None:
    command = [sys.executable, "-m", "pyright", f"--pythonpath={python}", "."]
    quiet = os.environ | {"PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}
    done = subprocess.run(command, env=quiet, capture_output=True, text=True, check=False)
    assert done.stdout == "0 errors, 0 warnings, 0 informations\n"
