"""The keys of the context through the five stages."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from pipeline.check.inspection import Inspection, plain
from pipeline.config.schema import RunnerSchema
from pipeline.config.yaml_tree import DEFAULT, Node
from pipeline.context import KEYS, TRAIN_STATE
from pipeline.errors import nearest, one_of
from pipeline.inference.flow import ANY, Flow, Path, Use, any_leads_to, matches, shown
from pipeline.inference.outside import is_reached, keeps_context
from pipeline.user_code import class_path, context_flow, source

GIVEN = tuple(key.name for key in KEYS if key.writer == "trainer" and key.name != "error")
"""The keys that stand in the context before the first stage."""

_LEADS_TO = {
    "uninit": "instance",
    "network_pass": "network",
    "startup_pass": "startup",
    "train_pass": "runner",
    "terminal_pass": "terminal",
}
"""Status -> stage, as in the trainer."""


def default_definition(stage: str) -> source.Definition:
    """The class of the default stage."""
    found = class_path.define(class_path.parse(RunnerSchema.model_fields[f"{stage}_class_path"].default))
    assert found, "our own stages stand in files that can be read"
    return found


@dataclass(frozen=True)
class StageFlow:
    """One stage of a runner and what it does with the context.

    Attributes:
        stage: which of the five.
        definition: its class.
        flow: what the class reads and writes.
        custom: whether it stands in the place of the default.
        broken: the keys that it declares to write, and certainly doesn't.
    """

    stage: str
    definition: source.Definition
    flow: Flow
    custom: bool = False
    broken: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        """``runner (your_runner.py:14)``."""
        return f"{self.stage} ({self.definition.place})"

    @property
    def default_flow(self) -> Flow:
        """What the default of this stage does."""
        return _default_flow(self.stage)


@cache
def _default_flow(stage: str) -> Flow:
    return context_flow.flow_of_stage(default_definition(stage), stage)


@dataclass(frozen=True)
class Missing:
    """A key that a stage certainly reads and that certainly nobody wrote; ``message`` says so and what to do."""

    reader: StageFlow
    use: Use
    message: str
    blamed: StageFlow | None = None


class DataFlow:
    """The flow through one runner.

    Args:
        stages: the stages in their order; None for one whose class cannot be told.
        plugins: what each plugin may do; None where that cannot be told.
    """

    def __init__(self, stages: Mapping[str, StageFlow | None], plugins: Sequence[Flow | None] = ()) -> None:
        self.stages = stages
        self.plugins = plugins

    def missing(self) -> list[Missing]:
        """What is certainly read without having been written, in the order of the stages.

        Behind a stage that may write anything, or of which it isn't certain where it leads, nothing is certain.
        """
        plugins = [plugin for plugin in self.plugins if plugin and not _steers(plugin)]
        if len(plugins) < len(self.plugins):
            return []
        # A plugin may write at any time.
        added = {key for plugin in plugins for key in plugin.writes()}
        keys = {*GIVEN, *added}
        paths: set[Path] = {("train_state",), *(("train_state", name) for name in TRAIN_STATE)}
        opaque: set[Path] = set().union(*(plugin.opaque | plugin.written() for plugin in plugins))
        found: list[Missing] = []
        entered: list[StageFlow] = []
        stage: str | None = next(iter(self.stages), None)
        while stage and (reader := self.stages[stage]) and reader not in entered:
            flow = reader.flow
            for use in flow.demands(keys):
                if use.key not in keys:
                    if len(use.path) == 1:
                        found.append(self._missing(reader, use, keys, entered))
                elif len(use.path) > 1 and _lacks(use.path, paths, opaque):
                    found.append(self._lacking(reader, use, paths, entered))
            entered.append(reader)
            stage = self._following(stage, flow)
            keys = (keys - flow.removed()) | set(flow.writes()) | added
            paths |= flow.written()
            opaque |= flow.opaque
            found += [_broken(reader, key) for key in reader.broken if key not in keys]
            keys |= set(reader.broken)
        return found

    def wrong_statuses(self) -> Iterator[tuple[StageFlow, str]]:
        """The stages that leave a status which is none, each with the message; unless somebody may write another."""
        if any(plugin is None or _steers(plugin) for plugin in self.plugins):
            return
        for stage in self.stages.values():
            flow = stage.flow if stage else Flow()
            wrong = sorted(flow.statuses - {*_LEADS_TO, ANY})
            if stage and wrong and not flow.unknown and "is_exit" not in flow.writes():
                places = dict.fromkeys(
                    use.place for use in flow.uses if use.path == ("status",) and use.action == "write"
                )
                writes = f"{stage.stage} ({', '.join(places)}) writes context['status'] = '{wrong[0]}'"
                yield stage, f"{writes}, which is no status{one_of(wrong[0], _LEADS_TO)}"

    def _following(self, stage: str, flow: Flow) -> str | None:
        """The stage that certainly comes after one; None where that cannot be told, or nothing does."""
        order = [*self.stages, None]
        following = order[order.index(stage) + 1]
        statuses = flow.statuses - {status for status, each in _LEADS_TO.items() if each == following}
        if not statuses and not flow.unknown and "is_exit" not in flow.writes():
            return following
        sure = any(use.path == ("status",) and use.action == "write" and use.sure for use in flow.uses)
        certain = sure and len(flow.statuses) == 1 and not _steers(replace(flow, statuses=frozenset()))
        return _LEADS_TO.get(next(iter(flow.statuses))) if certain else None

    def _missing(self, reader: StageFlow, use: Use, keys: set[str], entered: list[StageFlow]) -> Missing:
        reads = f"{reader.stage} ({use.place}) reads context['{use.key}']"
        for each in reversed(entered):
            if use.key in each.flow.removed():
                return Missing(reader, use, f"{reads}, which {each.place} removes; leave it there, or write it again")
        own = sorted(keys - set(GIVEN))
        because, blamed = self._because(reader, use, own, entered)
        remedy = (
            nearest(use.key, keys) or f"; written by then: {', '.join(own) or 'nothing but what the trainer writes'}"
        )
        return Missing(reader, use, f"{reads}; no earlier stage writes it{because or remedy}", blamed)

    def _because(
        self, reader: StageFlow, use: Use, own: list[str], entered: list[StageFlow]
    ) -> tuple[str, StageFlow | None]:
        """Why a key isn't there, with what to do, and whose fault that is; as far as it can be said."""
        for similar in difflib.get_close_matches(use.key, own, n=1, cutoff=0.8):
            return nearest(use.key, own), next((each for each in entered if similar in each.flow.writes()), None)
        for each in self.stages.values():
            if each and each is not reader and each not in entered and use.key in each.flow.writes():
                return (
                    f". {each.place} writes it, but comes later or not at all: write it before, or read it there",
                    None,
                )
        replaced = [each for each in entered if each.custom]
        for each in replaced:
            if use.key in each.default_flow.writes():
                return f". {_default(each)} writes it: write it there too", each
        for each in replaced:
            if near := _near(use.key, each.default_flow.written()):
                remedy = f"write context['{use.key}'] in {each.definition.module.file.name}, or read what there is"
                return f". {_default(each)} writes {shown(near)}: {remedy}", each
        return "", None

    def _lacking(self, reader: StageFlow, use: Use, paths: set[Path], entered: list[StageFlow]) -> Missing:
        above = use.path[:-1]
        there = sorted({path[-1] for path in paths if matches(path[:-1], above) and path[-1] != ANY})
        writers = [each for each in entered if any(matches(above, p) for p in each.flow.written())]
        writer = writers[-1].place if writers else "the trainer"
        what = f"{reader.stage} ({use.place}) reads context{_address(use.path)}; {writer} writes context{_address(above)} without it"
        known = f"; it has {', '.join(there)}" if there else ""
        return Missing(reader, use, what + (nearest(use.path[-1], there) or known), writers[-1] if writers else None)


