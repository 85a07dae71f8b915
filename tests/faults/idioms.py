"""The ways in which people use a dict that is handed to them: how a key is read or written, and where that stands.

An *access* is a few lines of code that use one key of the dict called ``c``; a *place* is where in a stage's file such
lines stand. Any access may stand in any place. Nothing here knows how the check reads code.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from random import Random
from typing import TypeAlias

VALUES = ("[1, 2, 3]", "list(range(4))", "[0.5] * 3", "[n * n for n in range(3)]", "sorted({3, 1, 2})", "[]")


class StageFile:
    """A file that defines one stage, as it grows.

    Attributes:
        stage: instance, network, startup, runner or terminal.
        context: what the method calls its parameter.
        where: where the next lines stand: in the class of the ``stage``, elsewhere in its ``file``, or in a ``neighbour``.
        neighbour: the lines of a file beside it, which every stage of the workspace may import from.
    """

    def __init__(self, stage: str, base: str, method: str, random: Random, neighbour: list[str]) -> None:
        self.stage, self.base, self.method, self.random, self.neighbour = stage, base, method, random, neighbour
        self.context = random.choice(["context"] * 6 + ["ctx"])
        self.imports: list[str] = []
        self.top: list[str] = []
        self.attributes: list[str] = []
        self.init: list[str] = []
        self.methods: list[str] = []
        self.body: list[str] = []
        self.keeps_context = False
        self.where = "stage"
        self.bases = [base]
        self.names = 0

    def fresh(self, word: str) -> str:
        """A name that nothing else in the workspace has."""
        self.names += 1
        return f"{word}_{self.stage}_{self.names}"

    def keep_context(self) -> None:
        """``self.context``, set in the constructor."""
        self.keeps_context = True

    def source(self) -> str:
        """The text of the file."""
        lines = [*dict.fromkeys(self.imports), "", *self.top, "", f"class {self.stage.capitalize()}({', '.join(self.bases)}):"]
        inner = list(self.attributes)
        if self.keeps_context or self.init:
            keep = ["self.context = context"] if self.keeps_context else []
            inner += ["def __init__(self, context):", *indented(["super().__init__(context)", *keep, *self.init])]
        inner += [f"def {self.method}(self, {self.context}):", *indented(self.body or ["pass"]), *self.methods]
        return "\n".join([*lines, *indented(inner), ""])


Lines: TypeAlias = list[str]
Access = Callable[[StageFile, str, str], Lines]
Place = Callable[[StageFile, Callable[[str], Lines]], None]


def indented(lines: Lines) -> Lines:
    """The lines, one level deeper."""
    return textwrap.indent("\n".join(lines), "    ").splitlines()


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
        marked = [line.replace('"\0"', name) for line in access(file, c, "\0")]
        return marked

    return named


# Reads that fail where the key is missing.
READS: dict[str, tuple[int, Access]] = {
    "subscript": (12, _lines('{x} = {c}["{k}"]', "{x} = len({x})")),
    "in a call": (6, _lines('print("{k}", len({c}["{k}"]))')),
    "loop over it": (4, _lines('for {x} in {c}["{k}"]:', "    {x} += 1")),
    "f-string": (3, _lines('print(f"{{len({c}[\'{k}\'])}} of them")')),
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
    "else of a guard on another": (1, _lines('if "no such key" in {c}:', "    {x} = 1", "else:", '    {x} = {c}["{k}"]')),
    "in both branches": (2, _lines('if {c}["is_infer"]:', '    {x} = len({c}["{k}"])', "else:", '    {x} = sum({c}["{k}"])')),
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
    "try LookupError": (1, _lines("try:", '    {x} = {c}["{k}"]', "except (LookupError, TypeError) as error:", "    {x} = str(error)")),
    "try anything": (1, _lines("try:", '    {x} = len({c}["{k}"])', "except Exception:", "    {x} = 0")),
    "suppress": (2, _lines("import contextlib", "with contextlib.suppress(KeyError):", '    {x} = {c}["{k}"]')),
    "pop with a default": (3, _lines('{x} = {c}.pop("{k}", None)')),
    "setdefault": (3, _lines('{c}.setdefault("{k}", {v}).append(1)')),
    "filtered loop": (2, _lines('{x} = [{c}[name] for name in ("{k}", "device") if name in {c}]')),
    "loop that skips": (1, _lines('for {x} in ("{k}", "device"):', "    if {x} not in {c}:", "        continue", "    print({c}[{x}])")),
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
    "loop over pairs": (2, _lines('for {x}, {x}_value in (("{k}", {v}), ("{k}_size", 3)):', "    {c}[{x}] = {x}_value")),
    "loop over a dict": (2, _lines('for {x}, {x}_value in {{"{k}": {v}}}.items():', "    {c}[{x}] = {x}_value")),
    "both branches": (3, _lines('if {c}["is_infer"]:', '    {c}["{k}"] = []', "else:", '    {c}["{k}"] = {v}')),
    "when training": (2, _lines('if not {c}["is_infer"]:', '    {c}["{k}"] = {v}')),
    "try and except": (2, _lines("try:", '    {c}["{k}"] = {v}', "except OSError:", '    {c}["{k}"] = []')),
    "with": (2, _lines("import contextlib", "with contextlib.nullcontext():", '    {c}["{k}"] = {v}')),
    "growing": (2, _lines('{c}["{k}"] = []', "for {x} in range(3):", '    {c}["{k}"].append({x})')),
    "nested function": (1, _lines("def {x}():", '    {c}["{k}"] = {v}', "{x}()")),
    "while": (1, _lines('while "{k}" not in {c}:', '    {c}["{k}"] = {v}')),
    "f-string key": (2, lambda file, c, key: _split_key(file, c, key)),
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


def _split_key(file: StageFile, c: str, key: str) -> Lines:
    """``context[f"{part}_loader"]`` for a key with an underscore."""
    first, _, rest = key.partition("_")
    name = file.fresh("part")
    return [f'for {name} in ("{first}", "other"):', f'    {c}[f"{{{name}}}_{rest}"] = [1, 2]'] if rest else [f'{c}["{key}"] = [1]']


def _inline(file: StageFile, lines: Callable[[str], Lines]) -> None:
    file.body += lines(file.context)


def _alias(file: StageFile, lines: Callable[[str], Lines]) -> None:
    name = file.fresh("shared")
    file.body += [f"{name} = {file.context}", *lines(name)]


def _method(file: StageFile, lines: Callable[[str], Lines]) -> None:
    name, parameter = file.fresh("do"), file.random.choice(["context", "context", "ctx", "c"])
    file.methods += [f"def {name}(self, {parameter}):", *indented(lines(parameter))]
    file.body.append(f"self.{name}({file.random.choice(['', '', f'{parameter}='])}{file.context})")


def _two_methods(file: StageFile, lines: Callable[[str], Lines]) -> None:
    outer, inner = file.fresh("all"), file.fresh("one")
    file.methods += [f"def {outer}(self, context):", f"    self.{inner}(3, context)"]
    file.methods += [f"def {inner}(self, count, context):", *indented(lines("context"))]
    file.body.append(f"self.{outer}({file.context})")


def _static_method(file: StageFile, lines: Callable[[str], Lines]) -> None:
    name = file.fresh("do")
    file.methods += ["@staticmethod", f"def {name}(context):", *indented(lines("context"))]
    file.body.append(f"{file.random.choice(['self', file.stage.capitalize()])}.{name}({file.context})")


def _kept(file: StageFile, lines: Callable[[str], Lines]) -> None:
    file.keep_context()
    file.body += lines("self.context")


def _kept_and_method(file: StageFile, lines: Callable[[str], Lines]) -> None:
    file.keep_context()
    name = file.fresh("do")
    file.methods += [f"def {name}(self):", *indented(lines("self.context"))]
    file.body.append(f"self.{name}()")


def _property(file: StageFile, lines: Callable[[str], Lines]) -> None:
    file.keep_context()
    name = file.fresh("shown")
    file.methods += ["@property", f"def {name}(self):", *indented([*lines("self.context"), "return 1"])]
    file.body.append(f"print(self.{name})")


def _function(file: StageFile, lines: Callable[[str], Lines]) -> None:
    name, parameter = file.fresh("do"), file.random.choice(["context", "context", "state"])
    file.top += [f"def {name}({parameter}):", *indented(lines(parameter)), ""]
    file.body.append(f"{name}({file.context})")


def _neighbour_function(file: StageFile, lines: Callable[[str], Lines]) -> None:
    name = file.fresh("do")
    written = lines("context")
    file.neighbour += [f"def {name}(context, loud=False):", *indented(written), ""]
    if file.random.random() < 0.5:
        file.imports.append(f"from .shared import {name}")
        file.body.append(f"{name}({file.context})")
    else:
        file.imports.append("from . import shared")
        file.body.append(f"shared.{name}({file.context}, loud=True)")


def _other_class(file: StageFile, lines: Callable[[str], Lines]) -> None:
    name = file.fresh("Part")
    inner = ["def __init__(self, context):", "    self.context = context", "def run(self):", *indented(lines("self.context"))]
    file.top += [f"class {name}:", *indented(inner), ""]
    file.body += file.random.choice([[f"{name}({file.context}).run()"], [f"part = {name}({file.context})", "part.run()"]])


def _neighbour_base(file: StageFile, lines: Callable[[str], Lines]) -> None:
    """A base class of the workspace's own, whose method the stage calls."""
    if file.bases != [file.base]:
        return _method(file, lines)
    name, method = file.fresh("Base"), file.fresh("do")
    file.neighbour += [f"from pipeline import {file.base.rpartition('.')[2]}" if "." not in file.base else "from pipeline import stages"]
    written = lines("context")
    file.neighbour += [f"class {name}({file.base}):", f"    def {method}(self, context):", *indented(indented(written)), ""]
    file.imports.append(f"from .shared import {name}")
    file.bases = [name]
    file.body.append(f"self.{method}({file.context})")
    return None


