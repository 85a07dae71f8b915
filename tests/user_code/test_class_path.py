"""A class path -> a checked class: every form, and every way to get one wrong."""

from __future__ import annotations

import re
import sys
import textwrap
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from pipeline import GeneralTrainer
from pipeline.check.checker import check
from pipeline.cli import group
from pipeline.errors import ClassPathError, ExitCode
from pipeline.stages.base import StartupBase
from pipeline.stages.startup import Startup
from pipeline.user_code import class_path
from pipeline.workspaces import package_name

Workspace = Callable[..., Path]

STAGE = """
    from pipeline import StartupBase

    class Startup(StartupBase):
        def startup(self, context):
            context["who"] = "Startup"

    class Other(Startup):
        pass
"""


def load(folder: Path, path: str = "startup.py", *, base: type = StartupBase, root: Path | None = None) -> type:
    parsed = class_path.parse(f"{folder}/{path}", name="Startup", workspace=root or folder)
    return class_path.load_class(parsed, base)


@pytest.mark.parametrize(
    ("text", "module", "expected"),
    [
        ("pipeline.stages.startup:Startup", "", Startup),
        ("pipeline.stages.startup.Startup", "", Startup),
        ("torch.nn:Linear", "", torch.nn.Linear),
        ("torch.nn.Linear", "", torch.nn.Linear),
        ("Adam", "torch.optim", torch.optim.Adam),
        ("torch.optim.SGD", "torch.optim", torch.optim.SGD),
    ],
)
def test_a_path_into_a_package_leads_to_its_class(text: str, module: str, expected: type) -> None:
    assert class_path.load(class_path.parse(text, module=module)) is expected


def test_a_path_of_a_file_alone_means_the_class_named_after_its_place(workspace: Workspace) -> None:
    assert load(workspace({"startup.py": STAGE})).__name__ == "Startup"


def test_one_file_holds_several_classes(workspace: Workspace) -> None:
    folder = workspace({"startup.py": STAGE})
    assert load(folder, "startup.py:Other").__mro__[1] is load(folder)


def test_a_relative_path_belongs_to_the_folder_that_it_is_parsed_for(workspace: Workspace) -> None:
    folder = workspace({"sub/startup.py": STAGE})
    assert class_path.parse("../sub/startup.py:Other", folder=folder / "sub").file == folder / "sub" / "startup.py"


def test_a_class_from_python_is_itself() -> None:
    assert class_path.load_class(Startup, StartupBase) is Startup


def test_a_class_that_a_file_imports_is_found_through_the_import(workspace: Workspace) -> None:
    folder = workspace({"startup.py": "from .net import Other as Startup", "net.py": STAGE})
    assert load(folder).__name__ == "Other"


def test_equal_file_names_in_two_workspaces_are_two_classes(workspace: Workspace) -> None:
    first, second = workspace({"startup.py": STAGE}, "one"), workspace({"startup.py": STAGE}, "two")
    assert load(first) is not load(second)


@pytest.mark.parametrize("name", ["yaml", "instance", "torch", "pipeline", "json"])
def test_a_file_named_like_a_package_shadows_nothing(workspace: Workspace, name: str) -> None:
    before, module = list(sys.path), sys.modules.get(name)
    check = "import json, torch, yaml\nassert yaml.safe_load and torch.nn and json.loads\n"
    folder = workspace({f"{name}.py": check + textwrap.dedent(STAGE)})
    found = load(folder, f"{name}.py")
    assert (found.__module__, sys.path, sys.modules.get(name)) == (f"{package_name(folder)}.{name}", before, module)


NEIGHBOURS = {
    "tree.py": "VALUE = 'tree'",
    "sub/leaf.py": "VALUE = 'leaf'",
    "sub/__init__.py": "VALUE = 'package'",
    "bare/leaf.py": "VALUE = 'bare'",
}


@pytest.mark.parametrize(
    ("file", "line", "value"),
    [
        ("startup.py", "from .tree import VALUE", "tree"),
        ("startup.py", "from . import tree; VALUE = tree.VALUE", "tree"),
        ("startup.py", "from .sub.leaf import VALUE", "leaf"),
        ("startup.py", "from .sub import VALUE", "package"),
        ("startup.py", "from .bare.leaf import VALUE", "bare"),
        ("sub/startup.py", "from ..tree import VALUE", "tree"),
        ("sub/startup.py", "from .leaf import VALUE", "leaf"),
        ("bare/startup.py", "from ..sub.leaf import VALUE", "leaf"),
    ],
)
def test_neighbours_are_imported_relatively(workspace: Workspace, file: str, line: str, value: str) -> None:
    folder = workspace({**NEIGHBOURS, file: f"{line}\n{textwrap.dedent(STAGE)}"})
    assert vars(sys.modules[load(folder, file).__module__])["VALUE"] == value


