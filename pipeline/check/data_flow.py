"""The keys of the context through the five stages."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TypeAlias

from pipeline.check.inspection import Setting, names_in, plain
from pipeline.config.schema import RunnerSchema
from pipeline.config.yaml_tree import DEFAULT, Node
from pipeline.context import KEYS, STAGES, STATUSES, TRAIN_STATE, WRITERS, Context
from pipeline.errors import nearest, one_of
from pipeline.user_code import class_path, classes, source
from pipeline.user_code.context_flow import ANY, Flow, Use
from pipeline.user_code.context_visitor import Arguments, Const, ContextVisitor, Ref, Scalar
from pipeline.user_code.source import once

# The keys that stand in the context before the first stage.
TRAINER_KEYS = tuple(key.name for key in KEYS if key.writer == "trainer" and key.name != "error")

EXPERIMENT = "pipeline.experiment.experiment:ExperimentBase"

# The keys that every experiment writes.
_EXPERIMENT_WRITES = ("model", "current_epoch", "metrics")

# Key that the trainer writes -> the names in its value.
_TRAINER_ITEMS = {
    "train_state": TRAIN_STATE,
    "runner": [f".{name}" for name in (*RunnerSchema.model_fields, *dir(RunnerSchema))],
}

# Key of the context -> its value, where that is known before anything runs.
Facts: TypeAlias = Mapping[str, bool]

_NONE: Facts = {}

# Key -> the names that are in it, or may be.
Names: TypeAlias = Mapping[str, Collection[str]]

# Stage -> its class; None for one that cannot be told.
Definitions = Mapping[str, source.Definition | None]

# Arguments of a constructor as far as they are known, and such facts, in the form in which flows are cached by them.
Constants: TypeAlias = frozenset[tuple[str, Const | None]]

KnownKeys: TypeAlias = frozenset[tuple[str, bool]]

# What tells like things apart, and one from several: phase1 and phase2, x_train and y_train, step and steps.
_MARKS = re.compile(r"\d|^\w_|_\w$|s$")

# The way out of a fault that is none.
_DECLARE_IT = "; if a stage writes it where check cannot see it, declare it in the `writes` of that stage"


def default_path(stage: str) -> str:
    """The class path of the default stage."""
    return str(RunnerSchema.model_fields[f"{stage}_class_path"].default)


def default_definition(stage: str) -> source.Definition:
    """The class of the default stage."""
    definition = class_path.define(class_path.parse(default_path(stage)))
    assert definition, "our own stages stand in files that can be read"
    return definition


def own_verbs(definition: source.Definition, stage: str) -> dict[str, tuple[tuple[str, ...], bool]]:
    """Verb -> its parameters in the default stage, and whether that certainly calls it; for those that a class overrides.

    One that only the class itself can call, since it takes other arguments, is left out. A class that certainly does not
    derive from the default has none.
    """
    ancestry, complete = classes.ancestry(definition)
    users = [base for base in ancestry if not source.is_ours(base.module)]
    default, verbs = default_definition(stage), {}
    for verb, method in classes.methods(default).items() if default in ancestry or not complete else ():
        own = next((methods[verb] for base in users if verb in (methods := classes.methods(base))), None)
        if own and verb != STAGES[stage] and not verb.startswith("_"):
            leading = _leading(stage, verb)
            changed = [(base, name) for base in users for name in leading & classes.own_names(base)]
            called = complete and default in ancestry and all(classes.calls_super(base, name) for base, name in changed)
            # Whoever calls it may have it for something else, and the default may never come to it.
            called = called and not any(verb in _own_attributes(base.node) for base in users)
            parameters = tuple(parameter.arg for parameter in method.args.args[1:])
            if called or classes.takes(own.args, len(parameters) + 1):
                verbs[verb] = parameters, called
    return verbs


@cache
def _leading(stage: str, verb: str) -> frozenset[str]:
    """The methods of the default stage that lead to one of them; without any, the loop calls it, in the stage's own."""
    methods = classes.methods(default_definition(stage))
    callers = {name for name, method in methods.items() if verb in _own_attributes(method)}
    return frozenset(callers.union(*(_leading(stage, caller) for caller in callers)) or {STAGES[stage]})


