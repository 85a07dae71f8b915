"""Ten typical mistakes, made one at a time in each of the thirty swaps where it can be made.

``python tests/faults/swap_mistakes.py [KIND …]`` prints each with what ``check`` says of it.
"""

from __future__ import annotations

import ast
import random
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

from thirty_swaps import FOLDER, INSTALLED, SWAPS, config_with, write

from pipeline.check.checker import inspect

METHODS = {
    "instance": "instance",
    "network": "build_network",
    "startup": "startup",
    "runner": "run",
    "terminal": "terminal",
}
LATER = {
    "instance": "dataset",
    "network": "model",
    "startup": "metrics",
    "runner": "current_epoch",
    "terminal": "error",
}
"""Stage -> a key that is not there yet when it begins."""


class Mistake(NamedTuple):
    """A mistake in one file of a workspace.

    Attributes:
        kind: which of the ten.
        swap: the name of the swap.
        file: the file that it is in.
        text: that file with the mistake.
        word: the wrong word, or the one that is missing.
        line: its line in the file.
    """

    kind: str
    swap: str
    file: str
    text: str
    word: str
    line: int

    def __str__(self) -> str:
        return f"{self.kind}: {self.swap}: {self.word} ({self.file}:{self.line})"


def slip(word: str) -> str:
    """A word with one letter too few, too many, changed, or two of them swapped; always the same one."""
    chance = random.Random(word)
    at = chance.randrange(1, len(word) - 1)
    wrong = [
        word[:at] + word[at + 1 :],
        word[:at] + word[at] + word[at:],
        word[:at] + chance.choice("aeiostn") + word[at + 1 :],
        word[:at] + word[at + 1] + word[at] + word[at + 2 :],
    ]
    chance.shuffle(wrong)
    return next(other for other in wrong if other != word)


class Swap:
    """One swap: its config and the file of its classes.

    Attributes:
        stages: stage -> the name of its class.
    """

    def __init__(self, name: str) -> None:
        self.name, self.settings = name, SWAPS[name]
        self.file = f"{name}.py"
        self.is_file = (FOLDER / self.file).exists()
        self.source = (FOLDER / self.file).read_text(encoding="utf-8") if self.is_file else ""
        self.tree = ast.parse(self.source)
        paths = {key.removesuffix("_class_path"): str(path) for key, path in self.settings.items() if "path" in key}
        self.stages = {stage: path.partition(":")[2] or stage.capitalize() for stage, path in paths.items()}
        self.classes = {node.name: node for node in self.tree.body if isinstance(node, ast.ClassDef)}

    def nodes(self, kind: type[ast.AST]) -> Iterator[Any]:
        """Each node of a kind, in the order of the source."""
        found = [node for node in ast.walk(self.tree) if isinstance(node, kind)]
        yield from sorted(found, key=lambda node: (node.lineno, node.col_offset))

    def line(self, number: int) -> str:
        """A line of the file."""
        return self.source.splitlines()[number - 1]

    def stage_of(self, cls: str) -> str:
        """The stage whose class it is; empty for another class."""
        return next((stage for stage, name in self.stages.items() if name == cls), "")

    def with_line(self, kind: str, line: int, before: str, after: str, word: str = "") -> Mistake:
        """The mistake of writing something else in a line."""
        lines = self.source.splitlines(keepends=True)
        assert before in lines[line - 1], (self.name, line, before)
        lines[line - 1] = lines[line - 1].replace(before, after)
        return Mistake(kind, self.name, self.file, "".join(lines), word or after, line)

    def with_string(self, kind: str, line: int, text: str) -> Mistake:
        """The mistake of a letter in a string."""
        quote = '"' if f'"{text}"' in self.line(line) else "'"
        return self.with_line(kind, line, f"{quote}{text}{quote}", f"{quote}{slip(text)}{quote}", slip(text))

    def with_settings(self, kind: str, settings: dict[str, Any], word: str, key: str) -> Mistake:
        """The mistake of other keys in the runner."""
        text = config_with(settings)
        line = next((number for number, line in enumerate(text.splitlines(), 1) if f"{key}:" in line), 0)
        return Mistake(kind, self.name, "config.yaml", text, word, line)


def keys(swap: Swap) -> Iterator[Mistake]:
    """A letter in a key of the context: where it is read, and where somebody reads what is written."""
    seen = set()
    read = Counter(key for _, key, stores in context_keys(swap) if not stores)
    for node, key, stores in context_keys(swap):
        if (key, stores) not in seen and (not stores or read[key] or key == "status"):
            seen.add((key, stores))
            yield swap.with_string("key", node.lineno, key)


