"""The order in which Python looks a method up, told from source."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.user_code import classes, source
from pipeline.workspaces import package_name


def test_the_order_of_bases_is_pythons(workspace: Callable[..., Path]) -> None:
    chance = random.Random(0)
    for number in range(100):
        names = [f"C{index}" for index in range(7)]
        bases = {
            name: chance.sample(names[:index], min(index, chance.choice([0, 1, 2, 3])))
            for index, name in enumerate(names)
        }
        text = "".join(f"class {name}({', '.join(each)}): pass\n" for name, each in bases.items())
        made: dict[str, type] = {}
        try:
            exec(text, made)
        except TypeError:  # Python finds no order
            continue
        module = source.read(f"{package_name(workspace({f'm{number}.py': text}))}.m{number}")
        assert module
        for name in names:
            definition = source.define(module, name)
            assert definition
            above, _ = classes.ancestry(definition)
            assert [each.name for each in above] == [each.__name__ for each in made[name].__mro__[:-1]]


Workspace = Callable[..., Path]

HEAD = "import typing\nimport typing as t\nfrom typing import Dict, Optional, Union\nfrom pathlib import Path\n"


def refused(workspace: Workspace, parameter: str, value: Any, head: str = HEAD) -> str | None:
    """What is said of a value for a parameter of a function."""
    module = source.read(f"{package_name(workspace({'m.py': f'{head}def f({parameter}): pass'}))}.m")
    definition = source.define(module, "f") if module else None
    taken = classes.parameters(definition) if definition else None
    assert taken
    return taken.argument_faults({"x": value}, "f").get("x")


@pytest.mark.parametrize(
    ("parameter", "value", "message"),
    [
        ("x: int", "two", "is 'two', a string; write an integer (m.py:5: x: int)"),
        ("x: int", 1.5, "is 1.5, a number; write an integer (m.py:5: x: int)"),
        ("x: int", None, "is null; write an integer (m.py:5: x: int)"),
        ("x: float", "1e-3", "is '1e-3', a string; write a number (m.py:5: x: float)"),
        ("x: str", 3, "is 3, an integer; write a string (m.py:5: x: str)"),
        ("x: str", True, "is true; write a string (m.py:5: x: str)"),
        ("x: bool", "yes", "is 'yes', a string; write true or false (m.py:5: x: bool)"),
        ("x: list", "a", "is 'a', a string; write a list (m.py:5: x: list)"),
        ("x: dict", [1], "is [1], a list; write a mapping (m.py:5: x: dict)"),
        ("x: list[int]", {"a": 1}, "is {'a': 1}, a mapping; write a list (m.py:5: x: list[int])"),
        ("x: dict[str, int]", 1, "is 1, an integer; write a mapping (m.py:5: x: dict[str, int])"),
        ("x: Dict[str, int]", 1, "is 1, an integer; write a mapping (m.py:5: x: Dict[str, int])"),
        ("x: int | None", "a", "is 'a', a string; write an integer or null (m.py:5: x: int | None)"),
        ("x: 'int | str'", [], "is [], a list; write an integer or a string (m.py:5: x: int | str)"),
        ("x: Optional[int]", "a", "is 'a', a string; write an integer or null (m.py:5: x: Optional[int])"),
        ("x: typing.Union[int, list]", "a",
         "is 'a', a string; write an integer or a list (m.py:5: x: typing.Union[int, list])"),
        ("x: int = None", "a", "is 'a', a string; write an integer or null (m.py:5: x: int)"),
        ("*, x: int = 3", "a", "is 'a', a string; write an integer (m.py:5: x: int)"),
        ("a, x: int, /, b=1", "a", "is 'a', a string; write an integer (m.py:5: x: int)"),
    ],
)  # fmt: skip
def test_a_value_that_an_annotation_refuses_is_a_fault(
    workspace: Workspace, parameter: str, value: Any, message: str
) -> None:
    assert refused(workspace, parameter, value) == f"f's argument x {message}"


@pytest.mark.parametrize(
    ("parameter", "value"),
    [
        ("x: int", 3), ("x: int", True), ("x: int", 1e3), ("x: float", 3), ("x: float", False), ("x: bool", 1), ("x: str", "3"),
        ("x: int = None", None), ("x: int = 'auto'", "auto"), ("x: int | None", None), ("x: Optional[int]", None),
        ("x: list", [1]), ("x: list[int]", ["a"]), ("x: Union[int, str]", "a"), ("x: int", "${hyper_parameters.gone}"),
        ("x", "a"), ("x: Path", 3), ("x: int | Path", "a"), ("x: 'int |'", "a"), ("x: 3", "a"), ("x: t.Tuple[int]", "a"),
        ("x: typing.Literal['a']", "b"), ("x: f(int)", "a"), ("x: typing.Any", 1), ("x: Optional[Path]", 1), ("x: int", Path()),
    ],
)  # fmt: skip
def test_a_value_that_may_be_right_is_none(workspace: Workspace, parameter: str, value: Any) -> None:
    assert refused(workspace, parameter, value) is None


@pytest.mark.parametrize(
    "head", ["class int: pass\n", "from torch import *\n", "from mine import int\n", "int = float\n"]
)
def test_a_type_under_whose_name_another_may_be_meant_is_left_alone(workspace: Workspace, head: str) -> None:
    assert refused(workspace, "x: int", "two", head) is None
