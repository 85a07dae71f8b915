"""Every way to get a class path wrong, and what is said of it: where, which value, what to do."""

from __future__ import annotations

import sys
import textwrap
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipeline import GeneralTrainer
from pipeline.check.checker import check
from pipeline.cli import group
from pipeline.errors import ClassPathError, ExitCode
from pipeline.workspaces import package_name

Workspace = Callable[..., Path]

CONFIG = """
hyper_parameters:
  optimizer: {class: SGD, learning_rate: 0.1}
dataset:
  - {name: train_data, class_path: data.py:Line, args: {size: 24}, batch_size: 4}
runner:
  - name: train_runner
    class: train
    device: cpu
    epochs: 1
    startup_class_path: PATH
    startup_args: ARGUMENTS
phase:
  - name: line
    model: torch.nn.Linear
    model_args: {in_features: 1, out_features: 1}
    loss: torch.nn.functional.mse_loss
    dataset_name: train_data
"""
PATH, ARGUMENTS = 11, 12  # their lines
DATA = """
import torch
from torch.utils.data import TensorDataset

def Line(size):
    return TensorDataset(torch.ones(size, 1), torch.ones(size, 1))
"""
STAGE = "from pipeline import StartupBase\n\nclass Startup(StartupBase):\n    def startup(self, context): pass\n"
INIT = STAGE + "    def __init__(self, context, depth: int, *, part='all'): pass\n"
FILE = '"{workspace}/startup.py"'


@dataclass
class Wrong:
    """A class path that is wrong, with what is said of it.

    ``{ws}`` in a message is the workspace, ``{path}`` the class path as the message repeats it.
    """

    what: str
    message: str
    path: str = FILE
    startup: str = STAGE
    files: dict[str, str] = field(default_factory=dict)
    arguments: str = "{}"
    line: int = PATH
    address: str = "startup_class_path"


def argument(what: str, message: str, arguments: str, name: str = "", startup: str = INIT) -> Wrong:
    """A wrong argument of the class."""
    address = f"startup_args.{name}".rstrip(".")
    return Wrong(what, message, startup=startup, arguments=arguments, line=ARGUMENTS, address=address)


def stage_after(imports: str) -> str:
    return f"{imports}\n{STAGE}"


