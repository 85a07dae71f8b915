"""Whether each stage of a runner finds the keys that it reads, from source alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from pipeline import contracts, source
from pipeline.config.schema import RunnerSchema
from pipeline.config.tree import DEFAULT, Node
from pipeline.data_flow import DataFlow, StageFlow
from pipeline.inference.flow import Flow
from pipeline.inference.outside import is_reached, keeps_context
from pipeline.inspection import Inspection, plain


class FlowCheck:
    """The check of one runner's data flow.

    Args:
        inspection: what is known of the config and its files.
        runner: the runner.
        add: notes a fault at one of the runner's keys.
    """

    def __init__(self, inspection: Inspection, runner: Node, add: Callable[[str, str], None]) -> None:
        self.inspection = inspection
        self.runner = runner
        self.add = add

    def flow(
        self, definitions: Mapping[str, source.Definition | None], plugins: Sequence[Flow | None], facts: Mapping[str, bool]
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
        return StageFlow(stage, definition, found, custom=not is_untouched(self.runner, stage))

    def faults(self, flow: DataFlow, phases: Mapping[str, Node]) -> None:
        """A key that nobody writes is a fault of the stage that reads it, or of the one that was to write it."""
        missing = flow.missing()
        # What else may write is looked for only where it matters.
        if missing and not self.is_reached(flow, phases):
            for each in missing:
                owner = each.reader if each.reader.custom or each.blamed is None else each.blamed
                self.add(f"{owner.stage}_class_path", each.message)

    def is_reached(self, flow: DataFlow, phases: Mapping[str, Node]) -> bool:
        """Whether anything else than stages and plugins may write to the context."""
        stages = [each.definition.module for each in flow.stages.values() if each]
        if is_reached([*self.inspection.modules.values(), *stages]):
            return True
        for name, phase in phases.items():
            model = phase.child("model")
            if model is None or model.value is None:
                continue
            definition = self.inspection.find_class(model, f"phase.{name}.model", "Model")
            if definition is None or (isinstance(definition.node, source.ClassNode) and keeps_context(definition)):
                return True
        return False


def is_untouched(runner: Node, stage: str) -> bool:
    """Whether a stage is the default itself; a subclass may do more before and after."""
    default = RunnerSchema.model_fields[f"{stage}_class_path"].default
    return plain(runner, f"{stage}_class_path") in (None, default)


def runs_in_order(runner: Node) -> bool:
    """Whether the trainer is the default: the order of another's stages may be another."""
    trainer = runner.child("trainer_class")
    return trainer is None or trainer.origin is DEFAULT
