"""``{class, args}``, as metrics, modules and optim_schedulers are written, from source alone."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.checks.inspection import Inspection
from pipeline.config.tree import DEFAULT, Node
from pipeline.errors import one_of
from pipeline.source_code.annotations import shown

KEYS = ("class", "args")


def class_of(inspection: Inspection, address: str, node: Node, example: str) -> Node | None:
    """The value of ``class``; a fault where there is none, for arguments that are none, and for any other key."""
    if not isinstance(node.value, dict):  # the schema says so
        return None
    unknown_keys(inspection, address, node, KEYS)
    no_mapping(inspection, f"{address}.args", node.child("args"))
    path = node.child("class")
    if path is None and not set(node.value) - set(KEYS):  # else the class may be misspelt
        inspection.add(node.origin, address, f"has no class; write {example}")
    return path


def unknown_keys(inspection: Inspection, address: str, node: Node, known: Sequence[str]) -> None:
    """A fault for each key of a mapping that is none of those known."""
    for name, child in node.children():
        if name not in known:
            inspection.add(child.key or child.origin, f"{address}.{name}", f"unknown key{one_of(name, known)}")


def no_mapping(inspection: Inspection, address: str, arguments: Node | None) -> None:
    """A fault for arguments that have no names."""
    if arguments and not isinstance(arguments.value, dict) and "${" not in str(arguments.value):
        inspection.add(arguments.origin, address, f"is {shown(arguments.plain())}; write a mapping")


def given(arguments: Node | None, otherwise: Node) -> Node:
    """The arguments where some are written; else none, to be reported where the class is named."""
    return arguments if arguments is not None and arguments.origin is not DEFAULT else Node({}, otherwise.origin)