def _steers(flow: Flow) -> bool:
    """Whether somebody may choose the stage that follows, or write anything."""
    return bool(flow.unknown or flow.statuses or "is_exit" in flow.writes())


def _broken(reader: StageFlow, key: str) -> Missing:
    what = f"{reader.place} declares, or inherits the declaration, that it writes context['{key}'], and does not"
    remedy = "write it, or declare another `writes`"
    return Missing(reader, Use((key,), "write", reader.definition.place, sure=True), f"{what}; {remedy}")


def _default(swapped: StageFlow) -> str:
    return f"The default {swapped.stage}, which {swapped.definition.module.file.name} replaces,"


def _address(path: Path) -> str:
    return f"['{path[0]}']{shown(path)[len(path[0]) :]}"


def _lacks(path: Path, paths: set[Path], opaque: set[Path]) -> bool:
    """Whether what lies above a path is known whole, and doesn't have it."""
    known = any(matches(path[:-1], each) for each in paths)
    return (
        known and path[-1] != ANY and not any_leads_to(opaque, path) and not any(matches(path, each) for each in paths)
    )


def _near(key: str, paths: set[Path]) -> Path | None:
    names = {path[-1]: path for path in sorted(paths, reverse=True) if path[-1] != ANY}
    found = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
    return names[found[0]] if found else None