@once
def _own_attributes(node: ast.AST) -> frozenset[str]:
    """The attributes of ``self`` that code uses."""
    attributes = [part for part in ast.walk(node) if isinstance(part, ast.Attribute)]
    return frozenset(part.attr for part in attributes if isinstance(part.value, ast.Name) and part.value.id == "self")


@dataclass(frozen=True)
class StageFlow:
    """One stage of a runner and what it does with the context.

    Attributes:
        stage: which of the five.
        definition: its class.
        flow: what the class reads and writes.
        custom: whether it stands in the place of the default.
        items: key -> the names that it puts there, where the config tells all of them.
    """

    stage: str
    definition: source.Definition
    flow: Flow
    custom: bool = False
    items: Mapping[str, Collection[str]] = field(default_factory=dict)

    @property
    def location(self) -> str:
        """``runner (your_runner.py:14)``."""
        return f"{self.stage} ({self.definition.location})"

    @property
    def default_flow(self) -> Flow:
        """What the default of this stage does."""
        return flow_of_stage(default_definition(self.stage), self.stage)

    @property
    def derives(self) -> bool:
        """Whether it is a class of the user's that derives from the default."""
        return self.custom and classes.is_subclass(self.definition, default_path(self.stage)) is True

    def super_call(self, key: str) -> str:
        """What to call for a key that the default writes, from which the class derives; empty for another class."""
        call = f"call super().{STAGES[self.stage]}(context) before it is read ({self.definition.location})"
        return call if self.derives and key in self.default_flow.writes() else ""


def flow_of_stage(
    definition: source.Definition, stage: str, arguments: Mapping[str, object] = _NONE, facts: Facts = _NONE
) -> Flow:
    """What a stage reads and writes: what its source shows, and what it declares.

    Args:
        definition: its class.
        stage: which of the five it is.
        arguments: those that the config gives it.
        facts: keys of the context whose value is known before anything runs.
    """
    follow = _flow_of_our_stage if source.is_ours(definition.module) else _flow_of_stage
    return follow(definition, stage, _constants(arguments), frozenset(facts.items()))


def _flow_of_stage(definition: source.Definition, stage: str, arguments: Constants, known: KnownKeys) -> Flow:
    method, facts = STAGES[stage], dict(known)
    visitor = ContextVisitor(definition, method, facts)
    visitor.call("__init__", Arguments([Ref()], dict(arguments)))
    visitor.call(method, Arguments([Ref()]))
    # Without the default's ``run`` and the context's loop, only what is followed calls a verb.
    loops = visitor.flow.unknown or visitor.flow.ours
    for verb, (parameters, called) in own_verbs(definition, stage).items() if stage == "runner" and loops else ():
        # The loop asks whether training is over before the first epoch too.
        in_training = verb.startswith("train_") or verb == "is_over"
        with visitor.uncertain_block(unless=called and in_training and facts.get("is_infer") is False):
            visitor.call(verb, Arguments([Ref() if name == "context" else None for name in parameters]))
    flow = visitor.flow
    declared_writes = dict.fromkeys(classes.declared_keys(definition, "writes", method)) | flow.declared_writes
    # A key that it declares to write, and whose write cannot be seen, may be there at any time.
    hidden_writes = set(declared_writes) - {use.key for use in flow.uses if use.action == "write"}
    uses = [replace(use, sure=use.sure and use.key not in hidden_writes) for use in flow.uses]
    visible_reads = {use.key for use in flow.demands()}
    reads = [key for key in classes.declared_keys(definition, "reads", method) if key not in visible_reads]
    declared_reads = [Use(key, "read", definition.location, sure=True) for key in reads]
    return replace(flow, declared_writes=declared_writes, uses=dict.fromkeys([*declared_reads, *uses]))


def flow_of_plugin(
    definition: source.Definition, hooks: Iterable[str], arguments: Mapping[str, object], *, sure: bool = False
) -> Flow:
    """What a plugin may do with the context in any of its hooks.

    Args:
        definition: its class.
        hooks: their names.
        arguments: those that the config gives the constructor.
        sure: whether the hooks certainly run, one after the other.
    """
    follow = _flow_of_our_plugin if source.is_ours(definition.module) else _flow_of_plugin
    return follow(definition, tuple(hooks), _constants(arguments), sure)