FROM_SOURCE = [
    Wrong("missing file", "{path}: no such file: {ws}/startpu.py; did you mean 'startup.py'?", '"{workspace}/startpu.py"'),
    Wrong("directory", "{path}: 'models' is not a .py file but a folder; name a file in it: net.py",
          '"{workspace}/models"', files={"models/net.py": ""}),
    Wrong("wrong suffix", "{path}: 'startup.txt' is not a .py file; did you mean 'startup.py'?", '"{workspace}/startup.txt"'),
    Wrong("misspelt class", "{path}: startup.py defines no 'Strtup'; it defines Startup; did you mean 'Startup'?",
          '"{workspace}/startup.py:Strtup"'),
    Wrong("class imported but not defined there",
          ("{path}: startup.py only imports 'Startup', and derives Mine from it; write ':Mine' after the file, "
           "or ':Startup' if the import is meant"),
          startup="from pipeline.stages.startup import Startup\n\nclass Mine(Startup):\n    pass\n"),
    Wrong("class imported from where it is not", "{path}: {ws}/startup.py:1 imports 'Tre' from {ws}/tree.py, which does not "
          "define it; did you mean 'Tree'?", startup="from .tree import Tre as Startup", files={"tree.py": "class Tree: pass"}),
    Wrong("class of ours that is not there", "{path}: {ws}/startup.py:1 imports 'StartupBse' from pipeline, which does not "
          "define it; did you mean 'StartupBase'?", startup=STAGE.replace("Base", "Bse")),
    Wrong("nested class", "{path}: startup.py defines 'Startup' only inside of Outer; move it out, to the top level",
          startup=f"class Outer:\n{textwrap.indent(STAGE, '    ')}"),
    Wrong("nested class that is named", "{path}: 'Outer.Startup' is no class name; write '{workspace}/startup.py:Name'",
          '"{workspace}/startup.py:Outer.Startup"'),
    Wrong("wrong base", "{path}: Startup does not derive from pipeline.stages.base:StartupBase; write `class Startup(StartupBase)`",
          startup="class Startup:\n    pass\n"),
    Wrong("abstract method left", "{path}: Startup does not define startup; define it, spelt exactly so; did you mean 'start_up'?",
          startup=STAGE.replace("def startup", "def start_up")),
    Wrong("not a class", "{path}: 'pipeline' is no class path; write '{workspace}/file.py', '{workspace}/file.py:Name' or "
          "'package.module:Name'".replace("{path}: ", ""), "pipeline"),
    Wrong("a function", "{path} is a function, not a class; name a subclass of pipeline.stages.base:StartupBase",
          startup="def Startup(context): pass"),
    Wrong("syntax error", "{path}: {ws}/startup.py:2:15: invalid syntax: class Startup(:; mend the file",
          startup="x = 1\nclass Startup(:\n    pass"),
    Wrong("syntax error of a neighbour", "{path}: {ws}/tree.py:1:9: expected '(': def Tree: pass; mend the file",
          startup=stage_after("from .tree import Tree"), files={"tree.py": "def Tree: pass"}),
    Wrong("missing package", "{path}: {ws}/startup.py:1 needs the package 'nowhere_at', which is not installed; pip install it",
          startup=stage_after("import nowhere_at.all")),
    Wrong("missing package of a neighbour", "{path}: {ws}/tree.py:2 needs the package 'nowhere_at', which is not installed; "
          "pip install it", startup=stage_after("from .tree import Tree"),
          files={"tree.py": "import json\nfrom nowhere_at import Tree"}),
    argument("misspelt argument", "Startup has no argument 'prt'; did you mean 'part'?", "{depth: 2, prt: x}", "prt"),
    argument("missing argument", "Startup needs the argument depth; add it", "{part: x}"),
    argument("wrong type", "Startup's argument depth is 'two', a string; write an integer (startup.py:5: depth: int)",
             "{depth: two}", "depth"),
    argument("argument given to a stage without any", "Startup has no argument 'depth'; it takes no arguments", "{depth: 2}", "depth",
             startup=STAGE),
    Wrong("missing arguments", "Startup needs the argument depth; add it", startup=INIT, arguments="", address="startup_args"),
    Wrong("relative import beyond the workspace", "{path}: {ws}/startup.py:1 imports '..tree', which leads out of the workspace; "
          "take out dots, or let `workspace:` name the folder that holds both", startup=stage_after("from ..tree import Tree")),
    Wrong("relative import of what is not there", "{path}: {ws}/startup.py:1 imports '.tre', which its workspace does not have; "
          "did you mean 'tree'?", startup=stage_after("from .tre import Tree"), files={"tree.py": "Tree = 1"}),
    Wrong("absolute import of a neighbour", "{path}: {ws}/startup.py:1 imports its neighbour 'tree' absolutely; "
          "write `from .tree import Tree`", startup=stage_after("from tree import Tree"), files={"tree.py": "Tree = 1"}),
    Wrong("absolute import of a neighbour further up", "{path}: {ws}/sub/leaf.py:1 imports its neighbour 'tree' absolutely; "
          "write `from .. import tree`", startup=stage_after("from .sub.leaf import tree"),
          files={"tree.py": "", "sub/leaf.py": "import tree"}),
    Wrong("broken symlink", "{path}: no such file: {ws}/away.py, to which the link 'gone.py' leads; mend the link",
          '"{workspace}/gone.py"'),
    Wrong("dash in a neighbour's name", "{path}: {ws}/startup.py:1:9: invalid syntax: from .my-tree import Tree; no name with a dash "
          "can be imported: rename 'my-tree' to 'my_tree'", startup=stage_after("from .my-tree import Tree")),
    Wrong("dash in the name of a neighbour's file", "{path}: {ws}/startup.py:1 imports '.my_tree', which its workspace does not have; "
          "no name with a dash can be imported: rename 'my-tree.py' to 'my_tree.py'",
          startup=stage_after("from .my_tree import Tree"), files={"my-tree.py": "Tree = 1"}),
    Wrong("Windows separators", r"{path}: write folders with '/', on every system: '{ws}/startup.py'", r"'{workspace}\startup.py'"),
    Wrong("misspelt placeholder", "{path}: unknown placeholder '{workspce}'; did you mean 'workspace'?", '"{workspce}/startup.py"'),
    Wrong("unset environment variable", "the environment variable 'NOWHERE_SET' is not set; set it, or write a value",
          '"${env:NOWHERE_SET}"'),
    Wrong("a default stage's path misspelt", "{path}: 'pipeline.stages' has no module 'startpu'; did you mean 'startup'?",
          "pipeline.stages.startpu:Startup"),
    Wrong("a default stage's class misspelt", "{path}: pipeline.stages.startup has no 'Strtup'; did you mean 'Startup'?",
          "pipeline.stages.startup:Strtup"),
    Wrong("missing package in the path", "{path}: there is no module 'nowhere_at.all'; check the spelling, or install the package "
          "that has 'nowhere_at'", "nowhere_at.all:Startup"),
]  # fmt: skip