def context_keys(swap: Swap) -> Iterator[tuple[ast.AST, str, bool]]:
    """(place, key, whether it is written) of each use of the context."""
    for node in swap.nodes(ast.expr):
        match node:
            case ast.Subscript(value=ast.Name("context"), slice=ast.Constant(value=str(key))):
                yield node.slice, key, isinstance(node.ctx, ast.Store)
            case ast.Call(func=ast.Attribute(ast.Name("context"), "get"), args=[ast.Constant(value=str(key)), *_]):
                yield node.args[0], key, False
            case ast.Compare(left=ast.Constant(value=str(key)), comparators=[ast.Name("context")]):
                yield node.left, key, False


def class_names(swap: Swap) -> Iterator[Mistake]:
    """A letter in the name of the class: in the file, in the config, and in the name of its base."""
    for stage, name in swap.stages.items():
        path = swap.settings[f"{stage}_class_path"]
        if ":" in path:
            settings = swap.settings | {f"{stage}_class_path": path.replace(f":{name}", f":{slip(name)}")}
            yield swap.with_settings("class", settings, slip(name), f"{stage}_class_path")
        if cls := swap.classes.get(name):
            yield swap.with_line("class", cls.lineno, f"class {name}", f"class {slip(name)}", slip(name))
            base = ast.unparse(cls.bases[0]).rpartition(".")[2]
            yield swap.with_line("class", cls.lineno, f"{base})", f"{slip(base)})", slip(base))


def method_names(swap: Swap) -> Iterator[Mistake]:
    """A letter in the name of a method: where it is defined, and where it is called."""
    for cls in swap.classes.values():
        for node in cls.body:
            if isinstance(node, ast.FunctionDef) and not node.name.endswith("__") and swap.stage_of(cls.name):
                yield swap.with_line(
                    "method", node.lineno, f"def {node.name}(", f"def {slip(node.name)}(", slip(node.name)
                )
    for node in swap.nodes(ast.Call):
        match node.func:
            case ast.Attribute(value, name) if ast.unparse(value) in {"self", "super()", "context"} and len(name) > 3:
                if not name.endswith("__"):
                    yield swap.with_line("method", node.func.end_lineno, f".{name}(", f".{slip(name)}(", slip(name))


def arguments(swap: Swap) -> Iterator[Mistake]:
    """An argument that is missing in the config, of those that the class needs."""
    optional = {"min_count", "freeze"}
    for stage in swap.stages:
        key = f"{stage}_args"
        for name in set(swap.settings.get(key, {})) - optional:
            settings = deepcopy(swap.settings)
            del settings[key][name]
            if settings[key]:
                yield swap.with_settings("argument", settings, name, key)
            else:
                del settings[key]
                yield swap.with_settings("argument", settings, name, f"{stage}_class_path")


def supers(swap: Swap) -> Iterator[Mistake]:
    """No ``super()`` in the stage's method. That of a constructor does nothing, and may be left out."""
    for cls in swap.classes.values():
        for method in cls.body:
            for node in getattr(method, "body", []):
                call = f"super().{getattr(method, 'name', '')}("
                if isinstance(node, ast.Expr) and call in ast.unparse(node) and "__init__" not in call:
                    line = swap.line(node.lineno)
                    yield swap.with_line("super", node.lineno, line.strip(), "pass", call)._replace(line=method.lineno)


def bases(swap: Swap) -> Iterator[Mistake]:
    """The base of another stage, and none at all."""
    for stage, name in swap.stages.items():
        if cls := swap.classes.get(name):
            base = ast.unparse(cls.bases[0])
            others = [other for other in METHODS if other != stage]
            other = random.Random(name).choice(others).capitalize()
            new = f"{other}Base" if base.endswith("Base") else f"stages.{other}"
            text = swap.source.replace(f"class {name}({base})", f"class {name}({new})")
            module, _, imported = new.rpartition(".")
            text = text.replace(f"import {base}", f"import {imported}") if not module else text
            text = re.sub(rf"(from pipeline import.*\b){base}\b", rf"\1{imported}", text) if not module else text
            text = text if not module or "import stages" in text or ", stages" in text else f"{text}"
            yield Mistake("base", swap.name, swap.file, text, new, cls.lineno)
            yield swap.with_line("base", cls.lineno, f"class {name}({base})", f"class {name}", name)


def files(swap: Swap) -> Iterator[Mistake]:
    """A letter in the file's name, and the file of somebody else."""
    for stage in swap.stages:
        key = f"{stage}_class_path"
        path = str(swap.settings[key])
        file = re.split(r"[/:]", path)[1] if "/" in path else path.partition(":")[0]
        for other in [slip(file.removesuffix(".py")) + (".py" if "/" in path else ""), "model.py"]:
            if "/" in path or other != "model.py":
                settings = swap.settings | {key: path.replace(file, other)}
                yield swap.with_settings("file", settings, other, key)