def _flow_of_plugin(definition: source.Definition, hooks: tuple[str, ...], arguments: Constants, sure: bool) -> Flow:
    visitor = ContextVisitor(definition, "", {})
    with visitor.uncertain_block():
        visitor.call("__init__", Arguments(keywords=dict(arguments)))
    # From one hook to the next, it may keep anything.
    visitor.owner.mark_escaped()
    with visitor.uncertain_block(unless=sure):
        for hook in hooks:
            visitor.call(hook, Arguments(keywords={"context": Ref()}))
    return visitor.flow


def _constants(arguments: Mapping[str, object]) -> Constants:
    return frozenset((name, Const(value) if isinstance(value, Scalar) else None) for name, value in arguments.items())


# Our own files do not change while a process runs, and most runners have four or five of our stages.
_flow_of_our_stage, _flow_of_our_plugin = cache(_flow_of_stage), cache(_flow_of_plugin)


@dataclass(frozen=True)
class MissingKey:
    """A key that a stage certainly reads and that certainly nothing has written."""

    reader: StageFlow
    use: Use
    message: str
    owner: StageFlow | None = None


@dataclass
class DataFlow:
    """The flow through one runner.

    Attributes:
        stages: the stages in their order; None for one whose class cannot be told.
        plugins: what each plugin may do; None where that cannot be told.
        names: the names of phases and datasets, where the config tells them.
    """

    stages: Mapping[str, StageFlow | None]
    plugins: Sequence[Flow | None] = ()
    names: Names = field(default_factory=dict)

    def missing(self) -> list[MissingKey]:
        """The keys that are certainly read without having been written, in the order of the stages.

        Behind a stage that may write anything, or of which it isn't certain where it leads, nothing is certain.
        """
        plugins = [plugin for plugin in self.plugins if plugin and not _steers(plugin)]
        if len(plugins) < len(self.plugins):
            return []
        # A plugin may write at any time.
        plugin_writes = set[str]().union(*(plugin.writes() for plugin in plugins))
        uncertain_keys = plugin_writes.union(*(plugin.opaque for plugin in plugins))
        keys = {*TRAINER_KEYS, *plugin_writes}
        items: dict[str, Collection[str]] = dict(_TRAINER_ITEMS)
        missing: list[MissingKey] = []
        earlier_stages: list[StageFlow] = []
        stage: str | None = next(iter(self.stages), None)
        while stage and (reader := self.stages[stage]) and reader not in earlier_stages:
            flow = reader.flow
            # In others there may be more names by now.
            changed = uncertain_keys | flow.opaque | set(flow.writes())
            items = {key: names for key, names in items.items() if key not in changed}
            for use in flow.demands():
                if use.key not in keys and not use.item:
                    missing.append(self._missing(reader, use, keys, earlier_stages))
                elif use.item and use.item not in items.get(use.key, (use.item,)):
                    missing.append(self._missing_item(reader, use, items[use.key], earlier_stages))
            earlier_stages.append(reader)
            stage = self._next_stage(stage, flow)
            keys = (keys - flow.removed_keys()) | set(flow.writes()) | plugin_writes
            items |= reader.items
            missing += _misspelt_declarations(reader)
        return [*missing, *self._slips({(fault.reader.stage, fault.use.key, fault.use.item) for fault in missing})]

    def _slips(self, known: set[tuple[str, str, str]]) -> Iterator[MissingKey]:
        """The other misspelt keys, and names in them; none if something may write any key."""
        stages = [stage for stage in self.stages.values() if stage]
        flows = [*(stage.flow for stage in stages), *(plugin for plugin in self.plugins if plugin)]
        if len(flows) < len(self.stages) + len(self.plugins) or any(flow.unknown for flow in flows):
            return
        written_keys = {key for flow in flows for key in flow.writes()} | set(TRAINER_KEYS)
        # ``stats`` is a word of its own, and no misspelt ``status``.
        own_keys = {"stats", *(key for flow in flows for key in flow.reads())}
        names = {key: names for key, names in self.names.items() if not any(key in flow.opaque for flow in flows)}
        for stage in stages:
            for use, right in slips(stage.flow, written_keys, names):
                if (stage.stage, use.key, use.item) not in known:
                    item = f"['{use.item}']" if use.item else ""
                    what = f"{stage.stage} ({use.place}) reads context['{use.key}']{item}, which nobody writes"
                    yield MissingKey(stage, use, f"{what}; did you mean '{right}'?{_DECLARE_IT}")
            for use in (use for use in stage.flow.uses if use.key not in own_keys and _is_slip(use.key, "status")):
                what = f"{stage.stage} ({use.place}) writes context['{use.key}'], which nobody reads"
                yield MissingKey(stage, use, f"{what}; did you mean 'status'?")

    def wrong_uses(self) -> Iterator[tuple[StageFlow, str]]:
        """The stages that leave an unknown status, or call a misspelt method of the context, each with the message."""
        if any(plugin is None or _steers(plugin) for plugin in self.plugins):
            return
        for stage in filter(None, self.stages.values()):
            flow = stage.flow
            for place, name in flow.misnamed.items():
                if hint := nearest(name, dir(Context)):
                    yield stage, f"{stage.stage} ({place}) calls context.{name}, which the context does not have{hint}"
            for wrong in sorted(flow.statuses - {*STATUSES, ANY})[: 0 if flow.unknown else 1]:
                places = dict.fromkeys(use.place for use in flow.uses if use.key == "status" and use.action == "write")
                writes = f"{stage.stage} ({', '.join(places)}) writes context['status'] = '{wrong}'"
                yield stage, f"{writes}, which is no status{one_of(wrong, STATUSES)}"

    def _next_stage(self, stage: str, flow: Flow) -> str | None:
        """The stage that certainly comes after one; None if unknown or if there is none."""
        order = [*self.stages, None]
        successor = order[order.index(stage) + 1]
        statuses = flow.statuses - {status for status, target in STATUSES.items() if target == successor}
        if not statuses and not flow.unknown:
            return successor
        sure = any(use.key in {"status", "is_exit"} and use.action == "write" and use.sure for use in flow.uses)
        certain = sure and len(flow.statuses) == 1 and not flow.unknown
        return STATUSES.get(next(iter(flow.statuses))) if certain else None

    def _missing(self, reader: StageFlow, use: Use, keys: set[str], earlier_stages: list[StageFlow]) -> MissingKey:
        reads = f"{reader.stage} ({use.place}) reads context['{use.key}']"
        for stage in reversed(earlier_stages):
            if use.key in stage.flow.removed_keys():
                return MissingKey(reader, use, f"{reads}, which {stage.location} removes; leave it, or write it again")
        stage_keys = sorted(keys - set(TRAINER_KEYS))
        cause, owner = self._cause(reader, use, stage_keys, earlier_stages)
        written = ", ".join(stage_keys) or "nothing but what the trainer writes"
        remedy = nearest(use.key, keys.union(reader.flow.writes())) or f"; written by then: {written}"
        return MissingKey(reader, use, f"{reads}; no earlier stage writes it{cause or remedy}{_DECLARE_IT}", owner)

    def _cause(
        self, reader: StageFlow, use: Use, stage_keys: list[str], earlier_stages: list[StageFlow]
    ) -> tuple[str, StageFlow | None]:
        """Why a key is missing, what to do, and whose fault it is."""
        if WRITERS.get(use.key) == reader.stage or use.key in reader.flow.writes():
            own = f"write it here, before it is read: context['{use.key}'] = …"
            return f"; {reader.super_call(use.key) or own}", None
        # A key of the framework is right: what is like it is misspelt, and the default that writes it is said below.
        for similar in () if use.key in WRITERS else difflib.get_close_matches(use.key, stage_keys, n=1, cutoff=0.8):
            owners = (stage for stage in earlier_stages if similar in stage.flow.writes())
            return nearest(use.key, [similar]), next(owners, None)
        for stage in self.stages.values():
            if stage and stage is not reader and stage not in earlier_stages and use.key in stage.flow.writes():
                return f". {stage.location} writes it, but later or not at all: write it before, or read it there", None
        custom_stages = [stage for stage in earlier_stages if stage.custom]
        for stage in sorted(custom_stages, key=lambda stage: use.key not in stage.default_flow.writes()):
            file, near = stage.definition.module.file.name, _nearest_write(use.key, stage.default_flow.writes())
            remedy = f"{near}: write context['{use.key}'] in {file}, or read what there is"
            if near == use.key:
                remedy = f"it: {stage.super_call(use.key) or 'write it there too'}"
            if near:
                return f". The default {stage.stage}, which {file} replaces, writes {remedy}", stage
        return "", None

    def _missing_item(
        self, reader: StageFlow, use: Use, names: Collection[str], earlier_stages: list[StageFlow]
    ) -> MissingKey:
        writers = [stage.location for stage in earlier_stages if use.key in stage.flow.writes()]
        item = use.item if use.item.startswith(".") else f"['{use.item}']"
        what = f"{reader.stage} ({use.place}) reads context['{use.key}']{item}"
        without = f"{(writers or ['the trainer'])[-1]} writes context['{use.key}'] without it"
        names = RunnerSchema.model_fields if use.key == "runner" else names
        hint = nearest(use.item, names) or f"; it has {', '.join(sorted(names))}"
        remedy = "" if use.key in TRAINER_KEYS else _DECLARE_IT.replace(" it ", f" {use.key} ")
        return MissingKey(reader, use, f"{what}; {without}{hint}{remedy}")


