"""What a file defines, read from its source: right, wrong, or cannot tell."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from pathlib import Path
from zipfile import ZipFile

import pytest

from pipeline.check.checker import check
from pipeline.user_code import classes, source
from pipeline.user_code.source import file_cache
from pipeline.workspaces import package_name

Workspace = Callable[..., Path]


def define(folder: Path, name: str, module: str = "m") -> source.Definition | None:
    found = source.read(f"{package_name(folder)}.{module}")
    assert found
    return source.define(found, name)


def defined(folder: Path, name: str, module: str = "m") -> source.Definition:
    definition = define(folder, name, module)
    assert definition
    return definition


@pytest.mark.parametrize("name", ["torch.utils.data", "torch.nn", "json.decoder", "sys", "email.mime.text", "pipeline"])
def test_a_module_is_found_where_python_finds_it(name: str) -> None:
    expected, found = find_spec(name), source.find_spec(name)
    assert expected
    assert found
    assert found.origin == expected.origin


@pytest.mark.parametrize(
    "name", ["nowhere_at.all", "json.nothing", "json.decoder.nothing", "sys.path", "torch.nn.modles"]
)
def test_a_module_that_is_not_there_is_not_found(name: str) -> None:
    assert source.find_spec(name) is None


def test_namespace_packages_are_found_however_deep(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = workspace({"deep_space/a/b/c.py": "X = 1", "deep_space/d.py": ""})
    monkeypatch.syspath_prepend(str(folder))
    found = source.find_spec("deep_space.a.b.c")
    assert found
    assert found.origin == str(folder / "deep_space/a/b/c.py")
    assert (source.find_spec("deep_space.a.x"), "deep_space" in sys.modules) == (None, False)


def test_a_namespace_package_may_lie_in_several_folders(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two"):
        monkeypatch.syspath_prepend(str(workspace({f"wide_space/{name}/m.py": ""}, name)))
    assert source.find_spec("wide_space.one.m")
    assert source.find_spec("wide_space.two.m")


def test_reading_a_module_imports_neither_it_nor_its_parents() -> None:
    code = """
        import sys
        from pipeline.user_code import classes, source
        module = source.read("torch.utils.data.dataset")
        assert module and classes.parameters(source.define(module, "TensorDataset")) is not None
        assert source.define(source.read("torch.nn"), "Linear").module.name == "torch.nn.modules.linear"
        assert not {"torch", "torch.utils"} & set(sys.modules), "torch was imported"
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


@pytest.mark.parametrize("name", ["sys", "math", "nowhere", "torch._C"])
def test_a_module_without_source_cannot_be_read(name: str) -> None:
    assert source.read(name) is None


def test_a_module_in_a_zip_file_cannot_be_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ZipFile(tmp_path / "packed.zip", "w") as file:
        file.writestr("zipped_away.py", "X = 1")
    monkeypatch.syspath_prepend(str(tmp_path / "packed.zip"))
    assert source.find_spec("zipped_away")
    assert source.read("zipped_away") is None


@pytest.mark.parametrize("text", [b"def f(:", b"x = '\0'", b"# one\n# two\n# three\nx = '\xe9'"])
def test_a_file_that_is_no_python_is_a_syntax_error(workspace: Workspace, text: bytes) -> None:
    folder = workspace({"m.py": ""})
    (folder / "m.py").write_bytes(text)
    with pytest.raises(SyntaxError):
        source.read(f"{package_name(folder)}.m")


def test_a_file_that_has_changed_is_read_again(workspace: Workspace) -> None:
    folder = workspace({"m.py": "class A: pass"})
    assert defined(folder, "A").location == "m.py:1"
    workspace({"m.py": "x = 1\n\nclass A: pass"})
    assert defined(folder, "A").location == "m.py:3"


