"""A class path -> a checked class: every form, and every way to get one wrong."""

from __future__ import annotations

import re
import sys
import textwrap
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pipeline import GeneralTrainer
from pipeline.errors import ClassPathError
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
        ("none/zzz.py", "no such file: {ws}/none/zzz.py; there are none"),
        ("startup.txt", "'startup.txt' is not a .py file; did you mean 'startup.py'?"),
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
        ("pipeline.stages.startup:Strtup", "pipeline.stages.startup has no 'Strtup'; did you mean 'Startup'?"),
        ("torch.nn.Linaer", "torch.nn has no 'Linaer'; did you mean 'Linear'?"),
        ("json:Zzz", "json has no 'Zzz'; check the spelling"),
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
    ("x = 1\nraise RuntimeError('boom')", {}, "failed at {ws}/startup.py:2: RuntimeError: boom; mend the file"),
    ("from .tree import f\nf()", {"tree.py": "def f():\n    1 / 0"}, "failed at {ws}/tree.py:2: ZeroDivisionError: "),
    ("def f(:", {}, "failed at {ws}/startup.py:1: SyntaxError: "),
    ("from .tree import f", {"tree.py": "x = 1\ndef f(:"}, "failed at {ws}/tree.py:2: SyntaxError: "),
    (
        "from .tree import f",
        {"tree.py": "from .startup import Startup"},
        "(most likely due to a circular import) ({ws}/startup.py); move what they share into a file of its own",
    ),
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
    (
        "from ...data import f",
        {},
        "startup.py:1 imports '...data', which leads out of the workspace; take out dots, or",
    ),
    ("from ......data import f", {}, "imports '......data', which leads out of the workspace; take out dots, or let"),
    ("from . import nope", {}, "failed at {ws}/startup.py:1: ImportError: cannot import name 'nope' from '.' (unknown"),
    (
        "import json.nope",
        {},
        "{ws}/startup.py:1 imports 'json.nope', and 'json' has no module 'nope'; check the spelling",
    ),
    ("from . import tree\ntree.zzz", {"tree.py": ""}, "AttributeError: module '.tree' has no attribute 'zzz'; mend"),
    ("raise ModuleNotFoundError('mine')", {}, "failed at {ws}/startup.py:1: ModuleNotFoundError: mine; mend the file"),
    ("exec('1 +')", {}, "failed at {ws}/startup.py:1: SyntaxError: invalid syntax (<string>, line 1); mend the file"),
    ("import tree", {"tree.py": ""}, "imports its neighbour 'tree' absolutely; write `from .tree import …`"),
    ("import lib.a", {"lib/a.py": ""}, "imports its neighbour 'lib' absolutely; write `from .lib import …`"),
    (
        "from .sub.a import f",
        {"sub/a.py": "import b", "sub/b.py": ""},
        "{ws}/sub/a.py:1 imports its neighbour 'b' absolutely; write `from .b import …`",
    ),
    ("Startup = 3", {}, "is of type int, not a class; name a subclass of pipeline.stages.base:StartupBase"),
    (
        "class Outer:\n    class Startup: pass",
        {},
        "startup.py defines 'Startup' only inside of Outer; move it out, to the top level",
    ),
    ("globals()['Strtup'] = 1", {}, "has no 'Startup' after it was imported; check the spelling"),
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


def test_the_users_error_keeps_its_traceback_cut_to_his_frames(workspace: Workspace) -> None:
    folder = workspace(
        {"startup.py": "from .tree import f\nf()", "tree.py": "def f():\n    raise RuntimeError('boom')"}
    )
    with pytest.raises(ClassPathError) as caught:
        load(folder)
    error = caught.value.user_error
    assert isinstance(error, RuntimeError)
    frames = [(Path(frame.filename).name, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    assert frames == [("startup.py", 2), ("tree.py", 2)]


def test_a_file_that_was_mended_is_loaded_in_the_same_process(workspace: Workspace) -> None:
    folder = workspace({"startup.py": "raise RuntimeError('boom')"})
    with pytest.raises(ClassPathError, match="RuntimeError: boom; mend the file"):
        load(folder)
    workspace({"startup.py": STAGE})
    assert load(folder).__name__ == "Startup"


def test_the_trainer_says_which_line_of_the_config_names_a_class_that_fails(linear: Path) -> None:
    (linear.parent / "startup.py").write_text(
        "if True:\n    import tree_that_is_not_there\nclass Startup(tree_that_is_not_there.Base): pass"
    )
    override = "runner.train_runner.startup_class_path={workspace}/startup.py"
    expected = "runner.train_runner.startup_class_path: .*needs the package 'tree_that_is_not_there', .* pip install it"
    with pytest.raises(ClassPathError, match=expected):
        GeneralTrainer(linear, overrides=[override]).run()


def test_nothing_is_run_when_a_class_cannot_be_loaded(linear: Path) -> None:
    (linear.parent / "startup.py").write_text(f"{textwrap.dedent(STAGE)}raise RuntimeError('boom')")
    override = "runner.train_runner.startup_class_path={workspace}/startup.py:Startup"
    with pytest.raises(ClassPathError, match=r"startup.py:\d+: RuntimeError: boom; mend the file"):
        GeneralTrainer(linear, overrides=[override]).run()
    assert not Path("runs").exists()


@pytest.mark.parametrize("method", ["fork", "spawn", pytest.param("forkserver", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_dataset_of_a_workspace_file_is_read_by_workers(linear: Path, method: str) -> None:
    overrides = [
        "dataset.train_data.num_workers=2",
        f"dataset.train_data.multiprocessing_context={method}",
        "runner.train_runner.epochs=1",
        "phase.line.valid_dataset_name=null",
    ]
    trained = GeneralTrainer(linear, overrides=overrides).run()
    alone = GeneralTrainer(linear, overrides=overrides[2:]).run()
    assert torch.equal(trained["model"]["line"]["model"].weight, alone["model"]["line"]["model"].weight)
