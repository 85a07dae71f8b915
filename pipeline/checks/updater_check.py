"""Whether the ``updater`` of a phase can be built, from source alone."""

from __future__ import annotations

from pipeline.checks.inspection import Setting
from pipeline.config.values import UpdaterSettings
from pipeline.source_code import classes

UPDATER = "pipeline.training.updater:UpdaterBase"
OFFERED = ("model", "brain", "optim_schedulers", "loader")
"""What the network stage gives an updater, as far as its constructor names it."""


def check_updater(updater: Setting) -> None:
    """``{class_path, args}``: the class, and the arguments beside those that it is given."""
    path = updater["class_path"]
    updater.check_keys(list(UpdaterSettings.model_fields))
    updater["args"].check_mapping()
    definition = path.find_class("Updater", UPDATER)
    arguments = updater["args"].or_empty(path.origin)
    if path.node is None or not arguments.is_mapping:  # the schema says so
        return
    own = {}
    for name, argument in arguments.entries():
        if name in OFFERED:
            argument.fault(f"an updater is given '{name}' where its constructor names it; take it out", of_key=True)
        else:
            own[name] = argument.node
    taken = classes.parameters(definition) if definition else None
    if definition and taken:
        arguments.with_value(own).check_arguments(taken.without(OFFERED), definition.name)