def _steers(flow: Flow) -> bool:
    """Whether a stage or plugin may choose the stage that follows, or write any key."""
    return bool(flow.unknown or flow.statuses)


def _misspelt_declarations(stage: StageFlow) -> Iterator[MissingKey]:
    """Keys that a stage declares to write, of which its source shows just similar ones."""
    visible_writes = {use.key for use in stage.flow.uses if use.action == "write"}
    for key in set(stage.flow.declared_writes) - visible_writes if not stage.flow.unknown else ():
        for near in (near for near in visible_writes - set(stage.flow.declared_writes) if _is_slip(near, key)):
            what = f"{stage.location} declares that it writes context['{key}'], and writes context['{near}']"
            use = Use(key, "write", stage.definition.location, sure=True)
            yield MissingKey(stage, use, f"{what}; write one name in both places, or declare both")


def slips(flow: Flow, written: Collection[str], names: Names) -> Iterator[tuple[Use, str]]:
    """Misspelt keys that are perhaps read and never written, and misspelt names in them, each with the right one."""
    keys = [*(key.name for key in KEYS if len(key.name) > 4), *written]
    # A short key of one's own, with a default where nobody writes it, may well be like another.
    short = {key for key in flow.optional if len(key) < 6}
    for use in (use for use in flow.uses if use.action == "read" and use.key not in short):
        wrong, known = (use.item, names.get(use.key, ())) if use.item else (use.key, keys)
        if wrong not in known and (right := next((name for name in known if _is_slip(wrong, name)), None)):
            yield use, right


