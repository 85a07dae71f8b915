"""What each swap of a stage changes, for ``check`` and for ``swaps.txt`` of a run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from pipeline.check.data_flow import TRAINER_KEYS, DataFlow, StageFlow, default_definition
from pipeline.check.stage import OPTIONAL, Classes, module_words, positional_parameters
from pipeline.context import STAGES, STATUSES
from pipeline.user_code import classes, source


def swap_report(flows: Mapping[str, DataFlow]) -> str:
    """What the stages that are not the default change; ``""`` where all are."""
    # Several runners may have the same swap.
    runners: dict[str, list[str]] = {}
    for runner, flow in flows.items():
        for name, stage in flow.stages.items():
            if stage is None:
                text = f"{name} is not the default, and what it is cannot be told from its source"
                runners.setdefault(text, []).append(runner)
            elif stage.custom:
                own = f"{stage.definition.module.file.name}:{stage.definition.name}"
                headline = f"{name} is {own}, in the place of stages.{default_definition(name).name}"
                runners.setdefault("\n  ".join([headline, *_changes(stage, flow)]), []).append(runner)
    return "".join(f"{', '.join(names)}: {text}\n" for text, names in runners.items())


def _changes(stage: StageFlow, flow: DataFlow) -> Iterator[str]:
    default, own = stage.default_flow, stage.flow
    yield from _methods(stage)
    if arguments := _arguments(stage.definition):
        yield f"arguments: {arguments}"
    known_keys = {*TRAINER_KEYS, *default.reads(), *own.writes()}
    if new_reads := [key for key in own.reads() if key not in known_keys]:
        yield f"also reads: {', '.join(new_reads)}"
    uncertain = ", as far as can be told" if own.unknown else ""
    perhaps = set() if own.unknown else default.certain_writes() - own.certain_writes()
    changes = {
        "also writes": [key for key in own.writes() if key not in default.writes()],
        f"no longer writes{uncertain}": [key for key in default.writes() if key not in own.writes()],
        "may no longer write": [key for key in own.writes() if key in perhaps],
    }
    for change, keys in changes.items():
        if keys:
            yield f"{change}: {', '.join(f'{key} ({_readers(key, stage, flow)})' for key in keys)}"
    if own.unknown:
        yield f"may do more to the context: {own.unknown} cannot be followed"


def _readers(key: str, stage: StageFlow, flow: DataFlow) -> str:
    targets = [STATUSES.get(status, "") for status in sorted(stage.flow.statuses)]
    if key == "status" and targets and all(targets):
        return f"{'leads' if key in stage.flow.certain_writes() else 'may lead'} to {' or '.join(targets)}"
    order = list(flow.stages)
    after = [reader for name in order[order.index(stage.stage) + 1 :] if (reader := flow.stages[name])]
    needing = [reader.stage for reader in after if any(use.key == key for use in reader.flow.demands())]
    reading = [reader.stage for reader in after if key in reader.flow.reads() and reader.stage not in needing]
    reading += ["plugins"] if any(plugin and key in plugin.reads() for plugin in flow.plugins) else []
    users = {"needed": needing, "may be read": reading}
    descriptions = [f"{how} by {' and '.join(stages)}" for how, stages in users.items() if stages]
    return ", ".join(descriptions) or f"read by {'the trainer' if key in TRAINER_KEYS else 'nobody after it'}"


def _arguments(definition: source.Definition) -> str:
    parameters = classes.parameters(definition)
    if parameters is None:
        return ""
    free = parameters.without(list(positional_parameters(definition)))
    names = [name if name in free.required else f"{name} (optional)" for name in free.names]
    return ", ".join([*names, *(["any other"] if free.any_name else [])])


def _methods(stage: StageFlow) -> Iterator[str]:
    """Whose methods are left out, and which are overridden, with or without ``super()``."""
    default, ancestry = default_definition(stage.stage), classes.ancestry(stage.definition)[0]
    inherits = classes.is_subclass(stage.definition, f"{default.module.name}:{default.name}")
    ours = [base for base in ancestry if source.is_ours(base.module)]
    words = {word for module in source.neighbours(stage.definition.module) for word in module_words(module)}
    # A stage that does not derive from the default may make one and call that.
    if inherits is False and ours and default.name not in words:
        yield f"derives from {ours[0].name}: no method of stages.{default.name} runs"
    inherited = set().union(*map(classes.methods, ours)).difference(*map(classes.abstract_methods, ours[:1]))
    users = [base for base in ancestry if base not in ours]
    names = dict.fromkeys(name for base in users for name in classes.methods(base))
    overridden = (name for name in names if name in inherited and not name.startswith("__"))
    overrides = [f"{name} ({_super_use(stage, name, users)})" for name in overridden]
    if overrides or inherits:
        yield f"overrides: {', '.join(overrides) or 'nothing'}"
    if added := OPTIONAL.get(stage.stage, {}).keys() & names.keys():
        yield f"adds: {', '.join(added)}"


def _super_use(stage: StageFlow, name: str, users: Classes) -> str:
    """How those of the user's classes that override a method call what they override, each with ``super()``."""
    bases = [base for base in users if name in classes.methods(base)]
    called = stage.flow.ours.get(name) if name == STAGES[stage.stage] else None
    if called or all(classes.calls_super(base, name) for base in bases):
        return "with super()"
    texts = [source.text_of(classes.methods(base)[name]) for base in bases]
    mentioned = all(re.search(rf"(super\(.*\)|\b[A-Z]\w*)\.{name}\b", text) for text in texts)
    return "without super()" if called is None and not mentioned else "sometimes without super()"