WHEN_IMPORTED = [
    Wrong("failing import", "{path}: importing {ws}/startup.py failed at {ws}/startup.py:1: ZeroDivisionError: division by zero; "
          "mend the file", startup=stage_after("1 / 0")),
    Wrong("failing import of a neighbour", "{path}: importing {ws}/startup.py failed at {ws}/tree.py:2: ZeroDivisionError: division by "
          "zero; mend the file", startup=stage_after("from .tree import Tree\nTree()"), files={"tree.py": "def Tree():\n    1 / 0"}),
    Wrong("not a class after all", "{path} is of type int, not a class; name a subclass of pipeline.stages.base:StartupBase",
          startup="Startup = 3"),
    Wrong("wrong base after all", "{path}: Startup does not derive from pipeline.stages.base:StartupBase; write "
          "`class Startup(StartupBase)`", startup="Startup = type('Startup', (), {})"),
    Wrong("abstract method left after all", "{path}: Startup does not define startup; define it, spelt exactly so",
          startup="from pipeline import StartupBase\nStartup = type('Startup', (StartupBase,), {})"),
    Wrong("a class that code was to make", "{path}: startup.py has no 'Startup' after it was imported; check the spelling",
          startup="globals()['Strtup'] = 1"),
    Wrong("missing package, if", "{path}: {ws}/startup.py:2 needs the package 'nowhere_at', which is not installed; pip install it",
          startup=stage_after("if True:\n    import nowhere_at")),
    Wrong("absolute import of a neighbour, if", "{path}: {ws}/startup.py:2 imports its neighbour 'tree' absolutely; write "
          "`from .tree import …`", startup=stage_after("if True:\n    from tree import Tree"), files={"tree.py": "Tree = 1"}),
    Wrong("relative import beyond the workspace, if", "{path}: {ws}/startup.py:2 imports '....tree', which leads out of the workspace; "
          "take out dots, or let `workspace:` name the folder that holds both",
          startup=stage_after("if True:\n    from ....tree import Tree")),
    Wrong("relative import of what is not there, if", "{path}: {ws}/startup.py:2 imports '.tre', which its workspace does not have; "
          "did you mean 'tree'?", startup=stage_after("if True:\n    from .tre import Tree"), files={"tree.py": "Tree = 1"}),
    Wrong("import cycle", "{path}: {ws}/tree.py:1: cannot import name 'Startup' from partially initialized module '.startup' (most "
          "likely due to a circular import) ({ws}/startup.py); move what they share into a file of its own",
          startup=stage_after("from .tree import Tree"), files={"tree.py": "from .startup import Startup\nTree = 1"}),
]  # fmt: skip


