"""What importing a workspace file would run into, told from its source: held against what Python does."""

from __future__ import annotations

import importlib
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipeline.user_code import imports
from pipeline.user_code.imports import wrong_imports
from pipeline.workspaces import package_name

Workspace = Callable[..., Path]
Files = dict[str, str]

TREE = "Tree = 1\n"
WORKING: dict[str, Files] = {
    "relative": {"m.py": "from .tree import Tree\nfrom . import tree\nfrom .tree import *", "tree.py": TREE},
    "upwards": {"m.py": "from .sub.leaf import Tree", "sub/leaf.py": "from ..tree import Tree", "tree.py": TREE},
    "a package": {"m.py": "from .sub import Tree, leaf", "sub/__init__.py": "from .leaf import *", "sub/leaf.py": TREE},
    "a name of the package before its module": {
        "m.py": "from .sub import leaf", "sub/__init__.py": "leaf = 1", "sub/leaf.py": "import nowhere_at"},
    "a name of the package": {"m.py": "from . import NAME", "__init__.py": "NAME = 1"},
    "packages": {"m.py": "import os.path, json, torch.nn as nn\nfrom torch.utils.data import Dataset\nimport pytest"},
    "ours": {"m.py": "from pipeline import StartupBase, stages, signals, __name__\nfrom pipeline.stages.base import METHODS"},
    "in a try": {"m.py": "try:\n    import nowhere_at\nexcept ImportError:\n    nowhere_at = None"},
    "suppressed": {"m.py": "import contextlib\nwith contextlib.suppress(ImportError):\n    from .nope import x"},
    "for checkers of types": {"m.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from nowhere_at import X"},
    "in a function": {"m.py": "def f():\n    import nowhere_at\n    from .nope import x"},
    "neighbour of a try": {"m.py": "try:\n    from .fast import f\nexcept ImportError:\n    f = 1", "fast.py": "import nowhere_at"},
    "names by code": {"m.py": "from .tree import Tree", "tree.py": "globals()['Tree'] = 1"},
    "a global": {"m.py": "from .tree import Tree", "tree.py": "def f():\n    global Tree\n    Tree = 1\nf()"},
    "a case": {"m.py": "from .tree import Tree, rest", "tree.py": "match {1: 2}:\n    case {1: Tree, **rest}: pass"},
    "a lazy module": {"m.py": "from .tree import Tree", "tree.py": "def __getattr__(name): return 1"},
    "set from outside": {"m.py": "from . import tree\ntree.Tree = 1\nfrom .tree import Tree", "tree.py": ""},
    "Python's own names": {"m.py": "from .tree import __file__, __name__", "tree.py": ""},
    "a circle of modules": {"m.py": "from . import tree\nX = 1", "tree.py": "from . import m\nTree = 1"},
    "a circle that is late": {"m.py": "X = 1\nfrom .tree import Tree", "tree.py": "from .m import X\nTree = 1"},
    "a circle on one line": {"m.py": "X = 1; from .tree import Tree", "tree.py": "from .m import X; Tree = 1"},
    "a circle in a function": {"m.py": "from .tree import f\nX = f", "tree.py": "def f():\n    from .m import X"},
    "an altered path": {"m.py": "import os, sys\nsys.path.append(os.path.dirname(__file__))\nimport only_here", "only_here.py": TREE},
    "a path altered by a neighbour": {
        "m.py": "from . import paths\nimport only_there",
        "paths.py": "from pathlib import Path\nimport sys\nsys.path.append(str(Path(__file__).parent))", "only_there.py": TREE},
    "a call that finds it": {
        "m.py": "from .setup import find\nfind()\nimport only_found", "only_found.py": TREE,
        "setup.py": "import site, pathlib\ndef find(): getattr(site, 'addsite' + 'dir')(str(pathlib.Path(__file__).parent))"},
}  # fmt: skip


