"""What every check of a config needs: to follow a class path in the source, and to note what is wrong where."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline import class_path
from pipeline.config.load import unknown_name
from pipeline.config.tree import Node, Origin
from pipeline.errors import ClassPathError, Fault, nearest
from pipeline.source_code import classes, source


class Inspection:
    """The inspection of one config.

    Attributes:
        tree: the config, as far as it could be resolved.
        workspace: what ``{workspace}`` stands for.
        faults: what is wrong with it; grows.
        modules: the workspace files that were read.
    """

    def __init__(self, tree: Node, workspace: Path | None, faults: list[Fault]) -> None:
        self.tree = tree
        self.workspace = workspace
        self.faults = faults
        self.modules: dict[Path, source.Module] = {}

    @property
    def files(self) -> list[Path]:
        """The workspace files that were read, and those that they import relatively."""
        return sorted({each.file for module in self.modules.values() for each in source.neighbours(module)})

    def section(self, name: str) -> dict[str, Node]:
        """Name -> item of ``runner``, ``dataset`` or ``phase``."""
        node = self.tree.child(name)
        items = node.children() if node and isinstance(node.value, list) else ()
        return {part: item for part, item in items if isinstance(item.value, dict)}

    def add(self, origin: Origin, address: str, message: str) -> None:
        """Note a fault."""
        self.faults.append(origin.fault(address, message))

    def referred(self, node: Node, address: str, what: str, known: dict[str, Node]) -> list[str]:
        """The names in a list of references that exist; the others become faults."""
        names = []
        for item in node.value if isinstance(node.value, list) else [node]:
            if isinstance(item.value, str) and item.value in known:
                names.append(item.value)
            elif isinstance(item.value, str):
                self.add(item.origin, address, unknown_name(what, item.value, list(known)))
        return names

    def find_class(
        self, node: Node, address: str, name: str, base: str = "", module: str = ""
    ) -> source.Definition | None:
        """The definition behind a class path; everything wrong with it becomes a fault.

        Args:
            node: holds the path; a class given from Python is left to the trainer.
            address: its address.
            name: the class meant where the path names only a file.
            base: ``module:Name`` of the class that it has to derive from.
            module: where a bare name is looked up.
        """
        if not isinstance(node.value, str):
            if module and not callable(node.value):  # elsewhere the schema says so
                self.add(
                    node.origin, address, f"is {node.plain()!r}; write the name of a class in {module}, or a class path"
                )
            return None
        if "{workspace}" in node.value or "${" in node.value:  # stands for nothing: the config says so
            return None
        try:
            path = class_path.parse(
                node.value, name=name, folder=node.origin.folder, workspace=self.workspace, module=module
            )
        except ClassPathError as error:
            self.add(node.origin, address, str(error))
            return None
        self.remember(path)
        definition, wrong = class_path.examine(path)
        for each in wrong:
            self.add(node.origin, address, each)
        fault = _wrong_class(node.value, definition, base) if definition and base else None
        if fault:
            self.add(node.origin, address, fault)
        return None if fault else definition

    def remember(self, path: class_path.ClassPath) -> None:
        """Keep a workspace file for the run directory."""
        try:
            module = source.read(path.module) if path.file else None
        except (SyntaxError, ValueError, OSError):  # a fault of the class path
            return
        if module:
            self.modules[module.file] = module

    def check_arguments(self, taken: classes.Parameters | None, given: Node, address: str, what: str) -> None:
        """Hold arguments given by name against what is taken; None: cannot tell."""
        if taken is None or not isinstance(given.value, dict):
            return
        for name, message in taken.wrong(given.plain(), what).items():
            place = given.value[name].key if name else given.origin
            self.add(place or given.origin, f"{address}.{name}".rstrip("."), message)


def _wrong_class(text: str, definition: source.Definition, base: str) -> str | None:
    """What makes a definition unfit to stand where a concrete subclass of ``base`` is wanted."""
    if not isinstance(definition.node, source.ClassNode):
        return f"'{text}' is a function, not a class; name a subclass of {base}"
    if classes.is_subclass(definition, base) is False:
        return class_path.wrong_base(text, definition.name, base)
    if left := classes.abstract_methods(definition):
        return class_path.left_abstract(text, definition.name, left) + nearest(left[0], classes.methods(definition))
    return None


def plain(node: Node, key: str) -> Any:
    """The plain value of a key; None where it is not set."""
    child = node.child(key)
    return child.plain() if child else None