CLASSES = """
    from torch import nn
    import torch
    from torch.utils.data import Dataset
    from pipeline import StartupBase, stages, Brain
    from pipeline.slots.reader import ReaderBase

    class Plain:
        pass
    class Own:
        def __init__(self, a, b=1): pass
    class Keywords:
        def __init__(self, a, *, b, c=2): pass
    class Anything:
        def __init__(self, a, **others): pass
    class Positions:
        def __init__(self, *values, name): pass
    class Both:
        def __init__(self, *values, **others): pass
    class PositionOnly:
        def __init__(self, a, b=1, /, c=2): pass
    class Inherited(Keywords):
        pass
    class Twice(Inherited):
        x = 1
    class Mixed(Plain, Own):
        pass
    class Left(Plain):
        pass
    class Right(Plain):
        def __init__(self, right): pass
    class Diamond(Left, Right):
        pass
    class Module(nn.Module):
        pass
    class Sized(nn.Module):
        def __init__(self, size: int, *, bias: bool = True) -> None: pass
    class Wider(torch.nn.Linear):
        pass
    class Data(Dataset):
        pass
    class Later(Own):
        def __init__(self, z): pass
    class Stage(StartupBase):
        def startup(self, context): pass
    class Default(stages.Startup):
        pass
    class Trains(Brain):
        pass
    class Reads(ReaderBase):
        pass
    class Overwritten:
        def __init__(self, a): pass
        def __init__(self, b): pass
"""
NAMES = [
    line.split()[1].split("(")[0].rstrip(":") for line in CLASSES.splitlines() if line.strip().startswith("class ")
]


def test_loaded_modules_asked_for_twice_are_the_same(workspace: Workspace) -> None:
    folder = workspace({"m.py": "x = 1"})
    importlib.import_module(f"{package_name(folder)}.m")
    with file_cache():
        first = list(source.loaded_modules(folder))
        assert [module.file for module in first] == [folder / "m.py"]
        assert list(source.loaded_modules(folder)) == first


@pytest.mark.parametrize("name", NAMES)
def test_parameters_are_those_of_the_signature(workspace: Workspace, name: str) -> None:
    folder = workspace({"m.py": CLASSES})
    taken = classes.parameters(defined(folder, name))
    cls = getattr(importlib.import_module(f"{package_name(folder)}.m"), name)
    every = [each for each in inspect.signature(cls).parameters.values() if each.kind is not each.VAR_POSITIONAL]
    named = [each for each in every if each.kind is not each.VAR_KEYWORD]
    required = [each.name for each in named if each.default is each.empty]
    assert taken
    assert (taken.names, list(taken.required)) == (tuple(each.name for each in named), required)
    assert (taken.any_name, taken.positional) == (
        named != every,
        sum(each.kind is not each.KEYWORD_ONLY for each in named),
    )


UNCERTAIN = """
    from dataclasses import dataclass
    from enum import Enum
    from typing import NamedTuple
    from nowhere import Unknown, wrap
    import sys

    class Meta(type):
        def __call__(cls, *args): return type.__call__(cls)
    @dataclass
    class Record:
        a: int
    class Derived(Record):
        pass
    class Metaclassed(metaclass=Meta):
        def __init__(self, a): pass
    @wrap
    class Decorated:
        def __init__(self, a): pass
    class Wrapped:
        @wrap
        def __init__(self, a): pass
    class New:
        def __new__(cls, a): return object.__new__(cls)
    class Mystery(Unknown):
        pass
    class Before(Unknown, Wrapped):
        pass
    class Error(Exception):
        pass
    class Mapping(dict):
        pass
    class Pair(NamedTuple):
        a: int
    class Colour(Enum):
        RED = 1
    class Assigned:
        __init__ = lambda self, a: None
    class Sometimes:
        if sys.platform:
            def __init__(self, a): pass
    class Itself(Itself):
        pass
    @wrap
    def function(a): pass
"""