def _is_slip(wrong: str, right: str) -> bool:
    """Whether a name is another with one letter changed, left out, or too many, or with two swapped."""
    if min(len(wrong), len(right)) < 4 or _MARKS.sub("", wrong) == _MARKS.sub("", right):
        return False
    one, other = ({name, *(name[:at] + name[at + 1 :] for at in range(len(name)))} for name in (wrong, right))
    return not one.isdisjoint(other)


def _nearest_write(key: str, keys: Collection[str]) -> str:
    # What the default network writes for each phase.
    entry = ("model", "brain", "optim_schedulers", "updater") if "model" in keys else ()
    names = {name: f"model[…]['{name}']" for name in entry} | {name: name for name in sorted(keys)}
    matches = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
    return names[matches[0]] if matches else ""


class FlowCheck:
    """The check of one runner's data flow.

    Args:
        runner: the runner.
        phases: name -> phase, those that the runner runs.
    """

    def __init__(self, runner: Setting, phases: Mapping[str, Setting]) -> None:
        self.runner, self.phases = runner, phases

    def flow(self, definitions: Definitions, plugins: Sequence[Flow | None], facts: Facts) -> DataFlow:
        """How the keys flow through the stages.

        Args:
            definitions: stage -> its class.
            plugins: what each plugin may do with the context; None where that cannot be told.
            facts: keys of the context whose value is known before anything runs.
        """
        stages = {stage: self.stage(stage, definition, facts) for stage, definition in definitions.items()}
        flows = [*plugins, *(stage.flow for stage in stages.values() if stage)]
        if facts and any(flow is None or set(facts) & set(flow.writes()) for flow in flows):
            return self.flow(definitions, plugins, {})
        tree, network = self.runner.inspection.tree, definitions["network"]
        names = {"model": tree.section("phase"), "metrics": tree.section("phase"), "dataset": tree.section("dataset")}
        derives = network is not None and classes.is_subclass(network, default_path("network"))
        return DataFlow(stages, plugins, names if derives else {})

    def stage(self, stage: str, definition: source.Definition | None, facts: Facts) -> StageFlow | None:
        """What a stage does with the context."""
        if definition is None:
            return None
        arguments, custom = self.runner[f"{stage}_args"], not is_untouched(self.runner.node, stage)
        if stage == "runner" and classes.is_subclass(definition, EXPERIMENT):
            # It may use any key from any of its methods.
            uses = dict.fromkeys(Use(key, "write", definition.location, sure=False) for key in _EXPERIMENT_WRITES)
            flow = Flow(uses, opaque=set(_EXPERIMENT_WRITES), unknown=definition.location)
        else:
            flow = flow_of_stage(definition, stage, arguments.value if arguments.is_mapping else {}, facts)
        return StageFlow(stage, definition, flow, custom, {} if custom or stage != "network" else self.items(facts))

    def items(self, facts: Facts) -> dict[str, Sequence[str]]:
        """The names of the phases and datasets that the default network builds."""
        phase_names, section = self.runner["phases"].value, self.runner.inspection.tree.section("dataset")
        datasets = {dataset for name in self.phases if facts for dataset in self.datasets(name, facts)}
        # Where a name stands for nothing, the config says so.
        if not facts or not datasets <= set(section) or phase_names not in (None, *self.phases, list(self.phases)):
            return {}
        return {"model": list(self.phases), "dataset": sorted(datasets)}

    def datasets(self, phase: str, facts: Facts) -> list[str]:
        """The names of the datasets that the default network builds for a phase."""
        valid, trained = (names_in(self.phases[phase][key]) for key in ("valid_dataset_name", "dataset_name"))
        return (valid or trained) if facts["is_infer"] else [*valid, *trained]

    def faults(self, flow: DataFlow) -> None:
        """The faults: a missing key belongs to the stage that reads it, or to the one that should have written it.

        A status that leads nowhere is one of the stage that writes it, a misspelt method of the one that calls it.
        """
        for stage, message in flow.wrong_uses():
            self.runner.fault_at(f"{stage.stage}_class_path", message)
        missing = flow.missing()
        # What else may write is looked for only where it matters.
        for fault in missing if missing and not self.is_reached(flow) else ():
            owner = fault.reader if fault.reader.custom or fault.owner is None else fault.owner
            self.runner.fault_at(f"{owner.stage}_class_path", fault.message)

    def is_reached(self, flow: DataFlow) -> bool:
        """Whether a Brain of the workspace may use the context, which the runner stage passes to it."""
        stages = [stage.definition.module for stage in flow.stages.values() if stage]
        modules = [*stages, *self.runner.inspection.modules.values()]
        own = [module for module in modules if not source.is_ours(module)]
        files = [near.file for near in source.neighbours(*own)]
        return any(re.search(r"\bdef bind\b", file.read_text("utf-8", "replace")) for file in files)


def is_untouched(runner: Node | None, stage: str) -> bool:
    """Whether a stage is the default itself; a subclass may do more before and after."""
    return runner is None or plain(runner, f"{stage}_class_path") in (None, default_path(stage))


def runs_in_order(runner: Node) -> bool:
    """Whether the trainer is the default one; another may have another order of stages."""
    trainer = runner.child("trainer_class")
    return trainer is None or trainer.origin is DEFAULT