def test_a_file_outside_of_the_workspace_is_rooted_at_its_own_folder(workspace: Workspace) -> None:
    elsewhere = workspace({"startup.py": STAGE}, "elsewhere")
    found = load(elsewhere, root=workspace({"x.py": ""}, "here"))
    assert found.__module__ == f"{package_name(elsewhere)}.startup"


@pytest.mark.parametrize("file", ["__init__.py", "models/__init__.py"])
def test_a_package_is_imported_once_and_under_its_own_name(workspace: Workspace, file: str) -> None:
    folder = workspace({file: STAGE})
    module = ".".join([package_name(folder), *Path(file).parent.parts])
    assert load(folder, file).__module__ == module


def test_an_init_of_the_workspace_is_run_before_its_files(workspace: Workspace) -> None:
    folder = workspace({"__init__.py": "NAME = 'ours'", "startup.py": f"from . import NAME\n{textwrap.dedent(STAGE)}"})
    assert vars(sys.modules[load(folder).__module__])["NAME"] == "ours"


@pytest.mark.parametrize("name", ["a folder", "a-b.c", "données_数据", "2024", "_", "08:15", "class"])
def test_any_name_of_the_workspace_folder_does(workspace: Workspace, name: str) -> None:
    folder = workspace({"startup.py": STAGE, "sub-dir/startup.py": STAGE}, name)
    assert [load(folder).__name__, load(folder, "sub-dir/startup.py:Other").__name__] == ["Startup", "Other"]


@pytest.mark.parametrize("file", ["my-startup.py", "1.py", "été.py", "with space.py", "class.py"])
def test_any_name_of_a_file_does(workspace: Workspace, file: str) -> None:
    assert load(workspace({file: STAGE}), file).__name__ == "Startup"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("json", "'json' is no class path; write '{workspace}/file.py'"),
        ("json:", "'json:' is no class path; write"),
        (":Startup", "':Startup' is no class path; write"),
        ("a b:C", "'a b:C' is no class path; write"),
        ("a..b:C", "'a..b:C' is no class path; write"),
        ("json:Outer.Inner", "'json:Outer.Inner' is no class path; write '{workspace}/file.py'"),
        ("{workspce}/a.py", "unknown placeholder '{workspce}'; did you mean 'workspace'?"),
        (r"C:\ws\a.py", r"'C:\ws\a.py': write folders with '/', on every system: 'C:/ws/a.py'"),
        (
            "a.py:Startup",
            "'a.py:Startup': a relative path needs a config file or a workspace; give the config a 'workspace'",
        ),
    ],
)
def test_what_has_no_form_of_a_class_path_is_told_the_forms(text: str, message: str) -> None:
    with pytest.raises(ClassPathError, match=re.escape(message)):
        class_path.parse(text)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("startpu.py", "no such file: {ws}/startpu.py; did you mean 'startup.py'?"),
        ("zzz.py", "no such file: {ws}/zzz.py; known: deep.py, dot.ted.py, startup.py"),
        ("none/zzz.py", "no such file: {ws}/none/zzz.py; there is no .py file there"),
        ("startup.txt", "'startup.txt' is not a .py file; did you mean 'startup.py'?"),
        ("empty/a.txt", "'a.txt' is not a .py file; there is no .py file there"),
        ("folder", "'folder' is not a .py file but a folder; name a file in it: x.py"),
        ("empty", "'empty' is not a .py file but a folder; name a file in it: there is none"),
        ("folder.py", "'folder.py' is not a .py file but a folder; name a file in it: x.py"),
        ("broken.py", "no such file: {ws}/gone.py, to which the link 'broken.py' leads; mend the link"),
        ("deep/a.py", "Python finds 'deep.py' instead of the folder 'deep' beside it; rename one of them"),
        ("dot.ted.py", "Python cannot import 'dot.ted.py' for the dot in its name or folder; rename it"),
        ("startup.py:", "'' is no class name; write '{workspace}/startup.py:Name'"),
        ("startup.py:Outer.Inner", "'Outer.Inner' is no class name; write '{workspace}/startup.py:Name'"),
    ],
)
def test_a_path_to_no_python_file_is_told_what_is_there(workspace: Workspace, path: str, message: str) -> None:
    files = ("folder.py/x.py", "dot.ted.py", "folder/x.py", "deep/a.py", "deep.py")
    folder = workspace({"startup.py": STAGE, **dict.fromkeys(files, "")})
    (folder / "empty").mkdir()
    (folder / "broken.py").symlink_to(folder / "gone.py")
    expected = message.replace("{ws}", str(folder))
    with pytest.raises(ClassPathError, match=re.escape(expected)):
        load(folder, path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "torchh.nn:Linear",
            "there is no module 'torchh.nn'; check the spelling, or install the package that has 'torchh'",
        ),
        ("torch.nn.modles:Linear", "'torch.nn' has no module 'modles'; did you mean 'modules'?"),
        (
            "pipeline.training.metrics.auc:AUC",
            "'pipeline.training.metrics.auc' was moved; write 'pipeline.metrics.auc'",
        ),
        ("pipeline.data.slots:SlotFiles", "'pipeline.data.slots' was moved; write 'pipeline.slots.files'"),
        ("pipeline.stages.startup:Strtup", "pipeline.stages.startup has no 'Strtup'; did you mean 'Startup'?"),
        ("torch.nn.Linaer", "torch.nn has no 'Linaer'; did you mean 'Linear'?"),
        ("json:Zzz", "json has no 'Zzz'; known: JSONDecodeError, JSONDecoder, JSONEncoder"),
        (
            "json:loads",
            "'json:loads' is of type function, not a class; name a subclass of pipeline.stages.base:StartupBase",
        ),
        ("sys:path", "'sys:path' is of type list, not a class; name a subclass of"),
        (
            "torch.nn:Linear",
            "Linear does not derive from pipeline.stages.base:StartupBase; write `class Linear(StartupBase)`",
        ),
        ("pipeline:StartupBase", "StartupBase does not define startup; define it, spelt exactly so"),
    ],
)
def test_a_path_to_no_such_class_of_a_package_says_so(text: str, message: str) -> None:
    with pytest.raises(ClassPathError, match=re.escape(message)):
        class_path.load_class(class_path.parse(text), StartupBase)


