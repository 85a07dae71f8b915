"""Whether each stage of a runner finds the keys that it reads, from source alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from pipeline import contracts
from pipeline.checks.data_flow import DataFlow, StageFlow
from pipeline.checks.inspection import Inspection, plain
from pipeline.config.schema import RunnerSchema
from pipeline.config.tree import DEFAULT, Node
from pipeline.inference.flow import ANY, Flow, Path, Use
from pipeline.inference.outside import is_reached, keeps_context
from pipeline.source_code import source

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
        found = contracts.flow_of_stage(definition, stage, arguments if isinstance(arguments, dict) else {}, facts)
        custom = not is_untouched(self.runner, stage)
        if stage == "network" and not custom:
            found = self.with_names(found, facts)
        if stage == "runner" and "Runner.run" in found.runs and not (custom and facts.get("is_infer")):
            needs = [use for use in self.needs(definition.place, facts) if _is_as_found(use.path, found)]
            found = replace(found, uses=(*found.uses, *needs))
        broken = contracts.broken(definition, stage, found) if custom else []
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