@pytest.mark.parametrize(
    "name",
    [
        "Record", "Derived", "Metaclassed", "Decorated", "Wrapped", "New", "Mystery", "Before", "Error", "Mapping", "Pair",
        "Colour", "Assigned", "Sometimes", "Itself", "function",
    ],
)  # fmt: skip
def test_parameters_that_the_source_does_not_show_cannot_be_told(workspace: Workspace, name: str) -> None:
    assert classes.parameters(defined(workspace({"m.py": UNCERTAIN}), name)) is None


def test_the_one_that_is_given_by_position_is_no_longer_asked_for() -> None:
    taken = classes.Parameters(("context", "path"), ("context", "path"), any_name=False, positional=2)
    assert (taken.without_first().names, taken.without_first().required) == (("path",), ("path",))
    assert classes.Parameters(("path",), ("path",), any_name=False).without_first().names == ("path",)


BASES = """
    import torch
    import torch.nn as nn
    import pipeline.stages.base as base
    from abc import ABC, abstractmethod
    from typing import Generic, TypeVar
    from nowhere import Unknown, wrap
    from pipeline import StartupBase, stages
    from pipeline.stages.startup import Startup
    from torch.nn.modules.module import *
    T = TypeVar("T")

    class Direct(StartupBase): pass
    class Aliased(base.StartupBase): pass
    class Default(stages.Startup): pass
    class Second(Direct): pass
    class Typed(StartupBase, Generic[T]): pass
    class OfTyped(Typed[int]): pass
    class AndUnknown(Unknown, StartupBase): pass
    class Plain(ABC): pass
    class Net(nn.Module): pass
    class Starred(Module): pass
    class Full(torch.nn.Module): pass
    class OnlyUnknown(Unknown): pass
    class Called(make("StartupBase")): pass
    class Chosen(StartupBase if T else object): pass
    class Startup(Startup): pass
    class One(Two): pass
    class Two(One): pass
    @wrap
    class Wrapped: pass
    class Meta(metaclass=wrap): pass
"""
STARTUP_BASE = "pipeline.stages.base:StartupBase"
MODULE = "torch.nn.modules.module:Module"


@pytest.mark.parametrize(
    ("name", "base", "answer"),
    [
        *((name, STARTUP_BASE, True) for name in ("Direct", "Aliased", "Default", "Second", "Typed", "OfTyped", "AndUnknown")),
        *((name, STARTUP_BASE, False) for name in ("Plain", "Net", "Starred", "Full")),
        *((name, STARTUP_BASE, None) for name in ("OnlyUnknown", "Called", "Chosen", "Startup", "One", "Wrapped", "Meta")),
        *((name, MODULE, True) for name in ("Net", "Starred", "Full")),
        *((name, MODULE, False) for name in ("Direct", "Default", "Plain")),
    ],
)  # fmt: skip
def test_whether_a_class_derives_from_another(workspace: Workspace, name: str, base: str, answer: bool | None) -> None:
    assert classes.is_subclass(defined(workspace({"m.py": BASES}), name), base) is answer


@pytest.mark.parametrize("name", ["ABC", "Generic", "Protocol"])
def test_a_class_of_ones_own_may_be_named_like_one_of_pythons(workspace: Workspace, name: str) -> None:
    own = f"from pipeline import StartupBase\nclass {name}(StartupBase): pass"
    folder = workspace({"own.py": own, "m.py": f"from .own import {name}\nclass Startup({name}): pass"})
    assert classes.is_subclass(defined(folder, "Startup"), STARTUP_BASE) is True