TRAINED = ("brain", "optim_schedulers", "updater")
"""What the default runner needs of ``context["model"][phase]`` to train."""

EVALUATED = ("brain",)
"""What it needs to evaluate."""


class FlowCheck:
    """The check of one runner's data flow.

    Args:
        inspection: what is known of the config and its files.
        runner: the runner.
        phases: name -> phase, those that the runner runs.
        add: notes a fault at one of the runner's keys.
    """

    def __init__(
        self, inspection: Inspection, runner: Node, phases: Mapping[str, Node], add: Callable[[str, str], None]
    ) -> None:
        self.inspection = inspection
        self.runner = runner
        self.phases = phases
        self.add = add

    def flow(
        self,
        definitions: Mapping[str, source.Definition | None],
        plugins: Sequence[Flow | None],
        facts: Mapping[str, bool],
    ) -> DataFlow:
        """How the keys flow through the stages.

        Args:
            definitions: stage -> its class; None for one that cannot be told.
            plugins: what each plugin may do with the context; None where that cannot be told.
            facts: keys of the context whose value is known before anything runs.
        """
        stages = {stage: self.stage(stage, each, facts) for stage, each in definitions.items()}
        flows = [*plugins, *(each.flow for each in stages.values() if each)]
        if facts and any(each is None or set(facts) & set(each.writes()) for each in flows):
            return self.flow(definitions, plugins, {})
        return DataFlow(stages, plugins)

    def stage(self, stage: str, definition: source.Definition | None, facts: Mapping[str, bool]) -> StageFlow | None:
        """What a stage does with the context."""
        if definition is None:
            return None
        arguments = plain(self.runner, f"{stage}_args")
        found = context_flow.flow_of_stage(definition, stage, arguments if isinstance(arguments, dict) else {}, facts)
        custom = not is_untouched(self.runner, stage)
        if stage == "network" and not custom:
            found = self.with_names(found, facts)
        if stage == "runner" and "Runner.run" in found.runs and not (custom and facts.get("is_infer")):
            needs = [use for use in self.needs(definition.place, facts) if _is_as_found(use.path, found)]
            found = replace(found, uses=(*found.uses, *needs))
        broken = context_flow.broken(definition, stage, found) if custom else []
        return StageFlow(stage, definition, found, custom, tuple(broken))

    def with_names(self, flow: Flow, facts: Mapping[str, bool]) -> Flow:
        """What the default network does, under the names of the phases and datasets that the config has."""
        chosen, section = plain(self.runner, "phases"), self.inspection.section("dataset")
        wanted = {each for name in self.phases if facts for each in self.datasets(name, facts)}
        # Where a name stands for nothing, the config says so.
        if not facts or not wanted <= set(section) or chosen not in (None, *self.phases, list(self.phases)):
            return flow
        names = {"model": list(self.phases), "dataset": sorted(wanted)}

        def named(path: Path) -> list[Path]:
            return [(path[0], each, *path[2:]) for each in names[path[0]]] if path[0] in names and path[1:] else [path]

        uses = [replace(use, path=path) for use in flow.uses for path in named(use.path)]
        return replace(flow, uses=tuple(uses), opaque=frozenset(path for each in flow.opaque for path in named(each)))

    def datasets(self, phase: str, facts: Mapping[str, bool]) -> list[str]:
        """The names of the datasets that the default network builds for a phase."""
        data = ("valid_dataset_name", "dataset_name")
        named = [each for key in data if isinstance(each := plain(self.phases[phase], key), str)]
        return named[:1] if facts["is_infer"] else named

    def needs(self, place: str, facts: Mapping[str, bool]) -> Iterator[Use]:
        """What the default runner takes out of ``model`` and ``dataset`` for each phase, which the config names."""
        for name in self.phases if "is_infer" in facts else ():
            keys = EVALUATED if facts["is_infer"] else TRAINED
            paths: list[Path] = [("model", name, key) for key in keys]
            paths += [("dataset", each) for each in self.datasets(name, facts)]
            yield from (Use(path, "read", place, sure=True) for path in paths)

    def faults(self, flow: DataFlow) -> None:
        """A key that nobody writes is a fault of the stage that reads it, or of the one that was to write it.

        A status that leads nowhere is one of the stage that writes it.
        """
        for stage, message in flow.wrong_statuses():
            self.add(f"{stage.stage}_class_path", message)
        missing = flow.missing()
        # What else may write is looked for only where it matters.
        if missing and not self.is_reached(flow):
            for each in missing:
                owner = each.reader if each.reader.custom or each.blamed is None else each.blamed
                self.add(f"{owner.stage}_class_path", each.message)

    def is_reached(self, flow: DataFlow) -> bool:
        """Whether anything else than stages and plugins may write to the context."""
        stages = [each.definition.module for each in flow.stages.values() if each]
        if is_reached([*self.inspection.modules.values(), *stages]):
            return True
        for name, phase in self.phases.items():
            # An updater that cannot be read is given a Brain, which knows the context.
            updater = phase.find("updater.class_path")
            if updater and self.inspection.find_class(updater, f"phase.{name}.updater.class_path", "Updater") is None:
                return True
            model = phase.child("model")
            if model is None or model.value is None:
                continue
            definition = self.inspection.find_class(model, f"phase.{name}.model", "Model")
            if definition is None or (isinstance(definition.node, source.ClassNode) and keeps_context(definition)):
                return True
        return False


def _is_as_found(path: Path, flow: Flow) -> bool:
    """Whether a stage does nothing to what lies at a path and above it."""
    changed = {use.key for use in flow.uses if use.action != "read"} | {each[0] for each in flow.opaque}
    return not flow.unknown and not changed & {path[0], ANY}


def is_untouched(runner: Node, stage: str) -> bool:
    """Whether a stage is the default itself; a subclass may do more before and after."""
    default = RunnerSchema.model_fields[f"{stage}_class_path"].default
    return plain(runner, f"{stage}_class_path") in (None, default)


def runs_in_order(runner: Node) -> bool:
    """Whether the trainer is the default: the order of another's stages may be another."""
    trainer = runner.child("trainer_class")
    return trainer is None or trainer.origin is DEFAULT
