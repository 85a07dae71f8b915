"""Whether the ``updater`` of a phase can be built, from source alone."""

from __future__ import annotations

from pipeline.checks.inspection import Inspection
from pipeline.checks.named_class import given, no_mapping, unknown_keys
from pipeline.config.tree import Node
from pipeline.config.values import UpdaterSettings
from pipeline.source_code import classes

UPDATER = "pipeline.training.updater:UpdaterBase"
OFFERED = ("model", "brain", "optim_schedulers", "loader")
"""What the network stage gives an updater, as far as its constructor names it."""


def check_updater(inspection: Inspection, address: str, node: Node) -> None:
    """``{class_path, args}``: the class, and the arguments beside those that it is given."""
    path, arguments = node.child("class_path"), node.child("args")
    unknown_keys(inspection, address, node, list(UpdaterSettings.model_fields))
    no_mapping(inspection, f"{address}.args", arguments)
    if path is None:  # the schema says so
        return
    definition = inspection.find_class(path, f"{address}.class_path", "Updater", UPDATER)
    written = given(arguments, path)
    if not isinstance(written.value, dict):
        return
    for name in OFFERED:
        if twice := written.value.get(name):
            message = f"an updater is given '{name}' where its constructor names it; take it out"
            inspection.add(twice.key or twice.origin, f"{address}.args.{name}", message)
    own = Node({name: each for name, each in written.value.items() if name not in OFFERED}, written.origin)
    taken = classes.parameters(definition) if definition else None
    if definition and taken:
        inspection.check_arguments(taken.without(OFFERED), own, f"{address}.args", definition.name)
