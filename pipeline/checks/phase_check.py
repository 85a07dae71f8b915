"""Whether a phase holds together: its model or another's, its metrics, data, optimizers and updater, from source alone."""

from __future__ import annotations

from pipeline.checks.inspection import Inspection, plain
from pipeline.checks.model_check import (
    ModelCheck,
    has_default_runner,
    is_stepped,
    loss_names,
    may_report,
    reported,
    undefined,
)
from pipeline.checks.named_class import class_of, given
from pipeline.checks.optimizer_check import check_short_form
from pipeline.checks.scheduler_check import Around, check_optim_scheduler
from pipeline.checks.updater_check import check_updater
from pipeline.config.tree import DEFAULT, Node
from pipeline.errors import one_of
from pipeline.source_code import classes, source

METRICS = "pipeline.training.metrics"
METRIC = ("update", "compute", "reset")
"""What the runner calls on a metric."""
OF_THE_MODEL = ("model", "model_args", "modules", "loss", "optim_schedulers")
"""What a phase takes from the phase whose model it shares."""


class PhaseCheck:
    """The checks of what the default network stage builds.

    Args:
        inspection: where the faults go.
        runner: the runner that it is built for.
    """

    def __init__(self, inspection: Inspection, runner: Node) -> None:
        self.inspection = inspection
        self.runner = runner
        self.phases: dict[str, Node] = {}
        self.trains = False

    def all(self, phases: dict[str, Node], *, trains: bool) -> None:
        """Check the phases of the runner, and the optimizer if it trains."""
        self.phases, self.trains = phases, trains
        for name, phase in phases.items():
            self.phase(name, phase, trains)
        own = [phase for phase in phases.values() if plain(phase, "model_of") is None]
        if own and trains:
            without = {
                name: each for name, each in phases.items() if each in own and not plain(each, "optim_schedulers")
            }
            stepped = any(self.is_stepped(name, phase) for name, phase in without.items())
            check_short_form(self.inspection, self.runner, needed=bool(without), stepped=stepped)

    def phase(self, name: str, phase: Node, trains: bool) -> None:
        """Check one phase."""
        address, shared, updater = f"phase.{name}", phase.child("model_of"), phase.child("updater")
        if shared is not None and shared.value is not None:
            self.sharing(name, phase, shared)
        else:
            ModelCheck(self.inspection, self.runner, address, phase).all()
            self.optim_schedulers(name, phase)
        for key in ("dataset_name", "valid_dataset_name"):
            self.dataset(phase, key, address)
        if plain(phase, "dataset_name") is None and (trains or plain(phase, "valid_dataset_name") is None):
            message = "required key is missing; add `dataset_name:`, one of `dataset:`"
            self.inspection.add(phase.origin, f"{address}.dataset_name", message)
        if updater and isinstance(updater.value, dict):
            check_updater(self.inspection, f"{address}.updater", updater)
        metrics = phase.child("metrics")
        for each, metric in metrics.children() if metrics and isinstance(metrics.value, dict) else ():
            self.metric(f"{address}.metrics.{each}", metric)

    def sharing(self, name: str, phase: Node, shared: Node) -> None:
        """A phase that trains the model of another one of this runner, and so has none of its own."""
        address, other = f"phase.{name}.model_of", shared.value
        if not isinstance(other, str):  # the schema says so
            return
        owner, everywhere = self.phases.get(other), self.inspection.section("phase")
        if other == name:
            self.inspection.add(shared.origin, address, f"'{other}' is this phase itself; name another, or a `model`")
        elif other not in everywhere:
            known = [each for each in self.phases if each != name]
            self.inspection.add(shared.origin, address, f"there is no phase '{other}'{one_of(other, known)}")
        elif owner is None:
            runner = f"runner '{self.runner.name}'"
            message = f"phase '{other}' is not run by {runner}; add it to the runner's `phases`, or name one of those"
            self.inspection.add(shared.origin, address, message)
        elif (first := plain(owner, "model_of")) is not None:
            self.inspection.add(shared.origin, address, f"'{other}' has the model of '{first}'; name '{first}' itself")
        for key in OF_THE_MODEL:
            node = phase.child(key)
            if node and node.origin is not DEFAULT and node.value not in (None, {}):
                message = f"would be ignored: the model is that of phase '{other}'; remove it, or model_of"
                self.inspection.add(node.key or node.origin, f"phase.{name}.{key}", message)

    def optim_schedulers(self, name: str, phase: Node) -> None:
        """The optimizers of a phase; the numbers of a validation reach them from each phase that shares the model."""
        schedulers = phase.child("optim_schedulers")
        if not schedulers or not isinstance(schedulers.value, dict):
            return
        around = Around(
            judged=self.judged(name, phase),
            losses=loss_names(self.inspection, self.runner, f"phase.{name}", phase) if self.trains else None,
            stepped=self.is_stepped(name, phase),
            batches=self.batches(),
            accum_grad=plain(self.runner, "accum_grad"),
            epochs=plain(self.runner, "epochs") if plain(self.runner, "max_steps") is None else None,
        )
        for each, scheduler in schedulers.children():
            check_optim_scheduler(self.inspection, f"phase.{name}.optim_schedulers.{each}", scheduler, around)

    def judged(self, name: str, phase: Node) -> str | set[str] | None:
        """The numbers that a validation reports to the optimizers; what to do for one; None: cannot tell."""
        sharing = {
            name: phase,
            **{other: each for other, each in self.phases.items() if plain(each, "model_of") == name},
        }
        validated = {other: each for other, each in sharing.items() if plain(each, "valid_dataset_name") is not None}
        if not validated:
            return "add valid_dataset_name to the phase"
        if plain(self.runner, "valid_interval") in (None, []) and self.runner.child("valid_interval"):
            return "give the runner a valid_interval"
        if not has_default_runner(self.runner) or may_report(self.inspection, validated):
            return None
        return set.intersection(*map(reported, validated.values()))

    def is_stepped(self, name: str, phase: Node) -> bool:
        """Whether it certainly is ours that steps the optimizers of a phase."""
        model = phase.child("model") if self.trains else None
        found = self.inspection.find_class(model, f"phase.{name}.model", "Model") if model and model.value else None
        return bool(found and isinstance(found.node, source.ClassNode) and is_stepped(found, self.runner, phase))

    def batches(self) -> int | None:
        """How many batches the only phase of a runner trains on, where the runner alone says so."""
        keys = ("epochs", "optimizer_step_limit", "debug")
        if len(self.phases) > 1 or not has_default_runner(self.runner) or any(plain(self.runner, key) for key in keys):
            return None
        most = plain(self.runner, "max_steps")
        return most if isinstance(most, int) else None

    def dataset(self, phase: Node, key: str, address: str) -> None:
        """The dataset that a phase names."""
        node, datasets = phase.child(key), self.inspection.section("dataset")
        if node is None or node.value is None:
            return
        for name in self.inspection.referred(node, f"{address}.{key}", "dataset", datasets):
            dataset = datasets[name]
            path, arguments = dataset.child("class_path"), dataset.child("args")
            definition = self.inspection.find_class(path, f"dataset.{name}.class_path", "Dataset") if path else None
            if definition:
                written = given(arguments, path or dataset)
                taken = classes.parameters(definition)
                self.inspection.check_arguments(taken, written, f"dataset.{name}.args", definition.name)
            start = dataset.child("multiprocessing_context")
            if start and start.value and not plain(dataset, "num_workers"):
                message = "would be ignored: with num_workers: 0 nothing is started; remove it, or set num_workers"
                self.inspection.add(start.origin, f"dataset.{name}.multiprocessing_context", message)
            timeout = dataset.child("timeout")
            if timeout and timeout.value and not plain(dataset, "num_workers"):
                message = "would be ignored: with num_workers: 0 no worker is waited for; remove it, or set num_workers"
                self.inspection.add(timeout.origin, f"dataset.{name}.timeout", message)
            collate = dataset.child("collate_fn")
            if collate and collate.value is not None:
                self.inspection.find_class(collate, f"dataset.{name}.collate_fn", "collate")

    def metric(self, address: str, metric: Node) -> None:
        """One metric: ``{class, args}``."""
        if address.endswith(".metrics.loss"):
            message = "would replace the loss of the phase, which is reported by that name; give it another"
            self.inspection.add(metric.origin, address, message)
        path = class_of(self.inspection, address, metric, "{class: AUC} or {class: …, args: {…}}")
        definition = self.inspection.find_class(path, f"{address}.class", "Metric", module=METRICS) if path else None
        if path is None or definition is None:
            return
        if not isinstance(definition.node, source.ClassNode):
            message = f"'{path.value}' is a function, not a class; name a class with update, compute and reset"
            self.inspection.add(path.origin, f"{address}.class", message)
            return
        left = classes.undefined(definition, METRIC)
        undefined(self.inspection, self.runner, f"{address}.class", path, definition, left)
        written = given(metric.child("args"), path)
        self.inspection.check_arguments(classes.parameters(definition), written, f"{address}.args", definition.name)
