"""Whether the hooks of the plugins find the keys that they read, from source alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeline.check.data_flow import DataFlow, flow_of_plugin, slips
from pipeline.config.yaml_tree import DEFAULT
from pipeline.context import KEYS
from pipeline.errors import Fault, nearest
from pipeline.user_code import class_path, classes, source
from pipeline.user_code.context_flow import Flow
from pipeline.user_code.plugins import HOOKS, Plugin


def faults_of_hooks(plugins: Sequence[tuple[Plugin, Flow | None]], flows: Sequence[DataFlow]) -> list[Fault]:
    """The keys that a hook certainly reads and nothing writes in any runner; none if something may write any key.

    Args:
        plugins: each with what it may do with the context; None where that cannot be told.
        flows: what the stages of each runner do with it.
    """
    all_flows = [stage.flow if stage else None for flow in flows for stage in flow.stages.values()]
    all_flows += [flow for _, flow in plugins]
    if any(flow is None or flow.unknown for flow in all_flows):
        return []
    written_keys = {*(key.name for key in KEYS), *(key for flow in all_flows if flow for key in flow.writes())}
    configured_plugins = [plugin for plugin, _ in plugins if plugin.origin is not DEFAULT]
    return [fault for plugin in configured_plugins for fault in _missing(plugin, written_keys)]


def _missing(plugin: Plugin, written_keys: set[str]) -> Iterator[Fault]:
    definition = definition_of(plugin)
    for hook in HOOKS:
        if definition and classes.member(definition, hook):
            flow = flow_of_plugin(definition, [hook], plugin.args, sure=True)
            reads = [use for use in flow.demands() if not use.item and use.key not in written_keys]
            for use in dict.fromkeys([*reads, *(use for use, _ in slips(flow, written_keys, {}))]):
                where = f"plugin '{plugin.name}', hook {hook} ({use.place})"
                remedy = nearest(use.key, written_keys) or "; write it in a stage, or read it with context.get"
                yield plugin.origin.fault("plugins", f"{where} reads context['{use.key}'], which nobody writes{remedy}")


def definition_of(plugin: Plugin) -> source.Definition | None:
    """The source of a plugin's class; None if it cannot be read."""
    definition = class_path.examine(plugin.target)[0] if isinstance(plugin.target, class_path.ClassPath) else None
    return definition if definition and isinstance(definition.node, source.ClassNode) else None
