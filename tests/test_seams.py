"""Where the modules of ``pipeline/`` reach into each other's objects: ``python tests/test_seams.py [--all]``.

A module may change the attributes of its own classes, and read their private names. This counts the places where it does
so with a class of another module of the package:

- writes: an attribute of another object is assigned or deleted, also by ``setattr``, ``delattr``, ``vars()`` and
  ``__dict__``; and a method or setter that does nothing else than assign its argument.
- reads: a name with one underscore is read of another object.

Only names are compared, and no types are inferred. So an attribute that a class of the same module has too is not counted,
and for an object of another library that has an attribute of the same name, ``FOREIGN`` says so.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parents[1] / "pipeline"

# How many there may be.
MOST_WRITES, MOST_READS = 0, 1

# Objects of other libraries, as the code spells them: module -> expressions.
FOREIGN: dict[str, set[str]] = {
    # of tensors of torch
    "checkpoint/comparison": {"side._values"},
    "checkpoint/pytree": {"tensor._values"},
    # of modules of torch
    "checkpoint/modes": {"part.training"},
    # of generators of numpy
    "checkpoint/random_state": {"generator.bit_generator.state"},
    # of an array of ctypes
    "checkpoint/safetensors_io": {"array.owner"},
    # of modules and tensors of torch
    "checkpoint/weights": {"part._buffers", "module.get_submodule(owner)._buffers", "tensor.data"},
    "cli/__init__": {"setattr sys"},
    # of a DataLoader of torch, of which a copy gets other workers or samplers
    "data/loader": {
        "vars(other)",
        "loader._iterator",
        "loader._fetching[0]._iterator",
        "other.num_workers",
        "other.prefetch_factor",
        "other.multiprocessing_context",
    },
    "distributed/strategy": {"own.grad._values"},
    "distributed/device": {"torch.backends.cudnn.deterministic"},
    # of a node of PyYAML
    "brain/script": {"base.value"},
    "optim/parameter_groups": {"part._modules"},
    # of an optimizer and of tensors of torch
    "optim/touched_rows": {"optimizer.step", "gradient._values", "coalesced(parameter)._values"},
    # of modules of torch
    "compute/unregistered": {"part._parameters", "part._buffers"},
    # of an exception
    "user_code/tracebacks": {"current.args"},
    # of importlib
    "workspaces/__init__": {"spec.loader"},
}

# Methods that only assign their argument, and are there because they were in a framework whose names we keep.
KEPT_SETTERS = {"set_epoch"}

MUTATORS = {"update", "pop", "popitem", "clear", "setdefault"}


class Place(NamedTuple):
    """One such access."""

    module: str
    line: int
    code: str


def parsed(package: Path) -> dict[str, ast.Module]:
    """The syntax trees of the modules in a package, by path without suffix."""
    files = sorted(package.rglob("*.py"))
    return {file.relative_to(package).with_suffix("").as_posix(): ast.parse(file.read_text("utf-8")) for file in files}


def attribute_owners(trees: Mapping[str, ast.Module]) -> dict[str, set[str]]:
    """Attribute -> the modules in which a class defines it: in its body, in its slots, or by assigning ``self.name``."""
    owners: dict[str, set[str]] = defaultdict(set)
    for module, tree in trees.items():
        for found in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
            for name in _defined(found):
                owners[name].add(module)
    return owners


def _defined(found: ast.ClassDef) -> Iterator[str]:
    for statement in found.body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            yield statement.name
        targets = [statement.target] if isinstance(statement, ast.AnnAssign) else getattr(statement, "targets", [])
        names = [name for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
        yield from (name.id for name in names)
        if any(name.id == "__slots__" for name in names):
            constants = [node for node in ast.walk(statement) if isinstance(node, ast.Constant)]
            yield from (str(constant.value) for constant in constants)
    for node in ast.walk(found):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_own(node.value):
            yield node.attr


def _is_own(base: ast.expr) -> bool:
    return isinstance(base, ast.Name) and base.id in {"self", "cls"}


def writes(trees: Mapping[str, ast.Module]) -> list[Place]:
    """The writes into objects of other modules."""
    owners = attribute_owners(trees)
    return sorted(place for module, tree in trees.items() for place in _writes_of(module, tree, owners))


def _writes_of(module: str, tree: ast.Module, owners: Mapping[str, set[str]]) -> Iterator[Place]:
    for node in ast.walk(tree):
        code = ""
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            if not _is_own(node.value) and _is_of_others(node.attr, module, owners):
                code = ast.unparse(node)
        elif isinstance(node, ast.Call):
            code = _written_by_call(node)
        elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            code = _attributes_of(node.value)
        elif isinstance(node, ast.FunctionDef) and node.name not in KEPT_SETTERS and _only_assigns(node):
            code = f"def {node.name}"
        if code and code not in FOREIGN.get(module, ()):
            yield Place(module, node.lineno, code)


def _is_of_others(name: str, module: str, owners: Mapping[str, set[str]]) -> bool:
    return bool(owners.get(name)) and module not in owners[name]


def _written_by_call(call: ast.Call) -> str:
    """The object whose attributes a call changes, with the function that does it; empty if there is none."""
    function = call.func
    name = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
    if name in {"setattr", "delattr", "__setattr__", "__delattr__"} and call.args and not _is_own(call.args[0]):
        return f"{name} {ast.unparse(call.args[0])}"
    if isinstance(function, ast.Attribute) and function.attr in MUTATORS:
        return _attributes_of(function.value)
    return ""


def _attributes_of(base: ast.expr) -> str:
    """The expression if it is ``vars(other)`` or ``other.__dict__``, else empty."""
    if isinstance(base, ast.Attribute) and base.attr == "__dict__" and not _is_own(base.value):
        return ast.unparse(base)
    is_vars = isinstance(base, ast.Call) and isinstance(base.func, ast.Name) and base.func.id == "vars"
    if is_vars and isinstance(base, ast.Call) and base.args and not _is_own(base.args[0]):
        return ast.unparse(base)
    return ""


def _only_assigns(method: ast.FunctionDef) -> bool:
    """Whether all that a method does is to assign its one argument to an attribute."""
    if method.name.startswith("__"):
        return False
    arguments = [argument.arg for argument in (*method.args.args, *method.args.kwonlyargs)]
    body = method.body[1:] if ast.get_docstring(method) is not None else method.body
    if arguments[:1] != ["self"] or len(arguments) != 2 or len(body) != 1 or not isinstance(body[0], ast.Assign):
        return False
    [*targets], value = body[0].targets, body[0].value
    names_argument = isinstance(value, ast.Name) and value.id == arguments[1]
    return names_argument and all(isinstance(target, ast.Attribute) for target in targets)


def private_reads(trees: Mapping[str, ast.Module]) -> list[Place]:
    """The places where a private name of a class of another module is read."""
    owners = attribute_owners(trees)
    found = []
    for module, tree in trees.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Load) or _is_own(node.value):
                continue
            is_private = node.attr.startswith("_") and not node.attr.startswith("__")
            if is_private and _is_of_others(node.attr, module, owners):
                code = ast.unparse(node)
                if code not in FOREIGN.get(module, ()):
                    found.append(Place(module, node.lineno, code))
    return sorted(found)


def found_in(count: Callable[[dict[str, ast.Module]], Sequence[Place]], user: str) -> list[str]:
    """What is found in a module that uses the objects of another one."""
    owner = "class Owner:\n    def __init__(self):\n        self.size = self._hidden = 0\n"
    trees = {"owner": ast.parse(owner), "user": ast.parse(user)}
    return [place.code for place in count(trees) if place.module == "user"]


@pytest.mark.parametrize(
    ("code", "place"),
    [
        ("owner.size = 1", "owner.size"),
        ("owner.size += 1", "owner.size"),
        ("owner.part.size, other = 1, 2", "owner.part.size"),
        ("del owner.size", "owner.size"),
        ("for owner.size in range(3): pass", "owner.size"),
        ("owner._hidden = 1", "owner._hidden"),
        ("setattr(owner, name, 1)", "setattr owner"),
        ("object.__setattr__(owner, name, 1)", "__setattr__ owner"),
        ("vars(owner).update(size=1)", "vars(owner)"),
        ("vars(owner)['size'] = 1", "vars(owner)"),
        ("owner.__dict__['size'] = 1", "owner.__dict__"),
        ("class User:\n def set_size(self, size):\n  self.size = size", "def set_size"),
        ("class User:\n @size.setter\n def size(self, size):\n  'Say it.'\n  self.owner.size = size", "def size"),
    ],
)
def test_a_write_into_an_object_of_another_module_is_counted(code: str, place: str) -> None:
    assert place in found_in(writes, code)


@pytest.mark.parametrize(
    "code",
    [
        "class User:\n def __init__(self, size):\n  self.size = size",
        "class User:\n def grow(self, size):\n  self.size = 2 * size",
        "class User:\n size = 0\ndef change(user):\n user.size = 1",
        "parameter.requires_grad = True",
        "print(owner.size)",
        "owner.sizes['a'] = 1",
        "vars(self)['size'] = 1",
    ],
)
def test_what_changes_no_such_object_is_not_counted(code: str) -> None:
    assert found_in(writes, code) == []


def test_a_private_name_of_another_module_is_counted_and_one_of_the_same_module_or_of_python_is_not() -> None:
    assert found_in(private_reads, "print(owner._hidden)") == ["owner._hidden"]
    own = "class User:\n _own = 1\nprint(owner.size, user._own, owner.__class__, self._hidden)"
    assert found_in(private_reads, own) == []


def test_the_modules_of_the_package_reach_into_each_other_as_little_as_they_may() -> None:
    trees = parsed(PACKAGE)
    assert len(trees) > 100
    assert len(writes(trees)) <= MOST_WRITES
    assert len(private_reads(trees)) <= MOST_READS


def main() -> None:
    """Print the numbers, and with ``--all`` the places; exit with 1 if there are more than there may be."""
    trees = parsed(PACKAGE)
    counted = {"writes": (writes(trees), MOST_WRITES), "private reads": (private_reads(trees), MOST_READS)}
    for name, (places, most) in counted.items():
        print(f"{name} across modules: {len(places)} (at most {most})")
        for place in places if "--all" in sys.argv else ():
            print(f"    pipeline/{place.module}.py:{place.line}: {place.code}")
    sys.exit(any(len(places) > most for places, most in counted.values()))


if __name__ == "__main__":
    main()