@pytest.fixture
def folder(workspace: Workspace, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A workspace of the files of a case; what it does to Python's own search is undone."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield workspace(request.param)
    for name in [name for name in sys.modules if name.startswith("only_")]:
        del sys.modules[name]


@pytest.mark.parametrize("folder", WORKING.values(), ids=WORKING, indirect=True)
def test_a_file_that_can_be_imported_has_no_faults(folder: Path) -> None:
    assert wrong_imports(f"{package_name(folder)}.m") == []
    importlib.import_module(f"{package_name(folder)}.m")


FAILING: list[tuple[Files, list[str]]] = [
    ({"m.py": "import nowhere_at.all, json"}, ["m.py:1 needs the package 'nowhere_at', which is not installed; pip install it"]),
    ({"m.py": "x = 1\nfrom nowhere_at import a"}, ["m.py:2 needs the package 'nowhere_at', which is not installed; pip install it"]),
    ({"m.py": "import tree", "tree.py": TREE}, ["m.py:1 imports its neighbour 'tree' absolutely; write `from . import tree`"]),
    ({"m.py": "import lib.a.b", "lib/a/b.py": ""}, ["m.py:1 imports its neighbour 'lib' absolutely; write `from .lib.a import b`"]),
    ({"m.py": "from tree import A, B", "tree.py": TREE},
     ["m.py:1 imports its neighbour 'tree' absolutely; write `from .tree import A, B`"]),
    ({"m.py": "import logs", "logs/today.txt": ""}, ["m.py:1 needs the package 'logs', which is not installed; pip install it"]),
    ({"m.py": "from . import nope"},
     ["m.py:1 imports '.nope', which its workspace does not have; check the name and the number of dots"]),
    ({"m.py": "from .nope.deeper import x"},
     ["m.py:1 imports '.nope.deeper', which its workspace does not have; check the name and the number of dots"]),
    ({"m.py": "from .sub import nope", "sub/leaf.py": ""},
     ["m.py:1 imports '.sub.nope', which its workspace does not have; check the name and the number of dots"]),
    ({"m.py": "from .sub.leef import x", "sub/leaf.py": "x = 1"},
     ["m.py:1 imports '.sub.leef', which its workspace does not have; did you mean 'leaf'?"]),
    ({"m.py": "from ...errors import Fault"},
     [("m.py:1 imports '...errors', which leads out of the workspace; take out dots, or let `workspace:` name the folder "
       "that holds both")]),
    ({"m.py": "from .tree import Tre", "tree.py": TREE},
     ["m.py:1 imports 'Tre' from {ws}/tree.py, which does not define it; did you mean 'Tree'?"]),
    ({"m.py": "from .tree import zzz", "tree.py": TREE},
     ["m.py:1 imports 'zzz' from {ws}/tree.py, which does not define it; mend the import"]),
    ({"m.py": "from .tree import x", "tree.py": "from .leaf import x", "leaf.py": ""},
     ["tree.py:1 imports 'x' from {ws}/leaf.py, which does not define it; mend the import"]),
    ({"m.py": "from pipeline.stages import Strtup"},
     ["m.py:1 imports 'Strtup' from pipeline.stages, which does not define it; did you mean 'Startup'?"]),
    ({"m.py": "from pipeline.stags import Startup"},
     ["m.py:1 imports 'pipeline.stags', and 'pipeline' has no module 'stags'; did you mean 'stages'?"]),
    ({"m.py": "from pipeline.training.brain import Brain"},
     ["m.py:1 imports 'pipeline.training.brain', and 'pipeline.training.brain' was moved; write 'pipeline.brain.brain'"]),
    ({"m.py": "from pipeline.training import schedules\nfrom pipeline.data import slots, loadr"},
     ["m.py:1 imports 'schedules' from pipeline.training, and 'pipeline.training.schedules' was moved; write "
      "'pipeline.optim.schedules'",
      "m.py:2 imports 'slots' from pipeline.data, and 'pipeline.data.slots' was moved; write 'pipeline.slots.files'",
      "m.py:2 imports 'loadr' from pipeline.data, which does not define it; mend the import"]),
    ({"m.py": "import nowhere_at\nfrom .tree import Tre", "tree.py": "Tree = 1\nfrom .nope import x"},
     ["m.py:1 needs the package 'nowhere_at', which is not installed; pip install it",
      "tree.py:2 imports '.nope', which its workspace does not have; check the name and the number of dots",
      "m.py:2 imports 'Tre' from {ws}/tree.py, which does not define it; did you mean 'Tree'?"]),
]  # fmt: skip


@pytest.mark.parametrize(("folder", "messages"), FAILING, indirect=["folder"])
def test_a_file_that_cannot_be_imported_is_told_all_that_is_wrong(folder: Path, messages: list[str]) -> None:
    assert wrong_imports(f"{package_name(folder)}.m") == [
        f"{folder}/{message.replace('{ws}', str(folder))}" for message in messages
    ]
    if "...errors" not in messages[0]:  # which happens to be a module of ours
        with pytest.raises(ImportError):
            importlib.import_module(f"{package_name(folder)}.m")


def test_a_circle_that_fails_is_left_to_python(workspace: Workspace) -> None:
    folder = workspace({"m.py": "from .tree import Tree\nX = 1", "tree.py": "from .m import X\nTree = 1"})
    assert wrong_imports(f"{package_name(folder)}.m") == []
    with pytest.raises(ImportError, match="circular import"):
        importlib.import_module(f"{package_name(folder)}.m")


def test_files_that_import_each_other_without_end_are_given_up(workspace: Workspace) -> None:
    folder = workspace({f"m{n}.py": f"from .m{n + 1} import x" for n in range(2000)})
    assert wrong_imports(f"{package_name(folder)}.m0") == []


@pytest.mark.parametrize(
    ("name", "extra"), [("hypothesis", "dev"), ("importlinter", "dev"), ("pytest_cov", "dev"), ("yaml", None), ("x", None)]
)  # fmt: skip
def test_the_extra_that_brings_a_package_is_known_from_our_own_metadata(name: str, extra: str | None) -> None:
    assert imports.extra_of(name) == extra


def test_a_missing_package_that_an_extra_of_ours_brings_is_installed_with_it(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = """\
        Metadata-Version: 2.1
        Name: five-stage-pipeline
        Version: 1.0
        Requires-Dist: not-there-yet>=2; extra == "curves"
        """
    site = workspace({"five_stage_pipeline-1.0.dist-info/METADATA": textwrap.dedent(metadata)}, "site")
    monkeypatch.syspath_prepend(site)
    folder = workspace({"m.py": "import not_there_yet"})
    (message,) = wrong_imports(f"{package_name(folder)}.m")
    assert message.endswith("'not_there_yet', which is not installed; pip install 'five-stage-pipeline[curves]'")
