"""Where in a stage's file the lines stand that use a key: before each place stands how often people put them there."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from accesses import Access
from stage_file import Lines, StageFile, indented

Place: TypeAlias = Callable[[StageFile, Callable[[str], Lines]], None]


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
    inner = [
        "def __init__(self, context):",
        "    self.context = context",
        "def run(self):",
        *indented(lines("self.context")),
    ]
    file.top += [f"class {name}:", *indented(inner), ""]
    file.body += file.random.choice(
        [[f"{name}({file.context}).run()"], [f"part = {name}({file.context})", "part.run()"]]
    )


def _neighbour_base(file: StageFile, lines: Callable[[str], Lines]) -> None:
    """A base class of the workspace's own, whose method the stage calls."""
    if file.bases != [file.base]:
        return _method(file, lines)
    name, method = file.fresh("Base"), file.fresh("do")
    file.neighbour += [
        f"from pipeline import {file.base.rpartition('.')[2]}"
        if "." not in file.base
        else "from pipeline import stages"
    ]
    written = lines("context")
    file.neighbour += [
        f"class {name}({file.base}):",
        f"    def {method}(self, context):",
        *indented(indented(written)),
        "",
    ]
    file.imports.append(f"from .shared import {name}")
    file.bases = [name]
    file.body.append(f"self.{method}({file.context})")
    return None


def _super(file: StageFile, lines: Callable[[str], Lines]) -> None:
    """A base class of the workspace's own that does the same stage, called by ``super()``."""
    if file.bases != [file.base] or "." in file.base:
        return _function(file, lines)
    name = file.fresh("Base")
    file.top += [
        f"class {name}({file.base}):",
        f"    def {file.method}(self, context):",
        *indented(indented(lines("context"))),
        "",
    ]
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
    inner = [
        "@functools.wraps(function)",
        "def wrapped(*args, **kwargs):",
        "    return function(*args, **kwargs)",
        "return wrapped",
    ]
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
    file.body += [
        "import collections",
        f"{name} = collections.defaultdict(list)",
        f'{name}["device"] = {name}["is_infer"] = {name}["run_dir"] = 0',
    ]
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
