"""The ways in which people read and write a key of a dict that is handed to them.

An access is a few lines of code that use one key. In its text ``{c}`` is the dict, ``{k}`` the key, ``{x}`` a new name
and ``{v}`` a value; before it stands how often people write it so. Nothing here knows how the check reads code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from stage_file import Lines, StageFile

Access: TypeAlias = Callable[[StageFile, str, str], Lines]

VALUES = ("[1, 2, 3]", "list(range(4))", "[0.5] * 3", "[n * n for n in range(3)]", "sorted({3, 1, 2})", "[]")


def _lines(*templates: str) -> Access:
    """An access written as text: ``{c}`` is the dict, ``{k}`` the key, ``{x}`` a new name, ``{v}`` a value."""

    def access(file: StageFile, c: str, key: str) -> Lines:
        words = {"c": c, "k": key, "x": file.fresh("value"), "v": file.random.choice(VALUES)}
        return "\n".join(templates).format(**words).splitlines()

    return access


def _constant(access: Access) -> Access:
    """The same, with the key behind a name: of the module, of the class, or of the neighbour."""

    def named(file: StageFile, c: str, key: str) -> Lines:
        name = file.fresh("KEY").upper()
        match file.random.choice(["module", "module", "class", "neighbour"]):
            case "class" if file.where == "stage":
                file.attributes.append(f'{name} = "{key}"')
                name = f"self.{name}"
            case "module" if file.where != "neighbour":
                file.top.append(f'{name} = "{key}"')
            case _:
                file.neighbour.append(f'{name} = "{key}"')
                file.imports.append(f"from .shared import {name}")
        return [line.replace('"\0"', name) for line in access(file, c, "\0")]

    return named


def _split_key(file: StageFile, c: str, key: str) -> Lines:
    """``context[f"{part}_loader"]`` for a key with an underscore."""
    first, _, rest = key.partition("_")
    name = file.fresh("part")
    return (
        [f'for {name} in ("{first}", "other"):', f'    {c}[f"{{{name}}}_{rest}"] = [1, 2]']
        if rest
        else [f'{c}["{key}"] = [1]']
    )


# Reads that fail where the key is missing.
READS: dict[str, tuple[int, Access]] = {
    "subscript": (12, _lines('{x} = {c}["{k}"]', "{x} = len({x})")),
    "in a call": (6, _lines('print("{k}", len({c}["{k}"]))')),
    "loop over it": (4, _lines('for {x} in {c}["{k}"]:', "    {x} += 1")),
    "f-string": (3, _lines("print(f\"{{len({c}['{k}'])}} of them\")")),
    "method of it": (4, _lines('{c}["{k}"].append(4)')),
    "item of it": (2, _lines('{c}["{k}"][0:1] = [5]')),
    "+=": (3, _lines('{c}["{k}"] += [6]')),
    "own successor": (2, _lines('{c}["{k}"] = {c}["{k}"] + [7]')),
    "comprehension": (3, _lines('{x} = [2 * n for n in {c}["{k}"]]')),
    "literal loop": (4, _lines('for {x} in ("run_dir", "{k}"):', "    print({x}, {c}[{x}])")),
    "literal comprehension": (2, _lines('{x} = {{name: {c}[name] for name in ["device", "{k}"]}}')),
    "pop": (2, _lines('{x} = {c}.pop("{k}")')),
    "del": (1, _lines('del {c}["{k}"]')),
    "two at once": (2, _lines('{x}, {x}_too = {c}["device"], {c}["{k}"]')),
    "lambda": (1, _lines('{x} = lambda: len({c}["{k}"])', "{x}()")),
    "nested function": (2, _lines("def {x}():", '    return sum({c}["{k}"])', "{x}()")),
    "finally": (1, _lines("try:", "    {x} = 1", "finally:", '    {x} = {c}["{k}"]')),
    "with": (2, _lines("import contextlib", "with contextlib.nullcontext() as {x}:", '    {x} = {c}["{k}"]')),
    "else of a guard on another": (
        1,
        _lines('if "no such key" in {c}:', "    {x} = 1", "else:", '    {x} = {c}["{k}"]'),
    ),
    "in both branches": (
        2,
        _lines('if {c}["is_infer"]:', '    {x} = len({c}["{k}"])', "else:", '    {x} = sum({c}["{k}"])'),
    ),
    "when training": (3, _lines('if not {c}["is_infer"]:', '    {x} = {c}["{k}"]')),
    "match": (1, _lines('match {c}["{k}"]:', "    case []:", "        {x} = 1", "    case _:", "        {x} = 2")),
    "copy": (1, _lines('{x} = dict({c})["{k}"]')),
    "constant key": (5, _constant(_lines('{x} = {c}["{k}"]'))),
}

# Reads that mind a missing key.
CAREFUL: dict[str, tuple[int, Access]] = {
    "get": (8, _lines('{x} = {c}.get("{k}")')),
    "get with a default": (6, _lines('{x} = len({c}.get("{k}", []))')),
    "guard": (6, _lines('if "{k}" in {c}:', '    {x} = {c}["{k}"]')),
    "guard by get": (3, _lines('if {c}.get("{k}"):', '    {x} = {c}["{k}"]')),
    "guard by walrus": (2, _lines('if ({x} := {c}.get("{k}")) is not None:', '    print(len({x}), {c}["{k}"])')),
    "not in, then filled": (3, _lines('if "{k}" not in {c}:', '    {c}["{k}"] = {v}', '{x} = {c}["{k}"]')),
    "else of not in": (2, _lines('if "{k}" not in {c}:', "    {x} = []", "else:", '    {x} = {c}["{k}"]')),
    "conditional expression": (3, _lines('{x} = {c}["{k}"] if "{k}" in {c} else []')),
    "and": (2, _lines('{x} = "{k}" in {c} and {c}["{k}"]')),
    "guard of two": (2, _lines('if "{k}" in {c} and "device" in {c}:', '    {x} = {c}["{k}"]')),
    "try": (4, _lines("try:", '    {x} = {c}["{k}"]', "except KeyError:", "    {x} = []")),
    "try LookupError": (
        1,
        _lines("try:", '    {x} = {c}["{k}"]', "except (LookupError, TypeError) as error:", "    {x} = str(error)"),
    ),
    "try anything": (1, _lines("try:", '    {x} = len({c}["{k}"])', "except Exception:", "    {x} = 0")),
    "suppress": (2, _lines("import contextlib", "with contextlib.suppress(KeyError):", '    {x} = {c}["{k}"]')),
    "pop with a default": (3, _lines('{x} = {c}.pop("{k}", None)')),
    "setdefault": (3, _lines('{c}.setdefault("{k}", {v}).append(1)')),
    "filtered loop": (2, _lines('{x} = [{c}[name] for name in ("{k}", "device") if name in {c}]')),
    "loop that skips": (
        1,
        _lines('for {x} in ("{k}", "device"):', "    if {x} not in {c}:", "        continue", "    print({c}[{x}])"),
    ),
    "its own keys": (1, _lines("{x} = [{c}[name] for name in {c}]")),
    "items": (1, _lines('{x} = [value for name, value in {c}.items() if name == "{k}"]')),
    "guard in a name": (2, _lines('{x} = "{k}" in {c}', "if {x}:", '    print({c}["{k}"])')),
    "flag off": (3, _lines('if {c}["hyper_parameters"].get("not_given"):', '    {x} = {c}["{k}"]')),
    "when inferring": (3, _lines('if {c}["is_infer"]:', '    {x} = {c}["{k}"]')),
    "several ranks": (2, _lines('if {c}["world_size"] > 1:', '    {x} = {c}["{k}"]')),
    "any": (1, _lines('if all(name in {c} for name in ("{k}", "device")):', '    {x} = {c}["{k}"]')),
}

WRITES: dict[str, tuple[int, Access]] = {
    "assignment": (14, _lines('{c}["{k}"] = {v}')),
    "update of a dict": (4, _lines('{c}.update({{"{k}": {v}}})')),
    "update by name": (3, _lines("{c}.update({k}={v})")),
    "update of dict()": (1, _lines("{c}.update(dict({k}={v}))")),
    "update of pairs": (1, _lines('{c}.update([("{k}", {v})])')),
    "update of a name": (2, _lines('{x} = {{"{k}": {v}}}', "{c}.update({x})")),
    "|=": (2, _lines('{c} |= {{"{k}": {v}}}')),
    "setdefault": (3, _lines('{c}.setdefault("{k}", {v})')),
    "chained": (2, _lines('{c}["{k}"] = {x} = {v}')),
    "two at once": (2, _lines('{c}["{k}"], {x} = {v}, 1')),
    "annotated": (1, _lines('{c}["{k}"]: list = {v}')),
    "literal loop": (4, _lines('for {x} in ("{k}", "{k}_copy"):', "    {c}[{x}] = {v}")),
    "loop over pairs": (
        2,
        _lines('for {x}, {x}_value in (("{k}", {v}), ("{k}_size", 3)):', "    {c}[{x}] = {x}_value"),
    ),
    "loop over a dict": (2, _lines('for {x}, {x}_value in {{"{k}": {v}}}.items():', "    {c}[{x}] = {x}_value")),
    "both branches": (3, _lines('if {c}["is_infer"]:', '    {c}["{k}"] = []', "else:", '    {c}["{k}"] = {v}')),
    "when training": (2, _lines('if not {c}["is_infer"]:', '    {c}["{k}"] = {v}')),
    "try and except": (2, _lines("try:", '    {c}["{k}"] = {v}', "except OSError:", '    {c}["{k}"] = []')),
    "with": (2, _lines("import contextlib", "with contextlib.nullcontext():", '    {c}["{k}"] = {v}')),
    "growing": (2, _lines('{c}["{k}"] = []', "for {x} in range(3):", '    {c}["{k}"].append({x})')),
    "nested function": (1, _lines("def {x}():", '    {c}["{k}"] = {v}', "{x}()")),
    "while": (1, _lines('while "{k}" not in {c}:', '    {c}["{k}"] = {v}')),
    "f-string key": (2, _split_key),
    "constant key": (5, _constant(_lines('{c}["{k}"] = {v}'))),
    "__setitem__": (1, _lines('{c}.__setitem__("{k}", {v})')),
}

# Writes whose key cannot be seen in the source.
HIDDEN: dict[str, tuple[int, Access]] = {
    "key from the config": (2, _lines('{c}[{c}["hyper_parameters"]["names"]["{k}"]] = {v}')),
    "keys from the config": (2, _lines('for {x} in {c}["hyper_parameters"]["names"].values():', "    {c}[{x}] = {v}")),
    "json": (1, _lines("import json", "{c}.update(json.loads('{{\"{k}\": [1]}}'))")),
    "a function of a name": (1, _lines("import operator", 'getattr(operator, "setitem")({c}, "{k}", {v})')),
    "foreign code": (2, _lines("import operator", 'operator.setitem({c}, "{k}", {v})')),
    "reversed word": (1, lambda file, c, key: [f'{c}["{key[::-1]}"[::-1]] = [1]']),
}

# Writes that do not happen in a train runner with this config.
IDLE: dict[str, tuple[int, Access]] = {
    "when inferring": (3, _lines('if {c}["is_infer"]:', '    {c}["{k}"] = {v}')),
    "flag off": (3, _lines('if {c}["hyper_parameters"].get("not_given"):', '    {c}["{k}"] = {v}')),
    "after an error": (2, _lines("try:", "    {x} = int('3')", "except ValueError:", '    {c}["{k}"] = {v}')),
    "several ranks": (2, _lines('if {c}["world_size"] > 1:', '    {c}["{k}"] = {v}')),
}