ABSTRACT = """
    from abc import ABC, abstractmethod
    from nowhere import Unknown
    from pipeline import StartupBase, stages
    import sys

    def go(self, context): pass
    class Base(ABC):
        @abstractmethod
        def one(self): ...
        @property
        @abstractmethod
        def two(self): ...
    class Half(Base):
        def one(self): pass
    class Whole(Half):
        two = 2
    class Again(Whole):
        @abstractmethod
        def one(self): ...
    class Misspelt(StartupBase):
        def statrup(self, context): pass
    class Assigned(StartupBase):
        startup = go
    class Imported(StartupBase):
        from os import getcwd as startup
    class Conditional(StartupBase):
        if sys.platform:
            def startup(self, context): pass
    class Asynchronous(StartupBase):
        async def startup(self, context): pass
    class Logging(StartupBase):
        def log(self): pass
    class Diamond(Logging, stages.Startup):
        pass
    class Wrong(stages.Startup, StartupBase):
        pass
"""  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        "Base",
        "Half",
        "Whole",
        "Again",
        "Misspelt",
        "Assigned",
        "Imported",
        "Conditional",
        "Asynchronous",
        "Logging",
        "Diamond",
        "Wrong",
    ],
)
def test_the_methods_left_abstract_are_those_that_python_says(workspace: Workspace, name: str) -> None:
    folder = workspace({"m.py": ABSTRACT.replace("from nowhere import Unknown", "")})
    cls = getattr(importlib.import_module(f"{package_name(folder)}.m"), name)
    assert set(classes.abstract_methods(defined(folder, name))) == set(cls.__abstractmethods__)


def test_what_an_unknown_base_leaves_abstract_cannot_be_told(workspace: Workspace) -> None:
    text = "from nowhere import Unknown\nfrom pipeline import StartupBase\nclass Startup(Unknown, StartupBase): pass"
    assert classes.abstract_methods(defined(workspace({"m.py": text}), "Startup")) == []


UNDEFINED = """
    from nowhere import Unknown, wrap

    class Base:
        def one(self): pass
    class Both(Base):
        two = 2
    class One(Base):
        pass
    class FromBase(Both):
        pass
    class Mixed(Unknown, Base):
        pass
    @wrap
    class Wrapped:
        pass
    class Calls(Base):
        def three(self): return self.two()
"""


@pytest.mark.parametrize(
    ("name", "base", "left"),
    [
        ("Both", "", []),
        ("FromBase", "", []),
        ("Mixed", "", []),
        ("Wrapped", "", []),
        ("One", "", ["two"]),
        ("One", "Base", ["one", "two"]),
        ("FromBase", "Base", ["one"]),
        ("Calls", "", ["two"]),
    ],
)
def test_a_method_that_nobody_defines_is_told_where_that_is_certain(
    workspace: Workspace, name: str, base: str, left: list[str]
) -> None:
    definition = defined(workspace({"m.py": UNDEFINED}), name)
    assert classes.undefined_methods(definition, ("one", "two"), f"{definition.module.name}:{base}") == left


@pytest.mark.parametrize(
    "code",
    ["One.two = 2", "setattr(One, 'two', 2)", "def f(self): self.two = 2", "def f(self): self.__dict__['two'] = 2"],
)
def test_a_method_that_code_may_define_cannot_be_told(workspace: Workspace, code: str) -> None:
    definition = defined(workspace({"m.py": f"class One:\n    def one(self): pass\n{code}\n"}), "One")
    assert classes.undefined_methods(definition, ("one", "two")) == []


LIBRARY = {
    "lib.py": "class A:\n    pass\ndef f(): pass\n",
    "star.py": "from .lib import *\n",
    "pack/__init__.py": "from .inner import B\n",
    "pack/inner.py": "class B:\n    pass\n",
}