IMPORTS = [
    ("def f(:", {}, "failed at {ws}/startup.py:1: SyntaxError: "),
    ("from .tree import f", {"tree.py": "x = 1\ndef f(:"}, "failed at {ws}/tree.py:2: SyntaxError: "),
    (
        "import nowhere_at.all",
        {},
        "{ws}/startup.py:1 needs the package 'nowhere_at', which is not installed; pip install it",
    ),
    (
        "from .nope import f",
        {},
        "{ws}/startup.py:1 imports '.nope', which its workspace does not have; check the name and the number of dots",
    ),
    (
        "from .tree import f",
        {"tree.py": "from .nope import g"},
        "{ws}/tree.py:1 imports '.nope', which its workspace does",
    ),
    (
        "from ..data import f",
        {},
        "startup.py:1 imports '..data', which leads out of the workspace; take out dots, or let",
    ),
    ("from . import nope", {}, "{ws}/startup.py:1 imports '.nope', which its workspace does not have; check the name"),
    (
        "import json.nope",
        {},
        "{ws}/startup.py:1 imports 'json.nope', and 'json' has no module 'nope'; check the spelling",
    ),
    ("from . import tree\ntree.zzz", {"tree.py": ""}, "AttributeError: module '.tree' has no attribute 'zzz'; mend"),
    ("raise ModuleNotFoundError('mine')", {}, "failed at {ws}/startup.py:1: ModuleNotFoundError: mine; mend the file"),
    ("exec('1 +')", {}, "failed at {ws}/startup.py:1: SyntaxError: invalid syntax (<string>, line 1); mend the file"),
    ("import lib.a", {"lib/a.py": ""}, "imports its neighbour 'lib' absolutely; write `from .lib import a`"),
    (
        "from .sub.a import f",
        {"sub/a.py": "import b", "sub/b.py": ""},
        "{ws}/sub/a.py:1 imports its neighbour 'b' absolutely; write `from . import b`",
    ),
]


@pytest.mark.parametrize(("text", "others", "message"), IMPORTS)
def test_a_file_that_fails_when_imported_says_where(
    workspace: Workspace, text: str, others: dict[str, str], message: str
) -> None:
    folder = workspace({"startup.py": text, **others})
    with pytest.raises(ClassPathError) as caught:
        load(folder)
    assert message.replace("{ws}", str(folder)) in str(caught.value)
    shown = f"{caught.value}{''.join(traceback.format_exception(caught.value.user_error, chain=False))}"
    assert "pipeline.workspaces" not in shown
    frames = traceback.extract_tb(caught.value.user_error and caught.value.user_error.__traceback__)
    assert {str(Path(frame.filename).parent) for frame in frames} <= {str(folder), f"{folder}/sub", "."}


MODULES = [
    # A name that a module imports; a submodule that the package imports from itself; one that it does not mention.
    ("torch", "pipeline.optim.schedules"),
    ("lr_scheduler", "torch.optim"),
    ("torch.nn.modules.linear", ""),
]


