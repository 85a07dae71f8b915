"""The package under which workspace files are imported."""

from __future__ import annotations

import importlib
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from pipeline import Context, GeneralTrainer
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


LINE = "import torch\nfrom .slope import SLOPE\n"
LINE += "class Line(torch.utils.data.TensorDataset):\n    def __init__(self, size):\n"
LINE += "        x = torch.linspace(-1, 1, size).unsqueeze(1)\n        super().__init__(x, SLOPE * x)\n"


def trained(linear: Path, slope: int) -> Context:
    """A run with the data's slope written into a file that the dataset's imports."""
    (linear.parent / "slope.py").write_text(f"SLOPE = {slope}\n", encoding="utf-8")
    (linear.parent / "data.py").write_text(LINE, encoding="utf-8")
    return GeneralTrainer(linear).run()


def data_of(context: Context) -> Any:
    return context["dataset"]["train_data"].dataset


def test_a_file_that_was_edited_between_two_runs_is_imported_anew_and_that_is_what_is_kept(linear: Path) -> None:
    # Within a second, and as long as before: Python's cache takes it for the old one.
    runs = [trained(linear, slope) for slope in (3, 5)]
    assert [data_of(context)[0][1].item() for context in runs] == [-3.0, -5.0]
    kept = [context["run_dir"] / "workspace" / "slope.py" for context in runs]
    assert [each.read_text(encoding="utf-8") for each in kept] == ["SLOPE = 3\n", "SLOPE = 5\n"]


def test_files_that_nobody_edited_keep_their_classes(linear: Path) -> None:
    first, second = (type(data_of(trained(linear, 3))) for _ in range(2))
    assert first is second


def test_what_a_run_has_made_is_as_it_was_after_its_files_were_edited(linear: Path) -> None:
    first, second = (data_of(trained(linear, slope)) for slope in (3, 5))
    assert type(first) is not type(second)
    for each, value in ((first, -3.0), (second, -5.0)):
        assert type(pickle.loads(pickle.dumps(each))) is type(each)
        assert each[0][1].item() == type(each)(size=2)[0][1].item() == value


@pytest.mark.slow
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_import_what_was_edited(linear: Path, start: str) -> None:
    trained(linear, 3)
    loaded = trained(linear, 5)["dataset"]["train_data"].dataset
    loader = DataLoader(loaded, batch_size=24, num_workers=1, multiprocessing_context=start)
    assert next(iter(loader))[1][0].item() == -5.0