@pytest.mark.parametrize(
    ("text", "name", "place"),
    [
        ("class A: pass", "A", "m.py:1"),
        ("from .lib import A", "A", "lib.py:1"),
        ("from .lib import A as Z", "Z", "lib.py:1"),
        ("from . import lib", "lib.A", "lib.py:1"),
        ("from .star import A", "A", "lib.py:1"),
        ("from .star import *", "f", "lib.py:3"),
        ("from .pack import B", "B", "inner.py:1"),
        ("from .pack import *", "B", "inner.py:1"),
        ("import torch.nn as nn", "nn.Module", "module.py:406"),
        ("import json", "json.decoder.JSONDecoder", "decoder.py:254"),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .lib import A", "A", "lib.py:1"),
        ("try:\n    from .lib import A\nexcept ImportError:\n    pass", "A", "lib.py:1"),
        ("class A: pass\nclass A: pass", "A", "m.py:2"),
        ("if 1:\n    class A: pass\nclass A: pass", "A", "m.py:3"),
        ("match 1:\n    case 1:\n        class A: pass", "A", "m.py:3"),
        ("async def A(): pass", "A", "m.py:1"),
    ],
)  # fmt: skip
def test_a_name_is_followed_through_its_imports(workspace: Workspace, text: str, name: str, place: str) -> None:
    found = defined(workspace({**LIBRARY, "m.py": text}), name).location
    file, _, line = found.partition(":")
    # The lines of other people's files move with their versions.
    assert (file, line) == tuple(place.split(":")) or (
        file in {"module.py", "decoder.py"} and file == place.split(":", maxsplit=1)[0]
    )


@pytest.mark.parametrize(
    "text",
    [
        "A = 1",
        "class A: pass\nA = wrap(A)",
        "a, (A, *b) = 1, (2, 3)",
        "for A in []: pass",
        "def f():\n    global A\n    A = 1\nf()",
        "match 1:\n    case A: pass",
        "match [1, 2]:\n    case [1, *A]: pass",
        "match {1: 2}:\n    case {1: 2, **A}: pass",
        "with open('x') as A: pass",
        "print(A := 3)",
        "import nowhere as A",
        "from nowhere import A",
        "from nowhere import *",
        "from sys import *",
        "def __getattr__(name): return 1",
        "globals()['A'] = 1",
        "exec('A = 1')",
        "import sys\nsetattr(sys.modules[__name__], 'A', 1)",
        "try:\n    from .lib import A\nexcept ImportError:\n    A = None",
        "try:\n    from nowhere import A\nexcept ImportError:\n    from .lib import A",
        "if 1:\n    class A: pass\nelse:\n    from .lib import A",
        "from .m import *",
        "from .m import A",
    ],
)
def test_a_name_that_code_makes_cannot_be_told(workspace: Workspace, text: str) -> None:
    assert define(workspace({**LIBRARY, "m.py": text}), "A") is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "class B: pass",
        "from .star import *",
        "from .lib import Z",
        "def f():\n    class Z: pass",
        "Z.b = 1",
        "print(Z)",
    ],
)
def test_a_name_that_is_nowhere_is_certainly_not_defined(workspace: Workspace, text: str) -> None:
    with pytest.raises(source.NotDefinedError):
        define(workspace({**LIBRARY, "m.py": text}), "Z")


def test_neighbours_are_the_files_that_are_imported_relatively(workspace: Workspace) -> None:
    files = {"m.py": "import torch\nfrom .a import x\nfrom .s import c", "a.py": "from . import b", "b.py": "from .m import y",
             "s/c.py": "from ..d import z", "d.py": "", "e.py": ""}  # fmt: skip
    folder = workspace(files)
    module = source.read(f"{package_name(folder)}.m")
    assert module
    assert {str(each.file.relative_to(folder)) for each in source.neighbours(module)} == set(files) - {"e.py"}


class Counting(MetaPathFinder):
    """Finds nothing, and counts what is looked for."""

    def __init__(self) -> None:
        self.names = Counter[str]()

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        self.names[fullname] += 1


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counting]:
    finder = Counting()
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    return finder


def test_a_check_looks_for_each_module_once(linear: Path, counting: Counting) -> None:
    # The first one of a process imports what checks are in plugins.
    check(linear)
    counting.names.clear()
    assert check(linear) == []
    assert counting.names
    assert {name: count for name, count in counting.names.items() if count > 1} == {}


def test_outside_of_a_check_a_module_that_has_come_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    with file_cache():
        assert source.find_spec("came_later") is None
        (tmp_path / "came_later").mkdir()
        assert source.find_spec("came_later") is None
    assert source.find_spec("came_later")
