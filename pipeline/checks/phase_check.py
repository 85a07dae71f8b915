"""Whether a phase holds together: its model or another's, its metrics, data, optimizers and updater, from source alone."""

from __future__ import annotations

from pipeline.checks.inspection import Setting
from pipeline.checks.model_check import (
    check_model,
    has_default_runner,
    is_stepped,
    loss_names,
    may_report,
    refuse_undefined,
    reported,
)
from pipeline.checks.optimizer_check import check_short_form
from pipeline.checks.scheduler_check import Around, check_optim_scheduler
from pipeline.checks.updater_check import check_updater
from pipeline.errors import one_of
from pipeline.source_code import classes, source

METRICS = "pipeline.training.metrics"
METRIC = ("update", "compute", "reset")
"""What the runner calls on a metric."""
OF_THE_MODEL = ("model", "model_args", "modules", "loss", "optim_schedulers")
"""What a phase takes from the phase whose model it shares."""
_WITH_WORKERS = {"multiprocessing_context": "nothing is started", "timeout": "no worker is waited for"}
"""Key of a dataset that needs ``num_workers`` -> what becomes of it without."""


class PhaseCheck:
    """The checks of what the default network stage builds.

    Args:
        runner: the runner that it is built for.
        phases: name -> phase, those that it runs.
        trains: whether it is a train runner.
    """

    def __init__(self, runner: Setting, phases: dict[str, Setting], *, trains: bool) -> None:
        self.runner = runner
        self.phases = phases
        self.trains = trains

    def all(self) -> None:
        """Check the phases of the runner, and the optimizer if it trains."""
        for phase in self.phases.values():
            self.phase(phase)
        own = [phase for phase in self.phases.values() if phase["model_of"].value is None]
        if own and self.trains:
            without = [phase for phase in own if not phase["optim_schedulers"].value]
            stepped = any(is_stepped(self.runner, phase) for phase in without)
            check_short_form(self.runner, needed=bool(without), stepped=stepped)

    def phase(self, phase: Setting) -> None:
        """Check one phase."""
        if phase["model_of"].value is not None:
            self.sharing(phase)
        else:
            check_model(self.runner, phase)
            self.optim_schedulers(phase)
        names = ("dataset_name", "valid_dataset_name")
        for name in (name for key in names for name in phase[key].references("dataset")):
            check_dataset(phase.inspection.settings("dataset")[name])
        if phase["dataset_name"].value is None and (self.trains or phase["valid_dataset_name"].value is None):
            phase["dataset_name"].fault("required key is missing; add `dataset_name:`, one of `dataset:`")
        if phase["updater"].is_mapping:
            check_updater(phase["updater"])
        for name, metric in phase["metrics"].entries():
            self.metric(name, metric)

    def sharing(self, phase: Setting) -> None:
        """A phase that trains the model of another one of this runner, and so has none of its own."""
        shared, name = phase["model_of"], phase.name
        other = shared.value
        if not isinstance(other, str):  # the schema says so
            return
        if other == name:
            shared.fault(f"'{other}' is this phase itself; name another, or a `model`")
        elif other not in phase.inspection.section("phase"):
            shared.fault(f"there is no phase '{other}'{one_of(other, [each for each in self.phases if each != name])}")
        elif other not in self.phases:
            remedy = "add it to the runner's `phases`, or name one of those"
            shared.fault(f"phase '{other}' is not run by runner '{self.runner.name}'; {remedy}")
        elif (first := self.phases[other]["model_of"].value) is not None:
            shared.fault(f"'{other}' has the model of '{first}'; name '{first}' itself")
        for key in OF_THE_MODEL:
            if phase[key].is_written and phase[key].value not in (None, {}):
                message = f"would be ignored: the model is that of phase '{other}'; remove it, or model_of"
                phase[key].fault(message, of_key=True)

    def optim_schedulers(self, phase: Setting) -> None:
        """The optimizers of a phase; the numbers of a validation reach them from each phase that shares the model."""
        around = Around(
            judged=self.judged(phase),
            losses=loss_names(self.runner, phase) if self.trains else None,
            stepped=self.trains and is_stepped(self.runner, phase),
            batches=self.batches(),
            accum_grad=self.runner["accum_grad"].value,
            epochs=self.runner["epochs"].value if self.runner["max_steps"].value is None else None,
        )
        for _, scheduler in phase["optim_schedulers"].entries():
            check_optim_scheduler(scheduler, around)

    def judged(self, phase: Setting) -> str | set[str] | None:
        """The numbers that a validation reports to the optimizers; what to do for one; None: cannot tell."""
        sharing = [phase, *(each for each in self.phases.values() if each["model_of"].value == phase.name)]
        validated = [each for each in sharing if each["valid_dataset_name"].value is not None]
        interval = self.runner["valid_interval"]
        if not validated:
            return "add valid_dataset_name to the phase"
        if interval.node and interval.value in (None, []):
            return "give the runner a valid_interval"
        if not has_default_runner(self.runner) or may_report(validated):
            return None
        return set.intersection(*map(reported, validated))

    def batches(self) -> int | None:
        """How many batches the only phase of a runner trains on, where the runner alone says so."""
        keys = ("epochs", "optimizer_step_limit", "debug")
        if len(self.phases) > 1 or not has_default_runner(self.runner) or any(self.runner[key].value for key in keys):
            return None
        most = self.runner["max_steps"].value
        return most if isinstance(most, int) else None

    def metric(self, name: str, metric: Setting) -> None:
        """One metric: ``{class, args}``."""
        if name == "loss":
            metric.fault("would replace the loss of the phase, which is reported by that name; give it another")
        path = metric.class_of("{class: AUC} or {class: …, args: {…}}")
        definition = path.find_class("Metric", module=METRICS)
        if definition and not isinstance(definition.node, source.ClassNode):
            path.fault(f"'{path.value}' is a function, not a class; name a class with update, compute and reset")
        elif definition:
            refuse_undefined(self.runner, path, definition, classes.undefined(definition, METRIC))
            metric["args"].check_call(definition, path)


def check_dataset(dataset: Setting) -> None:
    """A dataset that a phase names."""
    path = dataset["class_path"]
    if definition := path.find_class("Dataset"):
        dataset["args"].check_call(definition, path)
    for key, why in _WITH_WORKERS.items():
        if dataset[key].value and not dataset["num_workers"].value:
            dataset[key].fault(f"would be ignored: with num_workers: 0 {why}; remove it, or set num_workers")
    dataset["collate_fn"].find_class("collate")
