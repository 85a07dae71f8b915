"""Class paths of a config, followed through source; the faults on the way are collected."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from pipeline.config import keys
from pipeline.config.foreign_keys import foreign_remedy
from pipeline.config.load import unknown_name
from pipeline.config.yaml_tree import DEFAULT, Node, Origin
from pipeline.errors import ClassPathError, Fault, nearest, one_of
from pipeline.user_code import class_path, classes, source
from pipeline.user_code.classes import describe_value
from pipeline.user_code.constructors import CALLED, constructor_fault


class Inspection:
    """The inspection of one config.

    Args:
        tree: the config, as far as it could be resolved.
        workspace: what ``{workspace}`` stands for.
        faults: what is wrong with it; grows.
        used: the addresses that values of the config refer to.
        certain: whether the trainer is the default, and the config stands in a file.

    Attributes:
        notes: what is no fault, but perhaps not meant; grows.
        switched_off: the addresses of keys without effect, because a later layer switches them off;
            grows.
        modules: the workspace files that were read.
        flows: runner name -> how the context's keys flow through its stages, for the runners of ``mode``; grows.
    """

    def __init__(
        self,
        tree: Node,
        workspace: Path | None,
        faults: list[Fault],
        *,
        used: Collection[str] = (),
        certain: bool = False,
    ) -> None:
        self.tree = tree
        self.workspace = workspace
        self.faults = faults
        self.used = used
        self.certain = certain
        self.notes: list[str] = []
        self.switched_off: set[str] = set()
        self.modules: dict[Path, source.Module] = {}
        self.flows: dict[str, Any] = {}

    @property
    def files(self) -> list[Path]:
        """The workspace files that were read, and those that they import relatively."""
        return sorted(neighbour.file for neighbour in source.neighbours(*self.modules.values()))

    def settings(self, section: str) -> dict[str, Setting]:
        """Name -> item of ``runner``, ``dataset`` or ``phase``, with its address."""
        items = self.tree.section(section).items()
        return {name: Setting(self, f"{section}.{name}", item, item.origin) for name, item in items}

    def setting(self, key: str) -> Setting:
        """A key of the config itself."""
        return Setting(self, key, self.tree.child(key), self.tree.origin)

    def remember(self, path: class_path.ClassPath) -> None:
        """Keep a workspace file for the run directory."""
        # One that cannot be read is a fault of the class path.
        if path.file and (module := source.quiet_read(path.module)):
            self.modules[module.file] = module


@dataclass(frozen=True)
class Setting:
    """A value of a config with its address.

    Attributes:
        inspection: where the faults go.
        address: ``phase.ctr.model``.
        node: what is written; None where there is nothing.
        parent_origin: the place of what would hold it.
    """

    inspection: Inspection
    address: str
    node: Node | None
    parent_origin: Origin

    def __getitem__(self, key: str) -> Setting:
        node = self.node.child(key) if self.node else None
        return Setting(self.inspection, f"{self.address}.{key}", node, self.origin)

    def entries(self) -> Iterator[tuple[str, Setting]]:
        """(key, setting) of a mapping; empty for anything else, which the schema reports."""
        return ((key, self[key]) for key in (self.node.value if self.node and self.is_mapping else ()))

    @property
    def name(self) -> str:
        """The last part of its address."""
        return self.address.rpartition(".")[2]

    @property
    def value(self) -> Any:
        """The plain value; None if it is not set."""
        return self.node.plain() if self.node else None

    @property
    def is_mapping(self) -> bool:
        """Whether it has keys."""
        return self.node is not None and isinstance(self.node.value, dict)

    @property
    def is_written(self) -> bool:
        """Whether the config sets it; a default does not count."""
        return self.node is not None and self.node.origin is not DEFAULT

    @property
    def origin(self) -> Origin:
        """Where it was written; else where its parent was."""
        return self.node.origin if self.node and self.is_written else self.parent_origin

    def fault(self, message: str, *, of_key: bool = False) -> None:
        """Add a fault at the value, or at its key."""
        key = self.node.key if self.node and of_key else None
        self.inspection.faults.append((key or self.origin).fault(self.address, message))

    @property
    def layer(self) -> int:
        """Where it is written: 0 in a base, 1 in the config itself, 2 in an override."""
        return 2 if self.origin.is_override else int(self.origin.where == self.inspection.tree.origin.where)

    def refuse_idle(self, reason: str, *causes: Setting) -> None:
        """Report that this would be ignored: a fault, or a note where a cause is in a later layer."""
        message = f"would be ignored: {reason}"
        if any(cause.is_written and cause.layer > self.layer for cause in causes):
            self.inspection.switched_off.add(self.address)
            self.note(message)
        else:
            self.fault(message)

    def note(self, message: str) -> None:
        """Add a note, which is no fault."""
        self.inspection.notes.append(f"{self.origin}: {self.address}: {message}")

    def fault_at(self, key: str, message: str) -> None:
        """Add a fault at a key, or here if the key is not set."""
        (self[key] if self[key].is_written else self).fault(message)

    def or_empty(self, origin: Origin) -> Setting:
        """This where something is written; else a mapping without keys, whose faults are noted elsewhere."""
        return self if self.is_written and self.value is not None else replace(self, node=Node({}, origin))

    def with_keys(self, keys: Mapping[str, Node | None]) -> Setting:
        """A mapping with these keys, as if they were written here."""
        return replace(self, node=Node(dict(keys), self.origin))

    def with_spelling_of(self, module: str) -> Setting:
        """The same, a name in the spelling that it has in a module."""
        node = self.node and replace(self.node, value=class_path.spelling(self.node.value, module))
        return replace(self, node=node)

    def find_class(self, name: str, base: str = "", module: str = "") -> source.Definition | None:
        """The definition behind a class path, if there is one; everything wrong with it becomes a fault.

        Args:
            name: the class meant where the path names only a file.
            base: ``module:Name`` of the class that it has to derive from.
            module: where a bare name is looked up.
        """
        text, inspection = self.node.value if self.node else None, self.inspection
        if isinstance(text, type) and (given := source.class_definition(text)):
            self._check_constructor(given, name)
        if not isinstance(text, str):  # a class given from Python is left to the trainer
            if self.node and module and not callable(text):  # elsewhere the schema says so
                self.fault(f"is {self.value!r}; write the name of a class in {module}, or a class path")
            return None
        if "{workspace}" in text or "${" in text:  # stands for nothing: the config says so
            return None
        folder = self.node.origin.folder if self.node else None
        try:
            path = class_path.parse(text, name=name, folder=folder, workspace=inspection.workspace, module=module)
        except ClassPathError as error:
            self.fault(str(error))
            return None
        inspection.remember(path)
        definition, messages = class_path.examine(path)
        wrong = _wrong_class(text, definition, base) if definition and base else None
        for message in [*messages, *([wrong] if wrong else [])]:
            self.fault(message)
        if definition and not wrong:
            self._check_constructor(definition, name)
        return None if wrong else definition

    def _check_constructor(self, definition: source.Definition, name: str) -> None:
        """Add a fault for a constructor that does not call the one above it; ``name``: what the class is for."""
        if message := constructor_fault(definition, CALLED.get(name, ())):
            self.fault(message)

    def references(self, section: str) -> list[str]:
        """The names in it, one or a list, of items of a section that exist; the others become faults."""
        node, known, names = self.node, self.inspection.tree.section(section), []
        for item in node.value if node and isinstance(node.value, list) else [node] if node else ():
            if isinstance(item.value, str) and item.value in known:
                names.append(item.value)
            elif isinstance(item.value, str):
                replace(self, node=item).fault(unknown_name(section, item.value, list(known)))
        return names

    def check_keys(self, known: list[str]) -> None:
        """A fault for each key of a mapping that is none of those known."""
        for name, setting in self.entries():
            if name not in known:
                remedy = foreign_remedy(name, known) or one_of(name, known)
                setting.fault(f"unknown key{remedy}", of_key=True)

    def check_mapping(self) -> None:
        """A fault for arguments that have no names."""
        if self.node and not self.is_mapping and "${" not in str(self.node.value):
            what = f"is {describe_value(self.value)}; write a mapping"
            self.fault(f"{what}{keys.example_of(self.address)}")

    def check_arguments(self, parameters: classes.Parameters | None, what: str) -> None:
        """Check arguments by name against a signature; None: unknown."""
        faults = parameters.argument_faults(self.value, what) if parameters and self.is_mapping else {}
        for name, message in faults.items():
            (self[name] if name else self).fault(message, of_key=bool(name))

    def check_call(self, definition: source.Definition | None, origin: Origin, implicit: Sequence[str] = ()) -> None:
        """Check these arguments against the signature of a class, without those that our code passes.

        Where none are written, faults are noted at ``origin``, where the class is named.
        """
        parameters = classes.parameters(definition) if definition else None
        if definition and parameters:
            self.or_empty(origin).check_arguments(parameters.without(implicit), definition.name)

    def class_of(self, example: str, *keys: str) -> Setting:
        """The class of ``{class, args}``, beside other ``keys``; reports a missing class, wrong arguments, and other keys."""
        self.check_keys(["class", "args", *keys])
        self["args"].check_mapping()
        if self.is_mapping and not set(self.value) - {"args", *keys}:  # else the class is there, or may be misspelt
            self.fault(f"has no class; write {example}")
        return self["class"]


# Name -> item of a section.
Settings: TypeAlias = Mapping[str, Setting]


def _wrong_class(text: str, definition: source.Definition, base: str) -> str | None:
    """Why a definition is no concrete subclass of ``base``."""
    if not isinstance(definition.node, source.ClassNode):
        return f"'{text}' is a function, not a class; name a subclass of {base}"
    if classes.is_subclass(definition, base) is False:
        others = "".join(f", in the place of {source.base_name(other)}" for other in definition.node.bases)
        place = f" in {definition.location}{others}" if ".py" in text else ""
        return class_path.wrong_base(text, definition.name, base, place)
    if abstract_names := classes.abstract_methods(definition):
        hint = nearest(abstract_names[0], classes.methods(definition))
        return class_path.missing_methods(text, definition.name, abstract_names) + hint
    return None


def kind(runner: Setting) -> str:
    """``train`` or ``infer``; the schema reports anything else."""
    return str(runner["class"].value).lower().removeprefix("single_")


def place_of(definition: source.Definition, method: str, node: ast.stmt | ast.expr) -> str:
    """``Runner.run (your_runner.py:14)``."""
    return f"{definition.name}.{method} ({definition.module.file.name}:{node.lineno})"


def names_in(setting: Setting) -> list[str]:
    """The names that are written there: one, or a list of them."""
    names = setting.value
    return [name for name in (names if isinstance(names, list) else [names]) if isinstance(name, str)]


def plain(node: Node, key: str) -> Any:
    """The plain value of a key; None if it is not set."""
    child = node.child(key)
    return child.plain() if child else None
