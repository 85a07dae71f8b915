"""The order in which Python looks a method up, told from source."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

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