def names(wrongs: list[Wrong]) -> list[str]:
    return [wrong.what for wrong in wrongs]


@pytest.fixture
def config(workspace: Workspace, request: pytest.FixtureRequest) -> Path:
    """The config whose startup stage is wrong, with the files beside it."""
    wrong: Wrong = request.param
    arguments = f"startup_args: {wrong.arguments}" if wrong.arguments else ""
    text = CONFIG.replace("startup_args: ARGUMENTS", arguments).replace("PATH", wrong.path, 1)
    folder = workspace({"config.yaml": text, "data.py": DATA, "startup.py": wrong.startup, **wrong.files})
    (folder / "gone.py").symlink_to(folder / "away.py")
    return folder / "config.yaml"


def expected(wrong: Wrong, folder: Path) -> str:
    path = wrong.path.strip("\"'").replace("{workspace}", str(folder))
    shown = wrong.message.replace("{path}", f"'{path}'").replace("{ws}", str(folder))
    return f"{folder}/config.yaml:{wrong.line}: runner.train_runner.{wrong.address}: {shown}"


def parametrized(wrongs: list[Wrong]) -> pytest.MarkDecorator:
    pairs = [(wrong, wrong) for wrong in wrongs]
    return pytest.mark.parametrize(("config", "wrong"), pairs, indirect=["config"], ids=names(wrongs))


@parametrized(FROM_SOURCE)
def test_a_wrong_class_path_is_told_from_source_alone(config: Path, wrong: Wrong) -> None:
    found = check(config)
    assert [f"{each.where}:{each.line}: {each.address}: {each.message}" for each in found] == [
        expected(wrong, config.parent)
    ]
    assert not [name for name in sys.modules if name.startswith(package_name(config.parent))]
    assert not Path("runs").exists()


@parametrized(WHEN_IMPORTED)
def test_what_shows_only_when_a_file_is_imported_is_told_before_anything_is_run(config: Path, wrong: Wrong) -> None:
    assert check(config) == []
    with pytest.raises(ClassPathError) as caught:
        GeneralTrainer(config).run()
    assert str(caught.value) == expected(wrong, config.parent)
    assert not Path("runs").exists()


@parametrized(WHEN_IMPORTED)
def test_what_is_printed_of_it_has_no_frame_of_ours_and_no_name_that_the_user_does_not_know(
    config: Path, wrong: Wrong
) -> None:
    done = CliRunner().invoke(group, ["run", "-q", str(config)])
    assert (done.exit_code, done.stdout) == (ExitCode.USAGE, "")
    assert done.stderr.startswith(expected(wrong, config.parent))
    frames = [line for line in done.stderr.splitlines() if line.startswith('  File "')]
    assert [line for line in frames if not line.startswith(f'  File "{config.parent}/')] == []
    assert "pipeline.workspaces" not in done.stderr


def test_the_users_own_traceback_follows(workspace: Workspace) -> None:
    tree = "def Tree():\n    1 / 0"
    folder = workspace({"config.yaml": CONFIG.replace("PATH", "startup.py", 1).replace("ARGUMENTS", "{}"), "data.py": DATA,
                        "startup.py": stage_after("from .tree import Tree\nTree()"), "tree.py": tree})  # fmt: skip
    with pytest.raises(ClassPathError) as caught:
        GeneralTrainer(folder / "config.yaml").run()
    frames = traceback.extract_tb(caught.value.user_error and caught.value.user_error.__traceback__)
    assert [(Path(frame.filename).name, frame.lineno) for frame in frames] == [("startup.py", 2), ("tree.py", 2)]


def test_each_way_stands_in_the_table_once() -> None:
    every = names([*FROM_SOURCE, *WHEN_IMPORTED])
    assert len(every) == len(set(every)) >= 25