def imports(swap: Swap) -> Iterator[Mistake]:
    """A neighbour by its bare name."""
    for node in swap.nodes(ast.ImportFrom):
        if node.level:
            yield swap.with_line("import", node.lineno, f"from .{node.module}", f"from {node.module}", node.module)


def early_reads(swap: Swap) -> Iterator[Mistake]:
    """A key that is not there yet: read in the first line of the stage's method, or of its constructor."""
    for stage, name in swap.stages.items():
        cls = swap.classes.get(name)
        methods = {node.name: node for node in (cls.body if cls else []) if isinstance(node, ast.FunctionDef)}
        for method in ("__init__", METHODS[stage]):
            if node := methods.get(method):
                first = node.body[0]
                indent = " " * first.col_offset
                line = swap.line(first.lineno)
                read = f'{indent}early = context["{LATER[stage]}"]\n'
                yield swap.with_line("early", first.lineno, line, read + line, LATER[stage])
        last = methods.get(METHODS[stage])
        if stage in {"network", "runner"} and last and "super()" in ast.unparse(last.body[0]):
            lines = swap.source.splitlines(keepends=True)
            at, end = last.body[0].lineno - 1, last.end_lineno or 0
            lines = [*lines[:at], *lines[at + 1 : end], lines[at], *lines[end:]]
            reads = [node for node, key, stores in context_keys(swap) if key == LATER[stage] and not stores]
            inside = [node for node in reads if at < node.lineno <= end]
            if inside:
                yield Mistake("early", swap.name, swap.file, "".join(lines), LATER[stage], inside[0].lineno - 1)


def phases(swap: Swap) -> Iterator[Mistake]:
    """A phase, or data, that is not there: in the source, and in an argument."""
    names = ("ranking", "train_data", "valid_data")
    for node in swap.nodes(ast.Constant):
        if node.value in names:
            yield swap.with_string("phase", node.lineno, node.value)
    for stage in swap.stages:
        for name, value in swap.settings.get(f"{stage}_args", {}).items():
            if value in names:
                settings = deepcopy(swap.settings)
                settings[f"{stage}_args"][name] = slip(value)
                yield swap.with_settings("phase", settings, slip(value), name)


KINDS: dict[str, Callable[[Swap], Iterator[Mistake]]] = {
    "key": keys,
    "class": class_names,
    "method": method_names,
    "argument": arguments,
    "super": supers,
    "base": bases,
    "file": files,
    "import": imports,
    "early": early_reads,
    "phase": phases,
}


def mistakes(*kinds: str) -> list[Mistake]:
    """All mistakes, of these kinds or of each."""
    return [mistake for name in SWAPS for kind in kinds or KINDS for mistake in KINDS[kind](Swap(name))]


def make(mistake: Mistake, folder: Path) -> Path:
    """The workspace of a swap with the mistake; its config."""
    config = write(mistake.swap, folder)
    (folder / mistake.file).write_text(mistake.text, encoding="utf-8")
    return config


def said_by_check(config: Path) -> list[str]:
    """The faults that ``check`` reports, else its notes: each a line."""
    result = inspect(config)
    return [str(fault) for fault in result.faults] or (result.config.notes if result.config else [])


def is_named(mistake: Mistake, message: str) -> bool:
    """Whether a message has the file with the line, the word, and a remedy.

    What the class does with an argument is named where it does it; a key that is written, where it is read; and a
    method that lacks ``super()``, where the lack shows.
    """
    lines = {str(mistake.line)} if mistake.file == "config.yaml" or mistake.kind not in {"key", "super"} else {r"\d+"}
    places = {f"{mistake.file}:{line}\\b" for line in lines}
    if mistake.file == "config.yaml" and mistake.kind == "phase":
        places = {rf"{mistake.swap}.py:\d+"}
    if mistake.kind in {"class", "method"}:  # the config's line, and the name of the file
        places |= {rf"config.yaml:\d+.*\b{mistake.file}\b"}
    return any(re.search(place, message) for place in places) and mistake.word in message and ";" in message


def main(kinds: list[str]) -> None:
    """Print what is said of each mistake, and the count."""
    sys.path.insert(0, str(INSTALLED))
    counts: Counter[tuple[str, bool]] = Counter()
    folder = Path(tempfile.mkdtemp())
    for mistake in mistakes(*kinds):
        shutil.rmtree(folder)
        said = said_by_check(make(mistake, folder))
        named = any(is_named(mistake, message) for message in said)
        counts[mistake.kind, named] += 1
        print(f"{'    ' if named else 'NOT '}{mistake}", *said, sep="\n        ")
    for kind in kinds or KINDS:
        print(f"{kind}: {counts[kind, True]} of {counts[kind, True] + counts[kind, False]} are named by check")


if __name__ == "__main__":
    main(sys.argv[1:])
