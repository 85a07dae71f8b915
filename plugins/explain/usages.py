"""Who takes a value of the config, as far as the config tells: other values of it, and the classes that it names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pipeline.config.interpolation import REFERENCE
from pipeline.config.yaml_tree import Node
from pipeline.errors import ClassPathError
from pipeline.user_code import class_path, classes, source

METRICS = "pipeline.metrics"


def usages(tree: Node, workspace: Path | None, address: str) -> list[str]:
    """``config.yaml:9: runner.train_runner.epochs is ${…}`` or ``model.py:17: Model takes it as its argument 'width'``."""
    return [*_references(tree, address), *_takers(tree, workspace, address)]


def _references(tree: Node, address: str) -> Iterator[str]:
    """Values that refer to this one, or to one that holds it."""
    for place, node in tree.walk():
        targets = [match[1] for match in REFERENCE.finditer(node.written or "")]
        if any(f"{address}.".startswith(f"{target}.") for target in targets):
            yield f"{node.origin}: {place} is {node.written}"


def _takers(tree: Node, workspace: Path | None, address: str) -> Iterator[str]:
    """Classes whose constructor has an argument of this name."""
    parent, _, name = address.rpartition(".")
    for implied, path in _class_paths(tree, parent, name):
        definition = _definition(path, implied, workspace) if path and isinstance(path.value, str) else None
        parameters = classes.parameters(definition) if definition else None
        if definition and parameters and name in parameters.names:
            yield f"{definition.location}: {definition.name} takes it as its argument '{name}'"


def _class_paths(tree: Node, parent: str, name: str) -> list[tuple[str, Node | None]]:
    """The class paths whose classes get the arguments that stand at ``parent``, each with the name that it may leave out."""
    if parent == "hyper_parameters":
        section = tree.child("phase")
        phases = [phase for _, phase in section.children()] if section else []
        return [("Model", phase.child("model")) for phase in phases if not phase.find(f"model_args.{name}")]
    holder, _, arguments = parent.rpartition(".")
    if arguments.endswith("_args"):
        owner = arguments.removesuffix("_args")
        return [(owner.capitalize(), tree.find(f"{holder}.{owner}_class_path") or tree.find(f"{holder}.{owner}"))]
    return [("Dataset", tree.find(f"{holder}.class_path")), ("Metric", tree.find(f"{holder}.class"))]


def _definition(path: Node, implied: str, workspace: Path | None) -> source.Definition | None:
    try:
        return class_path.define(class_path.parse(path.value, name=implied, workspace=workspace, module=METRICS))
    except ClassPathError:  # check says so
        return None