@pytest.mark.parametrize(("text", "module"), MODULES)
def test_a_module_is_no_class(text: str, module: str) -> None:
    path, name = class_path.parse(text, module=module), text.rpartition(".")[2]
    for look_up in (class_path.define, class_path.load):
        with pytest.raises(ClassPathError, match=f"'{text}': {name} is a module, and no class or function; name one"):
            look_up(path)


def test_a_module_that_code_may_hide_is_found_when_it_is_loaded() -> None:
    """The package has a function that makes attributes."""
    path = class_path.parse("pipeline.stages.startup")
    assert class_path.define(path) is None
    with pytest.raises(ClassPathError, match=r"'pipeline\.stages\.startup': startup is a module"):
        class_path.load(path)


def test_a_function_with_the_name_of_its_module_is_no_module(workspace: Workspace) -> None:
    folder = workspace({"tool/__init__.py": "from .tool import tool", "tool/tool.py": "def tool():\n    pass"})
    path = class_path.parse(f"{folder}/tool/__init__.py:tool", workspace=folder)
    definition = class_path.define(path)
    assert definition is not None
    assert definition.location == "tool.py:1"
    assert class_path.load(path)() is None


def test_a_file_that_was_mended_is_loaded_in_the_same_process(workspace: Workspace) -> None:
    folder = workspace({"startup.py": "raise RuntimeError('boom')"})
    with pytest.raises(ClassPathError, match="RuntimeError: boom; mend the file"):
        load(folder)
    workspace({"startup.py": STAGE})
    assert load(folder).__name__ == "Startup"


@pytest.mark.parametrize("method", ["fork", "spawn", pytest.param("forkserver", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.slow
def test_a_dataset_of_a_workspace_file_is_read_by_workers(linear: Path, method: str) -> None:
    overrides = [
        "dataset.train_data.num_workers=1",
        f"dataset.train_data.multiprocessing_context={method}",
        "runner.train_runner.epochs=1",
        "phase.line.valid_dataset_name=null",
    ]
    trained = GeneralTrainer(linear, overrides=overrides).run()
    alone = GeneralTrainer(linear, overrides=overrides[2:]).run()
    assert torch.equal(trained["model"]["line"]["model"].weight, alone["model"]["line"]["model"].weight)


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
STAGE_FILE = "from pipeline import StartupBase\n\nclass Startup(StartupBase):\n    def startup(self, context): pass\n"
INIT = STAGE_FILE + "    def __init__(self, context, depth: int, *, part='all'): pass\n"
FILE = '"{workspace}/startup.py"'


@dataclass
class Wrong:
    """A class path that is wrong, with what is said of it.

    ``{ws}`` in a message is the workspace, ``{path}`` the class path as the message repeats it.
    """

    what: str
    message: str
    path: str = FILE
    startup: str = STAGE_FILE
    files: dict[str, str] = field(default_factory=dict)
    arguments: str = "{}"
    line: int = PATH
    address: str = "startup_class_path"


def argument(what: str, message: str, arguments: str, name: str = "", startup: str = INIT) -> Wrong:
    """A wrong argument of the class."""
    address = f"startup_args.{name}".rstrip(".")
    return Wrong(what, message, startup=startup, arguments=arguments, line=ARGUMENTS, address=address)


def stage_after(imports: str) -> str:
    return f"{imports}\n{STAGE_FILE}"


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
          "define it; did you mean 'StartupBase'?", startup=STAGE_FILE.replace("Base", "Bse")),
    Wrong("nested class", "{path}: startup.py defines 'Startup' only inside of Outer; move it out, to the top level",
          startup=f"class Outer:\n{textwrap.indent(STAGE_FILE, '    ')}"),
    Wrong("nested class that is named", "{path}: 'Outer.Startup' is no class name; write '{workspace}/startup.py:Name'",
          '"{workspace}/startup.py:Outer.Startup"'),
    Wrong("wrong base", "{path}: Startup does not derive from pipeline.stages.base:StartupBase; write `class Startup(StartupBase)` "
          "in startup.py:1",
          startup="class Startup:\n    pass\n"),
    Wrong("abstract method left", "{path}: Startup does not define startup; define it, spelt exactly so; did you mean 'start_up'?",
          startup=STAGE_FILE.replace("def startup", "def start_up")),
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
             startup=STAGE_FILE),
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
          "`from .tree import Tree`", startup=stage_after("if True:\n    from tree import Tree"), files={"tree.py": "Tree = 1"}),
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
    package = package_name(config.parent)
    assert not [name for name in sys.modules if name.startswith(package)]
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