def _super(file: StageFile, lines: Callable[[str], Lines]) -> None:
    """A base class of the workspace's own that does the same stage, called by ``super()``."""
    if file.bases != [file.base] or "." in file.base:
        return _function(file, lines)
    name = file.fresh("Base")
    file.top += [f"class {name}({file.base}):", f"    def {file.method}(self, context):", *indented(indented(lines("context"))), ""]
    file.bases = [name]
    file.body.append(f"super().{file.method}({file.context})")
    return None


def _mixin(file: StageFile, lines: Callable[[str], Lines]) -> None:
    name, method = file.fresh("Mixin"), file.fresh("do")
    file.top += [f"class {name}:", f"    def {method}(self, context):", *indented(indented(lines("context"))), ""]
    file.bases = [name, *file.bases]
    file.body.append(f"self.{method}({file.context})")


def _constructor(file: StageFile, lines: Callable[[str], Lines]) -> None:
    file.init += lines("context")


def _steps(file: StageFile, lines: Callable[[str], Lines]) -> None:
    """Methods in a list, called one after the other."""
    name = file.fresh("step")
    file.methods += [f"def {name}(self, context):", *indented(lines("context"))]
    file.body += [f"for step in [self.{name}]:", f"    step({file.context})"]


def _decorated(file: StageFile, lines: Callable[[str], Lines]) -> None:
    """A method under a decorator of the user's own."""
    name, decorator = file.fresh("do"), file.fresh("logged")
    file.imports.append("import functools")
    inner = ["@functools.wraps(function)", "def wrapped(*args, **kwargs):", "    return function(*args, **kwargs)", "return wrapped"]
    file.top += [f"def {decorator}(function):", *indented(inner), ""]
    file.methods += [f"@{decorator}", f"def {name}(self, context):", *indented(lines("context"))]
    file.body.append(f"self.{name}({file.context})")


