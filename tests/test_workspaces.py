"""The package under which workspace files are imported."""

from __future__ import annotations

import importlib
import pickle
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.workspaces import WorkspaceFinder, folder_of, package_name

Workspace = Callable[..., Path]


@pytest.mark.parametrize("name", ["plain", "with space", "a-b.c", "données_数据", "_", "1", "a_b_ff"])
def test_the_name_of_a_package_carries_its_folder(tmp_path: Path, name: str) -> None:
    assert folder_of(package_name(tmp_path / name)) == tmp_path / name


def test_the_name_of_a_package_is_one_that_can_be_imported_and_read(tmp_path: Path) -> None:
    name = package_name(tmp_path / "my folder").removeprefix("pipeline.workspaces.")
    assert (name.isidentifier(), name.startswith("my_folder_")) == (True, True)


def test_a_folder_and_a_link_to_it_are_one_package(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert package_name(tmp_path / "link") == package_name(tmp_path / "real")


@pytest.mark.parametrize(
    "name", ["json", "pipeline.check", "pipeline.workspaces.nothing", "pipeline.workspaces.a_2f6e6f"]
)
def test_other_names_are_left_to_other_finders(name: str) -> None:
    assert WorkspaceFinder().find_spec(name) is None


def test_a_workspace_puts_nothing_on_the_path_and_no_bare_name_into_the_modules(workspace: Workspace) -> None:
    package, before = package_name(workspace({"only_here.py": "VALUE = 1"})), list(sys.path)
    assert importlib.import_module(f"{package}.only_here").VALUE == 1
    assert (sys.path, "only_here" in sys.modules) == (before, False)


def test_an_object_of_a_workspace_class_is_unpickled_by_name_alone(workspace: Workspace) -> None:
    package = package_name(workspace({"data.py": "class Point:\n    x = 1"}))
    text = pickle.dumps(importlib.import_module(f"{package}.data").Point())
    for name in [name for name in sys.modules if name.startswith(package)]:
        del sys.modules[name]
    assert pickle.loads(text).x == 1


def test_a_traceback_names_the_users_own_file(workspace: Workspace) -> None:
    folder = workspace({"data.py": "x = 1"})
    assert importlib.import_module(f"{package_name(folder)}.data").__file__ == str(folder / "data.py")