PLACES: dict[str, tuple[int, Place]] = {
    "inline": (40, _inline),
    "alias": (6, _alias),
    "method": (14, _method),
    "method of a method": (4, _two_methods),
    "static method": (2, _static_method),
    "self.context": (6, _kept),
    "self.context in a method": (6, _kept_and_method),
    "property": (2, _property),
    "function": (6, _function),
    "neighbour's function": (6, _neighbour_function),
    "other class": (3, _other_class),
    "neighbour's base class": (4, _neighbour_base),
    "super()": (4, _super),
    "mixin": (2, _mixin),
    "constructor": (3, _constructor),
    "list of steps": (2, _steps),
    "decorated method": (2, _decorated),
}


def _dead_method(file: StageFile, lines: Callable[[str], Lines]) -> None:
    file.methods += [f"def {file.fresh('unused')}(self, context):", *indented(lines("context"))]


def _abort(file: StageFile, lines: Callable[[str], Lines]) -> None:
    if file.stage != "terminal" or any("def abort" in line for line in file.methods):
        return _dead_method(file, lines)
    file.methods += ["def abort(self, context, error):", *indented(lines("context"))]
    return None


def _dead_function(file: StageFile, lines: Callable[[str], Lines]) -> None:
    file.top += [f"def {file.fresh('unused')}(context):", *indented(lines("context")), ""]


def _main(file: StageFile, lines: Callable[[str], Lines]) -> None:
    file.top += ['if __name__ == "__main__":', "    context = {}", *indented(lines("context")), ""]


def _debug(file: StageFile, lines: Callable[[str], Lines]) -> None:
    name = file.fresh("DEBUG").upper()
    file.top.append(f"{name} = False")
    file.body += [f"if {name}:", *indented(lines(file.context))]


def _other_dict(file: StageFile, lines: Callable[[str], Lines]) -> None:
    """A dict that is none of ours, whatever it is called."""
    name = file.fresh("result")
    file.body += ["import collections", f"{name} = collections.defaultdict(list)", f'{name}["device"] = {name}["is_infer"] = {name}["run_dir"] = 0']
    file.body += [f'{name}["hyper_parameters"] = {{}}', f'{name}["world_size"] = 1', *lines(name)]


IDLE_PLACES: dict[str, tuple[int, Place]] = {
    "dead method": (3, _dead_method),
    "abort": (4, _abort),
    "dead function": (2, _dead_function),
    "__main__": (1, _main),
    "DEBUG": (2, _debug),
    "another dict": (3, _other_dict),
}


_OUTSIDE = {
    "static method", "function", "other class", "super()", "mixin", "dead function", "__main__",
}  # fmt: skip


def put(file: StageFile, place: str, access: Access, key: str) -> None:
    """Let an access to a key stand in a place of a file."""
    file.where = "neighbour" if place.startswith("neighbour") else "file" if place in _OUTSIDE else "stage"
    _, stand = (PLACES | IDLE_PLACES)[place]
    stand(file, lambda c: access(file, c, key))


def choose(table: dict[str, tuple[int, Access]] | dict[str, tuple[int, Place]], random: Random) -> str:
    """The name of one, the likelier the more people write it so."""
    return random.choices(list(table), [weight for weight, _ in table.values()])[0]
